"""What the raw records of an engine behind HTTP say: one cell of report.json each. No torch.

A record is one group of prompts: {"unit", "repeat", "ids", "prompt_tokens", side: run}, with the sides "speculative" and, where
there are two servers, "plain"; a run holds what server_bench.Remote.run returns. Times are the client's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from . import server_metrics
from .stats import bootstrap_ratio

PLAIN, SPECULATIVE = "plain", "speculative"
Record = dict[str, Any]


def summarise_cell(point: Record, records: Sequence[Record], *, seed: int = 0) -> Record:
    """The figures of one cell under report.json's names. Without a plain side: speedups are None.

    speedup: time per token of the plain side over that of the speculative one, whole requests, interval from a bootstrap over
    groups. decode_speedup: the same from each request's first token on, so without prefill and queueing. first_token_s: median
    seconds to the first piece of an answer.
    """
    sides = [side for side in (PLAIN, SPECULATIVE) if side in records[0]]
    whole = {side: _columns(records, side) for side in sides}
    decode = {side: _decode_columns(records, side) for side in sides}
    counted = server_metrics.add([record[SPECULATIVE]["counted"] for record in records])
    cell: Record = point | {
        "context": int(statistics.median(n for record in records for n in record["prompt_tokens"])),
        "gamma": None, "prompts": len({name for record in records for name in record["ids"]}),
        "units": len({record["unit"] for record in records}), "repeats": 1 + max(record["repeat"] for record in records),
        "answer_tokens_median": statistics.median(n for record in records for n in record[SPECULATIVE]["tokens"]),
        **_ratio("speedup", whole, seed), **_ratio("decode_speedup", decode, seed),
        "median_unit_speedup": _median_unit(whole), "time_split": None, "predicted_speedup": None,
        "predicted_decode_speedup": None, "predicted_speedup_bare": None, **server_metrics.figures(counted),
        "engine_counters": counted,
    }  # fmt: skip
    for side in (PLAIN, SPECULATIVE):
        present = side in sides
        runs = [record[side] for record in records] if present else []
        seconds, tokens = whole[side] if present else ([], [])
        cell[f"{side}_tokens_per_second"] = sum(tokens) / sum(seconds) if present else None
        cell[f"{side}_seconds_median"] = statistics.median(seconds) if present else None
        firsts = [value for run in runs for value in run["first_s"] if value]
        cell[f"{side}_first_token_s"] = statistics.median(firsts) if firsts else None
        cell[f"{side}_retried"] = sum(run["retried"] for run in runs) if present else None
        foreign = [run["foreign_tokens"] for run in runs]
        cell[f"{side}_foreign_tokens"] = sum(foreign) if foreign and None not in foreign else None
    cell["pays"] = cell["speedup"] is not None and cell["speedup"] > 1.0
    return cell


def _columns(records: Sequence[Record], side: str) -> tuple[list[float], list[float]]:
    return [r[side]["seconds"] for r in records], [float(sum(r[side]["tokens"])) for r in records]


def _decode_columns(records: Sequence[Record], side: str) -> tuple[list[float], list[float]]:
    """Seconds and tokens behind the first piece of each request, added up over the group. Empty where nothing was streamed."""
    seconds, tokens = [], []
    for record in records:
        run = record[side]
        parts = [
            (whole - first, count - 1)
            for whole, first, count in zip(run["request_s"], run["first_s"], run["tokens"], strict=True)
            if first and count > 1 and whole > first
        ]
        seconds.append(sum(part for part, _ in parts))
        tokens.append(float(sum(count for _, count in parts)))
    return seconds, tokens


def _ratio(name: str, columns: dict[str, tuple[list[float], list[float]]], seed: int) -> Record:
    """{name, name_interval}; None without two sides, the interval None with a single group."""
    empty: Record = {name: None, f"{name}_interval": None}
    if PLAIN not in columns:
        return empty
    rows = [row for row in zip(*columns[PLAIN], *columns[SPECULATIVE], strict=True) if all(value > 0 for value in row)]
    if not rows:
        return empty
    parts = [list(column) for column in zip(*rows, strict=True)]
    if len(rows) < 2:
        (base_s, base_n, other_s, other_n), *_ = rows
        return {name: (base_s / base_n) / (other_s / other_n), f"{name}_interval": None}
    ratio, low, high = bootstrap_ratio(*parts, seed=seed)
    return {name: ratio, f"{name}_interval": [low, high]}


def _median_unit(columns: dict[str, tuple[list[float], list[float]]]) -> float | None:
    if PLAIN not in columns:
        return None
    rows = zip(*columns[PLAIN], *columns[SPECULATIVE], strict=True)
    return statistics.median((p / n) / (s / m) for p, n, s, m in rows)


def greedy_differences(kept: Sequence[Record]) -> tuple[int, int, list[Record]]:
    """(prompts compared, tokens compared, differences): greedy answers of both servers, first passes only, each prompt once.

    Token ids where both give them, else texts (position None).
    """
    prompts, tokens, found, seen = 0, 0, [], set()
    for cell in kept:
        if cell["temperature"] > 0.0:
            continue
        for record in cell["records"]:
            if PLAIN not in record or record["repeat"]:
                continue
            for i, name in enumerate(record["ids"]):
                key = (name, cell["context_setting"])
                if key in seen:
                    continue
                seen.add(key)
                prompts += 1
                tokens += record[PLAIN]["tokens"][i]
                difference = _compare(record, i)
                if difference is not None:
                    found.append({"id": name, **difference})
    return prompts, tokens, found


def _compare(record: Record, i: int) -> Record | None:
    ids = [record[side]["token_ids"][i] for side in (PLAIN, SPECULATIVE)]
    if None in ids:
        same = record[PLAIN]["texts"][i] == record[SPECULATIVE]["texts"][i]
        return None if same else {"position": None, "plain": None, "speculative": None, "gap": None}
    length = min(map(len, ids))
    for position in range(length):
        if ids[0][position] != ids[1][position]:
            return {"position": position, "plain": ids[0][position], "speculative": ids[1][position], "gap": None}
    return None if len(ids[0]) == len(ids[1]) else {"position": length, "plain": None, "speculative": None, "gap": None}
