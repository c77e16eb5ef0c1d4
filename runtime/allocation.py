"""Which drafted tokens to verify: a prefix-closed choice among items that have a survival and a parent.

An item is a drafted token, its survival the probability that it and all its ancestors stand, its parent the item before it (-1:
the anchor). Positions of a block and requests of a batch go through here; nodes of a token tree are the same thing. Items are
admitted one at a time in order of falling survival, and admission ends where the budget is spent or at the first item that
does not pay (methods 1.4; Algorithm 1 of the DSpark paper).

Why live survivals are allowed here (the design rule of methods 1.4). s_k may depend on x_<k, never on x_k. Survivals are first
made non-increasing from parent to child, so everything that depends on x_k (its descendants) stands behind item k in the
order; whether item k is admitted is decided by the items in front of it, by s_k itself and by numbers fixed before the draft
(budget, costs, rate). Hence no item's own token has a say in its admission. Two things would break this and are not offered: a
search for the best set beyond the first failure (an arg-max over live survivals lets s_{k+1}, hence x_k, rescue item k), and
ties resolved by anything but the order of the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


class Prices(NamedTuple):
    """What one more item costs when m are admitted: before[m] the time of the pass with m items, marginal[m] that of the next.

    float64 [M] both.
    """

    before: Floats
    marginal: Floats


def prices(costs: Sequence[float] | Floats, planned: int | None = None) -> Prices:
    """Prices of m = 0..M items from measured costs [M+1], made fit for an admission that ends at its first failure.

    Real costs are staircases: the first item of a step would pay for all of it. Up to `planned` items (None: all) they are
    replaced by their greatest convex minorant there, which spreads a step over its items; an item that comes free behind the
    others costs nothing. Beyond `planned`, where nobody expects the step to be filled, prices are as measured. Convex costs
    stay as they are.
    """
    measured = np.asarray(costs, dtype=np.float64)
    end = len(measured) - 1 if planned is None else min(max(planned, 0), len(measured) - 1)
    smooth = measured.copy()
    smooth[: end + 1] = convex_minorant(measured[: end + 1])
    return Prices(smooth[:-1], np.where(np.diff(measured) <= 0, 0.0, np.diff(smooth)))


def allocate(
    survival: Tensor,
    parent: Tensor,
    *,
    budget: int | None = None,
    costs: Sequence[float] | Floats | None = None,
    planned: int | None = None,
    base_tokens: float = 0.0,
    sunk: float = 0.0,
    rate: float | None = None,
) -> Tensor:
    """The items to verify: bool [N], prefix-closed. Parents come before their children.

    survival [N] (any float type; NaN and values <= 0 are never admitted); parent int64 [N], -1 for children of the root.
    budget: at most so many items. costs [M+1], M >= N: time of a pass with m = 0..M items, smoothed by `prices` (planned: see
    there). With costs alone: admit while the rate (base_tokens + sum of survivals) / (sunk + costs) improves; with convex costs
    that first failure is the global maximum. With `rate` too (tokens per unit of time): admit while the survival exceeds
    rate * marginal cost. Without budget and costs every item of positive survival is admitted.
    """
    items = _effective(survival, parent)
    order = np.argsort(-items, kind="stable")  # ties in item order: a parent before its child, and no token is looked at
    cost = None if costs is None else prices(costs, planned)
    kept = _admitted(items[order], budget, cost, base_tokens, sunk, rate)
    chosen = np.zeros(len(items), dtype=bool)
    chosen[order[:kept]] = True
    return torch.from_numpy(chosen).to(survival.device)


def convex_minorant(costs: Floats) -> Floats:
    """Greatest convex function below the points (m, costs[m]): float64 [M+1]."""
    hull: list[int] = []
    values = costs.tolist()
    for m, value in enumerate(values):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            # b lies on or above the line from a to m: it is no vertex
            if (values[b] - values[a]) * (m - a) < (value - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(m)
    return np.interp(np.arange(len(values)), hull, costs[hull])


def chain_lengths(
    survival: Floats,
    limits: NDArray[np.int64],
    *,
    budget: int | None = None,
    cost: Prices | None = None,
    base_tokens: float = 0.0,
    sunk: float = 0.0,
    rate: float | None = None,
) -> NDArray[np.int64]:
    """`allocate` over B chains of G slots, on the host: survival float64 [B,G], limits int64 [B] -> lengths int64 [B].

    The same choice as `allocate` on items in slot-major order (slot 1 of every row, then slot 2, ...), slots at or beyond a
    row's limit left out. cost: `prices` of at least B*G items, kept by the caller.
    """
    rows, slots = survival.shape
    if rows == 1:
        return _one_chain(survival[0], int(limits[0]), budget, cost, base_tokens, sunk, rate)
    alive = np.arange(slots)[:, None] < limits
    items = np.where(alive, np.minimum.accumulate(survival, axis=1).T, 0.0).ravel()
    items = np.where(items > 0, items, 0.0)  # NaN too
    order = np.argsort(-items, kind="stable")
    kept = _admitted(items[order], budget, cost, base_tokens, sunk, rate)
    return np.bincount(order[:kept] % rows, minlength=rows)


def chain_lengths_on_device(
    survival: Tensor,
    limits: Tensor,
    *,
    budget: int | None = None,
    before: Tensor | None = None,
    marginal: Tensor | None = None,
    base_tokens: float = 0.0,
    sunk: float = 0.0,
    rate: float | None = None,
) -> Tensor:
    """`chain_lengths` without waiting for the device: survival [B,G], limits int64 [B] -> int64 [B].

    before, marginal [>= B*G]: the two parts of `Prices` on the device (before may be None where rate is given).
    """
    rows, slots = survival.shape
    alive = torch.arange(slots, device=survival.device) < limits[:, None]
    items = torch.where(alive, survival.double().nan_to_num(nan=0.0).cummin(1).values, 0.0).t().reshape(-1)
    ordered, order = items.sort(descending=True, stable=True)
    count = len(ordered)
    pays = ordered > 0
    if budget is not None:
        pays &= torch.arange(count, device=items.device) < budget
    if marginal is not None and rate is not None:
        pays &= ordered > rate * marginal[:count]
    elif marginal is not None and before is not None:
        tokens = base_tokens + ordered.cumsum(0) - ordered
        pays &= ordered * (sunk + before[:count]) > tokens * marginal[:count]
    kept = pays.to(torch.int64).cumprod(0)
    return torch.zeros(rows, dtype=torch.int64, device=items.device).index_add_(0, order % rows, kept)


def _effective(survival: Tensor, parent: Tensor) -> Floats:
    """Survival cut down to that of every ancestor, 0 where it is none: float64 [N]."""
    values = survival.detach().cpu().double().numpy().copy()
    values[~(values > 0)] = 0.0
    parents = parent.tolist()
    for i, above in enumerate(parents):
        assert -1 <= above < i, f"item {i}: its parent {above} must come before it"
        if above >= 0:
            values[i] = min(values[i], values[above])
    return values


def _admitted(
    ordered: Floats, budget: int | None, cost: Prices | None, base_tokens: float, sunk: float, rate: float | None
) -> int:
    """How many of the items in falling order are admitted: up to the first that is not."""
    most = int(np.count_nonzero(ordered))
    if budget is not None:
        most = min(most, max(budget, 0))
    if cost is None or most == 0:
        return most
    assert len(cost.marginal) >= most, (len(cost.marginal), most)
    ordered, marginal = ordered[:most], cost.marginal[:most]
    if rate is not None:
        pays = ordered > rate * marginal
    else:
        # (N + s) / (T + d) > N / T, without the division
        tokens = base_tokens + np.cumsum(ordered) - ordered
        pays = ordered * (sunk + cost.before[:most]) > tokens * marginal
    first = int(pays.argmin())
    return most if pays[first] else first


def _one_chain(
    survival: Floats, limit: int, budget: int | None, cost: Prices | None, tokens: float, sunk: float, rate: float | None
) -> NDArray[np.int64]:
    """`chain_lengths` of one row: in plain Python, which at this size beats calls into numpy."""
    most = max(0, min(limit, len(survival)) if budget is None else min(limit, len(survival), budget))
    before = marginal = [0.0] * most
    if cost is not None:
        before, marginal = cost.before[:most].tolist(), cost.marginal[:most].tolist()
    least, length = float("inf"), 0
    for value, spent, price in zip(survival[:most].tolist(), before, marginal, strict=True):
        least = min(least, value) if value > 0 else 0.0
        if not least > 0:
            break
        if cost is not None and not (least > rate * price if rate is not None else least * (sunk + spent) > tokens * price):
            break
        tokens += least
        length += 1
    return np.array([length])
