"""Memory of the kernels: zeroed, aligned, kept alive by its tensors, with huge pages or without."""

from __future__ import annotations

import gc

import pytest
import torch

from draftsmith.runtime.kernels import memory


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 1 << 20)])
def test_zeros(shape: tuple[int, ...], huge: bool, monkeypatch: pytest.MonkeyPatch):
    if not huge:
        monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE", raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        x = memory.zeros(*shape, dtype=dtype)
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and x.data_ptr() % memory.ALIGN == 0
        assert not x.any()
        x.fill_(2)
        part = x[-1:]
        del x
        gc.collect()
        assert (part == 2).all()


def test_arena_parts_do_not_overlap_and_outlive_it():
    arena = memory.Arena(block=4096)
    parts = [arena.empty(n, torch.float32).fill_(i) for i, n in enumerate((7, 16, 900, 200, 5000, 1))]
    del arena
    gc.collect()
    for i, (part, n) in enumerate(zip(parts, (7, 16, 900, 200, 5000, 1), strict=True)):
        assert part.shape == (n,) and part.data_ptr() % memory.ALIGN == 0 and (part == i).all()
