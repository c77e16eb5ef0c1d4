"""The tracker of a run: offline W&B works without a login, and a tracker that never started is an error."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from draftsmith.train.config import TrainConfig
from draftsmith.train.log import TrainLog


def test_wandb_without_a_login_goes_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc either
    accelerator = Accelerator(cpu=True, log_with="wandb")
    cfg = TrainConfig(tracker="wandb", wandb_mode="online")
    log = TrainLog(accelerator, cfg, tmp_path / "train.jsonl", {"train": {"lr": 1e-3}}, 0)
    log.write(1, {"loss/total": 2.5})
    log.close()
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert (tmp_path / "train.jsonl").read_text() == '{"step": 1, "loss/total": 2.5}\n'
    assert len((tmp_path / "wandb_run_id").read_text()) == 8


def test_a_tracker_that_did_not_start_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train.tracker: 'wandb'"):
        TrainLog(Accelerator(cpu=True), TrainConfig(tracker="wandb"), tmp_path / "train.jsonl", {}, 0)
