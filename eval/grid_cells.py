"""What a grid's raw records say: figures of each side, the cell's verdict, and the summary of the whole grid. No torch.

A record is one timed window: {"unit", "round", "order", "prompt_tokens": [..], "sides": {side: run}}. A run holds the counts of
`grid.timed_window`. Every speedup is a ratio of tokens per second at equal and constant load: `concurrency` requests, all
decoding from the window's first step to its last.

Arithmetic is counted, not measured, in multiply-adds of matrix products and attention (2 operations each):

    target   verified tokens * (weights + 2 * layers * heads * head_dim * context)
    drafter  drafted rows * block * (its layers, and the same attention) + drafted slots * (LM head + correction head)
             + verified tokens * (context projections)

`verified tokens` counts every token that runs through the target, rejected drafts included.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from .stats import geometric_mean, ratio_of_rates

Record = dict[str, Any]
PLAIN, SCHEDULED = "plain", "scheduled"
PARTS = ("draft", "head", "verify", "rest", "schedule")
WITHIN = 0.10  # a prediction counts as right within this fraction of the measured speedup


class Costs(Protocol):
    """What is needed of runtime.costs.CostTable, all in milliseconds."""

    def draft_ms(self, rows: int, slots: int, context: float, hot: bool = False) -> float:
        """Drafting, with the drafter's upkeep; slots = 0 is the upkeep alone."""

    def verify_ms(self, rows: int, tokens: float, context: float) -> float:
        """A target pass over `tokens` tokens in all."""

    def rest_ms(self, tokens: float, hot: bool, rows: int | None = None) -> float:
        """Rule, sampling, bookkeeping."""

    def cycle_ms(
        self, rows: int, slots: int, context: float, *, hot: bool, drafted: int | None = None, tokens: float | None = None
    ) -> float:
        """A cycle of `rows` rows that drafts `slots` tokens for `drafted` of them and verifies `tokens` in all."""


@dataclass(frozen=True)
class Arithmetic:
    """Multiply-adds per unit of work (weights that a token passes through; attention per token and position of context).

    target: one verified token. block: one draft of one row, all slots of the drafter's parallel pass. slot: the heads of one
    drafted slot. context: projecting one verified position into the drafter's cache.
    """

    target: int
    target_attention: int
    block: int = 0
    block_attention: int = 0
    slot: int = 0
    context: int = 0

    def flops(self, *, verified: float, blocks: float, slots: float, context: float, follows: bool) -> float:
        """Operations of a run. blocks: drafts of a row; follows: the drafter keeps its context (false for plain decoding)."""
        adds = verified * (self.target + self.target_attention * context)
        adds += blocks * (self.block + self.block_attention * context) + slots * self.slot
        return 2.0 * (adds + (verified * self.context if follows else 0.0))


def fixed(gamma: int) -> str:
    """Name of the side that drafts `gamma` tokens in every cycle."""
    return f"fixed-{gamma}"


def gamma_of(side: str) -> int:
    """Draft length of plain (0) and fixed sides."""
    return 0 if side == PLAIN else int(side.removeprefix("fixed-"))


# ---- one cell ---------------------------------------------------------------------------------------------------------


def summarise_cell(
    point: Record, records: Sequence[Record], *, costs: Costs | None, arithmetic: Arithmetic | None, seed: int = 0
) -> Record:
    """The figures of one cell, ready for grid.json. point: domain, temperature, concurrency, context_setting."""
    names = list(records[0]["sides"])
    items = _items(records, names)
    context = _context(records)
    sides = {name: _side(name, records, point, context, costs, arithmetic) for name in names}
    for name, side in sides.items():
        side["speedup"], *side["speedup_interval"] = paired_ratio(items[PLAIN], items[name], seed=seed)
        side["arithmetic"] = _over(side["flops_per_token"], sides[PLAIN]["flops_per_token"])
        side["predicted_speedup"] = _over(sides[PLAIN]["predicted_ms_per_token"], side["predicted_ms_per_token"])
        side["prediction_error"] = _error(side["predicted_speedup"], side["speedup"])
    others = [name for name in names if name != SCHEDULED]
    best = max(others, key=lambda name: sides[name]["speedup"])
    cell = point | {
        "context": round(context),
        "windows": len(records),
        "sides": sides,
        "best": best,
        "best_gamma": gamma_of(best),
        "best_speedup": sides[best]["speedup"],
        "pays": sides[best]["speedup"] > 1.0,
    }
    longest = max(others, key=gamma_of)
    ratio, *interval = paired_ratio(items[best], items[SCHEDULED], seed=seed)
    mine = sides[SCHEDULED]
    return cell | {
        "speedup": mine["speedup"],
        "speedup_interval": mine["speedup_interval"],
        "ratio_to_best": ratio,
        "ratio_interval": interval,
        "predicted_speedup": mine["predicted_speedup"],
        "prediction_error": mine["prediction_error"],
        "tau": mine["tau"],
        "acceptance_per_slot": sides[longest]["acceptance_per_slot"],  # of the side that looks furthest
        "cost": None if costs is None else equation_costs(costs, point, context, gamma_of(longest)),
    }


Items = tuple[list[float], list[float]]


def _items(records: Sequence[Record], names: Sequence[str]) -> dict[str, Items]:
    """(seconds, tokens) per resampled item of every side: quarters of windows, or whole windows where a quarter is empty.

    The k-th quarter of a window covers about the same text on every side, so items are paired over the sides. A window that a
    side has no part in is (0, 0).
    """
    columns: dict[str, Items] = {name: ([], []) for name in names}
    for record in records:
        runs = record["sides"]
        whole = any(tokens <= 0 for run in runs.values() for _, tokens in run["quarters"])
        count = 1 if whole else len(next(iter(runs.values()))["quarters"])
        for name in names:
            parts = [(0.0, 0)] * count
            if name in runs:
                parts = [(runs[name]["seconds"], runs[name]["tokens"])] if whole else runs[name]["quarters"]
            columns[name][0].extend(float(seconds) for seconds, _ in parts)
            columns[name][1].extend(float(tokens) for _, tokens in parts)
    return columns


def paired_ratio(base: Items, other: Items, *, seed: int = 0, resamples: int = 4000) -> tuple[float, float, float]:
    """(ratio, low, high) of other's throughput over base's, with a 95 % bootstrap interval that resamples items.

    Items of both stay together. Where one side has no part (0, 0), the other counts alone.
    """
    columns = np.array([*base, *other])
    index = np.random.default_rng(seed).integers(0, columns.shape[1], size=(resamples, columns.shape[1]))
    drawn = [column[index] for column in columns]
    fine = (drawn[1].sum(1) > 0) & (drawn[3].sum(1) > 0)
    low, high = np.quantile(ratio_of_rates(*(part[fine] for part in drawn)), [0.025, 0.975])
    return float(ratio_of_rates(*columns)), float(low), float(high)


def _context(records: Sequence[Record]) -> float:
    """Mean committed length of a row over the windows: its prompt and half of what a window adds."""
    lengths = [n for record in records for n in record["prompt_tokens"]]
    added = [run["tokens"] / len(record["prompt_tokens"]) / 2 for record in records for run in record["sides"].values()]
    return statistics.fmean(lengths) + statistics.fmean(added)


def _side(
    name: str, records: Sequence[Record], point: Record, context: float, costs: Costs | None, arithmetic: Arithmetic | None
) -> Record:
    runs = [record["sides"][name] for record in records if name in record["sides"]]
    total = {key: sum(run[key] for run in runs) for key in ("seconds", "tokens", "steps", "verified_tokens", "drafted_tokens")}
    cycles = sum(cycles for run in runs for cycles, _ in run["rows"])
    parts = {part: sum(run[f"{part}_s"] for run in runs) for part in PARTS}
    whole = sum(parts.values())
    reached, accepted = (_add([run[f"{kind}_per_slot"] for run in runs]) for kind in ("reached", "accepted"))
    acceptance = [a / r if r else None for a, r in zip(accepted, reached, strict=True)]
    lengths = _add([run["length_counts"] for run in runs])
    flops = None
    if arithmetic is not None:
        blocks = sum(drafted * count for run in runs for drafted, _, _, count in run["shapes"])
        flops = arithmetic.flops(
            verified=total["verified_tokens"], blocks=blocks, slots=total["drafted_tokens"], context=context,
            follows=name != PLAIN,
        ) / total["tokens"]  # fmt: skip
    return {
        "tokens_per_second": total["tokens"] / total["seconds"],
        "tokens_per_second_per_user": total["tokens"] / total["seconds"] / point["concurrency"],
        "windows": len(runs),
        "seconds": total["seconds"],
        "tokens": total["tokens"],
        "steps": total["steps"],
        "row_cycles": cycles,
        "tau": total["tokens"] / cycles,
        "acceptance_per_slot": acceptance,
        "reached_per_slot": reached,
        "length_counts": lengths,
        "length_mean": sum(k * n for k, n in enumerate(lengths)) / sum(lengths) if sum(lengths) else 0.0,
        "drafted_per_cycle": total["drafted_tokens"] / cycles,
        "plain_share": sum(run["plain_steps"] for run in runs) / total["steps"],
        "time_split": {part: parts[part] / whole if whole else None for part in PARTS},
        "cycle_ms": 1e3 * total["seconds"] / total["steps"],
        "flops_per_token": flops,
        "predicted_ms_per_token": None if costs is None else predicted_ms(runs, costs, point, context) / total["tokens"],
    }


def predicted_ms(runs: Sequence[Record], costs: Costs, point: Record, context: float) -> float:
    """What the cost table says these windows take: draft + verify + rest of every step, by the shapes that were run.

    Divided by the tokens this is 1 / S of the equation: plain (verify + rest) over E / (draft + verify + rest). Tokens, and
    with them acceptance, are measured; all times are predicted.
    """
    rows, hot = point["concurrency"], point["temperature"] > 0.0
    return sum(
        count * costs.cycle_ms(rows, slots, context, hot=hot, drafted=drafted, tokens=verified)
        for run in runs for drafted, slots, verified, count in run["shapes"]
    )  # fmt: skip


def equation_costs(costs: Costs, point: Record, context: float, gamma: int) -> Record | None:
    """The table at this point in the equation's terms: times in target passes over one token of every row.

    c_block + gamma c_step: drafting gamma slots, the line through 1 and gamma of them; v: the target over gamma + 1.
    """
    rows, hot = point["concurrency"], point["temperature"] > 0.0
    one = costs.verify_ms(rows, rows, context)
    if gamma < 1 or one <= 0.0:
        return None
    first, last = (costs.draft_ms(rows, slots, context, hot) / one for slots in (1, gamma))
    step = (last - first) / (gamma - 1) if gamma > 1 else 0.0
    wide = rows * (gamma + 1)
    return {
        "gamma": gamma,
        "c_block": first - step,
        "c_step": step,
        "v": costs.verify_ms(rows, wide, context) / one,
        "overhead": costs.rest_ms(wide, hot, rows) / one,
        "plain_overhead": (costs.rest_ms(rows, hot, rows) + costs.draft_ms(rows, 0, context, hot)) / one,
        "target_pass_ms": one,
    }


def _over(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first / second


def _error(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None else predicted / measured - 1.0


def _add(lists: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(x) for x in lists), default=0)
    return [sum(x[k] for x in lists if k < len(x)) for k in range(width)]


# ---- the grid ---------------------------------------------------------------------------------------------------------


def summarise_grid(cells: Sequence[Record]) -> Record:
    """The verdict over all cells: never worse than the best constant choice, and better than any single one.

    worst_ratio_to_best_fixed    least scheduled / best of {plain, every fixed gamma} over the cells
    gain_over_best_fixed         geometric mean of the scheduled speedup over that of the best single gamma (0 = plain)
    gain_in_total_time           time of the best single gamma for equal tokens in every cell over that of scheduled
    predicted_within_10_percent  share of cells whose scheduled speedup the cost table predicts within 10 %
    """
    constant = [name for name in cells[0]["sides"] if name != SCHEDULED]
    means = {name: geometric_mean([cell["sides"][name]["speedup"] for cell in cells]) for name in cells[0]["sides"]}
    times = {name: sum(1.0 / c["sides"][name]["tokens_per_second"] for c in cells) for name in cells[0]["sides"]}
    best, quickest = max(constant, key=lambda name: means[name]), min(constant, key=lambda name: times[name])
    worst = min(cells, key=lambda cell: cell["ratio_to_best"])
    errors = [abs(cell["prediction_error"]) for cell in cells if cell["prediction_error"] is not None]
    all_errors = [
        abs(side["prediction_error"]) for cell in cells for name, side in cell["sides"].items()
        if name != PLAIN and side["prediction_error"] is not None
    ]  # fmt: skip
    return {
        "worst_ratio_to_best_fixed": worst["ratio_to_best"],
        "worst_ratio_interval": worst["ratio_interval"],
        "worst_cell": where(worst),
        "mean_speedup": means,
        "best_fixed_gamma": gamma_of(best),
        "gain_over_best_fixed": means[SCHEDULED] / means[best],
        "quickest_fixed_gamma": gamma_of(quickest),
        "gain_in_total_time": times[quickest] / times[SCHEDULED],
        "predicted_within_10_percent": _share(errors),
        "predicted_within_10_percent_all_sides": _share(all_errors),
        "worst_prediction_error": max(errors, default=None),
        "losing_cells": [where(cell) for cell in cells if cell["speedup"] < 1.0],
        "stops_paying": stops_paying(cells),
    }


def _share(errors: Sequence[float]) -> float | None:
    return sum(error <= WITHIN for error in errors) / len(errors) if errors else None


def where(cell: Record) -> Record:
    """The operating point alone."""
    return {key: cell[key] for key in ("domain", "temperature", "concurrency", "context_setting")}


def stops_paying(cells: Sequence[Record]) -> list[Record]:
    """Per domain, temperature and context: the least concurrency from which no fixed draft length beats plain; None if none."""
    rows: dict[tuple[Any, ...], list[Record]] = {}
    for cell in cells:
        rows.setdefault((cell["domain"], cell["temperature"], cell["context_setting"]), []).append(cell)
    found = []
    for (domain, temperature, context), row in rows.items():
        stop = None
        for cell in sorted(row, key=lambda c: -c["concurrency"]):  # from the highest load down to the first that pays
            if cell["pays"]:
                break
            stop = cell["concurrency"]
        found.append({"domain": domain, "temperature": temperature, "context_setting": context, "concurrency": stop})
    return found


def arithmetic_json(arithmetic: Arithmetic | None) -> Record | None:
    """The counts behind the arithmetic, for the report."""
    return None if arithmetic is None else asdict(arithmetic)
