"""A second reader of exported drafters, written apart from models/ and runtime/: safetensors and plain PyTorch only.

The parity gate compares the training side with it, so it shares no code with either: it reads config.json of both layouts, and
computes one block after another in float32 from the formulas (RMSNorm, rotary half-split, grouped queries, SwiGLU, one softmax
over context and block). Frame: block inputs are the anchor's token and masks at positions p..p+B-1 over the context < p;
anchor-first, slot k predicts the token at p+k+1; fill-in, slot j predicts the token at p+j and slot 0 predicts nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class Unreadable(ValueError):
    """The file lacks something without which it cannot mean anything; the message names it."""


@dataclass(frozen=True)
class Frame:
    """What a file says about its meaning. taps: 0-based layer ids; slots: query slots of a block; head: kind or None."""

    taps: tuple[int, ...]
    mask_token_id: int
    slots: int
    anchor_first: bool
    head: str | None
    rank: int
    survival: bool
    survival_with_head: bool
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, Any]
    hidden: int
    vocab: int
    positions: int


@dataclass(frozen=True)
class Blocks:
    """Results of N blocks: logits [N, P, Vd], survival logits [N, P] or None, greedy chain int64 [N, P]; P predictions."""

    logits: Tensor
    survival: Tensor | None
    chain: Tensor


def read_frame(folder: Path) -> Frame:
    """Frame of an exported drafter. Raises Unreadable naming a missing key."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unreadable(f"config.json: {error}") from error
    foreign = "speculators_model_type" in config
    layers = config.get("transformer_layer_config", {}) if foreign else config

    def need(key: str, source: dict[str, Any] = config) -> Any:
        if key not in source:
            raise Unreadable(f"config.json: missing {key}")
        return source[key]

    if not isinstance(need("sample_from_anchor"), bool):
        raise Unreadable(f"config.json: sample_from_anchor: {config['sample_from_anchor']!r} is neither true nor false")
    if foreign and "model_type" in config:
        raise Unreadable("config.json: model_type at the top of a speculators config (vLLM takes it for another layout)")
    taps = tuple(i - 1 for i in need("aux_hidden_state_layer_ids")) if foreign else tuple(need("target_layer_ids"))
    rank, survival = need("markov_rank"), need("enable_confidence_head")
    rope = need("rope_parameters", layers)
    need("rope_theta", rope)
    return Frame(
        taps=taps, mask_token_id=need("mask_token_id"), slots=need("block_size"), anchor_first=config["sample_from_anchor"],
        head=need("markov_head_type") if rank else None, rank=rank, survival=survival,
        survival_with_head=need("confidence_head_with_markov") if survival else False,
        layers=need("num_hidden_layers", layers), heads=need("num_attention_heads", layers),
        kv_heads=need("num_key_value_heads", layers), head_dim=need("head_dim", layers), eps=need("rms_norm_eps", layers),
        rope=rope, hidden=need("hidden_size", layers), vocab=need("vocab_size", layers),
        positions=layers.get("max_position_embeddings", 2048),
    )  # fmt: skip


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors as stored."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


class Reference:
    """An exported drafter, computed from its file.

    embedding [V,H] and lm_head [V,H] of the target stand in for what the file leaves out. Raises Unreadable for a missing
    tensor or one of another shape than config.json asks for.
    """

    def __init__(self, folder: Path, *, embedding: Tensor, lm_head: Tensor) -> None:
        self.frame = read_frame(folder)
        stored = read_tensors(folder)
        self.stored = stored
        self.draft_ids = None
        if "d2t" in stored:
            self.draft_ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
        self.w = {name: value.float() for name, value in stored.items() if value.is_floating_point()}
        self.w.setdefault("embed_tokens.weight", embedding.float())
        rows = lm_head if self.draft_ids is None else lm_head[self.draft_ids.clamp(0, len(lm_head) - 1)]
        self.w.setdefault("lm_head.weight", rows.float())
        self._check()
        self.inv_freq, self.rope_scale = _frequencies(self.frame)

    def blocks(self, rows: list[Tensor], states: list[dict[int, Tensor]], where: list[tuple[int, int]], full: int) -> Blocks:
        """N blocks at (row, anchor position) pairs. rows: int64 [T] token ids; states: layer id -> float32 [T, H].

        Logits are returned for the first `full` blocks only; survival and logits follow the text, the chain its own tokens.
        """
        first = 0 if self.frame.anchor_first else 1
        hidden, before = [], []
        for row, anchor in where:
            taps = torch.cat([states[row][layer][:anchor] for layer in self.frame.taps], dim=-1)
            hidden.append(self._block(taps, int(rows[row][anchor]), anchor)[first:])
            before.append(rows[row][anchor : anchor + self.frame.slots - first])
        h, previous = torch.stack(hidden), torch.stack(before)
        base = h @ self.w["lm_head.weight"].T
        bias, embedded = self._bias(h[:full], previous[:full])
        survival = self._survival(h, previous) if self.frame.survival else None
        logits = base[:full] if bias is None else base[:full] + bias
        return Blocks(logits, survival, self._chain(h, base, previous[:, 0]))

    def _block(self, taps: Tensor, token: int, anchor: int) -> Tensor:
        """taps [p, n*H] of the context, the anchor's token -> states after the final norm [B, H]."""
        f, w = self.frame, self.w
        context = self._norm(taps @ w["fc.weight"].T, "hidden_norm.weight")
        ids = torch.tensor([token] + [f.mask_token_id] * (f.slots - 1))
        x = w["embed_tokens.weight"][ids]
        at, before = torch.arange(anchor, anchor + f.slots), torch.arange(anchor)
        group = f.heads // f.kv_heads
        for i in range(f.layers):
            name = f"layers.{i}."
            y = self._norm(x, name + "input_layernorm.weight")
            query = self._heads(y, name + "self_attn.q_proj.weight", f.heads)
            query = self._rotate(self._norm(query, name + "self_attn.q_norm.weight"), at)
            keys, values = [], []
            for source, positions in ((context, before), (y, at)):
                key = self._heads(source, name + "self_attn.k_proj.weight", f.kv_heads)
                keys.append(self._rotate(self._norm(key, name + "self_attn.k_norm.weight"), positions))
                values.append(self._heads(source, name + "self_attn.v_proj.weight", f.kv_heads))
            key, value = torch.cat(keys).repeat_interleave(group, 1), torch.cat(values).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) / f.head_dim**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(f.slots, -1)
            x = x + mixed @ w[name + "self_attn.o_proj.weight"].T
            y = self._norm(x, name + "post_attention_layernorm.weight")
            gate, up = y @ w[name + "mlp.gate_proj.weight"].T, y @ w[name + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[name + "mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.frame.eps) * self.w[name]

    def _heads(self, x: Tensor, name: str, count: int) -> Tensor:
        return (x @ self.w[name].T).reshape(len(x), count, self.frame.head_dim)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = (t[:, None] * self.rope_scale for t in (angle.cos(), angle.sin()))
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _step(self, h: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot of the head: h [N, H], embedded = W1[previous] [N, r] -> (what W2 is applied to, next state)."""
        if self.frame.head == "vanilla":
            return embedded, state
        name = "markov_head." + ("gate_proj" if self.frame.head == "gated" else "joint_proj")
        weight, bias = self.w[name + ".weight"], self.w[name + ".bias"]
        if self.frame.head == "gated":
            return torch.sigmoid(torch.cat((h, embedded), -1) @ weight.T + bias) * embedded, state
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = (torch.cat((state, embedded, h), -1) @ weight.T + bias).chunk(3, -1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def _bias(self, h: Tensor, previous: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Logit biases under the text: h [N, P, H], previous int64 [N, P] -> [N, P, Vd]."""
        if self.frame.head is None:
            return None, None
        embedded, state, out = self.w["markov_head.markov_w1.weight"][previous], None, []
        for k in range(h.shape[1]):
            feature, state = self._step(h[:, k], embedded[:, k], state)
            out.append(feature @ self.w["markov_head.markov_w2.weight"].T)
        return torch.stack(out, 1), embedded

    def _survival(self, h: Tensor, previous: Tensor) -> Tensor:
        weight, bias = self.w["confidence_head.proj.weight"][0], self.w["confidence_head.proj.bias"]
        inputs = h
        if self.frame.survival_with_head:
            inputs = torch.cat((h, self.w["markov_head.markov_w1.weight"][previous]), -1)
        return inputs @ weight + bias

    def _chain(self, h: Tensor, base: Tensor, anchors: Tensor) -> Tensor:
        """Greedy tokens slot after slot, each fed to the head of the next."""
        tokens, state, out = anchors, None, []
        for k in range(h.shape[1]):
            logits = base[:, k]
            if self.frame.head is not None:
                feature, state = self._step(h[:, k], self.w["markov_head.markov_w1.weight"][tokens], state)
                logits = logits + feature @ self.w["markov_head.markov_w2.weight"].T
            column = logits.argmax(-1)
            tokens = column if self.draft_ids is None else self.draft_ids[column]
            out.append(tokens)
        return torch.stack(out, 1)

    def _check(self) -> None:
        f = self.frame
        rows = len(self.draft_ids) if self.draft_ids is not None else f.vocab
        wanted = {
            "fc.weight": (f.hidden, len(f.taps) * f.hidden), "hidden_norm.weight": (f.hidden,), "norm.weight": (f.hidden,),
            "embed_tokens.weight": (f.vocab, f.hidden), "lm_head.weight": (rows, f.hidden),
        }  # fmt: skip
        if f.head is not None:
            wanted |= {"markov_head.markov_w1.weight": (f.vocab, f.rank), "markov_head.markov_w2.weight": (rows, f.rank)}
            if f.head not in ("vanilla", "gated", "rnn"):
                raise Unreadable(f"config.json: markov_head_type: {f.head!r}")
        if f.survival:
            wanted["confidence_head.proj.weight"] = (1, f.hidden + (f.rank if f.survival_with_head else 0))
        for i in range(f.layers):
            wanted[f"layers.{i}.self_attn.q_proj.weight"] = (f.heads * f.head_dim, f.hidden)
            wanted[f"layers.{i}.self_attn.k_proj.weight"] = (f.kv_heads * f.head_dim, f.hidden)
        for name, shape in wanted.items():
            if name not in self.w:
                raise Unreadable(f"{name} is missing")
            if tuple(self.w[name].shape) != shape:
                raise Unreadable(f"{name} has shape {tuple(self.w[name].shape)}, config.json asks for {shape}")
        if not 0 <= f.mask_token_id < f.vocab:
            raise Unreadable(f"config.json: mask_token_id: {f.mask_token_id} is no row of the embedding")


def _frequencies(f: Frame) -> tuple[Tensor, float]:
    """Rotary frequencies float32 [hd/2] and the factor on cos and sin."""
    if f.rope.get("rope_type", "default") == "default":
        exponents = torch.arange(0, f.head_dim, 2).float() / f.head_dim
        return 1.0 / f.rope["rope_theta"] ** exponents, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        hidden_size=f.hidden, num_attention_heads=f.heads, head_dim=f.head_dim, rope_parameters=f.rope,
        max_position_embeddings=f.positions,
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[f.rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)
