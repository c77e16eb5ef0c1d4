"""Coverage of reduced draft vocabularies by size, with advice: `draftsmith data vocab`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import vocab
from .vocab import Sample

GOOD = 0.99  # coverage that costs next to nothing
SIZES = tuple(1024 << n for n in range(9))


def table(sample: Sample, *, tokenizer: Any, eos_ids: Sequence[int], recipe: int | None = None) -> list[dict[str, Any]]:
    """One entry a size: {size, own, unseen, groups, ceiling, weights}; shares, None where rows of one prompt tell nothing.

    own: of the answers that the vocabulary is made from; unseen: of answers that it is not made from, by cross-validation;
    ceiling: the most that any vocabulary of this size covers of these answers.
    """
    width = sample.counts.shape[1]
    sizes = {size for size in (*SIZES, recipe) if size is not None and len(set(eos_ids)) <= size < width}
    out = []
    total = max(1, int(sample.counts.sum()))
    for size in sorted(sizes):
        required = vocab.required_ids(tokenizer, eos_ids, size)
        weights = sample.tune(size, required)
        held = sample.held_out(size, required, weights)
        own = int(sample.counts.sum(0)[sample.choose(size, required, weights)].sum()) / total
        groups = {name: share for name, share in held.items() if name}
        out.append({
            "size": size, "own": own, "unseen": held.get(""), "groups": groups, "ceiling": sample.ceiling(size),
            "weights": {"rank": weights.rank, "prompts": weights.prompts},
        })  # fmt: skip
    return out


def advice(entries: Sequence[dict[str, Any]], *, width: int, recipe: int | None) -> str:
    """What to do about it, in two or three sentences."""
    said = []
    ours = next((entry for entry in entries if entry["size"] == recipe), None)
    if ours is not None and ours["unseen"] is not None:
        said.append(f"The recipe's {recipe} leave {1 - ours['unseen']:.1%} of unseen tokens that are never accepted.")
        if ours["ceiling"] < GOOD:
            said.append(
                f"No {recipe} ids cover more than {ours['ceiling']:.1%} of these answers: more data cannot reach {GOOD:.0%}."
            )
    good = [entry["size"] for entry in entries if entry["groups"] and min(entry["groups"].values()) >= GOOD]
    if good:
        said.append(f"{good[0]} is the smallest size here that covers {GOOD:.0%} in every group.")
    elif any(entry["unseen"] is not None for entry in entries):
        said.append(
            f"No size here covers {GOOD:.0%} in every group; have more prompts answered, or leave drafter.draft_vocab_size at "
            f"null ({width}) where the head's cost allows it."
        )
    else:
        said.append("All rows are of one prompt: nothing can be said of unseen answers.")
    return " ".join(said)


def show(entries: Sequence[dict[str, Any]], *, width: int, recipe: int | None, console: Any) -> None:
    """Print table and advice."""
    from rich.table import Table

    names = sorted({name for entry in entries for name in entry["groups"]})
    grid = Table(title="tokens covered by the draft vocabulary")
    for name in ("size", "of full", "own answers", "unseen", *names, "best possible"):
        grid.add_column(name, justify="right")
    for entry in entries:
        shares = [entry["own"], entry["unseen"], *(entry["groups"].get(name) for name in names), entry["ceiling"]]
        cells = ["-" if share is None else f"{share:.1%}" for share in shares]
        mark = " *" if entry["size"] == recipe else ""
        grid.add_row(f"{entry['size']}{mark}", f"{entry['size'] / width:.0%}", *cells)
    console.print(grid)
    if recipe is not None:
        console.print("* drafter.draft_vocab_size of the recipe")
    console.print(advice(entries, width=width, recipe=recipe), soft_wrap=True)
