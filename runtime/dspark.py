"""The trained drafter as a proposer: one parallel pass per cycle, then a short serial loop of the correction head.

A drafter without a head (DFlash-style) is the same with an empty loop: all its slots are drawn at once.
B rows, G block slots, n*H tap width, V and Vd target and draft vocabulary, r rank of the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.heads import CorrectionHead
from .backbone import Part, make_backbone, make_linear
from .calibration import Calibration
from .kernels import available
from .kernels.sampling import Chain
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, argmax, draw

# Cycles of a row whose taps may wait: beyond, holding the verification outputs costs more memory than writing saves time.
PENDING_CYCLES = 32


class DSparkProposer:
    """drafter and heads as loaded by models/export/native.py; slots and max_context as the engine's. Meant for inference mode.

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
        self.ask_survival = True  # the engine's, for one cycle
        self.calibration = calibration
        self.backbone = make_backbone(drafter, self.heads, slots=slots, max_context=max_context)
        head, survival = drafter.markov_head, drafter.confidence_head
        if survival is not None:
            # z_k = h_k . w + t[x_{k-1}]: what the token before contributes is a table, made once. float32 products, since
            # PyTorch's bf16 ones of one output row take a slow path on a CPU.
            weight, size = survival.proj.weight.detach().float()[0], drafter.norm.weight.shape[0]
            self._survival_weight = weight[:size].contiguous()
            self._survival_table = survival.proj.bias.detach().float()
            if survival.rank and head is not None:
                self._survival_table = head.markov_w1.weight.detach().float() @ weight[size:] + self._survival_table
        # A vanilla head's whole chain and the survival logits are one native call on a CPU; other heads go slot by slot.
        self._chain: Chain | None = None
        self._bias: Callable[[Tensor], Tensor] | None = None
        if head is not None and head.kind == "vanilla" and _native(head.markov_w2.weight):
            tables = None if survival is None else (self._survival_weight, self._survival_table)
            self._chain = Chain(head.markov_w1.weight, head.markov_w2.weight, self.heads.draft_ids, tables)
        elif head is not None:
            self._bias = make_linear(head.markov_w2.weight)
        self._lengths: dict[torch.Size, Tensor] = {}
        self._pending = _PendingTaps()

    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        """See Proposer: writes the prompt's context keys and values. ValueError when the slot lacks positions before start."""
        assert taps is not None and len(taps) == len(prompt) - start, (len(prompt), start)
        self._pending.rewind(row, start)
        if len(taps):
            self.backbone.write_context([Part(row, start, len(taps), taps[None], 0)])
        self._pending.end[row] = len(prompt)

    def first_token(self, row: int, token: int) -> None:
        """Nothing to do: an anchor is given to each propose."""

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """See Proposer: keeps the states of the committed positions until the row is drafted again."""
        assert taps is not None
        for i, (row, start, committed) in enumerate(zip(rows, starts.tolist(), tokens, strict=True)):
            self._pending.add(Part(row, start, len(committed), taps, i))
        if self._pending.cycles >= PENDING_CYCLES:
            self._write(self._pending.rows())

    def release(self, row: int) -> None:
        """Nothing to do: the next request overwrites the slot, or goes on from what it shares with this one."""

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. q is built once per slot, in float32, after temperature and truncation, and handed on as it is."""
        self._write(rows)
        slots, first = min(max_slots, self.num_slots), self.drafter.first_slot
        size = self.drafter.block_size if self.whole_block else first + slots
        hidden, base = self.backbone.block(rows, anchors, sampling.positions, sampling.max_position, size, first)
        if size > first + slots:
            hidden, base = hidden[:, :slots], base[:, :slots]
        began = time.perf_counter()
        tokens, probs, logits, survival = self._draft(hidden, base, anchors, sampling)
        seconds = time.perf_counter() - began
        return Proposal(tokens, self._whole(tokens), probs, self.heads.draft_ids, survival, logits, head_s=seconds)

    def _whole(self, tokens: Tensor) -> Tensor:
        """Lengths of drafts that fill all their slots; one tensor for each shape, which nobody writes to."""
        found = self._lengths.get(tokens.shape)
        if found is None:
            found = self._lengths[tokens.shape] = torch.full(tokens.shape[:1], tokens.shape[1], device=tokens.device)
        return found

    def _write(self, rows: list[int]) -> None:
        """Keys and values of what these rows committed since they were drafted last, in one call."""
        waiting = self._pending.take(rows)
        if waiting:
            self.backbone.write_context(waiting)

    def _draft(
        self, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """hidden [B,G,H], base logits float32 [B,G,Vd] -> tokens [B,G], q [B,G,Vd] or None, and float32 [B,G] or None: survival
        logits and survival."""
        u = None if sampling.all_greedy else uniforms(sampling.seeds, sampling.positions, base.shape[1], DRAFT)
        if self._chain is None:
            return self._draft_in_torch(hidden, base, anchors, sampling, u)
        if not (self.with_survival and self.ask_survival):
            return self._chain(anchors, base, sampling.native_settings(), u)
        maps = None if self.calibration is None else self.calibration.maps(sampling.temperature)
        return self._chain(anchors, base, sampling.native_settings(), u, hidden, maps)

    @torch.inference_mode()
    def _draft_in_torch(
        self, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch, u: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The same for any head on any device."""
        head = self.drafter.markov_head
        if head is not None:
            tokens, law = self._serial(head, hidden, base, anchors, sampling, u)
        else:
            law = None if u is None else sampling.probabilities(base)
            tokens = self._ids(argmax(base) if law is None or u is None else draw(law, u))
        if not (self.with_survival and self.ask_survival):
            return tokens, law, None, None
        logits = self._survival(hidden, anchors, tokens)
        if self.calibration is None:
            return tokens, law, logits, torch.sigmoid(logits).cumprod(dim=1)
        return tokens, law, logits, self.calibration.apply(logits, sampling.temperature)

    def _serial(
        self, head: CorrectionHead, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch, u: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Slot k's logits are base_k plus the head's bias given the token just drafted."""
        assert self._bias is not None
        token, state = anchors, head.initial_state(hidden[:, 0])
        tokens, laws = [], []
        for k in range(base.shape[1]):
            feature, state = head.step(hidden[:, k], F.embedding(token, head.markov_w1.weight), state)
            logits = self._bias(feature).add_(base[:, k])
            if u is None:
                choice = argmax(logits)
            else:
                choice, law = sampling.sample(logits, u[:, k])
                laws.append(law)
            token = self._ids(choice)
            tokens.append(token)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None

    def _ids(self, columns: Tensor) -> Tensor:
        """Columns of q -> target ids."""
        return columns if self.heads.draft_ids is None else self.heads.draft_ids[columns]

    def _survival(self, hidden: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Survival logits z_k, float32 [B,G]: from h_k and the token before, never the slot's own."""
        logits = hidden.float() @ self._survival_weight
        if len(self._survival_table) > 1:
            return logits + self._survival_table[torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)]
        return logits + self._survival_table


def _native(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and available(weight.dtype)


class _PendingTaps:
    """Target states of committed positions that are not in the drafter's cache yet, per slot, contiguous up to end[row].

    They outlive the request: the next one in the slot may share its text, and begin behind it.
    """

    def __init__(self) -> None:
        self.end: dict[int, int] = {}  # positions known per slot, written or pending
        self._parts: dict[int, list[Part]] = {}
        self.cycles = 0  # the most parts any row has

    def add(self, part: Part) -> None:
        """States that follow what is known of their slot. ValueError where a commit was not seen before it."""
        row, start = part.row, part.start
        if self.end.get(row) != start:
            raise ValueError(f"slot {row}: commit at position {start}, but the drafter has seen {self.end.get(row, 0)}")
        parts = self._parts.setdefault(row, [])
        if part.width:
            parts.append(part)
        self.end[row] = start + part.width
        self.cycles = max(self.cycles, len(parts))

    def rewind(self, row: int, start: int) -> None:
        """Forget everything from position `start` on. ValueError where less is known."""
        if self.end.get(row, 0) < start:
            raise ValueError(f"slot {row}: begins at position {start}, but the drafter has seen {self.end.get(row, 0)}")
        parts = self._parts.pop(row, [])
        kept = [part._replace(width=min(part.width, start - part.start)) for part in parts if part.start < start]
        if kept:
            self._parts[row] = kept
        self.end[row] = start

    def rows(self) -> list[int]:
        """Slots with something pending."""
        return list(self._parts)

    def take(self, rows: list[int]) -> list[Part]:
        """Everything pending of these slots."""
        found = [part for row in rows for part in self._parts.pop(row, ())]
        self.cycles = max(map(len, self._parts.values())) if self._parts else 0
        return found
