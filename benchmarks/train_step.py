"""A whole training step against that of speculators' DSpark at the same shape, interleaved.

    python benchmarks/train_step.py [--python .interop/venv/bin/python] [--precision fp32] [--json train_step.json]

Both: 2 draft layers of SmolLM2-135M's sizes, blocks of 7, correction rank 64, the full vocabulary of 49,152, features given;
one run is forward, loss (KL 0.1, TV 1.8, survival 1) with metrics, backward, clipping and AdamW. A process each, in turn; the
ratios are medians over rounds of the time, and of the highest memory of the whole process. speculators runs with eager
attention and eager losses, since its own kernels need a GPU. `make interop` installs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _worker import Worker, paired

WORKER = Path(__file__).with_name("_train_step_worker.py")
MODEL = {"layers": 2, "block": 7, "rank": 64}
SHAPES = {
    "dense": {**MODEL, "tokens": 512, "anchors": 256},
    "sparse": {**MODEL, "tokens": 200, "anchors": 24},
}


def measure(shape: dict[str, Any], python: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds and bytes of both, and their ratios."""
    mine = Worker("draftsmith", [sys.executable, WORKER, "draftsmith", json.dumps(shape)], threads)
    theirs = Worker("speculators", [python, WORKER, "speculators", json.dumps(shape)], threads)
    last: dict[str, dict[str, Any]] = {}
    try:
        for _ in range(rounds + 1):
            for worker in (theirs, mine):
                last[worker.name] = worker.run()
    finally:
        mine.close()
        theirs.close()
    ratios = paired(mine, theirs)
    return {
        "time_over_speculators": statistics.median(ratios), "rounds": ratios,
        "memory_over_speculators": last["draftsmith"]["peak"] / last["speculators"]["peak"],
        **{worker.name: {"seconds": statistics.median(worker.seconds), "peak_bytes": last[worker.name]["peak"]}
           for worker in (mine, theirs)},
    }  # fmt: skip


def main() -> int:
    """Both shapes; prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".interop/venv/bin/python"), help="that has speculators")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the products, on both sides")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-mib", type=int, default=320, help="memory budget of the fused objective")
    parser.add_argument("--objective", type=json.loads, default={}, help="terms of our objective (JSON), default the recipes'")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    if not asked.python.exists():
        print(f"no {asked.python}: `make interop` installs speculators, or name another with --python")
        return 1
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':8}{'ours':>9}{'speculators':>13}{'time':>7}{'ours':>11}{'speculators':>13}{'memory':>8}")
    for name in asked.shapes:
        more = {"precision": asked.precision, "chunk_mib": asked.chunk_mib, "objective": asked.objective}
        rounds = asked.rounds if name == "dense" else 3 * asked.rounds
        found[name] = row = measure({**SHAPES[name], **more}, asked.python, rounds, asked.threads)
        a, b = row["draftsmith"], row["speculators"]
        print(
            f"{name:8}{a['seconds']:>8.3f}s{b['seconds']:>12.3f}s{row['time_over_speculators']:>7.2f}"
            f"{a['peak_bytes'] / 2**30:>8.2f} GiB{b['peak_bytes'] / 2**30:>10.2f} GiB{row['memory_over_speculators']:>8.2f}",
            flush=True,
        )
    report = {
        "time_over_speculators": {name: row["time_over_speculators"] for name, row in found.items()},
        "memory_over_speculators": {name: row["memory_over_speculators"] for name, row in found.items()},
        "precision": asked.precision, "threads": asked.threads, "shapes": {n: {**SHAPES[n], **row} for n, row in found.items()},
    }  # fmt: skip
    print(json.dumps({name: report[name] for name in ("time_over_speculators", "memory_over_speculators")}))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
