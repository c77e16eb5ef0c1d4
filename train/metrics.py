"""Training metrics: global reduction, log names, the time split and the run's description."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from ..data.batch import Batches, TrainBatch
from ..data.chat import TokenRow
from ..losses.config import ObjectiveConfig
from ..losses.terms import ObjectiveStats
from ..models.dspark import DSpark, trainable_table
from .config import TrainConfig
from .flops import FlopCounter, Flops, covered_positions, peak_flops
from .strategy import engaged

if TYPE_CHECKING:
    from .step import Setup


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
    """Seconds by part since the last report: on a CPU by the host's clock, on CUDA by events, which stop nothing.

    A mark ends a part. On CUDA its time is that between the events as the GPU passes them, so waiting for the host counts
    for the part in which the GPU waited; the events are read when a report is due.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda = device is not None and device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, Any, Any]] = []
        self.last = self.stamp()

    def stamp(self) -> Any:
        """Now: a number of seconds, or an event recorded on the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Leave what came since the last mark out (logging, validation, saving)."""
        self.last = self.stamp()

    def mark(self, part: str, at: Any = None) -> None:
        """Time since the last mark belongs to `part`; at: an earlier stamp than now."""
        now = self.stamp() if at is None else at
        self.add(part, self.last, now)
        self.last = now

    def add(self, part: str, start: Any, end: Any) -> None:
        """Time between two stamps belongs to `part`, whatever else ran meanwhile."""
        if self.cuda:
            self.spans.append((part, start, end))
        else:
            self.seconds[part] = self.seconds.get(part, 0.0) + end - start

    def report(self, steps: int) -> dict[str, float]:
        """Seconds per step and part over the last `steps`, and forget them."""
        for part, start, end in self.spans:
            end.synchronize()
            self.seconds[part] = self.seconds.get(part, 0.0) + start.elapsed_time(end) / 1e3
        each = {part: seconds / steps for part, seconds in self.seconds.items()}
        self.seconds, self.spans = {}, []
        return each


class Meter:
    """What the steps since the last report went through: tokens, coverage and FLOPs, summed over ranks at the report.

    peak: FLOP/s of one device, None when unknown. FLOPs are those of flops.py: model FLOPs, padding not counted.
    """

    HIDDEN = ("target_busy",)  # runs beside the other parts (side stream): no part of a step's time

    def __init__(self, counter: FlopCounter | None = None, peak: float | None = None) -> None:
        self.counter, self.peak = counter, peak
        self.clear()

    def clear(self) -> None:
        """Start a new window."""
        self.tokens = self.places = self.supervised = self.anchors = self.covered = 0
        self.flops = Flops()

    def add(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> None:
        """One micro-batch (on the CPU) and its chats; an all-masked batch brings none."""
        self.tokens += sum(len(row.input_ids) for row in rows)
        self.places += batch.input_ids.numel()
        self.supervised += sum(sum(row.loss_mask) for row in rows)
        self.anchors += int(batch.anchor_mask.sum())
        self.covered += covered_positions(batch)
        if self.counter is not None:
            self.flops += self.counter.count(batch, [len(row.input_ids) for row in rows])

    def report(self, accelerator: Accelerator, clock: Clock, steps: int) -> dict[str, float]:
        """Log values of the last `steps`, and start anew. Collective.

        perf/<part>_s: seconds per step (target, drafter, loss, data, communication; target_busy: the target's own time where
        it runs beside the drafter, whose `target` is then only the wait for it); perf/tokens_per_s: tokens of chats, prompts
        too, over all ranks; perf/tflops: model TFLOP/s of one device; perf/mfu: that over its peak; data/padding: share of
        the batch that is no token; data/anchor_share: anchors per supervised token; data/coverage: share of the supervised
        tokens that at least one block predicts.
        """
        each = clock.report(steps)
        seconds = steps * sum(time for part, time in each.items() if part not in self.HIDDEN)
        mine = [self.tokens, self.places, self.supervised, self.anchors, self.covered, self.flops.total / 1e9]
        summed = accelerator.reduce(torch.tensor(mine, dtype=torch.float32, device=accelerator.device), "sum")
        tokens, places, supervised, anchors, covered, gflops = summed.tolist()
        self.clear()
        values = {f"perf/{part}_s": value for part, value in each.items()}
        values["perf/tokens_per_s"] = tokens / seconds if seconds else 0.0
        values["data/padding"] = 1.0 - tokens / places
        if supervised:
            values |= {"data/anchor_share": anchors / supervised, "data/coverage": covered / supervised}
        if gflops and seconds:
            values["perf/tflops"] = gflops / 1e3 / seconds / accelerator.num_processes
            if self.peak:
                values["perf/mfu"] = values["perf/tflops"] * 1e12 / self.peak
        return values


def make_meter(cfg: TrainConfig, setup: Setup, device: torch.device) -> tuple[Meter, str]:
    """The meter of a run, and one line that says what its peak is."""
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    peak, source = peak_flops(device, dtype)
    if cfg.peak_tflops is not None:
        peak, source = 1e12 * cfg.peak_tflops, "train.peak_tflops"
    target = None if getattr(setup.source, "background", False) else getattr(setup.source, "target", None)
    counter = FlopCounter(setup.drafter, setup.heads, getattr(target, "decoder", None))
    number = "unknown" if peak is None else f"{peak / 1e12:.3g} TFLOP/s"
    return Meter(counter, peak), f"peak of one device {number} in {cfg.precision} ({source}): the MFU is against it"


def describe(drafter: DSpark, batches: Batches, cfg: TrainConfig, accelerator: Accelerator, start: int) -> str:
    """What will be trained: parameters by module (target 0), data, derived numbers, strategy."""
    table = trainable_table(drafter)
    lines = [f"  {name:<28}{count:>14,}" for name, count in [*table, ("total", sum(c for _, c in table))]]
    epochs = cfg.steps * cfg.accumulation / max(1, len(batches))
    return "\n".join(
        [
            "trainable parameters", *lines,
            f"{len(batches.rows)} rows, {len(batches)} batches an epoch, {epochs:.1f} epochs, "
            f"anchors on {batches.coverage():.0%} of positions per epoch",
            f"strategy {engaged(accelerator)}, {accelerator.num_processes} process(es), "
            f"device {accelerator.device}, {cfg.precision}",
            f"steps {start} -> {cfg.steps}",
        ]
    )  # fmt: skip
