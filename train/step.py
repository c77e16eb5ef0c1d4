"""One micro-batch: features, blocks, objective. Shapes: R rows, T text length, A anchors per row, G block slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..data.batch import Batches, TrainBatch
from ..data.chat import TokenRow
from ..data.pack import Pad
from ..losses.config import ObjectiveConfig
from ..losses.fused import objective
from ..losses.terms import ObjectiveStats
from ..models.draft import DraftOutput, FrozenHeads
from ..models.dspark import DSpark
from ..models.target import Target
from .config import TrainConfig
from .features import Features, FeatureSource
from .metrics import Clock
from .packed import with_rows
from .prefetch import Feed
from .unused import with_unused


@dataclass(frozen=True)
class Setup:
    """What the loop trains and on what: built by the caller, so that the loop reads no recipe."""

    drafter: DSpark
    heads: FrozenHeads
    source: FeatureSource
    rows: Sequence[TokenRow]
    validation: Sequence[TokenRow]
    softcap: float | None = None
    target: Target | None = None  # for rollouts; None where no rank has the whole target


class StepContext:
    """Everything a micro-batch needs that does not change between steps."""

    def __init__(
        self,
        cfg: TrainConfig,
        objective_cfg: ObjectiveConfig,
        setup: Setup,
        heads: FrozenHeads,
        device: torch.device,
        feed: Feed | None = None,
    ) -> None:
        """feed: brings the micro-batches of the run; None: everything in turn."""
        self.cfg, self.objective_cfg, self.setup, self.heads, self.device = cfg, objective_cfg, setup, heads, device
        self.feed = feed or Feed(iter(()), setup.source, device, count=0, ahead=False)
        self.dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32

    def loss(
        self, model: torch.nn.Module, batch: TrainBatch, rows: Sequence[TokenRow], totals: Tensor | None, clock: Clock
    ) -> tuple[Tensor, ObjectiveStats]:
        """This micro-batch's share of the step's loss (`totals`: the step's denominators), and its metrics."""
        used = self.used(batch).to(self.device, non_blocking=True)
        batch, features = self.feed.take(batch, rows, clock)
        if len(features.taps) < len(batch.input_ids):
            states = (with_rows(getattr(features, f.name), len(batch.input_ids)) for f in fields(features))
            features = Features(*states)
        last = batch.input_ids.shape[1] - 1
        slots = torch.arange(batch.labels.shape[-1], device=self.device)
        # [R, A, G]: position of slot k's predecessor, whose target state teaches the slot. Clamped where slots are masked.
        where = (batch.anchors[..., None] + slots).clamp_max(last)
        previous = batch.input_ids.gather(1, where.flatten(1)).view_as(where)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            out = model(
                taps=features.taps.to(self.dtype),
                anchors=batch.anchors,
                previous_tokens=previous,
                embedding=self.heads.embedding,
                detach_survival=self.objective_cfg.detach_survival,
                positions=batch.positions,
                starts=batch.starts,
                chats=None if self.cfg.compile else batch.chats,  # groups of chats differ in shape from batch to batch
            )
        clock.mark("drafter")
        loss, stats = self.objective(out, features, batch, where, used, totals)
        clock.mark("loss")
        return loss, stats

    @staticmethod
    def used(batch: TrainBatch) -> Tensor:
        """int64 [N]: blocks in use, of R * A; one masked block stands in where a rank has none.

        Found before the batch goes to the device: there it would be a wait for everything before it.
        """
        used = batch.anchor_mask.flatten().clone()
        used[0] |= ~used.any()
        return used.nonzero().flatten()

    def objective(
        self, out: DraftOutput, features: Features, batch: TrainBatch, where: Tensor, used: Tensor, totals: Tensor | None
    ) -> tuple[Tensor, ObjectiveStats]:
        """The objective over the blocks `used` int64 [N], of R * A."""
        rows, length = batch.input_ids.shape
        teacher = where + torch.arange(rows, device=self.device)[:, None, None] * length

        def pick(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, used)

        reduced = features.lse is not None
        survival = out.survival_logits if self.objective_cfg.survival > 0 else None
        loss, stats = objective(
            cfg=self.objective_cfg,
            hidden=pick(out.hidden).to(self.dtype),
            correction=None if out.correction is None else pick(out.correction).to(self.dtype),
            w2=None if out.w2 is None else out.w2.to(self.dtype),
            lm_head=self.heads.draft_head,
            target_hidden=features.last_hidden.flatten(0, 1).to(self.dtype),
            target_index=pick(teacher),
            target_head=self.heads.draft_head if reduced else self.heads.lm_head,
            draft_ids=self.heads.draft_ids,
            labels=pick(batch.labels),
            valid=pick(batch.valid),
            survival_logits=None if survival is None else pick(survival),
            softcap=self.setup.softcap,
            chunk_bytes=self.cfg.loss_chunk_mib << 20,
            denominators=totals,
            target_lse=None if features.lse is None else features.lse.flatten(),
            target_top=None if features.top is None else features.top.flatten(),
        )
        return with_unused(loss, self.objective_cfg, out, self.setup.drafter), stats


def make_batches(
    cfg: TrainConfig, rows: Sequence[TokenRow], accelerator: Accelerator, *, block_size: int, seed: int, **options: Any
) -> Batches:
    """This rank's micro-batches of `rows` as the recipe wants them. options: of Batches, instead of the recipe's.

    Raises ValueError naming train.tokens_per_batch when a chat is longer.
    """
    packed = cfg.packing == "packed"
    pad = Pad()
    if cfg.compile:
        pad = Pad(tokens=cfg.tokens_per_batch, anchors=32) if packed else Pad(rows=cfg.rows, tokens=64, anchors=8)
    given: dict[str, Any] = {"anchor_share": cfg.anchor_share, "accumulation": cfg.accumulation, "pad": pad} | options
    if packed:
        given["tokens_per_batch"] = cfg.tokens_per_batch
    try:
        return Batches(
            rows, rows_per_batch=cfg.rows, block_size=block_size, seed=seed, rank=accelerator.process_index,
            world_size=accelerator.num_processes, **given,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"train.{error}") from error


def micro_batches(batches: Batches, start: int) -> Iterator[tuple[TrainBatch, list[TokenRow]]]:
    """Micro-batches from the `start`-th on, epoch after epoch: a pure function of its arguments, so resuming needs no state."""
    index = start
    while True:
        epoch, inside = batches.locate(index)
        yield batches.batch(epoch, inside), [batches.rows[i] for i in batches.indices(epoch, inside)]
        index += 1
