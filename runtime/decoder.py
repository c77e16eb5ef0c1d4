"""The target's serving forward: W new tokens for each of B cache rows, at ragged lengths, in one call.

Three backends behind one class:
- "kernels": hand-written AVX512 / AMX code for CPU (`runtime/kernels`), Llama-like families. Batch-invariant: the
  result of a token is bitwise the same whatever W, B, the other rows and the padding are.
- "torch": own fused blocks in plain torch for the same families; any device and dtype.
- other families run through transformers' own modules with our cache (`runtime/decoder_hf.py`).

Shapes: B rows, W tokens per row, V vocabulary, H hidden size, n taps, S cache length.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Span, attend
from .cache import KVCache
from .weights import LayerWeights, StackWeights, stack_weights, unfused_reason

BACKENDS = ("auto", "torch", "kernels")
LOGITS = ("all", "last", "none")


@dataclass
class DecoderOutput:
    """logits [B,W,V], [B,1,V] or None (float32 from the kernels, else the decoder's dtype); taps [B,W,n*H] or None."""

    logits: Tensor | None
    taps: Tensor | None


class Decoder:
    """Base class and factory; see `forward` for the contract that every backend keeps."""

    backend = "torch"

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        max_positions: int,
        tap_layers: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        layers: tuple[int, ...] | None = None,
    ):
        """layers: the target's layers that run, `num_layers` of them (None: all). tap_layers: target layers too, among them."""
        self.layers = tuple(range(num_layers)) if layers is None else layers
        for tap in tap_layers:
            if tap not in self.layers:
                allowed = f"in [0, {num_layers - 1}]" if layers is None else f"one of {layers}"
                raise ValueError(f"tap_layers: {tap}: must be {allowed} for this target")
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, hidden_size, num_layers
        self.max_positions, self.tap_layers = max_positions, tuple(tap_layers)
        self.device, self.dtype = torch.device(device), dtype

    @staticmethod
    def from_target(
        model: nn.Module,
        *,
        dtype: torch.dtype,
        tap_layers: tuple[int, ...] = (),
        backend: str = "auto",
        layers: tuple[int, ...] | None = None,
    ) -> Decoder:
        """Build the fastest decoder for a frozen Hugging Face causal LM on the device its weights are on.

        layers: run only these layers of the target (increasing indices), with a cache for them only: a cheap draft of
        the same target. `subset` makes one that shares the weights of a full decoder. None: all.
        Raises ValueError for an unknown backend, layers or tap layers out of range, or a model that no backend can serve.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r}: must be one of {', '.join(BACKENDS)}")
        if layers is not None:
            layers = check_layers(layers, tuple(range(model.config.get_text_config().num_hidden_layers)))
        reason = unfused_reason(model)
        if reason is not None:
            if backend == "kernels":
                raise ValueError(f"backend: 'kernels' cannot serve this target: {reason}")
            from .decoder_hf import ModuleDecoder

            if layers is not None:
                raise ValueError(f"layers: {layers}: a subset of layers needs a fused family: {reason}")
            return ModuleDecoder(model, dtype=dtype, tap_layers=tap_layers)
        if backend in ("auto", "kernels"):
            from .kernels import problem as machine_problem
            from .kernels import unsupported_reason

            problem = unsupported_reason(model, dtype)
            if problem is None:
                from .kernels.decoder import KernelDecoder

                return KernelDecoder(stack_weights(model, dtype, layers), dtype=dtype, tap_layers=tap_layers, layers=layers)
            if backend == "kernels":
                raise ValueError(f"backend: 'kernels' cannot serve this target: {problem}")
            if next(model.parameters()).device.type == "cpu" and problem == machine_problem(dtype):
                warn_once(f"the CPU kernels are not used, decoding runs on PyTorch's own and is slower: {problem}")
        return TorchDecoder(stack_weights(model, dtype, layers), dtype=dtype, tap_layers=tap_layers, layers=layers)

    def new_cache(self, slots: int, max_context: int) -> KVCache:
        """Allocate the cache once. Raises ValueError if max_context is above `max_positions`."""
        raise NotImplementedError

    def subset(self, layers: tuple[int, ...]) -> Decoder:
        """A decoder of only these layers (increasing target indices, among `layers`), without taps, sharing the weights.

        It has caches of its own (`new_cache`). Raises ValueError for other layers, or where the backend cannot.
        """
        raise ValueError(f"layers: {layers}: a subset of layers needs a fused family, not transformers' own modules")

    def check_context(self, max_context: int) -> None:
        """Raises ValueError if max_context is above `max_positions`."""
        if max_context > self.max_positions:
            raise ValueError(f"max_context: {max_context}: must be at most {self.max_positions}, the target's positions")

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        rows: list[int] | Tensor,
        starts: Tensor | list[int],
        *,
        logits: str = "all",
        last: Tensor | None = None,
        taps: bool = False,
        bound: int | None = None,
        widths: Sequence[int] | None = None,
    ) -> DecoderOutput:
        """Run W tokens of each row; their keys and values go to positions starts[b] .. starts[b] + W - 1.

        tokens int64 [B,W]; rows: B distinct cache slots; starts int64 [B]: committed length of each row; query j of
        row b sees positions <= starts[b] + j only. Padding at the end of a row is harmless: later starts overwrite or
        mask it. logits: "all" [B,W,V], "last" [B,1,V] at index last[b] (int64 [B]; the row's last token if None), or
        "none". taps: also return the outputs of `tap_layers` [B,W,n*H]. bound: host-known upper limit of starts + W,
        which saves a device sync when `starts` is on a GPU.

        widths: host integers, widths[b] in 1 .. W; the entries j >= widths[b] of row b are padding (any valid token id).
        Their logits and taps are undefined (uninitialised memory, maybe NaN), their keys and values may or may not be
        written, and the "kernels" backend spends no work on them. The other entries are as without `widths`.
        """
        assert logits in LOGITS
        assert tokens.dim() == 2 and len(rows) == tokens.shape[0]
        if widths is not None:
            assert len(widths) == len(rows) and all(1 <= n <= tokens.shape[1] for n in widths)
            if logits == "last" and last is None:
                last = torch.tensor([n - 1 for n in widths], dtype=torch.int64)
        starts = torch.as_tensor(starts, dtype=torch.int64)
        with torch.inference_mode():
            return self._forward(tokens, cache, rows, starts, logits, last, taps, bound, widths)

    __call__ = forward

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
        raise NotImplementedError


def check_layers(layers: Sequence[int], available: tuple[int, ...]) -> tuple[int, ...]:
    """`layers` as a tuple; ValueError unless they are increasing indices among `available`, at least one."""
    layers = tuple(layers)
    if not layers or list(layers) != sorted(set(layers)) or not set(layers) <= set(available):
        full = available == tuple(range(len(available)))
        allowed = f"in [0, {len(available) - 1}]" if full else f"among {available}"
        raise ValueError(f"layers: {layers}: must be increasing indices {allowed}, at least one")
    return layers


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of transformers' Llama (halves, not pairs): x [B,W,heads,hd], cos/sin [B,W,1,hd]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def pick_last(hidden: Tensor, last: Tensor | None) -> Tensor:
    """hidden [B,W,H] -> [B,1,H] at index last[b] (W - 1 if None)."""
    if last is None:
        return hidden[:, -1:]
    index = torch.as_tensor(last, dtype=torch.int64).to(hidden.device, non_blocking=True)
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[-1]))


class TorchDecoder(Decoder):
    """Fused blocks in plain torch: merged projections, static cache, SDPA. Same rounding points as transformers."""

    backend = "torch"

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
        self.weights = weights
        self.cos = self.sin = torch.empty(0, weights.head_dim, dtype=dtype, device=self.device)

    def new_cache(self, slots: int, max_context: int) -> KVCache:
        """See Decoder.new_cache; also extends the rotary table to the cache's length."""
        self.check_context(max_context)
        w = self.weights
        cache = KVCache.allocate(
            layers=self.num_layers,
            slots=slots,
            kv_heads=w.num_kv_heads,
            head_dim=w.head_dim,
            max_context=max_context,
            dtype=self.dtype,
            device=self.device,
        )
        if cache.length > self.cos.shape[0]:
            angles = torch.arange(cache.length, device=self.device).float()[:, None] * w.inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            self.cos = (angles.cos() * w.rope_scale).to(self.dtype)
            self.sin = (angles.sin() * w.rope_scale).to(self.dtype)
        return cache

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
        w = self.weights
        span = Span.build(cache, rows, starts, tokens.shape[1], bound)
        rope = self.cos[span.write][:, :, None], self.sin[span.write][:, :, None]
        hidden = F.embedding(tokens.to(self.device, non_blocking=True), w.embedding)
        tapped: dict[int, Tensor] = {}
        for place, (index, layer) in enumerate(zip(self.layers, w.layers, strict=True)):
            hidden = hidden + self._attention(place, layer, hidden, span, rope)
            hidden = hidden + self._mlp(layer, hidden)
            if taps and index in self.tap_layers:
                tapped[index] = hidden
        tap = torch.cat([tapped[i] for i in self.tap_layers], dim=-1) if taps and self.tap_layers else None
        if logits == "none":
            return DecoderOutput(None, tap)
        if logits == "last":
            hidden = pick_last(hidden, last)
        return DecoderOutput(self.linear(self._norm(hidden, w.final_norm), w.head), tap)

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times weight [N, K] -> [..., N]; another storage of the weights overrides it."""
        return F.linear(x, weight, bias)

    def subset(self, layers: tuple[int, ...]) -> Decoder:
        """See Decoder.subset."""
        layers = check_layers(layers, self.layers)
        kept = [self.weights.layers[self.layers.index(i)] for i in layers]
        return TorchDecoder(replace(self.weights, layers=kept), dtype=self.dtype, layers=layers)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # transformers normalises in float32 and multiplies by the weight after rounding back
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.weights.eps)
        return weight * y.to(x.dtype)

    def _attention(self, index: int, layer: LayerWeights, hidden: Tensor, span: Span, rope: tuple[Tensor, Tensor]) -> Tensor:
        w = self.weights
        batch, width, _ = hidden.shape
        mixed = self.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        q, k, v = mixed.view(batch, width, -1, w.head_dim).split([w.num_heads, w.num_kv_heads, w.num_kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        keys, values = span.append(index, k, v)
        out = attend(q.transpose(1, 2), keys, values, span.mask(layer.window), w.attention_scale)
        return self.linear(out.transpose(1, 2).reshape(batch, width, -1), layer.out, layer.out_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = self.linear(self._norm(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def warn_once(message: str, _seen: set[str] = set()) -> None:  # noqa: B006 - the shared set is the point
    """Warn the first time a message is given in this process."""
    if message not in _seen:
        _seen.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
