"""The drafter's matrix products at serving time: merged projections, and the CPU kernels where they are available.

On CUDA and on CPUs without the kernels these are plain `F.linear` calls over merged weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.blocks import Attention, apply_rope
from ..models.dspark import DSpark
from . import kernels

Linear = Callable[[Tensor], Tensor]


def make_linear(weight: Tensor) -> Linear:
    """weight [N, K] -> callable [..., K] -> [..., N]."""
    weight = weight.detach()
    if weight.device.type == "cpu" and kernels.available(weight.dtype):
        return kernels.PackedLinear(weight)
    return lambda x: F.linear(x, weight)


class DrafterLinears:
    """Every matrix product of a drafter's serving pass; q, k, v and gate, up are one product each."""

    def __init__(self, drafter: DSpark, draft_head: Tensor) -> None:
        self.fc = make_linear(drafter.fc.weight)
        self.head = make_linear(draft_head)
        markov = drafter.markov_head
        self.bias: Linear | None = make_linear(markov.markov_w2.weight) if markov is not None else None
        attn = [layer.self_attn for layer in drafter.layers]
        self._qkv = [make_linear(torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight))) for a in attn]
        self._kv = [make_linear(torch.cat((a.k_proj.weight, a.v_proj.weight))) for a in attn]
        self._out = [make_linear(a.o_proj.weight) for a in attn]
        mlps = [layer.mlp for layer in drafter.layers]
        self._gate_up = [make_linear(torch.cat((m.gate_proj.weight, m.up_proj.weight))) for m in mlps]
        self._down = [make_linear(m.down_proj.weight) for m in mlps]

    def key_value(self, i: int, attn: Attention, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Layer i's keys and values of x [..., H] -> [..., nkv, hd], keys normed and rotated."""
        key, value = self._kv[i](x).unflatten(-1, (-1, attn.shape.head_dim)).chunk(2, dim=-2)
        return apply_rope(attn.k_norm(key), rope), value

    def query_key_value(
        self, i: int, attn: Attention, x: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Layer i's queries, keys and values of x [..., H] -> [..., heads, hd]."""
        shape = attn.shape
        heads = self._qkv[i](x).unflatten(-1, (-1, shape.head_dim))
        query, key, value = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=-2)
        return apply_rope(attn.q_norm(query), rope), apply_rope(attn.k_norm(key), rope), value

    def output(self, i: int, x: Tensor) -> Tensor:
        """Attention output projection of layer i."""
        return self._out[i](x)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        """SwiGLU of layer i."""
        gate, up = self._gate_up[i](x).chunk(2, dim=-1)
        return self._down[i](F.silu(gate) * up)


def pack_linears(drafter: DSpark, draft_head: Tensor) -> DrafterLinears:
    """Build the serving products of a loaded drafter; weights are merged (and packed) once."""
    return DrafterLinears(drafter, draft_head)
