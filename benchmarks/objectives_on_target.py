"""Objectives on the embedded target: equal data, equal optimiser steps and equal time, several seeds, real rollouts.

    python benchmarks/objectives_on_target.py --json outputs/objectives.json [--quick] [--data FOLDER] [--output FOLDER]

Answers and features are made once; each run is one training with draftsmith's loop and its measurements, kept as a JSON file
named by a hash of all that decides it: started again, the benchmark goes on with the next run. A result is a mean over seeds;
intervals resample seeds and prompts. The winner is chosen on held-back training prompts, its difference to DSpark's published
loss is measured on other ones. docs/objectives.md says what is compared and how to read it.
Keys of the JSON: runs; table; winner; difference_to_dspark (equal steps) and difference_to_dspark_wall_clock, each {t1, t0}
with value, low and high in tokens per cycle, and `relative` as shares; costs; at_cycle_starts.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from _objectives_stats import Counts, choose_winner, cost_ratios, difference, equal_time_steps, mixed_ratio, with_interval

# Waiting threads sleep: spinning ones slow down whatever else runs here, and each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

BASE = "dspark"
OFF = {"kl": 0.0, "tv": 0.0}
LATE = 0.72  # share of the steps before the late phase
# Name -> (weights, label). The survival loss has weight 1 in all; slot weights are exp(-(k-1)/4) throughout.
OBJECTIVES: dict[str, tuple[dict[str, Any], str]] = {
    "dspark": ({"ce": 0.1, "kl": 0.0, "tv": 1.8}, "A: DSpark as published, 0.1 CE + 1.8 TV"),
    "soft": ({"kl": 0.1, "tv": 1.8}, "B: 0.1 KL + 1.8 TV"),
    "product": ({**OFF, "kl": 0.1, "e2e": 1.0}, "C: 0.1 KL + end-to-end product"),
    "late_exact": (
        {**OFF, "exact": 1.0, "phases": [{"until": LATE, "kl": 0.1, "e2e": 1.0, "exact": 0.0}]},
        f"D: C for {LATE:.0%} of the steps, then exact E[W alpha]",
    ),
    "speculators": ({"ce": 0.1, "kl": 0.0, "tv": 0.9}, "speculators' mix, 0.1 CE of the target's arg-max + 0.9 TV"),
    "ce": ({**OFF, "ce": 1.0}, "CE only"),
    "tv": ({**OFF, "tv": 1.0}, "TV only"),
}
TOP_LABELS = ("speculators",)
ON_POLICY = "on_policy"
SOURCES = ("losses", *(f"train/{name}.py" for name in ("loop", "step", "phases", "onpolicy", "optim")),
           *(f"models/{name}.py" for name in ("dspark", "blocks", "heads", "masks")))  # fmt: skip
Record = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--output", type=Path, help="data and finished runs; default: beside the JSON file, named after it")
    parser.add_argument("--data", type=Path, help="output folder of a recipe's run, whose sampled answers are used")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded target, Hub id or folder")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny drafter: shows that all parts work")
    parser.add_argument("--seeds", type=int, default=None, help="training seeds (default 3, quick 1)")
    parser.add_argument("--steps", type=int, help="optimiser steps of the equal-steps budget")
    parser.add_argument("--only", nargs="+", choices=[*OBJECTIVES], help="these objectives and dspark")
    parser.add_argument("--no-on-policy", action="store_true", help="leave out the on-policy phase on top of the winner")
    parser.add_argument("--no-wall-clock", action="store_true", help="leave out the runs with equal time")
    return parser.parse_args(arguments)


def check_answers(folder: Path) -> None:
    """Whether `folder` holds answers of which the sampled rows can be used. ValueError naming what is wrong."""
    try:
        made = json.loads((folder / "answers" / "manifest.json").read_text(encoding="utf-8"))["generation"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"--data: {folder}: holds no answers; give the output folder of a recipe's run") from None
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    wrong = [f"{key} {made[key]} in place of {value}" for key, value in wanted.items() if made[key] != value]
    if wrong or made["greedy_share"] >= 1.0:
        raise ValueError(f"--data: {folder}: answers not drawn from the law of the loss ({'; '.join(wrong) or 'all greedy'})")


def code_digest() -> str:
    """Hash of the source files that decide what a run learns: results of other code are not mixed in."""
    spec = importlib.util.find_spec("draftsmith")
    assert spec is not None and spec.origin is not None
    root, digest = Path(spec.origin).parent, hashlib.sha256()
    for name in SOURCES:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".cpp"):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def store(path: Path, value: Any) -> None:
    """Write JSON so that the file is absent, the old one, or whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def on_policy_of(weights: Record) -> Record:
    """E: the winner's objective, with the last part of the run on answers drafted by the drafter as it is."""
    phases = [dict(phase) for phase in weights.get("phases", [])] or [{"until": LATE}]
    return {**weights, "phases": [*phases, {"until": 1.0, "on_policy": True}]}


class Runs:
    """Runs by objective, seed and budget; finished ones are read back."""

    def __init__(self, lab: Any, folder: Path, identity: Record, seeds: Sequence[int], say: Callable[[str], None]) -> None:
        self.lab, self.folder, self.identity, self.seeds, self.say = lab, folder, identity, seeds, say
        self.done: dict[tuple[str, str], list[Record]] = {}
        self.read: dict[Path, Record] = {}

    def key(self, **own: Any) -> str:
        """Hash of the run's whole configuration."""
        return hashlib.sha256(json.dumps({**self.identity, **own}, sort_keys=True).encode()).hexdigest()[:16]

    def objective(self, weights: Record) -> Any:
        """As the trainer's configuration."""
        from draftsmith.losses.config import ObjectiveConfig

        return ObjectiveConfig(**weights)

    def costs(self, objectives: dict[str, Record], steps: int) -> dict[str, float]:
        """Time of a step over that of the base, by objective; measured once and kept."""
        from _objectives_lab import plain_objectives

        key, path = self.key(part="costs", objectives=objectives), self.folder / "costs.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
        if found.get("key") != key:
            self.say("step costs: measuring, all objectives in turn")
            parts: dict[str, tuple[Any, bool]] = {}
            shares: dict[str, dict[str, float]] = {}
            for name, weights in objectives.items():
                shares[name] = {}
                for number, (share, plain) in enumerate(plain_objectives(self.objective(weights), steps)):
                    shares[name][f"{name}/{number}"] = share
                    parts[f"{name}/{number}"] = (plain, name in TOP_LABELS)
            seconds = self.lab.costs(parts)
            ratios = cost_ratios(seconds, f"{BASE}/0")
            mixed = {name: mixed_ratio(shares[name], ratios) for name in objectives}
            found = {"key": key, "ratios": mixed, "by_phase": ratios, "seconds": seconds}
            store(path, found)
        ratios = found["ratios"]
        self.say("step costs over dspark: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
        return ratios

    def measure(self, name: str, weights: Record, steps: int, seed: int, budget: str) -> Record:
        """One run, now or earlier. With equal steps it is also measured on validation texts, and the first seed at real cycle
        starts."""
        detail = {"check": budget == "steps" and seed == self.seeds[0], "choose": budget == "steps"}
        top = name in TOP_LABELS
        key = self.key(objective=weights, steps=steps, seed=seed, top_labels=top, **detail)
        path = self.folder / "runs" / f"{name}-seed{seed}-steps{steps}-{key}.json"
        if path in self.read:
            return self.read[path]
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            note = "kept"
        else:
            began = time.perf_counter()
            own = self.folder / "working" / key
            found = self.lab.run(self.objective(weights), steps, seed, own, top_labels=top, **detail)
            result = {"key": key, "objective": name, "weights": weights, "budget": budget, **found}
            store(path, result)
            note = f"{time.perf_counter() - began:.0f} s"
        self.read[path] = result
        t1, t0 = (tau_of(result, f"rollouts_t{t}") for t in (1, 0))
        replay = tau_of(result, "replay_heldout")
        self.say(f"{name} seed {seed}, {steps} steps: tau T=1 {t1:.3f} (replay {replay:.3f}), T=0 {t0:.3f} ({note})")
        return result

    def all_seeds(self, name: str, weights: Record, steps: int, budget: str) -> list[Record]:
        """The runs of an objective under a budget, one a seed."""
        runs = [self.measure(name, weights, steps, seed, budget) for seed in self.seeds]
        self.done[name, budget] = runs
        return runs


def tau_of(result: Record, part: str) -> float:
    """Tokens per cycle of one run."""
    return sum(result[part]["committed"]) / sum(result[part]["cycles"])


def counts(runs: Sequence[Record], part: str) -> Counts:
    """One measurement of an objective's runs."""
    return Counts(*(np.array([run[part][name] for run in runs], dtype=float) for name in ("committed", "cycles")))


def row_of(name: str, label: str, budget: str, runs: Sequence[Record], base: Sequence[Record], ratio: float) -> Record:
    """One line of the table."""
    row: Record = {"objective": name, "label": label, "budget": budget, "steps": runs[0]["steps"], "cost_ratio": ratio}
    for key, part in (("t1", "rollouts_t1"), ("t0", "rollouts_t0"), ("t1_replay", "replay_heldout")):
        own = counts(runs, part)
        row[key] = with_interval(own)
        row[f"{key}_difference"] = difference(counts(base, part), own)
    for metric in ("tau_expected", "tau_product"):
        sums = [(sum(run["replay_heldout"][metric]), sum(run["replay_heldout"]["starts"])) for run in runs]
        row[metric] = float(np.mean([total / count for total, count in sums]))
    if "replay_validation" in runs[0]:
        row["validation"] = counts(runs, "replay_validation").tau
    return row


def on_policy_ratio(runs: Sequence[Record], winner_ratio: float) -> float:
    """Cost of an on-policy run over the base: its whole time over what all its steps would take at the pace of its first part,
    both timed in the same run, times the cost of that part."""
    found = []
    for run in runs:
        steps = run["training"]["seconds_per_step"]
        pace = float(np.median([seconds for _, seconds in steps[: max(1, int(LATE * len(steps)) - 1)]]))
        found.append(sum(count * seconds for count, seconds in steps) / (pace * sum(count for count, _ in steps)))
    return winner_ratio * float(np.median(found))


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Record:
    """All runs in turn; the content of the JSON file."""
    from dataclasses import replace

    from _objectives_lab import QUICK, Lab, Sizes

    from draftsmith.cli.allocator import keep_freed_memory

    keep_freed_memory()
    sizes = QUICK if args.quick else Sizes()
    if args.steps:
        sizes = replace(sizes, steps=args.steps)
    names = [name for name in OBJECTIVES if not args.only or name == BASE or name in args.only]
    weights = {name: OBJECTIVES[name][0] for name in names}
    labels = {name: OBJECTIVES[name][1] for name in names}
    began = time.perf_counter()
    folder = args.output or args.json.with_suffix("")
    lab = Lab(folder, sizes, args.target, args.data, say)
    say(f"data ready after {time.perf_counter() - began:.0f} s")
    identity = {"sizes": asdict(sizes), "target": args.target, "rows": lab.rows_hash, "code": code_digest()}
    runs = Runs(lab, folder, identity, range(args.seeds or (1 if args.quick else 3)), say)
    ratios = runs.costs(weights, sizes.steps)
    for seed in runs.seeds:  # seed by seed: an interrupted benchmark has every objective
        for name in names:
            runs.measure(name, weights[name], sizes.steps, seed, "steps")
    for name in names:
        runs.all_seeds(name, weights[name], sizes.steps, "steps")
    winner = choose_winner({name: counts(runs.done[name, "steps"], "replay_validation").by_seed.tolist() for name in names})
    say(f"winner on the validation texts: {winner}")
    if not args.no_on_policy and winner not in TOP_LABELS:
        weights[ON_POLICY], labels[ON_POLICY] = on_policy_of(weights[winner]), f"E: {winner}, the last part on-policy"
        ratios[ON_POLICY] = on_policy_ratio(
            runs.all_seeds(ON_POLICY, weights[ON_POLICY], sizes.steps, "steps"), ratios[winner]
        )  # fmt: skip
    for name in weights if not args.no_wall_clock else ():
        steps = equal_time_steps(sizes.steps, ratios[name])
        if steps == sizes.steps:
            runs.done[name, "time"] = runs.done[name, "steps"]
        else:
            runs.all_seeds(name, weights[name], steps, "time")
    return summary(runs, labels, ratios, winner) | {
        "quick": args.quick, "sizes": asdict(sizes), "seconds": round(time.perf_counter() - began, 1), "code": identity["code"],
    }  # fmt: skip


def summary(runs: Runs, labels: dict[str, str], ratios: dict[str, float], winner: str) -> Record:
    """Tables, winner and differences of the finished runs."""
    table = [
        row_of(name, labels[name], budget, own, runs.done[BASE, budget], ratios[name])
        for (name, budget), own in sorted(runs.done.items(), key=lambda item: (item[0][1], [*labels].index(item[0][0])))
    ]

    def of_winner(budget: str) -> Record | None:
        row = next((row for row in table if (row["objective"], row["budget"]) == (winner, budget)), None)
        return row and {key: row[f"{key}_difference"] for key in ("t1", "t0", "t1_replay")}

    every = {run["key"]: run for own in runs.done.values() for run in own}
    return {
        "winner": winner,
        "difference_to_dspark": of_winner("steps"),
        "difference_to_dspark_wall_clock": of_winner("time"),
        "chosen_among": [name for name in labels if name != ON_POLICY],
        "table": table,
        "costs": ratios,
        "at_cycle_starts": {run["objective"]: run["at_cycle_starts"] for run in every.values() if "at_cycle_starts" in run},
        "runs": list(every.values()),
    }


def show(result: Record) -> str:
    """The tables as text."""
    lines = []
    for budget in ("steps", "time"):
        rows = [row for row in result["table"] if row["budget"] == budget]
        if rows:
            lines += ["", f"equal {budget}: tau with whole blocks, token-wise; differences to DSpark's loss in per cent [95 %]"]
            lines.append(f"{'':<12} steps  cost | T=1 | T=1 replayed on one set of texts | T=0 | E[W a] prod a | validation")
        for row in rows:
            cells = []
            for key in ("t1", "t1_replay", "t0"):
                share = row[f"{key}_difference"]["relative"]
                value, low, high = (100 * share[name] for name in ("value", "low", "high"))
                cells.append(f"{row[key]['value']:.3f} {value:+.1f} [{low:+.1f}, {high:+.1f}]")
            validation = f"{row['validation']:.3f}" if "validation" in row else "-"
            lines.append(
                f"{row['objective']:<12} {row['steps']:>5} {row['cost_ratio']:5.2f} | {' | '.join(cells)} | "
                f"{row['tau_expected']:.3f} {row['tau_product']:.3f} | {validation}"
            )
    lines += [
        "",
        "blocks where real cycles began: rollouts - tau_expected, prod alpha - tau_expected, product of means",
    ]
    for name, found in result["at_cycle_starts"].items():
        own, other = found["rollouts_minus_tau_expected"], found["product_minus_expected"]
        lines.append(
            f"{name:<12} rollouts {found['tau_rollouts']:.3f}, {own['value']:+.4f} [{own['low']:+.4f}, {own['high']:+.4f}]; "
            f"{other['value']:+.4f} [{other['low']:+.4f}, {other['high']:+.4f}]; {found['product_of_means']:.3f}"
        )
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
    print(f"winner {result['winner']}; {len(result['runs'])} runs in {result['seconds']:.0f} s; figures: {args.json}")


if __name__ == "__main__":
    main()
