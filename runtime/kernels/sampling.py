"""Laws, draws and the verification rules as native calls (sampling.cpp, verify.cpp): CPU, float32.

What is computed is defined by the PyTorch code of runtime/sampling.py and runtime/verify.py; these functions return the same
up to rounding. The bits of a row depend on that row alone. They take what `usable` admits and check nothing more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .build import available, library
from .linear import PackedLinear

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class _DrawArgs(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in ("probs", "u", "out")),
        *((name, _I64) for name in ("rows", "stride", "vocab", "threads")),
    ]


class _LawArgs(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in ("logits", "probs", "temperature", "top_p", "top_k", "widths", "u", "tokens")),
        *((name, _I64) for name in ("batch", "width", "vocab", "row_stride", "slot_stride", "out_row", "out_slot")),
        *((name, _I64) for name in ("threads", "best")),
        ("bias", _PTR),
        ("bias_stride", _I64),
        ("token_stride", _I64),
    ]


class _ChainArgs(ctypes.Structure):
    _fields_ = [
        ("law", _LawArgs),
        *((name, _PTR) for name in ("w1", "w2", "anchors", "draft_ids", "base")),
        *((name, _I64) for name in ("base_slot", "slots", "rank", "words", "bytes")),
        *((name, _PTR) for name in ("survival", "hidden", "weight", "table")),
        *((name, _I64) for name in ("hidden_row", "hidden_slot", "size", "entries")),
        ("prefix", _PTR),
        ("maps", _PTR),
    ]


class _MapArgs(ctypes.Structure):
    _fields_ = [(name, _PTR) for name in ("slope", "offset", "x", "y", "knots")]


class _VerifyArgs(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in ("p", "q", "tokens", "lengths", "draft_ids", "p_rows", "uniforms", "emit")),
        *((name, _PTR) for name in ("accepted", "next", "residual", "thresholds", "reach")),
        *((name, _I64) for name in ("p_stride", "p_slot", "q_stride", "q_slot")),
        *((name, _I64) for name in ("batch", "slots", "vocab", "columns", "block", "threads")),
    ]


def usable(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the native calls can take these tensors: on the CPU, of one of `dtypes`, no gradient asked, kernels there."""
    for tensor in tensors:
        if tensor is not None and (tensor.device.type != "cpu" or tensor.dtype not in dtypes or tensor.requires_grad):
            return False
    return available()


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with its last axis dense; the other strides are passed on."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _widths(widths: Sequence[int] | None) -> ctypes.Array[ctypes.c_int64] | None:
    return None if widths is None else (_I64 * len(widths))(*widths)


def argmax(logits: Tensor, widths: Sequence[int] | None = None) -> Tensor:
    """First largest entry: [B,K,V] float32 or bf16 -> int64 [B,K]. Positions at or after widths[b] are skipped and hold 0."""
    logits, live = _rows(logits), _widths(widths)
    batch, width, vocab = logits.shape
    out = torch.empty(batch, width, dtype=torch.int64)
    if out.numel():
        args = _LawArgs(
            logits=logits.data_ptr(), widths=ctypes.addressof(live) if live else None, tokens=out.data_ptr(), batch=batch,
            width=width, vocab=vocab, row_stride=logits.stride(0), slot_stride=logits.stride(1),
            threads=torch.get_num_threads(), best=1, token_stride=width,
        )  # fmt: skip
        library().ds_law(logits.element_size(), ctypes.byref(args))
    return out


def law(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    widths: Sequence[int] | None = None,
    u: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The laws float32 [B,K,V] of logits [B,K,V] (float32 or bf16), and with u [B,K] one token drawn from each, int64 [B,K].

    Settings per row, [B], as in sampling.probabilities; None: off. Positions at or after widths[b] are not written. out: where
    the laws go (any strides but along V), None: a new tensor.
    """
    logits, live = _rows(logits), _widths(widths)
    batch, width, vocab = logits.shape
    probs = torch.empty(batch, width, vocab, dtype=torch.float32) if out is None else out
    assert probs.shape == logits.shape and probs.dtype == torch.float32 and (vocab == 1 or probs.stride(2) == 1)
    tokens = None if u is None else torch.empty(batch, width, dtype=torch.int64)
    temperature = temperature.contiguous()
    top_k, top_p, u = (None if t is None else t.contiguous() for t in (top_k, top_p, u))
    if probs.numel():
        args = _LawArgs(
            logits=logits.data_ptr(), probs=probs.data_ptr(), temperature=temperature.data_ptr(), top_p=_pointer(top_p),
            top_k=_pointer(top_k), widths=ctypes.addressof(live) if live else None, u=_pointer(u), tokens=_pointer(tokens),
            batch=batch, width=width, vocab=vocab, row_stride=logits.stride(0), slot_stride=logits.stride(1),
            out_row=probs.stride(0), out_slot=probs.stride(1), threads=torch.get_num_threads(), best=0,
            token_stride=width,
        )  # fmt: skip
        library().ds_law(logits.element_size(), ctypes.byref(args))
    return probs, tokens


class SurvivalMap:
    """One fitted setting of a calibration (runtime/calibration.py), as the chain applies it.

    slope, offset [G]; knots: (x, y) of each slot, or None.
    """

    def __init__(
        self,
        slope: Sequence[float],
        offset: Sequence[float],
        knots: Sequence[tuple[Sequence[float], Sequence[float]]] | None = None,
    ) -> None:
        self.slots = len(slope)
        assert len(offset) == self.slots and (knots is None or len(knots) == self.slots)
        values, ends = [*slope, *offset], [0]
        for x, _ in knots or ():
            ends.append(ends[-1] + len(x))
            values += x
        for _, y in knots or ():
            values += y
        self._values, self._ends = (ctypes.c_double * len(values))(*values), (_I64 * len(ends))(*ends)
        at = [ctypes.addressof(self._values) + 8 * skip for skip in (0, self.slots, 2 * self.slots, 2 * self.slots + ends[-1])]
        self._args = _MapArgs(*at, None if knots is None else ctypes.addressof(self._ends))
        self.address = ctypes.addressof(self._args)


class Chain:
    """The serial chain of a vanilla correction head (models/heads.py), with the survival head, in one call.

    w1 [V,r], w2 [Vd,r]: the head's tables in one dtype, float32 or bf16; draft_ids int64 [Vd]: target id of each column (None:
    Vd = V). survival: (weight float32 [H], table float32 [V] or [1]): z_k = h_k . weight + table[token before slot k], a table
    of one entry being a bias. One call at a time.
    """

    def __init__(
        self, w1: Tensor, w2: Tensor, draft_ids: Tensor | None = None, survival: tuple[Tensor, Tensor] | None = None
    ) -> None:
        assert w1.dtype == w2.dtype and w1.shape[1] == w2.shape[1]
        assert len(w2) == len(w1 if draft_ids is None else draft_ids)
        self._w1, self._w2 = w1.detach().contiguous(), PackedLinear(w2)
        self._ids = None if draft_ids is None else draft_ids.contiguous()
        self._survival = None if survival is None else tuple(t.detach().float().contiguous() for t in survival)
        self._vocab, size = self._w2.out_features, self._w1.element_size()
        self._args = args = _ChainArgs(
            w1=self._w1.data_ptr(), w2=self._w2.packed.data_ptr(), draft_ids=_pointer(self._ids), rank=w1.shape[1],
            words=len(w1), bytes=size, law=_LawArgs(width=1, vocab=self._vocab, row_stride=self._vocab),
        )  # fmt: skip
        self._law, self._run = args.law, library().ds_chain
        self._law.slot_stride = self._law.out_slot = self._vocab
        if self._survival is not None:
            weight, table = self._survival
            assert len(table) in (1, len(w1)), (len(table), len(w1))
            args.weight, args.table, args.size, args.entries = weight.data_ptr(), table.data_ptr(), len(weight), len(table)

    def __call__(
        self,
        anchors: Tensor,
        base: Tensor,
        settings: tuple[Tensor, Tensor | None, Tensor | None],
        u: Tensor | None,
        hidden: Tensor | None = None,
        maps: Sequence[SurvivalMap] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """anchors int64 [B]; base float32 [B,G,Vd]: logits without the head; settings: temperature, top_k, top_p of the rows;
        u [B,G], or None for the arg-max; hidden [B,G,H] in the head's dtype where survivals are wanted, maps: calibration of
        each row (None: none).

        Returns target ids int64 [B,G]; the laws float32 [B,G,Vd] they were drawn from (None for the arg-max); survival logits z
        and the survival of every prefix, float32 [B,G], or None. The same bits as w2, add, `law` slot after slot.
        """
        base, (batch, slots, vocab) = _rows(base), base.shape
        assert base.dtype == torch.float32 and vocab == self._vocab and anchors.shape == (batch,)
        tokens = torch.empty(batch, slots, dtype=torch.int64)
        args, law, laws, logits, prefix = self._args, self._law, None, None, None
        keep = [anchors := anchors.contiguous()]
        if u is None:
            law.best, law.probs, law.u = 1, None, None
        else:
            laws = torch.empty(batch, slots, vocab)
            keep += [t if t is None else t.contiguous() for t in (*settings, u)]
            law.best, law.probs, law.out_row = 0, laws.data_ptr(), slots * vocab
            law.temperature, law.top_k, law.top_p, law.u = (_pointer(t) for t in keep[1:])
        args.survival = args.prefix = None
        if hidden is not None:
            hidden = _rows(hidden)
            assert self._survival is not None and hidden.dtype == self._w1.dtype and hidden.shape == (batch, slots, args.size)
            logits, prefix = torch.empty(batch, slots), torch.empty(batch, slots)
            args.survival, args.prefix, args.hidden = logits.data_ptr(), prefix.data_ptr(), hidden.data_ptr()
            args.hidden_row, args.hidden_slot, _ = hidden.stride()
            assert maps is None or len(maps) == batch and all(slots <= row.slots for row in maps)
            addresses = None if maps is None else (_PTR * batch)(*[row.address for row in maps])
            args.maps = None if addresses is None else ctypes.addressof(addresses)
        law.bias_stride, args.base_slot, _ = base.stride()
        args.anchors, args.base, args.slots = anchors.data_ptr(), base.data_ptr(), slots
        law.tokens, law.token_stride, law.batch, law.threads = tokens.data_ptr(), slots, batch, torch.get_num_threads()
        if batch and slots and self._run(ctypes.byref(args)):
            raise IndexError(f"anchors: not below the vocabulary of {args.words}")
        return tokens, laws, logits, prefix


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: probs float32 [..., V], u float32 [...] -> int64 [...]."""
    rows = _rows(probs.reshape(-1, probs.shape[-1]))
    u = u.reshape(-1).contiguous()
    out = torch.empty(u.shape, dtype=torch.int64)
    if out.numel():
        args = _DrawArgs(
            probs=rows.data_ptr(), u=u.data_ptr(), out=out.data_ptr(), rows=len(rows), stride=rows.stride(0),
            vocab=rows.shape[1], threads=torch.get_num_threads(),
        )  # fmt: skip
        library().ds_draw(ctypes.byref(args))
    return out.view(probs.shape[:-1])


def verify(
    block: bool,
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    draft_ids: Tensor | None,
    *,
    uniforms: Tensor | None = None,
    emit: Tensor | None = None,
    rows: Tensor | None = None,
    accepted: Tensor | None = None,
    following: Tensor | None = None,
    residual: Tensor | None = None,
    thresholds: Tensor | None = None,
    reach: Tensor | None = None,
) -> None:
    """One call for both rules (`block` or token-wise); arguments as in runtime/verify.py, rows int64 [B]: rows of p in use.

    Writes the outputs that are given: accepted, following int64 [B] (following needs emit [B]), residual [B,V], thresholds
    [B,G], reach [B,G+1]. Raises IndexError for a live draft that is not a target id.
    """
    batch, slots = tokens.shape
    p, q = _rows(p), None if q is None else _rows(q)
    tokens, lengths = tokens.contiguous(), lengths.contiguous()
    draft_ids, uniforms, emit, rows = (None if t is None else t.contiguous() for t in (draft_ids, uniforms, emit, rows))
    args = _VerifyArgs(
        p=p.data_ptr(), q=_pointer(q), tokens=tokens.data_ptr(), lengths=lengths.data_ptr(), draft_ids=_pointer(draft_ids),
        p_rows=_pointer(rows), uniforms=_pointer(uniforms), emit=_pointer(emit), accepted=_pointer(accepted),
        next=_pointer(following), residual=_pointer(residual), thresholds=_pointer(thresholds), reach=_pointer(reach),
        p_stride=p.stride(0), p_slot=p.stride(1), q_stride=0 if q is None else q.stride(0),
        q_slot=0 if q is None else q.stride(1), batch=batch, slots=slots, vocab=p.shape[2],
        columns=0 if draft_ids is None else len(draft_ids), block=int(block), threads=torch.get_num_threads(),
    )  # fmt: skip
    if batch and library().ds_verify(ctypes.byref(args)):
        raise IndexError(f"tokens: a live draft is not below the vocabulary of {p.shape[2]}")


def greedy(best: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rule at temperature 0, see verify.greedy."""
    best, tokens, lengths = best.contiguous(), tokens.contiguous(), lengths.contiguous()
    out = torch.empty(2, len(tokens), dtype=torch.int64)
    library().ds_greedy(
        best.data_ptr(), tokens.data_ptr(), lengths.data_ptr(), *tokens.shape, out[0].data_ptr(), out[1].data_ptr()
    )
    return out[0], out[1]


def uniforms(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """The same bits as random.uniforms: int64 [B], int64 [B] -> float32 [B,count]."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(len(seeds), count, dtype=torch.float32)
    library().ds_uniforms(seeds.data_ptr(), positions.data_ptr(), len(seeds), count, stream, out.data_ptr())
    return out
