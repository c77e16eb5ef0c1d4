"""The pure parts of benchmarks/objectives_on_target.py, and its own acceptance statistics against the objective's."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_grid import ROOT


def load(name: str):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


stats = load("_objectives_stats")


def counts(committed, cycles):
    return stats.Counts(np.array(committed, dtype=float), np.array(cycles, dtype=float))


def test_tau_is_the_mean_over_seeds_of_ratios_of_sums():
    found = counts([[4, 6], [9, 3]], [[2, 3], [3, 3]])
    assert found.by_seed.tolist() == [2.0, 2.0] and found.tau == 2.0
    with pytest.raises(ValueError, match="no cycle"):
        counts([[0, 0]], [[0, 0]])


def test_equal_measurements_differ_by_nothing_and_a_common_gain_has_no_width():
    generator = np.random.default_rng(0)
    cycles = generator.integers(10, 30, (3, 40)).astype(float)
    base = stats.Counts(cycles * generator.uniform(1.2, 2.5, (3, 40)), cycles)
    same = stats.difference(base, base)
    assert same["value"] == same["low"] == same["high"] == 0.0
    gain = stats.difference(base, stats.Counts(base.committed * 1.05, cycles))["relative"]
    assert gain == pytest.approx({"value": 0.05, "low": 0.05, "high": 0.05})


def test_the_interval_covers_as_often_as_it_says():
    generator, covered = np.random.default_rng(1), 0
    for trial in range(200):
        cycles = np.full((3, 60), 20.0)
        base = stats.Counts(generator.poisson(30, (3, 60)).astype(float), cycles)
        other = stats.Counts(generator.poisson(33, (3, 60)).astype(float), cycles)
        found = stats.difference(base, other, resamples=400, seed=trial)
        covered += found["low"] <= 0.15 <= found["high"]
    assert 175 <= covered <= 200


def test_prompts_that_all_seeds_share_widen_the_interval():
    generator = np.random.default_rng(2)
    cycles = np.full((3, 40), 20.0)
    base = stats.Counts(np.full((3, 40), 30.0), cycles)
    effect = generator.normal(2.0, 4.0, 40)
    shared = stats.difference(base, stats.Counts(base.committed + effect, cycles))
    own = stats.difference(base, stats.Counts(base.committed + generator.normal(2.0, 4.0, (3, 40)), cycles))
    assert shared["high"] - shared["low"] > 1.1 * (own["high"] - own["low"])


def test_budgets():
    assert stats.equal_time_steps(400, 1.02) == 400 and stats.equal_time_steps(400, 0.98) == 400
    assert stats.equal_time_steps(400, 1.25) == 320 and stats.equal_time_steps(400, 0.8) == 500
    with pytest.raises(ValueError, match="above 0"):
        stats.equal_time_steps(400, 0.0)
    seconds = {"a": [1.0, 1.0, 9.0, 1.0, 1.0], "b": [1.1, 5.0, 1.1, 3.0, 1.1]}  # some rounds disturbed
    assert stats.cost_ratios(seconds, "a") == pytest.approx({"a": 1.0, "b": 1.1})
    assert stats.mixed_ratio({"a": 0.75, "b": 0.25}, {"a": 1.0, "b": 1.2}) == pytest.approx(1.05)


def test_winner():
    assert stats.choose_winner({"a": [1.5, 1.7], "b": [1.65, 1.6]}) == "b"
    assert stats.choose_winner({"a": [1.5], "b": [1.5]}) == "a"
    with pytest.raises(ValueError, match="same seeds"):
        stats.choose_winner({"a": [1.5, 1.7], "b": [1.6]})


def test_expected_cycles_enumerates_every_course():
    generator = np.random.default_rng(3)
    n, slots = 6, 3
    accept = generator.uniform(0, 1, (n - 1, slots))
    for i in range(n - 1):
        accept[i, max(0, n - 1 - i) :] = 0.0
    reach = np.cumprod(accept, axis=1)

    def mean(i: int) -> float:
        if i >= n - 1:
            return 0.0
        total = 1.0
        for passed in itertools.product((0, 1), repeat=slots):
            chance = np.prod([accept[i, k] if passed[k] else 1 - accept[i, k] for k in range(slots)])
            if chance:
                total += chance * mean(i + 1 + int(np.cumprod(passed).sum()))
        return total

    assert stats.expected_cycles(reach) == pytest.approx(mean(0))
    assert stats.expected_cycles(np.zeros((4, 2))) == 4.0 and stats.expected_cycles(np.zeros((0, 2))) == 0.0


def test_paired_means_and_the_product_of_means():
    pairs = np.array([[10.0, 8.0, 4.0], [6.0, 5.0, 2.0], [0.0, 0.0, 0.0]])
    found = stats.paired_means(pairs)
    assert found["value"] == pytest.approx(0.5) and found["low"] <= 0.5 <= found["high"]
    assert stats.product_of_means(np.array([0.5, 0.5])) == 1.75


def test_reused_folders_must_hold_samples_of_the_loss_law(tmp_path):
    script, out = str(ROOT / "benchmarks" / "objectives_on_target.py"), str(tmp_path / "x.json")
    done = subprocess.run(
        [sys.executable, script, "--json", out, "--data", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--data" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.json").exists()


def test_block_statistics_agree_with_the_objective(tmp_path):
    """Written apart from losses/, so that each checks the other: tau_expected and prod alpha on the same blocks."""
    from training import parts_of, rows_of, setup_of

    from draftsmith.data.batch import collate
    from draftsmith.losses.config import ObjectiveConfig
    from draftsmith.train.metrics import Clock
    from draftsmith.train.step import StepContext

    lab = load("_objectives_lab")
    parts, rows = parts_of(data={"features": "cached"}, drafter={"draft_vocab_size": 40}), rows_of(6)
    setup = setup_of(parts, rows, tmp_path)
    context = StepContext(parts.train, ObjectiveConfig(), setup, setup.heads, torch.device("cpu"))
    setup.drafter.eval()
    single = [row for row in rows if sum(a != b for a, b in itertools.pairwise([False, *row.loss_mask])) == 1]
    for row in single:
        found = lab.replay_row(setup.drafter, setup.heads, setup.source, row, torch.float32)
        with torch.no_grad():
            batch = collate([row], None, setup.drafter.block_size, anchor_share=1.0)
            metrics = context.loss(setup.drafter, batch, [row], None, Clock())[1].means()
        assert found["starts"] == batch.num_anchors
        assert found["tau_expected"] / found["starts"] == pytest.approx(metrics["tau_expected"], rel=1e-4)
        assert found["tau_product"] / found["starts"] == pytest.approx(metrics["tau_product"], rel=1e-4)
        assert found["committed"] == row.num_supervised - 1
        assert found["committed"] / (setup.drafter.block_size + 1) <= found["cycles"] <= found["committed"]


class Measured:
    """Stands for the lab: results drawn from a seed, and the runs that were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def run(self, objective, steps, seed, folder, *, top_labels, check, choose):
        self.asked.append((steps, seed))
        generator = np.random.default_rng(100 * seed + steps)
        gain = 2.0 if objective.e2e else 1.5

        def part() -> dict:
            cycles = generator.integers(10, 20, 12)
            return {"committed": (gain * cycles).round().tolist(), "cycles": cycles.tolist()}

        sums = {"starts": [20] * 12, "tau_expected": [30.0] * 12, "tau_product": [31.0] * 12}
        found = {name: part() for name in ("rollouts_t1", "rollouts_t0")} | {"replay_heldout": {**part(), **sums}}
        if choose:
            found["replay_validation"] = part()
        if check:
            pairs = np.array([[30.0, 29.0, 20.0]] * 4)
            own = stats.paired_means(pairs)
            found["at_cycle_starts"] = {
                "tau_rollouts": 1.5, "rollouts_minus_tau_expected": own, "product_minus_expected": own, "product_of_means": 1.4,
            }  # fmt: skip
        return {"steps": steps, "seed": seed, "training": {"seconds_per_step": [[5, 1.0], [5, 1.0], [5, 4.0]]}, **found}


def test_runs_are_kept_and_summed_up(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        script = load("objectives_on_target")
    finally:
        sys.path.pop(0)
    names = ("dspark", "product")
    labels = {name: script.OBJECTIVES[name][1] for name in names}

    def go(identity: dict) -> tuple[Measured, script.Runs]:
        lab = Measured()
        runs = script.Runs(lab, tmp_path, identity, range(2), lambda line: None)
        for name, steps in (("dspark", 8), ("product", 6)):
            runs.all_seeds(name, script.OBJECTIVES[name][0], 8, "steps")
            if steps == 8:
                runs.done[name, "time"] = runs.done[name, "steps"]
            else:
                runs.all_seeds(name, script.OBJECTIVES[name][0], steps, "time")
        return lab, runs

    lab, runs = go({"code": "1"})
    assert lab.asked == [(8, 0), (8, 1), (8, 0), (8, 1), (6, 0), (6, 1)]
    again, kept = go({"code": "1"})
    assert again.asked == [] and kept.done == runs.done, "finished runs are read back"
    assert len(go({"code": "2"})[0].asked) == 6, "other code, other runs"

    scores = {name: script.counts(runs.done[name, "steps"], "replay_validation").by_seed.tolist() for name in names}
    assert stats.choose_winner(scores) == "product"
    found = script.summary(runs, labels, {"dspark": 1.0, "product": 1.3}, "product")
    assert set(found["difference_to_dspark"]) == {"t1", "t0", "t1_replay"} and len(found["runs"]) == 6
    for budget in ("", "_wall_clock"):
        gain = found[f"difference_to_dspark{budget}"]["t1"]
        assert gain["low"] <= gain["value"] <= gain["high"] and gain["value"] == pytest.approx(0.5, abs=0.05)
    assert [(row["objective"], row["budget"], row["steps"]) for row in found["table"]] == [
        ("dspark", "steps", 8), ("product", "steps", 8), ("dspark", "time", 8), ("product", "time", 6),
    ]  # fmt: skip
    assert "product" in script.show(found)
    assert script.on_policy_ratio(runs.done["dspark", "steps"], 1.1) == pytest.approx(1.1 * 30 / 15)


def test_objectives_and_the_on_policy_variant_are_valid():
    from draftsmith.losses.config import ObjectiveConfig
    from draftsmith.losses.phases import Phases

    script = load("objectives_on_target")
    for weights, _ in script.OBJECTIVES.values():
        ObjectiveConfig(**weights)
        last = Phases(ObjectiveConfig(**script.on_policy_of(weights)), 100).phases
        assert [p.on_policy for p in last] == [False, True] and last[0].end == round(100 * script.LATE)
        assert last[1].objective == Phases(ObjectiveConfig(**weights), 100).phases[-1].objective
    late = Phases(ObjectiveConfig(**script.OBJECTIVES["late_exact"][0]), 100).phases
    assert [p.objective.active for p in late] == [("kl", "e2e", "survival"), ("exact", "survival")]
