"""Launches of several processes on the CPU, by the shipped CPU forms of the launch configs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import draftsmith.recipes

CONFIGS = Path(draftsmith.recipes.__file__).parent / "accelerate" / "cpu"
WORKER = Path(__file__).with_name("strategy_worker.py")


def command(config: str, *arguments: str, processes: int | None = None, options: tuple[str, ...] = ()) -> list[str]:
    """`accelerate launch` of the worker under a CPU form."""
    count = [] if processes is None else ["--num_processes", str(processes)]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    return [*start, *count, *options, *arguments]


def environment() -> dict[str, str]:
    """One thread a process, and nothing inherited of a launcher."""
    left_out = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    return {**kept, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def launch(strategy: str, output: Path, *scenarios: str, timeout: float = 400, **options) -> subprocess.CompletedProcess:
    """Scenarios of strategy_worker.py under a strategy; returns when the launcher has ended."""
    output.mkdir(exist_ok=True)
    for marker in output.glob("done-*"):
        marker.unlink()
    line = command(strategy, str(WORKER), str(output), options.pop("expect", strategy), *scenarios, **options)
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False, env=environment())


def text_of(done: subprocess.CompletedProcess) -> str:
    """What a launch printed, for messages of failed tests."""
    return done.stdout[-3000:] + done.stderr[-6000:]
