"""Configuration of the target and of the drafter (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model whose output law speculation keeps."""

    name: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "embedded target's name, Hub id, or local folder of a decoder-only model"},
    )
    revision: str | None = field(default=None, metadata={"help": "Hub revision; None = the default branch"})
    dtype: Literal["float32", "bfloat16"] = field(
        default="bfloat16", metadata={"help": "precision of the target's weights and activations"}
    )


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Parallel block drafter with a sequential correction head and a survival head (DSpark, arXiv 2607.05147)."""

    kind: Literal["dspark"] = "dspark"
    num_layers: int = field(default=2, metadata={"help": "draft decoder layers", "ge": 1, "le": 64})
    block_size: int = field(default=7, metadata={"help": "query slots = predictions per block (gamma)", "ge": 1, "le": 64})
    tap_layers: tuple[int, ...] | None = field(
        default=None,
        metadata={"help": "target layers whose output feeds the drafter, ascending, in [0, L-2]; None = num_taps spread"},
    )
    num_taps: int = field(default=5, metadata={"help": "how many taps when tap_layers is not given", "ge": 1, "le": 16})
    mask_token_id: int | None = field(
        default=None,
        metadata={"help": "target token fed to slots 1..; None = a reserved special token of the target", "ge": 0},
    )
    head: Literal["vanilla", "gated", "rnn", "none"] = field(default="vanilla", metadata={"help": "sequential correction head"})
    rank: int = field(default=64, metadata={"help": "rank of the correction head; 0 = no head", "ge": 0, "le": 4096})
    survival_head: bool = field(default=True, metadata={"help": "predict each slot's acceptance"})
    survival_with_head: bool = field(
        default=True, metadata={"help": "feed the previous token's head embedding to the survival head (needs rank > 0)"}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "reduced draft vocabulary (FR-Spec); None = the target's", "ge": 2}
    )
    init: Literal["random", "target", "checkpoint"] = field(
        default="target", metadata={"help": "start from the target's last layers and norms, at random, or from `checkpoint`"}
    )
    checkpoint: str | None = field(
        default=None, metadata={"help": "folder of a drafter to start from (init: checkpoint); its draft vocabulary is kept"}
    )

    @property
    def effective_head(self) -> str:
        """The head actually built: `rank` 0 and `head: none` both mean no head."""
        return "none" if self.rank == 0 else self.head


def default_tap_layers(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps spread evenly over [1, L-3], the DSpark setting ({1,9,17,25,33} for 36 layers); shorter targets get fewer."""
    low, high = min(1, num_layers - 2), max(num_layers - 3, 0)
    if num_taps == 1 or high <= low:
        return (max(high, 0),)
    taps = {round(low + i * (high - low) / (num_taps - 1)) for i in range(num_taps)}
    return tuple(sorted(taps))
