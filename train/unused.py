"""Parameters that a phase of the objective does not train: no rank waits for their gradient, and they stay where they are.

DDP waits for the gradient of every trainable parameter. What no phase of a run needs is frozen (train/phases.py); what only
this phase does not need gets a gradient of zero in backward, which is forgotten before the update.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..losses.config import ObjectiveConfig
from ..models.draft import DraftOutput
from ..models.dspark import DSpark

SURVIVAL, CORRECTION = "confidence_head.", "markov_head."


def with_unused(loss: Tensor, cfg: ObjectiveConfig, out: DraftOutput, drafter: DSpark) -> Tensor:
    """The same loss, with a gradient of zero to the outputs that no term of `cfg` reads."""
    unread: list[Tensor | None] = []
    head = drafter.confidence_head
    if cfg.survival == 0 and head is not None and any(p.requires_grad for p in head.parameters()):
        unread.append(out.survival_logits)
    if cfg.active == ("survival",):
        unread += [out.hidden, out.correction, out.w2]
    for x in unread:
        if x is not None and x.requires_grad:
            loss = loss + torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0.0).sum()  # 0 * NaN would be NaN
    return loss


def drop_unused(cfg: ObjectiveConfig, drafter: DSpark) -> None:
    """Forget those gradients of zero before an update: the optimiser's momentum would go on moving what they belong to.

    (DeepSpeed updates copies of its own: there, what a phase does not train coasts for some ten steps.)
    """
    for parameter in _untrained(cfg, drafter):
        parameter.grad = None


def _untrained(cfg: ObjectiveConfig, drafter: DSpark) -> Iterator[nn.Parameter]:
    alone = cfg.active == ("survival",)
    if cfg.survival > 0 and not alone:
        return
    for name, parameter in drafter.named_parameters():
        if not alone:
            untrained = SURVIVAL in name
        elif cfg.detach_survival:
            untrained = SURVIVAL not in name
        else:  # the survival head reads the states, and of the correction head W1 alone, or nothing
            reads = drafter.confidence_head is not None and drafter.confidence_head.rank > 0 and "markov_w1" in name
            untrained = CORRECTION in name and not reads
        if untrained:
            yield parameter
