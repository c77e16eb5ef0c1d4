"""The "kernels" backend of runtime/decoder.py: Llama-like targets on CPU through one native call per forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache
from ..decoder import Decoder, DecoderOutput, check_layers
from ..weights import StackWeights
from .stack import FusedStack


class KernelDecoder(Decoder):
    """See Decoder.forward. Logits are float32 (in bf16 too: fewer ties, same cost). Bitwise batch-invariant."""

    backend = "kernels"

    def __init__(
        self,
        weights: StackWeights,
        *,
        dtype: torch.dtype,
        tap_layers: tuple[int, ...] = (),
        layers: tuple[int, ...] | None = None,
    ):
        super().__init__(
            vocab_size=weights.head.shape[0],
            hidden_size=weights.embedding.shape[1],
            num_layers=len(weights.layers),
            max_positions=weights.max_positions,
            tap_layers=tap_layers,
            device=weights.embedding.device,
            dtype=dtype,
            layers=layers,
        )
        self.stack = FusedStack(
            weights.layers,
            weights.final_norm,
            embedding=weights.embedding,
            head=weights.head,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            attention_scale=weights.attention_scale,
            eps=weights.eps,
            inv_freq=weights.inv_freq,
            rope_scale=weights.rope_scale,
        )
        taps = [self.layers.index(tap) for tap in self.tap_layers]
        self._taps = torch.tensor(taps, dtype=torch.int64) if taps else None

    def new_cache(self, slots: int, max_context: int) -> KVCache:
        """See Decoder.new_cache."""
        self.check_context(max_context)
        return self.stack.new_cache(slots, max_context)

    def subset(self, layers: tuple[int, ...]) -> Decoder:
        """See Decoder.subset."""
        other = copy.copy(self)
        other.layers = check_layers(layers, self.layers)
        other.num_layers, other.tap_layers, other._taps = len(other.layers), (), None
        other.stack = self.stack.subset([self.layers.index(i) for i in other.layers])
        return other

    def _forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        rows: list[int] | Tensor,
        starts: Tensor,
        logits: str,
        last: Tensor | None,
        taps: bool,
        bound: int | None,
        widths: Sequence[int] | None,
    ) -> DecoderOutput:
        scores, tapped, _ = self.stack.forward(
            tokens,
            cache,
            torch.as_tensor(rows, dtype=torch.int64),
            starts,
            logits=logits,
            last=None if last is None else torch.as_tensor(last, dtype=torch.int64),
            tap_layers=self._taps if taps else None,
            widths=widths,
        )
        return DecoderOutput(scores, tapped)
