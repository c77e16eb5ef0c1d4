"""Answering training prompts: tokens per second of the runtime, plain and with a drafter, against transformers' generate.

    python benchmarks/regenerate.py --json outputs/regenerate.json [--quick] [--drafter outputs/quickstart]

The job of `draftsmith data regenerate`: prompts of the built-in training set as the chat template renders them, sampled at
temperature 1 without truncation, each answer to its end token or the budget. `generate` takes them in groups of --batch,
sorted by length and padded on the left, as one would; a row that has ended waits for the longest of its group. The runtime
fills a slot as soon as it is free. Only tokens up to the end token count. All sides share weights, dtype and threads; they
take turns, round by round in changing order, and ratios are medians over rounds, so a busy machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.cli.allocator import keep_freed_memory
from draftsmith.cli.generate import drafter_folder
from draftsmith.data.chat import ChatFormat
from draftsmith.data.config import DataConfig
from draftsmith.data.source import load_prompts
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.environment import describe
from draftsmith.eval.profile import load_or_profile
from draftsmith.eval.stage import Serving
from draftsmith.models.config import TargetConfig
from draftsmith.models.export.native import read_config
from draftsmith.models.target import Target, load_target
from draftsmith.runtime.config import ProposerConfig, SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.proposers import ProposerSource
from draftsmith.runtime.schedule import LoadAware

Answers = list[list[int]]
Side = Callable[[list[list[int]], int], Answers]  # (prompts, seed)
BASE = "transformers"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one batch of prompts, 48 new tokens, 1 round")
    parser.add_argument("--target", default=TargetConfig().name, help="embedded target, Hub id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--drafter", type=Path, help="an exported drafter or a run's folder: measures the scheduled side too")
    parser.add_argument("--costs", type=Path, help="its cost table (default: beside --json, measured where missing)")
    parser.add_argument("--batch", type=int, default=32, help="rows of generate, slots of the runtime")
    parser.add_argument("--prompts", type=int, help="prompts a round (default 3 batches)")
    parser.add_argument("--max-new-tokens", type=int, help="longest answer (default 192, as in the recipes)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="run every answer to the budget")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
    return parser.parse_args()


def transformers_side(target: Target, args: argparse.Namespace, budget: int) -> Side:
    """Groups of equal size through generate, sorted by length."""
    pad = min(target.eos_token_ids)

    def answer(prompts: list[list[int]], seed: int) -> Answers:
        torch.manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: Answers = [[] for _ in prompts]
        for start in range(0, len(order), args.batch):
            group = order[start : start + args.batch]
            width = max(len(prompts[i]) for i in group)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in group])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in group])
            law = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {}
            least = {"min_new_tokens": budget} if args.ignore_eos else {}
            out = target.model.generate(
                ids, attention_mask=mask, max_new_tokens=budget, pad_token_id=pad, eos_token_id=list(target.eos_token_ids),
                **({"do_sample": False} | law | least),
            )  # fmt: skip
            for i, row in zip(group, out[:, width:].tolist(), strict=True):
                found[i] = row if args.ignore_eos else until_end(row, target.eos_token_ids)
        return found

    return answer


def until_end(row: list[int], ends: Any) -> list[int]:
    """A row up to its end token."""
    return next((row[: i + 1] for i, token in enumerate(row) if token in ends), row)


def runtime_side(engine: Engine, args: argparse.Namespace, budget: int) -> Side:
    """All prompts through one engine."""

    def answer(prompts: list[list[int]], seed: int) -> Answers:
        engine.reset_stats()
        requests = [
            Request(
                str(i), prompt, SamplingParams(
                    temperature=args.temperature, max_new_tokens=budget, seed=1000 * seed + i, ignore_eos=args.ignore_eos
                ),
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        return [done.token_ids for done in engine.run(requests)]

    return answer


def speculative_engine(target: Target, args: argparse.Namespace, context: int) -> Engine:
    """The scheduled engine with the drafter, on the machine's cost table."""
    folder = drafter_folder(args.drafter)
    config = read_config(folder)
    decoder = Decoder.from_target(target.model, dtype=target.dtype, tap_layers=tuple(config["target_layer_ids"]))
    cfg = EvalConfig(dtype=args.dtype)
    serving = Serving(target, decoder, folder, target.dtype, cfg.rule, None, decoder.max_positions - config["block_size"] - 1)
    rows = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n <= args.batch} | {args.batch})
    costs = load_or_profile(
        TargetConfig(name=args.target, dtype=args.dtype), folder, cfg,
        args.costs or (args.json.parent if args.json else Path("outputs")) / "costs.regenerate.json",
        serving=serving, rows=rows, contexts=[min(256, context // 2)], say=lambda line: print(f"costs: {line}", flush=True),
    )  # fmt: skip
    source = ProposerSource(ProposerConfig(), target=target, dtype=target.dtype, drafter_folder=folder)
    return Engine(
        decoder, proposer=source(slots=args.batch, max_context=context), scheduler=LoadAware(costs), slots=args.batch,
        max_context=context, eos_ids=target.eos_token_ids,
    )  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Run, print the table, write the JSON."""
    args = parse()
    keep_freed_memory()
    rounds = args.rounds or (1 if args.quick else 3)
    count = args.prompts or args.batch * (1 if args.quick else 3)
    budget = args.max_new_tokens or (48 if args.quick else 192)
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    chat = ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids)
    chosen = load_prompts(DataConfig(limit=count * rounds), say=None)
    rendered = [chat.render([{"role": "user", "content": prompt.turns[0]}], generation_prompt=True) for prompt in chosen]
    groups = [rendered[i::rounds][:count] for i in range(rounds)]  # every round has other prompts, all sides the same
    context = max(map(len, rendered)) + budget
    decoder = Decoder.from_target(target.model, dtype=target.dtype)
    engines = {"runtime plain": Engine(decoder, slots=args.batch, max_context=context, eos_ids=target.eos_token_ids)}
    if args.drafter is not None:
        engines["runtime scheduled"] = speculative_engine(target, args, context)
    sides = {name: runtime_side(engine, args, budget) for name, engine in engines.items()}
    sides[BASE] = transformers_side(target, args, budget)
    for side in sides.values():  # warm: kernels are compiled, buffers allocated
        side([prompt[:16] for prompt in groups[0][:4]], 0)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    tau: dict[str, list[float]] = {name: [] for name in engines}
    for number, prompts in enumerate(groups):
        names = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
        for name in names:
            began = time.perf_counter()
            answers = sides[name](prompts, number)
            seconds = time.perf_counter() - began
            tokens[name].append(sum(map(len, answers)))
            speeds[name].append(tokens[name][-1] / seconds)
            if name in engines:
                tau[name].append(engines[name].stats.tau)
            print(f"round {number + 1}: {name:18s} {tokens[name][-1]:7d} tokens, {speeds[name][-1]:8.1f} tokens/s", flush=True)
    ratios = {name: spread([a / b for a, b in zip(speeds[name], speeds[BASE], strict=True)]) for name in engines}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['median']:.2f} times transformers [{ratio['low']:.2f}, {ratio['high']:.2f}]")
    report = {
        "environment": describe(args.dtype, "cpu"), "target": args.target, "backend": decoder.backend, "batch": args.batch,
        "prompts_per_round": count, "rounds": rounds, "max_new_tokens": budget, "temperature": args.temperature,
        "ignore_eos": args.ignore_eos, "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()}, "ratio_to_transformers": ratios,
        "tau": {name: spread(values) for name, values in tau.items()}, "per_round": speeds, "tokens": tokens,
        "length_counts": {name: engine.stats.length_counts for name, engine in engines.items()},
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
