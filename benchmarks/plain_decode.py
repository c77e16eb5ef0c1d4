"""Plain decoding of the runtime against transformers' generate, and the cost v(W) of verifying W tokens.

    python benchmarks/plain_decode.py --json outputs/plain_decode.json [--quick] [--dtype bfloat16] [--target NAME]

Same weights, dtype and threads; the two are interleaved round by round and ratios are medians over the rounds, so a busy
machine hits both. Both run greedily through EOS to the same number of new tokens, prefill included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval.environment import describe
from draftsmith.models.config import TargetConfig
from draftsmith.models.target import Target, load_target
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine, Request

TEXT = (
    "Write a function that returns the prime factors of a number in ascending order, explain why it stops at the square "
    "root, and then summarise in one sentence how its cost grows with the number. Name one case it handles badly."
)
WIDTHS, CONTEXTS = (1, 2, 4, 8, 16), (128, 1024)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="32 new tokens, 2 rounds, batches 1 and 8")
    parser.add_argument("--target", default=TargetConfig().name, help="embedded target, Hub id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "kernels"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 5; 2 with --quick)")
    return parser.parse_args()


def sync(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ours(engine: Engine, prompts: list[list[int]], new_tokens: int, device: torch.device) -> tuple[float, list[list[int]]]:
    """Seconds and token ids of the runtime's plain loop."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    sync(device)
    begin = time.perf_counter()
    done = engine.run(requests)
    sync(device)
    return time.perf_counter() - begin, [c.token_ids for c in done]


def time_generate(target: Target, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and token ids of transformers' generate."""
    ids = torch.tensor(prompts, device=target.device)
    sync(target.device)
    begin = time.perf_counter()
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    sync(target.device)
    return time.perf_counter() - begin, out[:, ids.shape[1] :].tolist()


def compare(target: Target, decoder: Decoder, batch: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of both at one batch size."""
    text = target.tokenizer(TEXT).input_ids
    prompts = [text[i % 8 :][:24] for i in range(batch)]  # equal lengths: generate then needs no padding
    engine = Engine(decoder, slots=batch, max_context=len(prompts[0]) + new_tokens + 1)
    time_ours(engine, prompts, 8, target.device)
    time_generate(target, prompts, 8)
    ours, theirs, same = [], [], 0.0
    for _ in range(rounds):
        seconds, mine = time_ours(engine, prompts, new_tokens, target.device)
        ours.append(batch * new_tokens / seconds)
        seconds, other = time_generate(target, prompts, new_tokens)
        theirs.append(batch * new_tokens / seconds)
        same = sum(a == b for a, b in zip(mine, other, strict=True)) / batch
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
        "ours": statistics.median(ours), "transformers": statistics.median(theirs), "rows_with_equal_text": same,
    }  # fmt: skip


@torch.inference_mode()
def width_costs(decoder: Decoder, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of one forward of W tokens of one row by context; widths interleaved."""
    contexts = [c for c in CONTEXTS if c + max(WIDTHS) <= decoder.max_positions]
    cache = decoder.new_cache(1, max(contexts) + max(WIDTHS))
    times: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 2):
        for context in contexts:
            for width in WIDTHS:
                tokens = torch.full((1, width), 11, device=decoder.device)
                begin = time.perf_counter()
                decoder.forward(tokens, cache, [0], torch.tensor([context]), bound=context + width)
                sync(decoder.device)
                if repeat >= 2:
                    times.setdefault((context, width), []).append(time.perf_counter() - begin)
    return {str(c): {str(w): 1e3 * statistics.median(times[c, w]) for w in WIDTHS} for c in contexts}


def floor_of(target: Target, decoder: Decoder, step_ms: float) -> dict[str, float | None]:
    """Bytes of weights one token must read over the measured read bandwidth (CPU kernels only), against a real step."""
    parameters = {p.data_ptr(): p for p in target.model.parameters()}
    table, head = target.embedding_weight, target.lm_head_weight
    if table.data_ptr() != head.data_ptr():
        parameters.pop(table.data_ptr(), None)  # an untied embedding is gathered, not read through
    nbytes = sum(p.nbytes for p in parameters.values())
    if decoder.backend != "kernels":
        return {"weight_bytes": nbytes, "bandwidth_gb_s": None, "floor_ms": None, "ratio": None}
    from draftsmith.runtime.kernels import read_bandwidth

    bandwidth = read_bandwidth(nbytes)
    floor_ms = 1e3 * nbytes / bandwidth
    return {"weight_bytes": nbytes, "bandwidth_gb_s": bandwidth / 1e9, "floor_ms": floor_ms, "ratio": step_ms / floor_ms}


def main() -> None:
    """Run, print the tables, write the JSON."""
    args = parse()
    rounds = args.rounds or (2 if args.quick else 5)
    batches, new_tokens = ((1, 8), 32) if args.quick else ((1, 8, 32), 128)
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype), args.device)
    decoder = Decoder.from_target(target.model, dtype=target.dtype, backend=args.backend)
    cells = {}
    for batch in batches:
        cells[batch] = cell = compare(target, decoder, batch, new_tokens, rounds)
        print(
            f"batch {batch:3d}: {cell['ours']:8.1f} tokens/s, transformers {cell['transformers']:8.1f}, "
            f"ratio {cell['ratio']:.2f} [{cell['ratio_low']:.2f}, {cell['ratio_high']:.2f}]", flush=True,
        )  # fmt: skip
    costs = width_costs(decoder, 9 if args.quick else 25)
    for context, row in costs.items():
        cost = ", ".join(f"W={w} {ms:.2f} ({ms / row['1']:.2f})" for w, ms in row.items())
        print(f"context {context}: ms of one forward (v = relative to W=1): {cost}")
    floor = floor_of(target, decoder, next(iter(costs.values()))["1"])
    if floor["ratio"]:
        print(
            f"floor: {floor['weight_bytes'] / 1e6:.0f} MB at {floor['bandwidth_gb_s']:.1f} GB/s = {floor['floor_ms']:.2f} ms; "
            f"a step takes {floor['ratio']:.2f} times that"
        )
    report = {
        "environment": describe(args.dtype, args.device), "target": args.target, "backend": decoder.backend,
        "new_tokens": new_tokens, "rounds": rounds,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "ratio_to_transformers": {str(b): c["ratio"] for b, c in cells.items()},
        "tokens_per_second": {str(b): c["ours"] for b, c in cells.items()},
        "cells": {str(b): c for b, c in cells.items()},
        "forward_ms": costs, "v": {c: {w: ms / row["1"] for w, ms in row.items()} for c, row in costs.items()},
        "bandwidth_floor_ratio": floor["ratio"], "floor": floor,
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
