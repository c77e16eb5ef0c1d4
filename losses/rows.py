"""Statistics and logit gradient of a tile of rows: every pass over the vocabulary that the fused objective makes.

Plain tensor code on reused buffers, in place: on a CPU each pass runs in cache, on a GPU each is one kernel.
Numbers are in the reduction dtype (float32). Shapes: U text positions of a chunk, n rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .terms import RowStats

_LOG2 = 0.6931471805599453
# Width of the stripes of a row whose maxima are taken first, see `row_max`.
_STRIPE = 64
_LOG_SPACE = ("reverse_kl", "js", "renyi", "log_alpha")


@dataclass
class Law:
    """The target at the text positions of a chunk: p over the draft vocabulary [U, Vd]; log-normaliser of its full
    softmax, sum p and sum p t (t the logits) [U]; arg-max ids [U]; logits [U, Vd] while a log-space term is active."""

    p: Tensor
    lse: Tensor
    mass: Tensor
    cross: Tensor
    top: Tensor | None
    logits: Tensor | None

    def of_rows(self, local: Tensor) -> Law:
        """The vectors for each row of the chunk, `local` [N] its text position; the two tables as they are."""
        top = None if self.top is None else self.top[local]
        return Law(self.p, self.lse[local], self.mass[local], self.cross[local], top, self.logits)

    def cut(self, span: slice) -> Law:
        """The vectors of the rows of `span`, as views."""
        top = None if self.top is None else self.top[span]
        return Law(self.p, self.lse[span], self.mass[span], self.cross[span], top, self.logits)


@dataclass
class Sums:
    """What the tiles leave of each row of a chunk, [N]: draft logit of the text token, largest draft logit and its
    column, sum of exp(z - largest), sum p z."""

    label: Tensor
    highest: Tensor
    best: Tensor
    total: Tensor
    cross: Tensor

    @staticmethod
    def allocate(label: Tensor) -> Sums:
        """Room for as many rows as `label` [N] has."""
        best = torch.empty_like(label, dtype=torch.int64)
        return Sums(label, torch.empty_like(label), best, torch.empty_like(label), torch.zeros_like(label))

    def lse(self) -> Tensor:
        """Log-normalisers of the draft law, [N]."""
        return self.highest + self.total.log()

    def cut(self, span: slice) -> Sums:
        """The rows of `span`, as views."""
        return Sums(self.label[span], self.highest[span], self.best[span], self.total[span], self.cross[span])


@dataclass
class Buffers:
    """Scratch [n, Vd] in the reduction dtype, reused by every tile."""

    z: Tensor
    q: Tensor
    p: Tensor
    low: Tensor

    @staticmethod
    def allocate(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Four buffers of [rows, vocab]; pages that no tile touches cost nothing."""
        return Buffers(*(torch.empty(rows, vocab, dtype=dtype, device=device) for _ in range(4)))


@dataclass
class RowState:
    """A tile between its statistics and its gradient: z logits, q, p, low = min(p, q), all [n, Vd]; the log-laws
    [n, Vd] while a log-space term is active."""

    z: Tensor
    q: Tensor
    p: Tensor
    low: Tensor
    log_q: Tensor | None
    log_p: Tensor | None
    stats: RowStats


def target_law(
    *, logits: Tensor, p: Tensor, draft_ids: Tensor | None, lse: Tensor | None, top: Tensor | None, tile: int, stats: RowStats
) -> Law:
    """p of a chunk's text positions from the target's logits, `tile` rows at a time, written into `p` [U, Vd].

    logits: [U, V], or the draft columns [U, Vd] if `lse` [U] (of the full softmax) is given. draft_ids: int64 [Vd]
    or None. top: int64 [U] arg-max ids or None to find them. `stats` tells which statistics are wanted.
    """
    count, dtype = len(logits), p.dtype
    select = draft_ids is not None and lse is None
    keep = any(getattr(stats, name) is not None for name in _LOG_SPACE)
    kept = (torch.empty_like(p, dtype=logits.dtype) if select else logits) if keep else None
    found = Law(p, torch.empty_like(p[:, 0]), torch.ones_like(p[:, 0]), torch.zeros_like(p[:, 0]), top, kept)
    if lse is not None:
        found.lse.copy_(lse)
    elif top is None:
        found.top = torch.empty(count, dtype=torch.int64, device=p.device)
    for lo in range(0, count, tile):
        span = slice(lo, lo + tile)
        t, law = logits[span].to(dtype), p[span]
        if lse is None:
            highest, best = row_max(t)
            if top is None:
                assert found.top is not None
                found.top[span] = best
        if draft_ids is None:
            found.lse[span] = highest + softmax_into(t, highest, out=law).log()
        else:
            if select:
                found.lse[span] = torch.logsumexp(t, dim=-1)
                t = t[:, draft_ids]
                if kept is not None:
                    kept[span] = t.to(kept.dtype)
            torch.sub(t, found.lse[span, None], out=law).exp_()
            torch.sum(law, dim=-1, out=found.mass[span])
        if stats.kl is not None:
            found.cross[span] = (law * t).sum(-1)
    return found


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entry of each row of `x` [n, V] and its first column. In two stages, since arg-max over a long row
    is several times slower than a plain maximum on a CPU."""
    n, vocab = x.shape
    if vocab % _STRIPE or vocab == _STRIPE:
        best = x.argmax(-1)
        return x.gather(-1, best[:, None]).squeeze(-1), best
    stripes = x.view(n, vocab // _STRIPE, _STRIPE)
    highest, stripe = stripes.amax(-1).max(-1)
    inner = stripes.gather(1, stripe[:, None, None].expand(n, 1, _STRIPE)).argmax(-1).squeeze(1)
    return highest, inner.add_(stripe, alpha=_STRIPE)


def softmax_into(x: Tensor, highest: Tensor, *, out: Tensor, total: Tensor | None = None) -> Tensor:
    """Softmax of the rows of `x` [n, V] into `out`, given their maxima; returns sum exp(x - highest) [n]."""
    torch.sub(x, highest[:, None], out=out).exp_()
    total = out.sum(-1) if total is None else torch.sum(out, dim=-1, out=total)
    out.mul_(total.reciprocal()[:, None])
    return total


def row_statistics(*, logits: Tensor, law: Law, local: Tensor, sums: Sums, into: RowStats, buffers: Buffers) -> RowState:
    """The passes over a tile of draft logits [n, Vd] that its statistics need: fills `sums`, and alpha and the
    log-space statistics of `into`. local: [n] each row's text position in the tables of `law`."""
    n = len(logits)
    q, p, low = buffers.q[:n], buffers.p[:n], buffers.low[:n]
    z = logits if logits.dtype == q.dtype else buffers.z[:n].copy_(logits)
    highest, best = row_max(z)
    softmax_into(z, highest, out=q, total=sums.total)
    sums.highest.copy_(highest)
    sums.best.copy_(best)
    torch.index_select(law.p, 0, local, out=p)
    if into.kl is not None:
        torch.sum(torch.mul(p, z, out=low), dim=-1, out=sums.cross)
    log_p, log_q = None, None
    if law.logits is not None:
        log_p = law.logits[local].to(q.dtype).sub_(law.lse[:, None])
        log_q = z - sums.lse()[:, None]
        _log_space_statistics(into, log_q=log_q, q=q, p=p, log_p=log_p)
    torch.sum(torch.minimum(p, q, out=low), dim=-1, out=into.alpha)
    return RowState(z, q, p, low, log_q, log_p, into)


def finish_statistics(
    *, sums: Sums, law: Law, columns: Tensor, labels: Tensor, draft_ids: Tensor | None, into: RowStats
) -> None:
    """The rest of `into` (but for log_p_label) from the sums of any number of rows. `law` as of `of_rows`; columns,
    labels: [N] draft column (-1 outside the draft vocabulary) and id of the text token."""
    lse = sums.lse()
    into.log_q_label.copy_(torch.where(columns >= 0, sums.label - lse, -torch.inf))
    token = sums.best if draft_ids is None else draft_ids[sums.best]
    torch.eq(token, labels, out=into.correct)
    if into.agree is not None:
        assert law.top is not None
        torch.eq(token, law.top, out=into.agree)
    if into.kl is not None:  # sum p (log p - log q) - m log m
        gap = law.cross - sums.cross + law.mass * (lse - law.lse)
        torch.sub(gap, torch.xlogy(law.mass, law.mass), out=into.kl)


def gradient_scale(weights: dict[str, Tensor], *, mass: Tensor, columns: Tensor) -> Tensor:
    """The factor [N] of q in dz that is known before the passes: D_kl m - D_label (0 for an unreachable text token)."""
    scale = torch.zeros_like(mass)
    if "kl" in weights:
        scale += weights["kl"] * mass
    if "log_q_label" in weights:
        scale -= torch.where(columns >= 0, weights["log_q_label"], 0.0)
    return scale


def row_gradient(state: RowState, weights: dict[str, Tensor], *, scale: Tensor, columns: Tensor, out: Tensor) -> None:
    """Writes dz [n, Vd] over the draft logits `out`, from D = dL/d(statistic) [n] by name. Overwrites the state.

    With low = q 1[q <= p], S = sum low, m = sum p:
    dz = D_alpha (low - q S) + D_kl (m q - p) + D_label (onehot(y) - q) + the log-space terms.
    """
    q, low = state.q, state.low
    extra = None if state.log_p is None else _log_space_gradient(state, weights)
    dz = out if out.dtype == q.dtype else q
    alpha, kl, label = weights.get("alpha"), weights.get("kl"), weights.get("log_q_label")
    if alpha is not None:  # min(p, q) = q marks q <= p; a comparison into floats stays vectorised on a CPU
        torch.eq(low, q, out=low).mul_(q)
        scale = torch.addcmul(scale, alpha, low.sum(-1), value=-1.0)
    torch.mul(q, scale[:, None], out=dz)
    if alpha is not None:
        dz.addcmul_(low, alpha[:, None])
    if kl is not None:
        dz.addcmul_(state.p, kl[:, None], value=-1.0)
    if label is not None:
        dz.scatter_add_(-1, columns.clamp(min=0)[:, None], torch.where(columns >= 0, label, 0.0)[:, None])
    if extra is not None:
        dz += extra
    if dz is not out:
        out.copy_(dz)


def _log_space_statistics(into: RowStats, *, log_q: Tensor, q: Tensor, p: Tensor, log_p: Tensor) -> None:
    if into.reverse_kl is not None:
        into.reverse_kl.copy_(torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1))
    if into.renyi is not None:
        into.renyi.copy_(-2.0 * torch.logsumexp(0.5 * (log_p + log_q), dim=-1))
    if into.log_alpha is not None:
        into.log_alpha.copy_(torch.logsumexp(torch.minimum(log_p, log_q), dim=-1))
    if into.js is not None:
        log_mix = torch.logaddexp(log_p, log_q) - _LOG2
        part = torch.where(p > 0, p * (log_p - log_mix), 0.0) + torch.where(q > 0, q * (log_q - log_mix), 0.0)
        into.js.copy_(0.5 * (part.sum(-1) + (1.0 - p.sum(-1)) * _LOG2))


def _log_space_gradient(state: RowState, weights: dict[str, Tensor]) -> Tensor:
    """dz [n, Vd] of the log-space statistics: reverse KL q (log(q/p) - KL); Renyi q - b, b = sqrt(p q) / sum;
    log alpha b - q sum b, b = q 1[q <= p] / alpha; JS q (r - sum q r), r = log(q/M) / 2, M = (p + q) / 2."""
    q, log_p, log_q, stats = state.q, state.log_p, state.log_q, state.stats
    assert log_p is not None and log_q is not None
    total = torch.zeros_like(q)
    if "reverse_kl" in weights:
        assert stats.reverse_kl is not None
        total += weights["reverse_kl"][:, None] * torch.where(q > 0, q * (log_q - log_p - stats.reverse_kl[:, None]), 0.0)
    if "renyi" in weights:
        assert stats.renyi is not None
        share = torch.exp(0.5 * (log_p + log_q + stats.renyi[:, None]))
        total += weights["renyi"][:, None] * (q - share)
    if "log_alpha" in weights:
        assert stats.log_alpha is not None
        share = torch.where(log_q <= log_p, (log_q - stats.log_alpha[:, None]).exp(), 0.0)
        total += weights["log_alpha"][:, None] * (share - q * share.sum(-1, keepdim=True))
    if "js" in weights:
        ratio = 0.5 * (log_q - torch.logaddexp(log_p, log_q) + _LOG2)
        ratio = torch.where(q > 0, ratio, 0.0)
        total += weights["js"][:, None] * q * (ratio - (q * ratio).sum(-1, keepdim=True))
    return total
