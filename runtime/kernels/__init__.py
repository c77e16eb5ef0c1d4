"""Hand-written CPU kernels (AVX-512, AMX): packed linear layers and a whole fused decoder forward.

Batch-invariant: the bits of a row's result depend on that row alone, not on batch size, width, thread count or padding.

    available(dtype) -> bool
    PackedLinear(weight [N,K], bias [N] | None)(x [..., K]) -> [..., N]
    FusedStack(...)  (kernels/stack.py): decoder layers over a static cache in one call
    kernels/sampling.py: laws, arg-max, draws, verification rules and a drafter's serial chain

The first use compiles them in a few seconds ($DRAFTSMITH_CACHE/kernels). Without a compiler or AVX-512 everything else
works on PyTorch's own kernels. DRAFTSMITH_KERNELS=0 switches them off.
"""

from __future__ import annotations

import torch
from torch import nn

from .build import KernelError, available, problem
from .linear import PackedLinear, read_bandwidth

__all__ = ["KernelError", "PackedLinear", "available", "problem", "read_bandwidth", "unsupported_reason"]


def unsupported_reason(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Why a fused-family model (see runtime/weights.py) cannot use the kernels, or None if it can."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return f"the CPU kernels cannot run on {parameter.device}"
    head_dim, hidden = model.model.layers[0].self_attn.head_dim, model.config.hidden_size
    if head_dim % 32 or head_dim > 256:
        return f"head size {head_dim} is not a multiple of 32 up to 256"
    if hidden % 32:
        return f"hidden size {hidden} is not a multiple of 32"
    return problem(dtype)
