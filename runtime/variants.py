"""Cheaper variants of the target that draft for it: some of its layers, or its weights in int8.

Both share every tensor they can with the target. B rows, W tokens, K input and N output channels of a linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .decoder import Decoder, TorchDecoder
from .weights import FUSED_FAMILIES, StackWeights, stack_weights, unfused_reason

_LEVELS = 127.0  # int8, symmetric


@torch.no_grad()
def default_layers(model: nn.Module, ids: Tensor, left_out: int | None = None) -> tuple[int, ...]:
    """A target's layers without the `left_out` (default: a quarter) that change their input least; the first and the last stay.

    Block influence (ShortGPT, arXiv 2403.03853): 1 - cosine of a layer's input and output, averaged over a text, ids int64
    [1,T].
    """
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    count = len(states) - 1
    pairs = [(states[i].float(), states[i + 1].float()) for i in range(1, count - 1)]
    influence = [1 - torch.cosine_similarity(before, after, dim=-1).mean().item() for before, after in pairs]
    order = sorted(range(1, count - 1), key=lambda i: influence[i - 1])
    gone = set(order[: count // 4 if left_out is None else left_out])
    return tuple(i for i in range(count) if i not in gone)


def skip_layers(model: nn.Module, layers: Sequence[int]) -> nn.Module:
    """A Hugging Face causal LM of the given decoder layers of `model` (ascending ids), sharing its weights.

    Raises ValueError for ids that are not ascending or not the model's, or a model without a list of layers.
    """
    config = model.config.get_text_config()
    count, keep = config.num_hidden_layers, list(layers)
    if not keep or keep != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= count:
        raise ValueError(f"proposer.layers: {keep} is not allowed (ascending layer ids from 0 to {count - 1})")
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    base = twin.get_decoder()
    names = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if not names:
        raise ValueError(f"proposer: layerskip: model_type {model.config.model_type!r} has no list of layers")
    kept = [getattr(base, names[0])[i] for i in keep]
    setattr(base, names[0], nn.ModuleList(kept))
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    own = twin.config.get_text_config()
    own.num_hidden_layers = len(keep)
    if getattr(own, "layer_types", None):
        own.layer_types = [own.layer_types[i] for i in keep]
    return twin


class Int8Weight:
    """A linear layer's weight float [N,K] as int8 with one scale per output channel; activations int8 with one per token.

    Symmetric, scale = largest magnitude / 127. Products are exact integers, so a token's result does not depend on its batch.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach().float()
        self.shape = weight.shape
        self.scale = (weight.abs().amax(dim=1) / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
        self._zero = torch.zeros(len(weight), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack((weight / self.scale[:, None]).round_().to(torch.int8), None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x float [..., K] -> [..., N] in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = (rows.abs().amax(dim=1, keepdim=True) / _LEVELS).clamp_min_(torch.finfo(torch.float32).tiny)
        quantised = (rows / scale).round_().to(torch.int8)
        out = torch.ops.onednn.qlinear_pointwise(
            quantised, 1.0, 0, self._packed, self.scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(scale)
        if bias is not None:
            out += bias
        return out.to(x.dtype).view(*x.shape[:-1], self.shape[0])


class Int8Decoder(TorchDecoder):
    """A copy of a Llama-like target with int8 weights (embedding, norms and attention stay in `dtype`). CPU only."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        reason = unfused_reason(model)
        if reason is not None:
            raise ValueError(f"proposer: int8 serves {', '.join(FUSED_FAMILIES)} only: {reason}")
        device = next(model.parameters()).device
        if device.type != "cpu":
            raise ValueError(f"proposer: int8 runs on the CPU only, the target is on {device}")
        super().__init__(_quantise(stack_weights(model, dtype)), dtype=dtype)

    subset = Decoder.subset  # TorchDecoder's would read the weights as tensors

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See TorchDecoder.linear."""
        return cast(Int8Weight, weight)(x, bias)


@torch.no_grad()
def _quantise(weights: StackWeights) -> StackWeights:
    """The same stack with Int8Weight in place of every matrix; what is quantised is let go at once."""
    for layer in weights.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, _int8(getattr(layer, name)))
    weights.head = _int8(weights.head)
    return weights


def _int8(weight: Tensor) -> Any:
    return Int8Weight(weight)


def layerskip_decoder(
    model: nn.Module, layers: Sequence[int], *, dtype: torch.dtype, decoder: Decoder | None = None
) -> Decoder:
    """The decoder of some layers of the target. decoder: the target's own in this dtype, whose weights it then shares."""
    if decoder is not None and unfused_reason(model) is None:
        assert decoder.dtype == dtype
        return decoder.subset(tuple(layers))
    return Decoder.from_target(skip_layers(model, layers), dtype=dtype)
