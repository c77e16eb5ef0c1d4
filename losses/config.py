"""Which losses a run minimises, and with what weights, and how that changes over the run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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
    `phases` replaces some of these settings in parts of the run (`losses/phases.py`).

    Raises:
        ValueError: a weight is negative or not finite, every weight is 0, `slot_weighting="dpace"` is combined with a
            slot term other than `ce`, in a phase too; phases that do not end one after the other.
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
    phases: tuple[PhaseConfig, ...] = field(
        default=(),
        metadata={
            "help": "parts of the run in which other settings hold, in order: {until: share of the steps, SETTING: value}; "
            "after the last the section's own hold"
        },
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(PhaseConfig(**p) if isinstance(p, Mapping) else p for p in self.phases))
        self._check()
        wrong, before = [], 0.0
        for number, phase in enumerate(self.phases):
            if phase.until <= before:
                wrong.append(
                    f"phases[{number}].until: {phase.until} is not allowed; it must be above {before}, where the phase begins"
                )
            before = phase.until
            try:
                phase.objective(self)
            except ValueError as error:
                wrong.append(f"phases[{number}]: {error}")
        if wrong:
            raise ValueError("objective." + "; objective.".join(wrong))

    def _check(self) -> None:
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

    @property
    def exact_on_answers(self) -> list[str]:
        """Keys of the `exact` weights above 0 whose text is the data set's, which must then be drawn from the loss's own p.

        The text of an on-policy phase is: the runtime draws it at temperature 1 without truncation.
        """
        found = [
            f"objective.phases[{number}].exact"
            for number, phase in enumerate(self.phases)
            if not phase.on_policy and phase.objective(self).exact > 0
        ]
        main = not self.phases or self.phases[-1].until < 1.0
        return [*found, *(["objective.exact"] if main and self.exact > 0 else [])]

    def weight(self, term: str) -> float:
        """The weight of a term of `TERMS`."""
        return float(getattr(self, term))

    @property
    def active(self) -> tuple[str, ...]:
        """The terms with a weight above 0, in the order of `TERMS`."""
        return tuple(name for name in TERMS if self.weight(name) > 0)


def _replaces(name: str) -> Any:
    """A field of a phase: another value of the objective's setting `name`, None to leave it."""
    return field(default=None, metadata=dict(ObjectiveConfig.__dataclass_fields__[name].metadata))


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase: the settings of the objective that it replaces, None where it keeps them; see `ObjectiveConfig.phases`.

    Raises ValueError for `until` outside 0 to 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    until: float = field(metadata={"help": "share of the steps at which the phase ends", "gt": 0.0, "le": 1.0})
    on_policy: bool = field(
        default=False,
        metadata={"help": "train on answers that the runtime drafts with the drafter as it is, where its cycles began"},
    )
    ce: float | None = _replaces("ce")
    kl: float | None = _replaces("kl")
    reverse_kl: float | None = _replaces("reverse_kl")
    js: float | None = _replaces("js")
    tv: float | None = _replaces("tv")
    l1: float | None = _replaces("l1")
    nla: float | None = _replaces("nla")
    lk: float | None = _replaces("lk")
    renyi: float | None = _replaces("renyi")
    e2e: float | None = _replaces("e2e")
    exact: float | None = _replaces("exact")
    survival: float | None = _replaces("survival")
    decay: float | None = _replaces("decay")
    slot_weighting: SlotWeighting | None = _replaces("slot_weighting")
    lk_eta: float | None = _replaces("lk_eta")
    dpace_beta: float | None = _replaces("dpace_beta")
    reach_weighted_survival: bool | None = _replaces("reach_weighted_survival")
    detach_survival: bool | None = _replaces("detach_survival")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.until) and 0.0 < self.until <= 1.0):
            raise ValueError(f"objective.phases: until = {self.until}: must be above 0 and at most 1")

    def objective(self, main: ObjectiveConfig) -> ObjectiveConfig:
        """The objective of the phase, without phases of its own. Raises ValueError as ObjectiveConfig."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("until", "on_policy")}
        return replace(main, phases=(), **{name: value for name, value in own.items() if value is not None})
