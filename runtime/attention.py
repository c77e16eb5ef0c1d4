"""Attention of W new tokens over a static cache, in plain torch: what the torch and transformers decoders share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache

LENGTH_BUCKET = 128  # the cache is cut to a multiple of this, so that shapes repeat


@dataclass
class Span:
    """Where one forward reads and writes: made once, used by every layer.

    rows: slice when the batch is consecutive slots (no copy of the cache), else int64 [B].
    positions int64 [B,W]; write int64 [B,W] (positions clamped to the spare entry); bound: keys read.
    """

    cache: KVCache
    rows: slice | Tensor
    index: Tensor
    positions: Tensor
    write: Tensor
    bound: int
    masks: dict[int | None, Tensor]

    @classmethod
    def build(cls, cache: KVCache, rows: list[int] | Tensor, starts: Tensor, width: int, bound: int | None) -> Span:
        """`bound`: host-known upper limit of starts + W; None reads it from `starts` (a sync on a GPU)."""
        device = cache.k.device
        if bound is None:
            bound = int(starts.max()) + width
        bound = min(-(-bound // LENGTH_BUCKET) * LENGTH_BUCKET, cache.length)
        listed = rows if isinstance(rows, list) else (rows.tolist() if rows.device.type == "cpu" else None)
        span: slice | None = None
        if listed is not None and listed == list(range(listed[0], listed[0] + len(listed))):
            span = slice(listed[0], listed[0] + len(listed))
        index = torch.as_tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        positions = starts.to(device, non_blocking=True)[:, None] + torch.arange(width, device=device)
        write = positions.clamp(max=cache.length - 1)
        return cls(cache, index if span is None else span, index, positions, write, bound, {})

    def mask(self, window: int | None) -> Tensor:
        """bool [B,1,W,bound]: True where query j of row b may see the key."""
        if window not in self.masks:
            keys = torch.arange(self.bound, device=self.positions.device)
            mask = keys <= self.positions[..., None]
            if window is not None:
                mask &= self.positions[..., None] - keys < window
            self.masks[window] = mask[:, None]
        return self.masks[window]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B,W,nkv,hd] of the new tokens; return the visible cache, each [B,nkv,bound,hd]."""
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys[self.index[:, None], :, self.write] = k
        values[self.index[:, None], :, self.write] = v
        return keys[self.rows, :, : self.bound], values[self.rows, :, : self.bound]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [B,nh,W,hd], k/v [B,nkv,T,hd], mask bool [B,1,W,T] -> [B,nh,W,hd].

    softcap: Gemma-2 style tanh cap of the scores. sinks [nh]: one extra score per head that takes probability and
    has no value (GPT-OSS).
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    groups = q.shape[1] // k.shape[1]
    scores = q.float() @ k.repeat_interleave(groups, 1).float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return (probs @ v.repeat_interleave(groups, 1).float()).to(q.dtype)
