"""The choice behind the load-aware scheduler: which slots, rows and drafts pay, from expected survivals and costs.

Whole-set searches like these are legal on survivals of past cycles only (methods 1.4); live ones go through allocation.py.
R rows, G slots; times in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .allocation import Prices, prices

Floats = NDArray[np.float64]
Behind = Callable[[int], NDArray[np.int64]]
_MOST = 0.4  # of the logarithm of a timing correction
_LOOK = 32  # cycles that decide whether survivals are worth a look
_FIRST_WAIT, _LONGEST_WAIT = 128, 1024  # cycles without one


class CycleCosts:
    """Milliseconds at one number of rows, context bucket and kind: passes [R*G + 1] by verified drafts, drafts [R+1, G+1]."""

    def __init__(self, passes: Floats, drafts: Floats) -> None:
        self.passes, self.drafts = passes, drafts
        self._prices: dict[tuple[int, int], Prices] = {}
        self._on_device: dict[tuple[int, int], Tensor] = {}

    def prices(self, planned: int, step: int = 1) -> Prices:
        """Prices of items that each stand for `step` drafts, smoothed up to `planned` of them."""
        found = self._prices.get((planned, step))
        if found is None:
            found = self._prices[planned, step] = prices(self.passes[::step], planned)
        return found

    def prices_on(self, device: torch.device, planned: int, step: int = 1) -> Tensor:
        """The marginal prices on the device, sent once."""
        found = self._on_device.get((planned, step))
        if found is None:
            marginal = torch.from_numpy(self.prices(planned, step).marginal)
            found = self._on_device[planned, step] = marginal.to(device, non_blocking=True)
        return found


class Choice(NamedTuple):
    """The best use of a cycle as far as past cycles tell. rate: tokens per millisecond; slots 0: plain decoding; items: drafts
    to verify in all; lengths: of each row of the view."""

    rate: float
    slots: int
    items: int
    lengths: list[int]

    @property
    def rows(self) -> list[int]:
        """Indices of the rows that are drafted."""
        return [i for i, length in enumerate(self.lengths) if length]


def search_ragged(survival: Floats, costs: CycleCosts, slower: float) -> tuple[Floats, Behind]:
    """Best rate for each number of slots 1..G: float64 [G], and a function slots -> lengths int64 [R] behind it.

    Items of all rows stand in falling order; for g slots those beyond slot g are skipped. A prefix of the order needs as many
    drafted rows as it holds first slots.
    """
    rows, most = survival.shape
    items = np.minimum.accumulate(survival, axis=1).T.ravel()
    order = np.argsort(-items, kind="stable")
    slot = order // rows
    allowed = slot < np.arange(1, most + 1)[:, None]
    tokens = rows + np.cumsum(np.where(allowed, items[order], 0.0), axis=1)
    verified = np.cumsum(allowed, axis=1)
    drafted = np.cumsum(slot == 0)
    times = slower * (costs.drafts[drafted[None, :], np.arange(1, most + 1)[:, None]] + costs.passes[verified])
    rates = tokens / times
    ends = rates.argmax(axis=1)

    def behind(slots: int) -> NDArray[np.int64]:
        end = int(ends[slots - 1]) + 1
        front = order[:end]
        return np.bincount(front[slot[:end] < slots] % rows, minlength=rows)

    return rates[np.arange(most), ends], behind


def search_padded(survival: Floats, costs: CycleCosts, slower: float) -> tuple[Floats, Behind]:
    """As `search_ragged` where a pass costs rows x the widest row: every row is drafted to the same length."""
    rows, most = survival.shape
    tokens = rows + survival.sum(axis=0).cumsum()
    slots = np.arange(1, most + 1)
    times = slower * (costs.drafts[rows, slots] + costs.passes[rows * slots])
    return tokens / times, lambda length: np.full(rows, length)


class Looking:
    """Whether live survivals earn what looking at them costs; if not, lengths follow from past cycles alone for a while.

    Judged on the survivals themselves: the rate of the cycles as they were cut, against that of the same drafts cut nowhere or
    all at one slot. While nobody looks, the time to the next look doubles as long as looks change nothing.
    """

    def __init__(self, cost_ms: float) -> None:
        self.cost_ms = cost_ms
        self.on = True
        self._wait, self._interval = 0, _FIRST_WAIT
        self._forget()

    def _forget(self) -> None:
        self._cycles, self._cut = 0.0, np.zeros(2)
        self._whole: Floats | None = None

    def judge(self, survival: Floats, lengths: NDArray[np.int64], rows: int, costs: CycleCosts) -> None:
        """C cycles are over: survivals [C, B, g] of the B drafted of `rows` rows, and what was verified, [C, B]."""
        cycles, drafted, slots = survival.shape
        if self._whole is None or self._whole.shape[1] != slots:
            self._forget()
        kept = np.where(np.arange(slots) < lengths[..., None], survival, 0.0).sum(axis=(1, 2))
        spent = costs.passes[lengths.sum(axis=1)] + float(costs.drafts[drafted, slots]) + self.cost_ms
        tokens = cycles * rows + survival.sum(axis=(0, 1)).cumsum()
        each = np.arange(1, slots + 1)
        times = cycles * (costs.passes[drafted * each] + costs.drafts[drafted, each])
        self._cycles += cycles
        self._cut = self._cut + (cycles * rows + kept.sum(), spent.sum())
        self._whole = np.stack((tokens, times)) + (0.0 if self._whole is None else self._whole)
        if self._cycles < _LOOK:
            return
        if (self._whole[0] / self._whole[1]).max() * self._cut[1] >= self._cut[0]:
            self.on, self._wait = False, self._interval
            self._interval = min(2 * self._interval, _LONGEST_WAIT)
        else:
            self._interval = _FIRST_WAIT
        self._forget()

    def pass_by(self) -> None:
        """A cycle went by without a look."""
        self._wait -= 1
        self.on = self._wait <= 0


class Timing:
    """Measured over predicted time of plain and drafted cycles, by number of rows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._ratios: dict[tuple[int, bool], tuple[float, float]] = {}
        self._key: tuple[int, bool] = (0, False)
        self._began = 0.0

    def start(self, rows: int, drafted: bool) -> None:
        """A cycle begins."""
        self._key, self._began = (rows, drafted), self.clock()

    def stop(self, predicted_ms: float) -> None:
        """It is over, and the table said so many milliseconds."""
        ratio = 1e3 * (self.clock() - self._began) / max(predicted_ms, 1e-9)
        logs, weight = self._ratios.get(self._key, (0.0, 0.0))
        # bounded: one cycle that the machine spent elsewhere says nothing
        self._ratios[self._key] = 0.98 * logs + math.log(min(max(ratio, 0.5), 2.0)), 0.98 * weight + 1.0

    def drafted_over_plain(self, rows: int) -> float:
        """Correction of a drafted cycle's predicted time in units of a plain cycle's; 1 until both were seen."""
        found = [self._ratios.get((rows, drafted)) for drafted in (True, False)]
        if found[0] is None or found[1] is None:
            return 1.0
        means = [logs / weight * min(1.0, weight / 10.0) for logs, weight in (found[0], found[1])]
        return math.exp(min(max(means[0] - means[1], -_MOST), _MOST))
