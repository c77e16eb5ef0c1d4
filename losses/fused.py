"""The objective in one chunked pass: same signature, value and gradient as `objective.py`, none of its memory.

For a chunk of whole blocks, sorted by position so that neighbours share teacher positions: the target's logits
once per text position, the draft logits [rows, Vd], then row by row the softmax of q, the statistics and the
gradient of the logits, written over the logits (`passes.py`: native code on a CPU, compiled on CUDA); then the
products that carry it to `hidden`, `correction` and `w2`. Every term's gradient with respect to the draft logits z
is, for each row,

    dz = q * A  -  q 1[q <= p] * B  -  p * C  -  onehot(y) * E   (+ the rarer terms),   sum over dz = 0,

with row coefficients dL/d(statistic) that `terms.py` yields by differentiating its [A, G]-sized algebra: known
beforehand if the loss is linear in the statistics, else taken chunk by chunk (a chunk holds whole blocks). So
nothing is recomputed in backward and no [A, G, V] tensor exists. Shape legend in `objective.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import ObjectiveConfig
from .inputs import Inputs, reduction_dtype, target_rows
from .memory import fresh, room
from .passes import Passes
from .reduce import denominators as local_denominators
from .reduce import unpack
from .rows import Law, Sums, finish_statistics, gradient_scale
from .terms import ObjectiveStats, RowStats, finish, is_linear, needed, weighted_loss, weighted_terms


def objective(
    *,
    cfg: ObjectiveConfig,
    hidden: Tensor,
    lm_head: Tensor,
    target_hidden: Tensor,
    target_index: Tensor,
    target_head: Tensor,
    labels: Tensor,
    valid: Tensor,
    correction: Tensor | None = None,
    w2: Tensor | None = None,
    draft_ids: Tensor | None = None,
    survival_logits: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int = 512 << 20,
    denominators: Tensor | None = None,
    target_lse: Tensor | None = None,
    target_top: Tensor | None = None,
) -> tuple[Tensor, ObjectiveStats]:
    """As `objective.objective`, argument by argument. The gradient reaches `hidden`, `correction`, `w2` and
    `survival_logits` and is computed in the forward pass (so it cannot be differentiated again). Matrix
    products run in the dtype of `hidden`, reductions in float32. `chunk_bytes` bounds the working buffers;
    a chunk is at least one block. Text positions at the border of two chunks are computed in both.
    """
    batch = Inputs(
        cfg=cfg, hidden=hidden, lm_head=lm_head, target_hidden=target_hidden, target_index=target_index,
        target_head=target_head, labels=labels, valid=valid, correction=correction, w2=w2, draft_ids=draft_ids,
        survival_logits=survival_logits, target_lse=target_lse, target_top=target_top,
    )  # fmt: skip
    if denominators is None:
        denominators = local_denominators(cfg, valid)
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, correction, w2, survival_logits)
    )
    box: list[ObjectiveStats] = []
    loss = _Fused.apply(hidden, correction, w2, survival_logits, batch, softcap, chunk_bytes, denominators, wants, box)
    return loss, box[0]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        correction: Tensor | None,
        w2: Tensor | None,
        survival_logits: Tensor | None,
        batch: Inputs,
        softcap: float | None,
        chunk_bytes: int,
        totals: Tensor,
        wants: bool,
        box: list[ObjectiveStats],
    ) -> Tensor:
        # The survival loss sees the rows' statistics as constants: alone, it needs no gradient of the logits.
        rows_want = wants and any(term != "survival" for term in batch.cfg.active)
        work = _Pass(batch, softcap=softcap, chunk_bytes=chunk_bytes, totals=totals, wants=rows_want)
        rows = work.run()
        loss, stats, d_survival = _finish_with_gradient(batch, rows, survival_logits if wants else None, totals)
        box.append(stats)
        ctx.save_for_backward(*work.gradients(), d_survival)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if g is None or not need else g * grad.to(g.dtype) for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad)
        ]
        return (*scaled, *([None] * 6))


def _finish_with_gradient(
    batch: Inputs, rows: RowStats, survival: Tensor | None, totals: Tensor
) -> tuple[Tensor, ObjectiveStats, Tensor | None]:
    """Loss, metrics, and the gradient of the survival logits (they meet the rest only in [A, G] algebra)."""
    if survival is None or batch.cfg.survival == 0:
        loss, stats = finish(batch.cfg, rows=rows, valid=batch.valid, survival_logits=batch.survival_logits, totals=totals)
        return loss, stats, None
    leaf = survival.detach().requires_grad_()
    with torch.enable_grad():
        loss, stats = finish(batch.cfg, rows=rows, valid=batch.valid, survival_logits=leaf, totals=totals)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), stats, gradient


@dataclass(frozen=True)
class _Chunk:
    """Packed rows [start, stop): the blocks [first, last) of the ordered ones, whole."""

    start: int
    stop: int
    first: int
    last: int


class _Pass:
    """Working state of one call. Packed rows: the valid slots, block after block, blocks ordered by teacher position."""

    def __init__(self, batch: Inputs, *, softcap: float | None, chunk_bytes: int, totals: Tensor, wants: bool) -> None:
        self.batch, self.softcap, self.wants, self.chunk_bytes = batch, softcap, wants, chunk_bytes
        self.dtype, self.device = reduction_dtype(batch.hidden), batch.hidden.device
        self.totals = totals.to(self.device, self.dtype)
        first = torch.where(batch.valid[:, 0], batch.target_index[:, 0], torch.iinfo(torch.int64).max)
        self.order = first.argsort(stable=True)
        self.valid = batch.valid[self.order]
        places = torch.arange(batch.valid.numel(), device=self.device).view_as(batch.valid)
        self.places = places[self.order][self.valid]  # of the packed rows among the caller's slots
        self.labels, self.index = self._pack(batch.labels), self._pack(batch.target_index)
        self.columns = self.labels if batch.draft_ids is None else batch.columns[self.labels]
        self.states = [self._pack(batch.hidden)] + ([] if batch.correction is None else [self._pack(batch.correction)])
        self.heads = [batch.lm_head.detach()] + ([] if batch.w2 is None else [batch.w2.detach()])
        self.target_rows = batch.target_head.detach() if batch.target_lse is None else target_rows(batch).detach()
        self.d_states = [torch.empty_like(s) for s in self.states] if wants else []
        self.d_w2: Tensor | None = None
        self.names = needed(batch.cfg)
        self.passes = Passes(self.names, self.states[0])
        item = self.states[0].dtype
        self.logits, self.slope, self.target = (room(name, item, self.device) for name in ("logits", "slope", "target"))
        self.law, self.part = room("law", self.dtype, self.device), room("part", item, self.device)

    def _pack(self, x: Tensor) -> Tensor:
        return x.detach().flatten(0, 1)[self.places]

    def run(self) -> RowStats:
        """Every chunk; returns the statistics of all rows in the caller's block order."""
        cfg, total = self.batch.cfg, self.states[0].shape[0]
        packed = _empty_stats(total, self.names, self._knows_top(), self.dtype, self.device)
        known = None
        if self.wants and is_linear(cfg):
            known = self._coefficients(_blocks_of(packed, slice(0, total), self.valid), self.valid)
        for chunk in self._chunks():
            span = slice(chunk.start, chunk.stop)
            self._run_chunk(chunk, packed, None if known is None else {k: v[span] for k, v in known.items()})
        blocks, back = _blocks_of(packed, slice(0, total), self.valid), self.order.argsort()
        return _map(blocks, lambda t: t[back])

    def _run_chunk(self, chunk: _Chunk, packed: RowStats, weights: dict[str, Tensor] | None) -> None:
        """`weights`: dL/d(statistic) of the chunk's rows where they are known beforehand: one pass then does all."""
        span, ids = slice(chunk.start, chunk.stop), self.batch.draft_ids
        columns, labels, into = self.columns[span], self.labels[span], _map(packed, lambda t: t[span])
        law, local = self._target(span, packed)
        z = self._draft_logits(span)
        sums = Sums.allocate(z.gather(-1, columns.clamp(min=0)[:, None]).squeeze(-1).to(self.dtype))
        shared = {"z": z, "law": law, "local": local, "sums": sums, "into": into, "columns": columns}
        ending = {"sums": sums, "law": law, "columns": columns, "labels": labels, "draft_ids": ids, "into": into}
        if weights is not None:
            scale = gradient_scale(weights, mass=law.mass, columns=columns)
            self.passes.rows(**shared, measure=True, weights=weights, scale=scale)
            finish_statistics(**ending)
        else:
            self.passes.rows(**shared, measure=True)
            finish_statistics(**ending)
            if self.wants:
                valid = self.valid[chunk.first : chunk.last]
                weights = self._coefficients(_blocks_of(packed, span, valid), valid)
                scale = gradient_scale(weights, mass=law.mass, columns=columns)
                self.passes.rows(**shared, measure=False, weights=weights, scale=scale)
        if self.wants:
            self._backward(span, z)

    def _target(self, span: slice, packed: RowStats) -> tuple[Law, Tensor]:
        """The target's law at a chunk's text positions, each once, and each row's place in it; fills log p(y)."""
        batch = self.batch
        positions, local = self.index[span].unique(return_inverse=True)
        count, full = len(positions), len(self.target_rows)
        # The draft's logits come later: only a log-space term still needs the target's then.
        place = self.target if self.passes.log_space else self.logits
        states = batch.target_hidden.detach()[positions]
        logits = torch.mm(states, self.target_rows.T, out=place.take(count, full))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        lse = None if batch.target_lse is None else batch.target_lse[positions]
        top = None if batch.target_top is None else batch.target_top[positions]
        column = self.labels[span] if lse is None else self.columns[span]
        picked = logits[local, column.clamp(min=0)].to(self.dtype)
        p = self.law.take(count, len(self.heads[0]))
        law = self.passes.law(logits=logits, p=p, draft_ids=batch.draft_ids, lse=lse, top=top).of_rows(local)
        # With a given normaliser log p(y) outside the draft vocabulary is unknown, and multiplies q(y) = 0.
        packed.log_p_label[span] = torch.where(column >= 0, picked - law.lse, 0.0)
        return law, local

    def _draft_logits(self, span: slice) -> Tensor:
        x = self.states[0][span]
        out = torch.mm(x, self.heads[0].T, out=self.logits.take(len(x), len(self.heads[0])))
        if self.softcap is not None:
            out.div_(self.softcap).tanh_()
            if self.wants:
                torch.mul(out, out, out=self.slope.take(*out.shape)).neg_().add_(1.0)
            out.mul_(self.softcap)
        return out.addmm_(self.states[1][span], self.heads[1].T) if len(self.states) > 1 else out

    def _backward(self, span: slice, dz: Tensor) -> None:
        if len(self.states) > 1:
            self._add_to_w2(dz, self.states[1][span])
            torch.mm(dz, self.heads[1], out=self.d_states[1][span])
        if self.softcap is not None:
            dz.mul_(self.slope.take(*dz.shape))
        torch.mm(dz, self.heads[0], out=self.d_states[0][span])

    def _add_to_w2(self, dz: Tensor, source: Tensor) -> None:
        """d_w2 += dz^T source: a sum over chunks in the reduction dtype, one chunk's product as it is."""
        size, device = (dz.shape[1], source.shape[1]), dz.device
        if self.d_w2 is None:
            self.d_w2 = torch.mm(dz.T, source, out=fresh(size, dz.dtype, device))
        elif dz.dtype == self.dtype:
            self.d_w2.addmm_(dz.T, source)
        else:
            if self.d_w2.dtype != self.dtype:
                self.d_w2 = fresh(size, self.dtype, device).copy_(self.d_w2)
            self.d_w2 += torch.mm(dz.T, source, out=self.part.take(*size))

    def _coefficients(self, rows: RowStats, valid: Tensor) -> dict[str, Tensor]:
        """dL/d(statistic), packed: the loss's [A, G] algebra differentiated on its own."""
        cfg = self.batch.cfg
        terms = tuple(t for t in cfg.active if t != "survival")
        if not terms:
            return {}
        names = ["alpha", "log_q_label", *sorted(needed(cfg))]
        with torch.enable_grad():
            leaves = {n: getattr(rows, n).detach().requires_grad_() for n in names}
            sums = weighted_terms(cfg, rows=_replace(rows, leaves), valid=valid, survival_logits=None, terms=terms)
            found = torch.autograd.grad(weighted_loss(cfg, sums, self.totals), list(leaves.values()), allow_unused=True)
        return {n: g[valid] for n, g in zip(names, found) if g is not None}

    def _chunks(self) -> Iterator[_Chunk]:
        """Cuts the ordered blocks into chunks whose working memory fits the budget (one block at least)."""
        unseen = torch.ones_like(self.index, dtype=torch.bool)  # the first row of each text position, in ascending order
        if len(unseen) > 1:
            torch.gt(self.index[1:], self.index.cummax(0).values[:-1], out=unseen[1:])
        counts = torch.stack([self.valid.sum(-1), unpack(unseen, self.valid, fill=False).sum(-1)])
        lengths, news = counts.tolist()
        start = stop = first = positions = 0
        for block, (length, new) in enumerate(zip(lengths, news)):
            if stop > start and self._bytes(stop + length - start, positions + new) > self.chunk_bytes:
                yield _Chunk(start, stop, first, block)
                start, first, positions, new = stop, block, 0, length
            stop, positions = stop + length, positions + new
        if stop > start:
            yield _Chunk(start, stop, first, len(lengths))

    def _bytes(self, rows: int, positions: int) -> int:
        """Working memory of a chunk: logits (twice with a cap), the target's logits before them, its law."""
        draft, full = len(self.heads[0]), len(self.target_rows)
        item, wide = self.states[0].element_size(), self.dtype.itemsize
        capped, kept = self.softcap is not None and self.wants, self.passes.log_space
        logits = (
            rows * draft * (2 if capped else 1) + positions * full
            if kept
            else max(rows * draft * (2 if capped else 1), positions * full)
        )
        return logits * item + positions * draft * wide

    def _knows_top(self) -> bool:
        return self.batch.target_lse is None or self.batch.target_top is not None

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, correction and w2, in the caller's block order and dtype; exactly 0 at masked slots."""
        batch = self.batch
        if not self.wants:
            return None, None, None
        full = [part.new_zeros(self.valid.numel(), part.shape[-1]) for part in self.d_states]
        for out, part in zip(full, self.d_states):
            out[self.places] = part
        full = [out.view(*self.valid.shape, -1) for out in full]
        if batch.w2 is None:
            return full[0], None, None
        return full[0], full[1], torch.zeros_like(batch.w2) if self.d_w2 is None else self.d_w2.to(batch.w2.dtype)


def _map(rows: RowStats, f: Callable[[Tensor], Tensor]) -> RowStats:
    return RowStats(**{s.name: None if (v := getattr(rows, s.name)) is None else f(v) for s in fields(rows)})


def _blocks_of(rows: RowStats, span: slice, valid: Tensor) -> RowStats:
    return _map(rows, lambda t: unpack(t[span], valid))


def _replace(rows: RowStats, new: dict[str, Tensor]) -> RowStats:
    return RowStats(**{**vars(rows), **new})


def _empty_stats(count: int, optional: set[str], top: bool, dtype: torch.dtype, device: torch.device) -> RowStats:
    number = {n: torch.zeros(count, dtype=dtype, device=device) for n in ("alpha", "log_q_label", "log_p_label", *optional)}
    flag = {n: torch.zeros(count, dtype=torch.bool, device=device) for n in ("correct", *(["agree"] if top else []))}
    return RowStats(**number, **flag)
