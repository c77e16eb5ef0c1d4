"""Program of the distributed tests: trains scenarios under the strategy of the launch. Run by `accelerate launch`.

    strategy_worker.py OUTPUT STRATEGY SCENARIO...

A scenario is NAME or NAME:key=value,... with settings of the training section (and die_in_save, a step). Writes OUTPUT/NAME
and, at the end, OUTPUT/done-RANK with the number of batches that this process took in each scenario.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from training import parts_of, rows_of, setup_of, train

from draftsmith.data.chat import TokenRow
from draftsmith.train import checkpoint, failure, strategy
from draftsmith.train.config import TrainConfig

MUTE = TokenRow("mute", "chat", [7] * 40, [False] * 40)  # longer than any other row: always the last process's
# World 2 with one row a process. A row count that 2 does not divide leaves process 1 without a row once an epoch.
SCENARIOS: dict[str, dict[str, Any]] = {
    "curve": dict(rows=9, steps=20),
    "mute": dict(rows=1, steps=5),
    "accumulated": dict(rows=4, steps=3, accumulation=2),
    "no-survival": dict(rows=3, steps=3, objective=dict(survival=0.0)),  # the survival head gets no gradient
    "stopped": dict(rows=9, steps=10),
    "failing": dict(rows=9, steps=10),
    "killed": dict(rows=9, steps=10),
}


def scenario(name: str, *, world: int, split: int = 1, **settings: Any):
    """(parts, rows): the same run whatever world * split is."""
    found = dict(SCENARIOS[name])
    rows, objective = found.pop("rows"), found.pop("objective", {})
    accumulation = found.pop("accumulation", 1) * split
    base = dict(rows=1, accumulation=accumulation, expected_world_size=world, warmup=0.1, checkpoint_every=5, keep_last=9)
    parts = parts_of(train=base | found | settings, objective=objective, drafter=dict(head="rnn", num_layers=2, block_size=4))
    return parts, rows_of(rows, seed=5) + ([MUTE] if name == "mute" else [])


class Watched:
    """A feature source that counts its calls, and on process 1 fails or asks for an end at the 4th."""

    def __init__(self, inner, name: str, output: Path) -> None:
        self.inner, self.name, self.output, self.calls = inner, name, output, 0

    def features(self, batch, rows):
        self.calls += 1
        if self.calls == 4 and os.environ.get("RANK") == "1":
            if self.name == "failing":
                (self.output / "failed-at").write_text(str(time.time()))
                raise KeyError("a fault in the data of process 1")
            if self.name == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
        return self.inner.features(batch, rows)


def die_in_save(step: int) -> None:
    """SIGKILL of the main process in the middle of writing the checkpoint of `step`."""
    original = checkpoint.Saver._write_drafter

    def dying(self, temporary: Path, state) -> None:
        if temporary.name == f"step-{step:07d}.tmp":
            (temporary / "half").write_bytes(b"x" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, temporary, state)

    checkpoint.Saver._write_drafter = dying


def run_scenario(text: str, output: Path, accelerator) -> int:
    """Train one scenario; returns the number of batches taken."""
    name, _, given = text.partition(":")
    settings = {key: json.loads(value) for key, value in (item.split("=") for item in given.split(",") if given)}
    if "die_in_save" in settings:
        die_in_save(settings.pop("die_in_save"))
    parts, rows = scenario(name, world=accelerator.num_processes, **settings)
    source = Watched(setup_of(parts, rows, output / name).source, name, output)
    try:
        train(parts, setup_of(parts, rows, output / name, source=source), output / name, accelerator)
    except failure.Stopped as stopped:
        (output / f"stopped-{accelerator.process_index}").write_text(str(stopped.step))
        if name != "stopped":
            failure.finish(accelerator)
            raise
        accelerator.free_memory()
        train(parts, setup_of(parts, rows, output / name), output / name, accelerator)
    accelerator.free_memory()
    return source.calls


def main() -> None:
    torch.set_num_threads(1)
    output, name, *scenarios = sys.argv[1:]
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    accelerator = strategy.build(TrainConfig(expected_world_size=world, expected_strategy=name), "cpu", Path(output))
    with failure.whole_job(accelerator):
        calls = {text: run_scenario(text, Path(output), accelerator) for text in scenarios}
        (Path(output) / f"done-{rank}").write_text(json.dumps(calls))
    failure.finish(accelerator)


if __name__ == "__main__":
    main()
