"""Start a drafter from its target: last layers, norms, and the embedding's own geometry for the correction head.

Which start is better is measured, not assumed: see docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .dspark import DSpark

COPIED = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@torch.no_grad()
def init_from_target(drafter: DSpark, layers: nn.ModuleList, final_norm: nn.Module, embedding: torch.Tensor) -> None:
    """Copy what has the same shape from the target's last layers; layers/final_norm are the target's modules.

    fc passes the deepest tap through, so that H_ctx starts as the (normed) state the copied layers were trained on. W1 starts
    as a fixed random projection of the target's embedding (unit RMS): tokens with similar embeddings start with similar
    biases, which matters for the many tokens a short run never sees as a predecessor.
    """
    first = len(layers) - len(drafter.layers)
    for i, layer in enumerate(drafter.layers):
        for name in COPIED:
            _copy(layer.get_submodule(name), layers[max(first + i, 0)], name)
    _copy(drafter.norm, final_norm, "")
    hidden = drafter.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden, dtype=drafter.fc.weight.dtype)
    if drafter.markov_head is not None:
        w1 = drafter.markov_head.markov_w1.weight
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(hidden, w1.shape[1], generator=generator).to(w1)
        table = embedding.to(w1) @ projection
        w1.copy_(table / table.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6))


def _copy(ours: nn.Module, theirs: nn.Module, name: str) -> None:
    """Copy one weight where the target has a module of that name and shape; other families keep the random start."""
    try:
        source: Any = theirs.get_submodule(name) if name else theirs
    except AttributeError:
        return
    weight = getattr(source, "weight", None)
    if weight is not None and weight.shape == ours.weight.shape:
        ours.weight.copy_(weight)
