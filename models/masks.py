"""Who a block query may see: target context strictly before its anchor, and its own block (DeepSpec `common.py`).

The rule is by position and own block only, never by block index, so overlapping blocks cannot leak into each other.
Two ways to compute it, equal in value: `block_attention` everywhere, `FlexAttention` for training on a GPU. In both a block
meets its context and itself, never another block, so time and memory grow with the number of blocks, not with its square.

Shapes: R rows, T context length, A anchors (blocks) per row, G slots of a block, nh heads, nkv key heads, hd head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

CHUNK = 32  # blocks whose context is cut to what they see together (CPU)
TILE = 128  # side of the tiles that flex_attention computes or skips
MIN_FLEX_HEAD = 16  # the smallest head size that its kernels take


def context_mask(anchors: Tensor, context_length: int, starts: Tensor | None = None) -> Tensor:
    """anchors int64 [R, A] -> bool [R, A, T], True where context position starts <= t < anchor.

    The target state of the anchor itself does not exist when a block is drafted, so t = anchor is hidden. starts int64
    [R, A], the first position of the anchor's chat where a row holds several; None: every chat starts at 0.
    """
    positions = torch.arange(context_length, device=anchors.device)
    visible = positions < anchors[..., None]
    return visible if starts is None else visible & (positions >= starts[..., None])


def block_attention(query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
    """Attention of every block over its context and itself, one softmax over both, cost linear in blocks.

    query [R, A, G, nh, hd]; context keys and values [R, T, nkv, hd]; block keys and values [R, A, G, nkv, hd];
    visible bool [R, A, T]. Returns [R, A, G, nh, hd]. Scores are reduced in float32.

    Batched products instead of scaled_dot_product_attention: that takes a single key sequence per row, so either every block is
    multiplied with every other block only to mask it (A^2), or the context is copied for each block. On one CPU thread, 9
    heads of 64 over 3 key heads, forward and backward: 165 ms here, 540 ms masked, 585 ms copied at 256 blocks of 7 over 512
    tokens (float32; bf16 132, 413, 784 ms); 1.3 s and 2.9 s masked at 512 blocks over 2048 tokens. Half of the gain comes
    from CHUNK: blocks that stand near each other multiply only the context that one of them sees.
    """
    rows, blocks, slots, heads, head_dim = query.shape
    kv_heads = context[0].shape[2]
    group = heads // kv_heads
    # [R, nkv, A, G*group, hd]: GQA as a batched product, no key is repeated.
    q = query.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 2, 4, 5).reshape(rows, kv_heads, blocks, slots * group, head_dim)
    context = (context[0].transpose(1, 2), context[1].transpose(1, 2))  # [R, nkv, T, hd]
    block = (block[0].permute(0, 3, 1, 2, 4), block[1].permute(0, 3, 1, 2, 4))  # [R, nkv, A, G, hd]
    spans = _spans(visible)
    sizes = [stop - start for start, stop, _, _ in spans]
    outputs = []
    # split, not slices: the gradient of a slice is as large as what it was cut from
    pieces = zip(q.split(sizes, 2), block[0].split(sizes, 2), block[1].split(sizes, 2), spans, strict=True)
    for part, key, value, (start, stop, low, high) in pieces:
        seen = (context[0][:, :, low:high], context[1][:, :, low:high])
        outputs.append(_attend(part, seen, (key, value), visible[:, start:stop, low:high]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    out = out.view(rows, kv_heads, blocks, slots, group, head_dim).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(rows, blocks, slots, heads, head_dim)


def _attend(q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
    """One softmax over context and block: q [R, nkv, A, Q, hd], context [R, nkv, T, hd], block [R, nkv, A, G, hd]."""
    (key_c, value_c), (key_b, value_b) = context, block
    length, slots, scale = key_c.shape[2], key_b.shape[3], q.shape[-1] ** -0.5
    score_c = (q.flatten(2, 3) @ key_c.transpose(-1, -2)).view(*q.shape[:4], length)
    score_c = score_c.masked_fill(~visible[:, None, :, None, :], torch.finfo(score_c.dtype).min)
    scores = torch.cat((score_c, q @ key_b.transpose(-1, -2)), dim=-1)
    weights = torch.softmax(scores * scale, dim=-1, dtype=torch.float32).to(q.dtype)
    weight_c, weight_b = weights.split((length, slots), dim=-1)
    return (weight_c.flatten(2, 3) @ value_c).view_as(q) + weight_b @ value_b


def _spans(visible: Tensor) -> list[tuple[int, int, int, int]]:
    """(first block, end, first context position, end) of chunks of neighbours, from visible bool [R, A, T].

    One chunk where the host does not know the mask: on another device, or while a graph is traced.
    """
    blocks, length = visible.shape[1:]
    if blocks <= CHUNK or visible.device.type != "cpu" or torch.compiler.is_compiling():
        return [(0, blocks, 0, length)]
    seen = F.pad(visible.any(0), (0, 0, 0, -blocks % CHUNK)).unflatten(0, (-1, CHUNK)).any(1)  # [chunks, T]
    first = seen.int().argmax(1).tolist()
    last = (seen * torch.arange(1, length + 1)).amax(1).tolist() if length else [0] * len(first)
    starts = range(0, blocks, CHUNK)
    return [(a, min(a + CHUNK, blocks), low, max(low, high)) for a, low, high in zip(starts, first, last, strict=True)]


# ---- on a GPU -----------------------------------------------------------------------------------------------------------


class FlexAttention:
    """`block_attention` with the context part in flex_attention: made once for a batch, called by every layer.

    The context is one flex_attention call of A*G queries over T keys whose mask names, for each tile of queries, the tiles of
    context that its blocks see: the others are neither read nor multiplied. A block's attention to itself is a batched
    product. Both end in a log-sum-exp, which joins them to the one softmax over both: with lse_c and lse_b of the
    two parts, out = s out_c + (1 - s) out_b, s = sigmoid(lse_c - lse_b). Keys of all blocks in one call with the context would
    need a mask over (A*G)^2.
    """

    def __init__(self, anchors: Tensor, context_length: int, starts: Tensor | None = None, *, slots: int) -> None:
        """anchors, starts int64 [R, A]: a block sees starts <= t < anchor (starts None: from 0). slots: G."""
        self.slots = slots
        low = torch.zeros_like(anchors) if starts is None else starts
        self.mask = context_tiles(low, anchors, context_length, slots)

    @staticmethod
    def fits(device: torch.device, head_dim: int, backend: str = "auto") -> bool:
        """Whether training there should use it: with backend "auto" on a GPU, with "flex" anywhere, else ("batched") never."""
        return backend == "flex" or (backend == "auto" and device.type == "cuda" and head_dim >= MIN_FLEX_HEAD)

    def __call__(self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor]) -> Tensor:
        """Shapes as in block_attention, without its mask."""
        rows, blocks, slots, heads, head_dim = query.shape
        kv_heads = context[0].shape[2]
        group = heads // kv_heads
        key, value = (t.transpose(1, 2) for t in context)
        call = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
        out_c, aux = call(
            query.flatten(1, 2).transpose(1, 2), key, value, block_mask=self.mask, enable_gqa=group > 1,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        out_c = out_c.transpose(1, 2).view_as(query)
        lse_c = aux.lse.transpose(1, 2).view(rows, blocks, slots, heads)

        q = query.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [R, nkv, A, G*group, hd]
        key_b, value_b = (t.permute(0, 3, 1, 2, 4) for t in block)
        scores = (q @ key_b.transpose(-1, -2)).float() * head_dim**-0.5
        lse_b = torch.logsumexp(scores, dim=-1)
        out_b = (scores - lse_b[..., None]).exp().to(q.dtype) @ value_b
        out_b = out_b.unflatten(3, (slots, group)).permute(0, 2, 3, 1, 4, 5).reshape_as(query)
        lse_b = lse_b.unflatten(3, (slots, group)).permute(0, 2, 3, 1, 4).flatten(3)
        # a block without context has lse_c = -inf: share 0, and gradient 0
        share = torch.sigmoid(lse_c - lse_b)[..., None]
        return (out_b.float() + share * (out_c.float() - out_b.float())).to(query.dtype)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def context_tiles(low: Tensor, high: Tensor, length: int, slots: int, tile: int = TILE) -> BlockMask:
    """The mask "query slot i of block i // G sees low <= t < high" over A*G queries and `length` keys, by tiles.

    low, high int64 [R, A]. Built from the bounds tile by tile: what is written is [R, A*G, length / tile] and smaller, and no
    mask over queries times keys. A tile is full (no mask is evaluated in it) where all its queries see all of it; one that
    reaches beyond the last query or key is not.
    """
    size = low.shape[1] * slots
    first = torch.arange(math.ceil(length / tile), device=low.device) * tile
    last = first + tile
    # [R, query tiles, tile, 1] bounds; the queries beyond the last see nothing
    lows, highs = (
        F.pad(t.repeat_interleave(slots, 1), (0, -size % tile)).unflatten(1, (-1, tile))[..., None] for t in (low, high)
    )
    any_seen = ((lows < last) & (highs > first) & (lows < highs)).any(2)
    all_seen = ((lows <= first) & (highs >= last)).all(2)
    low, high = (t.clone() for t in (low, high))

    def visible(row: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = q // slots
        return (kv >= low[row, at]) & (kv < high[row, at])

    partly, fully = _ordered(any_seen & ~all_seen), _ordered(any_seen & all_seen)
    return BlockMask.from_kv_blocks(*partly, *fully, BLOCK_SIZE=tile, mask_mod=visible, seq_lengths=(size, length))


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [R, Q, K] -> how many of K are chosen, int32 [R, 1, Q], and all of K with the chosen first, int32 [R, 1, Q, K]."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()
