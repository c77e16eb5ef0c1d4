"""The admission of drafts against brute force over all prefix-closed sets, and its ties, budgets and prices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from draftsmith.runtime.allocation import allocate, chain_lengths, chain_lengths_on_device, convex_minorant, prices


def forest(generator, size):
    """(survival, parent): random trees, survivals falling from parent to child."""
    parent = [int(generator.integers(-1, i)) if i else -1 for i in range(size)]
    survival = np.zeros(size)
    for i, above in enumerate(parent):
        survival[i] = generator.random() * (1.0 if above < 0 else survival[above])
    return survival, parent


def closed_sets(parent):
    """Every prefix-closed set of items."""
    for flags in itertools.product((False, True), repeat=len(parent)):
        if all(not flag or above < 0 or flags[above] for flag, above in zip(flags, parent)):
            yield np.array(flags)


def run(survival, parent, **options):
    chosen = allocate(torch.tensor(survival), torch.tensor(parent), **options).numpy()
    assert all(above < 0 or chosen[above] for flag, above in zip(chosen, parent) if flag)
    return chosen


def convex(generator, size):
    return 1.0 + np.cumsum(np.concatenate(([0.0], np.sort(generator.random(size) * 0.6))))


@pytest.mark.parametrize("seed", range(12))
def test_early_stop_is_the_best_of_all_closed_sets(seed):
    generator = np.random.default_rng(seed)
    survival, parent = forest(generator, 8)
    costs, base, sunk = convex(generator, 8), 1.0 + 3 * generator.random(), generator.random()

    def rate(chosen):
        return (base + survival[chosen].sum()) / (sunk + costs[chosen.sum()])

    chosen = run(survival, parent, costs=costs, base_tokens=base, sunk=sunk)
    assert rate(chosen) == pytest.approx(max(rate(c) for c in closed_sets(parent)), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_fixed_rate_and_budget_are_the_best_of_all_closed_sets(seed):
    generator = np.random.default_rng(100 + seed)
    survival, parent = forest(generator, 8)
    costs = convex(generator, 8)

    def gain(chosen):
        return survival[chosen].sum() - 1.3 * costs[chosen.sum()]

    chosen = run(survival, parent, costs=costs, rate=1.3)
    assert gain(chosen) == pytest.approx(max(gain(c) for c in closed_sets(parent)), abs=1e-12)
    for budget in (0, 1, 3, 8, 20):
        chosen = run(survival, parent, budget=budget)
        best = max(survival[c].sum() for c in closed_sets(parent) if c.sum() <= budget)
        assert chosen.sum() == min(budget, 8) and survival[chosen].sum() == pytest.approx(best, abs=1e-12)
    both = run(survival, parent, budget=2, costs=costs, rate=1.3)
    assert both.sum() == min(2, run(survival, parent, costs=costs, rate=1.3).sum())


def test_a_child_is_worth_no_more_than_its_parent():
    """Survivals that rise along a chain (an uncalibrated head): the set stays closed, and the parent's value decides."""
    assert run([0.1, 0.9, 0.5], [-1, 0, -1], budget=1).tolist() == [False, False, True]
    assert run([0.1, 0.9, 0.5], [-1, 0, -1], budget=2).tolist() == [True, False, True]


def test_ties_go_by_item_order_and_worthless_items_are_never_admitted():
    assert run([0.5] * 4, [-1] * 4, budget=2).tolist() == [True, True, False, False]
    assert run([1.0, 1.0, 1.0, 1.0], [-1, -1, 0, 1], budget=3).tolist() == [True, True, True, False]
    assert run([0.5, 0.0, float("nan"), -1.0, 0.5], [-1, -1, -1, -1, 2]).tolist() == [True, False, False, False, False]
    assert run([0.5], [-1], costs=[1.0, 1.5], base_tokens=1.0).tolist() == [False]  # exactly level is no improvement


def test_convex_minorant():
    generator = np.random.default_rng(0)
    for _ in range(20):
        costs = np.cumsum(generator.random(30) * (generator.random(30) < 0.3)) + 1
        low = convex_minorant(costs)
        assert (low <= costs + 1e-12).all() and (np.diff(low, 2) >= -1e-12).all()
        assert low[0] == costs[0] and low[-1] == costs[-1]
        # greatest: every convex function below the costs is below it, so it touches the costs at its corners
        corners = np.flatnonzero(np.diff(low, 2) > 1e-9) + 1
        assert np.allclose(low[corners], costs[corners])
    line = convex(generator, 9)
    assert np.allclose(convex_minorant(line), line)
    assert convex_minorant(np.array([2.0])).tolist() == [2.0]


def test_prices_spread_a_step_and_give_away_what_is_free():
    stairs = np.array([1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 7.0])  # steps of three items
    spread = prices(stairs)
    assert np.allclose(spread.before, convex_minorant(stairs)[:-1])
    assert (spread.marginal[[0, 1, 3, 4]] == 0).all() and spread.marginal[2] < 3.0
    # beyond the plan nobody expects the step to be filled: its first item pays for it
    planned = prices(stairs, planned=2)
    assert planned.marginal.tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 3.0]
    # a low first survival behind the plan does not open the second step, a full one does
    survival, parent = [0.9, 0.8, 0.5, 0.4], [-1, 0, 1, 2]
    assert run(survival, parent, costs=stairs[:5], planned=2, rate=0.25).sum() == 2
    assert run(survival, parent, costs=stairs[:5], planned=4, rate=0.25).sum() == 4


def slot_major(survival, limits):
    rows, slots = survival.shape
    alive = np.where(np.arange(slots) < limits[:, None], survival, 0.0)
    parent = [-1 if k == 0 else (k - 1) * rows + r for k in range(slots) for r in range(rows)]
    return alive.T.ravel(), parent


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("mode", ["all", "budget", "early stop", "rate"])
def test_chains_are_the_same_choice(rows, mode):
    generator = np.random.default_rng(rows)
    for _ in range(30):
        survival = generator.random((rows, 6)) ** 0.3
        survival = survival.cumprod(1) if generator.random() < 0.7 else survival.round(1)  # not monotone, with ties
        if generator.random() < 0.2:
            survival[0, 2] = float("nan")
        limits = generator.integers(0, 7, rows)
        costs = np.sort(generator.random(rows * 6 + 1)).round(1) * 3 + 1
        budget = int(generator.integers(0, rows * 6)) if mode == "budget" else None
        planned = int(generator.integers(0, rows * 6)) if generator.random() < 0.5 else None
        numbers = {"base_tokens": float(rows), "sunk": 0.5, "rate": 0.8 if mode == "rate" else None}
        items, parent = slot_major(survival, limits)
        cost = None if mode in ("all", "budget") else costs
        chosen = run(items, parent, budget=budget, costs=cost, planned=planned, **numbers)
        expected = chosen.reshape(6, rows).sum(0)
        listed = None if cost is None else prices(costs, planned)
        assert chain_lengths(survival, limits, budget=budget, cost=listed, **numbers).tolist() == expected.tolist()
        device = {} if listed is None else {k: torch.from_numpy(v.copy()) for k, v in listed._asdict().items()}
        lengths = chain_lengths_on_device(torch.tensor(survival), torch.tensor(limits), budget=budget, **device, **numbers)
        assert lengths.tolist() == expected.tolist()
