"""The draft decoder layer: Qwen3 style (q_norm/k_norm, RMSNorm, SwiGLU, GQA, RoPE) whatever the target's family.

Keys and values come from two places, the projected target context and the block itself (DFlash, arXiv 2602.06036; DSpark
eq. 2-3). The layer is written once as projections; who attends to what is the caller's (training: models/dspark.py,
serving: runtime/dspark.py), so both share every weight and every formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packed import Attend


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a draft layer: hidden, heads, KV heads, head size, MLP width, RMSNorm epsilon."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections and norms of grouped-query attention; the softmax itself is in masks.py."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., H] -> rotated, normed queries [..., nh, hd]."""
        return apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))), rope)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., H] (context features or block states) -> keys and values [..., nkv, hd]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim)))
        return apply_rope(key, rope), self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The parts of one layer, named as in the exported file; forward is the training pass, serving calls the parts."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Block states x [R, A, G, H] over context features [R, T, H] -> [R, A, G, H]. attend: who sees what, and how."""
        attn, normed = self.self_attn, self.input_layernorm(x)
        out = attend(
            attn.query(normed, block_rope),
            attn.key_value(context, context_rope),
            attn.key_value(normed, block_rope),
        )
        x = x + attn.o_proj(out.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [..., heads, hd] by (cos, sin) [..., hd]: the half-split form of Llama and Qwen."""
    cos, sin = (t.unsqueeze(-2).to(x.dtype) for t in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Rope(nn.Module):
    """The target's rotary frequencies: inv_freq [hd/2] float32 and the attention scaling of extended-context ropes."""

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.scaling = scaling

    def _apply(self, fn: Any, recurse: bool = True) -> Rope:
        """A cast of the module moves the frequencies, but never rounds them: in bf16, position 500 would be off by radians."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [...] -> (cos, sin) float32 [..., hd]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling
