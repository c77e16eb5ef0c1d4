"""The objective by step: a cold start, the main part, a late exact part, an on-policy part. Imports no torch.

A phase holds for a share of the run's steps; what an objective needs of the drafter (the survival head and its
gradient) is decided once for the whole run, over all its phases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import TERMS, ObjectiveConfig


@dataclass(frozen=True)
class Phase:
    """Steps first <= step < end of a run. key: the recipe's key of the phase; number: 1, 2, ... in order."""

    number: int
    key: str
    first: int
    end: int
    objective: ObjectiveConfig
    on_policy: bool = False

    def line(self) -> str:
        """One line for the log: steps (counted from 1) and weights."""
        weights = ", ".join(f"{name} {self.objective.weight(name):g}" for name in self.objective.active)
        return f"steps {self.first + 1}..{self.end}: {weights}{', on-policy' if self.on_policy else ''}"


class Phases:
    """The phases of `cfg` over a run of `steps` steps, those without a step left out. survival False: the drafter has no
    survival head, so that the term is dropped everywhere.

    Raises ValueError where nothing but the survival term is left to drop.
    """

    def __init__(self, cfg: ObjectiveConfig, steps: int, *, survival: bool = True) -> None:
        self.phases: list[Phase] = []
        first = 0
        ends = [(p.until, f"objective.phases[{i}]", p.objective(cfg), p.on_policy) for i, p in enumerate(cfg.phases)]
        for until, key, objective, on_policy in [*ends, (1.0, "objective", replace(cfg, phases=()), False)]:
            end = round(until * steps)
            if end > first:
                kept = objective if survival or not objective.survival else replace(objective, survival=0.0)
                self.phases.append(Phase(len(self.phases) + 1, key, first, end, kept, on_policy))
                first = end

    def phase(self, step: int) -> Phase:
        """The phase of `step`, counted from 0; the last one's for later steps."""
        return next((phase for phase in self.phases if step < phase.end), self.phases[-1])

    def at(self, step: int) -> ObjectiveConfig:
        """The objective of `step`, counted from 0."""
        return self.phase(step).objective

    def uses(self, term: str) -> bool:
        """Whether any phase has the term."""
        assert term in TERMS, term
        return any(phase.objective.weight(term) > 0 for phase in self.phases)
