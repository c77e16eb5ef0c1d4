"""Stateless uniforms: a counter hash, so that an answer never depends on the batch it ran in.

Each number is a function of (seed, stream, position, index) alone: no generator state is carried from cycle to
cycle, and rows that join or leave change nothing for the others. The mixer is the finaliser of splitmix64 (Steele,
Lea, Flood 2014). Integer arithmetic only, and an exact conversion at the end: CPU and CUDA give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import sampling as native

# One stream for each use within a cycle: the numbers of two uses must be independent of each other.
DRAFT = 0  # tokens drawn by a proposer
VERIFY = 1  # accept / reject
EMIT = 2  # the token drawn from the residual, the bonus law, or the prefill's last position

_BITS = 23


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
# For the stream word, small enough that its multiples stay within int64 in Python too.
_STREAM_STEP = 0x632BE5AB
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically: clear the copies of the sign bit.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    # The products wrap modulo 2**64 (two's complement) on every device torch supports.
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def hash_int64(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """The 64 random bits behind `uniforms`: int64 [B], int64 [B] -> int64 [B,count]."""
    assert seeds.dtype == torch.int64 and positions.dtype == torch.int64, (seeds.dtype, positions.dtype)
    assert seeds.shape == positions.shape and seeds.dim() == 1 and stream >= 0 and count >= 0
    # Mixed after every word, so that (seed, position) and (seed + 1, position - 1) share nothing.
    state = _mix(_mix(seeds + _GOLDEN) + (stream + 1) * _STREAM_STEP)
    state = _mix(state ^ (positions * _GOLDEN))
    index = torch.arange(1, count + 1, device=seeds.device, dtype=torch.int64)
    return _mix(state[:, None] + index * _GOLDEN)


def uniforms(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """Independent uniforms on the open interval (0, 1): float32 [B,count].

    seeds      int64 [B], the seed of each row's request
    positions  int64 [B], a position of that request used once per stream (its committed length)
    count      how many numbers per row; the first n do not depend on count
    stream     DRAFT, VERIFY or EMIT, or another small integer of the caller

    The values are odd multiples of 2**-24, exact in float32; 0 and 1 do not occur.
    """
    if native.usable(seeds, positions, dtypes=(torch.int64,)):
        return native.uniforms(seeds, positions, count, stream)  # the same bits in 2 us where these dozen operations take 80
    return _uniforms(seeds, positions, count, stream)


def _uniforms(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    high = _shift(hash_int64(seeds, positions, count, stream), 64 - _BITS)
    return (high.to(torch.float32) + 0.5) * 2.0**-_BITS
