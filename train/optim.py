"""Parameter groups and the learning-rate schedule, a pure function of the optimiser step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import TrainConfig


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """Rate of 0-based optimiser step `step`: linear warm-up to the peak, then one cosine to `final_lr` of it.

    Step warmup_steps-1 runs at exactly the peak, the last step at exactly the floor.
    """
    warmup = max(1, round(cfg.warmup * cfg.steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    floor = cfg.lr * cfg.final_lr
    progress = (step + 1 - warmup) / max(1, cfg.steps - warmup)
    return floor + 0.5 * (cfg.lr - floor) * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(module: nn.Module, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms, biases and embeddings are never decayed."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.dim() == 2 and "markov_w1" not in name else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True)
