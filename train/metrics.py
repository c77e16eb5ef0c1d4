"""Training metrics: global reduction, log names, the time split and the run's description."""

from __future__ import annotations

import time

from accelerate import Accelerator

from ..data.batch import Batches
from ..losses.config import ObjectiveConfig
from ..losses.terms import ObjectiveStats
from ..models.dspark import DSpark, trainable_table
from .config import TrainConfig


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
        """perf/<part>_s per step of the last `steps`, and perf/tokens_per_s: their `tokens` (prompts too) over their time."""
        each = {f"perf/{part}_s": seconds / steps for part, seconds in self.seconds.items()}
        total = sum(each.values())
        self.seconds = {}
        return {**each, "perf/tokens_per_s": tokens / (steps * total) if total else 0.0}


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
            f"{accelerator.distributed_type.value}, {accelerator.num_processes} process(es), "
            f"device {accelerator.device}, {cfg.precision}",
            f"steps {start} -> {cfg.steps}",
        ]
    )  # fmt: skip
