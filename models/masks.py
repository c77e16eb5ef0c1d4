"""Who a block query may see: target context strictly before its anchor, and its own block (DeepSpec `common.py`).

The rule is by position and own block only, never by block index, so overlapping blocks cannot leak into each other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_mask(anchors: Tensor, context_length: int) -> Tensor:
    """anchors int64 [R, A] -> bool [R, A, T], True where context position t < anchor.

    The target state of the anchor itself does not exist when a block is drafted, so t = anchor is hidden.
    """
    positions = torch.arange(context_length, device=anchors.device)
    return positions[None, None, :] < anchors[..., None]


def block_attention(query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
    """Attention of every block over its context and itself, one softmax over both, cost linear in blocks.

    query [R, A, G, nh, hd]; context keys and values [R, T, nkv, hd]; block keys and values [R, A, G, nkv, hd];
    visible bool [R, A, T]. Returns [R, A, G, nh, hd]. Scores are reduced in float32.
    """
    rows, blocks, slots, heads, head_dim = query.shape
    kv_heads, length = context[0].shape[2], context[0].shape[1]
    group = heads // kv_heads
    # [R, nkv, A, G*group, hd]: GQA as a batched product, no key is repeated.
    q = query.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 2, 4, 5).reshape(rows, kv_heads, blocks, slots * group, head_dim)
    key_c, value_c = (t.transpose(1, 2) for t in context)  # [R, nkv, T, hd]
    key_b, value_b = (t.permute(0, 3, 1, 2, 4) for t in block)  # [R, nkv, A, G, hd]
    score_c = (q.flatten(2, 3) @ key_c.transpose(-1, -2)).view(rows, kv_heads, blocks, slots * group, length)
    score_b = q @ key_b.transpose(-1, -2)
    score_c = score_c.masked_fill(~visible[:, None, :, None, :], torch.finfo(score_c.dtype).min)
    scores = torch.cat((score_c, score_b), dim=-1)
    weights = torch.softmax(scores * head_dim**-0.5, dim=-1, dtype=torch.float32).to(query.dtype)
    weight_c, weight_b = weights.split((length, slots), dim=-1)
    out = (weight_c.flatten(2, 3) @ value_c).view_as(q) + weight_b @ value_b
    out = out.view(rows, kv_heads, blocks, slots, group, head_dim).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(rows, blocks, slots, heads, head_dim)
