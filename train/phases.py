"""Which objective and which micro-batches a step has: the phases of a run, and the anew drawn answers of an on-policy one.

The loop asks once a step (`Course.enter`). Where nothing changes that is a comparison; where a phase begins, or an on-policy
phase draws new answers, the micro-batches are made anew. All of it is a function of the step (and, on-policy, of the answers
stored with the run), so that a run resumes in the middle of any phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..losses.config import ObjectiveConfig
from ..losses.phases import Phases
from .config import TrainConfig
from .law import drawn_rows
from .metrics import Clock
from .onpolicy import OnPolicy
from .prefetch import Feed
from .step import Setup, StepContext, make_batches, micro_batches


class Course:
    """The phases of a run with their micro-batches.

    Raises ValueError, before step 1, for a phase that cannot be trained here (no row drawn at temperature 1 for `exact`, no
    target for an on-policy one).
    """

    def __init__(
        self, cfg: TrainConfig, objective: ObjectiveConfig, setup: Setup, accelerator: Accelerator, output: Path, seed: int
    ) -> None:
        self.cfg, self.setup, self.accelerator, self.seed = cfg, setup, accelerator, seed
        self.phases = Phases(objective, cfg.steps, survival=setup.drafter.confidence_head is not None)
        self.on_policy = OnPolicy(cfg, setup, accelerator, output, seed)
        self.end = -1  # of the steps that the feed was made for
        self.feed: Feed | None = None
        for phase in self.phases.phases:
            if phase.on_policy:
                self.on_policy.check(phase)
            elif phase.objective.exact > 0 and not drawn_rows(setup.rows):
                raise ValueError(f"{phase.key}.exact: above 0 needs answers drawn at temperature 1, but no row is one")
        head = setup.drafter.confidence_head
        if head is not None and not self.phases.uses("survival"):
            # Without its loss it gets no gradient, and DDP waits for the gradient of every trainable parameter.
            head.requires_grad_(False)

    def enter(self, step: int, context: StepContext, clock: Clock) -> Feed:
        """The micro-batches from `step` on (counted from 0); sets the context's objective. All ranks call this, in order."""
        if self.feed is not None and step < self.end:
            return self.feed
        phase = self.phases.phase(step)
        context.objective_cfg = phase.objective
        first, self.end = 0, phase.end
        rows, options, source = self.setup.rows, dict[str, Any](), self.setup.source
        note = ""
        if phase.on_policy:
            answers = self.on_policy.answers(step, phase)
            rows, options["candidates"], source = answers.rows, answers.starts, self.on_policy.source
            first, self.end, note = answers.step, answers.end, f"; {answers.line()}"
            clock.mark("on_policy")
        elif phase.objective.exact > 0 and len(drawn := drawn_rows(rows)) < len(rows):
            note = f"; on the {len(drawn)} of {len(rows)} rows drawn at temperature 1"
            rows = drawn
        if len(self.phases.phases) > 1 or note:
            self.accelerator.print(f"phase {phase.number} of {len(self.phases.phases)}, {phase.line()}{note}")
        self.close()
        batches = make_batches(
            self.cfg, rows, self.accelerator, block_size=self.setup.drafter.block_size, seed=self.seed, **options
        )
        each = self.cfg.accumulation
        self.feed = context.feed = Feed(
            micro_batches(batches, (step - first) * each), source, context.device, count=(self.end - step) * each,
            ahead=self.cfg.prefetch,
        )  # fmt: skip
        return self.feed

    def last_of_phase(self, done: int) -> bool:
        """Whether a phase ends after `done` steps: metrics of two phases are never averaged."""
        return done == self.phases.phase(done - 1).end

    def values(self, done: int) -> dict[str, float]:
        """For the log after `done` steps: the phase's number (if there are several), and tau of on-policy answers."""
        phase = self.phases.phase(done - 1)
        values = {"phase": float(phase.number)} if len(self.phases.phases) > 1 else {}
        return {**values, **(self.on_policy.values() if phase.on_policy else {})}

    def close(self) -> None:
        """Stop the feed's thread."""
        if self.feed is not None:
            self.feed.close()
