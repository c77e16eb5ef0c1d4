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
    ]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _interleave(weight: Tensor, mlp: int) -> Tensor:
    """Rows [gate; up] -> 16 gates, their 16 ups, the next 16 gates, ..., each padded with zeros to `mlp` rows."""
    gate, up = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, mlp - part.shape[0])) for part in weight.chunk(2))
    return torch.stack((gate.unflatten(0, (-1, 16)), up.unflatten(0, (-1, 16))), dim=1).flatten(0, 2)


class FusedStack:
    """Layers + final norm + optional head over a static blocked cache. CPU, float32 or bf16, inference only.

    One forward at a time runs per stack (a lock in the native code); the tensors passed must be contiguous.
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
        assert cache.layout == "blocked" and cache.k.dtype == self.dtype and cache.length <= self._cos.shape[0]
        tokens = source.dtype == torch.int64
        assert tokens or (source.dtype == self.dtype and source.shape[-1] == self.hidden_size)
        source, (batch, width) = source.contiguous(), source.shape[:2]
        live = None if widths is None else torch.tensor(list(widths), dtype=torch.int64)
        index = [None if t is None else t.to(torch.int64).contiguous() for t in (rows, starts, last, tap_layers)]
        if batch == 0 or width == 0:
            return
        # the native code trusts these
        assert index[0] is not None and int(index[0].min()) >= 0 and int(index[0].max()) < cache.slots
        assert index[1] is not None and int(index[1].min()) >= 0 and len(index[0]) == len(index[1]) == batch
        assert live is None or len(live) == batch and int(live.min()) >= 1 and int(live.max()) <= width
        assert index[2] is None or bool((index[2] < (width if live is None else live)).all())
        args = _ForwardArgs(
            tokens=_pointer(source) if tokens else None,
            input=None if tokens else _pointer(source),
            rows=_pointer(index[0]),
            starts=_pointer(index[1]),
            last=_pointer(index[2]),
            k=_pointer(cache.k),
            v=_pointer(cache.v),
            cos=_pointer(self._cos),
            sin=_pointer(self._sin),
            logits=_pointer(logits),
            hidden=_pointer(hidden),
            taps=_pointer(taps),
            tap_layers=_pointer(index[3]),
            batch=batch,
            width=width,
            slots=cache.slots,
            length=cache.length,
            num_taps=0 if index[3] is None else len(index[3]),
            threads=torch.get_num_threads(),
            causal=int(causal),
            only_last=int(only_last),
            kv_only=int(kv_only),
            widths=_pointer(live),
        )
        self._lib.ds_forward(self._bytes, self._model, ctypes.byref(args))
