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
_LOG_SPACE = ("reverse_kl", "js", "renyi", "log_alpha")


@dataclass
class Law:
    """The target at the text positions of a chunk: p over the draft vocabulary [U, Vd]; log-normaliser of its full
    softmax, sum p and sum p t (t the logits) [U]; logits [U, Vd] while a log-space term is active; arg-max ids [U]."""

    p: Tensor
    lse: Tensor
    mass: Tensor
    cross: Tensor
    logits: Tensor | None
    top: Tensor | None


@dataclass
class Buffers:
    """Scratch [n, Vd], reused by every tile: z (unused if the logits already have its dtype), q, p, low."""

    z: Tensor
    q: Tensor
    p: Tensor
    low: Tensor

    @staticmethod
    def allocate(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Four buffers of [rows, vocab]."""
        return Buffers(*(torch.empty(rows, vocab, dtype=dtype, device=device) for _ in range(4)))


@dataclass
class RowState:
    """A tile between its statistics and its gradient. z logits, q, p, low = q 1[q <= p] [n, Vd]; low_sum, mass, lse
    [n]; log_p [n, Vd] while a log-space term is active; columns [n] of the text tokens, -1 outside the vocabulary."""

    z: Tensor
    q: Tensor
    p: Tensor
    low: Tensor
    low_sum: Tensor
    mass: Tensor
    lse: Tensor
    log_p: Tensor | None
    columns: Tensor
    stats: RowStats


def target_law(
    *, logits: Tensor, draft_ids: Tensor | None, lse: Tensor | None, top: Tensor | None, dtype: torch.dtype, tile: int, stats: RowStats
) -> Law:
    """p of a chunk's text positions from the target's logits, `tile` rows at a time.

    logits: [U, V], or the draft columns [U, Vd] if `lse` [U] (of the full softmax) is given. draft_ids: int64 [Vd]
    or None. top: int64 [U] arg-max ids or None to find them. `stats` tells which statistics are wanted.
    """
    count, known = logits.shape[0], lse is not None
    vocab = logits.shape[1] if draft_ids is None else draft_ids.shape[0]
    p = torch.empty(count, vocab, dtype=dtype, device=logits.device)
    lse = torch.empty(count, dtype=dtype, device=logits.device) if lse is None else lse.to(dtype)
    keep = any(getattr(stats, name) is not None for name in _LOG_SPACE)
    selected = logits if known or draft_ids is None else None
    mass, cross = torch.ones_like(lse), torch.zeros_like(lse)
    tops = None if known and top is None else torch.empty(count, dtype=torch.int64, device=logits.device) if top is None else top
    kept = torch.empty(count, vocab, dtype=logits.dtype, device=logits.device) if keep and selected is None else selected if keep else None
    for lo in range(0, count, tile):
        span = slice(lo, lo + tile)
        t = logits[span].to(dtype)
        if not known:
            best = t.argmax(-1, keepdim=True)
            if top is None:
                assert tops is not None
                tops[span] = best.squeeze(-1)
        if selected is None:
            assert draft_ids is not None
            lse[span] = torch.logsumexp(t, dim=-1)
            t = t[:, draft_ids]
            if kept is not None:
                kept[span] = t.to(kept.dtype)
        if draft_ids is None:
            torch.softmax(t, dim=-1, out=p[span])
            # log-normaliser from the largest entry: its probability is at least 1/V
            lse[span] = (t.gather(-1, best) - p[span].gather(-1, best).log()).squeeze(-1)
        else:
            torch.sub(t, lse[span, None], out=p[span]).exp_()
            torch.sum(p[span], dim=-1, out=mass[span])
        if stats.kl is not None:
            cross[span] = _row_dot(p[span], t)
    return Law(p, lse, mass, cross, kept, tops)


def row_statistics(
    *, logits: Tensor, law: Law, local: Tensor, columns: Tensor, labels: Tensor, draft_ids: Tensor | None, into: RowStats, buffers: Buffers
) -> RowState:
    """Fills `into` (but for log_p_label) for a tile of draft logits [n, Vd].

    local: [n] each row's text position in `law`; columns, labels: [n] draft column (-1 outside) and id of the text token.
    """
    n = logits.shape[0]
    q, p, low = buffers.q[:n], buffers.p[:n], buffers.low[:n]
    z = logits if logits.dtype == q.dtype else buffers.z[:n].copy_(logits)
    torch.softmax(z, dim=-1, out=q)
    torch.index_select(law.p, 0, local, out=p)
    best = q.argmax(-1, keepdim=True)
    lse = (z.gather(-1, best) - q.gather(-1, best).log()).squeeze(-1)
    picked = z.gather(-1, columns.clamp(min=0)[:, None]).squeeze(-1) - lse
    into.log_q_label.copy_(torch.where(columns >= 0, picked, -torch.inf))
    token = best.squeeze(-1) if draft_ids is None else draft_ids[best.squeeze(-1)]
    into.correct.copy_(token == labels)
    if into.agree is not None:
        assert law.top is not None
        into.agree.copy_(token == law.top[local])
    mass = law.mass[local]
    if into.kl is not None:  # sum p (log p - log q) - m log m
        gap = law.cross[local] - _row_dot(p, z) + mass * (lse - law.lse[local])
        into.kl.copy_(gap - torch.xlogy(mass, mass))
    log_p = None
    if law.logits is not None:
        log_p = law.logits[local].to(q.dtype).sub_(law.lse[local, None])
        _log_space_statistics(into, log_q=z - lse[:, None], q=q, p=p, log_p=log_p)
    torch.minimum(p, q, out=low)
    torch.sum(low, dim=-1, out=into.alpha)
    low.mul_(q <= p)
    return RowState(z, q, p, low, low.sum(-1), mass, lse, log_p, columns, into)


def row_gradient(state: RowState, weights: dict[str, Tensor], *, out: Tensor) -> None:
    """Writes dz [n, Vd] over the draft logits `out`, from dL/d(statistic) [n] by name. Overwrites q.

    With D = dL/d(.): dz = D_alpha (low - q S) + D_kl (m q - p) + D_label (onehot(y) - q) + the log-space terms.
    """
    q = state.q
    extra = None if state.log_p is None else _log_space_gradient(state, weights)
    scale = torch.zeros_like(state.lse)
    alpha, kl, label = weights.get("alpha"), weights.get("kl"), weights.get("log_q_label")
    if alpha is not None:
        scale -= alpha * state.low_sum
    if kl is not None:
        scale += kl * state.mass
    if label is not None:
        label = torch.where(state.columns >= 0, label, 0.0)
        scale -= label
    q.mul_(scale[:, None])
    if alpha is not None:
        q.addcmul_(state.low, alpha[:, None])
    if kl is not None:
        q.addcmul_(state.p, kl[:, None], value=-1.0)
    if label is not None:
        q.scatter_add_(-1, state.columns.clamp(min=0)[:, None], label[:, None])
    if extra is not None:
        q += extra
    out.copy_(q)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """sum over the last axis of a * b, [n], without a temporary."""
    return torch.bmm(a[:, None], b[:, :, None]).reshape(a.shape[0])


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
    q, log_p, stats = state.q, state.log_p, state.stats
    assert log_p is not None
    log_q = state.z - state.lse[:, None]
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
