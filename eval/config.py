"""Configuration of the measurement (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..runtime.config import ProposerConfig


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The operating-point grid of `bench --grid`. Precision, rule, truncation, prompts and seed are those of eval."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    concurrency: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16), metadata={"help": "requests decoded together", "ge": 1, "le": 1024}
    )
    contexts: tuple[int, ...] = field(
        default=(128, 1024, 4096),
        metadata={"help": "prompt lengths in tokens, filled up with other held-out text; 0 = the prompts as they are", "ge": 0},
    )
    temperatures: tuple[float, ...] = field(
        default=(0.0, 1.0), metadata={"help": "sampling temperatures; 0 = greedy", "ge": 0.0, "le": 10.0}
    )
    domains: tuple[str, ...] = field(
        default=("mixed",), metadata={"help": "domains measured on their own; 'mixed' = all domains in turn, one set of cells"}
    )
    gammas: tuple[int, ...] = field(
        default=(),
        metadata={"help": "fixed draft lengths compared; empty = 1, 2, 4 and the drafter's block", "ge": 1, "le": 64},
    )
    tokens: int = field(
        default=480, metadata={"help": "tokens measured per side and cell, at least, all requests together", "ge": 16}
    )
    sampled_tokens: int = field(
        default=1200,
        metadata={
            "help": "more tokens in sampled cells, where texts differ by side, for the sides near the best",
            "ge": 0,
        },
    )
    prompts: int = field(
        default=16,
        metadata={"help": "prompts of a cell (raised to the concurrency); their K/V stay in memory", "ge": 2, "le": 1024},
    )
    repeats: int = field(
        default=1, metadata={"help": "passes over the prompts: further into greedy answers, other seeds when sampled", "ge": 1}
    )

    def __post_init__(self) -> None:
        for key in ("concurrency", "contexts", "temperatures", "domains"):
            _check_axis(f"grid.{key}", getattr(self, key))
        if self.gammas:
            _check_axis("grid.gammas", self.gammas)


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """How the survival head is calibrated (`draftsmith calibrate`): prompts, rollouts, fits."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    share: float = field(
        default=0.4,
        metadata={
            "help": "share of the held-out prompts that is fitted on; measurements use the others first",
            "gt": 0.0,
            "lt": 1.0,
        },
    )
    temperatures: tuple[float, ...] = field(
        default=(), metadata={"help": "settings that are fitted; empty = eval.temperatures", "ge": 0.0, "le": 10.0}
    )
    prompts_per_domain: int = field(
        default=80, metadata={"help": "most prompts rolled out per domain, fitted and judged together", "ge": 4}
    )
    max_new_tokens: int = field(default=96, metadata={"help": "longest answer of a rollout", "ge": 2, "le": 65_536})
    slots: int = field(default=16, metadata={"help": "rows decoded together", "ge": 1, "le": 1024})
    kinds: tuple[Literal["none", "sts", "platt", "isotonic"], ...] = field(
        default=("none", "sts", "platt", "isotonic"), metadata={"help": "calibrations compared; the best one is kept"}
    )
    folds: int = field(default=5, metadata={"help": "folds of the cross-validation that chooses", "ge": 2, "le": 100})
    bins: int = field(default=20, metadata={"help": "equal-width bins of the calibration error", "ge": 2, "le": 1000})

    def __post_init__(self) -> None:
        for key in ("temperatures", "kinds"):
            values = getattr(self, key)
            if len(set(values)) != len(values):
                raise ValueError(f"eval.calibration.{key}: got {list(values)}, allowed: each value once")
        if not self.kinds:
            raise ValueError("eval.calibration.kinds: got an empty list, allowed: at least one of none, sts, platt, isotonic")
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"eval.calibration.share: got {self.share}, allowed: above 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is measured: held-out prompts, operating points, and the size of the losslessness tests."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    prompts: str = field(
        default="builtin", metadata={"help": "'builtin' = the built-in held-out prompts, or a prompt file of your own"}
    )
    prompts_per_domain: int = field(
        default=16, metadata={"help": "prompts measured per domain (raised to 4 per batch row)", "ge": 2, "le": 10_000}
    )
    domains: tuple[str, ...] = field(default=(), metadata={"help": "domains measured; empty = every domain of the prompts"})
    temperatures: tuple[float, ...] = field(
        default=(0.0, 1.0), metadata={"help": "sampling temperatures; 0 = greedy", "ge": 0.0, "le": 10.0}
    )
    concurrency: tuple[int, ...] = field(
        default=(1,), metadata={"help": "requests decoded together; each value is one set of cells", "ge": 1, "le": 1024}
    )
    contexts: tuple[int, ...] = field(
        default=(0,),
        metadata={"help": "prompt lengths in tokens, filled up with other held-out text; 0 = the prompts as they are", "ge": 0},
    )
    max_new_tokens: int = field(default=128, metadata={"help": "longest answer of a measured request", "ge": 2, "le": 65_536})
    repeats: int = field(
        default=1, metadata={"help": "timed passes over every prompt; the median time of a prompt counts", "ge": 1, "le": 100}
    )
    top_k: int = field(default=0, metadata={"help": "top-k truncation of sampled cells; 0 = none", "ge": 0})
    top_p: float = field(default=1.0, metadata={"help": "top-p truncation of sampled cells", "gt": 0.0, "le": 1.0})
    seed: int = field(default=0, metadata={"help": "seed of sampling and of the bootstrap", "ge": 0})
    dtype: Literal["float32", "bfloat16"] | None = field(
        default=None, metadata={"help": "serving precision; None = the target's own setting"}
    )
    num_slots: int | None = field(
        default=None, metadata={"help": "draft slots used (gamma); None = all the drafter has", "ge": 1, "le": 64}
    )
    rule: Literal["token", "block"] = field(default="block", metadata={"help": "verification rule"})
    proposer: ProposerConfig = field(default_factory=ProposerConfig, metadata={"help": "what drafts"})
    cost_prompts: int = field(default=4, metadata={"help": "prompts of the cost measurement", "ge": 1, "le": 1000})
    cost_tokens: int = field(default=32, metadata={"help": "tokens per prompt of the cost measurement", "ge": 4, "le": 4096})
    cost_repeats: int = field(default=3, metadata={"help": "repeats of the cost measurement (median)", "ge": 1, "le": 100})
    greedy_float32: bool = field(
        default=True,
        metadata={"help": "when serving in bfloat16, also compare greedy tokens in float32 (a second, slower pass)"},
    )
    greedy_prompts_per_domain: int = field(
        default=8, metadata={"help": "prompts per domain of that float32 pass", "ge": 1, "le": 10_000}
    )
    sampling_prompts: int = field(default=3, metadata={"help": "prompts of the sampling test; 0 skips it", "ge": 0, "le": 1000})
    sampling_seeds: int = field(
        default=200, metadata={"help": "samples per prompt and side of the sampling test", "ge": 20, "le": 1_000_000}
    )
    sampling_positions: int = field(
        default=3, metadata={"help": "first tokens compared by the sampling test", "ge": 1, "le": 64}
    )
    calibration: CalibrateConfig = field(default_factory=CalibrateConfig, metadata={"help": "calibration of the survival head"})
    grid: GridConfig = field(default_factory=GridConfig, metadata={"help": "the operating-point grid (bench --grid)"})

    def __post_init__(self) -> None:
        for key in ("temperatures", "concurrency", "contexts"):
            _check_axis(key, getattr(self, key))
        if any(not 0.0 <= t <= 10.0 for t in self.temperatures):
            raise ValueError(f"eval.temperatures: got {list(self.temperatures)}, allowed: 0 to 10")
        if any(not 1 <= c <= 1024 for c in self.concurrency):
            raise ValueError(f"eval.concurrency: got {list(self.concurrency)}, allowed: 1 to 1024")
        if any(c < 0 for c in self.contexts):
            raise ValueError(f"eval.contexts: got {list(self.contexts)}, allowed: 0 or more")


def _check_axis(key: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise ValueError(f"eval.{key}: got an empty list, allowed: at least one value")
    if len(set(values)) != len(values):
        raise ValueError(f"eval.{key}: got {list(values)}, allowed: each value once")
