"""Checkpoints: exact resume, what survives a kill, a full disk or SIGTERM, and what a run refuses to go on from."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import WORKER, command, environment, launch, text_of
from safetensors.torch import load_file
from strategy_worker import scenario
from test_distributed import alone, assert_loads
from test_train import assert_same
from training import Interrupted, log_of, parts_of, rows_of, setup_of, train

from draftsmith.train import checkpoint
from draftsmith.train.failure import Stopped

ROWS = rows_of(6)


def settings(**train_settings):
    base = dict(steps=6, checkpoint_every=2, keep_last=2)
    return parts_of(train=base | train_settings, drafter=dict(head="rnn"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


class At:
    """A feature source that does something at its n-th call (from 1)."""

    def __init__(self, inner, call: int, act) -> None:
        self.inner, self.call, self.act, self.calls = inner, call, act, 0

    def features(self, batch, rows):
        self.calls += 1
        if self.calls == self.call:
            self.act()
        return self.inner.features(batch, rows)


def run(parts, folder: Path, *, at: tuple[int, object] | None = None, **options) -> Path:
    setup = setup_of(parts, ROWS, folder)
    if at is not None:
        setup = setup_of(parts, ROWS, folder, source=At(setup.source, *at))
    return train(parts, setup, folder, **options)


def interrupt() -> None:
    raise Interrupted


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_holds_all_states_and_a_drafter_that_loads(tmp_path: Path, background: bool):
    run(settings(async_checkpoints=background), tmp_path)
    assert names(tmp_path) == ["step-0000004", "step-0000006"]
    last = tmp_path / "checkpoints" / "step-0000006"
    assert {path.name for path in last.iterdir()} == {"drafter", "meta.json", "model.safetensors", "optimizer.pt", "rng-0.pt"}
    assert_loads(tmp_path, last / "drafter")
    meta = json.loads((last / "meta.json").read_text())
    assert (meta["step"], meta["world_size"], meta["strategy"]) == (6, 1, "one")
    assert meta["identity"]["step_size"] == 2 and "rows" not in meta["identity"]["train"]
    record = json.loads((last / "drafter" / "draftsmith.json").read_text())
    assert record["recipe"]["train"]["steps"] == 6 and "identity" not in record
    optimizer = torch.load(last / "optimizer.pt")
    assert all(value["exp_avg"].dtype == torch.float32 for value in optimizer["state"].values())


def test_background_saves_hold_the_step_they_were_made_at(tmp_path: Path):
    # Training goes on while they are written: the copy must not follow it.
    for name, background in (("a", True), ("b", False)):
        run(settings(async_checkpoints=background, checkpoint_every=1, keep_last=9), tmp_path / name)
    for step in range(1, 7):
        ours, theirs = (tmp_path / name / "checkpoints" / f"step-{step:07d}" for name in "ab")
        for file in ("model.safetensors", "drafter/model.safetensors"):
            a, b = load_file(ours / file), load_file(theirs / file)
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), (step, file)
        a, b = (torch.load(folder / "optimizer.pt")["state"] for folder in (ours, theirs))
        assert all(torch.equal(a[i][key], b[i][key]) for i in a for key in a[i])


def test_the_best_checkpoint_is_kept(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    run(settings(checkpoint_every=1, keep_last=9), tmp_path)
    assert checkpoint.best(folder) is None
    assert checkpoint.mark_best(folder, 2, 1.5) and not checkpoint.mark_best(folder, 3, 1.4)
    checkpoint.prune(folder, 2)
    assert names(tmp_path) == ["best.json", "step-0000002", "step-0000005", "step-0000006"]
    assert checkpoint.best(folder) == (folder / "step-0000002", 1.5)
    assert checkpoint.mark_best(folder, 5, 1.5), "of equal ones the later"
    checkpoint.prune(folder, 1)
    assert names(tmp_path) == ["best.json", "step-0000005", "step-0000006"]


# ---- interruptions --------------------------------------------------------------------------------------------------


def test_sigterm_saves_and_the_run_goes_on(tmp_path: Path):
    parts = settings(checkpoint_every=100)
    run(parts, tmp_path / "a")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run(parts, tmp_path / "b", at=(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert stopped.value.code == 0 and stopped.value.step == 3 and "saved after step 3" in str(stopped.value)
    assert signal.getsignal(signal.SIGTERM) is before
    assert names(tmp_path / "b") == ["step-0000003"] and not (tmp_path / "b" / "drafter").exists()
    run(parts, tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


def test_sigterm_in_the_last_step_ends_the_run_as_usual(tmp_path: Path):
    run(settings(steps=2), tmp_path, at=(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (tmp_path / "drafter").is_dir()


def test_every_random_state_is_restored(tmp_path: Path):
    """The next draws of Python, NumPy and PyTorch after a resume are those of the uninterrupted run."""
    import numpy as np

    drawn: dict[str, list[float]] = {}

    def draw(name: str):
        def act() -> None:
            drawn[name] = [random.random(), float(np.random.rand()), float(torch.rand(()))]

        return act

    run(settings(prefetch=False), tmp_path / "a", at=(5, draw("a")))
    with pytest.raises(Interrupted):
        run(settings(prefetch=False), tmp_path / "b", at=(5, interrupt))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    run(settings(prefetch=False), tmp_path / "b", at=(1, draw("b")))  # step 5 is the first after the checkpoint
    assert drawn["a"] == drawn["b"]


def test_a_disk_that_is_full_stops_the_run_with_the_last_checkpoint_intact(tmp_path: Path):
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as for a full disk, writing then raises

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))

    try:
        with pytest.raises(
            RuntimeError, match=r"checkpoint: cannot be written below .*the last complete one is .*step-0000002"
        ):
            run(settings(), tmp_path, at=(4, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["step-0000002"], "what was half written gave its space back"
    run(settings(), tmp_path)
    run(settings(), tmp_path / "other")
    assert_same(tmp_path, tmp_path / "other")


def test_a_disk_that_is_full_before_the_first_byte_is_the_same_clear_error(tmp_path: Path, monkeypatch):
    """The random state and the folder are written beside the training, before the background thread."""

    def no_space() -> None:
        monkeypatch.setattr(torch, "save", full)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with pytest.raises(RuntimeError, match=r"checkpoint: cannot be written below .*No space left.*step-0000002"):
        run(settings(), tmp_path, at=(4, no_space))
    assert names(tmp_path) == ["step-0000002"]


def test_what_a_kill_left_half_written_is_removed_on_resume(tmp_path: Path):
    run(settings(steps=2), tmp_path)
    for torn in ("step-0000003.tmp", "step-0000002.old.tmp"):
        (tmp_path / "checkpoints" / torn).mkdir()
    run(settings(steps=2), tmp_path)
    assert names(tmp_path) == ["step-0000002"]


# ---- what a run goes on from ----------------------------------------------------------------------------------------


def test_a_run_starts_anew_or_from_a_named_checkpoint(tmp_path: Path):
    parts = settings(keep_last=9)
    run(parts, tmp_path / "a")
    third = tmp_path / "a" / "checkpoints" / "step-0000004"
    run(parts, tmp_path / "b", resume=str(third))
    assert [line["step"] for line in log_of(tmp_path / "b")] == [5, 6]
    assert_same(tmp_path / "a", tmp_path / "b")
    run(parts, tmp_path / "a", resume=str(third))
    assert names(tmp_path / "a") == ["aside-step-0000006", "step-0000002", "step-0000004", "step-0000006"]
    run(parts, tmp_path / "a", resume="none")
    assert [line["step"] for line in log_of(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]
    assert "aside-step-0000002" in names(tmp_path / "a")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_launch_settings_may_change_and_the_recipe_may_not(tmp_path: Path):
    with pytest.raises(Interrupted):
        run(settings(), tmp_path, at=(4, interrupt))
    with pytest.raises(ValueError, match=r"step-0000002: made with other settings \(train.lr 0.002 -> 0.001\)"):
        run(settings(lr=1e-3), tmp_path)
    with pytest.raises(ValueError, match=r"step of that run has 2 rows .* this one 4 on 1 process\(es\)"):
        run(settings(accumulation=2), tmp_path)
    run(settings(rows=1, global_rows=2, checkpoint_every=1, log_every=1, keep_last=1, expected_world_size=1), tmp_path)
    run(settings(), tmp_path / "other")
    assert_same(tmp_path, tmp_path / "other", atol=1e-5)
    assert names(tmp_path) == ["step-0000006"]


def test_the_tracker_id_travels_with_the_checkpoint(tmp_path: Path):
    tmp_path.joinpath(checkpoint.RUN_ID).write_text("abc123")
    run(settings(), tmp_path)
    other = tmp_path / "other"
    run(settings(), other, resume=str(tmp_path / "checkpoints" / "step-0000004"))
    assert (other / checkpoint.RUN_ID).read_text() == "abc123"


def test_what_a_strategy_cannot_load_is_refused(tmp_path: Path):
    def refused(saved: tuple[str, int], now: tuple[str, int], match: str | None) -> None:
        meta = {"identity": {"train": {}, "step_size": 4}, "strategy": saved[0], "world_size": saved[1]}
        engine = SimpleNamespace(strategy=now[0], accelerator=SimpleNamespace(num_processes=now[1]))
        arguments = (tmp_path / "step-1", meta, {"train": {}, "step_size": 4}, engine, lambda recipe: recipe)
        if match is None:
            checkpoint._check(*arguments)
        else:
            with pytest.raises(ValueError, match=match):
                checkpoint._check(*arguments)

    refused(("ddp", 2), ("one", 1), None)
    refused(("one", 1), ("ddp", 4), None)
    refused(("fsdp2", 2), ("fsdp2", 1), None)
    refused(("zero2", 2), ("zero2", 2), None)
    refused(
        ("zero3", 2), ("zero3", 1), "load on as many processes as saved them: 2, not 1; .*drafter.checkpoint=.*step-1/drafter"
    )
    refused(("ddp", 2), ("fsdp2", 2), "saved under ddp, this launch is fsdp2; .*drafter.init=checkpoint")
    refused(("zero1", 2), ("zero2", 2), "saved under zero1, this launch is zero2")


def test_only_complete_checkpoints_are_resumed(tmp_path: Path):
    (tmp_path / "step-0000009.tmp").mkdir()
    (tmp_path / "step-0000009.tmp" / "meta.json").write_text("{}")
    (tmp_path / "step-0000008").mkdir()
    assert checkpoint.list_checkpoints(tmp_path) == []
    for path in ("step-0000009.tmp", "step-0000008", "nothing"):
        with pytest.raises(ValueError, match="--resume: .* is no complete checkpoint"):
            checkpoint.read_meta(tmp_path / path)


# ---- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_kill_in_the_middle_of_a_save_costs_no_more_than_the_save(tmp_path: Path, name: str):
    kept = alone("killed", tmp_path / "alone") if name != "ddp" else None
    broken = tmp_path / "broken"
    done = launch(name, broken, "killed:checkpoint_every=5,die_in_save=5")
    assert done.returncode != 0 and not list(broken.glob("done-*")), text_of(done)
    assert [path.suffix for path in (broken / "killed" / "checkpoints").iterdir()] == [".tmp"], "saved, and torn"
    done = launch(name, broken, "killed:checkpoint_every=3,die_in_save=6")
    assert [path.name for path in checkpoint.list_checkpoints(broken / "killed" / "checkpoints")] == ["step-0000003"], text_of(
        done
    )
    done = launch(name, broken, "killed")
    assert len(list(broken.glob("done-*"))) == 2 and "steps 3 -> 10" in done.stdout, text_of(done)
    if kept is None:
        launch(name, tmp_path / "whole", "killed")
        assert_same(tmp_path / "whole" / "killed", broken / "killed")  # bit by bit
    else:
        assert_same(kept, broken / "killed", atol=1e-5)
        launch(name, tmp_path / "whole", "killed")
        assert_same(tmp_path / "whole" / "killed", broken / "killed", atol=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_fsdp2_goes_on_with_another_number_of_processes_and_zero_says_no(tmp_path: Path):
    assert launch("fsdp2", tmp_path / "f", "failing").returncode != 0  # process 1 fails in step 4
    done = launch("fsdp2", tmp_path / "g", "killed:checkpoint_every=3,die_in_save=6")
    done = launch("fsdp2", tmp_path / "g", "killed:accumulation=2", processes=1)
    assert "goes on with 1: the same rows in every step" in done.stdout and list((tmp_path / "g").glob("done-0")), text_of(done)
    assert_same(alone("killed", tmp_path / "alone"), tmp_path / "g" / "killed", atol=1e-5)
    launch("zero2", tmp_path / "z", "killed:checkpoint_every=3,die_in_save=6")
    done = launch("zero2", tmp_path / "z", "killed:accumulation=2", processes=1)
    assert done.returncode == 2 or "load on as many processes as saved them: 2, not 1" in done.stderr, text_of(done)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path: Path):
    steps, interval = 400, 5
    parts, rows = scenario("killed", world=1, steps=steps, checkpoint_every=interval, keep_last=2)
    train(parts, setup_of(parts, rows, tmp_path / "whole"), tmp_path / "whole")
    folder, draws, kills = tmp_path / "run" / "killed", random.Random(0), 0
    line = [
        sys.executable,
        str(WORKER),
        str(tmp_path / "run"),
        "one",
        f"killed:steps={steps},checkpoint_every={interval},keep_last=2",
    ]
    (tmp_path / "run").mkdir()
    log = folder / "train.jsonl"
    while kills < 20:
        lines = log.read_text().count("\n") if log.exists() else 0
        process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        while time.monotonic() - began < 120 and process.poll() is None:  # until it trains
            if log.exists() and log.read_text().count("\n") > lines - interval:
                break
            time.sleep(0.05)
        time.sleep(draws.uniform(0.0, 0.4))
        finished = process.poll() is not None
        process.kill()
        process.wait()
        if finished:
            break
        kills += 1
        found = checkpoint.list_checkpoints(folder / "checkpoints")
        done = max([json.loads(text)["step"] for text in log.read_text().splitlines() if text.endswith("}")], default=0)
        saved = int(found[-1].name.removeprefix("step-")) if found else 0
        assert 0 <= done - saved <= interval, (kills, done, saved)
        if found:
            load_file(found[-1] / "model.safetensors"), torch.load(found[-1] / "optimizer.pt")
            assert checkpoint.read_meta(found[-1])["step"] == saved
    subprocess.run(line, env=environment(), check=True, timeout=300, capture_output=True)
    assert_same(tmp_path / "whole", folder)
    assert kills == 20


@pytest.mark.slow
@pytest.mark.distributed
def test_a_launcher_that_is_terminated_leaves_a_saved_run(tmp_path: Path):
    line = command("ddp", str(WORKER), str(tmp_path), "ddp", "killed:steps=400,checkpoint_every=1000")
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(line, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        log = tmp_path / "killed" / "train.jsonl"
        while not (log.exists() and log.read_text().count("\n") > 5):
            assert process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        process.terminate()
        process.wait(timeout=60)
    assert len(checkpoint.list_checkpoints(tmp_path / "killed" / "checkpoints")) == 1, (tmp_path / "out").read_text()
    assert len({(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)}) == 1
