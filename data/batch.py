"""Training batches: rows of similar length padded together, anchors drawn per row, labels and their validity.

Shapes: R rows, T padded length, A anchor slots per row, G block slots.

Where a block may start. At serving time the anchor of a cycle is the last token that was committed: a bonus or correction
token, or the very first token of a reply, which plain prefill sampled. It is always a token that the target generated, so
an anchor is a supervised position whose next position is supervised too. The last token of the prompt is never one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .chat import TokenRow

BUCKET_BATCHES = 32  # rows are sorted by length within this many global batches: little padding, still well mixed


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One padded batch. Padding is known by `lengths`, never by a token id.

    input_ids int64 [R,T]; lengths int64 [R]; anchors int64 [R,A] (0 where unused); anchor_mask bool [R,A];
    labels int64 [R,A,G], the token at anchor + k + 1 (0 beyond the row); valid bool [R,A,G], prefix-closed: slot k is
    supervised only if the slots before it are. A block never reaches past its own turn, since turns are separated by
    unsupervised tokens.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor
    anchor_mask: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor

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
        names = ("input_ids", "lengths", "anchors", "anchor_mask", "labels", "valid")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


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


def sample_anchors(loss_mask: Sequence[bool], budget: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """int64 [<= budget] anchors of one row, ascending, uniform without replacement."""
    positions = anchor_positions(loss_mask)
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
) -> TrainBatch:
    """Pad rows and draw their anchors.

    `anchors` (one int64 tensor a row) replaces the draw; otherwise the budget is `anchor_budget` of each row.
    Without rows, or without an anchor in them, the batch is all masked and has A = 1, so that a rank with nothing to do
    still runs forward and backward.
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
    num_rows, width = len(rows), max(len(row.input_ids) for row in rows)
    slots = max(1, *(len(found) for found in anchors))
    # `block_size` columns beyond the longest row, so that no label index leaves the tensor.
    ids = torch.zeros(num_rows, width + block_size, dtype=torch.long)
    mask = torch.zeros(num_rows, width + block_size, dtype=torch.bool)
    placed = torch.zeros(num_rows, slots, dtype=torch.long)
    used = torch.zeros(num_rows, slots, dtype=torch.bool)
    for index, (row, found) in enumerate(zip(rows, anchors, strict=True)):
        ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids, dtype=torch.long)
        mask[index, : len(row.input_ids)] = torch.tensor(row.loss_mask, dtype=torch.bool)
        placed[index, : len(found)] = found
        used[index, : len(found)] = True
    where = (placed[..., None] + 1 + torch.arange(block_size)).flatten(1)  # [R, A*G]
    shape = (num_rows, slots, block_size)
    supervised = mask.gather(1, where).view(shape) & used[..., None]
    return TrainBatch(
        input_ids=ids[:, :width].contiguous(),
        lengths=torch.tensor([len(row.input_ids) for row in rows], dtype=torch.long),
        anchors=placed,
        anchor_mask=used,
        labels=ids.gather(1, where).view(shape) * used[..., None],
        valid=supervised.long().cumprod(-1).bool(),
    )


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
    """The training batches of one rank, addressed by (epoch, index): resuming needs no other state.

    A global batch has rows_per_batch * world_size rows of similar length; rank r takes every world_size-th of them. All
    ranks have the same number of batches; a rank that gets no row of a short batch gets an all-masked one. The anchors of
    a row depend on (seed, epoch, row) alone, so they are the same for every split over ranks.
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
        self.rows_per_batch, self.block_size = rows_per_batch, block_size
        self.anchors_per_row, self.anchor_share = anchors_per_row, anchor_share
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self._order: tuple[int, list[list[int]]] | None = None

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        size = self.rows_per_batch * self.world_size
        full, rest = divmod(len(self.rows), size * BUCKET_BATCHES)
        return full * BUCKET_BATCHES + math.ceil(rest / size)

    def indices(self, epoch: int, index: int) -> list[int]:
        """Row indices of this rank in batch `index` of `epoch`; may be empty on a short last batch."""
        if self._order is None or self._order[0] != epoch:
            size = self.rows_per_batch * self.world_size
            self._order = (epoch, epoch_order(self.lengths, size, seed=self.seed, epoch=epoch))
        return self._order[1][index][self.rank :: self.world_size]

    def batch(self, epoch: int, index: int) -> TrainBatch:
        """Batch `index` of `epoch` for this rank."""
        chosen = self.indices(epoch, index)
        anchors = []
        for number in chosen:
            mask = self.rows[number].loss_mask
            budget = anchor_budget(mask, anchors_per_row=self.anchors_per_row, anchor_share=self.anchor_share)
            generator = torch.Generator().manual_seed(_seed(self.seed, epoch, number, 1))
            anchors.append(sample_anchors(mask, budget, generator))
        return collate([self.rows[i] for i in chosen], None, self.block_size, anchors=anchors)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TrainBatch]:
        """All batches of an epoch from `start` on."""
        for index in range(start, len(self)):
            yield self.batch(epoch, index)

    def coverage(self) -> float:
        """Share of possible anchors that one epoch visits."""
        wanted = possible = 0
        for row in self.rows:
            here = len(anchor_positions(row.loss_mask))
            budget = anchor_budget(row.loss_mask, anchors_per_row=self.anchors_per_row, anchor_share=self.anchor_share)
            wanted, possible = wanted + min(budget, here), possible + here
        return wanted / possible if possible else 0.0
