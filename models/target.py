"""The frozen target: load it, capture its hidden states, apply its head.

One interface whatever holds the weights, `Target.states`: token ids in, tapped states and last hidden state out, keyed by
request. A whole copy is here; `target_sharded` splits one over the ranks; train/target_remote.py asks a server, and
train/target_engine.py lets the runtime's kernels compute. `self_test` compares any of them with a plain forward.
Shapes: B batch rows, T text length, V vocabulary, H hidden size, n number of tapped layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from .config import TargetConfig
from .facts import check_target, first_line, read_config, resolve_target, text_config

__all__ = ["Target", "TargetFeatures", "check_target", "load_target", "resolve_target", "self_test"]

# Mean over positions of |found - plain| / |plain| that rounding may cause; a tap of the next layer differs by 0.1 and more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class TargetFeatures:
    """What the drafter sees of the target, in the target's dtype, without gradient."""

    taps: Tensor  # [B, T, n*H] output of each tapped decoder layer, in the order asked for
    last_hidden: Tensor  # [B, T, H] after the final norm: what the LM head reads


class Target:
    """A frozen decoder-only language model with its tokenizer.

    hidden_size H, vocab_size V, num_layers; `layers` its decoder layers; logits = lm_head(h) * logit_factor, then soft-capped
    at `softcap` when that is not None. label: how it is held, for logs and the report. collective: every rank must ask for
    states the same number of times, with an empty batch where it has no row. by_request: `states` is its own way to compute,
    and `features` is made from it. quantization: None, or the form of the weights (bnb8, bnb4, the name of a GGUF file).
    """

    label = "whole"
    collective = False
    by_request = False
    quantization: str | None = None

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

    @staticmethod
    def find_layers(model: Any) -> nn.ModuleList:
        """The decoder layers of a transformers model. Raises ValueError where the family hides them."""
        return _decoder_layers(model.get_decoder(), text_config(model.config).num_hidden_layers)

    def describe(self, cfg: TargetConfig) -> None:
        """Take over how `cfg` says the weights are held."""
        self.label = cfg.label
        self.quantization = None if cfg.quantization == "none" else cfg.gguf_file or cfg.quantization

    @property
    def whole(self) -> bool:
        """Whether all weights are in this process: it can decode and be examined here without the other ranks."""
        return not (self.collective or self.by_request)

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
    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        tap_layers: tuple[int, ...],
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Hidden states of a batch of texts.

        Args:
            input_ids: int64 [B, T]; rows shorter than T are padded on the right.
            attention_mask: bool or int [B, T], true on real tokens, or None when nothing is padded.
            position_ids: int64 [B, T] that restart at 0 with every text of a packed row; attention then stays within a text
                (transformers reads the borders off the restarts) and `attention_mask` must be None.
            tap_layers: 0-based decoder layer ids; the output of layer id is taken after its residual, which equals
                `hidden_states[id + 1]` of transformers for every layer but the last (there the final norm is in it).

        Raises:
            ValueError: a tap layer that the target lacks.
        """
        self.check_taps(tap_layers)
        assert position_ids is None or attention_mask is None
        captured: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                captured[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        # hooks instead of output_hidden_states: only the n tapped layers stay in memory, not all of them
        handles = [self.layers[layer].register_forward_hook(keep(layer)) for layer in set(tap_layers)]
        try:
            # No mask for padding on the right: no real token sees what follows it, and a mask would cost transformers a look at
            # its values (the host waits for the device) and the attention kernels that take none. The self-test would tell.
            places = {} if position_ids is None else {"position_ids": position_ids}
            output = self.decoder(input_ids=input_ids, attention_mask=None, use_cache=False, **places)
        finally:
            for handle in handles:
                handle.remove()
        last_hidden = output.last_hidden_state
        if not tap_layers:
            return TargetFeatures(taps=last_hidden.new_empty((*last_hidden.shape[:2], 0)), last_hidden=last_hidden)
        return TargetFeatures(taps=torch.cat([captured[layer] for layer in tap_layers], dim=-1), last_hidden=last_hidden)

    def check_taps(self, tap_layers: Sequence[int]) -> None:
        """Raises ValueError for a tap layer that the target lacks."""
        for layer in tap_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"tap_layers: {layer}; the target has layers 0 to {self.num_layers - 1}")

    def states(self, requests: Mapping[str, Sequence[int]], tap_layers: tuple[int, ...]) -> dict[str, TargetFeatures]:
        """States of texts by request id: taps [T, n*H] and last_hidden [T, H] of each, cut to its own length T.

        requests: request id -> token ids, at least one each. Nothing is computed without requests, unless `collective`.
        """
        if not requests and not self.collective:
            return {}
        ids, lengths = pad(list(requests.values()) or [[0]])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        found = self.features(ids.to(self.device), mask.to(self.device), tap_layers)
        return {
            key: TargetFeatures(found.taps[row, : len(tokens)], found.last_hidden[row, : len(tokens)])
            for row, (key, tokens) in enumerate(requests.items())
        }

    @torch.no_grad()
    def plain(self, tokens: Sequence[int]) -> Tensor:
        """hidden_states of transformers for one text, alone and unpadded, [L + 1, T, H]: the reference of `self_test`.

        The first is the embedding, the last stands after the final norm.
        """
        ids = torch.tensor([list(tokens)], device=self.device)
        found = self.decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.stack([state[0] for state in found])

    def whole_layers(self, count: int) -> AbstractContextManager[Any]:
        """While it is open, the weights of the last `count` decoder layers are whole and in memory. Collective if we are."""
        return nullcontext()

    def logits(self, last_hidden: Tensor) -> Tensor:
        """LM head and the target's own logit scaling: [..., H] -> [..., V] in the dtype of the target."""
        logits = self.model.get_output_embeddings()(last_hidden)
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_target(cfg: TargetConfig, device: str | torch.device = "cpu") -> Target:
    """Loads the target of `cfg` frozen, in eval mode, in `cfg.dtype`, whole on `device` (`placement` is of no account here).

    Raises:
        ValueError: it cannot be found, cannot be speculated on, its head does more than a projection with scaling, or the
            package of its quantisation is missing.
    """
    check_target(read_config(cfg))
    quantized = cfg.quantization.startswith("bnb")
    model = load_model(cfg, **({"device_map": {"": device}, **_bitsandbytes(cfg)} if quantized else {}))
    target = Target(model if quantized else model.to(device), load_tokenizer(cfg), resolve_target(cfg))
    target.describe(cfg)
    check_head(target)
    return target


def load_model(cfg: TargetConfig, **options: Any) -> Any:
    """The transformers model of `cfg`; options go to from_pretrained. Raises ValueError when it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    if cfg.gguf_file is not None:
        if find_spec("gguf") is None:
            raise ValueError("target.quantization: 'gguf' needs the package gguf (pip install gguf)")
        options["gguf_file"] = cfg.gguf_file
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve_target(cfg), revision=cfg.revision, dtype=getattr(torch, cfg.dtype), **options
        )
    except OSError as error:
        raise ValueError(f"target.name: {cfg.name!r} cannot be loaded: {first_line(error)}") from error
    if cfg.gguf_file is not None:  # rounded, but plain floating-point layers from here on
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            model.__dict__.pop(name, None)
    return model


def load_tokenizer(cfg: TargetConfig) -> Any:
    """The tokenizer of `cfg`. Raises ValueError when it cannot be loaded."""
    from transformers import AutoTokenizer

    options = {} if cfg.gguf_file is None else {"gguf_file": cfg.gguf_file}
    try:
        return AutoTokenizer.from_pretrained(resolve_target(cfg), revision=cfg.revision, **options)
    except OSError as error:
        raise ValueError(f"target.name: {cfg.name!r} cannot be loaded: {first_line(error)}") from error


def _bitsandbytes(cfg: TargetConfig) -> dict[str, Any]:
    """from_pretrained's options for int8 or nf4 weights; the embedding and the LM head stay in `cfg.dtype`."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            f"target.quantization: {cfg.quantization!r} needs the package bitsandbytes (pip install bitsandbytes); allowed "
            "without it: none, gguf"
        )
    from transformers import BitsAndBytesConfig

    compute = getattr(torch, cfg.dtype)
    if cfg.quantization == "bnb8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=True
        )
    }


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """ids int64 [R, T], rows padded on the right with 0, and their lengths int64 [R]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.as_tensor(list(row))
    return ids, lengths


# ---- self-test ------------------------------------------------------------------------------------------------------


def probe_texts(vocab_size: int) -> dict[str, list[int]]:
    """Two texts of unequal length, by name; their tokens are spread over the vocabulary."""
    spread = max(vocab_size // 17, 1)
    return {name: [(1 + i * spread + start) % vocab_size for i in range(length)]
            for name, length, start in (("short", 5, 2), ("long", 11, 0))}  # fmt: skip


def self_test(target: Target, tap_layers: tuple[int, ...]) -> float:
    """Compares `target.states` of two unequal texts, asked for together, with a plain forward of each alone.

    Returns the largest mean relative difference found. Collective where the target is.

    Raises:
        ValueError: a tap or the last hidden state of a text differs by more than rounding; names the text, the state and
            the difference. Wrong taps, a wrong order of results, padding that leaks and other weights all end here.
    """
    texts, worst = probe_texts(target.vocab_size), 0.0
    allowed = TOLERANCE[target.dtype]
    found = target.states(texts, tap_layers)
    for name, tokens in texts.items():
        plain = target.plain(tokens).to(target.device)
        states = {f"tap of layer {layer}": (part, plain[layer + 1])
                  for layer, part in zip(tap_layers, found[name].taps.chunk(max(len(tap_layers), 1), -1), strict=False)
                  if layer + 1 < target.num_layers}  # fmt: skip
        states["last hidden state"] = (found[name].last_hidden, plain[-1])
        for what, (ours, theirs) in states.items():
            assert ours.shape == theirs.shape, (name, what, ours.shape, theirs.shape)
            scale = theirs.float().norm(dim=-1).clamp_min(1e-12)
            error = float(((ours.float() - theirs.float()).norm(dim=-1) / scale).mean())
            if not error <= allowed:
                raise ValueError(
                    f"target ({target.label}): self-test failed at the {name} row of {len(tokens)} tokens: {what} differs from "
                    f"a plain forward by {error:.2g} (relative, mean over positions), allowed {allowed:g}"
                )
            worst = max(worst, error)
    return worst


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
def check_head(target: Target) -> None:
    """Compares logits() with the model's own on a few tokens: an unknown extra step would spoil every distribution."""
    ids = torch.arange(1, 5, device=target.device).clamp(max=target.vocab_size - 1)[None]
    expected = target.model(input_ids=ids, use_cache=False).logits.float()
    found = target.logits(target.features(ids, None, ()).last_hidden).float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"target.name: {type(target.model).__name__} does more between its last hidden state and its logits than "
            "a projection with scaling, which is not supported"
        )
