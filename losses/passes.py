"""How the passes over a chunk's rows run: native code on a CPU, compiled by torch on CUDA, else plain tensor code in tiles.

All three compute the functions of `rows.py`. Shapes as there.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import native
from .rows import LOG_SPACE, Law, Sums, gradient, law_rows, statistics
from .terms import RowStats

_TENSOR_CODE_ONLY = {"reverse_kl", "js", "renyi"}
_TINY = 1e-30  # below, sums of float32 probabilities lose digits to underflow


def tile_rows(device: torch.device, row_bytes: int) -> int:
    """Rows of a tile of plain tensor code. On a CPU its temporaries should stay in the second-level caches: passes over
    larger tiles took 1.5 to 2.5 times as long per entry."""
    size = (384 << 10) * torch.get_num_threads() if device.type == "cpu" else 64 << 20
    return max(1, size // max(1, row_bytes))


@cache
def compiled() -> tuple[Any, Any, Any] | None:
    """`law_rows`, `statistics` and `gradient` as a few kernels each, for any number of rows; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    law, sums, slope = (torch.compile(f, dynamic=True, fullgraph=True) for f in (law_rows, statistics, gradient))
    return law, sums, slope


class Passes:
    """The passes of one call of the objective. names: the optional fields of `RowStats` that are wanted."""

    def __init__(self, names: set[str], logits: Tensor) -> None:
        self.names = tuple(sorted(names))
        self.log_space = any(name in LOG_SPACE for name in names)
        self.native = names.isdisjoint(_TENSOR_CODE_ONLY) and native.usable(logits)
        self.functions = (compiled() if logits.device.type == "cuda" else None) or (law_rows, statistics, gradient)
        self.whole = self.functions[0] is not law_rows

    def _tiles(self, count: int, x: Tensor) -> list[slice]:
        size = count if self.whole else tile_rows(x.device, x.shape[1] * x.element_size())
        return [slice(lo, min(lo + size, count)) for lo in range(0, count, max(1, size))]

    def law(self, *, logits: Tensor, p: Tensor, draft_ids: Tensor | None, lse: Tensor | None, top: Tensor | None) -> Law:
        """p of a chunk's text positions from the target's logits, written into `p` [U, Vd].

        logits: [U, V], or the draft columns [U, Vd] if `lse` [U] (of the full softmax) is given. draft_ids: int64 [Vd]
        or None. top: int64 [U] arg-max ids or None to find them.
        """
        count, find = len(logits), lse is None and top is None
        normaliser, mass, cross_sum = (torch.empty(count, dtype=p.dtype, device=p.device) for _ in range(3))
        if find:
            top = torch.empty(count, dtype=torch.int64, device=p.device)
        select = draft_ids if lse is None else None
        kept = (logits if select is None else logits[:, select]) if self.log_space else None
        found = Law(p, normaliser, mass, cross_sum, top, kept)
        if self.native:
            given = None if lse is None else lse.to(p.dtype).contiguous()
            cross = found.cross if "kl" in self.names else None
            native.law(
                logits=logits, ids=select, given=given, p=p, lse=found.lse, mass=found.mass, cross=cross,
                top=top if find else None,
            )  # fmt: skip
            return found
        for span in self._tiles(count, logits):
            given = None if lse is None else lse[span].to(p.dtype)
            values = self.functions[0](logits=logits[span], ids=select, lse=given, dtype=p.dtype)
            for name in ("p", "lse", "mass", "cross", *(["top"] if find else [])):
                getattr(found, name)[span] = values[name]
        return found

    def rows(
        self, *, z: Tensor, law: Law, local: Tensor, sums: Sums, into: RowStats, columns: Tensor, measure: bool,
        weights: dict[str, Tensor] | None = None, scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Over draft logits z [n, Vd]: fills `sums` and the statistics of `into` that take a pass if `measure`, else reads
        them; with `scale` and `weights` (see `rows.gradient`) then writes dz over z. `law` as of `Law.of_rows`."""
        if self.native:
            self._native_rows(z, law, local, sums, into, columns, measure, weights, scale)
        else:
            self._tensor_rows(slice(None), z, law, local, sums, into, columns, measure, weights, scale)

    def _native_rows(
        self, z: Tensor, law: Law, local: Tensor, sums: Sums, into: RowStats, columns: Tensor, measure: bool,
        weights: dict[str, Tensor] | None, scale: Tensor | None,
    ) -> None:  # fmt: skip
        cross = sums.cross if "kl" in self.names else None
        fixed = {
            "z": z, "p": law.p, "local": local, "order": local.argsort(), "column": columns, "best": sums.best,
            "sums": (sums.highest, sums.total, cross, into.alpha, sums.below),
        }  # fmt: skip
        if into.log_alpha is None:
            native.rows(**fixed, statistics=measure, scale=scale, weights=weights)
            return
        # log alpha by way of alpha, and in log space for the rows where that underflows
        if measure:
            native.rows(**fixed, statistics=True)
            torch.log(into.alpha, out=into.log_alpha)
        lost = (into.alpha < _TINY).nonzero().squeeze(-1)
        rest = (law, local, sums, into, columns)
        if measure and len(lost):
            self._tensor_rows(lost, z, *rest, True, None, None)
        if scale is not None and weights is not None:
            kept = z[lost]
            direct, by_log = weights.get("alpha", torch.zeros_like(scale)), weights.get("log_alpha")
            whole = weights if by_log is None else {**weights, "alpha": direct + by_log / into.alpha.clamp(min=_TINY)}
            native.rows(**fixed, statistics=False, scale=scale, weights=whole)
            if len(lost):
                z[lost] = kept
                self._tensor_rows(lost, z, *rest, False, weights, scale)

    def _tensor_rows(
        self, which: slice | Tensor, z: Tensor, law: Law, local: Tensor, sums: Sums, into: RowStats, columns: Tensor,
        measure: bool, weights: dict[str, Tensor] | None, scale: Tensor | None,
    ) -> None:  # fmt: skip
        """`which`: every row, or the int64 numbers of few."""
        wanted = {**{n: getattr(sums, n) for n in ("highest", "best", "total", "below", "cross")}, "alpha": into.alpha}
        wanted |= {name: getattr(into, name) for name in self.names if name in LOG_SPACE}
        for span in self._tiles(len(z), law.p) if isinstance(which, slice) else [which]:
            shared = {"z": z[span], "p": law.p, "local": local[span], "logits": law.logits, "lse": law.lse[span]}
            if measure:
                for name, value in self.functions[1](**shared, names=self.names).items():
                    wanted[name][span] = value
            if scale is not None and weights is not None:
                z[span] = self.functions[2](
                    **shared, sums={k: v[span] for k, v in wanted.items()}, weights={k: v[span] for k, v in weights.items()},
                    scale=scale[span], columns=columns[span],
                )  # fmt: skip
