"""The trained drafter as a proposer: one parallel pass per cycle, then a short serial loop of the correction head.

A drafter without a head (DFlash-style) is the same with an empty loop: all its slots are drawn at once.
B rows, G block slots, n*H tap width, V and Vd target and draft vocabulary, r rank of the head.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.heads import CorrectionHead
from .backbone import make_backbone, make_linear
from .calibration import Calibration
from .kernels import PackedLinear, available
from .kernels.sampling import chain
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, argmax, draw

# Cycles of a row whose taps may wait: beyond, holding the verification outputs costs more memory than writing saves time.
PENDING_CYCLES = 32


class DSparkProposer:
    """drafter and heads as loaded by models/export/native.py; slots and max_context as the engine's.

    with_survival: predict the survival of each slot where the drafter has a survival head (may be switched at any time).
    calibration: turns the head's logits into the survival handed on; None takes them as they are.
    whole_block: compute the trained block whole also when fewer slots are asked for. By default it ends with the last slot
    asked for: less work, and the first slots, which then see fewer masks behind them, are accepted as often (measured). What a
    row samples then depends on max_slots: an engine whose answers must not depend on the batch asks for the same every cycle.
    """

    def __init__(
        self,
        drafter: DSpark,
        heads: FrozenHeads,
        *,
        slots: int,
        max_context: int,
        with_survival: bool = False,
        calibration: Calibration | None = None,
        whole_block: bool = False,
    ) -> None:
        self.whole_block = whole_block
        self.drafter = drafter.eval()
        self.heads = heads.to(drafter.fc.weight.dtype)
        self.num_slots = drafter.num_predictions
        self.tap_layers = drafter.tap_layers
        self.with_survival = with_survival and drafter.confidence_head is not None
        self.calibration = calibration
        self.backbone = make_backbone(drafter, self.heads.embedding, slots=slots, max_context=max_context)
        self.base_logits = make_linear(self.heads.draft_head)
        head, self._columns = drafter.markov_head, None
        # A vanilla head's whole chain is one native call on a CPU; the others go slot by slot through `bias`.
        w2 = head.markov_w2.weight.detach() if head is not None and head.kind == "vanilla" else None
        self._w2 = PackedLinear(w2) if w2 is not None and w2.device.type == "cpu" and available(w2.dtype) else None
        self.bias = None if head is None or self._w2 is not None else make_linear(head.markov_w2.weight)
        if head is not None:
            # The chain runs in columns of the draft vocabulary: W1 in that order saves one look-up per slot.
            w1 = head.markov_w1.weight.detach()
            self._columns = w1 if heads.draft_ids is None else w1[heads.draft_ids]
        survival = drafter.confidence_head
        if survival is not None:
            # z_k = h_k . w + t[x_{k-1}]: what the token before contributes is a table, made once. float32 products, since
            # PyTorch's bf16 ones of one output row take a slow path on a CPU.
            weight, size = survival.proj.weight.detach().float()[0], drafter.norm.weight.shape[0]
            self._survival_weight = weight[:size].contiguous()
            self._survival_table = survival.proj.bias.detach().float()
            if survival.rank and head is not None:
                self._survival_table = head.markov_w1.weight.detach().float() @ weight[size:] + self._survival_table
        self._pending = _PendingTaps()

    @torch.inference_mode()
    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        """See Proposer: writes the prompt's context keys and values. ValueError when the slot lacks positions before start."""
        assert taps is not None and len(taps) == len(prompt) - start, (len(prompt), start)
        self._pending.rewind(row, start)
        self.backbone.write_context([row], torch.tensor([start]), taps[None])
        self._pending.end[row] = len(prompt)

    def first_token(self, row: int, token: int) -> None:
        """Nothing to do: an anchor is given to each propose."""

    @torch.inference_mode()
    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """See Proposer: keeps the states of the committed positions until the row is drafted again."""
        assert taps is not None
        for i, (row, start, committed) in enumerate(zip(rows, starts.tolist(), tokens, strict=True)):
            self._pending.add(row, start, taps[i, : len(committed)])
        if self._pending.cycles >= PENDING_CYCLES:
            self._write(self._pending.rows())

    def release(self, row: int) -> None:
        """Nothing to do: the next request overwrites the slot, or goes on from what it shares with this one."""

    @torch.inference_mode()
    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. q is built once per slot, in float32, after temperature and truncation, and handed on as it is."""
        self._write(rows)
        slots = min(max_slots, self.num_slots)
        first = self.drafter.first_slot
        size = self.drafter.block_size if self.whole_block else first + slots
        hidden = self.backbone.hidden(rows, anchors, sampling.positions, sampling.max_position, size)[:, first : first + slots]
        base = self.base_logits(hidden)
        began = time.perf_counter()
        tokens, probs = self._chain(hidden, base, anchors, sampling)
        survival = logits = None
        if self.with_survival:
            logits, survival = self._survival(hidden, anchors, tokens, sampling)
        lengths = torch.full((len(rows),), tokens.shape[1], device=tokens.device)
        seconds = time.perf_counter() - began
        return Proposal(tokens, lengths, probs, self.heads.draft_ids, survival, logits, head_s=seconds)

    def _write(self, rows: list[int]) -> None:
        """Keys and values of what these rows committed since they were drafted last, in one call."""
        waiting = self._pending.take(rows)
        if waiting is not None:
            owners, positions, taps = waiting
            self.backbone.write_context(owners, torch.tensor(positions), taps[:, None])

    def _chain(self, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor | None]:
        """hidden [B,G,H], base logits float32 [B,G,Vd] -> (tokens [B,G], q [B,G,Vd] or None)."""
        slots, head = base.shape[1], self.drafter.markov_head
        u = None if sampling.all_greedy else uniforms(sampling.seeds, sampling.positions, slots, DRAFT)
        if head is None:
            law = None if u is None else sampling.probabilities(base)
            columns = argmax(base) if law is None or u is None else draw(law, u)
            return self._ids(columns), law
        return self._serial(head, hidden, base, anchors, sampling, u)

    def _serial(
        self, head: CorrectionHead, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch, u: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Slot k's logits are base_k plus the head's bias given the token just drafted."""
        assert self._columns is not None
        if self._w2 is not None:
            first = F.embedding(anchors, head.markov_w1.weight)
            columns, law, _ = chain(first, self._columns, self._w2, base, sampling.native_settings(), u)
            return self._ids(columns), law
        assert self.bias is not None
        previous, state = F.embedding(anchors, head.markov_w1.weight), head.initial_state(hidden[:, 0])
        choices, laws = [], []
        for k in range(base.shape[1]):
            feature, state = head.step(hidden[:, k], previous, state)
            logits = self.bias(feature).add_(base[:, k])
            if u is None:
                choice = argmax(logits)
            else:
                choice, law = sampling.sample(logits, u[:, k])
                laws.append(law)
            choices.append(choice)
            previous = F.embedding(choice, self._columns)
        return self._ids(torch.stack(choices, dim=1)), torch.stack(laws, dim=1) if laws else None

    def _ids(self, columns: Tensor) -> Tensor:
        """Columns of q -> target ids."""
        return columns if self.heads.draft_ids is None else self.heads.draft_ids[columns]

    def _survival(
        self, hidden: Tensor, anchors: Tensor, tokens: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor]:
        """(z_k, predicted survival of slots 1..k), both float32 [B,G]: from h_k and the token before, never the slot's own."""
        logits = hidden.float() @ self._survival_weight
        if len(self._survival_table) > 1:
            logits += self._survival_table[torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)]
        else:
            logits += self._survival_table
        if self.calibration is not None:
            return logits, self.calibration.apply(logits, sampling.temperature)
        return logits, torch.sigmoid(logits).cumprod(dim=1)


class _PendingTaps:
    """Target states of committed positions that are not in the drafter's cache yet, per slot, contiguous up to end[row].

    They outlive the request: the next one in the slot may share its text, and begin behind it.
    """

    def __init__(self) -> None:
        self.end: dict[int, int] = {}  # positions known per slot, written or pending
        self._parts: dict[int, list[tuple[int, Tensor]]] = {}
        self.cycles = 0  # the most parts any row has

    def add(self, row: int, start: int, taps: Tensor) -> None:
        """States taps [n, n*H] of positions start .. start + n - 1. ValueError where a commit was not seen before it."""
        if self.end.get(row) != start:
            raise ValueError(f"slot {row}: commit at position {start}, but the drafter has seen {self.end.get(row, 0)}")
        parts = self._parts.setdefault(row, [])
        parts.append((start, taps))
        self.end[row] = start + len(taps)
        self.cycles = max(self.cycles, len(parts))

    def rewind(self, row: int, start: int) -> None:
        """Forget everything from position `start` on. ValueError where less is known."""
        if self.end.get(row, 0) < start:
            raise ValueError(f"slot {row}: begins at position {start}, but the drafter has seen {self.end.get(row, 0)}")
        kept = [(first, taps[: start - first]) for first, taps in self._parts.pop(row, []) if first < start]
        if kept:
            self._parts[row] = kept
        self.end[row] = start

    def rows(self) -> list[int]:
        """Slots with something pending."""
        return list(self._parts)

    def take(self, rows: list[int]) -> tuple[list[int], list[int], Tensor] | None:
        """Everything pending of these slots: (slot of each position, positions, taps [N, n*H]); None for nothing."""
        owners: list[int] = []
        positions: list[int] = []
        parts: list[Tensor] = []
        for row in rows:
            for start, taps in self._parts.pop(row, ()):
                owners += [row] * len(taps)
                positions += range(start, start + len(taps))
                parts.append(taps)
        self.cycles = max((len(p) for p in self._parts.values()), default=0)
        return (owners, positions, torch.cat(parts)) if parts else None
