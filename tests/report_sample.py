"""A report made of invented numbers, marked as such, for tests of the report's form. Nothing here was measured."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from draftsmith.eval.equation import speedup_parallel, with_prefill

DOMAINS = {"chat": 0.42, "code": 0.66, "math": 0.74, "rewrite": 0.81}
COST = {
    "gamma": 7,
    "c_block": 0.31,
    "c_step": 0.021,
    "v": 1.32,
    "overhead": 0.06,
    "plain_overhead": 0.03,
    "target_pass_ms": 18.4,
}


def sample_cell(domain: str, temperature: float, concurrency: int = 1, context: int = 0) -> dict[str, Any]:
    rng = random.Random(f"{domain}{temperature}{concurrency}{context}")
    alpha = DOMAINS[domain] - 0.12 * temperature
    slots = [max(min(alpha + 0.02 * math.cos(k) - 0.01 * k, 1.0), 0.0) for k in range(7)]
    tau, survival = 1.0, 1.0
    for value in slots:
        survival *= value
        tau += survival
    decode = speedup_parallel(tau, 7, c_block=0.31, c_step=0.021, v=1.32, overhead=0.06, plain_overhead=0.03) / (
        1 + 0.1 * (concurrency - 1)
    )
    predicted = with_prefill(decode, 0.06, 1.1)
    speedup = predicted * rng.uniform(0.94, 1.08)
    half = rng.uniform(0.05, 0.12)
    split = {"draft": 0.31, "head": 0.147, "verify": 1.32, "rest": 0.06}
    return {
        "domain": domain, "temperature": temperature, "concurrency": concurrency, "context": 96 + 40 * len(domain),
        "context_setting": context, "gamma": 7, "prompts": 16, "units": 16, "repeats": 1, "answer_tokens_median": 120,
        "tau": tau, "cycles": 600, "speedup": speedup, "speedup_interval": [speedup - half, speedup + half],
        "median_unit_speedup": speedup, "decode_speedup": speedup * 1.03, "decode_speedup_interval": [speedup, speedup * 1.06],
        "plain_tokens_per_second": 51.0, "speculative_tokens_per_second": 51.0 * speedup, "predicted_speedup": predicted,
        "predicted_decode_speedup": decode, "acceptance_per_slot": slots,
        "reached_per_slot": [int(600 * alpha**k) for k in range(7)],
        "time_split": {k: v / sum(split.values()) for k, v in split.items()}, "cycle_ms": 18.95 * sum(split.values()) / 1.03,
        "plain_step_ms": 18.95, "prefill_share": 0.06, "prefill_ratio": 1.1,
    }  # fmt: skip


def sample_parts(concurrencies: tuple[int, ...] = (1,), temperatures: tuple[float, ...] = (0.0, 1.0)) -> dict[str, Any]:
    """Keyword arguments of build_report."""
    cells = [sample_cell(d, t, c) for c in concurrencies for t in temperatures for d in DOMAINS]
    points = [COST | {"temperature": t, "concurrency": c, "context": 150} for c in concurrencies for t in temperatures]
    served = {
        "dtype": "bfloat16",
        "prompts": 64,
        "tokens": 7000,
        "differences": [{"id": "synthetic-7", "position": 41, "plain": 5, "speculative": 9, "gap": 0.0078}],
    }
    curve = [{"tokens": w, "ms": 18.4 * v, "v": v} for w, v in ((1, 1.0), (2, 1.05), (4, 1.15), (8, 1.32))]
    return {
        "environment": {
            "hardware": "INVENTED TEST DATA", "device": "cpu", "threads": 2, "cores": 2, "memory_gib": 8.0,
            "cpu_features": ["avx512f"], "load_average_at_start": 3.2, "versions": {"draftsmith": "0.0-test", "torch": "0.0"},
            "dtype": "bfloat16", "git_commit": None,
        },
        "target": {"name": "synthetic-target", "revision": None, "dtype": "bfloat16", "vocab_size": 100},
        "drafter": {"num_hidden_layers": 2, "block_size": 7, "markov_rank": 64, "markov_head_type": "vanilla",
                    "target_layer_ids": [1, 7, 14, 21, 27], "rule": "token"},
        "recipe": {"output": "outputs/test", "seed": 0, "train": {"steps": 900, "lr": 1e-3}, "note": "<b>not bold</b>"},
        "cells": cells,
        "cost": COST | {"points": points, "verify_curve": curve},
        "lossless": {
            "greedy_prompts": 32, "greedy_mismatches": 0, "sampling_p_value": 0.431, "verdict": True,
            "greedy": {"dtype": "float32", "prompts": 32, "tokens": 3800, "differences": []}, "served": served,
            "sampling": {"p_value": 0.431, "samples": 600, "prompts": 3, "positions": 3, "temperature": 1.0},
        },
        "settings": {"top_k": 0, "top_p": 1.0},
    }  # fmt: skip


def write_history(path: Path, steps: int = 900) -> Path:
    """A training log in the trainer's form, with invented curves."""
    rng = random.Random(0)
    lines = []
    for step in range(1, steps + 1, 3):
        done = 1 - math.exp(-step / 250)
        row: dict[str, Any] = {"step": step, "loss": 2.9 - 1.4 * done + rng.gauss(0, 0.05), "lr": 1e-3}
        row["loss/tv"] = 0.95 - 0.5 * done + rng.gauss(0, 0.01)
        row["loss/bce"] = 0.7 - 0.2 * done + rng.gauss(0, 0.01)
        row |= {f"accept/alpha_{k}": (0.75 - 0.03 * k) * done + rng.gauss(0, 0.01) for k in range(1, 8)}
        row["accept/tau_expected"] = 1 + 2.1 * done + rng.gauss(0, 0.03)
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + '\n{"step": 901, "lo')
    return path
