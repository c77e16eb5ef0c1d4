"""Block verification against the token-wise rule at temperature 1, on the real target: accepted drafts per cycle.

    python benchmarks/rules.py --json outputs/rules.json [--drafter FOLDER] [--prompts 96] [--tokens 96]

The same held-out prompts and seeds under both rules, whole blocks, in float32 or bf16. tau is compared over prompts (paired
bootstrap): both rules emit the same law, so only the cycle lengths may differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from draftsmith.cli.allocator import keep_freed_memory
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.prompts import load_eval_prompts
from draftsmith.eval.stage import Serving
from draftsmith.eval.stats import bootstrap_ratio
from draftsmith.models.config import TargetConfig
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.engine import Request
from draftsmith.runtime.verify import RULES

SLOTS = 16


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--drafter", type=Path, default=Path("outputs/smollm2-135m/drafter"), help="exported drafter")
    parser.add_argument("--target", default=TargetConfig().name, help="embedded target, Hub id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts, over all domains")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both rules over the prompts, group by group in turn."""
    if args.temperature <= 0:
        raise ValueError(f"--temperature: {args.temperature} is not allowed; at 0 both rules are one")
    keep_freed_memory()
    cfg = EvalConfig(dtype=args.dtype)
    serving = Serving.open(TargetConfig(name=args.target, dtype=args.dtype), args.drafter, cfg, args.dtype, args.device)
    domains = load_eval_prompts(cfg, serving.target.tokenizer, max_prompt=512, context=0)
    prompts = [p for group in zip(*domains.values(), strict=False) for p in group][: args.prompts]
    _, engine = serving.engines(SLOTS, 512 + args.tokens + 1)
    counts: dict[str, list[tuple[int, int]]] = {rule: [] for rule in RULES}  # committed, cycles of each prompt
    sampling = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens)
    for first in range(0, len(prompts), SLOTS):
        group = prompts[first : first + SLOTS]
        requests = [
            Request(p.id, p.prompt_ids, dataclasses.replace(sampling, seed=first + i)) for i, p in enumerate(group)
        ]  # fmt: skip
        for rule in RULES:
            engine.rule = rule
            for done in engine.run(requests):
                counts[rule].append((sum(c.committed for c in done.cycles), len(done.cycles)))
    kept = [i for i in range(len(prompts)) if all(counts[rule][i][1] for rule in RULES)]
    columns = {rule: list(zip(*(counts[rule][i] for i in kept), strict=True)) for rule in RULES}
    ratio, low, high = bootstrap_ratio(*columns["block"], *columns["token"])
    taus = {rule: sum(columns[rule][0]) / sum(columns[rule][1]) for rule in RULES}
    return {
        "tau": taus,
        "tau_ratio": ratio,
        "tau_ratio_interval": [low, high],
        "accepted_ratio": (taus["block"] - 1) / (taus["token"] - 1),
        "cycles": {rule: sum(columns[rule][1]) for rule in RULES},
        "prompts": len(kept),
        "temperature": args.temperature,
        "gamma": engine.num_slots,
        "dtype": args.dtype,
        "drafter": args.drafter.parent.name,
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    args = parse(arguments)
    found = measure(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    low, high = found["tau_ratio_interval"]
    tau = found["tau"]
    print(
        f"tau at T={args.temperature:g}: block {tau['block']:.3f}, token-wise {tau['token']:.3f}; "
        f"ratio {found['tau_ratio']:.3f} [{low:.3f}, {high:.3f}] over {found['prompts']} prompts, gamma {found['gamma']}"
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
