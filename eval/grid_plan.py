"""How a grid is cut into cells and windows, and what it refuses. No torch: checked before anything loads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .config import EvalConfig, GridConfig
from .prompts import read_heldout

MIXED = "mixed"
LEAST_WINDOWS = 3  # timed windows of a side in a cell: sides must take turns
LEAST_TOKENS = 24  # of a request in a window
WARM_TOKENS = 192  # of all requests together, untimed, before a cell: schedulers see the load, pages are touched


@dataclass(frozen=True)
class CellPlan:
    """How a cell is cut into windows: `units` groups of prompts, each served in `rounds`, `tokens` per request and window.

    more: further rounds of a sampled cell, for the sides that are near the best.
    """

    concurrency: int
    units: int
    rounds: int
    tokens: int
    more: int

    @classmethod
    def build(cls, grid: GridConfig, concurrency: int) -> CellPlan:
        """The windows that reach grid.tokens per side with grid.prompts and grid.repeats."""
        units = max(grid.prompts // concurrency, 1)
        rounds = max(grid.repeats, -(-LEAST_WINDOWS // units))
        tokens = max(-(-grid.tokens // (units * rounds * concurrency)), LEAST_TOKENS)
        more = -(-grid.sampled_tokens // (units * tokens * concurrency))
        return cls(concurrency, units, rounds, tokens, more)

    @property
    def reach(self) -> int:
        """Tokens of a greedy answer that the rounds cover; the warm-up begins behind them."""
        return self.rounds * self.tokens


def budget(tokens: int, block: int) -> int:
    """max_new_tokens of a window's request: no row may come near it, since it would shorten the row's drafts."""
    return 2 * tokens + 3 * (block + 1)


def resolve_gammas(cfg: EvalConfig, block: int) -> tuple[int, ...]:
    """The fixed lengths compared, ascending. ValueError for one beyond the drafter's block (or eval.num_slots)."""
    most = block if cfg.num_slots is None else min(block, cfg.num_slots)
    chosen = cfg.grid.gammas or {min(gamma, most) for gamma in (1, 2, 4, most)}
    for gamma in chosen:
        if gamma > most:
            raise ValueError(f"eval.grid.gammas: got {gamma}, allowed: 1 to {most} (the drafter's block, eval.num_slots)")
    return tuple(sorted(chosen))


def check_grid(cfg: EvalConfig, block: int, max_positions: int | None) -> None:
    """Refuse, before a model loads, a grid that this drafter, target or prompt set cannot serve. ValueError with the key.

    block: the drafter's; max_positions: of the target, None if unknown. Needs no tokenizer: prompts are counted, their lengths
    are not known yet.
    """
    grid = cfg.grid
    resolve_gammas(cfg, block)
    by_domain = read_heldout(dataclasses.replace(cfg, concurrency=(1,)))
    allowed = cfg.domains or tuple(sorted(by_domain))
    for name in grid.domains:
        if name != MIXED and name not in allowed:
            raise ValueError(f"eval.grid.domains: got {name!r}, allowed: {MIXED}, {', '.join(allowed)}")
        have = len(allowed) * min(len(by_domain[d]) for d in allowed) if name == MIXED else len(by_domain[name])
        need = max(grid.prompts, *grid.concurrency)
        if have < need:
            raise ValueError(f"eval.grid.prompts: {have} held-out prompts for {name!r}, but prompts or concurrency need {need}")
    room = answer_room(grid, block)
    if max_positions is not None and max(grid.contexts) + room > max_positions:
        raise ValueError(
            f"eval.grid.contexts: got {max(grid.contexts)}, allowed: at most {max_positions - room} "
            f"({room} of the target's {max_positions} positions are for answers)"
        )


def answer_room(grid: GridConfig, block: int) -> int:
    """Positions behind a prompt that the longest window needs."""
    plans = [CellPlan.build(grid, c) for c in grid.concurrency]
    return max(plan.reach + budget(plan.tokens, block) for plan in plans) + block + 2
