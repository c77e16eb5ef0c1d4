"""The tracker of a run: offline W&B needs no login and is complete, a resumed run goes on, and a failure is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb_file
from accelerate import Accelerator
from training import Breaking, Interrupted, parts_of, rows_of, setup_of

from draftsmith.train import config as config_module
from draftsmith.train import log as log_module
from draftsmith.train import loop
from draftsmith.train.config import TrainConfig, check_tracker
from draftsmith.train.log import TrainLog, wandb_mode

WANDB = dict(tracker="wandb", validation_share=0.3, rollout_every=3, rollout_prompts=3, rollout_tokens=10)


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """Nothing of this machine's W&B: no key, no netrc, no mode; and no interactive question would find an answer."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")
    yield
    os.environ.pop("WANDB_DATA_DIR", None)


def tracked(**train):
    return parts_of(train=dict(steps=6, checkpoint_every=3, eval_every=3) | WANDB | train)


def run(parts, setup, folder: Path, **more) -> Path:
    return loop.run(
        cfg=parts.train, objective_cfg=parts.objective, setup=setup, accelerator=Accelerator(cpu=True, log_with="wandb"),
        output=folder, seed=0, run_config=parts.plain(), provenance={"versions": {"torch": "x"}, "argv": ["a"]}, **more,
    )  # fmt: skip


def test_an_offline_run_is_complete(tmp_path: Path):
    parts, output = tracked(), tmp_path / "out"
    accepted = []
    run(parts, setup_of(parts, rows_of(12), output), output, accept=lambda path, drafter: accepted.append(path))
    (found,) = wandb_file.runs(output)
    assert found.exit_code == 0 and found.project == "draftsmith" and found.run_id == (output / "wandb_run_id").read_text()
    # config: the resolved recipe and where it comes from
    assert found.config["train.lr"] == parts.train.lr and found.config["objective.tv"] == parts.objective.tv
    assert found.config["target.name"] == "tiny" and found.config["provenance.versions.torch"] == "x"
    # history: one row a step, with everything of it
    assert found.steps == [1, 2, 3, 4, 5, 6]
    third, fourth = found.history[2], found.history[3]
    groups = {key.split("/")[0] for key in third if "/" in key}
    assert {"loss", "accept", "survival", "perf", "eval", "val", "optim"} <= groups
    assert "eval/tau_t1" in third and "eval/accept_1" in third and "eval/tau_t1" not in fourth
    lines = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    written = {}
    for line in lines:
        written.setdefault(line["step"], {}).update(line)
    for row in found.history:
        for key, value in written[row["_step"]].items():
            if key != "step":
                assert row[log_module.RENAMED.get(key, key)] == pytest.approx(value), key
    assert found.summary["loss/total"] == pytest.approx(written[6]["loss/total"])
    assert found.summary["eval/tau_t1"] == written[6]["eval/tau_t1"]
    # media: the table of answers and the chart by slot
    assert third["eval/rollouts"]["_type"] == "table-file" and third["eval/rollouts"]["ncols"] == 8
    media = sorted(output.glob("wandb/offline-run-*/files/media/table/eval/rollouts_*.table.json"))
    table = json.loads(media[0].read_text())
    assert table["columns"] == list(log_module.COLUMNS) and all(row[5] for row in table["data"])
    assert any("acceptance_by_slot" in key for key in third)
    # the drafter, after it was accepted, beside the run
    assert accepted == [output / "drafter"]
    (artifact,) = (artifact for artifact in found.artifacts if artifact.type == "model")  # tables are artifacts too
    assert artifact.name == "out-drafter"
    assert {Path(entry.path).name for entry in artifact.manifest.contents} >= {"config.json", "model.safetensors"}
    staged = [Path(entry.local_path) for entry in artifact.manifest.contents]
    assert all(path.is_file() and output in path.parents for path in staged)


def test_a_resumed_run_goes_on_with_the_same_curve(tmp_path: Path):
    parts, output = tracked(steps=9, checkpoint_every=3), tmp_path / "out"
    setup = setup_of(parts, rows_of(12), output)
    passes = 1 + len(setup.validation) // 2
    broken = setup_of(parts, rows_of(12), output, source=Breaking(setup.source, 5 + passes, "raise"))
    with pytest.raises(Interrupted):
        run(parts, broken, output)
    first = wandb_file.runs(output)[0]
    assert first.exit_code == 1, "an exception marks the run as failed"
    assert first.steps[-1] > 3
    run(parts, setup_of(parts, rows_of(12), output), output)
    runs = wandb_file.runs(output)
    assert len(runs) == 2 and len({found.run_id for found in runs}) == 1 and runs[1].exit_code == 0
    steps = [step for found in runs for step in found.steps]
    assert steps == list(range(1, 10)), "every step once, in order"
    lines = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss/total" in line] == list(range(1, 10))
    losses = {row["_step"]: row["loss/total"] for found in runs for row in found.history}
    for line in lines:
        if "loss/total" in line:
            assert losses[line["step"]] == pytest.approx(line["loss/total"], rel=1e-6)
    answers = [json.loads(line)["step"] for line in (output / "rollouts.jsonl").read_text().splitlines()]
    assert answers == sorted(answers) and set(answers) == {3, 6, 9}


def test_a_killed_run_leaves_all_committed_rows(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; from accelerate import Accelerator\n"
        "from draftsmith.train.config import TrainConfig; from draftsmith.train.log import TrainLog\n"
        "log = TrainLog(Accelerator(cpu=True, log_with='wandb'), TrainConfig(tracker='wandb'), Path(sys.argv[1]), {}, 0)\n"
        "for step in range(1, 21):\n    log.write(step, {'loss/total': float(step)}); log.commit()\n"
        "time.sleep(3); Path(sys.argv[1]).with_name('ready').write_text(''); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "train.jsonl")], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (found,) = wandb_file.runs(tmp_path, ended=False)
    assert found.exit_code is None and found.steps == list(range(1, 21)) and (tmp_path / "wandb_step").read_text() == "20"


def test_a_log_that_cannot_be_rewritten_stays_whole(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    path.with_name("train.jsonl.tmp").mkdir()  # as a full disk: the new file cannot be written
    with pytest.raises(OSError):
        log_module._truncate(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"st'
    path.with_name("train.jsonl.tmp").rmdir()
    log_module._truncate(path, 1)
    assert path.read_text() == '{"step": 1}\n' and [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]


def test_without_a_login_online_goes_offline_and_asks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked"))
    log = TrainLog(
        Accelerator(cpu=True, log_with="wandb"),
        TrainConfig(tracker="wandb", wandb_mode="online"),
        tmp_path / "train.jsonl",
        {},
        0,
    )
    log.write(1, {"loss/total": 2.5})
    log.close()
    log.close()
    assert wandb_file.runs(tmp_path)[0].steps == [1]
    assert (tmp_path / "train.jsonl").read_text() == '{"step": 1, "loss/total": 2.5}\n'
    assert len((tmp_path / "wandb_run_id").read_text()) == 8


def test_the_mode_follows_the_login_and_the_environment(tmp_path, monkeypatch):
    said = []
    assert wandb_mode("online", said.append) == "offline" and "no login" in said[0]
    assert wandb_mode("offline", said.append) == "offline" and len(said) == 1
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_mode("online", said.append) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode("online", said.append) == "offline", "a login at another host is none"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_mode("online", said.append) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("online", said.append) == "disabled"


def test_a_sweep_agent_names_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "abcd1234")
    with TrainLog(
        Accelerator(cpu=True, log_with="wandb"), TrainConfig(tracker="wandb"), tmp_path / "train.jsonl", {}, 0
    ) as log:
        log.write(1, {"loss/total": 1.0})
    assert wandb_file.runs(tmp_path)[0].run_id == "abcd1234"


def test_a_tracker_that_did_not_start_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train.tracker: 'wandb'"):
        TrainLog(Accelerator(cpu=True), TrainConfig(tracker="wandb"), tmp_path / "train.jsonl", {}, 0)


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(config_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="train.tracker: 'tensorboard' needs the package tensorboard.*pip install tensorboard"):
        check_tracker(TrainConfig(tracker="tensorboard"))
    check_tracker(TrainConfig(tracker="none"))


def test_tensorboard_gets_the_same(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    parts, output = tracked(tracker="tensorboard"), tmp_path / "out"
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(output / "tensorboard"))
    loop.run(
        cfg=parts.train, objective_cfg=parts.objective, setup=setup_of(parts, rows_of(12), output), accelerator=accelerator,
        output=output, seed=0, run_config=parts.plain(), provenance={"argv": None},
    )  # fmt: skip
    events = EventAccumulator(str(output / "tensorboard" / "draftsmith")).Reload()
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("eval/tau_t1")] == [3, 6]
    assert "eval/rollouts/text_summary" in events.Tags()["tensors"]
