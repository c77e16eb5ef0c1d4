"""Bootstrap coverage, and two-sample tests that are calibrated under the null and see real differences."""

import numpy as np
import pytest
from scipy.stats import bootstrap, chi2_contingency

from draftsmith.eval import stats


def _times(rng, units, speedup, noise):
    tokens = rng.integers(20, 129, units).astype(float)
    difficulty = rng.lognormal(0.0, noise, units)
    return tokens, tokens * 0.03, tokens * 0.03 / (speedup * difficulty)


def test_ratio_is_the_ratio_of_totals_when_lengths_agree():
    plain, spec, tokens = [2.0, 4.0, 6.0], [1.0, 4.0, 3.0], [10, 20, 30]
    ratio, low, high = stats.bootstrap_ratio(plain, tokens, spec, tokens)
    assert ratio == pytest.approx(12.0 / 8.0)
    assert 1.0 <= low <= ratio <= high <= 2.0


def test_ratio_is_per_token_when_lengths_differ():
    ratio, low, high = stats.bootstrap_ratio([1.0, 1.0], [10, 10], [1.0, 1.0], [20, 20])
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))


def test_interval_agrees_with_scipy_and_is_deterministic():
    rng = np.random.default_rng(3)
    tokens, plain, spec = _times(rng, 30, 1.3, 0.2)
    ratio, low, high = stats.bootstrap_ratio(plain, tokens, spec, tokens, seed=1)
    peer = bootstrap(
        (plain, spec), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, method="percentile",
        n_resamples=10_000, rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert low == pytest.approx(peer.low, rel=0.01) and high == pytest.approx(peer.high, rel=0.01)
    assert (ratio, low, high) == stats.bootstrap_ratio(plain, tokens, spec, tokens, seed=1)


def test_coverage_of_the_interval():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        tokens, plain, spec = _times(rng, 40, 1.2, 0.1)
        # the population value: E[cost] / E[cost / (s d)] with d lognormal
        truth = 1.2 / np.exp(0.1**2 / 2)
        _, low, high = stats.bootstrap_ratio(plain, tokens, spec, tokens, resamples=1000, seed=trial)
        hits += low <= truth <= high
    assert 0.87 <= hits / 200 <= 0.99


def test_paired_interval_is_narrow_when_difficulty_is_shared():
    rng = np.random.default_rng(1)
    plain = rng.uniform(1, 50, 20)
    _, low, high = stats.bootstrap_ratio(plain, plain, plain / 1.5, plain)
    assert low == pytest.approx(1.5) and high == pytest.approx(1.5)


@pytest.mark.parametrize("bad", [([1.0], [1], [1.0], [1]), ([1.0, 1.0], [1, 0], [1.0, 1.0], [1, 1])])
def test_bootstrap_refuses_what_it_cannot_measure(bad):
    with pytest.raises(ValueError, match="bootstrap"):
        stats.bootstrap_ratio(*bad)


def test_chi_square_equals_scipy():
    table = np.array([[30, 50, 20, 8], [40, 38, 25, 11]])
    statistic, degrees, p_value = stats.chi_square_homogeneity(table)
    peer = chi2_contingency(table, correction=False)
    assert (statistic, degrees, p_value) == pytest.approx((peer.statistic, peer.dof, peer.pvalue))
    assert stats.chi_square_homogeneity(np.array([[10], [12]])) == (0.0, 0, 1.0)


def test_contingency_pools_rare_tokens_and_keeps_every_count():
    first = [1] * 50 + [2] * 30 + list(range(100, 120))
    second = [1] * 45 + [2] * 35 + list(range(110, 130))
    table = stats.contingency(first, second)
    assert table.tolist() == [[50, 30, 20], [45, 35, 20]]
    assert stats.contingency([1] * 50 + [9], [1] * 51).tolist() == [[51], [51]]


def _chains(rng, law, samples):
    """Token sequences [N, 3] of a Markov chain: law [V, V] rows, started at token 0."""
    out = np.zeros((samples, 3), dtype=np.int64)
    state = np.zeros(samples, dtype=np.int64)
    for k in range(3):
        u = rng.random(samples)[:, None]
        state = (u > law[state].cumsum(-1)).sum(-1).clip(max=law.shape[0] - 1)
        out[:, k] = state
    return out


def test_two_sample_p_value_is_calibrated_under_the_null():
    rng = np.random.default_rng(5)
    laws = [rng.dirichlet(np.full(12, 0.5), 12) for _ in range(2)]
    values = []
    for trial in range(200):
        sides = [[_chains(rng, law, 100) for law in laws] for _ in range(2)]
        values.append(stats.two_sample_sequences(*sides, permutations=99, seed=trial).p_value)
    assert 0.02 <= np.mean(np.array(values) <= 0.1) <= 0.17
    assert 0.42 <= np.mean(values) <= 0.58


def test_two_sample_sees_a_bias_in_tokens_and_in_transitions():
    rng = np.random.default_rng(6)
    law = rng.dirichlet(np.full(8, 1.0), 8)
    same = [_chains(rng, law, 600)]
    tilted = law**1.4
    tilted /= tilted.sum(1, keepdims=True)
    assert stats.two_sample_sequences(same, [_chains(rng, tilted, 600)]).p_value <= 0.005
    # equal law at every position, positions independent instead of equal: only pairs can tell
    first = np.repeat(rng.integers(0, 2, (400, 1)), 3, axis=1)
    second = rng.integers(0, 2, (400, 3))
    result = stats.two_sample_sequences([first], [second])
    assert result.p_value == pytest.approx(1 / 2000)
    assert min(part["p_value"] for part in result.by_position) > 0.001
    assert result.samples == 400


def test_identical_samples_give_p_one():
    tokens = np.arange(300).reshape(100, 3) % 5
    assert stats.two_sample_sequences([tokens], [tokens.copy()]).p_value == 1.0
