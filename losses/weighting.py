"""How much each slot of a block counts. All weights are [A, G], carry no gradient, and are 0 at masked slots."""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import prefix_products, reach
from .config import ObjectiveConfig


def position_decay(
    *, num_slots: int, decay: float, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """exp(-(k-1)/decay) for k = 1..G, [G]; all ones for decay 0 (DSpark eq. 9; shipped configs use 4 with 7 slots)."""
    steps = torch.arange(num_slots, device=device, dtype=dtype)
    return torch.exp(-steps / decay) if decay > 0 else torch.ones_like(steps)


def dpace(*, confidence: Tensor, valid: Tensor, beta: float) -> Tensor:
    """w_j = (1/G) sum_{m >= j} prod_{i <= m} ((1 - beta) c_i + beta), at most 1 (D-PACE, Lucas-TY/D-PACE; methods 2.2).

    `confidence` [A, G] is q(y) for the original, which fits cross-entropy only, or alpha for the variant that
    fits the other losses. Sums stop at the first masked slot. Detached.
    """
    smooth = ((1.0 - beta) * confidence.detach() + beta) * valid
    products = prefix_products(smooth)
    return products.flip(-1).cumsum(-1).flip(-1) * valid / confidence.shape[-1]


def until_first_failure(*, correct: Tensor, valid: Tensor) -> Tensor:
    """1 up to and including the first slot whose arg-max misses the text token, then 0 (Spec-AUF, arXiv 2607.01893).

    `correct` bool [A, G]."""
    return reach(correct.to(valid.dtype)) * valid


def slot_weights(cfg: ObjectiveConfig, *, valid: Tensor, alpha: Tensor, a: Tensor, q_label: Tensor, correct: Tensor) -> Tensor:
    """Weights [A, G] of the slot terms under `cfg.slot_weighting`.

    `valid` float [A, G] of zeros and ones; `alpha`, `a` (token acceptance), `q_label` float [A, G], 0 at masked
    slots; `correct` bool [A, G]: the draft's arg-max is the text token.
    """
    if cfg.slot_weighting == "dpace":
        return dpace(confidence=q_label, valid=valid, beta=cfg.dpace_beta)
    if cfg.slot_weighting == "dpace_alpha":
        return dpace(confidence=alpha, valid=valid, beta=cfg.dpace_beta)
    if cfg.slot_weighting == "auf":
        return until_first_failure(correct=correct, valid=valid)
    decay = position_decay(num_slots=valid.shape[-1], decay=cfg.decay, device=valid.device, dtype=valid.dtype)
    if cfg.slot_weighting == "half_reach":
        return 0.5 * (decay + reach(a.detach())) * valid
    return decay * valid


def survival_weights(cfg: ObjectiveConfig, *, valid: Tensor, a: Tensor) -> Tensor:
    """Weights [A, G] of the survival loss: the position decay, or the reach W_{k-1}, which makes the training
    paths those met in serving (methods 4). Slot weightings never apply to it (methods 7.9)."""
    if cfg.reach_weighted_survival:
        return reach(a.detach()) * valid
    return position_decay(num_slots=valid.shape[-1], decay=cfg.decay, device=valid.device, dtype=valid.dtype) * valid
