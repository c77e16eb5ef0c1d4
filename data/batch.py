"""Training batches: rows of similar length padded together, or chats packed one after another; anchors, labels, validity.

Shapes: R rows, T padded length, A anchor slots per row, G block slots.

How many anchors: `anchor_share` counts anchors per supervised token of a chat, so short and long answers, padded or packed,
are covered alike; a budget per row would starve the chats that share a row.

Where a block may start. At serving time the anchor of a cycle is the last token that was committed: a bonus or correction
token, or the very first token of a reply, which plain prefill sampled. It is always a token that the target generated, so
an anchor is a supervised position whose next position is supervised too. The last token of the prompt is never one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from .chat import TokenRow
from .pack import NO_PAD, ChatView, Pad, chat_view, pack_order, round_up

BUCKET_BATCHES = 32  # rows are sorted by length within this many global batches: little padding, still well mixed


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One padded batch. Padding is known by `lengths`, never by a token id.

    input_ids int64 [R,T]; lengths int64 [R]; anchors int64 [R,A] (0 where unused); anchor_mask bool [R,A];
    labels int64 [R,A,G], the token at anchor + k + 1 (0 beyond the row); valid bool [R,A,G], prefix-closed: slot k is
    supervised only if the slots before it are. A block never reaches past its own turn, since turns are separated by
    unsupervised tokens, nor past its own chat.

    Packed batches also have: segments int64 [R,T], the chat of a token counted within its row, -1 beyond the last; positions
    int64 [R,T], counted from the chat's first token (from the end of the last chat in the padding); starts int64 [R,A], the
    first position of the anchor's chat, so that a block sees starts <= t < anchor; chats: the chats as padded rows.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor
    anchor_mask: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    segments: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    chats: ChatView | None = None

    @property
    def attention_mask(self) -> torch.Tensor:
        """bool [R,T]: true at the tokens of a row."""
        return torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]

    @property
    def num_anchors(self) -> int:
        """Anchors in use."""
        return int(self.anchor_mask.sum())

    @property
    def num_labels(self) -> int:
        """Supervised slots."""
        return int(self.valid.sum())

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> TrainBatch:
        """The same batch in page-locked memory, from which a GPU copies without waiting."""
        return self._map(torch.Tensor.pin_memory)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the batch."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self._map(note)
        return iter(found)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {
            name: value.map(function) if isinstance(value, ChatView) else function(value)
            for name, value in values.items()
            if value is not None
        }
        return replace(self, **changed)


# ---- anchors ------------------------------------------------------------------------------------------------------


def anchor_positions(loss_mask: Sequence[bool]) -> torch.Tensor:
    """int64 [P]: positions t where t and t + 1 are supervised, ascending."""
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    return torch.nonzero(mask[:-1] & mask[1:]).flatten()


def anchor_budget(loss_mask: Sequence[bool], *, anchors_per_row: int | None, anchor_share: float | None) -> int:
    """Anchors wanted from a row: ceil(share * supervised tokens), at most `anchors_per_row`; whichever is given.

    A share covers short and long answers alike; a plain number per row starves long ones.
    """
    if anchors_per_row is None and anchor_share is None:
        raise ValueError("anchors_per_row and anchor_share: one of them must be set")
    wanted = math.ceil(anchor_share * sum(loss_mask)) if anchor_share is not None else len(loss_mask)
    return wanted if anchors_per_row is None else min(wanted, anchors_per_row)


def sample_anchors(
    loss_mask: Sequence[bool],
    budget: int,
    generator: torch.Generator | None = None,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [<= budget] anchors of one row, ascending, uniform without replacement, of `candidates` where they are given."""
    positions = anchor_positions(loss_mask) if candidates is None else candidates
    if len(positions) <= budget:
        return positions
    return positions[torch.randperm(len(positions), generator=generator)[:budget]].sort().values


# ---- collate ------------------------------------------------------------------------------------------------------


def collate(
    rows: Sequence[TokenRow],
    anchors_per_row: int | None,
    block_size: int,
    generator: torch.Generator | None = None,
    *,
    anchor_share: float | None = None,
    anchors: Sequence[torch.Tensor] | None = None,
    packed: bool = False,
    pad: Pad = NO_PAD,
) -> TrainBatch:
    """Pad rows, or pack them all into one, and draw their anchors.

    `anchors` (one int64 tensor a row, positions in it) replaces the draw; otherwise the budget is `anchor_budget` of each
    row. Without rows, or without an anchor in them, the batch is all masked and has A = 1, so that a rank with nothing to
    do still runs forward and backward. pad: what the shape is rounded up to.
    """
    rows = list(rows) or [TokenRow("", "", [0], [False])]
    if anchors is None:
        anchors = [
            sample_anchors(
                row.loss_mask,
                anchor_budget(row.loss_mask, anchors_per_row=anchors_per_row, anchor_share=anchor_share),
                generator,
            )
            for row in rows
        ]
    elif not anchors:
        anchors = [torch.zeros(0, dtype=torch.long) for _ in rows]
    return _place(rows, anchors, block_size, packed=packed, pad=pad)


def _place(rows: Sequence[TokenRow], anchors: Sequence[torch.Tensor], block_size: int, *, packed: bool, pad: Pad) -> TrainBatch:
    """Every chat at its place (row, offset), its blocks at theirs (row, first slot)."""
    lengths, counts = [len(row.input_ids) for row in rows], [len(found) for found in anchors]
    where = [(0, sum(lengths[:i]), sum(counts[:i])) if packed else (i, 0, 0) for i in range(len(rows))]
    used = [sum(lengths)] if packed else lengths
    num_rows = max(pad.rows, len(used))
    width = round_up(max(used), pad.tokens)
    slots = round_up(max(1, sum(counts)) if packed else max(1, *counts), pad.anchors)
    # `block_size` columns beyond the longest row, so that no label index leaves the tensor.
    ids = torch.zeros(num_rows, width + block_size, dtype=torch.long)
    mask = torch.zeros(num_rows, width + block_size, dtype=torch.bool)
    segments = torch.full((num_rows, width + block_size), -1)
    placed, starts = torch.zeros(num_rows, slots, dtype=torch.long), torch.zeros(num_rows, slots, dtype=torch.long)
    filled = torch.zeros(num_rows, slots, dtype=torch.bool)
    for index, (row, found, (at, first, slot)) in enumerate(zip(rows, anchors, where, strict=True)):
        span, mine = slice(first, first + len(row.input_ids)), slice(slot, slot + len(found))
        ids[at, span] = torch.tensor(row.input_ids, dtype=torch.long)
        mask[at, span] = torch.tensor(row.loss_mask, dtype=torch.bool)
        segments[at, span] = index if packed else 0
        placed[at, mine], starts[at, mine], filled[at, mine] = found + first, first, True
    labels = (placed[..., None] + 1 + torch.arange(block_size)).flatten(1)  # [R, A*G]
    shape = (num_rows, slots, block_size)
    own = segments.gather(1, labels).view(shape) == segments.gather(1, placed)[..., None]
    supervised = mask.gather(1, labels).view(shape) & filled[..., None] & own
    batch = TrainBatch(
        input_ids=ids[:, :width].contiguous(),
        lengths=torch.tensor(used + [1] * (num_rows - len(used)), dtype=torch.long),  # a row of no token would be NaN
        anchors=placed,
        anchor_mask=filled,
        labels=ids.gather(1, labels).view(shape) * (filled[..., None] & own),
        valid=supervised.long().cumprod(-1).bool(),
    )
    if not packed:
        return batch
    positions = torch.cat([torch.arange(n) for n in [*lengths, width - used[0]]])[None].expand(num_rows, -1).contiguous()
    spans = [(first, length) for (_, first, _), length in zip(where, lengths, strict=True)]
    view = chat_view(spans, anchors, [slot for _, _, slot in where], num_rows * slots)
    return replace(batch, segments=segments[:, :width].contiguous(), positions=positions, starts=starts, chats=view)


# ---- order --------------------------------------------------------------------------------------------------------


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(",".join(str(part) for part in parts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def epoch_order(lengths: Sequence[int], global_batch: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Row indices of every global batch of an epoch: a function of (lengths, global_batch, seed, epoch) alone.

    Rows are shuffled, sorted by length within buckets of BUCKET_BATCHES global batches, cut, and the batches shuffled.
    Every row comes exactly once; the last batch of a bucket may be short.
    """
    generator = torch.Generator().manual_seed(_seed(seed, epoch))
    order = torch.randperm(len(lengths), generator=generator).tolist()
    bucket = global_batch * BUCKET_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(order), bucket):
        part = sorted(order[start : start + bucket], key=lambda index: lengths[index])
        batches += [part[i : i + global_batch] for i in range(0, len(part), global_batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class Batches:
    """The micro-batches of one rank, addressed by (epoch, index): resuming needs no other state.

    A step takes `accumulation` micro-batches on each of world_size ranks. What a step trains on depends on their product
    alone, so accumulation 2 on one rank equals two ranks. Padded, a step has rows_per_batch rows of similar length for each
    of them, dealt out like cards. With `tokens_per_batch`, a micro-batch is one row packed with chats up to that many
    tokens, and a step has as many of them. All ranks have the same number of micro-batches; one that gets no chat is all
    masked. The anchors of a chat depend on (seed, epoch, chat) alone. candidates: for every chat the anchors to draw from,
    int64 and ascending, instead of all that can be.

    Raises ValueError for settings that cannot be, and a chat longer than tokens_per_batch.
    """

    def __init__(
        self,
        rows: Sequence[TokenRow],
        *,
        rows_per_batch: int,
        block_size: int,
        anchors_per_row: int | None = None,
        anchor_share: float | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        tokens_per_batch: int | None = None,
        pad: Pad = NO_PAD,
        candidates: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if not rows:
            raise ValueError("no training rows")
        if rows_per_batch < 1:
            raise ValueError(f"rows_per_batch={rows_per_batch}: allowed >= 1")
        if anchors_per_row is None and anchor_share is None:
            raise ValueError("anchors_per_row and anchor_share: one of them must be set")
        assert 0 <= rank < world_size, (rank, world_size)
        self.rows = rows
        self.lengths = [len(row.input_ids) for row in rows]
        if tokens_per_batch is not None and max(self.lengths) > tokens_per_batch:
            raise ValueError(f"tokens_per_batch={tokens_per_batch}: allowed >= {max(self.lengths)}, the longest chat")
        self.rows_per_batch, self.block_size, self.tokens_per_batch = rows_per_batch, block_size, tokens_per_batch
        self.anchors_per_row, self.anchor_share, self.pad = anchors_per_row, anchor_share, pad
        self.seed, self.rank, self.world_size, self.accumulation = seed, rank, world_size, accumulation
        self.candidates = candidates
        self._order: tuple[int, list[list[list[int]]]] | None = None
        self._counts: list[int] = []  # micro-batches of epochs 0, 1, ... of a packed run, as far as they were needed

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank. Packed, this is epoch 0; others may differ by a few."""
        if self.tokens_per_batch is not None:
            return self._packed_count(0)
        size = self.rows_per_batch * self.world_size * self.accumulation
        full, rest = divmod(len(self.rows), size * BUCKET_BATCHES)
        return (full * BUCKET_BATCHES + math.ceil(rest / size)) * self.accumulation

    def _packed_count(self, epoch: int) -> int:
        while len(self._counts) <= epoch:
            self._counts.append(len(self._steps(len(self._counts))) * self.accumulation)
        return self._counts[epoch]

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, index in it) of the `index`-th micro-batch of the run."""
        if self.tokens_per_batch is None:
            return divmod(index, len(self))
        epoch = 0
        while index >= (count := self._packed_count(epoch)):
            epoch, index = epoch + 1, index - count
        return epoch, index

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        """For every step of the epoch the rows of all its micro-batches, in the order (micro-batch, rank)."""
        if self._order is None or self._order[0] != epoch:
            parts = self.world_size * self.accumulation
            if self.tokens_per_batch is None:
                order = epoch_order(self.lengths, self.rows_per_batch * parts, seed=self.seed, epoch=epoch)
                steps = [[batch[part::parts] for part in range(parts)] for batch in order]
            else:
                generator = torch.Generator().manual_seed(_seed(self.seed, epoch))
                packs = pack_order(self.lengths, self.tokens_per_batch, generator=generator)
                packs += [[] for _ in range(-len(packs) % parts)]
                steps = [packs[start : start + parts] for start in range(0, len(packs), parts)]
            self._order = (epoch, steps)
        return self._order[1]

    def indices(self, epoch: int, index: int) -> list[int]:
        """Row indices of this rank in micro-batch `index` of `epoch`; may be empty in a short last step."""
        step, micro = divmod(index, self.accumulation)
        return self._steps(epoch)[step][micro * self.world_size + self.rank]

    def batch(self, epoch: int, index: int) -> TrainBatch:
        """Micro-batch `index` of `epoch` for this rank."""
        chosen = self.indices(epoch, index)
        anchors = []
        for number in chosen:
            mask = self.rows[number].loss_mask
            budget = anchor_budget(mask, anchors_per_row=self.anchors_per_row, anchor_share=self.anchor_share)
            generator = torch.Generator().manual_seed(_seed(self.seed, epoch, number, 1))
            own = None if self.candidates is None else self.candidates[number]
            anchors.append(sample_anchors(mask, budget, generator, own))
        rows, packed = [self.rows[i] for i in chosen], self.tokens_per_batch is not None
        return collate(rows, None, self.block_size, anchors=anchors, packed=packed, pad=self.pad)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TrainBatch]:
        """All micro-batches of an epoch from `start` on."""
        for index in range(start, len(self._steps(epoch)) * self.accumulation):
            yield self.batch(epoch, index)

    def coverage(self) -> float:
        """Share of possible anchors that one epoch visits."""
        wanted = possible = 0
        for row in self.rows:
            here = len(anchor_positions(row.loss_mask))
            budget = anchor_budget(row.loss_mask, anchors_per_row=self.anchors_per_row, anchor_share=self.anchor_share)
            wanted, possible = wanted + min(budget, here), possible + here
        return wanted / possible if possible else 0.0
