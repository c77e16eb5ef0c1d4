"""Options that make a step faster or smaller and change no result beyond rounding: compile, recomputation, float8."""

from __future__ import annotations

import torch

from ..models.dspark import DSpark
from ..models.fp8 import fp8_layers, fp8_refusal
from .config import TrainConfig

MAX_GRAPHS = 64  # distinct batch shapes that are compiled; train.packing: packed needs a handful


def speed_up(drafter: DSpark, cfg: TrainConfig, device: torch.device) -> list[str]:
    """Apply the recipe's options to the drafter, in place (names of the state are kept), and describe them.

    Raises ValueError where the device has no float8, or the precision does not fit it.
    """
    lines = []
    if cfg.attention == "flex" and device.type == "cpu":
        raise ValueError("train.attention: flex is not allowed on a CPU, where it has no gradient; allowed auto, batched")
    drafter.attention_backend = cfg.attention
    drafter.recompute_layers = cfg.activation_checkpointing
    if cfg.activation_checkpointing:
        lines.append("activation checkpointing: draft layers are recomputed in backward")
    if cfg.fp8:
        if cfg.precision != "bf16":
            raise ValueError(f"train.fp8: true is not allowed with train.precision {cfg.precision}; allowed with bf16")
        if refusal := fp8_refusal(device):
            raise ValueError(f"train.fp8: true is not allowed here: {refusal}")
        count = fp8_layers(drafter)
        lines.append(f"float8: {count} linear layers, e4m3 forward and e5m2 gradients, one scale a tensor; not bit-comparable")
    if cfg.compile:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
        drafter.compile(backend=cfg.compile_backend, dynamic=False)
        lines.append(f"torch.compile: {cfg.compile_backend}, static shapes")
    return lines
