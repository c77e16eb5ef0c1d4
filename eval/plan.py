"""The equation as a tool: S over gamma at one operating point, its optimum, ceilings, break-even and price in arithmetic.

A point is what acceptance gives (E over gamma) and what a cycle costs (draft and v over gamma). Every cost is a ratio to one
target pass over one token. numpy, no torch. Users' mistakes raise ValueError.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .equation import break_even_acceptance, expected_tokens, expected_tokens_per_slot, speedup_parallel

SEARCH = 512  # default longest gamma: far beyond any drafter in use
WITHIN = 0.03  # the optimum is flat: lengths this close to the best are as good
_EVEN_SEARCH = 64  # gammas searched for the lowest break-even


@dataclasses.dataclass(frozen=True)
class Point:
    """One operating point.

    Either `alpha`, the same acceptance in every slot, or `acceptance`, the conditional acceptance per slot. Either `c`, one
    step of a sequential drafter, or `c_block` (a number, or a function of gamma), one parallel pass, with `c_step` a slot of
    its serial head. v maps gamma to the cost of a target pass over gamma + 1 tokens; overhead and plain_overhead are the
    engine's own costs per cycle and per plain step. c_hat: operations per token of the drafter over the target's; default
    c, or c_block + c_step, which holds for a memory-bound drafter of the target's dtype.
    """

    alpha: float | None = None
    acceptance: tuple[float, ...] = ()
    c: float | None = None
    c_block: float | Callable[[int], float] | None = None
    c_step: float = 0.0
    v: Callable[[int], float] = lambda gamma: 1.0
    overhead: float = 0.0
    plain_overhead: float = 0.0
    c_hat: float | None = None

    def __post_init__(self) -> None:
        if (self.alpha is None) == (not self.acceptance):
            raise ValueError("alpha and acceptance: got both or neither, allowed: one of them")
        if (self.c is None) == (self.c_block is None):
            raise ValueError("c and c_block: got both or neither, allowed: one of them")

    @property
    def longest(self) -> int | None:
        """Largest gamma that the acceptance covers; None: all."""
        return len(self.acceptance) or None

    def tokens(self, gamma: int) -> float:
        """E(gamma)."""
        if self.alpha is not None:
            return expected_tokens(self.alpha, gamma)
        return expected_tokens_per_slot(self.acceptance[:gamma])

    def block(self, gamma: int) -> float:
        """c_block at gamma; 0 for a sequential drafter."""
        if self.c_block is None or gamma == 0:
            return 0.0
        return self.c_block(gamma) if callable(self.c_block) else self.c_block

    def cost(self, gamma: int) -> float:
        """A cycle in plain steps' target passes, without plain_overhead; gamma = 0 is a plain step."""
        if gamma == 0:
            return 1.0 + self.plain_overhead
        step = self.c if self.c is not None else self.c_step
        return self.block(gamma) + gamma * step + self.v(gamma) + self.overhead

    def speedup(self, gamma: int) -> float:
        """S(gamma); 1 at gamma = 0, where the drafter is off."""
        if gamma == 0:
            return 1.0
        step = self.c if self.c is not None else self.c_step
        return speedup_parallel(
            self.tokens(gamma), gamma, c_block=self.block(gamma), c_step=step, v=self.v(gamma), overhead=self.overhead,
            plain_overhead=self.plain_overhead,
        )  # fmt: skip

    def operations(self, gamma: int) -> float:
        """c_hat as given or by default."""
        if self.c_hat is not None:
            return self.c_hat
        return self.c if self.c is not None else self.block(max(gamma, 1)) + self.c_step


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the equation says of a point; lists run over gamma = 0, 1, ... (`gammas`).

    region: smallest and largest gamma around the best within `within` of it. rising: S still grows at the longest gamma that
    was looked at. ceiling: no gamma goes beyond (sequential: min(1/c, 1/(1-alpha)); parallel: (gamma+1)/(c_block+v) at the
    best gamma); its parts are in `ceilings`. break_even: the equal-slot alpha at which the best gamma (or, if none pays, gamma
    1) costs as much as it yields; lowest_break_even: (gamma, alpha) where that alpha is smallest. next_slot: acceptance above
    which one more slot than the longest would pay; None when S does not rise to the end or v is unknown there.
    """

    gammas: list[int]
    tokens: list[float]
    cost: list[float]
    speedup: list[float]
    arithmetic: list[float]
    best_gamma: int
    best_speedup: float
    region: tuple[int, int]
    within: float
    rising: bool
    ceiling: float
    ceilings: dict[str, float]
    break_even: float | None
    lowest_break_even: tuple[int, float] | None
    equal_slot_alpha: float | None
    c_hat: float
    next_slot: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; an infinite ceiling becomes None."""
        out = dataclasses.asdict(self)
        out["ceiling"] = _finite(self.ceiling)
        out["ceilings"] = {name: _finite(value) for name, value in self.ceilings.items()}
        return out


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_plan(point: Point, *, longest: int | None = None, within: float = WITHIN) -> Plan:
    """Evaluate S for every gamma up to `longest` (default: the slots of the acceptance, or SEARCH) and read off the rest.

    Searched in full, because a measured v need not be convex. ValueError for a longest beyond the slots that were given.
    """
    limit = point.longest if longest is None else longest
    limit = SEARCH if limit is None else limit
    if limit < 1 or (point.longest is not None and limit > point.longest):
        raise ValueError(f"longest: got {limit}, allowed: 1 to {point.longest or 'any'}")
    if not 0.0 <= within < 1.0:
        raise ValueError(f"within: got {within}, allowed: 0 to below 1")
    gammas = list(range(limit + 1))
    speedup = [point.speedup(g) for g in gammas]
    best = max(gammas, key=lambda g: (speedup[g], -g))
    low = high = best
    while low > 0 and speedup[low - 1] >= speedup[best] * (1.0 - within):
        low -= 1
    while high < limit and speedup[high + 1] >= speedup[best] * (1.0 - within):
        high += 1
    tokens = [point.tokens(g) for g in gammas]
    cost = [point.cost(g) for g in gammas]
    c_hat = point.operations(best)
    ceilings = _ceilings(point, max(best, 1))
    return Plan(
        gammas=gammas, tokens=tokens, cost=cost, speedup=speedup,
        arithmetic=[(g * c_hat + g + 1.0) / e for g, e in zip(gammas, tokens, strict=True)],
        best_gamma=best, best_speedup=speedup[best], region=(low, high), within=within, rising=best == limit,
        ceiling=min(ceilings.values()), ceilings=ceilings, break_even=_break_even(point, max(best, 1)),
        lowest_break_even=_lowest_break_even(point, limit),
        equal_slot_alpha=break_even_acceptance(best, tokens[best]) if best else point.alpha,
        c_hat=c_hat, next_slot=_next_slot(point, limit) if best == limit else None,
    )  # fmt: skip


def _break_even(point: Point, gamma: int) -> float | None:
    return break_even_acceptance(gamma, point.cost(gamma) / (1.0 + point.plain_overhead))


def _lowest_break_even(point: Point, limit: int) -> tuple[int, float] | None:
    found = [(alpha, g) for g in range(1, min(limit, _EVEN_SEARCH) + 1) if (alpha := _break_even(point, g)) is not None]
    return min(found)[::-1] if found else None


def _next_slot(point: Point, gamma: int) -> float | None:
    """Slot gamma + 1 pays iff P(it survives) > S * (its cost); here as the conditional acceptance it needs."""
    if not point.acceptance:
        return None
    survival = math.prod(point.acceptance[:gamma])
    step = point.c if point.c is not None else point.c_step
    try:
        slope = point.v(gamma + 1) - point.v(gamma)
    except ValueError:
        return None
    extra = step + slope + point.block(gamma + 1) - point.block(gamma)
    need = point.speedup(gamma) / (1.0 + point.plain_overhead) * extra
    return need / survival if survival > 0.0 else None


def _ceilings(point: Point, gamma: int) -> dict[str, float]:
    """The bounds by name, each on S; that of E is one only while a cycle costs at least a target pass."""
    scale = 1.0 + point.plain_overhead
    if point.c is not None:
        # for c >= 1 no length wins and the best is not to draft
        bounds = {"1/c": scale / point.c if 0.0 < point.c < 1.0 else math.inf if point.c == 0.0 else 1.0}
    else:
        bounds = {"(gamma+1)/(c_block+v)": (gamma + 1) * scale / (point.block(gamma) + point.v(gamma) + point.overhead)}
    if point.alpha is not None and point.cost(gamma) >= 1.0:
        bounds["1/(1-alpha)"] = scale / (1.0 - point.alpha) if point.alpha < 1.0 else math.inf
    return bounds


def piecewise(pairs: Sequence[tuple[float, float]], name: str = "v") -> Callable[[int], float]:
    """v(gamma) by straight lines between (gamma, value) pairs, with v(0) = 1 where no pair says otherwise.

    Raises ValueError for a repeated gamma, a value not above 0, and, when called, for a gamma beyond the last pair.
    """
    known = dict(pairs)
    if len(known) < len(pairs):
        raise ValueError(f"{name}: got a gamma twice, allowed: one value each")
    for gamma, value in known.items():
        if not (gamma >= 0 and value > 0.0 and math.isfinite(value)):
            raise ValueError(f"{name}: got {gamma:g}:{value:g}, allowed: gamma at least 0, value above 0")
    known.setdefault(0, 1.0)
    xs = sorted(known)
    ys = [known[x] for x in xs]

    def interpolate(gamma: int) -> float:
        if gamma > xs[-1]:
            raise ValueError(f"{name}: got gamma {gamma}, allowed: at most {xs[-1]:g} (the last pair)")
        return float(np.interp(gamma, xs, ys))

    return interpolate


def best_speedups(alpha: np.ndarray, c: np.ndarray, *, longest: int = SEARCH) -> tuple[np.ndarray, np.ndarray]:
    """(best S, its gamma) of the sequential form, elementwise over broadcast arrays; S = 1 and gamma = 0 where none pays.

    alpha in 0..1, c above 0, float64. Searched up to `longest`.
    """
    alpha, c = np.broadcast_arrays(np.asarray(alpha, float), np.asarray(c, float))
    if not (np.all((alpha >= 0.0) & (alpha <= 1.0)) and np.all(c > 0.0)):
        raise ValueError("alpha and c: got values outside, allowed: alpha 0 to 1, c above 0")
    best, where = np.ones(alpha.shape), np.zeros(alpha.shape, int)
    tokens, power = np.ones(alpha.shape), np.ones(alpha.shape)
    for gamma in range(1, longest + 1):
        power = power * alpha
        tokens = tokens + power
        value = tokens / (c * gamma + 1.0)
        better = value > best
        best, where = np.where(better, value, best), np.where(better, gamma, where)
    return best, where


def equal_slot_alpha(tau: float, gamma: int) -> float:
    """The alpha, equal in every slot, that gives `tau` tokens per cycle of gamma drafts. ValueError outside 1..gamma + 1."""
    if not 1.0 <= tau <= gamma + 1.0:
        raise ValueError(f"tau: got {tau}, allowed: 1 to {gamma + 1}")
    found = break_even_acceptance(gamma, tau)
    assert found is not None
    return found
