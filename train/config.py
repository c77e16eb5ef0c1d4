"""Configuration of the training loop (imports no torch)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Literal

# Keys that a run may change while it goes on: how it is launched and watched, and how its steps are cut into micro-batches
# (the rows of a whole step may not change).
LAUNCH_KEYS = frozenset(
    ("rows", "accumulation", "global_rows", "expected_world_size", "expected_strategy", "collective_timeout", "log_every",
     "checkpoint_every", "keep_last", "async_checkpoints", "tracker", "project", "wandb_mode", "wandb_artifact", "prefetch",
     "peak_tflops")
)  # fmt: skip
# Where the target's states are computed and kept, not what they are: these may change as well.
PLACED_KEYS = frozenset(
    {"target.placement", "target.server", "target.server_kind", "target.extraction", "data.features", "data.cache_gib"}
)


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
    packing: Literal["none", "packed"] = field(
        default="none",
        metadata={"help": "none = `rows` conversations padded to the longest; packed = one row filled up to tokens_per_batch"},
    )
    tokens_per_batch: int = field(
        default=4096,
        metadata={"help": "tokens per micro-batch and process with packing, at least data.max_length", "ge": 1},
    )
    prefetch: bool = field(
        default=True,
        metadata={"help": "prepare the next micro-batch, on CUDA with its target states, during the drafter's step"},
    )
    compile: bool = field(
        default=False, metadata={"help": "torch.compile of the drafter; batches are rounded up to few shapes"}
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = field(
        default="inductor", metadata={"help": "back end of `compile`; the eager ones only trace, for finding faults"}
    )
    activation_checkpointing: bool = field(
        default=False, metadata={"help": "recompute the draft layers in backward instead of keeping their states"}
    )
    fp8: bool = field(
        default=False,
        metadata={"help": "float8 matrix products in the draft layers, weights float32 (CUDA 8.9 or newer, precision bf16)"},
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={"help": "peak of one device for the MFU, in 1e12 FLOP/s; None = known GPUs, measured on a CPU", "gt": 0.0},
    )
    attention: Literal["auto", "batched", "flex"] = field(
        default="auto",
        metadata={"help": "attention over the anchors: flex_attention (auto: on CUDA) or batched products (auto: elsewhere)"},
    )
    loss_chunk_mib: int = field(
        default=320, metadata={"help": "memory for one chunk of logits; kept between the steps on a CPU", "ge": 1}
    )
    log_every: int = field(default=10, metadata={"help": "steps between log lines", "ge": 1})
    eval_every: int = field(default=200, metadata={"help": "steps between validation passes; 0 = only at the end", "ge": 0})
    validation_share: float = field(
        default=0.03, metadata={"help": "share of the prompts held back for validation", "ge": 0.0, "lt": 0.5}
    )
    checkpoint_every: int = field(default=200, metadata={"help": "steps between checkpoints", "ge": 1})
    keep_last: int = field(default=2, metadata={"help": "checkpoints kept, besides the best one", "ge": 1})
    async_checkpoints: bool = field(
        default=True, metadata={"help": "write a checkpoint during the next step (one process and DDP)"}
    )
    expected_world_size: int | None = field(
        default=None,
        metadata={"help": "stop unless exactly this many processes run; None = whatever the launcher says", "ge": 1},
    )
    expected_strategy: Literal["one", "ddp", "fsdp2", "zero1", "zero2", "zero3"] | None = field(
        default=None, metadata={"help": "stop unless the run is sharded like this; None = whatever the launcher says"}
    )
    global_rows: int | None = field(
        default=None,
        metadata={
            "help": "conversations per step over all processes and micro-batches: the accumulation follows, so that the run is "
            "the same on any number of processes; None = rows * accumulation * processes",
            "ge": 1,
        },
    )
    collective_timeout: float = field(
        default=1800.0, metadata={"help": "seconds that a process waits for another before it gives up", "gt": 0.0}
    )
    rollout_every: int = field(
        default=0, metadata={"help": "steps between rollouts of the runtime on held-back prompts; 0 = none", "ge": 0}
    )
    rollout_prompts: int = field(default=16, metadata={"help": "held-back prompts of an evaluation", "ge": 1})
    rollout_tokens: int = field(default=96, metadata={"help": "longest answer there", "ge": 2})
    rollout_temperatures: tuple[float, ...] = field(
        default=(0.0, 1.0),
        metadata={"help": "temperatures there; the best checkpoint is chosen at 1, or the highest", "ge": 0.0},
    )
    rollout_slots: int | None = field(
        default=None, metadata={"help": "tokens drafted a cycle there; None = the drafter's block", "ge": 1}
    )
    rollout_ranks: Literal["all", "main"] = field(
        default="all", metadata={"help": "all = the prompts are split over the processes; main = the others wait"}
    )
    on_policy_every: int = field(
        default=50, metadata={"help": "on-policy phase: steps between draws of new answers with the drafter as it is", "ge": 1}
    )
    on_policy_prompts: int = field(
        default=128, metadata={"help": "on-policy phase: prompts of the training rows answered in a draw", "ge": 1}
    )
    on_policy_tokens: int = field(default=128, metadata={"help": "on-policy phase: longest answer", "ge": 2})
    tracker: Literal["none", "wandb", "tensorboard"] = field(
        default="none", metadata={"help": "besides the JSONL log, which is always written"}
    )
    project: str = field(default="draftsmith", metadata={"help": "tracker project"})
    wandb_mode: Literal["online", "offline"] = field(
        default="offline", metadata={"help": "offline needs no login and never asks for one"}
    )
    wandb_artifact: bool = field(default=True, metadata={"help": "log the exported drafter as a W&B artifact at the end"})


def check_tracker(cfg: TrainConfig) -> None:
    """ValueError when the package of the recipe's tracker is not installed."""
    package = cfg.tracker
    if package != "none" and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"train.tracker: {cfg.tracker!r} needs the package {package}, which is not installed; `pip install {package}`, or "
            f"choose {' or '.join(name for name in ('wandb', 'tensorboard', 'none') if name != package)}"
        )
