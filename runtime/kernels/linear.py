"""Linear layers over weights packed once, and the memory-bandwidth probe of the benchmarks."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from .build import available, library, problem
from .memory import Arena, zeros


def pack(weight: Tensor, arena: Arena | None = None) -> Tensor:
    """Weight [N,K] (float32 or bf16, CPU) -> packed 1-D tensor, from `arena` if given; layout in linear.h."""
    assert weight.dim() == 2 and weight.device.type == "cpu"
    weight = weight.detach().contiguous()
    rows, columns = weight.shape
    lib = library()
    size = lib.ds_packed_size(weight.element_size(), rows, columns)
    packed = zeros(size, dtype=weight.dtype) if arena is None else arena.empty(size, weight.dtype)
    lib.ds_pack(weight.element_size(), weight.data_ptr(), rows, columns, packed.data_ptr(), torch.get_num_threads())
    return packed


class PackedLinear:
    """y = x W^T + b on CPU, bitwise the same for a row whatever the other rows are. No gradient.

    weight [N,K] float32 or bf16, bias [N] or None. Call with x [..., K] in the weight's dtype -> [..., N]
    (float32 with `as_float`, else the weight's dtype). Accumulates in float32. Raises ValueError where the kernels
    cannot run in that dtype (see `problem`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        if not available(weight.dtype):
            raise ValueError(f"PackedLinear: {problem(weight.dtype)}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = pack(weight)
        self.bias = None if bias is None else bias.detach().float().contiguous()

    @torch.no_grad()
    def __call__(self, x: Tensor, *, as_float: bool = False) -> Tensor:
        """x [..., K] -> [..., N]."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features
        rows = x.reshape(-1, self.in_features)
        if self.dtype == torch.bfloat16 and self.in_features % 32:
            rows = F.pad(rows, (0, -self.in_features % 32))
        rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features, dtype=torch.float32 if as_float else self.dtype)
        if rows.shape[0]:
            library().ds_linear(
                self.packed.element_size(),
                rows.data_ptr(),
                rows.shape[0],
                self.packed.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                self.out_features,
                self.in_features,
                out.data_ptr(),
                int(as_float),
                torch.get_num_threads(),
            )
        return out.view(*x.shape[:-1], self.out_features)


def read_bandwidth(nbytes: int, repeats: int = 9) -> float:
    """Measured read bandwidth in bytes per second: median over passes through a buffer of `nbytes`, all threads."""
    buffer = zeros(nbytes // 4, dtype=torch.float32).fill_(1.0)
    threads, times = torch.get_num_threads(), []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        library().ds_read(buffer.data_ptr(), buffer.numel(), threads)
        times.append(time.perf_counter() - begin)
    return buffer.nbytes / sorted(times[1:])[repeats // 2]
