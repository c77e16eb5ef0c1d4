"""The one equation of speculative decoding: what acceptance and costs predict.

    E(gamma) = 1 + sum_k P(drafts 1..k all accepted)        tokens per cycle, the bonus or correction token included
    S        = E(gamma) / (c * gamma + 1)                   sequential drafter, c = one draft step / one target step
    S        = E(gamma) / (c_block + gamma * c_step + v)    parallel drafter, v = target pass over gamma+1 tokens / over 1

Sequential case: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023. Every cost is a
ratio to one target pass over one token. Pure Python, no torch. Users' mistakes raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_SEARCH_LIMIT = 100_000  # draft lengths beyond this are nobody's operating point


def _check(name: str, value: float, low: float, high: float, *, open_high: bool = False) -> None:
    if not (low <= value < high if open_high else low <= value <= high):
        raise ValueError(f"{name}: got {value}, allowed: {low} to {'below ' if open_high else ''}{high}")


def expected_tokens(alpha: float, gamma: int) -> float:
    """E(gamma) when every slot accepts with the same probability: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    _check("alpha", alpha, 0.0, 1.0)
    _check("gamma", gamma, 0, math.inf)
    if alpha == 1.0:
        return gamma + 1.0
    # expm1 and log1p keep the digits for alpha near 1, where both differences cancel
    return -math.expm1((gamma + 1) * math.log1p(alpha - 1.0)) / (1.0 - alpha) if alpha > 0.0 else 1.0


def expected_tokens_per_slot(acceptance: Sequence[float]) -> float:
    """E from conditional acceptance per slot: 1 + sum_k prod_{i<=k} acceptance_i."""
    total, survival = 1.0, 1.0
    for k, value in enumerate(acceptance, 1):
        _check(f"acceptance of slot {k}", value, 0.0, 1.0)
        survival *= value
        total += survival
    return total


def speedup_sequential(alpha: float, gamma: int, c: float) -> float:
    """S = E(gamma) / (c * gamma + 1)."""
    _check("c", c, 0.0, math.inf)
    return expected_tokens(alpha, gamma) / (c * gamma + 1.0)


def speedup_parallel(
    tokens: float, gamma: float, *, c_block: float, c_step: float, v: float, overhead: float = 0.0, plain_overhead: float = 0.0
) -> float:
    """S = tokens * (1 + plain_overhead) / (c_block + gamma * c_step + v + overhead).

    tokens is E(gamma) or a measured tau. `overhead` is what the engine spends per cycle outside drafter and target,
    `plain_overhead` what plain decoding spends per step outside its target pass; both in target passes over one token,
    and both 0 in the textbook form.
    """
    _check("tokens", tokens, 0.0, math.inf)
    for name, value in (("c_block", c_block), ("c_step", c_step), ("overhead", overhead), ("plain_overhead", plain_overhead)):
        _check(name, value, 0.0, math.inf)
    if not v > 0.0:
        raise ValueError(f"v: got {v}, allowed: above 0")
    return tokens * (1.0 + plain_overhead) / (c_block + gamma * c_step + v + overhead)


def best_gamma(alpha: float, c: float) -> tuple[int, float]:
    """(gamma, S) that maximise the sequential form; (0, 1.0) when no draft length helps (alpha <= c).

    S is unimodal in gamma: one more slot pays iff alpha^(gamma+1) > c * S(gamma), and once it does not it never will.
    With c = 0 and alpha > 0 there is no finite best length: ValueError.
    """
    _check("c", c, 0.0, math.inf)
    if c == 0.0 and alpha > 0.0:
        raise ValueError("c: got 0, allowed: above 0 (free drafts have no best length)")
    gamma = 0
    while gamma < _SEARCH_LIMIT and alpha ** (gamma + 1) > c * speedup_sequential(alpha, gamma, c):
        gamma += 1
    return gamma, speedup_sequential(alpha, gamma, c)


def best_gamma_parallel(
    acceptance: Sequence[float], *, c_block: float, c_step: float, v: Callable[[int], float], overhead: float = 0.0
) -> tuple[int, float]:
    """(gamma, S) that maximise the parallel form over gamma in 1..len(acceptance); (0, 1.0) when plain decoding wins.

    v maps gamma to the cost of a target pass over gamma + 1 tokens. Searched in full, since a measured v need not be convex.
    """
    best = (0, 1.0)
    for gamma in range(1, len(acceptance) + 1):
        tokens = expected_tokens_per_slot(acceptance[:gamma])
        value = speedup_parallel(tokens, gamma, c_block=c_block, c_step=c_step, v=v(gamma), overhead=overhead)
        if value > best[1]:
            best = (gamma, value)
    return best


def flat_region(alpha: float, c: float, *, within: float = 0.03) -> tuple[int, int]:
    """Smallest and largest gamma whose S is within the given fraction of the best."""
    peak, best = best_gamma(alpha, c)
    floor = best * (1.0 - within)
    low = high = peak
    while low > 0 and speedup_sequential(alpha, low - 1, c) >= floor:
        low -= 1
    while high < _SEARCH_LIMIT and speedup_sequential(alpha, high + 1, c) >= floor:
        high += 1
    return low, high


def ceiling_sequential(alpha: float, c: float) -> float:
    """No gamma goes beyond min(1/c, 1/(1-alpha)); infinite with free and perfect drafts."""
    _check("alpha", alpha, 0.0, 1.0)
    _check("c", c, 0.0, math.inf)
    return min(1.0 / c if c > 0.0 else math.inf, 1.0 / (1.0 - alpha) if alpha < 1.0 else math.inf)


def ceiling_parallel(gamma: int, *, c_block: float, v: float) -> float:
    """(gamma + 1) / (c_block + v): every draft accepted and a free correction head."""
    return speedup_parallel(gamma + 1.0, gamma, c_block=c_block, c_step=0.0, v=v)


def break_even_acceptance(gamma: int, cost: float) -> float | None:
    """The equal-slot alpha at which E(gamma) equals the cycle's cost in plain steps; None if even alpha = 1 loses."""
    _check("cost", cost, 0.0, math.inf)
    if cost > gamma + 1.0:
        return None
    if cost <= 1.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # E is increasing in alpha; 60 halvings reach the last bit
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expected_tokens(middle, gamma) < cost else (low, middle)
    return high


def arithmetic_increase(alpha: float, gamma: int, c_hat: float) -> float:
    """Factor on arithmetic operations per token: (gamma * c_hat + gamma + 1) / E(gamma).

    c_hat = operations per token of the drafter / of the target (Leviathan et al.).
    """
    _check("c_hat", c_hat, 0.0, math.inf)
    return (gamma * c_hat + gamma + 1.0) / expected_tokens(alpha, gamma)


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """FLOP/byte at which a device turns from memory-bound to compute-bound (= tokens in flight, dense 16-bit weights)."""
    if not (peak_flops > 0.0 and bandwidth > 0.0):
        raise ValueError(f"peak_flops and bandwidth: got {peak_flops} and {bandwidth}, allowed: above 0")
    return peak_flops / bandwidth


def with_prefill(decode_speedup: float, prefill_share: float, prefill_ratio: float) -> float:
    """Speedup of a whole request whose plain time spends `prefill_share` in prefill.

    prefill_ratio = prefill time with the drafter / without. Amdahl: 1 / ((1 - f) / S + f * ratio).
    """
    _check("prefill_share", prefill_share, 0.0, 1.0)
    if not decode_speedup > 0.0:
        raise ValueError(f"decode_speedup: got {decode_speedup}, allowed: above 0")
    return 1.0 / ((1.0 - prefill_share) / decode_speedup + prefill_share * prefill_ratio)
