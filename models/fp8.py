"""Linear layers whose three matrix products run in float8 (torch._scaled_mm), weights and results in the usual formats.

Each operand is scaled by its own largest entry (one scale a tensor, taken anew each time): e4m3 for weights and inputs, e5m2
for gradients, which need the range more than the digits. Products are accumulated in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_refusal(device: torch.device) -> str | None:
    """Why this device cannot: None where it can."""
    if device.type != "cuda":
        return f"float8 products need a CUDA GPU of compute capability 8.9 or newer, this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"float8 products need compute capability 8.9 or newer, {name} has {capability[0]}.{capability[1]}"
    return None


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x -> (x / scale in `dtype`, scale float32 scalar): the largest entry becomes the largest number of the format."""
    scale = (x.detach().abs().amax().float() / torch.finfo(dtype).max).clamp_min(1e-12)
    return (x.float() / scale).to(dtype), scale


def scaled_product(left: Tensor, right: Tensor, left_type: torch.dtype, right_type: torch.dtype, out: torch.dtype) -> Tensor:
    """left [M, K] @ right [K, N] with float8 operands. K is padded with zeros to a multiple of 16, as the kernels want."""
    rest = -left.shape[1] % 16
    if rest:
        left, right = F.pad(left, (0, rest)), F.pad(right, (0, 0, 0, rest))
    a, scale_a = quantize(left, left_type)
    b, scale_b = quantize(right, right_type)
    # row-major times column-major is the layout that the hardware multiplies
    b = b.t().contiguous().t()
    return torch._scaled_mm(a.contiguous(), b, scale_a=scale_a, scale_b=scale_b, out_dtype=out)


class _Product(torch.autograd.Function):
    """y = x w^T for x [M, K], w [N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight.t(), FORWARD, FORWARD, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = scaled_product(grad, weight, BACKWARD, FORWARD, x.dtype) if ctx.needs_input_grad[0] else None
        d_w = scaled_product(grad.t(), x, BACKWARD, FORWARD, x.dtype).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_w


class Float8Linear(nn.Linear):
    """nn.Linear with float8 products; same parameters, and bfloat16 results under autocast or for bfloat16 inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = _Product.apply(x.to(torch.bfloat16).flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


def fp8_layers(drafter: nn.Module) -> int:
    """Turn the projections of the draft layers and of the taps into Float8Linear, in place; returns how many.

    Layers whose sizes the kernels cannot take (not multiples of 16) stay as they are, and so do the heads.
    """
    count = 0
    for name, module in drafter.named_modules():
        inside = name == "fc" or name.startswith("layers.")
        if inside and type(module) is nn.Linear and module.in_features % 16 == 0 and module.out_features % 16 == 0:
            module.__class__ = Float8Linear
            count += 1
    return count
