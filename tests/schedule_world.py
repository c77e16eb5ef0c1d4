"""A world without models: rows with known acceptance, cycles with known costs, any scheduler. Time is the cost table's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from draftsmith.runtime.costs import CostTable
from draftsmith.runtime.propose import Proposal
from draftsmith.runtime.schedule import CycleView


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


@dataclass
class World:
    """rows requests at a time, each of `tokens` tokens; another takes the slot when one ends (closed loop) for `cycles` cycles.

    level(generator, request number, cycle) -> the request's mean logit of conditional acceptance, asked every cycle;
    noise: standard deviation of the logit per slot and cycle, which the proposer's survivals know (bias: what they add to it);
    live False: the proposer gives no survivals.
    """

    costs: CostTable  # the truth
    rows: int
    level: object
    slots: int = 7
    noise: float = 0.0
    bias: float = 0.0
    live: bool = False
    context: int = 1024
    tokens: int = 100
    hot: bool = False
    seed: int = 0
    lengths_seen: list = field(default_factory=list)
    plans: list = field(default_factory=list)

    def run(self, scheduler, cycles: int) -> float:
        """Tokens per millisecond."""
        generator = np.random.default_rng(self.seed)
        number = iter(range(10**9))
        request = [next(number) for _ in range(self.rows)]
        left = [self.tokens * (i + 1) // self.rows + 1 for i in range(self.rows)]  # out of step
        for row in range(self.rows):
            scheduler.begin(row)
        total, spent = 0, 0.0
        for cycle in range(cycles):
            view = CycleView(
                list(range(self.rows)), [self.context] * self.rows, [n - 1 for n in left], self.slots, self.hot
            )  # fmt: skip
            plan = scheduler.plan(view)
            level = np.array([self.level(generator, r, cycle) for r in request])
            logit = level[:, None] + self.noise * generator.standard_normal((self.rows, self.slots))
            chance = sigmoid(logit)
            lengths = np.zeros(self.rows, dtype=np.int64)
            if plan.rows:
                shape = (len(plan.rows), plan.slots)
                survival = None
                if self.live:
                    survival = torch.from_numpy(sigmoid(logit + self.bias).cumprod(1)[plan.rows, : plan.slots]).float()
                proposal = Proposal(torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], plan.slots), survival=survival)
                lengths[plan.rows] = scheduler.allocate(view, plan, proposal).numpy()
                room = np.array([max(0, view.room[i]) for i in plan.rows])
                assert (lengths[plan.rows] <= np.minimum(room, plan.slots)).all() and (lengths >= 0).all()
            stands = (generator.random((self.rows, self.slots)) < chance).cumprod(1).sum(1)
            accepted = np.minimum(stands, lengths)
            scheduler.observe(view, lengths.tolist(), accepted.tolist())
            spent += self.costs.cycle_ms(
                self.rows, plan.slots, self.context, hot=self.hot, drafted=len(plan.rows), tokens=self.verified(lengths)
            )
            self.lengths_seen.append(lengths)
            self.plans.append(plan)
            for row in range(self.rows):
                done = min(int(accepted[row]) + 1, left[row])
                total += done
                left[row] -= done
                if left[row] == 0:
                    scheduler.release(row)
                    request[row], left[row] = next(number), self.tokens
                    scheduler.begin(row)
        return total / spent

    def verified(self, lengths):
        """Tokens that the target's pass is paid for."""
        return self.rows + (int(lengths.sum()) if self.costs.ragged else self.rows * int(lengths.max()))
