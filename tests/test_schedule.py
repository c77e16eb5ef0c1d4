"""Schedulers: exact whatever they choose (enumerated on the shipped code), and what they do with what they know."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_verify import EXACT, G, Tree, V, deviation, outcome

from draftsmith.runtime import verify
from draftsmith.runtime.allocation import allocate
from draftsmith.runtime.costs import CostTable
from draftsmith.runtime.propose import Proposal
from draftsmith.runtime.schedule import CycleView, DraftPlan, FixedLength, LoadAware, Threshold

SLOTS = tuple(range(8))


def costs(verify_ms, *, draft_ms=0.3, ragged=True, acceptance=0.7):
    """Costs per pass as a function of its tokens."""
    return CostTable.from_functions(
        draft=lambda n, g, c: draft_ms * n if g else 0.0, verify=lambda r, t, c: verify_ms(t), slots=SLOTS, ragged=ragged,
        acceptance={"greedy": [acceptance] * 7, "sampled": [acceptance] * 7},
    )  # fmt: skip


def view(rows=1, *, room=100, num_slots=7, hot=False, positions=100):
    return CycleView(list(range(rows)), [positions] * rows, [room] * rows, num_slots, hot)


def proposal(rows, slots, survival=None):
    return Proposal(torch.zeros(rows, slots, dtype=torch.int64), torch.full((rows,), slots), survival=survival)


# ---- exactness ------------------------------------------------------------------------------------------------------


def conditionals(path):
    """c_k of each slot: any function of x_<k."""
    return [0.45 + 0.5 * ((3 * sum(path[:k]) + 2 * k + 3) % 5) / 4 for k in range(G)]


def live(path):
    return torch.tensor([conditionals(path)], dtype=torch.float64).cumprod(1).float()


NEIGHBOUR = torch.tensor([[0.8, 0.55, 0.45, 0.2]])
SHIPPED = {
    "rate": lambda: LoadAware(costs(lambda t: 1.0 + 0.2 * t, acceptance=0.8)),
    "rate on stairs": lambda: LoadAware(costs(lambda t: 1.0 + 0.5 * (t // 3), draft_ms=0.1, acceptance=0.8)),
    "budget": lambda: LoadAware(costs(lambda t: 1.0 + 0.25 * t, draft_ms=0.1, acceptance=0.8), cut="budget"),
    "padded": lambda: LoadAware(costs(lambda t: 1.0 + 0.2 * t, ragged=False, acceptance=0.8)),
    "threshold": lambda: Threshold(0.4),
}


def shipped_lengths(scheduler, tree, rows):
    """Lengths of the first row for each of its 81 draft paths, beside rows whose drafts stay as they are."""
    seen = view(rows, num_slots=G, hot=True)
    for row in range(rows):
        scheduler.begin(row)
    for _ in range(12):  # rows that differ: a budget is spent unequally
        plan = scheduler.plan(seen)
        passed = [(2, 4, 1)[row] if row in plan.rows else 0 for row in range(rows)]
        scheduler.observe(seen, [4 if row in plan.rows else 0 for row in range(rows)], passed)
    plan = scheduler.plan(seen)
    assert 0 in plan.rows
    found = []
    for path in tree.chains()[0]:
        survival = torch.cat([live(path) if i == 0 else NEIGHBOUR for i in plan.rows])[:, : plan.slots]
        found.append(int(scheduler.allocate(seen, plan, proposal(len(plan.rows), plan.slots, survival))[0]))
    return torch.tensor(found)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", SHIPPED)
def test_exact_under_the_shipped_schedulers(kind, rule, rows):
    """Live survivals depend on x_<k; the output law is still p, for every draft path of the neighbours."""
    tree = Tree(5, 0.6)
    lengths = shipped_lengths(SHIPPED[kind](), tree, rows)
    # else the rule would decide nothing here; a row alone gets the whole budget, or the whole step
    assert len(set(lengths.tolist())) > 1 or (kind, rows) in (("budget", 1), ("rate on stairs", 1))
    assert deviation(tree, outcome(tree, verify.RULES[rule], rule, lengths)[0]) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_the_forbidden_rule_is_biased(rule):
    """Arg-max over live survivals: s_{k+1}, hence x_k, may rescue or drop slot k."""
    tree = Tree(5, 0.6)
    times = {1: 1.0, 2: 1.6, 3: 1.9, 4: 2.1, 5: 2.2}
    survival = {x: torch.tensor([0.4, 0.04 if x == 0 else 0.39, 0.37, 0.35]).cummin(0).values for x in range(V)}
    lengths = torch.tensor([forbidden(survival[path[0]], times.__getitem__, 0.0) for path in tree.chains()[0]])
    assert set(lengths.tolist()) == {0, 4}
    assert deviation(tree, outcome(tree, verify.RULES[rule], rule, lengths)[0]) > 0.01


def forbidden(survival, verify_ms, draft_ms):
    """The length of the largest Theta over all lengths, live survivals in hand. Only here."""
    rates = [(1 + float(survival[:n].sum())) / (draft_ms + verify_ms(1 + n)) for n in range(len(survival) + 1)]
    return max(range(len(rates)), key=rates.__getitem__)


def first_token_law(lengths_of):
    """Law of the first output token for p = (.7, .3), q = (.5, .5) in both of two slots (methods 1.4, Paper App. A)."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    law = torch.zeros(2, dtype=torch.float64)
    for path in itertools.product(range(2), repeat=2):
        tokens = torch.tensor([path])
        lengths = torch.tensor([lengths_of(path)])
        ps, qs = p.expand(1, 3, 2), q.expand(1, 2, 2)
        thresholds = verify.token_wise_thresholds(ps, qs, tokens, lengths)
        for cell in itertools.product((True, False), repeat=2):
            passed = torch.tensor([cell])
            mass = 0.25 * torch.where(passed, thresholds, 1 - thresholds).prod()
            verdict = verify.token_wise(ps, qs, tokens, lengths, torch.where(passed, thresholds / 2, (1 + thresholds) / 2))
            if int(verdict.accepted) > 0:
                law[path[0]] += mass
            else:
                law += mass * verdict.residual[0]
    return law.tolist()


def test_the_example_of_the_notes():
    """.85 / .15 from the forbidden rule and from no other: c_2 is 1 after token 0 and 0 after token 1."""
    times = {1: 1.0, 2: 1.6, 3: 1.9}

    def survival(path):
        return torch.tensor([0.5, 0.5 if path[0] == 0 else 0.0])

    law = first_token_law(lambda path: forbidden(survival(path), times.__getitem__, 0.0))
    assert law == pytest.approx([0.85, 0.15], abs=EXACT)
    table = CostTable.from_functions(
        draft=lambda n, g, c: 0.0, verify=lambda r, t, c: times[t], rows=(1,), slots=(0, 1, 2),
        acceptance={"greedy": [0.9, 0.9]},
    )  # fmt: skip

    def scheduled(scheduler):
        scheduler.begin(0)
        seen = view(num_slots=2)
        plan = scheduler.plan(seen)
        assert plan.rows == [0] and plan.slots == 2
        return lambda path: int(scheduler.allocate(seen, plan, proposal(1, 2, survival(path)[None]))[0])

    def allocated(**options):
        return lambda path: int(allocate(survival(path), torch.tensor([-1, 0]), **options).sum())

    times_list = list(times.values())
    for name, lengths_of in {
        "early stop": allocated(costs=times_list, base_tokens=1.0),
        "rate": allocated(costs=times_list, rate=1.05),
        "measured prices": allocated(costs=times_list, base_tokens=1.0, planned=0),
        "budget": allocated(budget=1),
        "all": allocated(),
        "load aware": scheduled(LoadAware(table)),
        "load aware, budget": scheduled(LoadAware(table, cut="budget")),
        "threshold": scheduled(Threshold(0.5)),
        "fixed": scheduled(FixedLength(2)),
    }.items():
        assert first_token_law(lengths_of) == pytest.approx([0.7, 0.3], abs=EXACT), name


# ---- fixed and threshold --------------------------------------------------------------------------------------------


def test_fixed_length():
    scheduler = FixedLength(3)
    seen = CycleView([4, 7, 9], [10, 10, 10], [100, 0, 2], 7, False)
    plan = scheduler.plan(seen)
    assert plan == DraftPlan([0, 2], 3)
    assert scheduler.allocate(seen, plan, proposal(2, 3)).tolist() == [3, 2]
    assert FixedLength(0).plan(seen) == DraftPlan([], 0)
    assert FixedLength(9).plan(view(room=1)).slots == 7  # what is drafted does not depend on other rows' room
    assert FixedLength(9).plan(view(num_slots=0)).rows == []
    with pytest.raises(ValueError, match="gamma: -1"):
        FixedLength(-1)


def test_threshold_stops_at_the_first_failure():
    scheduler = Threshold(0.5)
    seen = view(4)
    plan = scheduler.plan(seen)
    survival = torch.tensor([[0.9, 0.8, 0.5, 0.4], [0.9, 0.4, 0.8, 0.8], [0.1] * 4, [1.0] * 4])
    assert scheduler.allocate(seen, plan, proposal(4, 4, survival)).tolist() == [3, 1, 1, 4]
    # without survivals, past acceptance: one row that always passes, one that never does
    for _ in range(40):
        scheduler.observe(view(2), [7, 7], [7, 0])
    assert scheduler.allocate(view(2), DraftPlan([0, 1], 7), proposal(2, 7)).tolist() == [7, 1]
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match="threshold"):
            Threshold(value)


# ---- load aware: what it chooses --------------------------------------------------------------------------------------


def settled(table, rows, accept, *, cycles=60, **options):
    """A scheduler after some cycles whose drafts pass `accept` slots in every row; its last plan."""
    scheduler = LoadAware(table, **options)
    for row in range(rows):
        scheduler.begin(row)
    plan = None
    for _ in range(cycles):
        seen = view(rows)
        plan = scheduler.plan(seen)
        lengths = [0] * rows
        for i, n in zip(plan.rows, scheduler.allocate(seen, plan, proposal(len(plan.rows), plan.slots)).tolist()):
            lengths[i] = n
        scheduler.observe(seen, lengths, [min(n, accept(i)) for i, n in enumerate(lengths)])
    return scheduler, plan


def test_long_drafts_where_tokens_are_free_and_none_where_they_are_dear():
    free = costs(lambda t: 10.0 + 0.001 * t)
    assert settled(free, 4, lambda i: 7)[1].slots == 7
    dear = costs(lambda t: 1.0 * t)
    assert settled(dear, 4, lambda i: 0)[1] == DraftPlan([], 0)


def test_only_the_rows_that_pay_are_drafted():
    table = costs(lambda t: 10.0 + 1.5 * t, draft_ms=0.5)
    _, plan = settled(table, 4, lambda i: 7 if i == 2 else 0, cycles=50)
    assert plan.rows == [2] and plan.slots > 3


def test_load_turns_speculation_off_and_on_again_at_once():
    """Memory-bound alone, compute-bound together."""
    table = costs(lambda t: max(10.0, 1.2 * t), draft_ms=0.5)
    scheduler, plan = settled(table, 1, lambda i: 2)
    assert plan.slots > 1
    for _ in range(4):
        plan = scheduler.plan(view(16))
        scheduler.observe(view(16), [0] * 16, [0] * 16)
    assert plan.rows == []
    assert scheduler.plan(view(1)).rows == [0]


def test_probes_back_off_and_cost_little():
    table = costs(lambda t: 10.0 + 0.2 * t, draft_ms=0.2, acceptance=0.1)  # nothing is ever accepted
    scheduler = LoadAware(table)
    for row in range(4):
        scheduler.begin(row)
    probes, spent, plain = [], 0.0, 0.0
    for cycle in range(3000):
        seen = view(4)
        plan = scheduler.plan(seen)
        lengths = [0] * 4
        if plan.rows:
            lengths = scheduler.allocate(seen, plan, proposal(len(plan.rows), plan.slots)).tolist()
            probes.append(cycle)
        scheduler.observe(seen, lengths, [0] * 4)
        spent += table.cycle_ms(4, plan.slots, 100, hot=False, drafted=len(plan.rows), tokens=4 + sum(lengths))
        plain += table.cycle_ms(4, 0, 100, hot=False)
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert len(probes) >= 3 and gaps == sorted(gaps)
    assert spent / plain < 1.01  # half a percent, and the first look
    # rows leave: it looks again at once
    assert scheduler.plan(view(3)).rows == [0, 1, 2]


def test_a_probe_finds_out_that_drafting_pays_again():
    table = costs(lambda t: 10.0 + 0.5 * t, draft_ms=1.0, acceptance=0.05)
    scheduler, plan = settled(table, 4, lambda i: 0, cycles=30)
    assert plan.rows == []
    drafted = 0
    for _ in range(1500):
        seen = view(4)
        plan = scheduler.plan(seen)
        lengths = [0] * 4
        for i, n in zip(plan.rows, scheduler.allocate(seen, plan, proposal(len(plan.rows), plan.slots)).tolist()):
            lengths[i] = n
        scheduler.observe(seen, lengths, lengths)  # everything passes now
        drafted += bool(plan.rows)
    assert drafted > 500 and plan.slots == 7


def test_room_and_proposals_bound_the_lengths():
    table = costs(lambda t: 10.0 + 0.001 * t)
    scheduler, _ = settled(table, 3, lambda i: 7)
    seen = CycleView([0, 1, 2], [100] * 3, [0, 2, 100], 7, False)
    plan = scheduler.plan(seen)
    assert plan.rows == [1, 2]
    drafted = Proposal(torch.zeros(2, 7, dtype=torch.int64), torch.tensor([7, 3]))
    assert scheduler.allocate(seen, plan, drafted).tolist() == [2, 3]
    assert scheduler.plan(CycleView([0], [100], [0], 7, False)) == DraftPlan([], 0)
    assert scheduler.plan(CycleView([0], [100], [5], 0, False)) == DraftPlan([], 0)


def test_a_failed_draft_and_rows_beyond_the_table_do_no_harm():
    table = costs(lambda t: 10.0 + 0.01 * t)
    scheduler = LoadAware(table)
    for row in range(40):
        scheduler.begin(row)
    for _ in range(30):
        scheduler.plan(view(40))  # the proposer raises: no allocate, nothing verified
        scheduler.observe(view(40), [0] * 40, [0] * 40)
    assert len(scheduler.plan(view(40)).rows) == 40


def test_what_was_learnt_is_handed_on():
    table = costs(lambda t: 10.0 + 0.5 * t, acceptance=0.5)
    scheduler, _ = settled(table, 4, lambda i: 2, cycles=80)
    learnt = scheduler.learnt()["greedy"]
    assert learnt[0] > 0.93 and learnt[1] > 0.93 and learnt[2] < 0.3
    again = LoadAware(table.with_acceptance({"greedy": learnt}))
    again.begin(0)
    assert 2 <= again.plan(view(1)).slots <= 4


def test_settings_are_checked():
    table = costs(lambda t: 1.0 * t)
    for options in ({"cut": "best"}, {"probe": 0}, {"replan": 0}, {"hysteresis": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            LoadAware(table, **options)


def test_a_clock_corrects_a_table_that_flatters_drafting():
    """The table says a draft costs nothing; in truth it takes half a cycle."""
    table = costs(lambda t: 10.0 + 0.01 * t, draft_ms=0.0, acceptance=0.25)
    now = [0.0]
    plans = {}
    for name, clock in (("believed", None), ("timed", lambda: now[0])):
        scheduler = LoadAware(table, clock=clock)
        scheduler.begin(0)
        for cycle in range(400):
            seen = view(1)
            plan = scheduler.plan(seen)
            lengths = scheduler.allocate(seen, plan, proposal(len(plan.rows), plan.slots)).tolist() if plan.rows else [0]
            now[0] += 0.015 if plan.rows else 0.010
            scheduler.observe(seen, lengths, [min(lengths[0], int(cycle % 4 == 0))])
            if cycle % 50 == 40:  # requests end, and sometimes there is no room: a plain cycle is seen
                scheduler.plan(view(1, room=0))
                now[0] += 0.010
                scheduler.observe(view(1, room=0), [0], [0])
        plans[name] = plan
    assert plans["believed"].rows == [0] and plans["timed"].rows == []
