"""A drafter's backbone as one native call: context injection and the non-causal block over it.

    stack = draft_stack(drafter, embedding, head)      # ValueError where the kernels cannot run it
    cache = stack.new_cache(slots, max_context)
    write = stack.context_call(cache)
    write(addresses, widths, rows, starts)             # target states [widths[b], n*H] at starts[b]..
    block = stack.block_call(cache, batch, width, 0, logits, hidden)
    block(rows, anchor_tokens, positions)              # logits and hidden are written

or, step by step,

    stack.write_context(drafter.context_features(taps), cache, rows, starts)       # [B,W,H] at starts[b]..
    _, _, hidden = stack.forward(block_inputs, cache, rows, anchors, hidden=True, causal=False)

The block's own keys go to positions anchor .. anchor + G - 1 of the cache; the next write_context overwrites them, so the
context of a row must be written before its block runs, as a commit does. `max_context` must leave room for one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.dspark import DSpark
from ..weights import LayerWeights
from . import problem
from .stack import FusedStack


@torch.no_grad()
def draft_stack(drafter: DSpark, embedding: Tensor | None = None, head: Tensor | None = None) -> FusedStack:
    """Pack the drafter's layers, norms and projection (a copy: pack again after training on). ValueError with the reason.

    embedding [V, H] and head [Vd, H] in the drafter's dtype are needed for block_call.
    """
    shape, weight = drafter.layers[0].self_attn.shape, drafter.fc.weight
    reason = problem(weight.dtype) if weight.device.type == "cpu" else f"the drafter is on {weight.device}"
    if shape.head_dim % 32 or shape.head_dim > 256 or shape.hidden_size % 32:
        reason = f"head size {shape.head_dim} or hidden size {shape.hidden_size} is not a multiple of 32"
    if reason is not None:
        raise ValueError(f"drafter: no CPU kernels: {reason}")
    layers = [
        LayerWeights(
            input_norm=layer.input_layernorm.weight, post_norm=layer.post_attention_layernorm.weight,
            qkv=torch.cat((layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)),
            qkv_bias=None, q_norm=layer.self_attn.q_norm.weight, k_norm=layer.self_attn.k_norm.weight,
            out=layer.self_attn.o_proj.weight, out_bias=None,
            gate_up=torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)), gate_up_bias=None,
            down=layer.mlp.down_proj.weight, down_bias=None, window=None,
        )
        for layer in drafter.layers
    ]  # fmt: skip
    return FusedStack(
        layers, drafter.norm.weight, embedding=embedding, head=head, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, attention_scale=shape.head_dim**-0.5, eps=shape.rms_norm_eps,
        inv_freq=drafter.rope.inv_freq, rope_scale=drafter.rope.scaling, mask_token=drafter.mask_token_id,
        context=(drafter.fc.weight, drafter.hidden_norm.weight),
    )  # fmt: skip
