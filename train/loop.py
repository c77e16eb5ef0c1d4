"""The training loop: one function, phases in order, no callbacks.

A step is: batches -> global denominators -> for each micro-batch features, blocks, objective, backward -> clip -> update.
Where is the loss divided? In the objective, by denominators summed over all micro-batches and ranks before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..data.batch import Batches
from ..data.chat import TokenRow
from ..losses.config import ObjectiveConfig
from ..losses.reduce import denominators
from ..losses.terms import ObjectiveStats
from ..models.export import native
from . import checkpoint
from .config import TrainConfig
from .log import TrainLog
from .metrics import Clock, describe, named, reduce_stats
from .optim import build_optimizer, learning_rate
from .progress import Progress
from .step import Setup, StepContext, micro_batches


def run(
    *,
    cfg: TrainConfig,
    objective_cfg: ObjectiveConfig,
    setup: Setup,
    accelerator: Accelerator,
    output: Path,
    seed: int,
    run_config: dict[str, Any],
    provenance: dict[str, Any],
) -> Path:
    """Train and leave `output`/drafter (native layout, float32), checkpoints/ and train.jsonl. Returns the drafter folder.

    Raises ValueError for a world size other than the expected one, or a checkpoint of other settings; RuntimeError when the
    loss or the gradient stops being finite (before the update, so the last checkpoint is sound).
    """
    # ---- set-up -----------------------------------------------------------------------------------------------------
    check_world(cfg, accelerator)
    set_seed(seed, device_specific=True)
    device, world = accelerator.device, accelerator.num_processes
    checkpoints = output / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    drafter = setup.drafter.to(device=device, dtype=torch.float32).train()
    if objective_cfg.survival == 0 and drafter.confidence_head is not None:
        # Without its loss it gets no gradient, and DDP waits for the gradient of every trainable parameter.
        drafter.confidence_head.requires_grad_(False)
    heads = setup.heads.to(torch.bfloat16 if cfg.precision == "bf16" else torch.float32)
    batches = Batches(
        setup.rows, rows_per_batch=cfg.rows, block_size=drafter.block_size, anchor_share=cfg.anchor_share, seed=seed,
        rank=accelerator.process_index, world_size=world,
    )  # fmt: skip
    optimizer = build_optimizer(drafter, cfg)
    model, optimizer = accelerator.prepare(drafter, optimizer)
    identity = {"recipe": run_config, "world_size": world}
    start = checkpoint.resume(accelerator, checkpoints, identity)
    log = TrainLog(accelerator, cfg, output / "train.jsonl", run_config, start)
    accelerator.print(describe(drafter, batches, cfg, accelerator, start))
    step_context = StepContext(cfg, objective_cfg, setup, heads, device)
    stream = micro_batches(batches, start * cfg.accumulation)
    progress = Progress(cfg.steps, start, enabled=accelerator.is_main_process)
    window: list[ObjectiveStats] = []
    tokens = 0
    clock = Clock()

    # ---- steps ------------------------------------------------------------------------------------------------------
    with closing(log), closing(progress):
        for step in range(start, cfg.steps):
            micro = [next(stream) for _ in range(cfg.accumulation)]
            totals = accelerator.reduce(
                torch.stack([denominators(objective_cfg, batch.valid.flatten(0, 1)) for batch, _ in micro]).sum(0).to(device),
                "sum",
            )
            loss = torch.zeros((), device=device)
            for i, (batch, rows) in enumerate(micro):
                # Gradients are averaged over ranks once per step, and the global mean needs their sum: hence * world.
                with accelerator.no_sync(model) if i + 1 < len(micro) else accelerator.accumulate():
                    part, stats = step_context.loss(model, batch, rows, totals, clock)
                    accelerator.backward(part * world)
                loss += part.detach()
                window.append(stats)
                tokens += int(batch.lengths.sum()) * world
            norm = accelerator.clip_grad_norm_(model.parameters(), cfg.clip or math.inf)
            loss = accelerator.reduce(loss, "sum")
            if not torch.isfinite(loss) or not math.isfinite(norm):
                raise RuntimeError(
                    f"step {step + 1}: loss {float(loss)}, gradient norm {float(norm)}: stopped before the update"
                )
            rate = learning_rate(step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.mark("drafter")

            # ---- log, validate, save --------------------------------------------------------------------------------------
            done = step + 1
            if done % cfg.log_every == 0 or done == cfg.steps:
                metrics = named(reduce_stats(accelerator, window))
                values = {"loss/total": float(loss), "lr": rate, "grad_norm": float(norm)}
                metrics |= clock.report(len(window) // cfg.accumulation, tokens)
                log.write(done, {**values, **metrics})
                progress.update(done, float(loss), metrics)
                window, tokens = [], 0
            if done == cfg.steps or (cfg.eval_every and done % cfg.eval_every == 0):
                metrics = validate(accelerator, model, step_context, setup.validation, cfg, drafter.block_size)
                if metrics:
                    log.write(done, metrics)
                    progress.note(done, metrics)
            if done == cfg.steps or done % cfg.checkpoint_every == 0:
                checkpoint.save(accelerator, checkpoints, done, {"identity": identity, **provenance}, cfg.keep_last)
            clock.restart()

    # ---- end ----------------------------------------------------------------------------------------------------------
    folder = output / "drafter"
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        extra = {"steps": cfg.steps, "recipe": run_config, **provenance}
        native.save(folder, trained, setup.heads, dtype=torch.float32, extra=extra)
    accelerator.wait_for_everyone()
    return folder


def check_world(cfg: TrainConfig, accelerator: Accelerator) -> None:
    """A launcher that silently starts fewer processes than asked is an error."""
    if cfg.expected_world_size not in (None, accelerator.num_processes):
        raise ValueError(
            f"train.expected_world_size: {cfg.expected_world_size}, but {accelerator.num_processes} process(es) run "
            f"({accelerator.distributed_type}); on CPU launch with ACCELERATE_USE_CPU=true and a MULTI_GPU config file"
        )


@torch.no_grad()
def validate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    context: StepContext,
    rows: Sequence[TokenRow],
    cfg: TrainConfig,
    block: int,
) -> dict[str, float]:
    """Metrics on held-back rows with fixed anchors; the training mode and every RNG stay as they were."""
    if not rows:
        return {}
    batches = Batches(
        rows, rows_per_batch=cfg.rows, block_size=block, anchor_share=0.5, seed=0, rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )  # fmt: skip
    model.eval()
    stats = [
        context.loss(model, batches.batch(0, i), [rows[j] for j in batches.indices(0, i)], None, Clock())[1]
        for i in range(len(batches))
    ]
    model.train()
    return {f"val/{key.removeprefix('loss/')}": value for key, value in named(reduce_stats(accelerator, stats)).items()}
