"""Hand-written CPU kernels (AVX-512, AMX): packed linear layers and a whole fused decoder forward.

Batch-invariant: the bits of a row's result depend on that row alone, not on batch size, width, thread count or padding.

    available(dtype) -> bool
    PackedLinear(weight [N,K], bias [N] | None)(x [..., K]) -> [..., N]
    FusedStack(...)  (kernels/stack.py): decoder layers over a static cache in one call

The first use compiles them in a few seconds ($DRAFTSMITH_CACHE/kernels). Without a compiler or AVX-512 everything else
works on PyTorch's own kernels. DRAFTSMITH_KERNELS=0 switches them off.
"""

from __future__ import annotations

import torch
from torch import nn

from .build import Features, KernelError, features, library

__all__ = ["KernelError", "PackedLinear", "available", "problem", "read_bandwidth", "unsupported_reason"]


def problem(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run in `dtype` on this machine, or None if they can (compiles them if needed)."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no CPU kernels for {dtype}"
    try:
        library()
    except KernelError as error:
        return str(error)
    if dtype == torch.bfloat16 and not features() & (Features.BF16_DOT | Features.BF16_TILES):
        return "this CPU has no bf16 instructions"
    return None if features() & Features.FLOAT32 else "this CPU has no AVX-512"


def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels run in `dtype` on this machine."""
    return problem(dtype) is None


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


from .linear import PackedLinear, read_bandwidth  # noqa: E402 - needs problem()
