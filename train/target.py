"""The target as a recipe places it for training: whole, split over the ranks, behind a server, or run by our kernels."""

from __future__ import annotations

import torch

from ..models.config import TargetConfig
from ..models.target import Target, load_target


def open_target(cfg: TargetConfig, device: str | torch.device = "cpu") -> Target:
    """The frozen target of `cfg` on this rank; collective for placement sharded.

    Raises ValueError when it cannot be loaded or placed so, naming the key.
    """
    if cfg.placement == "sharded":
        from ..models.target_sharded import load_sharded

        return load_sharded(cfg, device)
    if cfg.placement == "remote":
        from .target_remote import load_remote

        return load_remote(cfg, device)
    target = load_target(cfg, device)
    if cfg.extraction == "runtime":
        from .target_engine import EngineTarget

        return EngineTarget(target)
    return target
