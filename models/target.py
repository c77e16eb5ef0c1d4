"""The frozen target: load it, capture its hidden states, apply its head.

Shapes: B batch rows, T text length, V vocabulary, H hidden size, n number of tapped layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import TargetConfig
from .facts import check_target, first_line, read_config, resolve_target, text_config

__all__ = ["Target", "TargetFeatures", "check_target", "load_target", "resolve_target"]


@dataclass(frozen=True)
class TargetFeatures:
    """What the drafter sees of the target, in the target's dtype, without gradient."""

    taps: Tensor  # [B, T, n*H] output of each tapped decoder layer, in the order asked for
    last_hidden: Tensor  # [B, T, H] after the final norm: what the LM head reads


class Target:
    """A frozen decoder-only language model with its tokenizer.

    hidden_size H, vocab_size V, num_layers; `layers` its decoder layers; logits = lm_head(h) * logit_factor, then soft-capped
    at `softcap` when that is not None.
    """

    def __init__(self, model: Any, tokenizer: Any, folder: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = model.config
        text = text_config(model.config)
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self.num_layers: int = text.num_hidden_layers
        self.decoder: Any = model.get_decoder()
        self.layers = _decoder_layers(self.decoder, self.num_layers)
        self.logit_factor, self.softcap = _logit_rule(text)

    @property
    def device(self) -> torch.device:
        """Device of the embedding."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """Input embedding [V, H]; the same storage as lm_head_weight when the target ties them."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """Output projection [V, H]."""
        return self.model.get_output_embeddings().weight

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last decoder layer and the head; None when the family hides it."""
        norms = [child for name, child in self.decoder.named_children() if "norm" in name or name == "ln_f"]
        return norms[-1] if norms else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of the generation config and of the tokenizer."""
        declared = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = declared if isinstance(declared, list) else [declared]
        return tuple(sorted({i for i in [*ids, self.tokenizer.eos_token_id] if i is not None}))

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None, tap_layers: tuple[int, ...]) -> TargetFeatures:
        """Hidden states of a batch of texts.

        Args:
            input_ids: int64 [B, T]; rows shorter than T are padded on the right.
            attention_mask: bool or int [B, T], true on real tokens, or None when nothing is padded.
            tap_layers: 0-based decoder layer ids; the output of layer id is taken after its residual, which equals
                `hidden_states[id + 1]` of transformers for every layer but the last (there the final norm is in it).

        Raises:
            ValueError: a tap layer that the target lacks.
        """
        for layer in tap_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"tap_layers: {layer}; the target has layers 0 to {self.num_layers - 1}")
        captured: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                captured[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        # hooks instead of output_hidden_states: only the n tapped layers stay in memory, not all of them
        handles = [self.layers[layer].register_forward_hook(keep(layer)) for layer in set(tap_layers)]
        try:
            mask = None if attention_mask is None else attention_mask.to(torch.int64)
            output = self.decoder(input_ids=input_ids, attention_mask=mask, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        last_hidden = output.last_hidden_state
        if not tap_layers:
            return TargetFeatures(taps=last_hidden.new_empty((*last_hidden.shape[:2], 0)), last_hidden=last_hidden)
        return TargetFeatures(taps=torch.cat([captured[layer] for layer in tap_layers], dim=-1), last_hidden=last_hidden)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """LM head and the target's own logit scaling: [..., H] -> [..., V] in the dtype of the target."""
        logits = self.model.get_output_embeddings()(last_hidden)
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_target(cfg: TargetConfig, device: str | torch.device = "cpu") -> Target:
    """Loads the target of `cfg` frozen, in eval mode, in `cfg.dtype`, on `device`.

    Raises:
        ValueError: it cannot be found, cannot be speculated on, or its head does more than a projection with scaling.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_config = read_config(cfg)
    check_target(hf_config)
    source = resolve_target(cfg)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, revision=cfg.revision, dtype=getattr(torch, cfg.dtype))
        tokenizer = AutoTokenizer.from_pretrained(source, revision=cfg.revision)
    except OSError as error:
        raise ValueError(f"target.name: {cfg.name!r} cannot be loaded: {first_line(error)}") from error
    target = Target(model.to(device), tokenizer, source)
    _check_head(target)
    return target


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The stack of decoder layers, whatever its name in the model family (layers, h, blocks)."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise ValueError(f"target.name: {type(decoder).__name__} has no list of {num_layers} decoder layers")


def _logit_rule(text: Any) -> tuple[float, float | None]:
    """Factor and soft cap that the family applies to its logits (Cohere, Granite, Gemma 2)."""
    factor = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    return factor, getattr(text, "final_logit_softcapping", None)


@torch.no_grad()
def _check_head(target: Target) -> None:
    """Compares logits() with the model's own on a few tokens: an unknown extra step would spoil every distribution."""
    ids = torch.arange(1, 5, device=target.device).clamp(max=target.vocab_size - 1)[None]
    expected = target.model(input_ids=ids, use_cache=False).logits.float()
    found = target.logits(target.features(ids, None, ()).last_hidden).float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"target.name: {type(target.model).__name__} does more between its last hidden state and its logits than "
            "a projection with scaling, which is not supported"
        )
