"""Verification of several candidates at one node of a draft tree: pure functions, lossless.

All K candidates are alternatives for the same position, so p and q are single laws. Rules: `multi_round` (SpecInfer,
arXiv 2305.09781), `without_replacement` (recursive rejection sampling of RSD, arXiv 2402.14160, and Sequoia,
arXiv 2402.12374), `k_seq` (SpecTr, arXiv 2310.15141).

Shapes: B nodes, K candidates, V vocabulary. p float [B,V], q float [B,V], tokens int64 [B,K], uniforms [B,K] in (0,1). The
candidates must have been drawn from q itself: independently for `multi_round` and `k_seq`, one after the other without
replacement for `without_replacement`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .verify import RESIDUAL_FLOOR, prefix_length

_BISECTIONS = 60  # the interval [1, K] shrinks below float64 resolution


class NodeVerdict(NamedTuple):
    """chosen int64 [B]: index of the accepted candidate, K for none. residual [B,V]: law of the token where none is."""

    chosen: Tensor
    residual: Tensor


class NodeTest(NamedTuple):
    """thresholds [B,K]: acceptance of candidate j given that those before it failed. residual [B,V] after all failed."""

    thresholds: Tensor
    residual: Tensor


def multi_round(p: Tensor, q: Tensor, tokens: Tensor) -> NodeTest:
    """SpecInfer: r <- p; accept with min(1, r/q); on failure r <- (r - q)+ normalised; the last r is drawn from."""
    return _rounds(p, q, tokens, replace=True)


def without_replacement(p: Tensor, q: Tensor, tokens: Tensor) -> NodeTest:
    """As `multi_round`, and each failed candidate is struck from q, which is normalised again."""
    return _rounds(p, q, tokens, replace=False)


def _rounds(p: Tensor, q: Tensor, tokens: Tensor, *, replace: bool) -> NodeTest:
    rest, draft, thresholds = p, q, []
    for child in range(tokens.shape[1]):
        token = tokens[:, child : child + 1]
        thresholds.append(_ratio(rest.gather(1, token), draft.gather(1, token)))
        rest = _normalised((rest - draft).clamp(min=0), rest)
        if not replace:
            struck = draft.scatter(1, token, 0.0)
            draft = _normalised(struck, struck)
    return NodeTest(torch.cat(thresholds, dim=1), rest)


def k_seq(p: Tensor, q: Tensor, tokens: Tensor) -> NodeTest:
    """SpecTr K-SEQ: accept with min(1, p / (rho q)), rho in [1, K] the root of 1 - (1 - beta)^K = rho beta.

    beta = sum_v min(q, p / rho). The residual is p - min(q, p / rho) (1 - (1 - beta)^K) / beta, normalised.
    """
    count = tokens.shape[1]
    low = p.new_ones(p.shape[0], 1)
    high = low * count
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        overlap = torch.minimum(q, p / middle).sum(-1, keepdim=True)
        below = 1 - (1 - overlap) ** count > middle * overlap
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    # The upper end: there 1 - (1 - beta)^K <= rho beta, so the residual is not negative.
    common = torch.minimum(q, p / high)
    overlap = common.sum(-1, keepdim=True)
    share = (1 - (1 - overlap) ** count) / overlap.clamp(min=torch.finfo(p.dtype).tiny)
    residual = _normalised((p - common * share).clamp(min=0), p)
    return NodeTest(_ratio(p.gather(1, tokens) / high, q.gather(1, tokens)), residual)


def verify_node(
    rule: Callable[[Tensor, Tensor, Tensor], NodeTest], p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor
) -> NodeVerdict:
    """Run one of the rules: the first candidate whose uniform is at most its threshold."""
    test = rule(p, q, tokens)
    return NodeVerdict(prefix_length(uniforms > test.thresholds), test.residual)


NODE_RULES = {"multi_round": multi_round, "without_replacement": without_replacement, "k_seq": k_seq}


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    ratio = (numerator / denominator.clamp(min=torch.finfo(numerator.dtype).tiny)).clamp(max=1)
    return torch.where(denominator > 0, ratio, torch.zeros_like(ratio))


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > RESIDUAL_FLOOR, weights / mass.clamp(min=RESIDUAL_FLOOR), fallback)
