"""The serving engine and its visible decode loop: prefill, draft, verify, commit, roll back.

One cycle commits, for every running row, the accepted prefix of its draft plus one token of the target (the correction, or the
bonus when all drafts passed). Plain decoding is the same loop with an empty draft, so the baseline pays no other overhead.
Rollback is by length only: rejected K/V entries are overwritten by the next cycle and are never visible.
Host and device meet once per cycle, when tokens are committed. The loop is `Engine._advance` and `Engine._cycle`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .cycle import Draft, Verdict, block, next_tokens, verify
from .decoder import Decoder
from .guard import Drafting
from .propose import Proposer
from .rows import Completion, Request, Row, Slots
from .sampling import SamplingBatch
from .schedule import CycleView, DraftPlan, Scheduler
from .stats import CycleRecord, EngineStats
from .verify import RULES

__all__ = ["Completion", "CycleRecord", "Engine", "EngineStats", "Request"]

OnCommit = Callable[[Request, list[int], CycleRecord | None], None]
# Batches of sampling settings kept: the same rows come back cycle after cycle, whole or parted by the scheduler.
_BATCHES = 8


class Engine:
    """Continuous batching over a fixed number of cache slots. One thread uses an engine.

    decoder         the target's forward
    proposer        drafts; None for plain decoding. Its failures cost speed only, see runtime/guard.py
    scheduler       chooses draft lengths each cycle (runtime/schedule.py); None: num_slots for every row
    slots           requests served at once
    max_context     positions per slot, prompt and answer
    rule            a name in verify.RULES
    eos_ids         tokens that end an answer
    tokenizer       needed for stop strings only
    num_slots       caps the proposer's block
    prefill_tokens  prompt tokens run per step, so that long prompts do not stall running rows
    reuse_prefix    a request takes the free slot whose leftover tokens share the longest prefix with its prompt, and runs the
                    rest of the prompt only

    Raises ValueError on settings that cannot be served.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        proposer: Proposer | None = None,
        scheduler: Scheduler | None = None,
        slots: int = 1,
        max_context: int = 2048,
        rule: str = "block",
        eos_ids: Sequence[int] = (),
        tokenizer: Any = None,
        num_slots: int | None = None,
        prefill_tokens: int = 512,
        reuse_prefix: bool = False,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule: {rule!r} must be one of {sorted(RULES)}")
        for name, value in (("slots", slots), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        limit = decoder.max_positions
        if max_context > limit:
            raise ValueError(f"max_context: {max_context} exceeds the target's {limit} positions")
        self.decoder, self.proposer, self.rule = decoder, proposer, rule
        self.slots, self.max_context, self.eos_ids, self.tokenizer = slots, max_context, frozenset(eos_ids), tokenizer
        self.prefill_tokens = prefill_tokens
        most = proposer.num_slots if proposer else 0
        self.num_slots = most if num_slots is None else min(num_slots, most)
        self.tapped = bool(proposer and proposer.tap_layers)
        if self.tapped and tuple(proposer.tap_layers) != tuple(decoder.tap_layers):  # type: ignore[union-attr]
            raise ValueError(f"decoder taps {decoder.tap_layers}, the drafter needs {proposer.tap_layers}")  # type: ignore[union-attr]
        self.cache = decoder.new_cache(slots, max_context)
        self._on_host = decoder.device.type == "cpu"
        self._scheduler, self._drafting = scheduler, Drafting(proposer, decoder.vocab_size, on_host=self._on_host)
        self._waiting: deque[Row] = deque()
        self._active: dict[int, Row] = {}  # by slot, in the order they joined
        self._live: dict[str, Row] = {}  # by request id
        self._done: list[Row] = []  # not yet handed to a caller
        self._events: list[tuple[Request, list[int], CycleRecord | None]] = []
        self._slots = Slots(slots, reuse=reuse_prefix)
        self._batches: dict[tuple[int, ...], SamplingBatch] = {}
        self._since = 0.0
        self.reset_stats()

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; `step` serves it. Raises ValueError for one that cannot be served, or whose id is in use."""
        self._check(request)
        if request.id in self._live:
            raise ValueError(f"request {request.id}: another request with this id is not finished yet")
        self._enqueue(request)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> bool:
        """End a live request where it stands; the next step hands out its completion ("cancelled", with the tokens so far).

        False where no such request is waiting or running. May be called from on_commit.
        """
        row = self._live.get(request_id)
        if row is None:
            return False
        self._cancel(row)
        return True

    @property
    def idle(self) -> bool:
        """Nothing waits or runs, and every completion has been handed out."""
        return not (self._waiting or self._active or self._done)

    @torch.inference_mode()
    def step(self, on_commit: OnCommit | None = None) -> list[Completion]:
        """Let requests join, run at most prefill_tokens of their prompts, then one cycle of all running rows.

        on_commit sees each row's tokens as they are committed (record None: the first token, from prefill). Returns what ended
        since the last step, cancelled requests included.
        """
        self._advance(on_commit)
        done, self._done = self._done, []
        return [row.completion() for row in done]

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], on_commit: OnCommit | None = None) -> list[Completion]:
        """Generate for every request; completions in request order. Ids need not be unique. on_commit as in `step`.

        An exception from on_commit ends the requests of this call and nothing else.
        """
        for request in requests:
            self._check(request)
        rows = [self._enqueue(request) for request in requests]
        unfinished = deque(rows)
        try:
            while unfinished:
                if unfinished[0].finish_reason is None:
                    self._advance(on_commit)
                else:
                    unfinished.popleft()
        finally:
            for row in unfinished:  # empty but for an exception
                if row.finish_reason is None:
                    self._cancel(row)
            mine = {row.serial for row in rows}
            self._done = [row for row in self._done if row.serial not in mine]
        return [row.completion() for row in rows]

    @property
    def scheduler(self) -> Scheduler | None:
        """Chooses the draft lengths; may be replaced while nothing waits or runs (ValueError otherwise)."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler | None) -> None:
        if self._waiting or self._active:
            raise ValueError("scheduler: requests are live; replace it when the engine is idle")
        self._scheduler = scheduler

    def reset_stats(self) -> None:
        """Forget all counts and times."""
        self.stats = self._drafting.stats = EngineStats()

    def _check(self, request: Request) -> None:
        prompt, vocab_size = request.prompt_ids, self.decoder.vocab_size
        if not prompt:
            raise ValueError(f"request {request.id}: empty prompt")
        if len(prompt) >= self.max_context:
            raise ValueError(
                f"request {request.id}: prompt of {len(prompt)} tokens does not fit max_context {self.max_context}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"request {request.id}: prompt token {bad} is not in 0..{vocab_size - 1}")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"request {request.id}: stop strings need the engine's tokenizer")

    def _enqueue(self, request: Request) -> Row:
        row = Row(request, self.eos_ids, self.max_context, self.tokenizer)
        self._live.setdefault(request.id, row)
        self._waiting.append(row)
        return row

    def _cancel(self, row: Row) -> None:
        row.finish_reason = "cancelled"
        if row in self._active.values():
            self._leave(row)
        else:
            self._waiting.remove(row)
            self._end(row)

    # ---- one step -------------------------------------------------------------------------------------------------

    def _advance(self, on_commit: OnCommit | None) -> None:
        self._since = time.perf_counter()
        while self._waiting and self._slots:
            self._join(self._waiting.popleft())
        if any(row.filled < len(row.prompt) for row in self._active.values()):
            self._prefill()
            self._report(on_commit)
        running = [row for _, row in sorted(self._active.items()) if row.filled == len(row.prompt)]
        if running:
            self._cycle(running)
            self._report(on_commit)
        self._lap("rest_s")

    def _cycle(self, running: list[Row]) -> None:
        """Plan, draft, verify, commit: one pass of the loop over all running rows."""
        view, plan = self._plan(running)
        rows = _drafted_first(running, plan.rows)
        slots, starts = [row.slot for row in rows], [row.position for row in rows]
        anchors, positions = self._put([[row.tokens[-1] for row in rows], starts])
        draft = self._draft(view, plan, rows, anchors, positions) if plan.rows else None

        tokens, widths = block(anchors, draft)
        bound = max(starts) + tokens.shape[1]
        out = self.decoder.forward(
            tokens, self.cache, slots, positions, logits="all", taps=self._taps, bound=bound, widths=widths
        )
        self._lap("verify_s")

        verdicts = self._verify(out.logits, draft, rows, positions)  # host and device meet here
        committed = [self._keep(row, verdict) for row, verdict in zip(rows, verdicts, strict=True)]
        self.stats.steps += 1
        self.stats.plain_steps += draft is None
        self._lap("rest_s")

        self._tell_proposer(rows, starts, committed, out.taps, drafted=draft is not None)
        self._tell_scheduler(view, rows, verdicts)
        for row in rows:
            if row.finish_reason is not None:
                self._leave(row)

    def _lap(self, part: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        setattr(self.stats, part, getattr(self.stats, part) + now - self._since)
        self._since = now

    def _report(self, on_commit: OnCommit | None) -> None:
        # When all is settled: on_commit may cancel or submit, and an exception from it leaves the engine whole.
        events, self._events = self._events, []
        if on_commit is not None:
            for event in events:
                on_commit(*event)

    def _put(self, values: Sequence[Any]) -> Tensor:
        """Integers onto the device without waiting for it."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._on_host:
            return tensor
        if self.decoder.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.decoder.device, non_blocking=True)

    @property
    def _taps(self) -> bool:
        return self.tapped and self._drafting.on

    # ---- joining, prefill, leaving --------------------------------------------------------------------------------

    def _join(self, row: Row) -> None:
        row.slot, row.filled, row.drafter_start = self._slots.take(row.prompt, drafting=self._drafting.on, tapped=self._taps)
        self.stats.reused_tokens += row.filled
        self._active[row.slot] = row

    def _prefill(self) -> None:
        """Run the next prompt tokens of the rows that still have some, first come first served, in one ragged pass."""
        rows, widths = self._prefill_share()
        width = max(widths)
        chunks = [row.prompt[row.filled : row.filled + n] + [0] * (width - n) for row, n in zip(rows, widths, strict=True)]
        whole = [i for i, row in enumerate(rows) if row.filled + widths[i] == len(row.prompt)]
        out = self.decoder.forward(
            self._put(chunks), self.cache, [row.slot for row in rows], self._put([row.filled for row in rows]),
            logits="last" if whole else "none", last=self._put([n - 1 for n in widths]), taps=self._taps,
            bound=max(row.filled for row in rows) + width, widths=None if min(widths) == width else widths,
        )  # fmt: skip
        for i, row in enumerate(rows):
            row.filled += widths[i]
            if out.taps is not None:
                row.taps.append(out.taps[i, : widths[i]])
        self.stats.prefill_tokens += sum(widths)
        if whole:
            assert out.logits is not None
            self._start(
                [rows[i] for i in whole], out.logits[:, 0] if len(whole) == len(rows) else out.logits[self._put(whole), 0]
            )
        self._lap("prefill_s")

    def _prefill_share(self) -> tuple[list[Row], list[int]]:
        rows: list[Row] = []
        widths: list[int] = []
        left = self.prefill_tokens
        for row in self._active.values():
            width = min(len(row.prompt) - row.filled, left)
            # A backend that pads would run every row at the widest one's width: bound what that adds.
            area = max([width, *widths]) * (len(rows) + 1)
            if width and (self.decoder.backend == "kernels" or area <= 2 * self.prefill_tokens):
                rows.append(row)
                widths.append(width)
                left -= width
        return rows, widths

    def _start(self, rows: list[Row], logits: Tensor) -> None:
        """The first token of rows whose prompts are in: logits [B, V]. It stands at position len(prompt); its uniform is
        indexed by the position it was predicted from."""
        positions = self._put([row.position - 1 for row in rows])
        for row, token in zip(rows, next_tokens(logits, self._sampling(rows, positions, -1)).tolist(), strict=True):
            self._events.append((row.request, row.keep([token]), None))
            taps, row.taps = row.taps, []
            if row.finish_reason is not None:
                self._leave(row)
                continue
            if self._drafting.on:
                row.begun = True
                self._drafting.begin(row.slot, row.prompt, torch.cat(taps) if taps else None, row.drafter_start, token)
            if self._scheduler is not None and self.proposer is not None:
                row.scheduler = self._scheduler
                self._scheduler.begin(row.slot)
                calibration = getattr(self.proposer, "calibration", None)
                if calibration is not None and self._scheduler.wants_survival:
                    calibration.warn(row.request.sampling, self.rule)

    def _leave(self, row: Row) -> None:
        """The row ended: its slot is free from now on."""
        del self._active[row.slot]
        drafted = row.slot in self._drafting.rows if row.begun else None
        self._drafting.release(row.slot)
        if row.scheduler is not None:
            row.scheduler.release(row.slot)
        self._slots.give(row, drafted=drafted)
        self._end(row)

    def _end(self, row: Row) -> None:
        if self._live.get(row.request.id) is row:
            del self._live[row.request.id]
        self._done.append(row)

    # ---- the parts of a cycle -------------------------------------------------------------------------------------

    def _plan(self, running: list[Row]) -> tuple[CycleView, DraftPlan]:
        """Which rows are drafted, and how far. A draft beyond the budget or the context limit could never be committed, and a
        row that the proposer does not hold cannot be drafted: they have no room."""
        held = self._drafting.rows
        view = CycleView(
            slots=[row.slot for row in running],
            positions=[row.position for row in running],
            room=[row.room if row.slot in held else 0 for row in running],
            num_slots=self.num_slots,
            hot=any(row.hot for row in running),
        )
        if self.proposer is None:
            return view, DraftPlan([], 0)
        self._lap("rest_s")
        if self._scheduler is None:
            plan = DraftPlan(list(range(len(running))), self.num_slots, survival=True)
        else:
            plan = self._scheduler.plan(view)
        rows = [i for i in plan.rows if view.room[i]]
        # Not cut to the rows' room: what is drafted may depend on the slots asked for, and must not depend on other rows.
        slots = min(plan.slots, self.num_slots) if rows else 0
        plan = DraftPlan(rows, slots, plan.budget, plan.survival) if slots > 0 else DraftPlan([], 0)
        self._lap("schedule_s")
        return view, plan

    def _draft(self, view: CycleView, plan: DraftPlan, rows: list[Row], anchors: Tensor, positions: Tensor) -> Draft | None:
        """Ask the proposer, and the scheduler how much of it to verify. None: there is nothing to verify."""
        count = len(plan.rows)
        slots = [row.slot for row in rows[:count]]
        sampling = self._sampling(rows[:count], positions[:count])
        self._lap("rest_s")
        proposal, sound = self._drafting.propose(slots, anchors[:count], sampling, plan.slots, survival=plan.survival)
        if proposal is None:
            self._lap("draft_s")
            return None
        self.stats.head_s += proposal.head_s
        self.stats.draft_s -= proposal.head_s
        self._lap("draft_s")
        room = [view.room[i] for i in plan.rows]
        if self._on_host:
            self._give_up(rows, sound)
            lengths = zip(proposal.lengths.tolist(), room, sound, strict=True)
            proposal.lengths = self._put([min(length, space) if fine else 0 for length, space, fine in lengths])
        else:
            proposal.lengths = torch.where(sound, torch.minimum(proposal.lengths, self._put(room)), 0)
        lengths = proposal.lengths
        if self._scheduler is not None:
            lengths = torch.minimum(lengths, self._scheduler.allocate(view, plan, proposal)).clamp_min(0)
            self._lap("schedule_s")
        draft = Draft(sampling, proposal.tokens, lengths, proposal.probs, proposal.draft_ids)
        if not self._on_host:
            draft.sound = sound
            return draft
        draft.host = lengths.tolist()  # known without waiting: the block ends with the longest draft
        most = max(draft.host)
        return draft.cut(most) if most else None

    def _verify(self, logits: Tensor | None, draft: Draft | None, rows: list[Row], positions: Tensor) -> list[Verdict]:
        """What the target makes of every row: logits [R, W, V]."""
        assert logits is not None
        if draft is None:
            tokens = next_tokens(logits[:, 0], self._sampling(rows, positions)).tolist()
            return [Verdict(0, 0, [token]) for token in tokens]
        count = len(draft.tokens)
        rest = self._sampling(rows[count:], positions[count:]) if count < len(rows) else None
        verdicts, sound = verify(self.rule, logits, draft, rest)
        if sound is not None:
            self._give_up(rows, sound)
        return verdicts

    def _keep(self, row: Row, verdict: Verdict) -> list[int]:
        kept = row.keep(verdict.tokens)
        record = row.record(verdict.length, verdict.accepted, len(kept))
        self.stats.count(record)
        self._events.append((row.request, kept, record))
        return kept

    def _sampling(self, rows: list[Row], positions: Tensor, offset: int = 0) -> SamplingBatch:
        """Settings of these rows, which stand at positions int64 [B] (on the device)."""
        key = tuple([row.serial for row in rows])
        found = self._batches.get(key)
        if found is None:
            if len(self._batches) >= _BATCHES:
                self._batches.clear()
            params = [row.request.sampling for row in rows]
            found = self._batches[key] = SamplingBatch.build(params, positions, device=self.decoder.device)
        return replace(found, positions=positions, max_position=max([row.position for row in rows]) + offset)

    def _give_up(self, rows: list[Row], sound: Sequence[bool]) -> None:
        bad = [row.slot for row, fine in zip(rows, sound, strict=False) if not fine]
        if bad:
            self._drafting.fail(bad, "propose: token ids, lengths, probabilities or survivals out of range")

    def _tell_proposer(
        self, rows: list[Row], starts: list[int], committed: list[list[int]], taps: Tensor | None, *, drafted: bool
    ) -> None:
        held = [i for i, row in enumerate(rows) if row.slot in self._drafting.rows]
        if not held:
            return
        if len(held) < len(rows):
            rows, starts, committed = [rows[i] for i in held], [starts[i] for i in held], [committed[i] for i in held]
            taps = None if taps is None else taps[self._put(held)]
        self._drafting.commit([row.slot for row in rows], torch.tensor(starts), committed, taps, drafted=drafted)
        self._lap("draft_s")

    def _tell_scheduler(self, view: CycleView, rows: list[Row], verdicts: list[Verdict]) -> None:
        if self._scheduler is None or self.proposer is None:
            return
        found = {row.slot: verdict for row, verdict in zip(rows, verdicts, strict=True)}
        ordered = [found[slot] for slot in view.slots]
        self._scheduler.observe(view, [v.length for v in ordered], [v.accepted for v in ordered])
        self._lap("schedule_s")


def _drafted_first(running: list[Row], drafted: list[int]) -> list[Row]:
    """So that what is drafted is a slice of every tensor of the cycle."""
    if not drafted or (len(drafted) == len(running) and drafted == sorted(drafted)):
        return running
    chosen = set(drafted)
    return [running[i] for i in drafted] + [row for i, row in enumerate(running) if i not in chosen]
