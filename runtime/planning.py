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
Behind = Callable[[int], tuple[int, list[int]]]
_MOST = 0.4  # of the logarithm of a timing correction


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
    """The best use of a cycle as far as past cycles tell. rate: tokens per millisecond; slots 0: plain decoding."""

    rate: float
    slots: int
    items: int
    rows: list[int]


def search_ragged(survival: Floats, costs: CycleCosts, slower: float) -> tuple[Floats, Behind]:
    """Best rate for each number of slots 1..G: float64 [G], and a function slots -> (items, drafted rows) behind it.

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

    def behind(slots: int) -> tuple[int, list[int]]:
        end = int(ends[slots - 1]) + 1
        front = order[:end]
        return int(verified[slots - 1, end - 1]), sorted((front[front < rows] % rows).tolist())

    return rates[np.arange(most), ends], behind


def search_padded(survival: Floats, costs: CycleCosts, slower: float) -> tuple[Floats, Behind]:
    """As `search_ragged` where a pass costs rows x the widest row: every row is drafted to the same length."""
    rows, most = survival.shape
    tokens = rows + survival.sum(axis=0).cumsum()
    slots = np.arange(1, most + 1)
    times = slower * (costs.drafts[rows, slots] + costs.passes[rows * slots])
    return tokens / times, lambda length: (rows * length, list(range(rows)))


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
