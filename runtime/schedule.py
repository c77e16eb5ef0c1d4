"""How many tokens each row drafts and verifies, cycle by cycle.

A scheduler is asked twice. `plan`, before drafting, knows past cycles only: whether to draft, which rows, how many slots.
`allocate`, after drafting, may cut each row's draft before the target runs (trimming afterwards saves nothing). The engine then
reports what happened with `observe`.

Why the output stays exact (the design rule of methods 1.4: slot k's fate may depend on x_<k, whole q vectors, past cycles and
other rows, never on x_k or on what follows from it):
- `plan` and everything kept between cycles are functions of past cycles: no token of this draft exists yet;
- FixedLength looks at nothing; Threshold stops at the first survival below a constant, and s_k does not depend on x_k;
- LoadAware cuts with allocation.chain_lengths over live survivals, whose docstring shows that an item is admitted by items
  that do not depend on its token; the price of time and the budget come from past cycles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .acceptance import AcceptanceEstimator
from .allocation import chain_lengths, chain_lengths_on_device
from .costs import GREEDY, SAMPLED, CostTable
from .planning import Choice, CycleCosts, Floats, Looking, Timing, search_padded, search_ragged
from .propose import Proposal

CUTS = ("rate", "budget", "none")
_BUCKET = 64  # tokens of context that share a table
_LONGEST = 256  # cycles between probes at most, unless probing is dear
_PROBE_LOSS = 0.005
_PROBE_SLOTS = 3
_PATIENCE = 4  # an unchanged choice stands for up to so many times `replan` cycles
_WARM_UP = 12.0  # observations before anything is cut


@dataclass(frozen=True)
class CycleView:
    """The rows of this cycle, in order.

    slots: engine slot of each row; positions: committed length; room: drafts that could still be committed (0 or less: none);
    num_slots: the most the proposer drafts; hot: some row samples (temperature above 0).
    """

    slots: list[int]
    positions: list[int]
    room: list[int]
    num_slots: int
    hot: bool


@dataclass(frozen=True)
class DraftPlan:
    """rows: indices into view.slots that are drafted (empty: a plain cycle); slots: asked of the proposer; budget: the most
    drafts that are verified, over all rows (None: no limit); survival: whether `allocate` will look at live survivals."""

    rows: list[int]
    slots: int
    budget: int | None = None
    survival: bool = False


class Scheduler(Protocol):
    """wants_survival: whether it reads proposal.survival (a proposer may skip computing it otherwise)."""

    wants_survival: bool

    def begin(self, row: int) -> None:
        """A request joined engine slot `row`."""

    def plan(self, view: CycleView) -> DraftPlan:
        """Before drafting: from past cycles only."""

    def allocate(self, view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
        """After drafting: drafts to verify of each planned row, int64 [len(plan.rows)], at most proposal.lengths and room."""

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        """After the commit: drafts verified and accepted of every row of the view (0, 0 where a row was not drafted)."""

    def release(self, row: int) -> None:
        """The request in engine slot `row` ended."""


PLAIN = DraftPlan([], 0)


class FixedLength:
    """Every row drafts `gamma` tokens (fewer where there is no room); 0 is plain decoding."""

    wants_survival = False

    def __init__(self, gamma: int) -> None:
        if gamma < 0:
            raise ValueError(f"gamma: {gamma} must be 0 or more")
        self.gamma = gamma

    def begin(self, row: int) -> None:
        """Nothing to learn."""

    def plan(self, view: CycleView) -> DraftPlan:
        """See Scheduler."""
        rows = [i for i, room in enumerate(view.room) if room > 0]
        # Not cut to the rows' room: what a row is drafted must not depend on the others.
        slots = min(self.gamma, view.num_slots)
        return DraftPlan(rows, slots, survival=self.wants_survival) if rows and slots > 0 else PLAIN

    def allocate(self, view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
        """See Scheduler."""
        return _limits(view, plan, proposal)

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        """Nothing to learn."""

    def release(self, row: int) -> None:
        """Nothing to forget."""


class Threshold(FixedLength):
    """Draft up to `gamma` tokens (None: all) and verify those in front of the first survival below `value`, in (0, 1].

    A row stops at its first failure, so slot k is decided by s_1..s_k, none of which depends on x_k. Without survivals from the
    proposer, past acceptance stands in for them.
    """

    wants_survival = True

    def __init__(self, value: float, gamma: int | None = None) -> None:
        if not 0 < value <= 1:
            raise ValueError(f"threshold: {value} must be above 0 and at most 1")
        super().__init__(1 << 30 if gamma is None else gamma)
        self.value = value
        self._past: AcceptanceEstimator | None = None

    def begin(self, row: int) -> None:
        """See Scheduler."""
        if self._past is not None:
            self._past.begin(row)

    def allocate(self, view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
        """See Scheduler."""
        limits = _limits(view, plan, proposal)
        survival = proposal.survival
        if survival is None:
            past = self._estimator(view).realised([view.slots[i] for i in plan.rows], view.hot)
            survival = torch.from_numpy(past[:, : plan.slots]).to(limits.device)
        # One slot is always verified: what is never tried can never be learnt.
        return torch.minimum(limits, (survival >= self.value).to(torch.int64).cumprod(-1).sum(-1).clamp_min(1))

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        """See Scheduler."""
        tried = [i for i, length in enumerate(lengths) if length > 0]
        if tried and view.num_slots:
            counts = np.array([[lengths[i] for i in tried]]), np.array([[accepted[i] for i in tried]])
            self._estimator(view).observe([view.slots[i] for i in tried], *counts, view.hot)

    def _estimator(self, view: CycleView) -> AcceptanceEstimator:
        if self._past is None:
            self._past = AcceptanceEstimator(view.num_slots)
        self._past.reserve(max(view.slots) + 1)
        return self._past


def _limits(view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
    room = torch.tensor([max(0, view.room[i]) for i in plan.rows], dtype=torch.int64)
    return torch.minimum(proposal.lengths, room.to(proposal.lengths.device, non_blocking=True))


class LoadAware:
    """Lengths that maximise tokens per unit of time, from survivals and a measured cost table; plain where nothing pays.

    Before drafting: over slots G, drafted rows and verified items m, take the largest
    (R + sum of survivals) / (draft(rows, G) + verify(R, R + m) + rest), with survivals from past cycles; compare with plain
    decoding, R / (verify(R, R) + rest). After drafting: cut. cut="rate" admits a draft while its live survival exceeds
    rate * marginal cost, rate being what decoding yields at this load (renewal-reward: time is worth what the other cycles make
    of it); "budget" verifies the m best drafts of the plan; "none" verifies all. Without survivals from the proposer the plan
    already knew all there is to know, and its m best are verified.

    Where rows go undrafted, a cycle that drafts them all probes from time to time. The interval doubles from `probe` to 256
    cycles while probes change nothing, starts again when rows leave, and keeps the cost of probing below half a percent.

    hysteresis: relative gain that a change of mode or slots must promise. replan: cycles for which a plan stands, and after
    which what they showed is learnt; up to four times as long while it does not change. clock (in seconds): where given, cycles
    are timed and the table's ratio of drafted to plain cycles is corrected by what they took. Choices then depend on timing:
    greedy answers do not, but sampled ones differ from run to run. looking_ms: what live survivals cost a cycle. Where cutting
    by them earns less, they are left alone for a while, and lengths follow from past cycles. What was learnt outlives requests
    and changes of load; one object serves one engine.
    """

    wants_survival = True

    def __init__(
        self,
        costs: CostTable,
        *,
        cut: str = "rate",
        probe: int = 16,
        hysteresis: float = 0.01,
        replan: int = 4,
        clock: Callable[[], float] | None = None,
        looking_ms: float = 0.12,
    ) -> None:
        if cut not in CUTS:
            raise ValueError(f"cut: {cut!r} must be one of {', '.join(CUTS)}")
        if probe < 1 or replan < 1 or not 0 <= hysteresis < 1:
            raise ValueError(f"probe {probe}, replan {replan}: 1 or more; hysteresis {hysteresis}: in [0, 1)")
        self.costs, self.cut, self.probe, self.hysteresis, self.replan = costs, cut, probe, hysteresis, replan
        self._past: AcceptanceEstimator | None = None
        self._queue = _Queue()
        self._tables: dict[tuple[int, int, bool], CycleCosts] = {}
        self._choice: Choice | None = None
        self._load = (0, False, 0)  # rows, hot, num_slots that the choice was made for
        self._age = replan  # cycles since the choice
        self._patience = replan  # cycles it stands: more the longer it has not changed, since choosing costs time too
        self._undrafted = 0  # cycles since every row was last drafted
        self._interval = probe
        self._probing = 0  # cycles left of the present probe
        self._plan = PLAIN
        self._full = False  # this cycle verifies all it drafts
        self._live: Tensor | None = None
        self._with_survival = False  # the proposer predicts them
        self._looking_ms = looking_ms
        self._looks: dict[tuple[int, bool], Looking] = {}  # by rows and kind
        self._lengths: tuple[list[int], Tensor] | None = None  # of the present choice, by planned rows
        self._judged: tuple[Looking, int, CycleCosts] | None = None  # what judges the cycles that wait to be learnt
        self._timing = Timing(clock) if clock is not None else None

    # ---- the scheduler's contract ---------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """See Scheduler."""
        self._learn()
        self._age = self._patience = self.replan
        if self._past is not None:
            self._past.begin(row)

    release = begin

    def plan(self, view: CycleView) -> DraftPlan:
        """See Scheduler. Reads past cycles only."""
        self._live, self._full, self._plan = None, False, PLAIN
        most = min(view.num_slots, max(view.room, default=0))
        if most > 0:
            self._choose(view, most)
            self._plan = self._probe_or_draft(view, most)
        if self._timing is not None:
            self._timing.start(len(view.slots), bool(self._plan.rows))
        return self._plan

    def allocate(self, view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
        """See Scheduler. Live survivals enter through allocation.chain_lengths alone, which keeps the design rule; rate,
        budget, corrections and costs were fixed by past cycles."""
        survival, choice = proposal.survival, self._choice
        if plan.survival:
            self._live, self._with_survival = survival, survival is not None
        elif choice is not None and self.cut != "none":
            lengths = self._chosen_lengths(plan, choice, proposal.lengths.device)
            near = min((view.room[i] for i in plan.rows), default=0) < choice.slots  # some answer is about to end
            return torch.minimum(lengths, _limits(view, plan, proposal)) if near else lengths
        if proposal.lengths.device.type != "cpu":
            return self._allocate_on_device(view, plan, proposal)
        limits = np.array([min(n, max(view.room[i], 0)) for n, i in zip(proposal.lengths.tolist(), plan.rows, strict=True)])
        if self.cut == "none" or self._full or choice is None or not plan.rows:
            return torch.from_numpy(limits)
        past, slots = self._estimator(view), proposal.tokens.shape[1]
        if survival is None:
            values = past.realised([view.slots[i] for i in plan.rows], view.hot)[:, :slots]
        elif len(plan.rows) == 1:
            values = past.corrected_row(survival[0].tolist(), view.hot)
        else:
            values = past.corrected(survival.double().numpy(), view.hot)
        costs, step = self._costs(view), len(view.slots)
        if not self.costs.ragged:
            # The pass costs what the widest row costs, so all rows stop at one slot: slot k is admitted for all of them by
            # survivals of slots <= k, none of which depends on any row's x_k.
            alive = np.arange(slots) < limits[:, None]
            gains = np.where(alive, np.minimum.accumulate(values, axis=1), 0.0).sum(axis=0, keepdims=True)
            cost = costs.prices(choice.items // step, step)
            lengths = np.minimum(limits, chain_lengths(gains, np.array([slots]), cost=cost, rate=choice.rate))
        elif survival is None or self.cut == "budget":
            lengths = chain_lengths(values, limits, budget=choice.items)
        else:
            lengths = chain_lengths(values, limits, cost=costs.prices(choice.items), rate=choice.rate)
        return torch.from_numpy(lengths)

    def _chosen_lengths(self, plan: DraftPlan, choice: Choice, device: torch.device) -> Tensor:
        """The lengths that past cycles alone suggested. They stand as long as the choice does."""
        if self._lengths is None or self._lengths[0] != plan.rows:
            lengths = torch.tensor([choice.lengths[i] for i in plan.rows], dtype=torch.int64)
            self._lengths = plan.rows, lengths.to(device, non_blocking=True)
        return self._lengths[1]

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        """See Scheduler. What a cycle showed is kept, and learnt with the next plan."""
        if self._timing is not None:
            drafted, costs = len(self._plan.rows), self._costs(view)
            self._timing.stop(float(costs.drafts[drafted, self._plan.slots if drafted else 0] + costs.passes[sum(lengths)]))
        # With survivals all drafted rows teach, verified or not.
        rows = self._plan.rows if self._live is not None else [i for i, length in enumerate(lengths) if length > 0]
        if rows and self._past is not None:
            key = ([view.slots[i] for i in rows], view.hot)
            if not self._queue.add(key, [lengths[i] for i in rows], [accepted[i] for i in rows], self._live):
                self._learn()
                self._queue.add(key, [lengths[i] for i in rows], [accepted[i] for i in rows], self._live)
            cut = self._live is not None and self.cut == "rate" and not self._full
            self._judged = (self._look(view), len(view.slots), self._costs(view)) if cut else None

    def learnt(self) -> dict[str, list[float]]:
        """Acceptance per slot seen so far by kind, for CostTable.with_acceptance: the prior of the next run."""
        self._learn()
        if self._past is None:
            return {}
        kinds = {hot: name for hot, name in ((False, GREEDY), (True, SAMPLED)) if self._past.observations(hot) >= 20}
        return {name: self._past.conditionals(hot) for hot, name in kinds.items()}

    # ---- choosing -------------------------------------------------------------------------------------------------------

    def _choose(self, view: CycleView, most: int) -> None:
        load = (len(view.slots), view.hot, view.num_slots)
        past = self._estimator(view)
        if load != self._load:
            if load[0] < self._load[0]:
                # less load: what did not pay may pay now
                self._interval, self._undrafted = self.probe, max(self._undrafted, self.probe)
            self._load, self._choice = load, None
        if self._choice is None or self._age >= self._patience or past.observations(view.hot) < _WARM_UP:
            self._learn()
            self._lengths = None
            before, self._choice, self._age = self._choice, self._best(view, past, most), 0
            same = before is not None and (before.slots, before.items) == (self._choice.slots, self._choice.items)
            self._patience = min(2 * self._patience, _PATIENCE * self.replan) if same else self.replan
        self._age += 1

    def _best(self, view: CycleView, past: AcceptanceEstimator, most: int) -> Choice:
        """The largest rate over slots and items, with some inertia. Past cycles only, hence a global search is legal."""
        survival = self._lagged(view, past)[:, :most] * past.optimism(view.hot)[:most]
        alive = np.arange(most) < np.asarray(view.room)[:, None]
        survival = np.where(alive, np.minimum(survival, 1.0), 0.0)
        costs = self._costs(view)
        plain = len(view.slots) / float(costs.passes[0] + costs.drafts[0, 0])
        slower = self._timing.drafted_over_plain(len(view.slots)) if self._timing is not None else 1.0
        search = search_ragged if self.costs.ragged else search_padded
        rates, behind = search(survival, costs, slower)
        best = int(np.argmax(rates)) + 1
        before = 0 if self._choice is None else self._choice.slots
        if 0 < before <= most and rates[before - 1] * (1 + self.hysteresis) > rates[best - 1]:
            best = before
        bar = plain / (1 + 0.5 * self.hysteresis) if before else plain * (1 + self.hysteresis)
        if rates[best - 1] <= bar:
            return Choice(plain, 0, 0, [])
        lengths = behind(best)
        return Choice(max(float(rates[best - 1]), plain), best, int(lengths.sum()), lengths.tolist())

    def _lagged(self, view: CycleView, past: AcceptanceEstimator) -> Floats:
        live = self._with_survival and self._look(view).on
        return past.predicted(view.slots, view.hot) if live else past.realised(view.slots, view.hot)

    def _look(self, view: CycleView) -> Looking:
        key = len(view.slots), view.hot
        found = self._looks.get(key)
        if found is None:
            found = self._looks[key] = Looking(self._looking_ms)
        return found

    def _allocate_on_device(self, view: CycleView, plan: DraftPlan, proposal: Proposal) -> Tensor:
        """`allocate` without waiting for the device; survivals are corrected with the ratios the host knows."""
        limits, choice = _limits(view, plan, proposal), self._choice
        if self.cut == "none" or self._full or choice is None or not plan.rows:
            return limits
        past, slots, step = self._estimator(view), proposal.tokens.shape[1], len(view.slots)
        if proposal.survival is None:
            known = past.realised([view.slots[i] for i in plan.rows], view.hot)[:, :slots]
            values = torch.from_numpy(known).to(limits.device, non_blocking=True)
        else:
            survival = proposal.survival.double()
            before = torch.cat((torch.ones_like(survival[:, :1]), survival[:, :-1]), dim=1).clamp_min(1e-30)
            scale = torch.from_numpy(past.ratios(view.hot, slots)).to(limits.device, non_blocking=True)
            values = ((survival / before).clamp(max=1) * scale).clamp(max=1).cumprod(1)
        if not self.costs.ragged:
            alive = torch.arange(slots, device=limits.device) < limits[:, None]
            gains = torch.where(alive, values.cummin(1).values, 0.0).sum(0, keepdim=True)
            marginal = self._costs(view).prices_on(limits.device, choice.items // step, step)
            whole = limits.new_full((1,), slots)
            return torch.minimum(limits, chain_lengths_on_device(gains, whole, marginal=marginal, rate=choice.rate))
        if proposal.survival is None or self.cut == "budget":
            return chain_lengths_on_device(values, limits, budget=choice.items)
        marginal = self._costs(view).prices_on(limits.device, choice.items)
        return chain_lengths_on_device(values, limits, marginal=marginal, rate=choice.rate)

    # ---- probing --------------------------------------------------------------------------------------------------------

    def _probe_or_draft(self, view: CycleView, most: int) -> DraftPlan:
        choice = self._choice
        assert choice is not None
        able = [i for i, room in enumerate(view.room) if room > 0]
        rows = [i for i in choice.rows if view.room[i] > 0] if choice.slots else []
        if len(rows) == len(able):
            self._undrafted, self._interval, self._probing = 0, self.probe, 0
        elif self._probe_now(view, choice, min(_PROBE_SLOTS, most)):
            self._full = True
            return DraftPlan(able, min(_PROBE_SLOTS, most), survival=True)
        if not rows:
            return PLAIN
        self._full = self._estimator(view).observations(view.hot) < _WARM_UP
        slots, look = min(choice.slots, most), self._look(view)
        if look.on or self._full or not self._with_survival:
            return DraftPlan(rows, slots, None if self._full else choice.items, survival=True)
        look.pass_by()
        return DraftPlan(rows, slots, choice.items)

    def _probe_now(self, view: CycleView, choice: Choice, slots: int) -> bool:
        if self._probing > 0:
            self._probing -= 1
            return True
        self._undrafted += 1
        if self._undrafted < self._interval:
            return False
        burst = max(1, math.ceil(4 / len(view.slots)))  # a few rows need a few cycles to tell anything
        affordable = math.ceil(burst * self._probe_loss(view, choice, slots) / _PROBE_LOSS)
        if self._undrafted < affordable:
            self._interval = affordable  # look again then
            return False
        self._probing, self._undrafted = burst - 1, 0
        self._interval = max(min(2 * self._interval, _LONGEST), affordable, self.probe)
        self._age = self._patience  # look at the result soon
        return True

    def _probe_loss(self, view: CycleView, choice: Choice, slots: int) -> float:
        """What a probe of one cycle would cost, in cycles, were half of the expected drafts accepted."""
        costs, rows = self._costs(view), len(view.slots)
        extra = sum(min(slots, max(0, room)) for room in view.room)
        took = float(costs.drafts[rows, slots] + costs.passes[extra])
        gained = rows + 0.5 * float(self._lagged(view, self._estimator(view))[:, :slots].sum())
        return max(0.0, took * choice.rate - gained) / rows

    # ---- bookkeeping ----------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Hand the finished cycles to the estimator."""
        if self._past is not None and self._queue.lengths:
            (rows, hot), lengths, accepted, survival = self._queue.take()
            self._past.observe(rows, lengths, accepted, hot, survival)
            if survival is not None and self._judged is not None:
                look, count, costs = self._judged
                flat = self._past.corrected(survival.reshape(-1, survival.shape[-1]), hot)
                look.judge(np.minimum.accumulate(flat, axis=1).reshape(survival.shape), lengths, count, costs)

    def _estimator(self, view: CycleView) -> AcceptanceEstimator:
        if self._past is None or self._past.slots < view.num_slots:
            stored = {False: self.costs.acceptance.get(GREEDY, []), True: self.costs.acceptance.get(SAMPLED, [])}
            self._past = AcceptanceEstimator(view.num_slots, stored)
        self._past.reserve(max(view.slots) + 1)
        return self._past

    def _costs(self, view: CycleView) -> CycleCosts:
        rows = len(view.slots)
        key = rows, sum(view.positions) // (rows * _BUCKET), view.hot
        found = self._tables.get(key)
        if found is None:
            context = (key[1] + 0.5) * _BUCKET
            passes = self.costs.pass_curve(rows, context, view.hot, rows * view.num_slots)
            found = self._tables[key] = CycleCosts(
                passes, self.costs.draft_table(rows, view.num_slots, context, view.hot)
            )  # fmt: skip
        return found


class _Queue:
    """Finished cycles of the same rows, slots and kind, to be learnt together."""

    def __init__(self) -> None:
        self.key: tuple[list[int], bool] = ([], False)
        self.lengths: list[list[int]] = []
        self.accepted: list[list[int]] = []
        self.survivals: list[Tensor] = []

    def add(self, key: tuple[list[int], bool], lengths: list[int], accepted: list[int], survival: Tensor | None) -> bool:
        """False where the cycle does not fit to those that wait: take them first."""
        if self.lengths:
            shapes = {s.shape for s in self.survivals}
            if key != self.key or (survival is None) != (not shapes) or (survival is not None and survival.shape not in shapes):
                return False
        self.key = key
        self.lengths.append(lengths)
        self.accepted.append(accepted)
        if survival is not None:
            self.survivals.append(survival)
        return True

    def take(self) -> tuple[tuple[list[int], bool], NDArray[np.int64], NDArray[np.int64], Floats | None]:
        """(rows and kind, lengths [C, B], accepted [C, B], survivals [C, B, g] or None) of the C cycles that waited."""
        # the commits of these cycles have waited for the device
        live = torch.stack(self.survivals).detach().double().cpu().numpy() if self.survivals else None
        found = self.key, np.array(self.lengths), np.array(self.accepted), live
        self.__init__()  # type: ignore[misc]
        return found
