"""The training loop: one function, phases in order, no callbacks.

A step is: batches -> global denominators -> for each micro-batch features, blocks, objective, backward -> clip -> update.
Where is the loss divided? In the objective, by denominators summed over all micro-batches and ranks before the first backward.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from ..data.batch import Batches, TrainBatch
from ..data.chat import TokenRow
from ..losses.config import ObjectiveConfig
from ..losses.objective import objective as plain_objective
from ..losses.reduce import denominators
from ..losses.terms import ObjectiveStats
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark, trainable_table
from ..models.export import native
from . import checkpoint
from .config import TrainConfig
from .features import FeatureSource
from .log import TrainLog
from .optim import build_optimizer, learning_rate
from .progress import Progress

try:
    from ..losses.fused import objective
except ImportError:  # pragma: no cover - the fused path is optional
    objective = plain_objective


@dataclass(frozen=True)
class Setup:
    """What the loop trains and on what: built by the caller, so that the loop reads no recipe."""

    drafter: DSpark
    heads: FrozenHeads
    source: FeatureSource
    rows: Sequence[TokenRow]
    validation: Sequence[TokenRow]
    softcap: float | None = None


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
    clock = Clock()

    # ---- steps ------------------------------------------------------------------------------------------------------
    for step in range(start, cfg.steps):
        micro = [next(stream) for _ in range(cfg.accumulation)]
        totals = accelerator.reduce(
            torch.stack([denominators(objective_cfg, batch.valid.flatten(0, 1)) for batch, _ in micro]).sum(0).to(device), "sum"
        )
        loss = torch.zeros((), device=device)
        for i, (batch, rows) in enumerate(micro):
            # Gradients are averaged over ranks once per step, and the global mean needs their sum: hence * world.
            with accelerator.no_sync(model) if i + 1 < len(micro) else accelerator.accumulate():
                part, stats = step_context.loss(model, batch, rows, totals, clock)
                accelerator.backward(part * world)
            loss += part.detach()
            window.append(stats)
        norm = accelerator.clip_grad_norm_(model.parameters(), cfg.clip) if cfg.clip else None
        loss = accelerator.reduce(loss, "sum")
        if not torch.isfinite(loss) or (norm is not None and not torch.isfinite(norm)):
            raise RuntimeError(f"step {step + 1}: loss {float(loss)}, gradient norm {norm}: stopped before the update")
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
            tokens = sum(batch.num_labels for batch, _ in micro) * world
            values = {"loss/total": float(loss), "lr": rate, "grad_norm": float(norm) if norm is not None else 0.0}
            log.write(done, {**values, **metrics, **clock.report(cfg.log_every, tokens)})
            progress.update(done, float(loss), metrics)
            window = []
        if done == cfg.steps or (cfg.eval_every and done % cfg.eval_every == 0):
            metrics = validate(accelerator, model, step_context, setup.validation, cfg, drafter.block_size)
            if metrics:
                log.write(done, metrics)
                progress.note(done, metrics)
        if done == cfg.steps or done % cfg.checkpoint_every == 0:
            checkpoint.save(accelerator, checkpoints, done, {"identity": identity, **provenance}, cfg.keep_last)
        clock.restart()

    # ---- end ----------------------------------------------------------------------------------------------------------
    progress.close()
    log.close()
    folder = output / "drafter"
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        extra = {"steps": cfg.steps, "recipe": run_config, **provenance}
        native.save(folder, trained, setup.heads, dtype=torch.float32, extra=extra)
    accelerator.wait_for_everyone()
    return folder


class StepContext:
    """Everything a micro-batch needs that does not change between steps."""

    def __init__(
        self, cfg: TrainConfig, objective_cfg: ObjectiveConfig, setup: Setup, heads: FrozenHeads, device: torch.device
    ) -> None:
        self.cfg, self.objective_cfg, self.setup, self.heads, self.device = cfg, objective_cfg, setup, heads, device
        self.dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32

    def loss(
        self, model: torch.nn.Module, batch: TrainBatch, rows: Sequence[TokenRow], totals: Tensor | None, clock: Clock
    ) -> tuple[Tensor, ObjectiveStats]:
        """This micro-batch's share of the step's loss, and its metrics."""
        batch = batch.to(self.device)
        clock.mark("data")
        features = self.setup.source.features(batch, rows)
        clock.mark("target")
        slots = torch.arange(batch.labels.shape[-1], device=self.device)
        where = batch.anchors[..., None] + slots  # [R, A, G]: position of slot k's predecessor
        where = where.clamp_max(batch.input_ids.shape[1] - 1)
        previous = batch.input_ids.gather(1, where.flatten(1)).view_as(where)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            out = model(
                taps=features.taps.to(self.dtype), anchors=batch.anchors, previous_tokens=previous, embedding=self.heads.embedding
            )
        length = batch.input_ids.shape[1]
        row_offset = torch.arange(len(batch.input_ids), device=self.device)[:, None, None] * length
        # Blocks in text order, unused anchors left out: neighbouring blocks share the target's law at their common positions.
        used = batch.anchor_mask.flatten() if bool(batch.anchor_mask.any()) else torch.ones_like(batch.anchor_mask.flatten()).cumsum(0) == 1
        pick = lambda x: None if x is None else x.flatten(0, 1)[used]  # noqa: E731
        head = self.setup.drafter.markov_head
        loss, stats = objective(
            cfg=self.objective_cfg,
            hidden=pick(out.hidden).to(self.dtype),
            correction=None if head is None else pick(out.correction).to(self.dtype),
            w2=None if head is None else head.markov_w2.weight.to(self.dtype),
            lm_head=self.heads.draft_head,
            target_hidden=features.last_hidden.flatten(0, 1).to(self.dtype),
            target_index=pick(where + row_offset),
            target_head=self.heads.lm_head if features.lse is None else self.heads.draft_head,
            draft_ids=self.heads.draft_ids,
            labels=pick(batch.labels),
            valid=pick(batch.valid),
            survival_logits=pick(out.survival_logits) if self.objective_cfg.survival > 0 else None,
            softcap=self.setup.softcap,
            chunk_bytes=self.cfg.loss_chunk_mib << 20,
            denominators=totals,
            target_lse=None if features.lse is None else features.lse.flatten(),
            target_top=None if features.top is None else features.top.flatten(),
        )
        clock.mark("drafter")
        return loss, stats


def micro_batches(batches: Batches, start: int) -> Iterator[tuple[TrainBatch, list[TokenRow]]]:
    """Micro-batches from the `start`-th on, epoch after epoch: a pure function of its arguments, so resuming needs no state."""
    index = start
    while True:
        epoch, inside = divmod(index, len(batches))
        yield batches.batch(epoch, inside), [batches.rows[i] for i in batches.indices(epoch, inside)]
        index += 1


def check_world(cfg: TrainConfig, accelerator: Accelerator) -> None:
    """A launcher that silently starts fewer processes than asked is an error."""
    if cfg.expected_world_size not in (None, accelerator.num_processes):
        raise ValueError(
            f"train.expected_world_size: {cfg.expected_world_size}, but {accelerator.num_processes} process(es) run "
            f"({accelerator.distributed_type}); on CPU launch with ACCELERATE_USE_CPU=true and a MULTI_GPU config file"
        )


@torch.no_grad()
def validate(
    accelerator: Accelerator, model: torch.nn.Module, context: StepContext, rows: Sequence[TokenRow], cfg: TrainConfig, block: int
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


def reduce_stats(accelerator: Accelerator, window: list[ObjectiveStats]) -> ObjectiveStats:
    """Sum (sum, count) pairs over micro-batches and ranks, in one all-reduce."""
    total = window[0]
    for stats in window[1:]:
        total = total + stats
    return total.from_flat(accelerator.reduce(total.flat().to(accelerator.device), "sum").cpu())


LOSS_TERMS = frozenset(ObjectiveConfig.__dataclass_fields__)


def named(stats: ObjectiveStats) -> dict[str, float]:
    """Flat log keys: loss/<term>, accept/<metric> and accept/alpha_1.., survival/<metric>."""
    flat: dict[str, float] = {}
    for key, value in stats.means().items():
        group = "loss" if key in LOSS_TERMS else "survival" if key.startswith("survival_") else "accept"
        name = f"{group}/{key.removeprefix('survival_') if group == 'survival' else key}"
        if isinstance(value, list):
            flat |= {f"{name}_{k + 1}": v for k, v in enumerate(value)}
        else:
            flat[name] = value
    return {key: value for key, value in flat.items() if value == value}  # an unmeasured slot is left out, not NaN


class Clock:
    """Seconds by part since the last report. On CUDA the split is that of the host and only indicative."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Leave what came since the last mark out (logging, validation, saving)."""
        self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Time since the last mark belongs to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    def report(self, steps: int, tokens: int) -> dict[str, float]:
        """perf/<part>_s per step, and perf/slots_per_s at the last step's size."""
        each = {f"perf/{part}_s": seconds / steps for part, seconds in self.seconds.items()}
        total = sum(each.values())
        self.seconds = {}
        return {**each, "perf/slots_per_s": tokens / total if total else 0.0}


def describe(drafter: DSpark, batches: Batches, cfg: TrainConfig, accelerator: Accelerator, start: int) -> str:
    """What will be trained: parameters by module (target 0), data, derived numbers, strategy."""
    table = trainable_table(drafter)
    lines = [f"  {name:<28}{count:>14,}" for name, count in [*table, ("total", sum(c for _, c in table))]]
    epochs = cfg.steps * cfg.accumulation / max(1, len(batches))
    return "\n".join(
        [
            "trainable parameters", *lines,
            f"{len(batches.rows)} rows, {len(batches)} batches an epoch, {epochs:.1f} epochs, anchors on {batches.coverage():.0%} of positions per epoch",
            f"{accelerator.distributed_type.value}, {accelerator.num_processes} process(es), device {accelerator.device}, {cfg.precision}",
            f"steps {start} -> {cfg.steps}",
        ]
    )  # fmt: skip


def split_validation(rows: Sequence[TokenRow], share: float) -> tuple[list[TokenRow], list[TokenRow]]:
    """Hold back whole prompts, by a hash of the row's prompt id: the same split in every run and for every sample of a prompt."""
    import hashlib

    def held(row: TokenRow) -> bool:
        digest = hashlib.blake2b(row.id.split("#")[0].encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") / 2**32 < share

    return [row for row in rows if not held(row)], [row for row in rows if held(row)]


def provenance() -> dict[str, Any]:
    """Versions, argv and git commit of this run."""
    import subprocess
    import sys
    from importlib.metadata import version

    names = ("torch", "transformers", "accelerate", "datasets", "safetensors")
    root = Path(__file__).parent.parent
    result = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "versions": {name: version(name) for name in names},
        "argv": sys.argv,
        "git_commit": result.stdout.strip() or None,
    }


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def run_config_dict(**parts: Any) -> dict[str, Any]:
    """The parts' config dataclasses as one plain dictionary."""
    return {name: asdict(part) if hasattr(part, "__dataclass_fields__") else part for name, part in parts.items()}
