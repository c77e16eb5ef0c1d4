"""Repetition in answers: a stretch of token ids that repeats with one period, as a model does that got stuck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_PERIOD = 64


@dataclass(frozen=True, slots=True)
class Loop:
    """`length` tokens from `start` on repeat with `period`."""

    start: int
    length: int
    period: int


def find_loop(ids: Sequence[int], *, repeats: int = 3, tokens: int = 16) -> Loop | None:
    """The longest stretch of `ids` with a period of at most LONGEST_PERIOD; None when there is none.

    A stretch counts when it is at least `tokens` long and holds its period at least `repeats` times. Of equally long ones the
    shortest period is given.
    """
    array = np.asarray(ids)
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(array) // repeats) + 1):
        # positions where ids[i] != ids[i + period], with a border on either side: the longest gap is the longest stretch
        breaks = np.flatnonzero(np.concatenate(([True], array[period:] != array[:-period], [True])))
        gaps = np.diff(breaks) - 1
        widest = int(gaps.argmax())
        length = int(gaps[widest]) + period
        if length >= max(tokens, repeats * period) and (best is None or length > best.length):
            best = Loop(int(breaks[widest]), length, period)
    return best
