"""Statistics and logit gradient of rows: every pass over the vocabulary that the fused objective makes, as tensor code.

Pure functions of tensors. `passes.py` runs them tile by tile, or compiled over a whole chunk, or uses native code that does the
same. Numbers are in the reduction dtype (float32). Shapes: U text positions of a chunk, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .terms import RowStats

_LOG2 = 0.6931471805599453
# Width of the stripes of a row whose maxima are taken first, see `row_max`.
_STRIPE = 64
LOG_SPACE = ("reverse_kl", "js", "renyi", "log_alpha")


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
        """The vectors for each row of the chunk, `local` [n] its text position; the two tables as they are."""
        top = None if self.top is None else self.top[local]
        return Law(self.p, self.lse[local], self.mass[local], self.cross[local], top, self.logits)


@dataclass
class Sums:
    """What the passes leave of each row of a chunk, [n]: draft logit of the text token, largest draft logit and its
    column, sum of exp(z - largest), sum p z, sum q 1[q <= p]."""

    label: Tensor
    highest: Tensor
    best: Tensor
    total: Tensor
    cross: Tensor
    below: Tensor

    @staticmethod
    def allocate(label: Tensor) -> Sums:
        """Room for as many rows as `label` [n] has."""
        best = torch.empty_like(label, dtype=torch.int64)
        return Sums(label, torch.empty_like(label), best, *(torch.empty_like(label) for _ in range(3)))

    def lse(self) -> Tensor:
        """Log-normalisers of the draft law, [n]."""
        return self.highest + self.total.log()


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entry of each row of `x` [n, V] and its first column. In two stages, since arg-max over a long row
    is several times slower than a plain maximum on a CPU."""
    n, vocab = x.shape
    if torch.compiler.is_compiling() or vocab % _STRIPE or vocab == _STRIPE:
        best = x.argmax(-1)
        return x.gather(-1, best[:, None]).squeeze(-1), best
    stripes = x.view(n, vocab // _STRIPE, _STRIPE)
    highest, stripe = stripes.amax(-1).max(-1)
    inner = stripes.gather(1, stripe[:, None, None].expand(n, 1, _STRIPE)).argmax(-1).squeeze(1)
    return highest, inner.add_(stripe, alpha=_STRIPE)


def law_rows(*, logits: Tensor, ids: Tensor | None, lse: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """p, lse, mass, cross and (if `lse` is not given) top, as in `Law`, of target logits [n, V]. ids: int64 [Vd], the columns
    to keep; lse: [n] normalisers of laws whose other columns were left out already; None, None: nothing is left out."""
    t, whole = logits.to(dtype), ids is None and lse is None
    found: dict[str, Tensor] = {}
    if lse is None:
        highest, found["top"] = row_max(t)
        lse = highest + (t - highest[:, None]).exp().sum(-1).log()
    if ids is not None:
        t = t[:, ids]
    p = (t - lse[:, None]).exp()
    mass = torch.ones_like(lse) if whole else p.sum(-1)
    return {**found, "p": p, "lse": lse, "mass": mass, "cross": (p * t).sum(-1)}


def statistics(
    *, z: Tensor, p: Tensor, local: Tensor, logits: Tensor | None, lse: Tensor, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The fields of `Sums` and `RowStats` that take a pass over draft logits z [n, Vd]. p, logits: the tables of `Law`;
    local, lse: [n] each row's text position and its log-normaliser. names: the optional statistics that are wanted."""
    x, law = z.to(p.dtype), p[local]
    highest, best = row_max(x)
    e = (x - highest[:, None]).exp()
    total = e.sum(-1)
    q = e / total[:, None]
    found = {"highest": highest, "best": best, "total": total, "alpha": torch.minimum(law, q).sum(-1)}
    found["below"] = torch.where(q <= law, q, 0.0).sum(-1)
    if "kl" in names:
        found["cross"] = (law * x).sum(-1)
    if logits is not None:
        log_q = x - (highest + total.log())[:, None]
        log_p = logits[local].to(p.dtype) - lse[:, None]
        found |= _log_space_statistics(names, log_q=log_q, q=q, p=law, log_p=log_p)
    return found


def gradient(
    *, z: Tensor, p: Tensor, local: Tensor, logits: Tensor | None, lse: Tensor, sums: dict[str, Tensor],
    weights: dict[str, Tensor], scale: Tensor, columns: Tensor,
) -> Tensor:  # fmt: skip
    """dz [n, Vd] in the dtype of z, from D = dL/d(statistic) [n] by name in `weights`; sums: the results of `statistics`.

    With low = q 1[q <= p], S = sum low, m = sum p:
    dz = D_alpha (low - q S) + D_kl (m q - p) + D_label (onehot(y) - q) + the log-space terms; scale: see `gradient_scale`.
    """
    x, law = z.to(p.dtype), p[local]
    q = (x - sums["highest"][:, None]).exp() / sums["total"][:, None]
    alpha, kl, label = weights.get("alpha"), weights.get("kl"), weights.get("log_q_label")
    if alpha is None:
        dz = q * scale[:, None]
    else:
        factor = (scale - alpha * sums["below"])[:, None]
        dz = q * torch.where(q <= law, factor + alpha[:, None], factor)
    if kl is not None:
        dz = dz - law * kl[:, None]
    if logits is not None:
        log_q = x - (sums["highest"] + sums["total"].log())[:, None]
        dz = dz + _log_space_gradient(weights, sums, q=q, log_q=log_q, log_p=logits[local].to(p.dtype) - lse[:, None])
    if label is not None:
        label = torch.where(columns >= 0, label, 0.0)[:, None]
        if torch.compiler.is_compiling():  # part of the same kernel, where a scatter would write dz out first
            dz = dz + torch.where(torch.arange(z.shape[1], device=z.device) == columns[:, None], label, 0.0)
        else:
            dz.scatter_add_(-1, columns.clamp(min=0)[:, None], label)
    return dz.to(z.dtype)


def finish_statistics(
    *, sums: Sums, law: Law, columns: Tensor, labels: Tensor, draft_ids: Tensor | None, into: RowStats
) -> None:
    """The rest of `into` (but for log_p_label) from the sums of any number of rows. `law` as of `of_rows`; columns,
    labels: [n] draft column (-1 outside the draft vocabulary) and id of the text token."""
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
    """The factor [n] of q in dz that is known before the passes: D_kl m - D_label (0 for an unreachable text token)."""
    scale = torch.zeros_like(mass)
    if "kl" in weights:
        scale += weights["kl"] * mass
    if "log_q_label" in weights:
        scale -= torch.where(columns >= 0, weights["log_q_label"], 0.0)
    return scale


def _log_space_statistics(names: tuple[str, ...], *, log_q: Tensor, q: Tensor, p: Tensor, log_p: Tensor) -> dict[str, Tensor]:
    found = {}
    if "reverse_kl" in names:
        found["reverse_kl"] = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    if "renyi" in names:
        found["renyi"] = -2.0 * torch.logsumexp(0.5 * (log_p + log_q), dim=-1)
    if "log_alpha" in names:
        found["log_alpha"] = torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)
    if "js" in names:
        log_mix = torch.logaddexp(log_p, log_q) - _LOG2
        part = torch.where(p > 0, p * (log_p - log_mix), 0.0) + torch.where(q > 0, q * (log_q - log_mix), 0.0)
        found["js"] = 0.5 * (part.sum(-1) + (1.0 - p.sum(-1)) * _LOG2)
    return found


def _log_space_gradient(
    weights: dict[str, Tensor], sums: dict[str, Tensor], *, q: Tensor, log_q: Tensor, log_p: Tensor
) -> Tensor:
    """dz [n, Vd] of the log-space statistics: reverse KL q (log(q/p) - KL); Renyi q - b, b = sqrt(p q) / sum;
    log alpha b - q sum b, b = q 1[q <= p] / alpha; JS q (r - sum q r), r = log(q/M) / 2, M = (p + q) / 2."""
    total = torch.zeros_like(q)
    if "reverse_kl" in weights:
        gap = log_q - log_p - sums["reverse_kl"][:, None]
        total = total + weights["reverse_kl"][:, None] * torch.where(q > 0, q * gap, 0.0)
    if "renyi" in weights:
        share = torch.exp(0.5 * (log_p + log_q + sums["renyi"][:, None]))
        total = total + weights["renyi"][:, None] * (q - share)
    if "log_alpha" in weights:
        share = torch.where(log_q <= log_p, (log_q - sums["log_alpha"][:, None]).exp(), 0.0)
        total = total + weights["log_alpha"][:, None] * (share - q * share.sum(-1, keepdim=True))
    if "js" in weights:
        ratio = 0.5 * (log_q - torch.logaddexp(log_p, log_q) + _LOG2)
        ratio = torch.where(q > 0, ratio, 0.0)
        total = total + weights["js"][:, None] * q * (ratio - (q * ratio).sum(-1, keepdim=True))
    return total
