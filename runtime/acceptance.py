"""What past cycles say about the next draft: survival per row and slot, for schedulers.

Everything here is learnt from cycles that are over, so whatever is decided with it obeys the design rule of methods 1.4: no
token of the present draft has been looked at. Two sources:

- realised acceptance. Slot k of a cycle is an observation only if it was verified and slots before it were all accepted.
  Conditional acceptance per slot is pooled over all rows; a row differs from the pool by one offset on the logit, which a few
  cycles teach;
- survivals that a proposer predicted (survival head), each slot corrected by the ratio of realised to predicted acceptance so
  far. Means of these cover slots that were drafted but not verified, so trimming by them does not bias what is learnt.

B rows, G slots, g <= G slots drafted in a cycle. Rows are named by their engine slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
START = 0.6  # acceptance assumed of a drafter nobody has seen yet
_STRENGTH = 4.0  # pseudo-observations that tie a slot to the slot before it
_PREDICTED_STRENGTH = 12.0  # the same where the proposer predicted it
_POOL_MEMORY = 0.998  # per row and cycle: about 500 of them count
_ROW_MEMORY = 0.96
_ROW_TIES = 3.0  # 1 / variance of the rows' offsets on the logit
_SEEN_MEMORY = 0.9
_PULL = 0.1  # a row's offset drifts back to the pool
_RATIO_TIES = 8.0  # pseudo-observations at ratio 1 of a predicted survival
_STORED = 40.0  # observations that a stored acceptance counts for
_KNOWN = 100.0  # observations after which the pool is taken at its word
_EDGE = 1e-3


class _Pool:
    """Observations of one kind of decoding (greedy or sampled) over all rows, old ones fading."""

    def __init__(self, slots: int, prior: Sequence[float]) -> None:
        self.sums = np.zeros((6, slots))
        # observed, passed; predicted conditionals of the observed, how many of those passed; corrected survivals, their weight
        self.trials, self.passed, self.predicted, self.realised, self.mean, self.weight = self.sums
        known = min(slots, len(prior))
        self.trials[:known] = _STORED
        self.passed[:known] = _STORED * np.asarray(prior[:known], dtype=np.float64)
        self.ratios: Floats | None = None
        self.factors: list[float] | None = None  # the same
        self._conditionals: Floats | None = None

    def fade(self, cycles: int) -> None:
        """So many row cycles more have passed; the sums are about to change."""
        self.sums *= _POOL_MEMORY**cycles
        self._conditionals = None

    def conditionals(self) -> Floats:
        """Acceptance per slot given that the slots before it stood: float64 [G].

        A slot that was seldom reached is tied to the slot before it, or to what the proposer predicted of it."""
        if self._conditionals is None:
            found, before, stood = [], START, 1.0
            for passed, trials, mean, weight in zip(*(self.sums[i].tolist() for i in (1, 0, 4, 5)), strict=True):
                ties = _STRENGTH
                if weight > _STRENGTH:
                    before, ties, stood = mean / weight / stood, _PREDICTED_STRENGTH, max(mean / weight, 1e-9)
                before = (passed + ties * before) / (trials + ties)
                found.append(min(max(before, _EDGE), 1 - _EDGE))
            self._conditionals = np.array(found)
        return self._conditionals


class AcceptanceEstimator:
    """Survival estimates for G slots. stored: conditional acceptance per slot by kind (hot or not), where it is known."""

    def __init__(self, slots: int, stored: Mapping[bool, Sequence[float]] | None = None) -> None:
        self.slots = slots
        stored = stored or {}
        self._pools = {hot: _Pool(slots, list(stored.get(hot, ()))) for hot in (False, True)}
        self._index = np.arange(slots)
        self._offset, self._information = np.zeros(16), np.zeros(16)
        self._row_mean, self._row_weight = np.zeros((16, slots)), np.zeros((16, slots))

    def reserve(self, rows: int) -> None:
        """Engine slots 0..rows-1 may be asked for."""
        if rows > len(self._offset):
            self._resize(2 * rows)

    def begin(self, row: int) -> None:
        """A new request: nothing is known of it but what the pool says."""
        self.reserve(row + 1)
        self._offset[row] = self._information[row] = 0.0
        self._row_mean[row] = self._row_weight[row] = 0.0

    release = begin

    def observations(self, hot: bool) -> float:
        """How many first slots have been observed (old ones count less; a stored prior counts)."""
        return float(self._pools[hot].trials[0])

    def conditionals(self, hot: bool) -> list[float]:
        """Pooled conditional acceptance per slot, to be stored as a prior."""
        return [float(x) for x in self._pools[hot].conditionals()]

    def optimism(self, hot: bool) -> Floats:
        """Factor on the survivals of slots 1..G that one standard error more of acceptance would make, fading out as
        observations come in: float64 [G]. A drafter that nobody has seen deserves a try."""
        pool = self._pools[hot]
        known = pool.conditionals()
        doubt = np.maximum(1.0 - pool.trials[0] / _KNOWN, 0.0)
        if doubt == 0.0:
            return np.ones(self.slots)
        more = doubt * np.sqrt(known * (1.0 - known) / (pool.trials[0] + _STRENGTH))
        return (np.minimum(known + more, 1.0) / known).cumprod()

    def realised(self, rows: Sequence[int], hot: bool) -> Floats:
        """Survival per row and slot from past acceptance alone: float64 [B, G], non-increasing along the slots."""
        return self._chances(rows, hot).cumprod(axis=1)

    def predicted(self, rows: Sequence[int], hot: bool) -> Floats:
        """Survival per row and slot from past predictions of the proposer, corrected: float64 [B, G], non-increasing."""
        pool = self._pools[hot]
        common, before = [], 1.0
        following = pool.conditionals().tolist()
        for mean, weight, conditional in zip(pool.mean.tolist(), pool.weight.tolist(), following, strict=True):
            # a slot nobody drafted lately follows from the slot before it
            before = (mean + _STRENGTH * before * conditional) / (weight + _STRENGTH)
            common.append(before)
        found = (self._row_mean[rows] + _ROW_TIES * np.array(common)) / (self._row_weight[rows] + _ROW_TIES)
        return np.minimum.accumulate(np.minimum(found, 1.0), axis=1)

    def ratios(self, hot: bool, slots: int) -> Floats:
        """Realised over predicted conditional acceptance of the first slots: float64 [slots]."""
        pool = self._pools[hot]
        if pool.ratios is None:
            found = (pool.realised + _RATIO_TIES) / (pool.predicted + _RATIO_TIES)
            pool.ratios = np.minimum(np.maximum(found, 0.2), 5.0)
        return pool.ratios[:slots]

    def corrected(self, survival: Floats, hot: bool) -> Floats:
        """Live survivals [B, g] with each slot's conditional scaled by its ratio. Legal in slot k: only survivals up to k and
        past cycles enter."""
        return np.minimum(_conditional(survival) * self.ratios(hot, survival.shape[1]), 1.0).cumprod(axis=1)

    def corrected_row(self, survival: list[float], hot: bool) -> Floats:
        """`corrected` for one row, float64 [1, g]: in plain Python, which at this size beats calls into numpy."""
        pool = self._pools[hot]
        if pool.factors is None:
            pool.factors = self.ratios(hot, self.slots).tolist()
        found, before, product = [], 1.0, 1.0
        for value, ratio in zip(survival, pool.factors, strict=False):
            product *= min(min(value / max(before, 1e-30), 1.0) * ratio, 1.0)
            before = value
            found.append(product)
        return np.array([found])

    def observe(
        self,
        rows: Sequence[int],
        lengths: NDArray[np.int64],
        accepted: NDArray[np.int64],
        hot: bool,
        survival: Floats | None = None,
    ) -> None:
        """C cycles of the same B drafted rows are over: drafts verified and accepted [C, B]; survival [C, B, g] as the proposer
        gave it."""
        pool, cycles = self._pools[hot], len(lengths)
        chances = self._chances(rows, hot)
        # the last slot reached failed, unless all passed
        reached = (self._index < np.minimum(accepted + 1, lengths)[..., None]).astype(np.float64)
        passed = self._index < accepted[..., None]
        seen = None
        if survival is not None and np.isfinite(survival).all():
            flat = survival.reshape(-1, survival.shape[-1])
            seen = _conditional(flat).reshape(survival.shape), self.corrected(flat, hot).reshape(survival.shape)
        pool.fade(cycles * len(rows))
        pool.trials += reached.sum(axis=(0, 1))
        pool.passed += passed.sum(axis=(0, 1))
        if seen is not None:
            self._see(pool, rows, reached, passed, *seen)
        # one Newton step on each row's offset
        tried = reached.sum(axis=0)
        expected = chances * tried
        surplus = passed.sum(axis=(0, 2)) - expected.sum(axis=1)
        information = _ROW_MEMORY**cycles * self._information[rows] + (expected * (1.0 - chances)).sum(axis=1)
        offset = self._offset[rows]
        offset += (surplus - cycles * _PULL * offset) / (information + _ROW_TIES)
        self._information[rows] = information
        self._offset[rows] = np.minimum(np.maximum(offset, -4.0), 4.0)

    def _see(
        self,
        pool: _Pool,
        rows: Sequence[int],
        reached: Floats,
        passed: NDArray[np.bool_],
        conditional: Floats,
        corrected: Floats,
    ) -> None:
        """Predicted survivals: how they compare with what came true, and their means. All [C, B, G] or [C, B, g]."""
        slots, cycles = min(corrected.shape[-1], self.slots), len(reached)
        pool.predicted[:slots] += (conditional[..., :slots] * reached[..., :slots]).sum(axis=(0, 1))
        pool.realised[:slots] += passed[..., :slots].sum(axis=(0, 1))
        pool.mean[:slots] += corrected[..., :slots].sum(axis=(0, 1))
        pool.weight[:slots] += cycles * len(rows)
        pool.ratios = pool.factors = None
        kept = _SEEN_MEMORY**cycles
        self._row_mean[rows, :slots] = kept * self._row_mean[rows, :slots] + corrected[..., :slots].sum(axis=0)
        self._row_weight[rows, :slots] = kept * self._row_weight[rows, :slots] + cycles

    def _chances(self, rows: Sequence[int], hot: bool) -> Floats:
        """Conditional acceptance per row and slot: float64 [B, G]."""
        odds = self._pools[hot].conditionals()
        odds = odds / (1.0 - odds) * np.exp(self._offset[rows])[:, None]
        return odds / (1.0 + odds)

    def _resize(self, rows: int) -> None:
        more = rows - len(self._offset)
        self._offset, self._information = (np.pad(values, (0, more)) for values in (self._offset, self._information))
        self._row_mean, self._row_weight = (np.pad(v, ((0, more), (0, 0))) for v in (self._row_mean, self._row_weight))


def _conditional(survival: Floats) -> Floats:
    """Survivals [B, g] -> conditionals in [0, 1]."""
    found = survival.copy()
    found[:, 1:] /= np.maximum(survival[:, :-1], 1e-30)
    return np.minimum(found, 1.0)
