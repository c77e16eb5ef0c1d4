"""The contract between a drafter and the training loop.

A drafter turns tapped target states and anchors into per-slot hidden states. The objective (losses/) owns the vocabulary
products: slot logits are `lm_head @ hidden + w2 @ correction`, and no drafter ever materialises them in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class FrozenHeads:
    """The target's embedding and LM head, shared and never trained (DSpark section 3.3).

    embedding: [V, H]; lm_head: [V, H]; draft_head: [Vd, H] rows of lm_head (lm_head itself with the full vocabulary);
    draft_ids: int64 [Vd] target ids of the draft vocabulary, ascending, or None for the full vocabulary.
    """

    embedding: Tensor
    lm_head: Tensor
    draft_head: Tensor
    draft_ids: Tensor | None = None

    @classmethod
    def build(cls, embedding: Tensor, lm_head: Tensor, draft_ids: Tensor | None) -> FrozenHeads:
        """Select the draft rows of the head once; tensors keep their dtype and device."""
        embedding, lm_head = embedding.detach(), lm_head.detach()
        if draft_ids is None:
            return cls(embedding, lm_head, lm_head, None)
        draft_ids = draft_ids.to(lm_head.device)
        return cls(embedding, lm_head, lm_head[draft_ids].contiguous(), draft_ids)

    def to(self, dtype: torch.dtype) -> FrozenHeads:
        """The same heads in another dtype (no copy when it already is)."""
        full = self.lm_head.to(dtype)
        draft = full if self.draft_ids is None else self.draft_head.to(dtype)
        tied = self.embedding.data_ptr() == self.lm_head.data_ptr() and self.embedding.shape == self.lm_head.shape
        return FrozenHeads(full if tied else self.embedding.to(dtype), full, draft, self.draft_ids)


class DraftOutput(NamedTuple):
    """Per-slot outputs of `unroll`: hidden [R,A,G,H]; correction [R,A,G,r] or None; survival_logits [R,A,G] or None.

    w2 [Vd,r] or None: the correction head's output matrix for the objective, taken inside forward, where sharded training
    holds it whole. A tuple, because FSDP2 and ZeRO-3 look for the tensors of an output in tuples only.
    """

    hidden: Tensor
    correction: Tensor | None
    survival_logits: Tensor | None
    w2: Tensor | None = None
