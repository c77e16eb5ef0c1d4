"""From per-slot statistics of (p, q, y) to the weighted loss and the training metrics.

Both the plain and the fused objective end here, so the algebra over slots and blocks exists once. Everything
is [A, G]-sized or smaller; nothing here sees the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import acceptance as acc
from .config import ObjectiveConfig
from .reduce import denominator_of, denominators, divide, masked_sum
from .weighting import slot_weights, survival_weights

# Row statistics that a term's value is computed from, beside alpha.
_NEEDS = {
    "ce": ("log_q_label",),
    "kl": ("kl",),
    "lk": ("kl",),
    "reverse_kl": ("reverse_kl",),
    "js": ("js",),
    "nla": ("log_alpha",),
    "renyi": ("renyi",),
}
# Terms and weightings whose gradient coefficient depends on the statistics themselves.
_NONLINEAR_TERMS = ("lk", "e2e", "exact")


@dataclass(kw_only=True)
class RowStats:
    """Per-slot statistics, each [A, G] float32 (float64 for float64 inputs); 0 or False at masked slots.

    alpha; log_q_label, log_p_label: log-probabilities of the text token (log q is -inf outside the draft
    vocabulary); agree: arg-max q == arg-max p (None if p's is unknown); correct: arg-max q == text token;
    the rest only if an active term needs them.
    """

    alpha: Tensor
    log_q_label: Tensor
    log_p_label: Tensor
    correct: Tensor
    agree: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    js: Tensor | None = None
    renyi: Tensor | None = None
    log_alpha: Tensor | None = None


@dataclass
class ObjectiveStats:
    """Metrics of one call as (sum, count) pairs: add them over micro-batches and ranks, then `means()`.

    `sums[name]` and `counts[name]` are float32, scalar or [G]. Keys and what they mean: `summarise`.
    """

    sums: dict[str, Tensor]
    counts: dict[str, Tensor]

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        assert self.sums.keys() == other.sums.keys()
        return ObjectiveStats(
            {k: v + other.sums[k] for k, v in self.sums.items()}, {k: v + other.counts[k] for k, v in self.counts.items()}
        )

    def flat(self) -> Tensor:
        """All sums, then all counts, as one float32 vector (for a single all-reduce)."""
        return torch.cat([t.reshape(-1) for table in (self.sums, self.counts) for t in table.values()])

    def from_flat(self, vector: Tensor) -> ObjectiveStats:
        """The inverse of `flat`, with this object's keys and shapes."""
        pieces = iter(vector.split([t.numel() for table in (self.sums, self.counts) for t in table.values()]))
        sums = {k: next(pieces).reshape(v.shape) for k, v in self.sums.items()}
        return ObjectiveStats(sums, {k: next(pieces).reshape(v.shape) for k, v in self.counts.items()})

    def means(self) -> dict[str, float | list[float]]:
        """sum / count by name: floats, or a list with one entry per slot; NaN where nothing was counted."""
        return {k: (v / self.counts[k]).tolist() for k, v in self.sums.items()}


def needed(cfg: ObjectiveConfig) -> set[str]:
    """Names of the optional `RowStats` fields that the active terms use."""
    return {name for term in cfg.active for name in _NEEDS.get(term, ())} - {"log_q_label"}


def is_linear(cfg: ObjectiveConfig) -> bool:
    """Whether the loss is linear in the row statistics with known weights, so that d loss / d statistic does not
    depend on their values."""
    return cfg.slot_weighting == "decay" and not any(term in _NONLINEAR_TERMS for term in cfg.active)


def weighted_terms(
    cfg: ObjectiveConfig, *, rows: RowStats, valid: Tensor, survival_logits: Tensor | None, terms: tuple[str, ...]
) -> dict[str, Tensor]:
    """Sum of weight * value over slots (over blocks for the block terms) of each of `terms`, before the term's own weight."""
    mask = valid.to(rows.alpha.dtype)
    alpha, a = rows.alpha, _token_acceptance(rows, valid)
    q_label = torch.where(valid, rows.log_q_label, -torch.inf).exp().detach()
    weights = slot_weights(cfg, valid=mask, alpha=alpha, a=a, q_label=q_label, correct=rows.correct)
    out: dict[str, Tensor] = {}
    for term in terms:
        if term == "survival":
            assert survival_logits is not None
            loss = acc.survival_bce(survival_logits=survival_logits, alpha=alpha)
            out[term] = masked_sum(loss, survival_weights(cfg, valid=mask, a=a))
        elif term == "e2e":
            out[term] = acc.product_tv(alpha=alpha, valid=mask).sum()
        elif term == "exact":
            out[term] = acc.expected_rejection(alpha=alpha, a=a, valid=mask).sum()
        else:
            out[term] = masked_sum(_slot_value(cfg, term, rows), weights)
    return out


def weighted_loss(cfg: ObjectiveConfig, sums: dict[str, Tensor], totals: Tensor) -> Tensor:
    """sum over the terms of weight * sum / denominator."""
    parts = [cfg.weight(term) * divide(value, totals[denominator_of(term)]) for term, value in sums.items()]
    return torch.stack(parts).sum()


def summarise(
    cfg: ObjectiveConfig, *, rows: RowStats, valid: Tensor, survival_logits: Tensor | None, sums: dict[str, Tensor]
) -> ObjectiveStats:
    """The metrics of one call (no gradient).

    every active term, and ce and tv always: weighted sum and its local denominator; alpha [G]: mean acceptance
    of the slot on target paths; conditional [G]: acceptance given that the slot is reached, sum W_{k-1} alpha_k
    over sum W_{k-1}; tau_expected: 1 + sum_k W_{k-1} alpha_k a block, the exact estimator (methods 2.3);
    tau_product: 1 + sum_k prod_{i<=k} alpha_i, the number most codebases log, which is not the accepted length;
    agree [G]: arg-max q == arg-max p, which decides at temperature 0; greedy_chain: drafts in a row that agree,
    given true previous tokens; survival_error |c - alpha|, survival_bias c - alpha, survival_product_bias
    prod c - prod alpha, survival_brier (c - alpha)^2: means over valid slots.
    """
    mask = valid.to(torch.float32)
    local, blocks, slots = denominators(cfg, valid), valid.any(-1).sum().to(torch.float32), mask.sum()
    alpha = rows.alpha.to(torch.float32)
    reached = acc.reach(_token_acceptance(rows, valid).to(torch.float32)) * mask
    out = {name: (value, local[denominator_of(name)]) for name, value in sums.items()}
    out["alpha"] = (alpha.sum(0), mask.sum(0))
    out["conditional"] = ((reached * alpha).sum(0), reached.sum(0))
    out["tau_expected"] = (blocks + (reached * alpha).sum(), blocks)
    out["tau_product"] = (blocks + acc.prefix_products(alpha).sum(), blocks)
    if rows.agree is not None:
        agree = rows.agree.to(torch.float32)
        out["agree"] = (agree.sum(0), mask.sum(0))
        out["greedy_chain"] = (acc.prefix_products(agree).sum(), blocks)
    if survival_logits is not None:
        confidence = torch.sigmoid(survival_logits.to(torch.float32)) * mask
        error = confidence - alpha
        out["survival_error"] = (error.abs().sum(), slots)
        out["survival_bias"] = (error.sum(), slots)
        out["survival_product_bias"] = ((acc.prefix_products(confidence) - acc.prefix_products(alpha)).sum(), slots)
        out["survival_brier"] = (error.square().sum(), slots)
    pairs = {k: (s.detach().to(torch.float32), c.detach().to(torch.float32)) for k, (s, c) in out.items()}
    return ObjectiveStats({k: s for k, (s, _) in pairs.items()}, {k: c for k, (_, c) in pairs.items()})


def finish(
    cfg: ObjectiveConfig, *, rows: RowStats, valid: Tensor, survival_logits: Tensor | None, totals: Tensor | None
) -> tuple[Tensor, ObjectiveStats]:
    """Loss and metrics from the statistics of all rows. `totals` as of `denominators`, None for the local ones."""
    logits = None if survival_logits is None else torch.where(valid, survival_logits.to(rows.alpha.dtype), 0.0)
    sums = weighted_terms(cfg, rows=rows, valid=valid, survival_logits=logits, terms=cfg.active)
    totals = denominators(cfg, valid) if totals is None else totals.to(rows.alpha.device)
    loss = weighted_loss(cfg, sums, totals.to(rows.alpha.dtype))
    with torch.no_grad():
        logged = tuple(term for term in ("ce", "tv") if term not in sums)
        extra = weighted_terms(cfg, rows=rows, valid=valid, survival_logits=None, terms=logged)
        stats = summarise(cfg, rows=rows, valid=valid, survival_logits=logits, sums={**sums, **extra})
    return loss, stats


def _token_acceptance(rows: RowStats, valid: Tensor) -> Tensor:
    log_q = torch.where(valid, rows.log_q_label, -torch.inf)
    return acc.token_acceptance(log_p_label=rows.log_p_label, log_q_label=log_q)


def _slot_value(cfg: ObjectiveConfig, term: str, rows: RowStats) -> Tensor:
    if term == "ce":  # an unreachable text token counts 0, see divergence.cross_entropy
        return torch.where(rows.log_q_label > -torch.inf, -rows.log_q_label, 0.0)
    if term in ("tv", "l1"):
        return (1.0 - rows.alpha) * (2.0 if term == "l1" else 1.0)
    if term == "nla":
        assert rows.log_alpha is not None
        return -rows.log_alpha
    if term == "lk":
        assert rows.kl is not None
        return acc.lk_hybrid(kl=rows.kl, alpha=rows.alpha, eta=cfg.lk_eta)
    value = getattr(rows, term)
    assert value is not None, term
    return value
