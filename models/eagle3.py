"""EAGLE-3 (arXiv 2503.01840): a sequential drafter of one decoder layer over fused target states. Served, not trained here.

Frame: entry t of the drafter pairs the token at t + 1 with the target's state at t, and its output predicts the token at t + 2.
So the state of the anchor (the last committed token) is not needed: its entry is the one before it, paired with the anchor as a
token. Further drafts feed the drafter's own output back in place of the target's state. RoPE runs on t; producers that count
from 1 differ by a constant, which it does not see.

Shapes: n taps of width Ht, H hidden size of the drafter, V and Vd target and draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .blocks import MLP, BlockShape, RMSNorm, apply_rope


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes and variants, under our names. tap_layers: ids of target layers whose output is tapped (0-based).

    qk_norm: Qwen3 style attention. norm_before_residual: the residual stream of the first layer is the normed state.
    norm_before_fc: one norm over all taps; fc_norm: one for each tap. norm_output: the state fed back is the normed one.
    """

    shape: BlockShape
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tap_layers: tuple[int, ...]
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Attention(nn.Module):
    """Grouped-query attention whose inputs may be wider than its output (the first layer reads [token; state])."""

    def __init__(self, cfg: Eagle3Config, width: int) -> None:
        super().__init__()
        shape = cfg.shape
        self.shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, q, bias=cfg.attention_bias)
        self.k_proj = nn.Linear(width, kv, bias=cfg.attention_bias)
        self.v_proj = nn.Linear(width, kv, bias=cfg.attention_bias)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=cfg.attention_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if cfg.qk_norm else nn.Identity()

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., width] -> rotated queries [..., nh, hd] and keys, and values [..., nkv, hd]."""
        query, key, value = (f(x).unflatten(-1, (-1, self.shape.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rope(self.q_norm(query), rope), apply_rope(self.k_norm(key), rope), value


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one reads the token's embedding beside the state (hidden_norm is its second input norm)."""

    def __init__(self, cfg: Eagle3Config, *, first: bool) -> None:
        super().__init__()
        size, eps = cfg.shape.hidden_size, cfg.shape.rms_norm_eps
        self.self_attn = Eagle3Attention(cfg, 2 * size if first else size)
        self.mlp = MLP(cfg.shape)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.norm_before_residual = cfg.norm_before_residual

    def inputs(self, embeds: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual) of states [..., H] and, in the first layer, token embeddings [..., H]."""
        if self.hidden_norm is None or embeds is None:
            return self.input_layernorm(state), state
        normed = self.hidden_norm(state)
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), normed if self.norm_before_residual else state

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended [..., nh, hd] -> the layer's output [..., H]."""
        x = residual + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """The drafter's own weights. lm_head [Vd, H] is its own; embed_tokens [V, H] its own or the target's, put in by the loader.

    draft_ids: int64 [Vd] target ids of the draft vocabulary, ascending, or None for the full one.
    """

    def __init__(self, cfg: Eagle3Config) -> None:
        super().__init__()
        size, eps, taps = cfg.shape.hidden_size, cfg.shape.rms_norm_eps, len(cfg.tap_layers)
        self.cfg, self.tap_layers = cfg, cfg.tap_layers
        self.embed_tokens = nn.Embedding(cfg.vocab_size, size)
        self.fc = nn.Linear(taps * cfg.target_hidden_size, size, bias=False)
        self.input_norm = RMSNorm(taps * cfg.target_hidden_size, eps) if cfg.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(cfg.target_hidden_size, eps) for _ in range(taps)) if cfg.fc_norm else None
        self.layers = nn.ModuleList(Eagle3Layer(cfg, first=i == 0) for i in range(cfg.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, cfg.draft_vocab_size, bias=False)
        self.draft_ids: Tensor | None = None

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [..., n*Ht] in tap order -> states [..., H]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(taps)

    def outputs(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the last layer [..., H] -> (state that is fed back [..., H], draft logits float32 [..., Vd])."""
        normed = self.norm(state)
        return normed if self.cfg.norm_output else state, self.lm_head(normed).float()
