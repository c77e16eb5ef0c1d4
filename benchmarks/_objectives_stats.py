"""Pure parts of objectives_on_target.py: step budgets, choice of the winner, intervals over seeds and prompts. Numpy only.

A measurement of one objective is `Counts`: committed tokens and cycles, each float [S, P], over S training seeds and P prompts.
Every objective has the same seeds (same data order and initial weights) and prompts, so comparisons are paired in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Counts:
    """Committed tokens and cycles, float [S, P]. ValueError for other shapes, or a seed without a cycle."""

    committed: np.ndarray
    cycles: np.ndarray

    def __post_init__(self) -> None:
        if self.committed.ndim != 2 or self.committed.shape != self.cycles.shape:
            raise ValueError(f"counts: shapes {self.committed.shape} and {self.cycles.shape}, allowed: two equal ones [S, P]")
        if not (self.cycles.sum(1) > 0).all():
            raise ValueError("counts: a seed has no cycle")

    @property
    def by_seed(self) -> np.ndarray:
        """tau of each seed, [S]."""
        return self.committed.sum(1) / self.cycles.sum(1)

    @property
    def tau(self) -> float:
        """Mean over the seeds of tokens per cycle."""
        return float(self.by_seed.mean())


def resampled(counts: Sequence[Counts], *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """tau of each of `counts` under `resamples` common draws of seeds and prompts, [len(counts), resamples].

    Seeds and prompts are crossed, so both are drawn with replacement and independently, a prompt for all seeds at once (Owen,
    Annals of Applied Statistics 2007): what an objective does to one prompt in every seed is not averaged away.
    """
    seeds, prompts = counts[0].committed.shape
    if any(c.committed.shape != (seeds, prompts) for c in counts):
        raise ValueError("bootstrap: all measurements need the same seeds and prompts")
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=resamples).astype(np.float64)
    chosen = generator.integers(0, seeds, size=(resamples, seeds))
    taus = []
    for item in counts:
        drawn = np.maximum(weights @ item.cycles.T, 1e-9)  # [B, S]
        taus.append(np.take_along_axis((weights @ item.committed.T) / drawn, chosen, axis=1).mean(1))
    return np.stack(taus)


def interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of bootstrap values."""
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def difference(base: Counts, other: Counts, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, object]:
    """tau of `other` minus that of `base` with its interval; `relative`: as a share of base; `by_seed`: each seed's own."""
    one, two = resampled([base, other], resamples=resamples, seed=seed)
    low, high = interval(two - one)
    low_share, high_share = interval(two / one - 1.0)
    return {
        "value": other.tau - base.tau, "low": low, "high": high,
        "relative": {"value": other.tau / base.tau - 1.0, "low": low_share, "high": high_share},
        "by_seed": (other.by_seed - base.by_seed).tolist(),
    }  # fmt: skip


def with_interval(counts: Counts, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, float]:
    """tau with its interval."""
    low, high = interval(resampled([counts], resamples=resamples, seed=seed)[0])
    return {"value": counts.tau, "low": low, "high": high}


def paired_means(pairs: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, float]:
    """Mean of a minus mean of b over cycles, with an interval over prompts. pairs float [P, 3]: a prompt's sums and cycles."""
    kept = pairs[pairs[:, 2] > 0]
    if len(kept) < 2:
        raise ValueError(f"bootstrap: {len(kept)} prompt(s) with a cycle, allowed: 2 or more")
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(kept), np.full(len(kept), 1.0 / len(kept)), size=resamples)
    sums = weights @ kept
    low, high = interval((sums[:, 0] - sums[:, 1]) / sums[:, 2])
    return {"value": float((kept[:, 0] - kept[:, 1]).sum() / kept[:, 2].sum()), "low": low, "high": high}


def equal_time_steps(steps: int, ratio: float, tolerance: float = 0.02) -> int:
    """Steps of an objective whose step costs `ratio` times the baseline's, in the time of `steps` baseline steps.

    Within the tolerance `steps` itself, so that the run with equal steps serves for both. ValueError for a ratio not above 0.
    """
    if not ratio > 0:
        raise ValueError(f"cost ratio: {ratio} is not allowed; it must be above 0")
    return steps if abs(ratio - 1.0) <= tolerance + 1e-9 else max(1, round(steps / ratio))


def mixed_ratio(shares: Mapping[str, float], ratios: Mapping[str, float]) -> float:
    """Cost ratio of a run whose steps are shared out over objectives of these ratios. The shares add up to 1."""
    assert abs(sum(shares.values()) - 1.0) < 1e-6, shares
    return sum(share * ratios[name] for name, share in shares.items())


def cost_ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """Lower quartile over rounds of each one's times, over that of the base. What else a machine does only adds to a time, so
    the lower quartile is steadier than the median while others work."""
    quartiles = {name: float(np.quantile(values, 0.25)) for name, values in seconds.items()}
    return {name: value / quartiles[base] for name, value in quartiles.items()}


def choose_winner(scores: Mapping[str, Sequence[float]]) -> str:
    """The objective with the largest mean score over its seeds; the first of them where two are equal.

    The scores must come from prompts other than those of the reported difference. ValueError when seeds are missing.
    """
    counts = {len(values) for values in scores.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"winner: every objective needs the same seeds, got {sorted(counts)} of them")
    return max(scores, key=lambda name: float(np.mean(scores[name])))


def expected_cycles(reach: np.ndarray) -> float:
    """Cycles that serving one text takes in the mean, given the text.

    reach float [n - 1, G]: W_k of the block at answer token i, 0 where the text ends before slot k; the prefill gave the first
    of n tokens.

    With the text y given, token-wise verification of a block that starts at i accepts at least k drafts with probability W_k
    exactly (methods 2.3: P(y, k accepted) = p(y) W_k), and the next block starts k + 1 tokens on. So this is the mean over
    all acceptance draws of real serving, without drawing any.
    """
    starts, slots = reach.shape
    left = np.zeros(starts + slots + 2)
    padded = np.concatenate([np.ones((starts, 1)), reach, np.zeros((starts, 1))], axis=1)
    exactly = padded[:, :-1] - padded[:, 1:]  # [n - 1, G + 1], P(k accepted), k = 0..G
    for i in range(starts - 1, -1, -1):
        left[i] = 1.0 + float(exactly[i] @ left[i + 1 : i + slots + 2])
    return float(left[0]) if starts else 0.0


def product_of_means(alpha: np.ndarray) -> float:
    """1 + sum over k of the product of the mean acceptances of slots 1..k: rates averaged over blocks, then multiplied."""
    return 1.0 + float(np.cumprod(alpha).sum())
