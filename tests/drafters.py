"""Small DSpark drafters with every part awake: no weight is left at its neutral start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftsmith.models.config import DSparkConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from tiny import tiny_model

MASK = 96
DRAFT_IDS = torch.tensor(sorted({1, 2, *range(3, 97, 2)}))


def tiny_drafter(
    model: nn.Module | None = None, *, reduced: bool = False, seed: int = 1, **changes: Any
) -> tuple[DSpark, FrozenHeads]:
    """Random drafter for `tiny_model` (fp32, eval, 2 layers, block 5 unless changed); `reduced`: half the vocabulary."""
    model = model or tiny_model()
    settings: dict[str, Any] = dict(num_layers=2, block_size=5, tap_layers=(0, 1), rank=8, init="random")
    cfg = DSparkConfig(**(settings | changes), draft_vocab_size=len(DRAFT_IDS) if reduced else None)
    config = native.build_config(model.config, cfg, mask_token_id=MASK, target_name="tiny")
    torch.manual_seed(seed)
    drafter = DSpark(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * (1.0 if "confidence" in name else 0.15))
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    heads = FrozenHeads.build(embedding, lm_head, DRAFT_IDS if reduced else None)
    return drafter.eval(), heads


def slot_logits(drafter: DSpark, heads: FrozenHeads, out: Any) -> torch.Tensor:
    """Logits of `unroll`'s slots as the objective defines them: lm_head h + w2 u, [..., G, Vd]."""
    logits = out.hidden @ heads.draft_head.T
    if out.correction is not None:
        logits = logits + out.correction @ drafter.markov_head.markov_w2.weight.T
    return logits
