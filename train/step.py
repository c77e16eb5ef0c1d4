"""One micro-batch: features, blocks, objective. Shapes: R rows, T text length, A anchors per row, G block slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batch import Batches, TrainBatch
from ..data.chat import TokenRow
from ..losses.config import ObjectiveConfig
from ..losses.fused import objective
from ..losses.terms import ObjectiveStats
from ..models.draft import DraftOutput, FrozenHeads
from ..models.dspark import DSpark
from .config import TrainConfig
from .features import Features, FeatureSource
from .metrics import Clock


@dataclass(frozen=True)
class Setup:
    """What the loop trains and on what: built by the caller, so that the loop reads no recipe."""

    drafter: DSpark
    heads: FrozenHeads
    source: FeatureSource
    rows: Sequence[TokenRow]
    validation: Sequence[TokenRow]
    softcap: float | None = None


class StepContext:
    """Everything a micro-batch needs that does not change between steps."""

    def __init__(
        self, cfg: TrainConfig, objective_cfg: ObjectiveConfig, setup: Setup, heads: FrozenHeads, device: torch.device
    ) -> None:
        self.cfg, self.objective_cfg, self.setup, self.heads, self.device = cfg, objective_cfg, setup, heads, device
        self.dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32

    def loss(
        self, model: torch.nn.Module, batch: TrainBatch, rows: Sequence[TokenRow], totals: Tensor | None, clock: Clock
    ) -> tuple[Tensor, ObjectiveStats]:
        """This micro-batch's share of the step's loss (`totals`: the step's denominators), and its metrics."""
        batch = batch.to(self.device)
        clock.mark("data")
        features = self.setup.source.features(batch, rows)
        clock.mark("target")
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
            )
        clock.mark("drafter")
        loss, stats = self.objective(out, features, batch, where, totals)
        clock.mark("loss")
        return loss, stats

    def objective(
        self, out: DraftOutput, features: Features, batch: TrainBatch, where: Tensor, totals: Tensor | None
    ) -> tuple[Tensor, ObjectiveStats]:
        """The objective over the anchors in use; one masked block stands in where a rank has none."""
        used = batch.anchor_mask.flatten().clone()
        used[0] |= ~used.any()
        rows, length = batch.input_ids.shape
        teacher = where + torch.arange(rows, device=self.device)[:, None, None] * length

        def pick(x: Tensor) -> Tensor:
            return x.flatten(0, 1)[used]

        head = self.setup.drafter.markov_head
        reduced = features.lse is not None
        survival = out.survival_logits if self.objective_cfg.survival > 0 else None
        return objective(
            cfg=self.objective_cfg,
            hidden=pick(out.hidden).to(self.dtype),
            correction=None if out.correction is None else pick(out.correction).to(self.dtype),
            w2=None if head is None else head.markov_w2.weight.to(self.dtype),
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


def micro_batches(batches: Batches, start: int) -> Iterator[tuple[TrainBatch, list[TokenRow]]]:
    """Micro-batches from the `start`-th on, epoch after epoch: a pure function of its arguments, so resuming needs no state."""
    index = start
    while True:
        epoch, inside = divmod(index, len(batches))
        yield batches.batch(epoch, inside), [batches.rows[i] for i in batches.indices(epoch, inside)]
        index += 1
