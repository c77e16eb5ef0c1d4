"""Configuration of the measurement (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


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

    def __post_init__(self) -> None:
        for key in ("temperatures", "concurrency", "contexts"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"eval.{key}: got an empty list, allowed: at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"eval.{key}: got {list(values)}, allowed: each value once")
        if any(not 0.0 <= t <= 10.0 for t in self.temperatures):
            raise ValueError(f"eval.temperatures: got {list(self.temperatures)}, allowed: 0 to 10")
        if any(not 1 <= c <= 1024 for c in self.concurrency):
            raise ValueError(f"eval.concurrency: got {list(self.concurrency)}, allowed: 1 to 1024")
        if any(c < 0 for c in self.contexts):
            raise ValueError(f"eval.contexts: got {list(self.contexts)}, allowed: 0 or more")
