"""A replicated target whose states the runtime's decoder computes: the CPU kernels skip the padding and run faster.

The results are the transformers forward's up to rounding, which the self-test checks like everything else. Where the kernels
cannot serve the target (no AVX-512, another family) this is refused; on a GPU transformers' own forward is what to use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.target import Target, TargetFeatures
from ..runtime.cache import KVCache
from ..runtime.decoder import Decoder


class EngineTarget(Target):
    """See the module. It holds the merged weights of the layers beside the model's own."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.model, target.tokenizer, target.folder)
        self.label, self.quantization = f"{target.label}, run by our CPU kernels", target.quantization
        self._decoders: dict[tuple[int, ...], Decoder] = {}
        self._cache: tuple[Decoder, KVCache, int, int] | None = None
        self._decoder(())  # refused here, before anything was computed

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        tap_layers: tuple[int, ...],
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """As in Target; states of padding are zeros."""
        assert position_ids is None, "packed rows come chat by chat where attention is not flash"
        self.check_taps(tap_layers)
        rows, width = input_ids.shape
        lengths = [width] * rows if attention_mask is None else [max(int(n), 1) for n in attention_mask.sum(1)]
        decoder = self._decoder(tap_layers)
        out = decoder.forward(
            input_ids, self._room(decoder, rows, width), list(range(rows)), [0] * rows, logits="none", taps=True, widths=lengths
        )
        assert out.taps is not None
        states = out.taps.clone()
        for row, length in enumerate(lengths):
            states[row, length:] = 0
        norm = self.final_norm
        assert norm is not None
        last = norm(states[..., -self.hidden_size :])
        return TargetFeatures(states[..., : -self.hidden_size], last)

    def _decoder(self, tap_layers: tuple[int, ...]) -> Decoder:
        """With the last layer as a tap of its own: the final norm is applied outside. The weights are merged once."""
        if tap_layers not in self._decoders:
            taps = (*tap_layers, self.num_layers - 1)
            if self.final_norm is None:
                raise ValueError("target.extraction: 'runtime' needs the target's final norm; allowed: transformers")
            try:
                made = Decoder.from_target(self.model, dtype=self.dtype, tap_layers=taps, backend="kernels")
            except ValueError as error:
                raise ValueError(f"target.extraction: 'runtime' is not possible ({error}); allowed: transformers") from error
            self._decoders = {tap_layers: made}  # one at a time: it holds weights
        return self._decoders[tap_layers]

    def _room(self, decoder: Decoder, rows: int, width: int) -> KVCache:
        """A cache that holds `rows` texts of `width`; nothing of an earlier batch is read, since every row starts at 0."""
        held = self._cache
        if held is None or held[0] is not decoder or held[2] < rows or held[3] < width:
            width = min(-(-width // 64) * 64, decoder.max_positions)
            most = (max(rows, held[2]), max(width, held[3])) if held is not None else (rows, width)
            held = self._cache = (decoder, decoder.new_cache(*most), *most)
        return held[1]
