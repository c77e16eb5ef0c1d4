"""The scheduler against plain decoding and every fixed draft length, over concurrency x context x temperature.

    python benchmarks/schedule.py --json outputs/schedule.json [--quick] [--drafter FOLDER] [--target NAME] [--output FOLDER]

Runs the grid of `draftsmith bench --grid` on an exported drafter, the cost table measured first where it is missing, and leaves
grid.json and grid.html in the output folder. Finished cells are kept: run it again after an interruption.
Keys of the JSON: cells; worst_ratio_to_best_fixed, the least scheduled / best of plain and every fixed length;
gain_over_best_fixed, the geometric mean of the scheduled speedups over that of the best single length;
predicted_within_10_percent, as a share of the cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.eval.config import EvalConfig, GridConfig
from draftsmith.eval.grid_plan import check_grid
from draftsmith.models.config import TargetConfig
from draftsmith.models.facts import target_facts

DRAFTERS = ("outputs/smollm2-135m/drafter", "outputs/quickstart/drafter")
# Under 10 minutes and under 35 on two cores with the 135M target, the cost table included.
QUICK = GridConfig(concurrency=(1, 4, 16), contexts=(128, 1024), tokens=256, sampled_tokens=320)
FULL = GridConfig()
KEYS = (
    "worst_ratio_to_best_fixed", "worst_ratio_interval", "worst_cell", "gain_over_best_fixed", "best_fixed_gamma",
    "gain_in_total_time", "predicted_within_10_percent", "predicted_within_10_percent_all_sides", "worst_prediction_error",
    "mean_speedup", "losing_cells", "stops_paying",
)  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="12 cells and fewer tokens in place of 30 cells")
    parser.add_argument("--drafter", type=Path, help=f"exported drafter; default: the first of {', '.join(DRAFTERS)}")
    parser.add_argument("--target", default=TargetConfig().name, help="embedded target, Hub id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="folder of cells and report; default: beside the JSON file, named after it")
    for axis, kind in (("concurrency", int), ("contexts", int), ("temperatures", float), ("gammas", int)):
        parser.add_argument(f"--{axis}", type=kind, nargs="+", help="in place of the default")
    parser.add_argument("--tokens", type=int, help="per side and cell")
    parser.add_argument("--sampled-tokens", type=int, help="more in sampled cells, for the sides near the best")
    return parser.parse_args(arguments)


def find_drafter(given: Path | None) -> Path:
    """The folder to measure. Raises ValueError when there is none."""
    for folder in [given] if given else [Path(name) for name in DRAFTERS]:
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"--drafter: {given or ' and '.join(DRAFTERS)}: no exported drafter there; train one first")


def configure(args: argparse.Namespace) -> EvalConfig:
    """The grid that the flags describe. Raises ValueError for one that makes no sense."""
    axes = {
        axis: tuple(value) if isinstance(value, list) else value
        for axis in ("concurrency", "contexts", "temperatures", "gammas", "tokens", "sampled_tokens")
        if (value := getattr(args, axis)) is not None
    }
    return EvalConfig(dtype=args.dtype, grid=dataclasses.replace(QUICK if args.quick else FULL, **axes))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the grid; the content of the JSON file. Raises ValueError before a model loads for what cannot be measured."""
    drafter, cfg = find_drafter(args.drafter), configure(args)
    target = TargetConfig(name=args.target, dtype=args.dtype)
    block = int(json.loads((drafter / "config.json").read_text(encoding="utf-8"))["block_size"])
    check_grid(cfg, block, target_facts(target).max_positions)

    from draftsmith.cli.allocator import keep_freed_memory
    from draftsmith.eval.grid import run_grid

    keep_freed_memory()
    output = args.output or args.json.with_suffix("")
    began = time.perf_counter()
    html = run_grid(target, drafter, cfg, output, device=args.device)
    report = json.loads(html.with_suffix(".json").read_text(encoding="utf-8"))
    return {
        **{key: report["summary"][key] for key in KEYS},
        "quick": args.quick, "seconds": round(time.perf_counter() - began, 1), "environment": report["environment"],
        "target": report["target"], "drafter": report["drafter"], "grid": dataclasses.asdict(cfg.grid),
        "plain_check": report["plain_check"], "arithmetic": report["arithmetic"], "cells": report["cells"],
    }  # fmt: skip


def main() -> None:
    """Measure and write the JSON; one line on stderr for a mistake."""
    args = parse()
    try:
        result = measure(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(result['cells'])} cells in {result['seconds']:.0f} s; figures: {args.json}")


if __name__ == "__main__":
    main()
