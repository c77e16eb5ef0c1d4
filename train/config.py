"""Configuration of the training loop (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of the loop. A step is one optimiser step over all processes and accumulated micro-batches."""

    steps: int = field(default=1000, metadata={"help": "optimiser steps", "ge": 1})
    rows: int = field(default=8, metadata={"help": "conversations per micro-batch and process", "ge": 1})
    accumulation: int = field(default=1, metadata={"help": "micro-batches per step and process", "ge": 1})
    anchor_share: float = field(
        default=0.25,
        metadata={"help": "anchors per supervised token of a row, drawn anew in every epoch", "gt": 0.0, "le": 1.0},
    )
    lr: float = field(default=6e-4, metadata={"help": "peak learning rate", "gt": 0.0})
    warmup: float = field(default=0.04, metadata={"help": "share of the steps spent warming up", "ge": 0.0, "le": 1.0})
    final_lr: float = field(
        default=0.02, metadata={"help": "learning rate at the end, as a share of the peak", "ge": 0.0, "le": 1.0}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW weight decay on matrices", "ge": 0.0})
    clip: float = field(default=1.0, metadata={"help": "largest gradient norm; 0 = no clipping", "ge": 0.0})
    beta2: float = field(default=0.95, metadata={"help": "AdamW second-moment decay", "gt": 0.0, "lt": 1.0})
    precision: Literal["bf16", "fp32"] = field(
        default="bf16", metadata={"help": "matrix products; weights, optimiser state and reductions are float32"}
    )
    loss_chunk_mib: int = field(default=256, metadata={"help": "memory for one chunk of logits", "ge": 1})
    log_every: int = field(default=10, metadata={"help": "steps between log lines", "ge": 1})
    eval_every: int = field(default=200, metadata={"help": "steps between validation passes; 0 = only at the end", "ge": 0})
    validation_share: float = field(
        default=0.03, metadata={"help": "share of the prompts held back for validation", "ge": 0.0, "lt": 0.5}
    )
    checkpoint_every: int = field(default=200, metadata={"help": "steps between checkpoints", "ge": 1})
    keep_last: int = field(default=2, metadata={"help": "checkpoints kept", "ge": 1})
    expected_world_size: int | None = field(
        default=None,
        metadata={"help": "stop unless exactly this many processes run; None = whatever the launcher says", "ge": 1},
    )
    tracker: Literal["none", "wandb"] = field(
        default="none", metadata={"help": "besides the JSONL log, which is always written"}
    )
    project: str = field(default="draftsmith", metadata={"help": "tracker project"})
    wandb_mode: Literal["online", "offline"] = field(
        default="offline", metadata={"help": "offline needs no login and never asks for one"}
    )
