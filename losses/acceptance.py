"""Acceptance of a draft by token-wise verification, and the losses made of it.

alpha = sum_v min(p_v, q_v) is the probability that one draft is accepted at a given prefix. Along a target
path y ~ p the chance that k drafts in a row survive is E[W_{k-1} alpha_k], where a_i = min(1, q_i(y_i)/p_i(y_i))
and W_k = a_1 ... a_k (methods 2.3). Same conventions on `log_p`, `log_q` as in `divergence.py`; block tensors
are [A, G] with slots last, and a masked slot carries acceptance 0, which stops every product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def acceptance(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """alpha = sum min(p, q), [...]: exact for a reduced draft vocabulary too. Gradient q 1[q <= p] - q S."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def log_acceptance(*, log_p: Tensor, log_q: Tensor) -> Tensor:
    """log alpha = logsumexp(min(log p, log q)), without a clamp (methods 7.4).

    Minus this is the `nla` loss (LK, arXiv 2602.23881): its gradient is TV's divided by alpha, and stays of
    order one where alpha underflows; for a one-hot p it is the cross-entropy.
    """
    return torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)


def lk_hybrid(*, kl: Tensor, alpha: Tensor, eta: float) -> Tensor:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta sg[alpha]), per position (LK, arXiv 2602.23881).

    KL leads while alpha is small, TV later. Gradient lambda (q - p) + (1 - lambda) q (S - 1[q <= p]) with the full
    vocabulary; none through lambda.
    """
    share = torch.exp(-eta * alpha.detach())
    return share * kl + (1.0 - share) * (1.0 - alpha)


def token_acceptance(*, log_p_label: Tensor, log_q_label: Tensor) -> Tensor:
    """a = min(1, q(y)/p(y)), [...], from log-probabilities of the realised token (log q = -inf gives 0).

    Gradient a * grad log q(y) where q(y) < p(y) and 0 elsewhere: one-sided by design (methods 7.11).
    """
    return torch.exp((log_q_label - log_p_label).clamp(max=0.0))


def prefix_products(x: Tensor) -> Tensor:
    """Running products along the last axis, inclusive, [A, G]. A plain loop: its gradient is right at zeros
    and, unlike cumprod's, never waits for the device."""
    running, out = None, []
    for column in x.unbind(-1):
        running = column if running is None else running * column
        out.append(running)
    return torch.stack(out, dim=-1)


def reach(a: Tensor) -> Tensor:
    """W_{k-1} for k = 1..G, [A, G]: 1 at the first slot, then running products of `a` [A, G]."""
    return torch.cat([torch.ones_like(a[:, :1]), prefix_products(a[:, :-1])], dim=-1) if a.shape[-1] > 1 else torch.ones_like(a)


def product_tv(*, alpha: Tensor, valid: Tensor) -> Tensor:
    """End-to-end TV of a block, [A]: (1/G) sum over valid k of (1 - alpha_1 ... alpha_k).

    For a full block this is 1 - mean_k prod alpha (Bebop, arXiv 2606.12370). alpha must be 0 at masked slots. The
    product is a low-variance, slightly biased stand-in for E[W alpha]. Gradient: that of alpha_i times
    -(1/G) sum_{k >= i} prod_{j <= k, j != i} alpha_j, so it moves to the slots that limit the block.
    """
    return ((1.0 - prefix_products(alpha)) * valid).sum(-1) / alpha.shape[-1]


def expected_rejection(*, alpha: Tensor, a: Tensor, valid: Tensor) -> Tensor:
    """(1/G) sum over valid k of (1 - W_{k-1} alpha_k), [A]: unbiased for the exact expected accepted drafts.

    Autodiff through W gives reach-weighted TV plus a one-sided cross-entropy on y_k scaled by what follows
    (methods 2.3): with C_{k+1} the accepted drafts expected after y_k, minus (1/G) times
    W_{k-1} (grad alpha_k + 1[q < p] a_k C_{k+1} grad log q_k(y_k)), summed over k. Source: this project, methods 2.3.
    Right only if y was sampled from the p of the loss: same temperature, same truncation.
    """
    return ((1.0 - reach(a) * alpha) * valid).sum(-1) / alpha.shape[-1]


def survival_bce(*, survival_logits: Tensor, alpha: Tensor) -> Tensor:
    """Binary cross-entropy of sigmoid(logit) against the soft label sg[alpha] (DSpark eq. 11-12), per position.

    Gradient with respect to the logit: sigmoid(logit) - alpha; none into alpha. Its floor is the entropy of the label, so
    judge the head by |c - alpha| and Brier.
    """
    return binary_cross_entropy_with_logits(survival_logits, alpha.detach(), reduction="none")
