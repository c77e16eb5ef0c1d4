"""Static key/value cache: one preallocated buffer, rows ("slots") that requests borrow.

Nothing here tracks lengths: the caller passes the committed length of every row to each forward, so rolling
back a rejected block is simply not advancing that length. Stale entries past a row's length are never read,
because a query at position p reads positions <= p only, and those were all written at or before that query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

KEY_BLOCK = 32  # keys per block of the "blocked" value layout (one bf16 AMX tile row)


@dataclass(kw_only=True)
class KVCache:
    """Keys and values of every layer for a fixed number of slots.

    k: [L, slots, nkv, S, hd].
    v: [L, slots, nkv, S, hd] (layout "plain"), or [L, slots, nkv, S/32, hd, 32] (layout "blocked": 32 keys of
       one channel are adjacent, what the CPU kernels read; same values, same size).
    S is at least max_context + 1: writes at or past `max_context` (padding of a wide batch) land in the
    spare tail, or are skipped, and are never read by a valid query.
    """

    k: Tensor
    v: Tensor
    max_context: int
    layout: str = "plain"

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "plain",
        value_dim: int | None = None,
        zeros: Callable[..., Tensor] | None = None,
    ) -> KVCache:
        """Zeroed cache (zeros, not empty: a masked key must be finite, since 0 * NaN is NaN).

        zeros: makes the buffers, called as zeros(*shape, dtype=dtype); None: torch.zeros on `device`.
        Raises ValueError if slots or max_context is below 1.
        """
        if slots < 1 or max_context < 1:
            raise ValueError(f"cache: slots={slots}, max_context={max_context}: both must be at least 1")
        assert layout in ("plain", "blocked")
        length = -(-(max_context + 1) // KEY_BLOCK) * KEY_BLOCK
        zeros = zeros or partial(torch.zeros, device=device)
        k = zeros(layers, slots, kv_heads, length, head_dim, dtype=dtype)
        if layout == "blocked":
            v = zeros(layers, slots, kv_heads, length // KEY_BLOCK, head_dim, KEY_BLOCK, dtype=dtype)
        else:
            v = zeros(layers, slots, kv_heads, length, value_dim or head_dim, dtype=dtype)
        return cls(k=k, v=v, max_context=max_context, layout=layout)

    @property
    def slots(self) -> int:
        """Number of rows that requests can borrow."""
        return self.k.shape[1]

    @property
    def length(self) -> int:
        """Allocated positions S of each slot (max_context + 1 rounded up)."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values in bytes."""
        return self.k.nbytes + self.v.nbytes

    def values(self) -> Tensor:
        """The values as [L, slots, nkv, S, hd] whatever the layout (a copy when blocked; for tests and tools)."""
        if self.layout == "plain":
            return self.v
        return self.v.transpose(-1, -2).reshape(self.k.shape)
