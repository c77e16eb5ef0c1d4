"""Write `train.jsonl` and `heldout.jsonl` beside this file: `python -m draftsmith.data.prompts.build`.

Deterministic: every draw is seeded by the name of its family, so a change in one family leaves the others alone.
"""

import json
import random
import sys
from pathlib import Path

from . import chat_train, code_train, heldout_chat, heldout_code, heldout_math, heldout_rewrite, math_train, rewrite_train
from .families import MAX_FAMILY, Families

FOLDER = Path(__file__).parent
DOMAINS = ("code", "math", "chat", "rewrite")
TRAIN = {"code": code_train, "math": math_train, "chat": chat_train, "rewrite": rewrite_train}
HELDOUT = {"code": heldout_code, "math": heldout_math, "chat": heldout_chat, "rewrite": heldout_rewrite}


def balanced(families: Families, seed: str) -> list[tuple[str, str]]:
    """(family, prompt) pairs in an order in which every prefix holds each family in proportion to its size."""
    rng = random.Random(seed)
    placed = []
    for name, prompts in families.items():
        assert 0 < len(prompts) <= MAX_FAMILY, f"family {name} has {len(prompts)} prompts"
        order = list(prompts)
        rng.shuffle(order)
        # Row i of n lands at a random point of the i-th of n equal strips of the file.
        placed += [((i + rng.random()) / len(order), name, prompt) for i, prompt in enumerate(order)]
    return [(name, prompt) for _, name, prompt in sorted(placed)]


def rows(modules: dict, prefix: str) -> list[dict]:
    """All rows of one set, the domains interleaved in proportion to their sizes."""
    placed = []
    for rank, domain in enumerate(DOMAINS):
        pairs = balanced(modules[domain].families(), f"{prefix}{domain}")
        for i, (family, prompt) in enumerate(pairs):
            row = {"id": f"{prefix}{domain}-{i + 1:04d}", "domain": domain, "family": family, "turns": [prompt]}
            placed.append((i / len(pairs), rank, row))
    return [row for _, _, row in sorted(placed, key=lambda place: place[:2])]


def render(split: str) -> str:
    """The text of `train.jsonl` (`split="train"`) or `heldout.jsonl` (`split="heldout"`)."""
    chosen = rows(TRAIN, "") if split == "train" else rows(HELDOUT, "heldout-")
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)


def main() -> None:
    """Write both files and print their sizes."""
    for split in ("train", "heldout"):
        text = render(split)
        (FOLDER / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        sys.stdout.write(f"{split}.jsonl: {text.count(chr(10))} rows\n")


if __name__ == "__main__":
    main()
