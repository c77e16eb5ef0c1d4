"""Time and memory of the fused objective against the plain one, speculators' eager losses and the bare matrix products.

    python benchmarks/objective.py [--python .interop/venv/bin/python] [--json objective.json]

Every contender is a process of its own and they run in turn; the first run of each gives its peak of memory beyond the inputs
(result tables count), the later ones its time. Ratios are medians over rounds. The floor (`products`) holds the products that
no correct step can avoid, in the same precision, with the same threads, over all rows at once. Shapes: SmolLM2 (hidden 576,
vocabulary 49,152; 256 blocks of 7 on 512 tokens) and the head of Qwen3-4B (2560, 151,936; 512 blocks of 7 on 2048 tokens, and
64 for the contenders that cannot hold 512). `make interop` installs speculators; without it that row is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _worker import Worker, available, paired

WORKER = Path(__file__).with_name("_objective_worker.py")
SMOLLM2 = {"hidden": 576, "vocab": 49_152, "rank": 64, "tokens": 512, "anchors": 256, "slots": 7}
QWEN = {"hidden": 2560, "vocab": 151_936, "rank": 256, "tokens": 2048, "anchors": 512, "slots": 7}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_fp32": {**SMOLLM2, "precision": "fp32"},
    "smollm2_bf16": {**SMOLLM2, "precision": "bf16"},
    "qwen3_4b_448_slots": {**QWEN, "precision": "bf16", "tokens": 256, "anchors": 64},
    "qwen3_4b_3584_slots": {**QWEN, "precision": "bf16"},
}
# Copies of [slots, vocabulary] in float32 that the contender holds at once, roughly: decides whether it is tried here.
COPIES = {"plain": 9, "speculators": 11}


def needs(contender: str, shape: dict[str, Any]) -> int:
    """Bytes that the contender will want, inputs included, with a reserve."""
    item = 4 if shape["precision"] == "fp32" else 2
    table = shape["anchors"] * shape["slots"] * shape["vocab"]
    working = 4 * table * COPIES[contender] if contender in COPIES else max(table * item, 1 << 31)
    return (1 << 30) + shape["vocab"] * (shape["hidden"] + 2 * shape["rank"]) * item + working


def measure(shape: dict[str, Any], commands: dict[str, list[str | Path]], rounds: int, threads: int) -> dict[str, Any]:
    """Results of the contenders that fit into memory, by name."""
    workers: list[Worker] = []
    skipped: dict[str, str] = {}
    free, wanted = available(), 0
    for name, command in commands.items():
        # idle contenders keep their inputs; only one works at a time
        want = needs(name, shape)
        if free and wanted + want > free:
            skipped[name] = f"needs about {want / 2**30:.0f} GiB, {max(0, free - wanted) / 2**30:.0f} GiB are free"
            continue
        wanted += shape["vocab"] * (shape["hidden"] + shape["rank"]) * 4
        try:
            workers.append(Worker(name, [*command, WORKER, name, json.dumps(shape)], threads))
        except RuntimeError as error:
            skipped[name] = str(error)
    try:
        for _ in range(rounds + 1):
            for worker in workers:
                worker.run()
    finally:
        for worker in workers:
            worker.close()
    by_name = {worker.name: worker for worker in workers}
    floor = by_name["products"]
    found = {}
    for worker in workers:
        first = worker.first or {}
        found[worker.name] = {
            "seconds": statistics.median(worker.seconds), "over_products": statistics.median(paired(worker, floor)),
            "peak_bytes_over_inputs": first["rise"], "inputs_bytes": worker.ready["inputs"], "loss": first["value"],
        }  # fmt: skip
    return {"contenders": found, "skipped": skipped}


def show(title: str, result: dict[str, Any]) -> None:
    """One shape's table."""
    print(f"\n{title}\n  {'':12}{'seconds':>9}{'over products':>15}{'peak beyond inputs':>20}")
    for name, row in result["contenders"].items():
        peak = f"{row['peak_bytes_over_inputs'] / 2**30:.2f} GiB"
        print(f"  {name:12}{row['seconds']:>9.3f}{row['over_products']:>15.2f}{peak:>20}")
    for name, why in result["skipped"].items():
        print(f"  {name:12} left out: {why}")
    sys.stdout.flush()


def main() -> int:
    """All shapes; prints tables, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".interop/venv/bin/python"), help="that has speculators")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--contenders", nargs="+", choices=["fused", "plain", "speculators"], default=None)
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-mib", type=int, default=1024, help="memory budget of the fused step")
    parser.add_argument("--objective", type=json.loads, default={}, help="terms of the objective (JSON), default the recipes'")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    commands: dict[str, list[str | Path]] = {name: [sys.executable] for name in ("products", "fused", "plain")}
    if asked.python.exists():
        commands["speculators"] = [asked.python]
    else:
        print(f"speculators left out: no {asked.python} (make interop installs it)")
    if asked.contenders:
        commands = {name: c for name, c in commands.items() if name == "products" or name in asked.contenders}
    results: dict[str, Any] = {}
    for name in asked.shapes:
        shape = {**SHAPES[name], "chunk_mib": asked.chunk_mib, "objective": asked.objective}
        whole = shape["anchors"] == QWEN["anchors"]  # the peers would hold ten tables of 2 GiB
        some = {n: c for n, c in commands.items() if not (whole and n == "speculators")}
        rounds = max(1, asked.rounds // 2) if whole else asked.rounds
        results[name] = measure(shape, some, rounds, asked.threads)
        show(f"{name}: {shape['anchors'] * shape['slots']} slots, {shape['precision']}, {asked.threads} threads", results[name])
    fused = {name: found["contenders"]["fused"] for name, found in results.items() if "fused" in found["contenders"]}
    report = {
        "time_over_matmul": {name: row["over_products"] for name, row in fused.items()},
        "peak_bytes_over_inputs": {name: row["peak_bytes_over_inputs"] for name, row in fused.items()},
        "shapes": {name: {**SHAPES[name], **found} for name, found in results.items()},
        "threads": asked.threads, "chunk_mib": asked.chunk_mib,
    }  # fmt: skip
    print("\n" + json.dumps({name: report[name] for name in ("time_over_matmul", "peak_bytes_over_inputs")}))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
