"""The drafter's parallel pass over its own cache of committed context: in PyTorch, or as one native call on CPU.

Both keep the draft layers' keys and values of committed positions only. A block's own are dropped (or overwritten) every cycle.
B rows, W tokens per row, G block slots, D draft layers, S cache length, n*H tap width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.masks import block_attention
from . import kernels
from .kernels.draft import draft_stack
from .kernels.stack import BlockCall

BUCKET = 64


class Part(NamedTuple):
    """Target states of positions start .. start + width - 1 of slot `row`: taps[place, :width] of taps [B, W, n*H].

    Not cut out before it is needed: a cycle makes one for every row, and a view costs as much as all the rest of it.
    """

    row: int
    start: int
    width: int
    taps: Tensor
    place: int

    @property
    def states(self) -> Tensor:
        """[width, n*H]."""
        return self.taps[self.place, : self.width]


class Backbone(Protocol):
    """What DSparkProposer needs of the parallel pass."""

    def write_context(self, parts: Sequence[Part]) -> None:
        """Keys and values of all parts, at least one. A slot may occur several times, at different positions."""

    def block(
        self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, size: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Blocks of `size` inputs after anchors int64 [B] standing at positions int64 [B].

        Returns the normed states [B, G, H] and their base logits float32 [B, G, Vd] of the slots from `first` on, which may
        live until the next call only. bound: host-known upper limit of positions, None if unknown.
        """


def make_backbone(drafter: DSpark, heads: FrozenHeads, *, slots: int, max_context: int) -> Backbone:
    """The native one where it can run, else PyTorch's. heads in the drafter's dtype."""
    room = max_context + drafter.block_size  # the block's own keys and values stand behind the anchor
    if drafter.fc.weight.device.type == "cpu":
        try:
            return KernelBackbone(drafter, heads, slots, room)
        except ValueError:
            pass  # no compiler, no AVX-512, or sizes the kernels lack: the same mathematics in PyTorch
    return TorchBackbone(drafter, heads, slots, room)


def make_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """weight [N, K] -> callable [..., K] -> float32 [..., N]."""
    weight = weight.detach()
    if weight.device.type == "cpu" and kernels.available(weight.dtype):
        packed = kernels.PackedLinear(weight)
        return lambda x: packed(x.to(weight.dtype), as_float=True)
    return lambda x: F.linear(x.to(weight.dtype), weight).float()


class KernelBackbone:
    """One native call for the context update and one for the block with its logits (runtime/kernels). CPU only."""

    def __init__(self, drafter: DSpark, heads: FrozenHeads, slots: int, length: int) -> None:
        self.stack = draft_stack(drafter, heads.embedding, heads.draft_head)
        self.cache = self.stack.new_cache(slots, length)
        self._write = self.stack.context_call(self.cache)
        self._logits, self._hidden = torch.empty(0), torch.empty(0, dtype=self.stack.dtype)
        self._calls: dict[tuple[int, int, int], BlockCall] = {}

    def write_context(self, parts: Sequence[Part]) -> None:
        """See Backbone."""
        dtype = self.stack.dtype
        states: list[Tensor] = []
        addresses: list[int] = []
        for part in parts:
            taps, place = part.taps, part.place
            if taps.dtype != dtype or not taps.is_contiguous():
                taps, place = part.states.to(dtype).contiguous()[None], 0
            states.append(taps)  # alive until the call is over
            addresses.append(taps.data_ptr() + place * taps.stride(0) * taps.element_size())
        self._write(addresses, [p.width for p in parts], [p.row for p in parts], [p.start for p in parts])

    def block(
        self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, size: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See Backbone: the results are overwritten by the next call."""
        key = (len(rows), size, first)
        call = self._calls.get(key) or self._prepare(key)
        call(rows, anchors, positions)
        return call.hidden[:, first:] if first else call.hidden, call.logits

    def _prepare(self, key: tuple[int, int, int]) -> BlockCall:
        """A call for this shape; all shapes share two buffers that grow to the largest."""
        (batch, size, first), stack = key, self.stack
        logits, hidden = batch * (size - first) * stack.vocab_size, batch * size * stack.hidden_size
        if logits > len(self._logits) or hidden > len(self._hidden):
            self._calls.clear()
            self._logits = torch.empty(max(logits, len(self._logits)))
            self._hidden = torch.empty(max(hidden, len(self._hidden)), dtype=stack.dtype)
        self._calls[key] = call = stack.block_call(
            self.cache,
            batch,
            size,
            first,
            self._logits[:logits].view(batch, size - first, stack.vocab_size),
            self._hidden[:hidden].view(batch, size, stack.hidden_size),
        )
        return call


class TorchBackbone:
    """Any device. Attention runs over the cache cut to a bucket of the longest row, so shapes repeat."""

    def __init__(self, drafter: DSpark, heads: FrozenHeads, slots: int, length: int) -> None:
        self.drafter, self.embedding, self.base = drafter, heads.embedding, make_linear(heads.draft_head)
        shape, weight = drafter.layers[0].self_attn.shape, drafter.fc.weight
        length += -length % BUCKET
        size = (len(drafter.layers), slots, length, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)

    @torch.inference_mode()
    def write_context(self, parts: Sequence[Part]) -> None:
        """See Backbone."""
        device = self.keys.device
        counts = torch.tensor([part.width for part in parts], device=device)
        starts, rows = (torch.tensor(values, device=device) for values in zip(*((p.start, p.row) for p in parts), strict=True))
        ends = counts.cumsum(0)
        positions = torch.arange(sum(part.width for part in parts), device=device)
        positions += (starts - ends + counts).repeat_interleave(counts, output_size=len(positions))
        index = rows.repeat_interleave(counts, output_size=len(positions))
        context = self.drafter.context_features(torch.cat([part.states for part in parts]).to(self.keys.dtype))
        rope = self.drafter.rope(positions)
        for i, layer in enumerate(self.drafter.layers):
            key, value = layer.self_attn.key_value(context, rope)
            self.keys[i].index_put_((index, positions), key)
            self.values[i].index_put_((index, positions), value)

    @torch.inference_mode()
    def block(
        self, rows: list[int], anchors: Tensor, positions: Tensor, bound: int | None, size: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See Backbone."""
        drafter, most = self.drafter, self.keys.shape[2]
        length = most if bound is None else min(-(-max(bound, 1) // BUCKET) * BUCKET, most)
        visible = (torch.arange(length, device=positions.device) < positions[:, None])[:, None]
        rope = drafter.rope((positions[:, None] + torch.arange(size, device=positions.device))[:, None])
        x = drafter.block_inputs(anchors[:, None], self.embedding, size)
        for i, layer in enumerate(drafter.layers):
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            block = attn.key_value(normed, rope)
            out = block_attention(attn.query(normed, rope), self._context(i, rows, length), block, visible)
            x = x + attn.o_proj(out.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden = drafter.norm(x)[:, 0, first:]
        return hidden, self.base(hidden)

    def _context(self, layer: int, rows: list[int], length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer, :, :length], self.values[layer, :, :length]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            part = slice(rows[0], rows[0] + len(rows))
            return keys[part], values[part]
        index = torch.tensor(rows, device=keys.device)
        return keys[index], values[index]
