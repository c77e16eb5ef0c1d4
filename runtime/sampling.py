"""From logits to the law that is served, and from a law to a token.

The law is built once, in float32, after temperature and truncation, and that very tensor is both sampled from and tested
against: a draft drawn from one tensor and tested with another is biased. Order as in transformers and vLLM: temperature, then
top-k, then top-p on the renormalised rest. Ties at a cut stay in (both cuts are thresholds on values), so the law depends on
the logits alone and not on a sorting order.

On a CPU, float32 and bf16 logits go through native code (kernels/sampling.cpp) where it can be built; the PyTorch code here
defines what it computes, and serves float64, accelerators and machines without a compiler.

Shapes: B batch rows, K positions per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import SamplingParams
from .kernels import sampling as native

_FLOATS = (torch.float32, torch.bfloat16)  # logits that the native code takes
_COLDEST = 1e-30
# Width of the stripes of a row whose maxima are taken first, see `argmax`.
_STRIPE = 64
_LONG = 1 << 15  # entries below which one pass is as quick


@dataclass(frozen=True)
class SamplingBatch:
    """The settings of B rows on the device, with what the host knows about them (so that nothing has to be synchronised).

    temperature float32 [B], top_k int64 [B], top_p float32 [B], seeds int64 [B], positions int64 [B] (committed length of the
    row = absolute position of its anchor). all_greedy / any_greedy: temperature 0 in all / some rows. max_top_k: the largest
    top_k in use, 0 where no row has one. any_top_p: some row has top_p < 1. max_position: no position is larger (None:
    unknown). params: the settings the rows were built from (empty: unknown).
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
    params: tuple[SamplingParams, ...] = ()

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], positions: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """One row per request. A greedy row drops its truncation: it cannot change the arg-max."""
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([_top_k(p) for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([_top_p(p) for p in params], dtype=torch.float32, device=device),
            seeds=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            positions=torch.as_tensor(positions, dtype=torch.int64, device=device),
            max_position=None if isinstance(positions, Tensor) else max(positions, default=0),
            **_facts(params),
        )

    def at(self, positions: Sequence[int] | Tensor) -> SamplingBatch:
        """The same rows one cycle later."""
        moved = torch.as_tensor(positions, dtype=torch.int64, device=self.positions.device)
        return replace(self, positions=moved, max_position=None if isinstance(positions, Tensor) else max(positions, default=0))

    def select(self, index: Sequence[int]) -> SamplingBatch:
        """The rows at `index` (host integers), in that order."""
        index = list(index)
        if index == list(range(len(self.temperature))):
            return self
        at = torch.tensor(index, dtype=torch.int64, device=self.temperature.device)
        moved = {name: getattr(self, name)[at] for name in ("temperature", "top_k", "top_p", "seeds", "positions")}
        # Without the settings, what holds for all rows (or is an upper bound for them) is kept: still true of these.
        facts = _facts([self.params[i] for i in index]) if self.params else {}
        return replace(self, **moved, **facts)

    def probabilities(self, logits: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        """`probabilities` with the settings of these rows: logits [B,K,V] -> float32 [B,K,V].

        widths: host integers; what stands at or after position widths[b] of a row is undefined (None: all positions live).
        """
        if native.usable(logits, dtypes=_FLOATS):
            return native.law(logits, *self.native_settings(), widths=widths)[0]
        return _probabilities(
            logits,
            self.temperature,
            self.top_k,
            self.top_p,
            any_greedy=self.any_greedy,
            max_top_k=self.max_top_k,
            any_top_p=self.any_top_p,
        )

    def sample(self, logits: Tensor, u: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token per row and the law it was drawn from: logits [B,V], u [B] -> (int64 [B], law [B,V]).

        The same bits as `draw(probabilities(...))`, in one native call where there is one. The law is written to `out` if given
        (float32 [B,V], any row stride), which is then the law returned.
        """
        if native.usable(logits, dtypes=_FLOATS) and native.usable(u):
            target = None if out is None else out[:, None]
            law, tokens = native.law(logits[:, None], *self.native_settings(), u=u[:, None], out=target)
            assert tokens is not None
            return tokens[:, 0], law[:, 0]
        law = self.probabilities(logits[:, None])[:, 0]
        if out is not None:
            law = out.copy_(law)
        return draw(law, u), law

    def native_settings(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """temperature, top_k, top_p as kernels.sampling takes them: None for a truncation that no row uses."""
        return (
            self.temperature,
            None if self.max_top_k == 0 else self.top_k,
            self.top_p if self.any_top_p is not False else None,
        )


def _top_k(params: SamplingParams) -> int:
    return params.top_k if params.temperature > 0 else 0


def _top_p(params: SamplingParams) -> float:
    return params.top_p if params.temperature > 0 else 1.0


def _facts(params: Sequence[SamplingParams]) -> dict[str, Any]:
    """What the host knows of rows with these settings."""
    hot = [p.temperature > 0 for p in params]
    return {
        "all_greedy": not any(hot),
        "any_greedy": not all(hot),
        "max_top_k": max(map(_top_k, params), default=0),
        "any_top_p": any(_top_p(p) < 1 for p in params),
        "params": tuple(params),
    }


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
    if native.usable(logits, dtypes=_FLOATS) and native.usable(temperature, top_p):
        return native.law(logits, temperature, None if max_top_k == 0 else top_k, None if any_top_p is False else top_p)[0]
    return _probabilities(logits, temperature, top_k, top_p, any_greedy=any_greedy, max_top_k=max_top_k, any_top_p=any_top_p)


def _probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    any_greedy: bool | None = None,
    max_top_k: int | None = None,
    any_top_p: bool | None = None,
) -> Tensor:
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
        certain = torch.zeros_like(probs).scatter_(-1, _argmax(logits).unsqueeze(-1), 1.0)
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


def argmax(logits: Tensor, widths: Sequence[int] | None = None) -> Tensor:
    """First largest entry of each row: [..., V] -> int64 [...].

    widths (for [B,K,V]): host integers; at or after position widths[b] any index may stand, though a valid one.
    """
    if logits.dim() <= 3 and logits.shape[-1] and native.usable(logits, dtypes=_FLOATS):
        rows = logits.reshape(-1, 1, logits.shape[-1]) if logits.dim() < 3 else logits
        return native.argmax(rows, widths).view(logits.shape[:-1])
    return _argmax(logits)


def _argmax(logits: Tensor) -> Tensor:
    """In two stages, stripe maxima first: over a long row on a CPU, arg-max is several times slower than a plain maximum."""
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
    if native.usable(probs, u):
        return native.draw(probs, u)
    return _draw(probs, u)


def _draw(probs: Tensor, u: Tensor) -> Tensor:
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
