"""Program of the two-process test: trains every scenario into its folder. Run by `accelerate launch`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from training import parts_of, rows_of, setup_of, train

# World 2 with one row a process; every step is one epoch, so that any split trains on the same rows and anchors.
SCENARIOS = {
    "accumulated": dict(rows=4, accumulation=2, objective={}),
    "idle-rank": dict(rows=3, accumulation=2, objective={}),  # rank 1 has no row in one batch of each epoch
    "no-survival": dict(rows=3, accumulation=2, objective=dict(survival=0.0)),  # the survival head gets no gradient
}


def scenario(name: str, *, accumulation: int, world: int):
    """(parts, rows) of a scenario under another split."""
    found = SCENARIOS[name]
    parts = parts_of(
        objective=found["objective"],
        train=dict(steps=3, rows=1, accumulation=accumulation, expected_world_size=world, warmup=0.0, lr=1e-3),
    )
    return parts, rows_of(found["rows"], seed=5)


def main() -> None:
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    for name, settings in SCENARIOS.items():
        parts, rows = scenario(name, accumulation=settings["accumulation"], world=2)
        train(parts, setup_of(parts, rows, output / name), output / name)
    (output / f"done-{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
