"""The training loop: one function, phases in order, no callbacks.

A step is: batches -> global denominators -> for each micro-batch features, blocks, objective, backward -> clip -> update.
Where is the loss divided? In the objective, by denominators summed over all micro-batches and ranks before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..data.chat import TokenRow
from ..losses.config import ObjectiveConfig
from ..losses.reduce import denominators
from ..losses.terms import ObjectiveStats
from ..models.dspark import DSpark
from ..models.export import native
from . import checkpoint
from .communication import GradientWait
from .config import TrainConfig
from .failure import Stopped, StopSignal, guard
from .features import begin_at, finishing
from .log import TrainLog
from .metrics import Clock, describe, make_meter, named, reduce_stats
from .optim import learning_rate
from .phases import Course
from .progress import Progress
from .rollouts import Rollouts
from .speed import speed_up
from .stage import filled
from .step import Setup, StepContext, make_batches
from .strategy import Engine, resolved, verify
from .unused import drop_unused


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
    accept: Callable[[Path, DSpark], None] | None = None,
    resume: str = "auto",
) -> Path:
    """Train and leave `output`/drafter (native layout, float32), checkpoints/ and train.jsonl. Returns the drafter folder.

    accept: called on the main process with the drafter folder once it is written and what it was written from, before the
    trackers end; it may refuse it.

    resume: auto goes on from the newest checkpoint, none starts anew, else the folder of a checkpoint.

    Raises ValueError for a launch other than the expected one, or a checkpoint of other settings; RuntimeError when the loss
    or the gradient stops being finite (before the update, so the last checkpoint is sound); Stopped after a SIGTERM.
    """
    # ---- set-up -----------------------------------------------------------------------------------------------------
    verify(cfg, accelerator)
    cfg = resolved(cfg, accelerator.num_processes)
    set_seed(seed, device_specific=True)
    device, world = accelerator.device, accelerator.num_processes
    rollouts = Rollouts(cfg, setup, accelerator, seed)
    checkpoints = output / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    drafter = setup.drafter.to(device=device, dtype=torch.float32).train()
    course = Course(cfg, objective_cfg, setup, accelerator, output, seed)
    heads = setup.heads.to(torch.bfloat16 if cfg.precision == "bf16" else torch.float32)
    batches = make_batches(cfg, setup.rows, accelerator, block_size=drafter.block_size, seed=seed)
    speed = speed_up(drafter, cfg, device)
    engine = Engine(accelerator, drafter, cfg)
    model = engine.model
    identity = checkpoint.identity_of(run_config, cfg, world)
    start = checkpoint.resume(engine, checkpoints, identity, choice=resume, say=accelerator.print, fill=filled)
    begin_at(setup.source, start * cfg.accumulation)
    saver = checkpoint.Saver(engine, checkpoints, setup.heads, {"identity": identity, "recipe": run_config, **provenance}, cfg)
    log = TrainLog(accelerator, cfg, output / "train.jsonl", {**run_config, "provenance": provenance}, start)
    rollouts.resume(log.path)
    meter, peak = make_meter(cfg, setup, device)
    accelerator.print("\n".join([describe(drafter, batches, cfg, accelerator, start), *speed, peak]))
    step_context = StepContext(cfg, course.phases.at(start), setup, heads, device)
    progress = Progress(cfg.steps, start, enabled=accelerator.is_main_process)
    window: list[ObjectiveStats] = []
    clock = Clock(device)
    gradient_wait = GradientWait(model, clock)

    # ---- steps ------------------------------------------------------------------------------------------------------
    source = finishing(setup.source, accelerator.print)
    with log, closing(progress), closing(saver), source, closing(course), StopSignal() as stop, guard(accelerator):
        for step in range(start, cfg.steps):
            feed = course.enter(step, step_context, clock)
            micro = [next(feed) for _ in range(cfg.accumulation)]
            clock.mark("data")
            objective = step_context.objective_cfg
            totals = torch.stack([denominators(objective, batch.valid.flatten(0, 1)) for batch, _ in micro]).sum(0)
            totals = accelerator.reduce(totals.to(device), "sum")
            clock.mark("communication")
            loss = torch.zeros((), device=device)
            for i, (batch, rows) in enumerate(micro):
                # Gradients are averaged over ranks once per step, and the global mean needs their sum: hence * world.
                with engine.micro(last=i + 1 == len(micro)):
                    part, stats = step_context.loss(model, batch, rows, totals, clock)
                    engine.backward(part * world)
                gradient_wait.mark()
                loss += part.detach()
                window.append(stats)
                meter.add(batch, rows)
            # One reduction for both: a process that was asked to stop stops all of them after this step.
            total, stopping = accelerator.reduce(torch.stack([loss, loss.new_tensor(float(stop.requested))]), "sum").tolist()
            rate = learning_rate(step, cfg)
            drop_unused(objective, drafter)
            norm = engine.update(rate) if math.isfinite(total) else math.nan
            if not math.isfinite(norm):
                raise RuntimeError(f"step {step + 1}: loss {total}, gradient norm {norm}: stopped before the update")
            clock.mark("drafter")
            saver.wait()  # written while this step ran; no more than that is ever at risk

            # ---- log, validate, save --------------------------------------------------------------------------------------
            done = step + 1
            if done % cfg.log_every == 0 or course.last_of_phase(done):
                metrics = named(reduce_stats(accelerator, window))
                values = {"loss/total": total, "lr": rate, "grad_norm": norm, **course.values(done)}
                metrics |= meter.report(accelerator, clock, len(window) // cfg.accumulation)
                log.write(done, {**values, **metrics})
                progress.update(done, total, metrics)
                window = []
            if done == cfg.steps or (cfg.eval_every and done % cfg.eval_every == 0):
                metrics = validate(accelerator, model, step_context, setup.validation, cfg, drafter.block_size)
                if metrics:
                    log.write(done, metrics)
                    progress.note(done, metrics)
            best = rollouts.measure(done, log, progress) if rollouts.due(done) else None
            log.commit()
            if done == cfg.steps or done % cfg.checkpoint_every == 0 or best is not None or stopping:
                saver.save(done)
            if best is not None and accelerator.is_main_process:
                checkpoint.mark_best(checkpoints, done, best)
            if stopping and done < cfg.steps:
                saver.wait()
                raise Stopped(done)
            clock.restart()

        # ---- end ------------------------------------------------------------------------------------------------------
        folder = output / "drafter"
        state = engine.whole_state()
        if accelerator.is_main_process:
            extra = {"steps": cfg.steps, "recipe": run_config, **provenance}
            native.save(folder, drafter, setup.heads, dtype=torch.float32, extra=extra, state=state)
            if accept is not None:
                accept(folder, engine.whole_drafter(state))
            log.artifact(folder)
        accelerator.wait_for_everyone()
    return folder


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
    batches = make_batches(cfg, rows, accelerator, block_size=block, seed=0, anchor_share=0.5, accumulation=1)
    model.eval()
    stats = [
        context.loss(model, batches.batch(0, i), [rows[j] for j in batches.indices(0, i)], None, Clock())[1]
        for i in range(len(batches))
    ]
    model.train()
    return {f"val/{key.removeprefix('loss/')}": value for key, value in named(reduce_stats(accelerator, stats)).items()}
