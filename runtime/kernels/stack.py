"""A stack of Llama-like decoder layers in one native call per forward: targets and drafters.

Rounding (bf16): residual stream, norms, rotation, softmax and all sums are float32; the inputs of matrix products, the
cached keys and values, and the attention weights are rounded to bf16. float32 has no rounding beyond its own.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache
from ..weights import LayerWeights
from .build import library
from .linear import pack
from .memory import Arena, zeros

_I64, _PTR, _F32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _LayerArgs(ctypes.Structure):
    _fields_ = [
        (name, _PTR)
        for name in (
            "qkv",
            "out",
            "gate_up",
            "down",
            "qkv_bias",
            "out_bias",
            "gate_up_bias",
            "down_bias",
            "input_norm",
            "post_norm",
            "q_norm",
            "k_norm",
        )
    ] + [("window", _I64)]


class _ModelArgs(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")),
        ("eps", _F32),
        ("scale", _F32),
        ("embedding", _PTR),
        ("head", _PTR),
        ("final_norm", _PTR),
        *((name, _I64) for name in ("words", "mask_token", "context_width")),
        ("context", _PTR),
        ("context_norm", _PTR),
    ]


class _ForwardArgs(ctypes.Structure):
    _fields_ = [
        *(
            (name, _PTR)
            for name in (
                "tokens",
                "input",
                "rows",
                "starts",
                "last",
                "k",
                "v",
                "cos",
                "sin",
                "logits",
                "hidden",
                "taps",
                "tap_layers",
            )
        ),
        *(
            (name, _I64)
            for name in ("batch", "width", "slots", "length", "num_taps", "threads", "causal", "only_last", "kv_only")
        ),
        ("widths", _PTR),
        ("parts", _PTR),
        ("block", _I64),
        ("first", _I64),
    ]


# What ds_forward refuses: its result counts from 1.
_WRONG = ("rows", "starts", "widths", "last", "tokens")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _interleave(weight: Tensor, mlp: int) -> Tensor:
    """Rows [gate; up] -> 16 gates, their 16 ups, the next 16 gates, ..., each padded with zeros to `mlp` rows."""
    gate, up = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, mlp - part.shape[0])) for part in weight.chunk(2))
    return torch.stack((gate.unflatten(0, (-1, 16)), up.unflatten(0, (-1, 16))), dim=1).flatten(0, 2)


class FusedStack:
    """Layers + final norm + optional head over a static blocked cache. CPU, float32 or bf16, inference only.

    One forward at a time runs per stack (a lock in the native code); the tensors passed must be contiguous.

    For drafters: mask_token is what stands behind the first token of a block; context (weight [H, n*H], norm [H]) projects
    target states for write_states, rounded to the dtype before the norm.
    """

    def __init__(
        self,
        layers: list[LayerWeights],
        final_norm: Tensor,
        *,
        embedding: Tensor | None,
        head: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        attention_scale: float,
        eps: float,
        inv_freq: Tensor,
        rope_scale: float = 1.0,
        mask_token: int = 0,
        context: tuple[Tensor, Tensor] | None = None,
    ):
        weight = layers[0].qkv
        self.dtype, self.hidden_size, self.num_layers = weight.dtype, weight.shape[1], len(layers)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.vocab_size = 0 if head is None else head.shape[0]
        self._inv_freq, self._rope_scale = inv_freq.float().cpu(), rope_scale
        self._cos = self._sin = torch.empty(0, head_dim // 2)
        self._keep: list[Tensor] = []
        self._arena = Arena()
        mlp = -(-layers[0].down.shape[1] // 32) * 32
        self._layers = [self._layer(layer, mlp) for layer in layers]
        self._args = _ModelArgs(
            hidden=self.hidden_size,
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            mlp=mlp,
            vocab=self.vocab_size,
            layers=len(layers),
            eps=eps,
            scale=attention_scale,
            embedding=self._hold(embedding),
            head=None if head is None else self._hold(pack(head, self._arena)),
            final_norm=self._float(final_norm),
            words=0 if embedding is None else embedding.shape[0],
            mask_token=mask_token,
            context_width=0 if context is None else context[0].shape[1],
            context=None if context is None else self._hold(pack(context[0], self._arena)),
            context_norm=None if context is None else self._float(context[1]),
        )
        self._bytes = weight.element_size()
        self._lib = library()
        self._create()

    def _create(self) -> None:
        native = (_LayerArgs * len(self._layers))(*self._layers)
        self._model = self._lib.ds_model_new(self._bytes, ctypes.byref(self._args), native)
        weakref.finalize(self, self._lib.ds_model_free, self._bytes, self._model)

    def subset(self, layers: list[int]) -> FusedStack:
        """A stack of only these layers that shares this one's packed weights. Its caches are its own."""
        other = copy.copy(self)
        other.num_layers, other._layers = len(layers), [self._layers[i] for i in layers]
        other._args = _ModelArgs.from_buffer_copy(self._args)
        other._args.layers = len(layers)
        other._create()
        return other

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._hold(tensor.detach().float())

    def _layer(self, w: LayerWeights, mlp: int) -> _LayerArgs:
        bias = None if w.gate_up_bias is None else _interleave(w.gate_up_bias, mlp)
        return _LayerArgs(
            qkv=self._hold(pack(w.qkv, self._arena)),
            out=self._hold(pack(w.out, self._arena)),
            gate_up=self._hold(pack(_interleave(w.gate_up, mlp), self._arena)),
            down=self._hold(pack(F.pad(w.down, (0, mlp - w.down.shape[1])), self._arena)),
            qkv_bias=self._float(w.qkv_bias),
            out_bias=self._float(w.out_bias),
            gate_up_bias=self._float(bias),
            down_bias=self._float(w.down_bias),
            input_norm=self._float(w.input_norm),
            post_norm=self._float(w.post_norm),
            q_norm=self._float(w.q_norm),
            k_norm=self._float(w.k_norm),
            window=w.window or 0,
        )

    def new_cache(self, slots: int, max_context: int) -> KVCache:
        """A blocked cache for this stack; also extends the rotary table to its length."""
        cache = KVCache.allocate(
            layers=self.num_layers,
            slots=slots,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_context=max_context,
            dtype=self.dtype,
            layout="blocked",
            zeros=zeros,
        )
        if cache.length > self._cos.shape[0]:
            angles = torch.arange(cache.length).float()[:, None] * self._inv_freq
            self._cos, self._sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        return cache

    def forward(
        self,
        source: Tensor,
        cache: KVCache,
        rows: Tensor,
        starts: Tensor,
        *,
        logits: str = "none",
        last: Tensor | None = None,
        tap_layers: Tensor | None = None,
        hidden: bool = False,
        causal: bool = True,
        widths: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """source: tokens int64 [B,W], or states [B,W,H] in the stack's dtype; rows, starts, last: int64 [B].

        Returns (logits float32 [B,W,V] | [B,1,V] | None, taps [B,W,n*H] | None, states after the final norm [B,W,H] | None).
        causal=False: the W new tokens of a row all see each other (and everything before them): a draft block.
        widths[b] in 1 .. W: row b has that many entries, the rest of it costs nothing, writes no keys and values, and its
        outputs are uninitialised memory. The live outputs are those of each row run alone at its own width.
        """
        batch, width = source.shape[:2]
        shape = {"none": None, "last": (batch, 1, self.vocab_size), "all": (batch, width, self.vocab_size)}[logits]
        scores = None if shape is None else torch.empty(shape)
        count = 0 if tap_layers is None else len(tap_layers)
        taps = torch.empty(batch, width, count * self.hidden_size, dtype=self.dtype) if count else None
        states = torch.empty(batch, width, self.hidden_size, dtype=self.dtype) if hidden else None
        self._run(
            source,
            cache,
            rows,
            starts,
            last=last,
            logits=scores,
            taps=taps,
            hidden=states,
            tap_layers=tap_layers,
            causal=causal,
            only_last=logits == "last",
            widths=widths,
        )
        return scores, taps, states

    def write_context(
        self, features: Tensor, cache: KVCache, rows: Tensor, starts: Tensor, *, widths: Sequence[int] | None = None
    ) -> None:
        """Keys and values of features [B,W,H] (already normed) in every layer, at starts[b] .. starts[b] + widths[b] - 1.

        widths: see forward; None: all W.
        """
        self._run(features, cache, rows, starts, kv_only=True, widths=widths)

    def context_call(self, cache: KVCache) -> ContextCall:
        """A prepared projection of target states that writes their keys and values in every layer."""
        return ContextCall(self, cache)

    def block_call(self, cache: KVCache, batch: int, width: int, first: int, logits: Tensor, hidden: Tensor) -> BlockCall:
        """A prepared non-causal forward of `batch` blocks: a token and width - 1 masks each, into the two tensors.

        logits float32 [B, W - first, V], of entries >= first alone; hidden [B, W, H] after the final norm.
        """
        return BlockCall(self, cache, batch, width, first, logits, hidden)

    def _over(self, cache: KVCache, **values: int | None) -> _ForwardArgs:
        """Arguments with everything that follows from the cache."""
        assert cache.layout == "blocked" and cache.k.dtype == self.dtype and cache.length <= self._cos.shape[0]
        return _ForwardArgs(
            k=_pointer(cache.k),
            v=_pointer(cache.v),
            cos=_pointer(self._cos),
            sin=_pointer(self._sin),
            slots=cache.slots,
            length=cache.length,
            threads=torch.get_num_threads(),
            **values,
        )

    def _call(self, args: _ForwardArgs) -> None:
        wrong = self._lib.ds_forward(self._bytes, self._model, ctypes.byref(args))
        assert not wrong, f"{_WRONG[wrong - 1]} out of range"

    def _run(
        self,
        source: Tensor,
        cache: KVCache,
        rows: Tensor,
        starts: Tensor,
        *,
        last: Tensor | None = None,
        logits: Tensor | None = None,
        taps: Tensor | None = None,
        hidden: Tensor | None = None,
        tap_layers: Tensor | None = None,
        causal: bool = True,
        only_last: bool = False,
        kv_only: bool = False,
        widths: Sequence[int] | None = None,
    ) -> None:
        tokens = source.dtype == torch.int64
        assert tokens or (source.dtype == self.dtype and source.shape[-1] == self.hidden_size)
        source, (batch, width) = source.contiguous(), source.shape[:2]
        live = None if widths is None else torch.tensor(list(widths), dtype=torch.int64)
        index = [None if t is None else t.to(torch.int64).contiguous() for t in (rows, starts, last, tap_layers)]
        if batch == 0 or width == 0:
            return
        # the native code trusts the lengths and checks the values
        assert index[0] is not None and index[1] is not None and len(index[0]) == len(index[1]) == batch
        assert (live is None or len(live) == batch) and (index[2] is None or len(index[2]) == batch)
        args = self._over(
            cache,
            tokens=_pointer(source) if tokens else None,
            input=None if tokens else _pointer(source),
            rows=_pointer(index[0]),
            starts=_pointer(index[1]),
            last=_pointer(index[2]),
            logits=_pointer(logits),
            hidden=_pointer(hidden),
            taps=_pointer(taps),
            tap_layers=_pointer(index[3]),
            batch=batch,
            width=width,
            num_taps=0 if index[3] is None else len(index[3]),
            causal=int(causal),
            only_last=int(only_last),
            kv_only=int(kv_only),
            widths=_pointer(live),
        )
        self._call(args)


class ContextCall:
    """See FusedStack.context_call. What it needs but its inputs is set up once, see BlockCall."""

    def __init__(self, stack: FusedStack, cache: KVCache) -> None:
        assert stack._args.context
        self._stack, self._keep = stack, (cache, stack._cos, stack._sin)
        self._args = stack._over(cache, kv_only=1)

    def __call__(self, parts: Sequence[int], widths: Sequence[int], rows: Sequence[int], starts: Sequence[int]) -> None:
        """parts: addresses of dense states [widths[b], n*H] in the stack's dtype, which the caller keeps alive.

        They go to positions starts[b] .. starts[b] + widths[b] - 1 of slot rows[b]; a slot may occur several times.
        """
        count, args = len(parts), self._args
        assert count == len(widths) == len(rows) == len(starts)
        if not count:
            return
        numbers, addresses = (_I64 * (3 * count))(*rows, *starts, *widths), (_PTR * count)(*parts)
        at = ctypes.addressof(numbers)
        args.rows, args.starts, args.widths, args.parts = at, at + 8 * count, at + 16 * count, ctypes.addressof(addresses)
        args.batch, args.width, args.threads = count, max(widths), torch.get_num_threads()
        self._stack._call(args)


class BlockCall:
    """See FusedStack.block_call. What it needs but its inputs is set up once: at batch 1 that costs as much as a layer."""

    def __init__(
        self, stack: FusedStack, cache: KVCache, batch: int, width: int, first: int, logits: Tensor, hidden: Tensor
    ) -> None:
        assert 0 <= first < width and logits.shape == (batch, width - first, stack.vocab_size) and logits.is_contiguous()
        assert hidden.shape == (batch, width, stack.hidden_size) and hidden.is_contiguous() and hidden.dtype == stack.dtype
        self.logits, self.hidden = logits, hidden
        self._stack, self._rows = stack, (_I64 * batch)()
        self._keep = (cache, stack._cos, stack._sin)  # what the arguments point into
        self._args = stack._over(cache, batch=batch, width=width, first=first, block=1)
        self._args.logits, self._args.hidden = logits.data_ptr(), hidden.data_ptr()
        self._args.rows = ctypes.addressof(self._rows)

    def __call__(self, rows: Sequence[int], tokens: Tensor, starts: Tensor) -> None:
        """tokens, starts int64 [B]: the first token of each block and its position."""
        assert tokens.shape == starts.shape == (len(rows),) and tokens.dtype == starts.dtype == torch.int64
        tokens, starts = tokens.contiguous(), starts.contiguous()
        self._rows[:] = list(rows)
        self._args.tokens, self._args.starts = tokens.data_ptr(), starts.data_ptr()
        self._args.threads = torch.get_num_threads()
        self._stack._call(self._args)
