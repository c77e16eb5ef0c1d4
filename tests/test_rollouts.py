"""Rollouts inside training: what they find is what the runtime finds, and the training does not notice them."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from training import log_of, parts_of, rows_of, setup_of, train

from draftsmith.data.chat import TokenRow
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.train import checkpoint, rollouts
from draftsmith.train.rollouts import Rollout, Rollouts, evaluate, prompts_of

EVERY = dict(rollout_every=5, rollout_prompts=4, rollout_tokens=12)


def parts(**changes):
    return parts_of(
        train=dict(steps=10, checkpoint_every=5, validation_share=0.3, lr=5e-3) | EVERY | changes, drafter=dict(head="rnn")
    )


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {int(line["step"]): line for line in log_of(folder) if "eval/tau_t0" in line}


def test_steps_after_an_evaluation_are_bit_equal_to_those_without(tmp_path: Path):
    rows = rows_of(12)
    off, on = parts(rollout_every=0), parts()
    train(off, setup_of(off, rows, tmp_path / "off"), tmp_path / "off")
    state = torch.get_rng_state()
    setup = setup_of(on, rows, tmp_path / "on")
    train(on, setup, tmp_path / "on")
    assert torch.equal(torch.get_rng_state(), state) and setup.drafter.training
    curves = [[line for line in log_of(tmp_path / name) if "loss/total" in line] for name in ("off", "on")]
    assert curves[0] == curves[1] and len(curves[0]) == 10
    ours, theirs = ((tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("off", "on"))
    assert ours == theirs
    found = evaluations(tmp_path / "on")
    assert list(found) == [5, 10] and not evaluations(tmp_path / "off")
    for line in found.values():
        assert 1.0 <= line["eval/tau_t0"] <= 5.0 and 1.0 <= line["eval/tau_t1"] <= 5.0
        assert 0.0 <= line["eval/accept_1"] <= 1.0 and line["eval/tau_chat"] == line["eval/tau_t1"]
        assert 0.0 <= line["eval/survival_brier"] <= 1.0


def test_the_generators_of_training_stand_still(tmp_path: Path):
    settings = parts()
    setup = setup_of(settings, rows_of(12), tmp_path)
    setup.drafter.train()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found = Rollouts(settings.train, setup, Accelerator(cpu=True), 0).run(3)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert setup.drafter.training and all(p.requires_grad for p in setup.drafter.parameters())
    assert found.step == 3 and all(math.isfinite(value) for value in found.metrics.values())


def test_an_evaluation_is_what_the_runtime_measures_with_the_exported_drafter(tmp_path: Path):
    settings = parts(steps=20, rollout_every=20, rollout_temperatures=(0.0, 0.7))
    setup = setup_of(settings, rows_of(12), tmp_path)
    folder = train(settings, setup, tmp_path)
    target = setup.target
    drafter, heads = native.load(folder, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    chosen = prompts_of(setup.validation, 4, 400)
    decoder = Decoder.from_target(target.model, dtype=torch.float32, tap_layers=drafter.tap_layers)
    last = evaluations(tmp_path)[20]
    for temperature in (0.0, 0.7):
        committed = cycles = 0
        for place, (name, _, ids) in enumerate(chosen):  # one by one: an answer does not depend on its batch
            engine = Engine(
                decoder, proposer=DSparkProposer(drafter, heads, slots=1, max_context=64), max_context=64,
                eos_ids=target.eos_token_ids,
            )  # fmt: skip
            sampling = SamplingParams(temperature=temperature, max_new_tokens=12, seed=100_003 * place)
            engine.run([Request(name, ids, sampling)])
            committed, cycles = committed + engine.stats.committed, cycles + engine.stats.cycles
        assert last[f"eval/tau_t{temperature:g}"] == pytest.approx(committed / cycles, rel=1e-6), temperature


def test_metrics_of_known_cycles():
    def rollout(name, domain, temperature, cycles, survival=(0.0, 0)):
        return Rollout(name, domain, temperature, (1,), tuple(range(9)), tuple(cycles), survival)

    found = evaluate(7, [
        rollout("a", "code", 1.0, [(3, 3, 4), (3, 0, 1)], (0.5, 4)), rollout("b", "math", 1.0, [(3, 1, 2)], (0.5, 2)),
        rollout("a", "code", 0.0, [(3, 2, 3)]), rollout("b", "math", 0.0, []),
    ], 1.0)  # fmt: skip
    assert found.metrics == pytest.approx({
        "eval/tau_t0": 3.0, "eval/tau_t1": 7 / 3, "eval/accept_1": 2 / 3, "eval/accept_2": 1 / 2, "eval/accept_3": 1.0,
        "eval/tau_code": 2.5, "eval/tau_math": 2.0, "eval/survival_brier": 1 / 6,
    })  # fmt: skip
    assert found.value == pytest.approx(7 / 3) and found.acceptance[0.0] == [1.0, 1.0, 0.0]


def test_accepted_drafts_are_marked():
    decode = "".join
    answer = tuple("abcdefgh")
    assert Rollout("r", "d", 0.0, (1,), answer, ((3, 2, 3), (3, 0, 1), (3, 3, 3))).marked(decode) == "a[bc]de[fgh]"
    assert Rollout("r", "d", 0.0, (1,), tuple("a"), ()).marked(decode) == "a"


def test_prompts_come_from_held_back_rows_once_each_and_domains_take_turns(tmp_path: Path):
    rows = [
        TokenRow(f"p{i}#{k}", "ab"[i % 4 == 0], [5] * (3 + i), [False] * (2 + i) + [True]) for i in range(8) for k in (0, 1)
    ]
    found = prompts_of(rows, 4, 8)
    assert len({name for name, _, _ in found}) == 4 and [domain for _, domain, _ in found] == ["a", "b", "a", "b"]
    assert all(len(ids) <= 8 for _, _, ids in found) and prompts_of(rows, 4, 8) == found
    settings = parts()
    setup = setup_of(settings, rows_of(12), tmp_path)
    used = {name for name, _, _ in Rollouts(settings.train, setup, Accelerator(cpu=True), 0).prompts}
    assert used and not used & {row.id for row in setup.rows}


@pytest.mark.parametrize(
    ("changes", "replaced", "words"),
    [
        (dict(validation_share=0.0), {}, "train.rollout_every: 5 needs held-back prompts .*validation_share 0.0 gives none"),
        (dict(rollout_tokens=600), {}, "leave room for 600 tokens"),
        (dict(rollout_slots=9), {}, "train.rollout_slots: 9 is not allowed .1 to 4"),
        (dict(rollout_temperatures=()), {}, "train.rollout_temperatures: "),
        ({}, dict(target=None), "needs the whole target on every rank"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_step_1(tmp_path: Path, changes: dict, replaced: dict, words: str):
    settings = parts(**changes)
    with pytest.raises(ValueError, match=words):
        train(settings, setup_of(settings, rows_of(12), tmp_path, **replaced), tmp_path)
    assert not (tmp_path / "train.jsonl").exists()


def test_the_best_checkpoint_is_that_of_the_highest_real_tau(tmp_path: Path, monkeypatch):
    values = iter([1.5, 2.5, 2.0, 1.0])
    real = rollouts.evaluate

    def scripted(step, found, key):
        made = real(step, found, key)
        value = next(values)
        return rollouts.Evaluation(step, made.metrics | {"eval/tau_t1": value}, made.acceptance, made.samples, value)

    monkeypatch.setattr(rollouts, "evaluate", scripted)
    settings = parts(steps=8, rollout_every=2, checkpoint_every=100, keep_last=1)
    train(settings, setup_of(settings, rows_of(12), tmp_path), tmp_path)
    kept = [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert kept == ["step-0000004", "step-0000008"], "the best one outlives keep_last"
    path, value = checkpoint.best(tmp_path / "checkpoints")
    assert (path.name, value) == ("step-0000004", 2.5)
    # a resumed run knows what it has to beat
    again = Rollouts(settings.train, setup_of(settings, rows_of(12), tmp_path), Accelerator(cpu=True), 0)
    again.resume(tmp_path / "train.jsonl")
    assert again.best == 2.5


def test_answers_are_kept_beside_the_log(tmp_path: Path):
    settings = parts()
    setup = setup_of(settings, rows_of(12), tmp_path)
    train(settings, setup, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    shown = min(rollouts.SHOWN, len(prompts_of(setup.validation, 4, 400)))
    assert len(lines) == 2 * 2 * shown and {line["step"] for line in lines} == {5, 10}
    assert {line["temperature"] for line in lines} == {0.0, 1.0} and all(line["prompt"] and line["output"] for line in lines)


def test_a_drafter_with_adapters_is_evaluated_merged(tmp_path: Path):
    first = parts_of(train=dict(steps=2), drafter=dict(head="rnn"))
    base = train(first, setup_of(first, rows_of(12), tmp_path / "a"), tmp_path / "a")
    settings = parts_of(
        train=dict(steps=4, validation_share=0.3, lr=5e-3) | EVERY | dict(rollout_every=2),
        drafter=dict(head="rnn", init="checkpoint", checkpoint=str(base), lora_rank=2),
    )
    setup = setup_of(settings, rows_of(12), tmp_path / "b")
    train(settings, setup, tmp_path / "b")
    assert list(evaluations(tmp_path / "b")) == [2, 4]


@pytest.mark.distributed
@pytest.mark.parametrize("launch", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero3"))])
def test_two_processes_evaluate_what_one_does(tmp_path: Path, launch: str):
    config = Path(__file__).parent.parent / "recipes" / "accelerate" / "cpu" / f"{launch}.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
         str(Path(__file__).with_name("rollouts_worker.py")), str(tmp_path)],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
    )  # fmt: skip
    for rank in (0, 1):  # judged by what was written: a rank may die at interpreter exit after all work is done
        assert (tmp_path / f"done-{rank}").exists(), done.stdout[-3000:] + done.stderr[-6000:]
    from rollouts_worker import settings

    alone = settings("all")
    setup = setup_of(alone, rows_of(12), tmp_path / "alone")
    found = Rollouts(alone.train, setup, Accelerator(cpu=True), 0).run(0)
    for ranks in ("all", "main"):
        lines = [json.loads(line) for line in (tmp_path / ranks / "values.jsonl").read_text().splitlines()]
        assert len(lines) == 2 and all(line == pytest.approx(found.metrics) for line in lines), ranks
    assert evaluations(tmp_path / "run").keys() == {2} and (tmp_path / "run" / "drafter" / "config.json").is_file()
