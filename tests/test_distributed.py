"""One process, DDP, FSDP2 and ZeRO train the same drafter; a launch that is not what was asked for is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from launching import CONFIGS, command, environment, launch, text_of
from safetensors.torch import load_file
from strategy_worker import scenario
from test_train import assert_same
from training import log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.models.export import native
from draftsmith.recipes.load import read_yaml
from draftsmith.train import checkpoint, strategy
from draftsmith.train.config import TrainConfig

EQUAL = ("loss/total", "grad_norm", "lr", "accept/alpha_1", "accept/tau_expected")


def alone(name: str, folder: Path, **settings) -> Path:
    """The scenario with one process and twice the accumulation."""
    parts, rows = scenario(name, world=1, split=2, **settings)
    train(parts, setup_of(parts, rows, folder), folder)
    return folder


def assert_equal_curves(folder: Path, other: Path, *, after: int = 0) -> None:
    ours, theirs = ([line for line in log_of(path) if line["step"] > after] for path in (folder, other))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] and ours
    for a, b in zip(ours, theirs, strict=True):
        for key in EQUAL:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-5), (a["step"], key)


def assert_loads(folder: Path, path: Path) -> None:
    """The drafter at `path` loads beside the target and is the trained one of the run in `folder`."""
    target = tiny_target()
    drafter, _ = native.load(path, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    trained = load_file(folder / "drafter" / "model.safetensors")
    assert all(torch.equal(value, trained[name]) for name, value in drafter.state_dict().items())


def check(name: str, output: Path, tmp_path: Path) -> None:
    other = alone(name, tmp_path / f"{name}-alone")
    assert_equal_curves(output / name, other)
    assert_same(output / name, other, atol=1e-5)
    found = checkpoint.list_checkpoints(output / name / "checkpoints")
    assert_loads(output / name, found[-1] / "drafter")


# ---- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_ddp_trains_what_one_process_does(tmp_path: Path):
    names = ("curve", "mute", "accumulated", "no-survival", "stopped")
    done = launch("ddp", tmp_path / "two", *names)
    # Judged by what was written: the exit code is checked where it is the subject.
    for rank in (0, 1):
        marker = tmp_path / "two" / f"done-{rank}"
        assert marker.exists(), text_of(done)
        calls = json.loads(marker.read_text())
        assert (calls["curve"], calls["mute"]) == (20, 5), "every process takes every step, also without one assistant token"
        assert (tmp_path / "two" / f"stopped-{rank}").read_text() == "4", "the SIGTERM of process 1 stops both at one step"
    assert done.returncode == 0 and "strategy ddp, 2 process(es)" in done.stdout
    for name in names:
        check(name, tmp_path / "two", tmp_path)
    # A run of two processes goes on with one: the same rows in every step.
    moved = tmp_path / "curve-moved"
    (tmp_path / "two" / "curve").rename(moved)
    parts, rows = scenario("curve", world=1, split=2)
    start = moved / "checkpoints" / "step-0000010"
    train(parts, setup_of(parts, rows, moved), moved, resume=str(start))
    assert_equal_curves(moved, tmp_path / "curve-alone")
    assert [p.name for p in checkpoint.list_checkpoints(moved / "checkpoints")][-1] == "step-0000020"
    parts, rows = scenario("curve", world=1)
    with pytest.raises(ValueError, match=r"a step of that run has 2 rows .* this one 1 on 1 process.*train.global_rows=2"):
        train(parts, setup_of(parts, rows, moved), moved)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["fsdp2", "zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2"))]
)
def test_sharded_strategies_train_what_one_process_does(tmp_path: Path, name: str):
    done = launch(name, tmp_path / "two", "curve", "mute", "no-survival")
    for rank in (0, 1):
        marker = tmp_path / "two" / f"done-{rank}"
        assert marker.exists(), text_of(done)
        assert json.loads(marker.read_text()) == {"curve": 20, "mute": 5, "no-survival": 3}
    assert f"strategy {name}, 2 process(es)" in done.stdout
    for part in ("curve", "mute", "no-survival"):
        check(part, tmp_path / "two", tmp_path)


@pytest.mark.distributed
def test_a_process_that_fails_ends_the_job_with_its_cause_first(tmp_path: Path):
    done = launch("ddp", tmp_path, "failing")
    assert time.time() - float((tmp_path / "failed-at").read_text()) < 60 and done.returncode != 0
    assert "process 1 failed:" in done.stderr and "KeyError: 'a fault in the data of process 1'" in done.stderr
    first = done.stderr.index("Traceback")
    assert "process 0 failed" not in done.stderr[:first] and "KeyError" in done.stderr[first : first + 3000]
    assert "Root Cause" in done.stderr and not list(tmp_path.glob("done-*"))


# ---- what was asked for ---------------------------------------------------------------------------------------------


def launched_by(monkeypatch, **environment: str) -> None:
    for key in [*os.environ]:
        if key.startswith(("ACCELERATE_", "FSDP_")) or key in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        (
            dict(),
            dict(expected_world_size=2),
            r"train.expected_world_size: 2, but 1 process\(es\) run \(one\); .*path",
        ),
        (dict(WORLD_SIZE="2"), dict(), r"the launcher started 2 processes, but this one trains in a group of 1 \(one\)"),
        (dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"), dict(), r"the launcher: fsdp2, but the run would be one on 1"),
        (dict(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3"), dict(), "the launcher: zero3, but .* one"),
        (dict(), dict(expected_strategy="ddp"), r"train.expected_strategy: ddp, but the run would be one on 1 process\(es\)"),
    ],
    ids=str,
)
def test_a_launch_that_fell_back_silently_is_refused(tmp_path: Path, monkeypatch, environment, settings, message):
    launched_by(monkeypatch, **environment)
    parts = parts_of(train=settings)
    with pytest.raises(ValueError, match=message):
        train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path, Accelerator(cpu=True))
    assert not (tmp_path / "checkpoints").exists()


def test_a_plain_launch_is_one_process(tmp_path: Path, monkeypatch):
    launched_by(monkeypatch)
    found = strategy.build(TrainConfig(expected_world_size=1, expected_strategy="one"), "cpu", tmp_path)
    assert strategy.launched() == strategy.engaged(found) == "one" and found.device.type == "cpu"
    launched_by(monkeypatch, ACCELERATE_USE_FSDP="true")
    assert strategy.launched() == "fsdp1"


def test_the_rows_of_a_step_fix_the_accumulation():
    cfg = TrainConfig(rows=2, accumulation=5, global_rows=16)
    assert [strategy.resolved(cfg, world).accumulation for world in (1, 2, 8)] == [8, 4, 1]
    assert strategy.resolved(TrainConfig(rows=2, accumulation=5), 8).accumulation == 5
    with pytest.raises(
        ValueError, match=r"train.global_rows: 16 is not allowed; it must be a multiple of 6 \(train.rows 2 on 3"
    ):
        strategy.resolved(cfg, 3)
    with pytest.raises(ValueError, match="train.global_rows: is not allowed with train.packing packed"):
        strategy.resolved(TrainConfig(packing="packed", global_rows=16), 2)


@pytest.mark.parametrize("name", ["one", "ddp", "fsdp2", "zero1", "zero2", "zero3", "two-node"])
def test_launch_configs_are_shipped_and_agree_with_their_cpu_forms(name: str):
    shipped = read_yaml(CONFIGS.parent / f"{name}.yaml")
    assert shipped["mixed_precision"] == "no" and shipped["num_machines"] == (2 if name == "two-node" else 1)
    if name == "one":
        assert shipped["num_processes"] == 1
        return
    ours = read_yaml(CONFIGS / f"{name}.yaml")
    for key in ("gpu_ids", "num_processes", "use_cpu"):
        shipped.pop(key, None), ours.pop(key, None)
    assert shipped == ours


# ---- the embedded target with real data -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process_on_the_target(tmp_path_factory) -> Path:
    """Twenty steps of the smoke recipe with one process, on answers of the embedded target."""
    folder = tmp_path_factory.mktemp("target") / "one"
    subprocess.run(
        [sys.executable, "-m", "draftsmith.train", *on_target(folder)], check=True, capture_output=True, env=environment(),
        timeout=1200,
    )  # fmt: skip
    return folder


def on_target(folder: Path) -> list[str]:
    settings = ("steps=20", "rows=1", "global_rows=2", "precision=fp32", "log_every=1", "eval_every=0", "checkpoint_every=20")
    return ["smoke", f"output={folder}", *(f"train.{text}" for text in settings)]


@pytest.mark.slow
@pytest.mark.target
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_strategies_are_equal_on_the_embedded_target(tmp_path: Path, one_process_on_the_target: Path, name: str):
    folder = tmp_path / name
    shutil.copytree(one_process_on_the_target, folder)
    for made in ("checkpoints", "drafter"):
        shutil.rmtree(folder / made)
    (folder / "train.jsonl").unlink()
    given = (*on_target(folder), "train.expected_world_size=2", f"train.expected_strategy={name}")
    line = command(name, "-m", "draftsmith.train", *given)
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment(), timeout=1200)
    assert f"strategy {name}, 2 process(es)" in done.stdout and "parity gate: passed" in done.stdout, text_of(done)
    ours, theirs = log_of(folder), log_of(one_process_on_the_target)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    worst = max(abs(a["loss/total"] - b["loss/total"]) for a, b in zip(ours, theirs, strict=True) if "loss/total" in a)
    assert worst < 1e-5
