"""The tensors of one objective call, checked once for both paths. Shape legend in `objective.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .config import ObjectiveConfig


def reduction_dtype(x: Tensor) -> torch.dtype:
    """float32 for probabilities and sums, float64 if the inputs are (gradient checks)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `objective`, validated. Raises ValueError, one line, naming the argument."""

    cfg: ObjectiveConfig
    hidden: Tensor
    lm_head: Tensor
    target_hidden: Tensor
    target_index: Tensor
    target_head: Tensor
    labels: Tensor
    valid: Tensor
    correction: Tensor | None
    w2: Tensor | None
    draft_ids: Tensor | None
    survival_logits: Tensor | None
    target_lse: Tensor | None
    target_top: Tensor | None

    def __post_init__(self) -> None:
        blocks, rows = self.valid.shape, self.lm_head.shape[0]
        if self.valid.dtype != torch.bool:
            raise ValueError(f"valid has dtype {self.valid.dtype}: must be bool")
        for name in ("hidden", "target_index", "labels", "correction", "survival_logits"):
            value = getattr(self, name)
            if value is not None and value.shape[:2] != blocks:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}: must start with the blocks and slots of valid, {tuple(blocks)}"
                )
        if (self.correction is None) != (self.w2 is None):
            raise ValueError("correction and w2 must be given together")
        if self.w2 is not None and self.w2.shape[0] != rows:
            raise ValueError(f"w2 has {self.w2.shape[0]} rows: must be {rows}, as lm_head")
        if self.cfg.survival > 0 and self.survival_logits is None:
            raise ValueError("survival_logits is None: must be given while objective.survival > 0")
        if self.draft_ids is None and self.target_lse is not None:
            raise ValueError("target_lse is given without draft_ids: it only serves a reduced draft vocabulary")
        if self.draft_ids is not None and self.draft_ids.shape[0] != rows:
            raise ValueError(f"draft_ids has {self.draft_ids.shape[0]} entries: must be {rows}, as lm_head has rows")
        if self.draft_ids is None and self.target_head.shape[0] != rows:
            raise ValueError(f"target_head has {self.target_head.shape[0]} rows: must be {rows} without draft_ids")

    @cached_property
    def columns(self) -> Tensor:
        """int64 [V'] draft column of a target id, or -1; V' covers the ids of draft_ids and of the valid labels."""
        assert self.draft_ids is not None
        labels = self.labels[self.valid]
        highest = self.draft_ids.max() if labels.numel() == 0 else torch.maximum(self.draft_ids.max(), labels.max())
        table = self.draft_ids.new_full((int(highest) + 1,), -1)
        table[self.draft_ids] = torch.arange(len(self.draft_ids), device=table.device)
        return table


def target_rows(batch: Inputs) -> Tensor:
    """[Vd, H] rows of the target's head over the draft vocabulary (the whole head if nothing is left out)."""
    if batch.draft_ids is None or batch.target_head.shape[0] == batch.draft_ids.shape[0]:
        return batch.target_head
    return batch.target_head[batch.draft_ids]
