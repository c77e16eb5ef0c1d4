"""Timed windows of the operating-point grid: one side at a time, at constant load, on prompts that stay prefilled.

A window is one side serving `concurrency` requests until they have committed a fixed number of tokens together: end tokens are
ignored and nobody joins or leaves, so the load is the same from the first step to the last, on every side. Sides take turns
window by window in changing order. Greedy rounds go on where the last one ended, so a long cell does not time the same text
twice; sampled ones change the seed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime.config import SamplingParams
from ..runtime.engine import Engine, Request
from ..runtime.schedule import CycleView, DraftPlan, Scheduler
from .config import EvalConfig
from .grid_cells import PARTS, PLAIN, SCHEDULED
from .grid_plan import WARM_TOKENS, CellPlan, budget
from .prompts import EvalPrompt

QUARTERS = 4
NEAR = 0.08  # sampled sides this close to the best are measured further
Record = dict[str, Any]


# ---- one window -------------------------------------------------------------------------------------------------------


class Watched:
    """A scheduler whose plans are counted: what a cycle drafted is needed to predict its cost."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner, self.wants_survival, self.last = inner, inner.wants_survival, DraftPlan([], 0)

    def begin(self, row: int) -> None:
        """See Scheduler."""
        self.inner.begin(row)

    def plan(self, view: CycleView) -> DraftPlan:
        """See Scheduler."""
        self.last = self.inner.plan(view)
        return self.last

    def allocate(self, view: CycleView, plan: DraftPlan, proposal: Any) -> torch.Tensor:
        """See Scheduler."""
        return self.inner.allocate(view, plan, proposal)

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        """See Scheduler."""
        self.inner.observe(view, lengths, accepted)

    def release(self, row: int) -> None:
        """See Scheduler."""
        self.inner.release(row)


def timed_window(engine: Engine, scheduler: Watched, requests: Sequence[Request], tokens: int) -> Record:
    """Serve the requests until they have committed `tokens` each on average, all of them decoding in every timed step.

    Prefill, and the steps until the last request has joined, are not timed. Returns seconds, counts and times of EngineStats;
    `prefill_tokens` run before the window; `rows` [[cycles, tokens] per request]; `shapes` [[rows drafted, slots, tokens
    verified, steps]..]; `quarters` [[seconds, tokens] x 4], the window cut by its tokens.
    """
    joined: set[str] = set()
    rows = {request.id: [0, 0] for request in requests}

    def on_commit(request: Request, kept: list[int], record: Any) -> None:
        joined.add(request.id)
        if record is not None:
            rows[request.id][0] += 1
            rows[request.id][1] += len(kept)

    assert engine.idle
    engine.scheduler = scheduler
    engine.reset_stats()
    for request in requests:
        engine.submit(request)
    while len(joined) < len(requests):
        ended = engine.step(on_commit)
        assert not ended, "a request ended before the window began"
    for row in rows.values():
        row[:] = 0, 0
    prefilled = engine.stats.prefill_tokens
    engine.reset_stats()
    steps, shapes = _decode(engine, scheduler, requests, rows, tokens, on_commit)
    stats = engine.stats
    for request in requests:
        engine.cancel(request.id)
    while not engine.idle:
        engine.step()
    return {
        "seconds": sum(seconds for seconds, _ in steps),
        "tokens": sum(count for _, count in steps),
        "steps": len(steps),
        "prefill_tokens": prefilled,
        **{f"{part}_s": getattr(stats, f"{part}_s") for part in PARTS},
        **{
            key: getattr(stats, key)
            for key in ("verified_tokens", "drafted_tokens", "draft_passes", "plain_steps", "proposer_failures")
        },
        **{key: list(getattr(stats, key)) for key in ("reached_per_slot", "accepted_per_slot", "length_counts")},
        "rows": list(rows.values()),
        "shapes": [[*shape, count] for shape, count in sorted(shapes.items())],
        "quarters": quarters(steps),
    }


def _decode(
    engine: Engine, scheduler: Watched, requests: Sequence[Request], rows: dict[str, list[int]], tokens: int, on_commit: Any
) -> tuple[list[tuple[float, int]], Counter[tuple[int, int, int]]]:
    """The timed steps: (seconds, tokens) of each, and how often each (rows drafted, slots, tokens verified) was run."""
    block = engine.num_slots
    most = requests[0].sampling.max_new_tokens - 2 * (block + 1)  # rows that come this near the budget end the window
    steps: list[tuple[float, int]] = []
    shapes: Counter[tuple[int, int, int]] = Counter()
    total, verified = 0, 0
    while total < tokens * len(requests) and max(count for _, count in rows.values()) < most:
        _synchronise(engine)
        began = time.perf_counter()
        ended = engine.step(on_commit)
        _synchronise(engine)
        seconds = time.perf_counter() - began
        assert not ended, "a request ended inside a window"
        before, total = total, sum(count for _, count in rows.values())
        steps.append((seconds, total - before))
        drafted = len(scheduler.last.rows) if scheduler.last.slots else 0
        shapes[drafted, scheduler.last.slots if drafted else 0, engine.stats.verified_tokens - verified] += 1
        verified = engine.stats.verified_tokens
    return steps, shapes


def near_best(records: Sequence[Record]) -> list[str]:
    """The scheduled side and every other whose throughput so far is within NEAR of the best of them."""
    names = list(records[0]["sides"])
    rates = {n: sum(r["sides"][n]["tokens"] for r in records) / sum(r["sides"][n]["seconds"] for r in records) for n in names}
    best = max(rate for name, rate in rates.items() if name != SCHEDULED)
    return [name for name in names if name == SCHEDULED or rates[name] >= (1.0 - NEAR) * best]


def quarters(steps: Sequence[tuple[float, int]]) -> list[list[float]]:
    """(seconds, tokens) of each quarter of a window: a step belongs to the quarter in which its last token falls."""
    total, done = sum(count for _, count in steps), 0
    found = [[0.0, 0] for _ in range(QUARTERS)]
    for seconds, count in steps:
        done += count
        part = found[min(QUARTERS * max(done - 1, 0) // max(total, 1), QUARTERS - 1)]
        part[0] += seconds
        part[1] += count
    return found


def _synchronise(engine: Engine) -> None:
    if engine.decoder.device.type == "cuda":
        torch.cuda.synchronize(engine.decoder.device)


# ---- one cell ---------------------------------------------------------------------------------------------------------


class Rig:
    """The engine with its sides and, per prompt set, the prompts that are resident and their greedy answers.

    The scheduled side is one LoadAware object for the whole run, as a server would have it.
    """

    def __init__(self, engine: Engine, sides: dict[str, Scheduler], cfg: EvalConfig) -> None:
        self.engine, self.cfg, self.block = engine, cfg, engine.num_slots
        self._survival = bool(getattr(engine.proposer, "with_survival", False))
        self.sides = {name: Watched(scheduler) for name, scheduler in sides.items()}
        self._prompts: list[EvalPrompt] = []
        self._answers: list[list[int]] = []

    def settle(self, prompts: list[EvalPrompt], reach: int) -> None:
        """Prefill the prompts and take down their greedy answers, untimed: rounds and warm-ups begin inside them."""
        if prompts == self._prompts and all(len(answer) >= reach for answer in self._answers):
            return
        self._prompts = prompts
        params = SamplingParams(max_new_tokens=reach + 1, ignore_eos=True)
        self.engine.scheduler = self.sides[PLAIN]
        self._answers = [c.token_ids for c in self.engine.run([Request(p.id, p.prompt_ids, params) for p in prompts])]

    def cell(self, plan: CellPlan, temperature: float, on_window: Callable[[int, int], None] | None = None) -> list[Record]:
        """The raw records of a cell, one a window with all sides; further sampled windows hold the sides near the best."""
        for name in self.sides:
            self._warm_up(name, plan, temperature)
        more = plan.more if temperature > 0.0 else 0
        names = list(self.sides)
        records: list[Record] = []
        for round_ in range(plan.rounds + more):
            if round_ == plan.rounds:
                names = near_best(records)
            for unit in range(plan.units):
                records.append(self._record(plan, unit, round_, names, temperature))
                if on_window is not None:
                    on_window(len(records), (plan.rounds + more) * plan.units)
        return records

    def _record(self, plan: CellPlan, unit: int, round_: int, names: list[str], temperature: float) -> Record:
        """One window of each of these sides, in an order that changes with the window."""
        window = round_ * plan.units + unit
        start = round_ * plan.tokens if temperature == 0.0 else 0
        requests = self.requests(plan, unit, start, plan.tokens, temperature, seed=window)
        turn = window % len(names)
        order = names[turn:] + names[:turn]
        order = order[::-1] if window % 2 else order
        sides = {name: self._window(name, requests, plan.tokens) for name in order}
        return {
            "unit": unit, "round": round_, "order": order, "ids": [r.id for r in requests],
            "prompt_tokens": [len(r.prompt_ids) for r in requests], "sides": {name: sides[name] for name in names},
        }  # fmt: skip

    def _warm_up(self, name: str, plan: CellPlan, temperature: float) -> None:
        """Untimed, on text behind what is measured: the scheduler settles at this load, the others touch their memory."""
        windows = -(-WARM_TOKENS // (plan.tokens * plan.concurrency)) if name == SCHEDULED else 1
        for window in range(windows):
            unit = -(window + 1) % plan.units
            requests = self.requests(plan, unit, plan.reach, plan.tokens, temperature, seed=-1 - window)
            self._window(name, requests, plan.tokens if name == SCHEDULED else 8)

    def _window(self, name: str, requests: Sequence[Request], tokens: int) -> Record:
        side = self.sides[name]
        if self._survival:  # only who reads survivals pays for them
            self.engine.proposer.with_survival = side.wants_survival  # type: ignore[union-attr]
        return timed_window(self.engine, side, requests, tokens)

    def requests(self, plan: CellPlan, unit: int, start: int, tokens: int, temperature: float, *, seed: int) -> list[Request]:
        """The requests of a unit's window, beginning `start` tokens into the greedy answers of its prompts."""
        hot = temperature > 0.0
        chosen = range(unit * plan.concurrency, (unit + 1) * plan.concurrency)
        return [
            Request(
                self._prompts[i].id,
                self._prompts[i].prompt_ids + self._answers[i][:start],
                SamplingParams(
                    temperature=temperature, top_k=self.cfg.top_k if hot else 0, top_p=self.cfg.top_p if hot else 1.0,
                    max_new_tokens=budget(tokens, self.block), ignore_eos=True,
                    seed=self.cfg.seed + 100_003 * (seed % 1_000_003) + i,
                ),
            )
            for i in chosen
        ]  # fmt: skip
