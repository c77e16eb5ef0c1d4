"""Shipped sweeps: what W&B's agent would start is a valid command line of ours, in a folder of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from draftsmith.recipes.schema import load_recipe

SWEEPS = sorted((Path(__file__).parent.parent / "recipes" / "sweeps").glob("*.yaml"))


def started(sweep: Path, trial: dict, tmp_path: Path) -> list[str]:
    """Arguments that `draftsmith` gets from the agent's command, expanded by W&B's own code and run by the shell."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    config = yaml.safe_load(sweep.read_text())
    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in trial.items()}})
    command: list[str] = []
    for part in create_sweep_command(config["command"]):
        name = part.removeprefix("${").removesuffix("}")
        command += macros[name] if part.startswith("${") and name in macros else [part]
    spy = tmp_path / "draftsmith"
    spy.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    spy.chmod(0o755)
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "WANDB_RUN_ID": "abc123"}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.stem)
def test_a_trial_is_a_valid_command(sweep: Path, tmp_path: Path):
    config = yaml.safe_load(sweep.read_text())
    trial = {}
    for key, values in config["parameters"].items():
        trial[key] = values["values"][-1] if "values" in values else values["max"]
    command, recipe, *overrides = started(sweep, trial, tmp_path)
    assert command == "train"
    loaded = load_recipe(recipe, overrides).value
    assert loaded.output == "outputs/sweeps/abc123" and loaded.train.tracker == "wandb"
    for key, value in trial.items():
        section, name = key.split(".")
        assert getattr(getattr(loaded, section), name) == pytest.approx(value)
    metric = config["metric"]["name"]
    temperatures = {f"eval/tau_t{t:g}" for t in loaded.train.rollout_temperatures}
    assert metric in temperatures and loaded.train.rollout_every > 0, "the trials log what the sweep maximises"


def test_overrides_may_be_options(monkeypatch):
    from draftsmith.cli import app, pipeline

    seen = []
    monkeypatch.setattr(pipeline, "train", lambda recipe, overrides, device, **more: seen.append((recipe, overrides)))
    with pytest.raises(SystemExit):
        app.main(["train", "quickstart", "train.lr=1e-3", "--set", "seed=2", "--set", "train.rows=3"])
    assert seen == [("quickstart", ["train.lr=1e-3", "seed=2", "train.rows=3"])]
