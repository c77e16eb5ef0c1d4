"""Masks, sums and global denominators: what turns per-position losses into one number."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import BLOCK_TERMS, SURVIVAL_TERMS, ObjectiveConfig
from .weighting import position_decay

DENOMINATORS = ("slots", "blocks", "survival")


def denominators(cfg: ObjectiveConfig, valid: Tensor) -> Tensor:
    """What the sums of the terms are divided by, float32 [3] in the order of `DENOMINATORS`.

    They depend on `valid` bool [A, G] and the config alone, so a caller adds them over micro-batches and ranks
    before the first backward pass; every rank then divides by the same totals.
    slots: the weights of the slot terms (`decay`, `half_reach`: the decay; other slot weightings: 1 a slot);
    blocks: blocks with at least one valid slot; survival: decay weights.
    """
    mask = valid.to(torch.float32)
    decayed = (mask * position_decay(num_slots=valid.shape[-1], decay=cfg.decay, device=valid.device)).sum()
    slots = decayed if cfg.slot_weighting in ("decay", "half_reach") else mask.sum()
    return torch.stack([slots, valid.any(-1).sum().to(torch.float32), decayed])


def denominator_of(term: str) -> int:
    """Index into `denominators` of the total that a term is divided by."""
    if term in BLOCK_TERMS:
        return DENOMINATORS.index("blocks")
    return DENOMINATORS.index("survival" if term in SURVIVAL_TERMS else "slots")


def clean_rows(x: Tensor, valid: Tensor) -> Tensor:
    """`x` [A, G, ...] with masked rows set to 0, whatever they hold. Zeroing the input, not the loss, keeps NaN
    and inf out of the gradient as well (0 * NaN is NaN in backward)."""
    return torch.where(valid.reshape(valid.shape + (1,) * (x.dim() - valid.dim())), x, 0.0)


def masked_sum(x: Tensor, weight: Tensor) -> Tensor:
    """sum of weight * x over entries with weight > 0; others may hold anything finite in their gradient."""
    return (torch.where(weight > 0, x, 0.0) * weight).sum()


def divide(total: Tensor, count: Tensor) -> Tensor:
    """total / count, and 0 (not NaN) where nothing was counted."""
    return total / count.clamp(min=torch.finfo(torch.float32).tiny)


def unpack(packed: Tensor, valid: Tensor, fill: float = 0.0) -> Tensor:
    """Values of the valid slots, [valid.sum(), ...], back in block shape [A, G, ...] with `fill` elsewhere; differentiable."""
    full = packed.new_full(valid.shape + packed.shape[1:], fill)
    full[valid] = packed
    return full
