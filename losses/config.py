"""Which losses a run minimises, and with what weights. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

SlotWeighting = Literal["decay", "half_reach", "dpace", "dpace_alpha", "auf"]

# Terms averaged over slots with the slot weights; over blocks; over slots with the survival weights.
SLOT_TERMS = ("ce", "kl", "reverse_kl", "js", "tv", "l1", "nla", "lk", "renyi")
BLOCK_TERMS = ("e2e", "exact")
SURVIVAL_TERMS = ("survival",)
TERMS = SLOT_TERMS + BLOCK_TERMS + SURVIVAL_TERMS


def _weight(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text, "ge": 0})


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """A named weighted sum of losses on (draft law q, target law p, text token y).

    Each field named like a term is that term's weight; 0 switches it off, and a term that is off costs
    nothing and needs no input. Formulas and sources: `losses/divergence.py`, `losses/acceptance.py`.

    Raises:
        ValueError: a weight is negative or not finite, every weight is 0, or `slot_weighting="dpace"` is
            combined with a slot term other than `ce`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    ce: float = _weight(0.0, "cross-entropy of the text token, -log q(y)")
    kl: float = _weight(0.1, "forward KL(p||q)")
    reverse_kl: float = _weight(0.0, "reverse KL(q||p)")
    js: float = _weight(0.0, "Jensen-Shannon divergence of p and q")
    tv: float = _weight(1.8, "total variation 1 - alpha (L1 is twice this: DSpark's 0.9 L1 is tv 1.8)")
    l1: float = _weight(0.0, "L1 distance sum|p - q| = 2 tv")
    nla: float = _weight(0.0, "-log alpha, in log space without a clamp")
    lk: float = _weight(0.0, "LK hybrid: lambda KL + (1 - lambda) TV, lambda = exp(-lk_eta alpha) per slot")
    renyi: float = _weight(0.0, "Renyi divergence of order 1/2, -2 log sum sqrt(p q)")
    e2e: float = _weight(0.0, "1 - mean over slots of the product of alpha up to the slot")
    exact: float = _weight(0.0, "1 - mean over slots of W_{k-1} alpha_k; needs text sampled from the same p")
    survival: float = _weight(1.0, "binary cross-entropy of the survival head against alpha")
    decay: float = field(
        default=4.0, metadata={"help": "slot weight exp(-(k-1)/decay), k from 1; 0 = all slots weigh 1", "ge": 0}
    )
    slot_weighting: SlotWeighting = field(
        default="decay",
        metadata={
            "help": "decay; half_reach (mean of decay and the reach W_{k-1}); dpace (D-PACE from q(y), ce only); "
            "dpace_alpha (D-PACE from alpha); auf (up to the first wrong prediction)"
        },
    )
    lk_eta: float = field(default=3.0, metadata={"help": "LK hybrid: how fast KL gives way to TV as alpha grows", "ge": 0})
    dpace_beta: float = field(default=0.5, metadata={"help": "D-PACE: smoothing of the per-slot confidence", "ge": 0, "le": 1})
    reach_weighted_survival: bool = field(
        default=False, metadata={"help": "weigh the survival loss by the reach W_{k-1} instead of the decay"}
    )
    detach_survival: bool = field(
        default=False, metadata={"help": "stop the survival loss at the survival head (the caller detaches the head's inputs)"}
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            if "ge" not in spec.metadata:
                continue
            value, low, high = getattr(self, spec.name), spec.metadata["ge"], spec.metadata.get("le", math.inf)
            if not (math.isfinite(value) and low <= value <= high):
                allowed = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
                raise ValueError(f"objective.{spec.name} = {value}: must be {allowed}")
        if not any(getattr(self, name) > 0 for name in TERMS):
            raise ValueError(f"objective: every weight is 0; set one of {', '.join(TERMS)} above 0")
        if self.slot_weighting == "dpace" and any(self.weight(name) for name in SLOT_TERMS if name != "ce"):
            raise ValueError(
                "objective.slot_weighting = dpace: these weights take exp(-loss) to be q(y), true for ce only; use dpace_alpha"
            )

    def weight(self, term: str) -> float:
        """The weight of a term of `TERMS`."""
        return float(getattr(self, term))

    @property
    def active(self) -> tuple[str, ...]:
        """The terms with a weight above 0, in the order of `TERMS`."""
        return tuple(name for name in TERMS if self.weight(name) > 0)
