"""From logits to the law that is served, and from a law to a token.

The law is built once, in float32, after temperature and truncation, and that very tensor is both sampled from and tested
against: a draft drawn from one tensor and tested with another is biased. Order as in transformers and vLLM: temperature, then
top-k, then top-p on the renormalised rest. Ties at a cut stay in (both cuts are thresholds on values), so the law depends on
the logits alone and not on a sorting order.

Shapes: B batch rows, K positions per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .config import SamplingParams

_COLDEST = 1e-30
# Width of the stripes of a row whose maxima are taken first, see `argmax`.
_STRIPE = 64
_LONG = 1 << 15  # entries below which one pass is as quick


@dataclass(frozen=True)
class SamplingBatch:
    """The settings of B rows on the device, with what the host knows about them (so that nothing has to be synchronised).

    temperature float32 [B], top_k int64 [B], top_p float32 [B], seeds int64 [B], positions int64 [B] (committed length of the
    row = absolute position of its anchor). all_greedy / any_greedy: temperature 0 in all / some rows. max_top_k: the largest
    top_k in use, 0 where no row has one. any_top_p: some row has top_p < 1. max_position: the largest position (None: unknown).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor
    all_greedy: bool
    any_greedy: bool = True
    max_top_k: int | None = None
    any_top_p: bool | None = None
    max_position: int | None = None

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], positions: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """One row per request. A greedy row drops its truncation: it cannot change the arg-max."""
        hot = [p.temperature > 0 for p in params]
        top_k = [p.top_k if h else 0 for p, h in zip(params, hot, strict=True)]
        top_p = [p.top_p if h else 1.0 for p, h in zip(params, hot, strict=True)]
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            seeds=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            positions=torch.as_tensor(positions, dtype=torch.int64, device=device),
            all_greedy=not any(hot),
            any_greedy=not all(hot),
            max_top_k=max(top_k, default=0),
            any_top_p=any(p < 1 for p in top_p),
            max_position=None if isinstance(positions, Tensor) else max(positions, default=0),
        )

    def at(self, positions: Sequence[int] | Tensor) -> SamplingBatch:
        """The same rows one cycle later."""
        moved = torch.as_tensor(positions, dtype=torch.int64, device=self.positions.device)
        return replace(self, positions=moved, max_position=None if isinstance(positions, Tensor) else max(positions, default=0))

    def probabilities(self, logits: Tensor) -> Tensor:
        """`probabilities` with the settings of these rows: logits [B,K,V] -> float32 [B,K,V]."""
        return probabilities(
            logits,
            self.temperature,
            self.top_k,
            self.top_p,
            any_greedy=self.any_greedy,
            max_top_k=self.max_top_k,
            any_top_p=self.any_top_p,
        )


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    any_greedy: bool | None = None,
    max_top_k: int | None = None,
    any_top_p: bool | None = None,
) -> Tensor:
    """The law each position is sampled from.

    logits [B,K,V] in any float type; temperature float32 [B]; top_k int64 [B] (0: off); top_p float32 [B] (1: off).
    Returns float32 [B,K,V] (float64 for float64 logits), summing to 1. Temperature 0 gives the one-hot of the first arg-max.

    any_greedy, max_top_k, any_top_p are what the host knows of the settings; None reads it from CPU tensors, and on an
    accelerator takes the general path rather than wait for the device.
    """
    on_host = temperature.device.type == "cpu"
    if any_greedy is None:
        any_greedy = bool((temperature == 0).any()) if on_host else True
    if max_top_k is None:
        max_top_k = int(top_k.max()) if on_host else logits.shape[-1]
    if any_top_p is None:
        any_top_p = bool((top_p < 1).any()) if on_host else True
    logits = logits if logits.dtype == torch.float64 else logits.float()
    heat = temperature.to(logits.dtype)[:, None, None]
    # The floor keeps finite logits finite: at such a temperature the law is the arg-max anyway.
    scaled = logits / torch.where(heat > 0, heat.clamp(min=_COLDEST), torch.ones_like(heat))
    if max_top_k > 0:
        scaled = _cut_top_k(scaled, top_k, min(max_top_k, logits.shape[-1]))
    probs = scaled.softmax(-1)
    if any_top_p:
        probs = _cut_top_p(probs, top_p)
    if any_greedy:
        certain = torch.zeros_like(probs).scatter_(-1, argmax(logits).unsqueeze(-1), 1.0)
        probs = torch.where(heat > 0, probs, certain)
    return probs


def _cut_top_k(scaled: Tensor, top_k: Tensor, largest: int) -> Tensor:
    ordered = scaled.topk(largest, dim=-1).values
    index = (top_k.clamp(1, largest) - 1)[:, None, None].expand(-1, scaled.shape[1], 1)
    threshold = ordered.gather(-1, index)
    return scaled.masked_fill((scaled < threshold) & (top_k > 0)[:, None, None], float("-inf"))


def _cut_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    limit = top_p.to(probs.dtype)[:, None, None]
    ordered = _descending(probs)
    # The last token kept is the first at which the mass from the top reaches top_p.
    last = torch.searchsorted(ordered.cumsum(-1), limit.expand(*probs.shape[:2], 1).contiguous()).clamp(max=probs.shape[-1] - 1)
    # Rows without top-p keep their bits (threshold 0, scale 1): what other rows ask for changes nothing for them.
    cut = limit < 1
    threshold = torch.where(cut, ordered.gather(-1, last), torch.zeros_like(limit))
    kept = probs.masked_fill(probs < threshold, 0.0)
    return kept.mul_(torch.where(cut, 1 / kept.sum(-1, keepdim=True), torch.ones_like(limit)))


def _descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        # numpy sorts with vector instructions: 1.3 ms for 8 rows of 49,152 where torch.sort takes 20 ms and more.
        return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def argmax(logits: Tensor) -> Tensor:
    """First largest entry of each row: [..., V] -> int64 [...].

    In two stages, stripe maxima first: over a long row on a CPU, arg-max is several times slower than a plain maximum.
    """
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" or vocab % _STRIPE or vocab == _STRIPE or logits.numel() < _LONG:
        return logits.argmax(-1)
    stripes = logits.unflatten(-1, (-1, _STRIPE))
    best = stripes.amax(-1).argmax(-1, keepdim=True)
    inside = stripes.gather(-2, best.unsqueeze(-1).expand(*best.shape, _STRIPE)).squeeze(-2).argmax(-1)
    return best.squeeze(-1) * _STRIPE + inside


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: one token per law.

    probs [..., V], not negative, with positive mass (need not be normalised); u [...] in (0, 1). Returns int64 [...]. A token
    of probability 0 is never returned.
    """
    assert probs.shape[:-1] == u.shape, (probs.shape, u.shape)
    cdf = probs.cumsum(-1)
    # u * total < total in floating point for every u < 1, hence some entry lies above the goal.
    goal = u.to(probs.dtype).unsqueeze(-1) * cdf[..., -1:]
    if probs.device.type == "cpu":
        # The running sum of one row is serial here, hence monotone: the first entry above the goal has risen.
        return torch.searchsorted(cdf, goal, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
    # A parallel scan may fall by a rounding error: ask for a risen entry of positive probability outright.
    hit = (cdf > goal) & (probs > 0)
    found = hit.to(torch.uint8).argmax(-1)
    return torch.where(hit.any(-1), found, probs.argmax(-1))
