"""Merged weights of a Llama-like Hugging Face causal LM, as the serving decoders want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Families whose decoder block is: RMSNorm, GQA attention with full rotary (optional q/k RMSNorm, biases, sliding
# window), RMSNorm, gated SiLU MLP. Everything else is served through transformers' own modules.
FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer. qkv rows: query heads, then key heads, then value heads; gate_up rows: gate, then up."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(nh + 2 nkv) hd, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [hd]
    k_norm: Tensor | None  # [hd]
    out: Tensor  # [H, nh hd]
    out_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 F, H]
    gate_up_bias: Tensor | None
    down: Tensor  # [H, F]
    down_bias: Tensor | None
    window: int | None  # query q sees key k iff 0 <= q - k < window; None: all k <= q


@dataclass(kw_only=True)
class StackWeights:
    """A whole target: embedding, layers, final norm, head, rotary frequencies."""

    layers: list[LayerWeights]
    embedding: Tensor  # [V, H]
    final_norm: Tensor  # [H]
    head: Tensor  # [V, H]
    inv_freq: Tensor  # [hd / 2] float32
    rope_scale: float  # multiplies cos and sin (YaRN's attention factor; 1 otherwise)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    eps: float
    max_positions: int


def unfused_reason(model: nn.Module) -> str | None:
    """Why this model cannot use the fused decoder blocks, or None if it can."""
    config = model.config
    if getattr(model, "is_quantized", False):
        return "its weights are quantised"
    if config.model_type not in FUSED_FAMILIES:
        return f"model_type {config.model_type!r} is not one of {', '.join(FUSED_FAMILIES)}"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act!r} is not silu"
    rotary = model.model.rotary_emb
    head_dim = model.model.layers[0].self_attn.head_dim
    if rotary.inv_freq.numel() * 2 != head_dim:
        return "partial rotary embedding"
    if model.lm_head.bias is not None:
        return "biased LM head"
    return None


def max_positions(config: Any) -> int:
    """Positions that can be served: the length RoPE was built for.

    "longrope" and "dynamic" ropes change their frequencies with the length of the longest row in the batch, which
    would make cached keys inconsistent; up to the original length they are static, so that is the limit.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 0) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def _cat_bias(parts: list[nn.Linear]) -> Tensor | None:
    if all(p.bias is None for p in parts):
        return None
    return torch.cat([p.bias if p.bias is not None else p.weight.new_zeros(p.out_features) for p in parts])


def _layer(layer: nn.Module, cast: Callable[[Tensor | None], Any]) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = [attn.q_proj, attn.k_proj, attn.v_proj], [mlp.gate_proj, mlp.up_proj]
    norm = {name: getattr(attn, name).weight if hasattr(attn, name) else None for name in ("q_norm", "k_norm")}
    window = getattr(attn, "sliding_window", None)
    if window is None and attn.config.model_type == "mistral":  # Mistral reads it from the config only
        window = attn.config.sliding_window
    return LayerWeights(
        input_norm=cast(layer.input_layernorm.weight),
        post_norm=cast(layer.post_attention_layernorm.weight),
        qkv=cast(torch.cat([p.weight for p in qkv])),
        qkv_bias=cast(_cat_bias(qkv)),
        q_norm=cast(norm["q_norm"]),
        k_norm=cast(norm["k_norm"]),
        out=cast(attn.o_proj.weight),
        out_bias=cast(attn.o_proj.bias),
        gate_up=cast(torch.cat([p.weight for p in gate_up])),
        gate_up_bias=cast(_cat_bias(gate_up)),
        down=cast(mlp.down_proj.weight),
        down_bias=cast(mlp.down_proj.bias),
        window=window,
    )


@torch.no_grad()
def stack_weights(model: nn.Module, dtype: torch.dtype, layers: tuple[int, ...] | None = None) -> StackWeights:
    """Merge q/k/v and gate/up of every layer, in `dtype` (embedding and head share the model's memory if it agrees).

    layers: only these, in this order; None: all.
    """
    assert unfused_reason(model) is None

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(dtype)

    base, attn = model.model, model.model.layers[0].self_attn
    embedding = cast(base.embed_tokens.weight)
    tied = model.lm_head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    rotary = base.rotary_emb
    inv_freq = getattr(rotary, "original_inv_freq", rotary.inv_freq)
    return StackWeights(
        layers=[_layer(base.layers[i], cast) for i in (range(len(base.layers)) if layers is None else layers)],
        embedding=embedding,
        final_norm=cast(base.norm.weight),
        head=embedding if tied else cast(model.lm_head.weight),
        inv_freq=inv_freq.detach().float(),
        rope_scale=float(rotary.attention_scaling),
        num_heads=attn.q_proj.out_features // attn.head_dim,
        num_kv_heads=attn.k_proj.out_features // attn.head_dim,
        head_dim=attn.head_dim,
        attention_scale=float(attn.scaling),
        eps=float(model.config.rms_norm_eps),
        max_positions=max_positions(model.config),
    )
