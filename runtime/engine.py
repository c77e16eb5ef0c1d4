"""The serving engine and its visible decode loop: prefill, draft, verify, commit, roll back.

One cycle commits, for every active row, the accepted prefix of its draft plus one token of the target (the correction, or the
bonus when all drafts passed). Plain decoding is the same loop with an empty draft, so the baseline pays no other overhead.
Rollback is by length only: rejected K/V entries are overwritten by the next cycle and are never visible.
Host and device meet once per cycle, when tokens are committed. B active rows, W tokens per row, G drafted slots, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import SamplingParams
from .decoder import Decoder
from .propose import Proposal, Proposer
from .random import EMIT, VERIFY, uniforms
from .sampling import SamplingBatch, argmax, draw
from .verify import RULES, greedy

PREFILL_CHUNK = 256


@dataclass(frozen=True)
class Request:
    """One generation: prompt token ids (at least one) and how to sample."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class CycleRecord:
    """One verification of one row: drafts proposed, drafts accepted, tokens committed (after the EOS and budget cut)."""

    proposed: int
    accepted: int
    committed: int


@dataclass
class Completion:
    """token_ids include the end token that stopped the row. finish_reason: stop, length (budget) or context (limit)."""

    id: str
    token_ids: list[int]
    finish_reason: str
    cycles: list[CycleRecord]
    prompt_tokens: int


@dataclass
class EngineStats:
    """Seconds by part and counts since the last reset.

    draft_s: the drafter's parallel pass and its context update; head_s: the sequential head; verify_s: the target's forward;
    rest_s: acceptance rule, sampling, bookkeeping; prefill_s apart. reached_per_slot[k]: drafts whose predecessors were all
    accepted; accepted_per_slot[k] of those passed: their ratio is the conditional acceptance of slot k+1.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    head_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    cycles: int = 0  # (row, verification) pairs
    steps: int = 0  # engine iterations, each over all active rows
    committed: int = 0
    prefill_tokens: int = 0
    reached_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed per verification, the correction or bonus token included."""
        return self.committed / self.cycles if self.cycles else float("nan")

    def count(self, record: CycleRecord) -> None:
        """Add one row's cycle. Slots cut away by an end token were neither reached nor accepted."""
        self.cycles += 1
        self.committed += record.committed
        accepted = min(record.accepted, record.committed)
        cut = record.committed <= record.accepted
        reached = accepted if cut else min(accepted + 1, record.proposed)
        for slots, n in ((self.reached_per_slot, reached), (self.accepted_per_slot, accepted)):
            slots.extend([0] * (record.proposed - len(slots)))
            for k in range(n):
                slots[k] += 1


@dataclass
class _Row:
    request: Request
    position: int  # absolute position of the anchor: the last committed token, not yet run through the target
    tokens: list[int]
    cycles: list[CycleRecord] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """Continuous batching over a fixed number of cache slots.

    decoder: the target's forward; proposer: None for plain decoding; rule: a name in verify.RULES; eos_ids end a row;
    tokenizer is needed for stop strings only; num_slots caps the proposer's block. Raises ValueError on settings that cannot
    be served.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        proposer: Proposer | None = None,
        slots: int = 1,
        max_context: int = 2048,
        rule: str = "token",
        eos_ids: Sequence[int] = (),
        tokenizer: Any = None,
        num_slots: int | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule: {rule!r} must be one of {sorted(RULES)}")
        if slots < 1:
            raise ValueError(f"slots: {slots} must be at least 1")
        limit = decoder.max_positions
        if max_context > limit:
            raise ValueError(f"max_context: {max_context} exceeds the target's {limit} positions")
        self.decoder, self.proposer, self.rule = decoder, proposer, RULES[rule]
        self.slots, self.max_context, self.eos_ids, self.tokenizer = slots, max_context, frozenset(eos_ids), tokenizer
        most = proposer.num_slots if proposer else 0
        self.num_slots = most if num_slots is None else min(num_slots, most)
        self.taps = bool(proposer and proposer.tap_layers)
        if self.taps and tuple(proposer.tap_layers) != tuple(decoder.tap_layers):  # type: ignore[union-attr]
            raise ValueError(f"decoder taps {decoder.tap_layers}, the drafter needs {proposer.tap_layers}")  # type: ignore[union-attr]
        self.cache = decoder.new_cache(slots, max_context)
        self.stats = EngineStats()

    def reset_stats(self) -> None:
        """Forget all counts and times."""
        self.stats = EngineStats()

    @torch.inference_mode()
    def run(
        self, requests: Sequence[Request], on_commit: Callable[[Request, list[int], CycleRecord | None], None] | None = None
    ) -> list[Completion]:
        """Generate for every request; completions in request order. on_commit sees each row's tokens as they are committed
        (record None: the first token, from prefill)."""
        for request in requests:
            self._check(request)
        waiting = deque(enumerate(requests))
        active: dict[int, tuple[int, _Row]] = {}
        done: dict[int, Completion] = {}
        free = list(range(self.slots))[::-1]
        while waiting or active:
            while waiting and free:
                index, request = waiting.popleft()
                slot = free.pop()
                active[slot] = (index, self._prefill(slot, request, on_commit))
            running = {slot: row for slot, (_, row) in active.items() if row.finish_reason is None}
            if running:
                self._cycle(running, on_commit)
            for slot in [s for s, (_, row) in active.items() if row.finish_reason is not None]:
                index, row = active.pop(slot)
                free.append(slot)
                if self.proposer:
                    self.proposer.release(slot)
                done[index] = Completion(
                    row.request.id, row.tokens, row.finish_reason or "", row.cycles, len(row.request.prompt_ids)
                )
        return [done[i] for i in range(len(requests))]

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise ValueError(f"request {request.id}: empty prompt")
        if len(request.prompt_ids) >= self.max_context:
            raise ValueError(
                f"request {request.id}: prompt of {len(request.prompt_ids)} tokens does not fit max_context {self.max_context}"
            )
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"request {request.id}: stop strings need the engine's tokenizer")

    def _prefill(self, slot: int, request: Request, on_commit: Any) -> _Row:
        began = time.perf_counter()
        prompt, taps = request.prompt_ids, []
        tokens = torch.tensor([prompt], device=self.decoder.device)
        out = None
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            final = start + chunk.shape[1] == len(prompt)
            out = self.decoder.forward(
                chunk, self.cache, [slot], torch.tensor([start]), logits="last" if final else "none",
                last=torch.tensor([chunk.shape[1] - 1]), taps=self.taps, bound=start + chunk.shape[1],
            )  # fmt: skip
            if out.taps is not None:
                taps.append(out.taps[0])
        assert out is not None and out.logits is not None
        row = _Row(request, len(prompt), [])
        if self.proposer:
            self.proposer.begin(slot, prompt, torch.cat(taps) if taps else None)
        # The first token stands at position len(prompt); its uniform is indexed by the position it was predicted from.
        batch = self._sampling([row], offset=-1)
        token = int(self._next(out.logits[:, 0], batch)[0])
        self._keep(row, [token], None, on_commit)
        self.stats.prefill_s += time.perf_counter() - began
        self.stats.prefill_tokens += len(prompt)
        return row

    def _sampling(self, rows: Sequence[_Row], offset: int = 0) -> SamplingBatch:
        return SamplingBatch.build(
            [row.request.sampling for row in rows], [row.position + offset for row in rows], device=self.decoder.device
        )

    def _next(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token of the target's law per row: logits [B, V] -> int64 [B]."""
        if batch.all_greedy:
            return argmax(logits)
        p = batch.probabilities(logits[:, None])[:, 0]
        return draw(p, uniforms(batch.seeds, batch.positions, 1, EMIT)[:, 0])

    def _cycle(self, running: dict[int, _Row], on_commit: Any) -> None:
        """Draft, verify, commit: one pass of the loop over all running rows."""
        began = time.perf_counter()
        slots, rows = list(running), list(running.values())
        batch = self._sampling(rows)
        anchors = torch.tensor([row.tokens[-1] for row in rows], device=self.decoder.device)
        # A draft beyond the token budget or the context limit could never be committed.
        room = [min(self._budget(row) - 1, self.max_context - row.position - 2) for row in rows]
        width = max(0, min(self.num_slots, max(room)))
        proposal = self.proposer.propose(slots, anchors, batch, width) if self.proposer and width else None
        if proposal is not None and proposal.tokens.shape[1] == 0:
            proposal = None
        drafted = time.perf_counter()
        tokens = anchors[:, None] if proposal is None else torch.cat((anchors[:, None], proposal.tokens), dim=1)
        starts = torch.tensor([row.position for row in rows])
        bound = max(row.position for row in rows) + tokens.shape[1]
        out = self.decoder.forward(tokens, self.cache, slots, starts, logits="all", taps=self.taps, bound=bound)
        assert out.logits is not None
        verified = time.perf_counter()
        if proposal is None:
            lengths = [0] * len(rows)
            verdict = [[0, token] for token in self._next(out.logits[:, 0], batch).tolist()]
        else:
            limit = torch.tensor(room, device=anchors.device).clamp_min(0)
            allowed = torch.minimum(proposal.lengths.to(anchors.device), limit)
            accepted, following = self._verify(out.logits, proposal, allowed, batch)
            packed = torch.cat((accepted[:, None], following[:, None], allowed[:, None], proposal.tokens), dim=1).tolist()
            verdict = [[p[0], p[1], *p[3:]] for p in packed]
            lengths = [p[2] for p in packed]
        committed = []
        for row, length, (count, following_token, *drafts) in zip(rows, lengths, verdict, strict=True):
            committed.append(self._keep(row, [*drafts[:count], following_token], (length, count), on_commit))
        ruled = time.perf_counter()
        if self.proposer:
            self.proposer.commit(slots, starts, committed, out.taps if self.taps else None)
        ended = time.perf_counter()
        head = proposal.head_s if proposal else 0.0
        stats = self.stats
        stats.steps += 1
        stats.head_s += head
        stats.draft_s += drafted - began - head + (ended - ruled)
        stats.verify_s += verified - drafted
        stats.rest_s += ruled - verified

    def _verify(self, logits: Tensor, proposal: Proposal, lengths: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Accept a prefix of each draft and draw the token after it. logits [B, G+1, V] -> (accepted [B], next [B])."""
        if batch.all_greedy:
            return greedy(argmax(logits), proposal.tokens, lengths)
        p = batch.probabilities(logits)
        u = uniforms(batch.seeds, batch.positions, proposal.tokens.shape[1], VERIFY)
        verdict = self.rule(p, proposal.probs, proposal.tokens, lengths, u, proposal.draft_ids)
        return verdict.accepted, draw(verdict.residual, uniforms(batch.seeds, batch.positions, 1, EMIT)[:, 0])

    def _budget(self, row: _Row) -> int:
        return row.request.sampling.max_new_tokens - len(row.tokens)

    def _keep(self, row: _Row, tokens: list[int], drafted: tuple[int, int] | None, on_commit: Any) -> list[int]:
        """Commit tokens to a row: cut at the first end token or stop string, then at the budget, then at the context limit."""
        params = row.request.sampling
        reason, kept = None, tokens
        for i, token in enumerate(tokens):
            if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
                kept, reason = tokens[: i + 1], "stop"
                break
            if params.stop and self._hits_stop(row.tokens + tokens[: i + 1], params.stop):
                kept, reason = tokens[: i + 1], "stop"
                break
        if len(kept) > self._budget(row) or (reason is None and len(kept) == self._budget(row)):
            kept, reason = kept[: self._budget(row)], "length"
        record = None
        row.tokens.extend(kept)
        if drafted is not None:
            record = CycleRecord(proposed=drafted[0], accepted=drafted[1], committed=len(kept))
            row.cycles.append(record)
            row.position += len(kept)
            self.stats.count(record)
        if reason is None and row.position + 1 >= self.max_context:
            reason = "context"
        row.finish_reason = reason
        if on_commit is not None:
            on_commit(row.request, kept, record)
        return kept

    def _hits_stop(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        # A stop string can span tokens and each token has at least one byte: this tail is long enough to hold any of them.
        tail = tokens[-(max(len(s.encode()) for s in stop) + 4) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=True)
        return any(s in text for s in stop)
