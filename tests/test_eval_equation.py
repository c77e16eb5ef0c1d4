"""The equation reproduces the known numbers: flat optimum at c = 0.05, ceilings, break-even, arithmetic."""

import itertools

import pytest

from draftsmith.eval import equation as eq


def test_expected_tokens_equals_the_sum_over_slots():
    for alpha, gamma in itertools.product((0.0, 0.3, 0.8, 0.999999, 1.0), (0, 1, 7, 40)):
        direct = 1.0 + sum(alpha**k for k in range(1, gamma + 1))
        assert eq.expected_tokens(alpha, gamma) == pytest.approx(direct, rel=1e-12)
        assert eq.expected_tokens_per_slot([alpha] * gamma) == pytest.approx(direct, rel=1e-12)
    assert eq.expected_tokens_per_slot([0.9, 0.5, 0.0, 1.0]) == pytest.approx(1 + 0.9 + 0.45)


def test_flat_optimum_at_alpha_08_c_005():
    gamma, speedup = eq.best_gamma(0.8, 0.05)
    assert gamma == 8
    assert speedup == pytest.approx(3.09, abs=0.005)
    assert eq.flat_region(0.8, 0.05) == (6, 11)
    for outside in (5, 12):
        assert 1 - eq.speedup_sequential(0.8, outside, 0.05) / speedup == pytest.approx(0.045, abs=0.003)


@pytest.mark.parametrize(("alpha", "best", "gamma"), [(0.95, 6.6, 21), (0.8, 3.1, 8)])
def test_best_speedup_under_a_ceiling_of_20(alpha, best, gamma):
    found_gamma, found = eq.best_gamma(alpha, 0.05)
    assert found == pytest.approx(best, abs=0.05)
    assert abs(found_gamma - gamma) <= 1
    assert eq.ceiling_sequential(1.0, 0.05) == pytest.approx(20.0)
    assert found < eq.ceiling_sequential(alpha, 0.05)


def test_unimodal_and_break_even():
    for alpha, c in itertools.product((0.05, 0.3, 0.62, 0.9, 0.99), (0.01, 0.1, 0.3, 0.5, 0.95)):
        values = [eq.speedup_sequential(alpha, gamma, c) for gamma in range(200)]
        gamma, best = eq.best_gamma(alpha, c)
        assert best == pytest.approx(max(values), rel=1e-12)
        rises = [b > a for a, b in zip(values, values[1:], strict=False)]
        assert rises == sorted(rises, reverse=True)
        assert (gamma >= 1) == (alpha > c)
        assert values[1] == pytest.approx((1 + alpha) / (1 + c))
        assert best < 1 / c


def test_arithmetic_doubles_while_the_clock_falls():
    assert eq.arithmetic_increase(0.8, 7, 0.05) == pytest.approx(2.01, abs=0.005)
    assert eq.arithmetic_increase(0.8, 0, 0.05) == pytest.approx(1.0)


def test_parallel_form():
    # Qwen3-8B, DSpark: tau 5.65 / 5.28 / 3.50 with c_block .22 and 7 head steps of .04 in all, v = 1
    for tau, expected in ((5.65, 4.50), (5.28, 4.20), (3.50, 2.78)):
        assert eq.speedup_parallel(tau, 7, c_block=0.22, c_step=0.04 / 7, v=1.0) == pytest.approx(expected, abs=0.02)
    bare = eq.speedup_parallel(3.0, 7, c_block=0.4, c_step=0.02, v=1.4)
    assert bare == pytest.approx(3.0 / 1.94)
    assert eq.speedup_parallel(3.0, 7, c_block=0.4, c_step=0.02, v=1.4, overhead=0.06) == pytest.approx(3.0 / 2.0)
    assert eq.speedup_parallel(3.0, 7, c_block=0.4, c_step=0.02, v=1.4, overhead=0.06, plain_overhead=0.1) == pytest.approx(
        1.65
    )
    assert eq.ceiling_parallel(7, c_block=0.4, v=1.6) == pytest.approx(4.0)


def test_best_gamma_parallel_searches_past_a_step_in_v():
    steps = {1: 1.0, 2: 2.5, 3: 2.5, 4: 2.5}
    acceptance = [0.95] * 4
    gamma, best = eq.best_gamma_parallel(acceptance, c_block=0.1, c_step=0.0, v=steps.__getitem__)
    values = {g: eq.expected_tokens(0.95, g) / (0.1 + v) for g, v in steps.items()}
    assert (gamma, best) == (max(values, key=values.get), pytest.approx(max(values.values())))
    assert eq.best_gamma_parallel([0.1] * 4, c_block=0.5, c_step=0.1, v=lambda g: 1.5) == (0, 1.0)


def test_break_even_acceptance():
    alpha = eq.break_even_acceptance(7, 2.0)
    assert alpha is not None
    assert eq.expected_tokens(alpha, 7) == pytest.approx(2.0)
    assert eq.break_even_acceptance(7, 8.5) is None
    assert eq.break_even_acceptance(7, 0.9) == 0.0


def test_ridge_and_prefill():
    assert eq.ridge_point(989e12, 3.35e12) == pytest.approx(295, abs=1)
    assert eq.with_prefill(2.0, 0.0, 1.0) == pytest.approx(2.0)
    assert eq.with_prefill(2.0, 0.5, 1.0) == pytest.approx(1 / 0.75)
    assert eq.with_prefill(2.0, 1.0, 1.25) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eq.expected_tokens(1.2, 3), "alpha: got 1.2"),
        (lambda: eq.expected_tokens(0.5, -1), "gamma: got -1"),
        (lambda: eq.best_gamma(0.5, 0.0), "c: got 0"),
        (lambda: eq.speedup_parallel(2.0, 7, c_block=0.1, c_step=0.0, v=0.0), "v: got 0.0"),
        (lambda: eq.expected_tokens_per_slot([0.5, -0.1]), "acceptance of slot 2"),
    ],
)
def test_mistakes_name_key_value_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
