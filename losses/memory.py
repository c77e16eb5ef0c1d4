"""Working memory of the fused objective, reused from chunk to chunk and, on a CPU, from call to call.

Fresh memory costs a page fault per page and a pass to clear it: as much time as the passes over the logits themselves. So a
thread keeps its rooms (at most the largest memory budget it was called with) on huge pages where the system grants them. On a
GPU torch's own allocator keeps memory already.
"""

from __future__ import annotations

import math
import mmap
import threading

import torch
from torch import Tensor

_HUGE = 2 << 20  # bytes of a huge page
_kept = threading.local()


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device=device)
    area = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(area, dtype=torch.uint8)  # keeps the mapping alive
    skip = -raw.data_ptr() % _HUGE
    return raw[skip : skip + size].view(dtype)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of anything, on huge pages if it is large."""
    return _empty(math.prod(shape), dtype, device).view(shape)


class Room:
    """Memory for one table at a time."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.flat = torch.empty(0, dtype=dtype, device=device)

    def take(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of anything, contiguous; what was taken before is lost."""
        if self.flat.numel() < rows * columns:
            self.flat = self.flat.new_empty(0)  # let the old memory go first
            self.flat = _empty(rows * columns, self.dtype, self.device)
        return self.flat[: rows * columns].view(rows, columns)


def room(name: str, dtype: torch.dtype, device: torch.device) -> Room:
    """The room of that name: this thread's own on a CPU, a new one elsewhere."""
    if device.type != "cpu":
        return Room(dtype, device)
    rooms = _kept.__dict__.setdefault("rooms", {})
    return rooms.setdefault((name, dtype), Room(dtype, device))


def release() -> None:
    """Give back what this thread keeps."""
    _kept.__dict__.pop("rooms", None)
