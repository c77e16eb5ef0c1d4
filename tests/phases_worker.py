"""Program of the two-process test of phases: parts that one phase does not train, and answers drawn by both ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from training import parts_of, rows_of, setup_of, train

# Every step is one epoch of two rows, so that any split trains on the same rows and anchors.
SCENARIOS: dict[str, tuple[dict[str, Any], ...]] = {
    "unused": (dict(until=0.4, survival=0.0), dict(until=0.7, kl=0.0, tv=0.0, detach_survival=True), dict(until=1.0)),
    "on-policy": (dict(until=0.4), dict(until=1.0, on_policy=True, exact=1.0)),
}


def scenario(name: str, *, world: int):
    """(parts, rows) of a scenario on `world` processes."""
    parts = parts_of(
        objective=dict(phases=SCENARIOS[name]),
        train=dict(
            steps=7, rows=1, accumulation=2 // world, expected_world_size=world, warmup=0.0, lr=1e-3, on_policy_every=2,
            on_policy_prompts=2, on_policy_tokens=12,
        ),
    )  # fmt: skip
    return parts, rows_of(2, seed=5)


def stored_answers(folder: Path) -> dict[str, Any]:
    """The answers that a run has stored."""
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "on_policy").glob("step-*.json"))}


def main() -> None:
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    for name in SCENARIOS:
        parts, rows = scenario(name, world=2)
        train(parts, setup_of(parts, rows, output / name), output / name)
    (output / f"done-{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
