"""DSpark: a parallel block drafter with a sequential correction head and a survival head (arXiv 2607.05147, section 1.1).

Frame (anchor-first): block input slot 0 is the anchor token, slots 1..G-1 the mask token, at positions anchor..anchor+G-1;
slot k predicts the token at anchor+k+1. Context features are the tapped target states at positions < anchor.
The module is built from the exported config alone, so training and serving cannot disagree about a shape or a frame.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from .blocks import BlockShape, DraftLayer, RMSNorm, Rope
from .draft import DraftOutput, FrozenHeads
from .heads import CORRECTION_HEADS, CorrectionHead, SurvivalHead
from .masks import FlexAttention, block_attention, context_mask
from .packed import Attend, Chats, attention_by_chat


class DSpark(nn.Module):
    """Trainable part of the drafter. `config` is the dict of the exported config.json (models/export/native.py).

    Attributes: block_size G, tap_layers, mask_token_id, hidden_size H, draft_vocab_size Vd; first_slot, the first slot that
    predicts (0, or 1 in an imported fill-in drafter, which serves but does not train), and num_predictions = G - first_slot.
    """

    d2t: Tensor | None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.block_size: int = config["block_size"]
        # Fill-in blocks (DFlash): slot j predicts its own position anchor+j, so the anchor's slot predicts nothing.
        self.first_slot: int = 0 if config["sample_from_anchor"] else 1
        self.num_predictions: int = self.block_size - self.first_slot
        self.tap_layers: tuple[int, ...] = tuple(config["target_layer_ids"])
        self.mask_token_id: int = config["mask_token_id"]
        self.hidden_size: int = config["hidden_size"]
        self.draft_vocab_size: int = config.get("draft_vocab_size") or config["vocab_size"]
        shape = BlockShape(
            hidden_size=self.hidden_size,
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
        )
        self.fc = nn.Linear(len(self.tap_layers) * self.hidden_size, self.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(self.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(self.hidden_size, shape.rms_norm_eps)
        self.markov_head: CorrectionHead | None = None
        if config["markov_rank"] > 0:
            self.markov_head = CORRECTION_HEADS[config["markov_head_type"]](
                vocab_size=config["vocab_size"],
                draft_vocab_size=self.draft_vocab_size,
                rank=config["markov_rank"],
                hidden_size=self.hidden_size,
            )
        self.confidence_head: SurvivalHead | None = None
        if config["enable_confidence_head"]:
            rank = config["markov_rank"] if config["confidence_head_with_markov"] else 0
            self.confidence_head = SurvivalHead(hidden_size=self.hidden_size, rank=rank)
        rotary = Qwen3RotaryEmbedding(Qwen3Config(**{k: v for k, v in config.items() if k in ROPE_KEYS}))
        self.rope = Rope(rotary.inv_freq, rotary.attention_scaling)
        self.attention_backend = "auto"  # training: see FlexAttention.fits
        self.recompute_layers = False  # training: keep the input of a layer instead of its inner states
        self._init_weights(config.get("initializer_range") or 0.02)

    def _init_weights(self, std: float) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith(("markov_head.markov", "confidence_head")):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def context_features(self, taps: Tensor) -> Tensor:
        """taps [..., n*H] in tap order -> H_ctx [..., H] (DSpark section 1.1: RMSNorm after the shared projection)."""
        return self.hidden_norm(self.fc(taps))

    def block_inputs(self, anchor_tokens: Tensor, embedding: Tensor, slots: int | None = None) -> Tensor:
        """anchor_tokens int64 [...] -> input states [..., G, H]: the anchor, then G-1 masks. slots: another G."""
        anchor = embedding[anchor_tokens].unsqueeze(-2)
        mask = embedding[self.mask_token_id].expand(*anchor.shape[:-2], (slots or self.block_size) - 1, -1)
        return torch.cat((anchor, mask), dim=-2)

    def unroll(
        self,
        *,
        taps: Tensor,
        anchors: Tensor,
        previous_tokens: Tensor,
        embedding: Tensor,
        detach_survival: bool = False,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        chats: Chats | None = None,
    ) -> DraftOutput:
        """All blocks of a batch under teacher forcing.

        taps [R, T, n*H]; anchors int64 [R, A] positions; previous_tokens int64 [R, A, G], the text at anchor+k (slot k's
        predecessor, so column 0 is the anchor token); embedding [V, H]. detach_survival: no gradient from the survival
        logits beyond their own head. Returns hidden [R, A, G, H] and head states.

        Several chats in a row: positions int64 [R, T], counted from the first token of each chat, and starts int64 [R, A],
        the column of that token for each anchor: a block sees starts <= t < anchor. chats: the same rule as an index, which
        attention then uses instead of a mask over the whole row.
        """
        context = self.context_features(taps)
        if positions is None:
            positions = torch.arange(taps.shape[1], device=taps.device)[None]
        first = anchors if starts is None else anchors - starts
        context_rope = self.rope(positions)
        block_rope = self.rope(first[..., None] + torch.arange(self.block_size, device=anchors.device))
        attend = self.attention(anchors, taps.shape[1], starts, chats)
        x = self.block_inputs(previous_tokens[..., 0], embedding).to(context.dtype)
        for layer in self.layers:
            if self.recompute_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, context, block_rope, context_rope, attend, use_reentrant=False)
            else:
                x = layer(x, context, block_rope, context_rope, attend)
        out = self.head_states(self.norm(x), previous_tokens, detach_survival=detach_survival)
        if self.markov_head is None:
            return out
        return out._replace(w2=self.markov_head.markov_w2.weight.clone())  # a copy: sharded training frees the whole matrix

    def attention(self, anchors: Tensor, length: int, starts: Tensor | None, chats: Chats | None) -> Attend:
        """Attention of one batch for all layers: see unroll."""
        if FlexAttention.fits(anchors.device, self.layers[0].self_attn.shape.head_dim, self.attention_backend):
            return FlexAttention(anchors, length, starts, slots=self.block_size)
        if chats is not None:
            return lambda query, context, block: attention_by_chat(query, context, block, chats)
        visible = context_mask(anchors, length, starts)
        return lambda query, context, block: block_attention(query, context, block, visible)

    def head_states(self, hidden: Tensor, previous_tokens: Tensor, *, detach_survival: bool = False) -> DraftOutput:
        """hidden [..., G, H] (after the final norm), previous_tokens int64 [..., G] -> correction and survival states."""
        previous = correction = survival = None
        if self.markov_head is not None:
            previous = self.markov_head.markov_w1(previous_tokens)
            correction = self.markov_head.unroll(hidden, previous)
        if self.confidence_head is not None:
            inputs = (hidden, previous)
            if detach_survival:
                inputs = (hidden.detach(), None if previous is None else previous.detach())
            survival = self.confidence_head(*inputs)
        return DraftOutput(hidden, correction, survival)

    forward = unroll  # DDP and FSDP wrap forward; the loop calls the wrapped module


ROPE_KEYS = frozenset(
    (
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
    )
)


def trainable_table(drafter: nn.Module) -> list[tuple[str, int]]:
    """(module, trainable parameters) by top-level module, target first: it must be 0."""
    counts: dict[str, int] = {}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            key = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
            size = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor in its place
            counts[key] = counts.get(key, 0) + size
    return [("target", 0), *counts.items()]


def attach_check(drafter: DSpark, heads: FrozenHeads) -> None:
    """The frozen heads must fit the drafter: ValueError naming the sizes otherwise."""
    vocab, hidden = heads.embedding.shape
    if (vocab, hidden) != (drafter.config["vocab_size"], drafter.hidden_size):
        raise ValueError(
            f"drafter was built for a target with vocabulary {drafter.config['vocab_size']} and hidden size "
            f"{drafter.hidden_size}; this target has {vocab} and {hidden}"
        )
    if heads.draft_head.shape[0] != drafter.draft_vocab_size:
        raise ValueError(f"draft vocabulary: drafter has {drafter.draft_vocab_size}, d2t gives {heads.draft_head.shape[0]}")
