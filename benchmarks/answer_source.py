"""Whose answers to train on: the same prompts answered by the target and by others, and the tau of the drafters they make.

    python benchmarks/answer_source.py --json outputs/answer_source.json [--quick] [--data FOLDER] [--output FOLDER]

Sources: `target` (temperature 1, untruncated: the law in the loss); `weaker`, another model (no second chat model is at hand
without a network, so it is the target without the tenth of its layers that matters least, temperature 1); `truncated`, the
target at temperature 0.7, top-p 0.8, top-k 20; `prose`, hand-written passages that answer nothing, the far end. Every source
has the same prompts, the same number of answer tokens for each prompt, the same steps, data order and initial weights.
tau is measured by serving prompts held out from all of them; differences have 95 % intervals that resample seeds and prompts.
Answers, features and finished runs are kept: started again, it goes on.
Keys of the JSON: table (a line per source, tau at T=1 and T=0, differences to `target`), doctor (its probe of each source's
rows), tokens, prompts, runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from _objectives_stats import difference, with_interval
from objectives_on_target import check_answers, code_digest, counts, store, tau_of

SOURCES = {
    "target": "the target, T=1 untruncated",
    "truncated": "the target, T=0.7, top-p 0.8, top-k 20",
    "weaker": "a weaker model, T=1 untruncated",
    "prose": "hand-written prose, no answers",
}
BASE = "target"
PARTS = (("t1", "rollouts_t1"), ("t0", "rollouts_t0"), ("t1_replay", "replay_heldout"))
Record = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--output", type=Path, help="data and finished runs; default: beside the JSON file, named after it")
    parser.add_argument("--data", type=Path, help="output folder of a recipe's run, whose sampled answers are the target's")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded target, Hub id or folder")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny drafter: shows that all parts work")
    parser.add_argument("--sources", nargs="+", choices=[*SOURCES], default=[*SOURCES], help="these, and target")
    parser.add_argument("--seeds", type=int, help="training seeds (default 2, quick 1)")
    parser.add_argument("--steps", type=int, help="optimiser steps (default 280, quick 6)")
    return parser.parse_args(arguments)


def row_of(source: str, runs: Sequence[Record], base: Sequence[Record], facts: Mapping[str, Any]) -> Record:
    """One line of the table: tau with intervals and differences to `base`, and what else is known of the source."""
    row: Record = {"source": source, "label": SOURCES[source], **facts}
    for key, part in PARTS:
        own = counts(runs, part)
        row[key] = with_interval(own)
        row[f"{key}_difference"] = difference(counts(base, part), own)
    row["own_validation"] = counts(runs, "replay_validation").tau
    alpha = np.mean([run["replay_heldout"]["alpha"] for run in runs], axis=0)
    row["alpha"] = [float(value) for value in alpha]
    return row


def one_run(lab: Any, seed: int, folder: Path, identity: Record, say: Callable[[str], None]) -> Record:
    """A training run on one source with its measurements, now or earlier."""
    from draftsmith.losses.config import ObjectiveConfig

    own = {**identity, "source": lab.source, "rows": lab.rows_hash, "seed": seed}
    key = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / "runs" / f"{lab.source}-seed{seed}-{key}.json"
    if path.is_file():
        result: Record = json.loads(path.read_text(encoding="utf-8"))
        note = "kept"
    else:
        began = time.perf_counter()
        found = lab.run(
            ObjectiveConfig(), lab.sizes.steps, seed, folder / "working" / key, top_labels=False, check=False, choose=True
        )
        result = {"key": key, "source": lab.source, **found}
        store(path, result)
        note = f"{time.perf_counter() - began:.0f} s, {result['seconds']['processor']:.0f} s of processor"
    t1, t0 = (tau_of(result, f"rollouts_t{t}") for t in (1, 0))
    say(f"{lab.source} seed {seed}: tau T=1 {t1:.3f} (replay {tau_of(result, 'replay_heldout'):.3f}), T=0 {t0:.3f} ({note})")
    return result


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Record:
    """All runs in turn; the content of the JSON file."""
    from _answer_source_lab import SourceLab
    from _objectives_lab import QUICK, Sizes

    from draftsmith.cli.allocator import keep_freed_memory

    keep_freed_memory()
    sizes = replace(QUICK, rows=24) if args.quick else Sizes(rows=640, steps=280)
    if args.steps:
        sizes = replace(sizes, steps=args.steps)
    names = [name for name in SOURCES if name == BASE or name in args.sources]
    began, folder = time.perf_counter(), args.output or args.json.with_suffix("")
    base = SourceLab(folder, sizes, args.target, args.data, say, names)
    labs = {name: base.of(name) for name in names}
    say(f"data ready after {time.perf_counter() - began:.0f} s")
    probes = {name: {said: lab.examine(said) for said in ("own", "target")} for name, lab in labs.items()}
    for name, found in probes.items():
        say(f"doctor on {name}: {found['target']['refused'] or 'accepted'}")
    identity = {"sizes": asdict(sizes), "target": args.target, "code": code_digest(), "heldout": [p.id for p in base.prompts]}
    runs: dict[str, list[Record]] = {name: [] for name in names}
    for seed in range(args.seeds or (1 if args.quick else 2)):  # seed by seed: an interrupted benchmark has every source
        for name, lab in labs.items():
            runs[name].append(one_run(lab, seed, folder, identity, say))
    table = [row_of(name, runs[name], runs[BASE], {"coverage": labs[name].coverage}) for name in names]
    return {
        "table": table, "doctor": probes, "weaker_layers": list(base.layers), "prompts": len(base.rows[BASE]),
        "trained_prompts": len(base.setup.rows), "heldout_prompts": len(base.prompts),
        "tokens": {name: sum(row.num_supervised for row in rows) for name, rows in base.rows.items()},
        "quick": args.quick, "sizes": asdict(sizes), "seconds": round(time.perf_counter() - began, 1), "code": identity["code"],
        "runs": [run for own in runs.values() for run in own],
    }  # fmt: skip


def verdict(found: Mapping[str, Any]) -> str:
    """The doctor's word on rows that claim to be the target's own at temperature 1, and the measure behind it."""
    excess = "" if found["excess"] is None else f", {found['excess']:+.2f} nats"
    return f"{'refused' if found['refused'] else 'accepted'} (D {found['distance']:.2f}{excess})"


def show(result: Record) -> str:
    """The table as Markdown, as docs/data.md has it."""
    lines = [
        "| answers of | tau at T=1 | difference | tau at T=0 | difference | tau on own validation rows | doctor, as T=1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["table"]:
        cells = []
        for key in ("t1", "t0"):
            share = row[f"{key}_difference"]["relative"]
            value, low, high = (100 * share[name] for name in ("value", "low", "high"))
            own = row["source"] == BASE
            cells += [f"{row[key]['value']:.3f}", "" if own else f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"]
        probe = verdict(result["doctor"][row["source"]]["target"])
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {row['own_validation']:.3f} | {probe} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the JSON; one line on stderr for a mistake."""
    args = parse(arguments)
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{(time.perf_counter() - began) / 60:5.1f} min] {line}", flush=True)

    try:
        for name in ("seeds", "steps"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f"--{name}: {getattr(args, name)} is not allowed; it must be at least 1")
        if args.data is not None:
            check_answers(args.data)
        result = measure(args, say)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    store(args.json, result)
    print(show(result))
    print(f"{len(result['runs'])} runs, {result['seconds']:.0f} s; figures: {args.json}")


if __name__ == "__main__":
    main()
