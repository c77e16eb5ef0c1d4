"""Memory for weights and caches that every pass reads from end to end: on huge pages where the system grants them.

With 4 KiB pages each page costs a table walk and stops the hardware's read-ahead; on 2 MiB pages one core reads clearly
faster. Transparent huge pages need no configuration; where they are off, the same calls give ordinary memory.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a huge page
ALIGN = 64  # bytes of a cache line and of a vector
BLOCK = 64 << 20  # bytes an Arena asks for at a time; untouched ones cost address space only


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor that starts on a cache line, on huge pages if it is large enough. Freed like any tensor."""
    elements = math.prod(shape)
    size = elements * torch.empty(0, dtype=dtype).element_size()
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = torch.zeros(size + ALIGN, dtype=torch.uint8)
        step = ALIGN
    else:
        area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(area, dtype=torch.uint8)  # keeps the mapping alive; fresh pages read as zeros
        step = HUGE
    skip = -raw.data_ptr() % step
    return raw[skip : skip + size].view(dtype).view(shape)


class Arena:
    """Hands out many tensors from few large blocks, so that small ones share huge pages. Freed when the last of them is."""

    def __init__(self, block: int = BLOCK):
        self.size = block
        self.block = torch.empty(0, dtype=torch.uint8)
        self.used = 0

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """1-D tensor on a cache line; its contents are undefined."""
        size = elements * torch.empty(0, dtype=dtype).element_size()
        if self.used + size > self.block.numel():
            self.block, self.used = zeros(max(self.size, size), dtype=torch.uint8), 0
        part = self.block[self.used : self.used + size].view(dtype)
        self.used += -(-size // ALIGN) * ALIGN
        return part
