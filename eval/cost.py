"""The costs of the equation, measured in the serving engine: c_block, c_step, v(gamma), and what the engine itself spends.

All are ratios to one target pass over one token at the same batch and context, from interleaved runs, as medians over runs.

    c_block         the drafter's parallel pass and its context update, per cycle
    c_step          one slot of the sequential head (the head's time per cycle / gamma)
    v               the target's pass over gamma + 1 tokens
    overhead        acceptance rule, sampling and bookkeeping per cycle
    plain_overhead  sampling and bookkeeping per step of plain decoding
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.config import SamplingParams
from ..runtime.decoder import Decoder
from ..runtime.engine import Engine
from .bench import SIDES, Record, requests_of, timed_run
from .prompts import EvalPrompt


def measure_costs(
    plain: Engine,
    speculative: Engine,
    groups: Sequence[Sequence[EvalPrompt]],
    sampling: SamplingParams,
    *,
    tokens: int = 32,
    repeats: int = 3,
) -> Record:
    """Costs at one operating point: groups of prompts served together, each run `repeats` times on both sides in turn.

    EOS is ignored and the last cycles, whose drafts the budget cuts short, weigh little because every run is long against one
    cycle. Times in milliseconds, the rest in target passes over one token.
    """
    params = dataclasses.replace(sampling, max_new_tokens=tokens, ignore_eos=True, stop=(), stop_token_ids=())
    runs: dict[str, list[Record]] = {side: [] for side in SIDES}
    engines = dict(zip(SIDES, (plain, speculative), strict=True))
    for repeat in range(repeats):
        for unit, group in enumerate(groups):
            requests = requests_of(group, params)
            for side in SIDES if (unit + repeat) % 2 == 0 else SIDES[::-1]:
                runs[side].append(timed_run(engines[side], requests)[0])
    return _ratios(runs, speculative.num_slots) | {
        "concurrency": plain.slots,
        "context": int(statistics.median(len(p.prompt_ids) for group in groups for p in group) + tokens // 2),
        "temperature": sampling.temperature,
    }


def _ratios(runs: dict[str, list[Record]], gamma: int) -> Record:
    plain_side, speculative_side = SIDES
    plain = {part: _per_step(runs[plain_side], part) for part in ("draft", "verify", "rest")}
    cycle = {part: _per_step(runs[speculative_side], part) for part in ("draft", "head", "verify", "rest")}
    one = plain["verify"]
    return {
        "gamma": gamma,
        "c_block": cycle["draft"] / one,
        "c_step": cycle["head"] / gamma / one,
        "v": cycle["verify"] / one,
        "overhead": cycle["rest"] / one,
        "plain_overhead": (plain["draft"] + plain["rest"]) / one,
        "target_pass_ms": 1e3 * one,
        "cycle_parts_ms": {part: 1e3 * value for part, value in cycle.items()},
        "runs": len(runs[plain_side]),
    }


def _per_step(runs: Sequence[Record], part: str) -> float:
    return statistics.median(run[f"{part}_s"] / run["steps"] for run in runs if run["steps"])


@torch.inference_mode()
def verify_curve(
    decoder: Decoder, *, batch: int, context: int, widths: Sequence[int], repeats: int = 7
) -> list[dict[str, Any]]:
    """Cost of a target pass over 1..W tokens per row at a given batch and committed context: [{tokens, ms, v}].

    Widths take turns within a repeat; the median counts, after one untimed round. v is relative to width 1, which is added
    when missing. Raises ValueError when the widest pass leaves the target's positions.
    """
    widths = sorted({1, *widths})
    if context + widths[-1] > decoder.max_positions:
        raise ValueError(f"context: got {context}, allowed: at most {decoder.max_positions - widths[-1]}")
    cache = decoder.new_cache(batch, context + widths[-1])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoder.vocab_size, (batch, widths[-1]), generator=generator).to(decoder.device)
    rows, starts = list(range(batch)), torch.full((batch,), context)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats + 1):
        for width in widths:
            _synchronise(decoder)
            began = time.perf_counter()
            decoder.forward(tokens[:, :width], cache, rows, starts, logits="all", taps=bool(decoder.tap_layers))
            _synchronise(decoder)
            if repeat:
                times[width].append(time.perf_counter() - began)
    medians = {width: statistics.median(values) for width, values in times.items()}
    return [{"tokens": width, "ms": 1e3 * ms, "v": ms / medians[1]} for width, ms in medians.items()]


def _synchronise(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


def nearest_cost(points: Sequence[Record], *, concurrency: int, context: int, temperature: float) -> Record | None:
    """The measured point whose operating point is closest: same concurrency first, then same kind of decoding, then context."""
    if not points:
        return None
    return min(
        points,
        key=lambda p: (
            abs(p["concurrency"] - concurrency),
            (p["temperature"] > 0) != (temperature > 0),
            abs(p["context"] - context),
        ),
    )
