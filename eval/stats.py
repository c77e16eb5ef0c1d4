"""Statistics of the measurement: bootstrap intervals of ratios, two-sample tests of sampled tokens. Numpy and scipy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

_CHUNK = 2_000_000  # resampled indices held at once


def ratio_of_rates(
    base_seconds: np.ndarray, base_tokens: np.ndarray, other_seconds: np.ndarray, other_tokens: np.ndarray
) -> np.ndarray:
    """(sum base_seconds / sum base_tokens) / (sum other_seconds / sum other_tokens) over the last axis.

    Time per committed token against time per committed token. With equal token counts (greedy) this is the plain ratio of
    total times; with sampling, where lengths differ, it is the ratio of throughputs over the whole run.
    """
    base = base_seconds.sum(-1) / base_tokens.sum(-1)
    other = other_seconds.sum(-1) / other_tokens.sum(-1)
    return base / other


def bootstrap_ratio(
    base_seconds: Sequence[float],
    base_tokens: Sequence[float],
    other_seconds: Sequence[float],
    other_tokens: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(ratio, low, high): `ratio_of_rates` with a percentile bootstrap interval that resamples units (prompts), paired.

    All four sequences have one entry per unit, at least two units; a unit keeps its two sides together. ValueError otherwise.
    """
    columns = np.stack([np.asarray(x, dtype=np.float64) for x in (base_seconds, base_tokens, other_seconds, other_tokens)])
    units = columns.shape[1]
    if units < 2:
        raise ValueError(f"bootstrap: got {units} unit(s), allowed: 2 or more")
    if not (columns > 0).all():
        raise ValueError("bootstrap: every unit needs a positive time and at least one token on both sides")
    generator = np.random.default_rng(seed)
    draws = []
    step = max(_CHUNK // units, 1)
    for start in range(0, resamples, step):
        index = generator.integers(0, units, size=(min(step, resamples - start), units))
        draws.append(ratio_of_rates(*(column[index] for column in columns)))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.concatenate(draws), [tail, 1.0 - tail])
    return float(ratio_of_rates(*columns)), float(low), float(high)


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log)): the right mean of ratios."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not (array > 0).all():
        raise ValueError("geometric mean: needs at least one value, all above 0")
    return float(np.exp(np.log(array).mean()))


def contingency(
    first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray, *, min_expected: float = 5.0
) -> np.ndarray:
    """Counts int64 [2, K] of two samples over categories; rare categories are pooled into one last bin.

    A category stays alone when the smaller of its two expected counts reaches `min_expected` (Cochran's rule). The pooled bin
    joins the rarest kept one when it is itself too small.
    """
    values, inverse = np.unique(np.concatenate([first, second]), return_inverse=True)
    side = np.repeat([0, 1], [len(first), len(second)])
    table = np.zeros((2, len(values)), dtype=np.int64)
    np.add.at(table, (side, inverse), 1)
    share = min(len(first), len(second)) / max(len(first) + len(second), 1)
    expected = table.sum(0) * share
    kept, rare = table[:, expected >= min_expected], table[:, expected < min_expected].sum(1, keepdims=True)
    if rare.sum() == 0:
        return kept
    if rare.sum() * share < min_expected and kept.shape[1] > 0:
        smallest = kept.sum(0).argmin()
        kept = kept.copy()
        kept[:, smallest] += rare[:, 0]
        return kept
    return np.concatenate([kept, rare], axis=1)


def chi_square_homogeneity(table: np.ndarray) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p-value) of Pearson's test that both rows of counts [2, K] have one law.

    With a single category there is nothing to test: (0, 0, 1).
    """
    table = np.asarray(table, dtype=np.float64)
    table = table[:, table.sum(0) > 0]
    degrees = table.shape[1] - 1
    if degrees < 1:
        return 0.0, 0, 1.0
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    return statistic, degrees, float(chi2.sf(statistic, degrees))


@dataclass(frozen=True)
class TwoSampleResult:
    """Outcome of `two_sample_sequences`: permutation p-value of the pooled statistic, and the parts it is pooled from."""

    p_value: float
    statistic: float
    samples: int
    permutations: int
    by_position: list[dict[str, float | int]]


def two_sample_sequences(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], *, permutations: int = 1999, seed: int = 0
) -> TwoSampleResult:
    """Do two samplers draw token sequences from one law?

    first[i], second[i]: int64 [N, K], N sequences of K tokens drawn for prompt i (-1 after the end). The statistic is the sum
    over prompts of Pearson's chi-square at each position's token and at each pair of neighbouring tokens. Positions of one
    sequence depend on each other, so the sum has no chi-square law: its p-value comes from permuting the labels of whole
    sequences within each prompt, which is exact in every sample size. Smallest possible p: 1 / (permutations + 1).
    """
    if not first or len(first) != len(second):
        raise ValueError("two-sample test: needs the same prompts on both sides, at least one")
    features = [_features(np.concatenate([a, b])) for a, b in zip(first, second, strict=True)]
    generator = np.random.default_rng(seed)
    observed, null = 0.0, np.zeros(permutations)
    for (a, b), columns in zip(zip(first, second, strict=True), features, strict=True):
        labels = np.repeat([0, 1], [len(a), len(b)])
        shuffled = generator.permuted(np.tile(labels, (permutations, 1)), axis=1)
        for column in columns:
            codes = _pooled_codes(column, len(a), len(b))
            observed += _statistics(codes, labels[None])[0]
            null += _statistics(codes, shuffled)
    # a relative slack: equal tables must count as ties whatever the order of their sums
    exceed = int((null >= observed * (1.0 - 1e-9)).sum())
    positions = []
    for k in range(first[0].shape[1]):
        parts = [chi_square_homogeneity(contingency(a[:, k], b[:, k])) for a, b in zip(first, second, strict=True)]
        statistic, degrees = sum(p[0] for p in parts), sum(p[1] for p in parts)
        p_value = float(chi2.sf(statistic, degrees)) if degrees else 1.0
        positions.append({"position": k + 1, "chi_square": statistic, "degrees": degrees, "p_value": p_value})
    samples = sum(len(a) for a in first)
    return TwoSampleResult((exceed + 1) / (permutations + 1), float(observed), samples, permutations, positions)


def _features(sequences: np.ndarray) -> list[np.ndarray]:
    """Category codes of [N, K] sequences: each position's token, then each pair of neighbouring tokens."""
    columns = [sequences[:, k] for k in range(sequences.shape[1])]
    for k in range(sequences.shape[1] - 1):
        columns.append(np.unique(sequences[:, k : k + 2], axis=0, return_inverse=True)[1].reshape(-1))
    return columns


def _pooled_codes(column: np.ndarray, num_first: int, num_second: int, min_expected: float = 5.0) -> np.ndarray:
    """Small category codes with rare categories pooled by their total count (labels unseen: permutation stays exact)."""
    _, codes, counts = np.unique(column, return_inverse=True, return_counts=True)
    expected = counts * min(num_first, num_second) / (num_first + num_second)
    order = np.cumsum(expected >= min_expected) - 1
    target = np.where(expected >= min_expected, order, order.max() + 1)
    return target[codes.reshape(-1)]


def _statistics(codes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Pearson's statistic float64 [P] for each row of labels [P, N] in {0, 1} over category codes [N]."""
    one_hot = np.eye(int(codes.max()) + 1)[codes]
    totals, ones = one_hot.sum(0), labels @ one_hot
    num_second, num_all = labels.sum(1, keepdims=True), labels.shape[1]
    expected_ones = totals * num_second / num_all
    expected_zeros = totals - expected_ones
    return ((ones - expected_ones) ** 2 * (1.0 / expected_ones + 1.0 / expected_zeros)).sum(1)
