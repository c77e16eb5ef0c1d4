"""A grid of invented windows for tests: times follow a cost table, tokens an acceptance. Nothing here was measured."""

from __future__ import annotations

import random
from typing import Any

from draftsmith.eval.grid_cells import PARTS, PLAIN, SCHEDULED, Arithmetic, fixed, summarise_cell
from draftsmith.eval.grid_run import quarters
from draftsmith.runtime.costs import CostTable

GAMMAS = (1, 2, 4, 7)
LOADS, CONTEXTS = (1, 2, 4, 8, 16), (128, 1024, 4096)
ARITHMETIC = Arithmetic(target=134_000_000, target_attention=34_560, block=37_000_000, block_attention=16_000, slot=5_200_000,
                        context=2_100_000)  # fmt: skip
COSTS = CostTable.from_functions(
    draft=lambda rows, slots, context: (0.5 if slots else 0.05) * rows**0.5 + (1.6 + 0.12 * slots if slots else 0.0),
    verify=lambda rows, tokens, context: 10.0 + 0.45 * tokens + 0.0022 * rows * context,
    rest=lambda tokens: 0.2 + 0.05 * tokens,
)


def window(lengths: dict[int, int], concurrency: int, context: int, alpha: float, seed: int, noise: float) -> dict[str, Any]:
    """One run: `lengths` {draft length: steps}; every row of a step drafts that length."""
    rng = random.Random(seed)
    steps, shapes, reached, accepted, counts = [], [], [0] * 8, [0] * 8, [0] * 8
    parts = dict.fromkeys(PARTS, 0.0)
    rows = [[0, 0] for _ in range(concurrency)]
    order = [length for length, count in lengths.items() for _ in range(count)]
    rng.shuffle(order)
    for length in order:
        total = 0
        for row in rows:
            hits = 0
            while hits < length and rng.random() < alpha:
                hits += 1
            for k in range(min(hits + 1, length)):
                reached[k] += 1
                accepted[k] += k < hits
            counts[length] += 1
            row[0] += 1
            row[1] += hits + 1
            total += hits + 1
        verified = concurrency * (1 + length)
        scale = rng.gauss(1.0, noise) / 1e3
        draft = COSTS.draft_ms(concurrency, length, context)
        spent = {
            "draft": 0.7 * draft, "head": 0.3 * draft, "verify": COSTS.verify_ms(concurrency, verified, context),
            "rest": 0.95 * COSTS.rest_ms(verified, False, concurrency),
            "schedule": 0.05 * COSTS.rest_ms(verified, False, concurrency),
        }  # fmt: skip
        for part, ms in spent.items():
            parts[part] += scale * ms
        steps.append((scale * sum(spent.values()), total))
        shapes.append((concurrency if length else 0, length, verified))
    seconds, tokens = sum(s for s, _ in steps), sum(n for _, n in steps)
    slots = max(lengths)
    return {
        "seconds": seconds, "tokens": tokens, "steps": len(steps), **{f"{part}_s": parts[part] for part in PARTS},
        "verified_tokens": sum(v for _, _, v in shapes), "drafted_tokens": sum(r * g for r, g, _ in shapes),
        "draft_passes": sum(g > 0 for _, g, _ in shapes), "plain_steps": sum(g == 0 for _, g, _ in shapes),
        "proposer_failures": 0, "reached_per_slot": reached[:slots], "accepted_per_slot": accepted[:slots],
        "length_counts": counts[: slots + 1], "rows": rows,
        "shapes": [[*shape, shapes.count(shape)] for shape in sorted(set(shapes))], "quarters": quarters(steps),
    }  # fmt: skip


def sample_records(
    temperature: float, concurrency: int, context: int, *, windows: int = 4, noise: float = 0.02
) -> list[dict[str, Any]]:
    alpha = 0.58 - 0.18 * (temperature > 0)
    ideal = max(
        (0, *GAMMAS), key=lambda g: sum(alpha**k for k in range(g + 1)) / COSTS.cycle_ms(concurrency, g, context, hot=False)
    )
    records = []
    for index in range(windows):
        plans = {PLAIN: {0: 40}} | {fixed(g): {g: 24} for g in GAMMAS} | {SCHEDULED: {ideal: 23, max(ideal - 1, 0): 5}}
        sides = {
            name: window(plan, concurrency, context, alpha, 1000 * index + i, noise)
            for i, (name, plan) in enumerate(plans.items())
        }
        records.append({"unit": index, "round": 0, "order": list(sides), "ids": [f"p{i}" for i in range(concurrency)],
                        "prompt_tokens": [context] * concurrency, "sides": sides})  # fmt: skip
    return records


def sample_cells(
    temperatures: tuple[float, ...] = (0.0, 1.0), domain: str = "mixed", noise: float = 0.02
) -> list[dict[str, Any]]:
    return [
        summarise_cell(
            {"domain": domain, "temperature": t, "concurrency": c, "context_setting": x},
            sample_records(t, c, x, noise=noise), costs=COSTS, arithmetic=ARITHMETIC,
        )
        for x in CONTEXTS for c in LOADS for t in temperatures
    ]  # fmt: skip


def sample_parts(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of build_grid."""
    environment = {
        "hardware": "INVENTED TEST DATA", "device": "cpu", "threads": 2, "cores": 2, "memory_gib": 8.0,
        "cpu_features": ["avx512f"], "load_average_at_start": 0.2, "versions": {"draftsmith": "0.0-test", "torch": "0.0"},
        "dtype": "bfloat16", "git_commit": None,
    }  # fmt: skip
    drafter = {"num_hidden_layers": 2, "block_size": 7, "markov_rank": 64, "markov_head_type": "vanilla", "rule": "block"}
    return {
        "environment": environment, "target": {"name": "synthetic-target", "revision": None, "dtype": "bfloat16"},
        "drafter": drafter, "cells": sample_cells(), "costs": {"rows": [1], "slots": [0]},
        "arithmetic": dict(vars(ARITHMETIC)), "plain_check": {"1": 0.994, "16": 0.989},
    } | changes  # fmt: skip
