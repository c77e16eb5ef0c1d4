"""Plain against speculative decoding, interleaved prompt by prompt in one process; every raw record is kept.

A cell is one operating point: domain x temperature x concurrency x context. A unit is one group of `concurrency` prompts served
together by the same engine code twice, once with and once without the proposer, in alternating order, so that a slow second of
the machine falls on both sides. Speedups are ratios of time per committed token, with an interval over units.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.config import SamplingParams
from ..runtime.engine import Completion, Engine, Request
from .equation import speedup_parallel, with_prefill
from .prompts import EvalPrompt
from .stats import bootstrap_ratio

SIDES = ("plain", "speculative")
PARTS = ("draft", "head", "verify", "rest")
Record = dict[str, Any]


@dataclass(frozen=True)
class OperatingPoint:
    """Where a cell was measured. context: prompt length asked for in tokens, 0 = the prompts as they are."""

    domain: str
    temperature: float
    concurrency: int
    context: int = 0

    @property
    def key(self) -> str:
        """A file name that tells the cell."""
        return f"{self.domain}-t{self.temperature:g}-c{self.concurrency}-x{self.context}"


def requests_of(group: Sequence[EvalPrompt], sampling: SamplingParams) -> list[Request]:
    """One request per prompt; each has its own seed, derived from its place in the group and the base seed."""
    return [
        Request(prompt.id, prompt.prompt_ids, dataclasses.replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(group)
    ]


def timed_run(engine: Engine, requests: Sequence[Request]) -> tuple[Record, list[Completion]]:
    """Serve the requests and return what it took: seconds in all and by part, engine steps, row cycles, tokens per request."""
    engine.reset_stats()
    _synchronise(engine)
    began = time.perf_counter()
    completions = engine.run(requests)
    _synchronise(engine)
    seconds = time.perf_counter() - began
    stats = engine.stats
    if stats.proposer_failures:
        raise RuntimeError(f"the proposer failed {stats.proposer_failures} times: this run does not measure it")
    record: Record = {"seconds": seconds, "prefill_s": stats.prefill_s, "steps": stats.steps}
    record |= {f"{part}_s": getattr(stats, f"{part}_s") for part in PARTS}
    record["reached_per_slot"] = list(stats.reached_per_slot)
    record["accepted_per_slot"] = list(stats.accepted_per_slot)
    record["tokens"] = [len(c.token_ids) for c in completions]
    record["cycles"] = [[(r.proposed, r.accepted, r.committed) for r in c.cycles] for c in completions]
    return record, completions


def _synchronise(engine: Engine) -> None:
    if engine.decoder.device.type == "cuda":
        torch.cuda.synchronize(engine.decoder.device)


def warm_up(engines: Iterable[Engine], group: Sequence[EvalPrompt], sampling: SamplingParams) -> None:
    """One short untimed run per engine: compilation, allocations and page faults stay out of the cells."""
    for engine in engines:
        engine.run(requests_of(group, dataclasses.replace(sampling, max_new_tokens=min(24, sampling.max_new_tokens))))


def measure_cell(
    plain: Engine,
    speculative: Engine,
    groups: Sequence[Sequence[EvalPrompt]],
    sampling: SamplingParams,
    *,
    repeats: int = 1,
    on_unit: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Raw records of a cell, one per unit and repeat, both sides in each.

    Token ids are kept for the first repeat (later ones repeat them). on_unit(done, total) is called after every record.
    """
    engines = dict(zip(SIDES, (plain, speculative), strict=True))
    records: list[Record] = []
    for repeat in range(repeats):
        for unit, group in enumerate(groups):
            params = dataclasses.replace(sampling, seed=sampling.seed + 100_003 * unit)
            requests = requests_of(group, params)
            order = SIDES if (unit + repeat) % 2 == 0 else SIDES[::-1]
            record: Record = {"unit": unit, "repeat": repeat, "first": order[0], "ids": [p.id for p in group]}
            record["prompt_tokens"] = [len(p.prompt_ids) for p in group]
            for side in order:
                record[side], completions = timed_run(engines[side], requests)
                if repeat == 0:
                    record[side]["token_ids"] = [c.token_ids for c in completions]
                    record[side]["finish_reasons"] = [c.finish_reason for c in completions]
            records.append(record)
            if on_unit is not None:
                on_unit(len(records), repeats * len(groups))
    return records


def summarise_cell(
    point: OperatingPoint, records: Sequence[Record], *, gamma: int, cost: Record | None = None, seed: int = 0
) -> Record:
    """The figures of one cell, ready for report.json. cost: a point of `cost.measure_costs` for the prediction."""
    units = _by_unit(records)
    seconds = {side: [_median(unit, side, "seconds") for unit in units] for side in SIDES}
    tokens = {side: [statistics.median(sum(r[side]["tokens"]) for r in unit) for unit in units] for side in SIDES}
    decode = {side: [_median_decode(unit, side) for unit in units] for side in SIDES}
    steps = {side: [statistics.median(_decoded(r[side]) for r in unit) for unit in units] for side in SIDES}
    plain, spec = SIDES
    ratio, low, high = bootstrap_ratio(seconds[plain], tokens[plain], seconds[spec], tokens[spec], seed=seed)
    cell: Record = {
        "domain": point.domain,
        "temperature": point.temperature,
        "concurrency": point.concurrency,
        "context": int(statistics.median(n for unit in units for n in unit[0]["prompt_tokens"])),
        "context_setting": point.context,
        "gamma": gamma,
        "prompts": sum(len(unit[0]["ids"]) for unit in units),
        "units": len(units),
        "repeats": max(len(unit) for unit in units),
        "answer_tokens_median": statistics.median(n for unit in units for n in unit[0][plain]["tokens"]),
        "speedup": ratio,
        "speedup_interval": [low, high],
        "median_unit_speedup": statistics.median(
            (p / n) / (s / m) for p, n, s, m in zip(seconds[plain], tokens[plain], seconds[spec], tokens[spec], strict=True)
        ),
        "plain_seconds_median": statistics.median(seconds[plain]),
        "speculative_seconds_median": statistics.median(seconds[spec]),
        "plain_tokens_per_second": sum(tokens[plain]) / sum(seconds[plain]),
        "speculative_tokens_per_second": sum(tokens[spec]) / sum(seconds[spec]),
    }
    cell |= _decode_figures(decode, steps, seed)
    cell |= _cycle_figures(records)
    cell |= predict(cell, cost, _prefill(records))
    return cell


def _by_unit(records: Sequence[Record]) -> list[list[Record]]:
    units: dict[int, list[Record]] = {}
    for record in records:
        units.setdefault(record["unit"], []).append(record)
    return [units[key] for key in sorted(units)]


def _median(unit: Sequence[Record], side: str, key: str) -> float:
    return statistics.median(record[side][key] for record in unit)


def _median_decode(unit: Sequence[Record], side: str) -> float:
    return statistics.median(record[side]["seconds"] - record[side]["prefill_s"] for record in unit)


def _decoded(run: Record) -> int:
    """Tokens committed by cycles (the first token of a request comes out of its prefill)."""
    return sum(committed for cycles in run["cycles"] for _, _, committed in cycles)


def _prefill(records: Sequence[Record]) -> dict[str, float]:
    return {
        "share": sum(r["plain"]["prefill_s"] for r in records) / sum(r["plain"]["seconds"] for r in records),
        "ratio": sum(r["speculative"]["prefill_s"] for r in records) / sum(r["plain"]["prefill_s"] for r in records),
    }


def _decode_figures(decode: dict[str, list[float]], tokens: dict[str, list[float]], seed: int) -> Record:
    """Speedup with the prefill taken out of both sides: what the equation speaks about. Units without a cycle are left out."""
    plain, spec = SIDES
    kept = [i for i in range(len(decode[plain])) if tokens[plain][i] > 0 and tokens[spec][i] > 0]
    if len(kept) < 2:
        return {"decode_speedup": None, "decode_speedup_interval": None}
    columns = [[column[i] for i in kept] for column in (decode[plain], tokens[plain], decode[spec], tokens[spec])]
    ratio, low, high = bootstrap_ratio(*columns, seed=seed)
    return {"decode_speedup": ratio, "decode_speedup_interval": [low, high]}


def _cycle_figures(records: Sequence[Record]) -> Record:
    """tau, conditional acceptance by slot, and where the time of a speculative cycle goes."""
    runs = [record["speculative"] for record in records]
    cycles = sum(len(row) for run in runs for row in run["cycles"])
    committed = sum(_decoded(run) for run in runs)
    reached, accepted = (_add_slots([run[f"{name}_per_slot"] for run in runs]) for name in ("reached", "accepted"))
    parts = {part: sum(run[f"{part}_s"] for run in runs) for part in PARTS}
    whole = sum(parts.values())
    steps = sum(run["steps"] for run in runs)
    plain = [record["plain"] for record in records]
    plain_steps = sum(run["steps"] for run in plain)
    return {
        "tau": committed / cycles if cycles else None,
        "cycles": cycles,
        "draft_length_mean": sum(p for run in runs for row in run["cycles"] for p, _, _ in row) / cycles if cycles else None,
        "acceptance_per_slot": [a / r if r else None for a, r in zip(accepted, reached, strict=True)],
        "reached_per_slot": reached,
        "time_split": {part: parts[part] / whole if whole else None for part in PARTS},
        "cycle_ms": 1e3 * whole / steps if steps else None,
        "plain_step_ms": 1e3 * sum(run[f"{part}_s"] for run in plain for part in PARTS) / plain_steps if plain_steps else None,
    }


def _add_slots(lists: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(x) for x in lists), default=0)
    return [sum(x[k] for x in lists if k < len(x)) for k in range(width)]


def predict(cell: Record, cost: Record | None, prefill: dict[str, float]) -> Record:
    """What the equation says from this cell's tau and separately measured costs: with the engine's own time, and bare.

    `predicted_speedup` stands beside `speedup` (whole requests): the decode prediction with the measured share of prefill.
    `predicted_speedup_bare` is tau / (c_block + gamma * c_step + v), the textbook form for an engine that costs nothing.
    """
    shown: Record = {"prefill_share": prefill["share"], "prefill_ratio": prefill["ratio"]}
    if cost is None or cell["tau"] is None:
        return shown | {"predicted_speedup": None, "predicted_decode_speedup": None, "predicted_speedup_bare": None}
    costs = {key: cost[key] for key in ("c_block", "c_step", "v")}
    bare = speedup_parallel(cell["tau"], cost["gamma"], **costs)
    decode = speedup_parallel(
        cell["tau"], cost["gamma"], **costs, overhead=cost["overhead"], plain_overhead=cost["plain_overhead"]
    )
    return shown | {
        "predicted_speedup": with_prefill(decode, prefill["share"], prefill["ratio"]),
        "predicted_decode_speedup": decode,
        "predicted_speedup_bare": bare,
    }
