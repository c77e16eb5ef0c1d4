"""Divergences between the target's law p and the drafter's law q, one value for each position.

Every function takes log-probabilities [..., Vd] over the draft vocabulary: `log_q` sums to one, `log_p` is
normalised over the FULL target vocabulary, so with a reduced draft vocabulary exp(log_p) sums to a mass
m <= 1. No gradient flows into `log_p` (callers pass it detached). Entries of `log_p` may be -inf (p = 0).
Gradient notes are with respect to the draft logits z, where q = softmax(z).
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(*, log_q: Tensor, label: Tensor) -> Tensor:
    """-log q(y): `label` int64 [...] is a column of `log_q`, or -1 for a text token outside the draft vocabulary.

    Gradient q - onehot(y). A token outside the draft vocabulary gives 0 and no gradient: no q can reach it.
    Source: DSpark (arXiv 2607.05147) eq. 9; the label is the text token, not the target's arg-max.
    """
    inside = label >= 0
    picked = log_q.gather(-1, label.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, -picked, 0.0)


def forward_kl(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """m KL(p/m || q) over the draft vocabulary, m = its mass under p; KL(p || q) when nothing is left out.

    KL over the full vocabulary is infinite where q cannot follow. This form is the expected cross-entropy of
    a text token that counts 0 outside the draft vocabulary, less its minimum, so it is >= 0 and 0 at q = p/m.
    Gradient m q - p: strong everywhere, also where p and q do not overlap (methods 2.1). Source: distillation losses of
    EAGLE-3 (arXiv 2503.01840) and DistillSpec (arXiv 2310.08461); here per slot, without a decay of its own.
    """
    p = log_p.exp()
    mass = p.sum(-1)
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return terms.sum(-1) - torch.xlogy(mass, mass)


def reverse_kl(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) = sum q (log q - log p), p normalised over the full vocabulary.

    Gradient q (log(q/p) - KL): zero-forcing. Infinite where p = 0 exactly and q > 0. Source: compared with others as a
    drafter's loss in Bebop (arXiv 2606.12370) table 2.
    """
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)


def jensen_shannon(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """1/2 KL(p || M) + 1/2 KL(q || M), M = (p + q)/2, in nats, over the full vocabulary; at most log 2.

    Tokens outside the draft vocabulary have q = 0 and add (1 - m) log 2 / 2.
    Gradient q (r - sum q r) with r = 1/2 log(q / M): bounded, vanishes where alpha = 0. Source: Lin 1991, "Divergence
    measures based on the Shannon entropy".
    """
    p, q = log_p.exp(), log_q.exp()
    log_mix = torch.logaddexp(log_p, log_q) - _LOG2
    part_p = torch.where(p > 0, p * (log_p - log_mix), 0.0).sum(-1)
    part_q = torch.where(q > 0, q * (log_q - log_mix), 0.0).sum(-1)
    return 0.5 * (part_p + part_q + (1.0 - p.sum(-1)) * _LOG2)


def total_variation(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """TV(p, q) = 1/2 sum |p - q| over the full vocabulary = 1 - sum min(p, q) = 1 - alpha.

    Gradient q (S - 1[q <= p]), S = sum q 1[q <= p] (Bebop, arXiv 2606.12370 eq. 11): at most of the size of q,
    gone where alpha is near 0.
    """
    return 1.0 - torch.minimum(log_p, log_q).exp().sum(-1)


def l1(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum |p - q| = 2 TV(p, q), DSpark's own term (arXiv 2607.05147 eq. 10). Gradient twice that of TV."""
    return 2.0 * total_variation(log_p=log_p, log_q=log_q)


def renyi_half(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Renyi divergence of order 1/2: -2 log sum sqrt(p q), by logsumexp (D-PARD, speculators#1078).

    Gradient q - sqrt(p q)/sum sqrt(p q): of KL's size at the start of training, symmetric in p and q.
    """
    return -2.0 * torch.logsumexp(0.5 * (log_p + log_q), dim=-1)


_LOG2 = 0.6931471805599453
