"""Program of the two-process test of rollouts: evaluates a fresh drafter split and alone, then trains with W&B offline."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from training import parts_of, rows_of, setup_of

from draftsmith.train import loop, strategy
from draftsmith.train.rollouts import Rollouts


def settings(ranks: str, **changes):
    train = dict(steps=2, rollout_every=2, rollout_prompts=5, rollout_tokens=10, validation_share=0.3, rollout_ranks=ranks)
    return parts_of(train=train | changes)


def main() -> None:
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    accelerator = strategy.build(settings("all", tracker="wandb").train, "cpu", output)
    for ranks in ("all", "main"):
        parts, folder = settings(ranks), output / ranks
        folder.mkdir(exist_ok=True)
        setup = setup_of(parts, rows_of(12), folder)
        found = Rollouts(parts.train, setup, accelerator, 0).run(0)
        for rank in (0, 1):
            if accelerator.process_index == rank:
                with (folder / "values.jsonl").open("a") as file:
                    file.write(json.dumps(found.metrics) + "\n")
            accelerator.wait_for_everyone()
    parts = settings("all", tracker="wandb")
    loop.run(
        cfg=parts.train, objective_cfg=parts.objective, setup=setup_of(parts, rows_of(12), output / "run"),
        accelerator=accelerator, output=output / "run", seed=0, run_config=parts.plain(), provenance={"versions": {}},
    )  # fmt: skip
    (output / f"done-{os.environ['RANK']}").write_text("")


if __name__ == "__main__":
    main()
