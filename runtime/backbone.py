"""The drafter's parallel pass over its own cache of committed context: in PyTorch, or as one native call on CPU.

Both keep the draft layers' keys and values of committed positions only. A block's own are dropped (or overwritten) every cycle.
B rows, W tokens per row, G block slots, D draft layers, S cache length, n*H tap width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.dspark import DSpark
from ..models.masks import block_attention
from . import kernels

BUCKET = 64


class Backbone(Protocol):
    """What DSparkProposer needs of the parallel pass."""

    def write_context(self, rows: list[int], starts: Tensor, taps: Tensor) -> None:
        """Keys and values of taps [B, W, n*H] at positions starts[b] .. starts[b] + W - 1 of slot rows[b].

        A slot may occur several times, at different positions.
        """

    def hidden(self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, slots: int) -> Tensor:
        """Blocks of `slots` inputs after anchors int64 [B] standing at positions int64 [B] -> normed states [B, slots, H].

        bound: host-known upper limit of positions, None if unknown.
        """


def make_backbone(drafter: DSpark, embedding: Tensor, *, slots: int, max_context: int) -> Backbone:
    """The native one where it can run, else PyTorch's."""
    room = max_context + drafter.block_size  # the block's own keys and values stand behind the anchor
    if drafter.fc.weight.device.type == "cpu":
        try:
            return KernelBackbone(drafter, embedding, slots, room)
        except ValueError:
            pass  # no compiler, no AVX-512, or sizes the kernels lack: the same mathematics in PyTorch
    return TorchBackbone(drafter, embedding, slots, room)


def make_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """weight [N, K] -> callable [..., K] -> float32 [..., N]."""
    weight = weight.detach()
    if weight.device.type == "cpu" and kernels.available(weight.dtype):
        packed = kernels.PackedLinear(weight)
        return lambda x: packed(x.to(weight.dtype), as_float=True)
    return lambda x: F.linear(x.to(weight.dtype), weight).float()


class KernelBackbone:
    """One native call for the context update and one for the block (runtime/kernels). CPU only."""

    def __init__(self, drafter: DSpark, embedding: Tensor, slots: int, length: int) -> None:
        from .kernels.draft import draft_stack

        self.drafter, self.embedding = drafter, embedding
        self.stack = draft_stack(drafter)
        self.cache = self.stack.new_cache(slots, length)
        self.fc = kernels.PackedLinear(drafter.fc.weight)

    def write_context(self, rows: list[int], starts: Tensor, taps: Tensor) -> None:
        """See Backbone."""
        features = self.drafter.hidden_norm(self.fc(taps.to(self.fc.dtype)))
        self.stack.write_context(features, self.cache, torch.tensor(rows), starts)

    def hidden(self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, slots: int) -> Tensor:
        """See Backbone."""
        block = self.drafter.block_inputs(anchors, self.embedding, slots)
        _, _, hidden = self.stack.forward(block, self.cache, torch.tensor(rows), positions, hidden=True, causal=False)
        assert hidden is not None
        return hidden


class TorchBackbone:
    """Any device. Attention runs over the cache cut to a bucket of the longest row, so shapes repeat."""

    def __init__(self, drafter: DSpark, embedding: Tensor, slots: int, length: int) -> None:
        self.drafter, self.embedding = drafter, embedding
        shape, weight = drafter.layers[0].self_attn.shape, drafter.fc.weight
        length += -length % BUCKET
        size = (len(drafter.layers), slots, length, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)

    def write_context(self, rows: list[int], starts: Tensor, taps: Tensor) -> None:
        """See Backbone."""
        device = self.keys.device
        positions = starts.to(device)[:, None] + torch.arange(taps.shape[1], device=device)
        context = self.drafter.context_features(taps.to(self.keys.dtype))
        rope = self.drafter.rope(positions)
        index = torch.tensor(rows, device=device)[:, None].expand_as(positions)
        for i, layer in enumerate(self.drafter.layers):
            key, value = layer.self_attn.key_value(context, rope)
            self.keys[i].index_put_((index, positions), key)
            self.values[i].index_put_((index, positions), value)

    def hidden(self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, slots: int) -> Tensor:
        """See Backbone."""
        drafter, most = self.drafter, self.keys.shape[2]
        length = most if bound is None else min(-(-max(bound, 1) // BUCKET) * BUCKET, most)
        visible = (torch.arange(length, device=positions.device) < positions[:, None])[:, None]
        rope = drafter.rope((positions[:, None] + torch.arange(slots, device=positions.device))[:, None])
        x = drafter.block_inputs(anchors[:, None], self.embedding, slots)
        for i, layer in enumerate(drafter.layers):
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            block = attn.key_value(normed, rope)
            out = block_attention(attn.query(normed, rope), self._context(i, rows, length), block, visible)
            x = x + attn.o_proj(out.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return drafter.norm(x)[:, 0]

    def _context(self, layer: int, rows: list[int], length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer, :, :length], self.values[layer, :, :length]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            part = slice(rows[0], rows[0] + len(rows))
            return keys[part], values[part]
        index = torch.tensor(rows, device=keys.device)
        return keys[index], values[index]
