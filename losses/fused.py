"""The objective in one chunked pass: same signature, value and gradient as `objective.py`, none of its memory.

For a chunk of whole blocks, sorted by position so that neighbours share teacher positions: the target's logits
once per text position, the draft logits [rows, Vd], then tile by tile (a tile fits the cache) the softmax of q,
the row statistics and the gradient of the logits, written over the logits; then the products that carry it to
`hidden`, `correction` and `w2`. Every term's gradient with respect to the draft logits z is, for each row,

    dz = q * A  -  q 1[q <= p] * B  -  p * C  -  onehot(y) * E   (+ the rarer terms),   sum over dz = 0,

with row coefficients dL/d(statistic) that `terms.py` yields by differentiating its [A, G]-sized algebra: known
beforehand if the loss is linear in the statistics, else taken tile by tile (a tile holds whole blocks). So
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
from .reduce import denominators as local_denominators
from .reduce import unpack
from .rows import Buffers, Law, Sums, finish_statistics, gradient_scale, row_gradient, row_statistics, target_law
from .terms import ObjectiveStats, RowStats, finish, is_linear, needed, weighted_loss, weighted_terms


def _tile_bytes(device: torch.device) -> int:
    """Size of one scratch buffer of a tile. On a CPU five of them should stay in the second-level caches: passes over
    larger tiles took 1.5 to 2.5 times as long per entry."""
    return (384 << 10) * torch.get_num_threads() if device.type == "cpu" else 64 << 20


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
    chunk_bytes: int = 256 << 20,
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
        work = _Pass(batch, softcap=softcap, chunk_bytes=chunk_bytes, totals=totals, wants=wants)
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
    """Packed rows [start, stop) of the ordered blocks; `tiles` are row ranges of whole blocks with their block range."""

    start: int
    stop: int
    tiles: list[tuple[int, int, int, int]]


class _Pass:
    """Working state of one call. Packed rows: the valid slots, block after block, blocks ordered by teacher position."""

    def __init__(self, batch: Inputs, *, softcap: float | None, chunk_bytes: int, totals: Tensor, wants: bool) -> None:
        self.batch, self.softcap, self.wants = batch, softcap, wants
        self.dtype, self.device = reduction_dtype(batch.hidden), batch.hidden.device
        self.totals = totals.to(self.device, self.dtype)
        first = torch.where(batch.valid[:, 0], batch.target_index[:, 0], torch.iinfo(torch.int64).max)
        self.order = first.argsort(stable=True)
        self.valid = batch.valid[self.order]
        self.labels, self.index = self._pack(batch.labels), self._pack(batch.target_index)
        self.columns = self.labels if batch.draft_ids is None else batch.columns[self.labels]
        states = [self._pack(batch.hidden)] + ([] if batch.correction is None else [self._pack(batch.correction)])
        # Without a cap both products share one matrix product over the concatenated columns.
        self.joined = softcap is None and batch.correction is not None
        heads = [batch.lm_head.detach()] + ([] if batch.w2 is None else [batch.w2.detach()])
        self.states = [torch.cat(states, -1)] if self.joined else states
        self.heads = [torch.cat(heads, -1)] if self.joined else heads
        self.target_rows = batch.target_head.detach() if batch.target_lse is None else target_rows(batch).detach()
        self.lengths: list[int] = self.valid.sum(-1).tolist()
        self.chunk_bytes = chunk_bytes
        self.d_states = [torch.empty_like(s) for s in self.states] if wants else []
        self.d_w2 = torch.zeros_like(batch.w2, dtype=self.dtype) if wants and batch.w2 is not None else None
        self.coefficients: dict[str, Tensor] | None = None
        self.needs_blocks = wants and not is_linear(batch.cfg)

    def _pack(self, x: Tensor) -> Tensor:
        return x.detach()[self.order][self.valid]

    def run(self) -> RowStats:
        """Every chunk; returns the statistics of all rows in the caller's block order."""
        cfg, total = self.batch.cfg, self.states[0].shape[0]
        packed = _empty_stats(total, needed(cfg), self._knows_top(), self.dtype, self.device)
        if self.wants and is_linear(cfg):
            self.coefficients = self._coefficients(_blocks_of(packed, slice(0, total), self.valid), self.valid)
        chunks = list(self._chunks())
        rows = max((c.stop - c.start for c in chunks), default=0)
        vocab, dtype = self.heads[0].shape[0], self.states[0].dtype
        logits = torch.empty(rows, vocab, dtype=dtype, device=self.device)
        self.target_logits = torch.empty(rows, self.target_rows.shape[0], dtype=dtype, device=self.device)
        self.law = torch.empty(rows, vocab, dtype=self.dtype, device=self.device)
        slope = torch.empty_like(logits) if self.softcap is not None and self.wants else None
        tile_rows = max((hi - lo for c in chunks for lo, hi, _, _ in c.tiles), default=0)
        buffers = Buffers.allocate(tile_rows, vocab, self.dtype, self.device)
        for chunk in chunks:
            self._run_chunk(chunk, packed, logits[: chunk.stop - chunk.start], slope, buffers)
        return self._unordered(packed)

    def _run_chunk(self, chunk: _Chunk, packed: RowStats, logits: Tensor, slope: Tensor | None, buffers: Buffers) -> None:
        span, ids = slice(chunk.start, chunk.stop), self.batch.draft_ids
        columns, labels, into = self.columns[span], self.labels[span], _slice(packed, span)
        law, local = self._target(span, packed, tile=max(1, len(buffers.q)))
        self._draft_logits(span, logits, slope)
        sums = Sums.allocate(logits.gather(-1, columns.clamp(min=0)[:, None]).squeeze(-1).to(self.dtype))
        weights, scale = {}, sums.label
        if self.coefficients is not None:
            weights = {k: v[span] for k, v in self.coefficients.items()}
            scale = gradient_scale(weights, mass=law.mass, columns=columns)
        for lo, hi, first, last in chunk.tiles:
            tile = slice(lo - chunk.start, hi - chunk.start)
            some, part, cut = sums.cut(tile), _slice(into, tile), law.cut(tile)
            state = row_statistics(logits=logits[tile], law=cut, local=local[tile], sums=some, into=part, buffers=buffers)
            if not self.wants:
                continue
            if self.needs_blocks:
                finish_statistics(sums=some, law=cut, columns=columns[tile], labels=labels[tile], draft_ids=ids, into=part)
                blocks = self.valid[first:last]
                mine = self._coefficients(_blocks_of(packed, slice(lo, hi), blocks), blocks)
                factor = gradient_scale(mine, mass=cut.mass, columns=columns[tile])
            else:
                mine, factor = {k: v[tile] for k, v in weights.items()}, scale[tile]
            row_gradient(state, mine, scale=factor, columns=columns[tile], out=logits[tile])
        finish_statistics(sums=sums, law=law, columns=columns, labels=labels, draft_ids=ids, into=into)
        if self.wants:
            self._backward(span, logits, slope)

    def _target(self, span: slice, packed: RowStats, *, tile: int) -> tuple[Law, Tensor]:
        """The target's law at a chunk's text positions, each once, and each row's place in it; fills log p(y)."""
        batch = self.batch
        positions, local = self.index[span].unique(return_inverse=True)
        count = len(positions)
        logits = torch.mm(batch.target_hidden.detach()[positions], self.target_rows.T, out=self.target_logits[:count])
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        lse = None if batch.target_lse is None else batch.target_lse[positions]
        top = None if batch.target_top is None else batch.target_top[positions]
        law = target_law(
            logits=logits, p=self.law[:count], draft_ids=batch.draft_ids, lse=lse, top=top, tile=tile, stats=packed
        )
        column = self.labels[span] if lse is None else self.columns[span]
        picked = logits[local, column.clamp(min=0)].to(self.dtype) - law.lse[local]
        # With a given normaliser log p(y) outside the draft vocabulary is unknown, and multiplies q(y) = 0.
        packed.log_p_label[span] = torch.where(column >= 0, picked, 0.0)
        return law.of_rows(local), local

    def _draft_logits(self, span: slice, out: Tensor, slope: Tensor | None) -> None:
        torch.mm(self.states[0][span], self.heads[0].T, out=out)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_()
            if slope is not None:
                torch.mul(out, out, out=slope[: len(out)]).neg_().add_(1.0)
            out.mul_(self.softcap)
        if len(self.states) > 1:
            out.addmm_(self.states[1][span], self.heads[1].T)

    def _backward(self, span: slice, dz: Tensor, slope: Tensor | None) -> None:
        if self.d_w2 is not None:
            source = self.states[-1][span][:, -self.d_w2.shape[1] :]
            self.d_w2 += dz.T @ source
        if len(self.states) > 1:
            torch.mm(dz, self.heads[1], out=self.d_states[1][span])
        if slope is not None:
            dz.mul_(slope[: len(dz)])
        torch.mm(dz, self.heads[0], out=self.d_states[0][span])

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
        """Cuts the ordered blocks into chunks within the memory budget, and those into tiles."""
        vocab, item = self.heads[0].shape[0], self.states[0].element_size()
        full = self.target_rows.shape[0]
        wide = torch.empty(0, dtype=self.dtype).element_size()
        # A row holds its logits (twice with a cap), and at worst a text position of its own: logits and law.
        row_bytes = vocab * (item * (2 if self.softcap else 1) + wide) + full * item
        rows_per_chunk = max(1, self.chunk_bytes // row_bytes)
        # Deriving coefficients costs about as much as a pass over a few MiB: then larger tiles pay.
        rows_per_tile = max(1, _tile_bytes(self.device) * (4 if self.needs_blocks else 1) // (vocab * wide))
        row = 0
        for first, last in _groups(self.lengths, rows_per_chunk):
            start, tiles = row, []
            if self.needs_blocks:
                for lo, hi in _groups(self.lengths[first:last], rows_per_tile):
                    count = sum(self.lengths[first + lo : first + hi])
                    tiles.append((row, row + count, first + lo, first + hi))
                    row += count
            else:  # coefficients known beforehand: a tile may cut through blocks
                row += sum(self.lengths[first:last])
                tiles = [(r, min(r + rows_per_tile, row), first, last) for r in range(start, row, rows_per_tile)]
            yield _Chunk(start, row, tiles)

    def _knows_top(self) -> bool:
        return self.batch.target_lse is None or self.batch.target_top is not None

    def _unordered(self, packed: RowStats) -> RowStats:
        blocks = _blocks_of(packed, slice(0, len(packed.alpha)), self.valid)
        back = self.order.argsort()
        return _map(blocks, lambda t: t[back])

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, correction and w2, in the caller's block order and dtype; exactly 0 at masked slots."""
        batch = self.batch
        if not self.wants:
            return None, None, None
        parts = self.d_states
        if self.joined:
            parts = list(
                self.d_states[0].split([batch.hidden.shape[-1], self.states[0].shape[-1] - batch.hidden.shape[-1]], -1)
            )
        back = self.order.argsort()
        full = [unpack(part, self.valid)[back] for part in parts]
        d_w2 = None if self.d_w2 is None or batch.w2 is None else self.d_w2.to(batch.w2.dtype)
        return full[0], full[1] if len(full) > 1 else None, d_w2


def _groups(lengths: list[int], budget: int) -> Iterator[tuple[int, int]]:
    """Consecutive runs of items whose lengths add up to at most `budget` (one item at least)."""
    start, held = 0, 0
    for i, length in enumerate(lengths):
        if i > start and held + length > budget:
            yield start, i
            start, held = i, 0
        held += length
    if held:
        yield start, len(lengths)


def _map(rows: RowStats, f: Callable[[Tensor], Tensor]) -> RowStats:
    return RowStats(**{s.name: None if (v := getattr(rows, s.name)) is None else f(v) for s in fields(rows)})


def _slice(rows: RowStats, span: slice) -> RowStats:
    return _map(rows, lambda t: t[span])


def _blocks_of(rows: RowStats, span: slice, valid: Tensor) -> RowStats:
    return _map(rows, lambda t: unpack(t[span], valid))


def _replace(rows: RowStats, new: dict[str, Tensor]) -> RowStats:
    return RowStats(**{**vars(rows), **new})


def _empty_stats(count: int, optional: set[str], top: bool, dtype: torch.dtype, device: torch.device) -> RowStats:
    number = {n: torch.zeros(count, dtype=dtype, device=device) for n in ("alpha", "log_q_label", "log_p_label", *optional)}
    flag = {n: torch.zeros(count, dtype=torch.bool, device=device) for n in ("correct", *(["agree"] if top else []))}
    return RowStats(**number, **flag)
