"""Helpers with which the prompt modules turn hand-written banks into families of prompts.

A family is a set of prompts with the same instruction pattern. Its size is capped, so that no pattern dominates the
set, and no family name occurs in both the training and the held-out set.
"""

import random
from collections.abc import Callable, Sequence

Families = dict[str, list[str]]

# 60 of at least 3,200 rows keeps every family under 2 % of the training set.
MAX_FAMILY = 60


def lines(text: str) -> list[str]:
    """One item per non-empty line of `text`."""
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def records(text: str) -> list[tuple[str, ...]]:
    """One tuple per non-empty line of `text`, its fields separated by `|`."""
    return [tuple(field.strip() for field in line.split("|")) for line in lines(text)]


def blocks(text: str) -> list[str]:
    """Multi-line items of `text`, separated by lines that hold only `---`."""
    return [block.strip("\n") for block in text.strip("\n").split("\n---\n") if block.strip()]


def article(word: str) -> str:
    """`word` with its indefinite article."""
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def crossed(seed: str, forms: Sequence[str], items: Sequence[str | tuple[str, ...]], count: int = MAX_FAMILY) -> list[str]:
    """At most `count` prompts: shuffled items, the wordings `forms` in rotation.

    A form refers to the fields of an item as `{0}`, `{1}` and so on. An item is used again, with another form, only
    after all items were used once.
    """
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    rows: dict[str, None] = {}
    for shift in range(len(forms)):
        for index, item in enumerate(shuffled):
            fields = (item,) if isinstance(item, str) else item
            rows.setdefault(forms[(index + shift) % len(forms)].format(*fields))
            if len(rows) == min(count, MAX_FAMILY):
                return list(rows)
    return list(rows)


def once(seed: str, forms: Sequence[str], items: Sequence[str | tuple[str, ...]], count: int = MAX_FAMILY) -> list[str]:
    """`crossed`, but every item at most once."""
    return crossed(seed, forms, items, min(count, len(items)))


def generated(seed: str, write: Callable[[random.Random], str], count: int) -> list[str]:
    """`count` distinct prompts (at most `MAX_FAMILY`) drawn from `write`; ValueError when it cannot make so many."""
    rng = random.Random(seed)
    rows: dict[str, None] = {}
    for _ in range(count * 50):
        rows.setdefault(write(rng))
        if len(rows) == min(count, MAX_FAMILY):
            return list(rows)
    raise ValueError(f"family {seed}: only {len(rows)} distinct prompts of the {count} asked for")
