"""The on-policy phase: answers drafted by the drafter as it is, blocks where its cycles began, stored with the run."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from phases_worker import stored_answers
from safetensors.torch import load_file
from training import Interrupted, log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.data.batch import Batches
from draftsmith.data.chat import TokenRow
from draftsmith.losses.phases import Phases
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Completion, Engine, Request
from draftsmith.runtime.rows import CycleRecord
from draftsmith.train.onpolicy import Answer, OnPolicy, _number, in_turn, prompt_ends
from draftsmith.train.rollouts import served_copy, target_decoder

SETTINGS = dict(steps=8, checkpoint_every=3, on_policy_every=2, on_policy_prompts=3, on_policy_tokens=12, prefetch=False)
PHASES = dict(phases=(dict(until=0.25), dict(until=1.0, on_policy=True, exact=1.0, tv=0.0)))


def parts(objective: dict | None = None, data: dict | None = None, **changes):
    return parts_of(objective=objective or PHASES, train=SETTINGS | changes, data=data or {})


def drawing(folder: Path, rows=None, **changes):
    """OnPolicy of a fresh setup and its phase."""
    own = parts(**changes)
    setup = setup_of(own, rows or rows_of(6), folder)
    on_policy = OnPolicy(own.train, setup, Accelerator(cpu=True), folder, own.seed)
    phase = Phases(own.objective, own.train.steps).phases[1]
    on_policy.check(phase)
    return on_policy, phase, setup


# ---- where blocks begin ---------------------------------------------------------------------------------------------------


def test_a_cycle_begins_at_the_last_token_committed_before_it():
    records = [CycleRecord(3, 1, 2), CycleRecord(3, 0, 1), CycleRecord(3, 3, 3)]
    row = TokenRow("x", "chat", [9, 9, 9, 5], [False] * 3 + [True])
    answer = Answer.of(row, [9, 9, 9], Completion("0", [1, 2, 3, 4, 5, 6, 7], "length", records, 3))
    assert answer.starts == [3, 5, 6]
    made = answer.row(40)
    assert made.id == "x@40" and made.input_ids == [9, 9, 9, 1, 2, 3, 4, 5, 6, 7] and made.temperature == 1.0
    assert made.loss_mask == [False] * 3 + [True] * 7


def test_the_starts_are_those_of_the_runtime(tmp_path: Path):
    on_policy, phase, setup = drawing(tmp_path)
    found = on_policy.answers(2, phase)
    target = tiny_target()
    drafter = served_copy(setup.drafter.config, setup.drafter.state_dict(), target.device, target.dtype)
    assert len(found.rows) == 3 and found.step == 2 and found.end == 4
    for row, starts in zip(found.rows, found.starts, strict=True):
        # Run each again alone and watch the commits: a cycle's anchor is the last token there was before it.
        prompt = row.input_ids[: row.loss_mask.index(True)]
        source, end = next((r, e) for r, e in on_policy.prompts if r.id == row.id.split("@")[0] and e == len(prompt))
        engine = Engine(
            target_decoder(target, drafter.tap_layers), max_context=64, eos_ids=target.eos_token_ids,
            proposer=DSparkProposer(drafter, setup.heads, slots=1, max_context=64),
        )  # fmt: skip
        seen, place = [], len(prompt) - 1

        def commit(request, tokens, record, seen=seen):
            nonlocal place
            if record is not None:
                seen.append(place)
            place += len(tokens)

        params = SamplingParams(temperature=1.0, max_new_tokens=12, seed=_number(0, 2, source.id, end))
        completion = engine.run([Request("0", prompt, params)], commit)[0]
        assert prompt + completion.token_ids == row.input_ids and seen == starts.tolist()
    assert found.tau == pytest.approx(
        sum(row.num_supervised - 1 for row in found.rows) / sum(len(starts) for starts in found.starts)
    )


def test_anchors_are_drawn_among_the_starts_alone():
    rows = [TokenRow("a", "chat", list(range(20)), [False] * 4 + [True] * 16)]
    starts = torch.tensor([4, 7, 8, 12, 15])
    visited = set()
    for share, count in ((1.0, 5), (0.1, 2)):
        batches = Batches(rows, rows_per_batch=1, block_size=4, anchor_share=share, candidates=[starts])
        for epoch in range(30):
            batch = batches.batch(epoch, 0)
            anchors = batch.anchors[batch.anchor_mask].tolist()
            assert len(anchors) == count and set(anchors) <= set(starts.tolist()) and anchors == sorted(anchors)
            assert batch.valid[0, :count, 0].all()
            visited |= set(anchors)
    assert visited == set(starts.tolist())


def test_every_supervised_turn_has_a_prompt_and_prompts_come_in_turn():
    assert prompt_ends([c == "1" for c in "0011001"]) == [2, 6] and prompt_ends([True, False]) == [0]
    turns = in_turn(5, 0, 15, seed=1)
    assert [sorted(turns[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert in_turn(5, 3, 9, seed=1) == turns[3:12] and in_turn(5, 0, 15, seed=2) != turns


# ---- nothing else moves ---------------------------------------------------------------------------------------------------


def test_drawing_touches_neither_the_generators_nor_the_drafter(tmp_path: Path):
    on_policy, phase, setup = drawing(tmp_path)
    setup.drafter.train()
    before = {name: value.clone() for name, value in setup.drafter.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    first = on_policy.answers(2, phase)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))
    assert setup.drafter.training and all(p.requires_grad for p in setup.drafter.parameters())
    assert all(torch.equal(before[name], value) for name, value in setup.drafter.state_dict().items())
    again = drawing(tmp_path / "again")
    assert [r.input_ids for r in again[0].answers(2, again[1]).rows] == [r.input_ids for r in first.rows]
    assert [r.input_ids for r in on_policy.answers(4, phase).rows] != [r.input_ids for r in first.rows]


# ---- runs -----------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_between_two_draws(tmp_path: Path, capsys):
    # Checkpoints after 3 and 6 steps, draws after 2, 4 and 6: both kinds of place to go on from.
    train(parts(), setup_of(parts(), rows_of(6), tmp_path / "a"), tmp_path / "a")
    for name, call in (("b", 5), ("c", 8)):
        folder = tmp_path / name
        setup = setup_of(parts(), rows_of(6), folder)
        features, calls = setup.target.features, iter(range(1, 100))

        def breaking(*args, features=features, calls=calls, call=call):
            if next(calls) == call:
                raise Interrupted
            return features(*args)

        setup.target.features = breaking
        with pytest.raises(Interrupted):
            train(parts(), setup, folder)
        capsys.readouterr()
        train(parts(), setup_of(parts(), rows_of(6), folder), folder)
        text = capsys.readouterr().out
        assert ("drafted after step 2 (stored)" in text) == (name == "b")
        a, b = (load_file(tmp_path / which / "drafter" / "model.safetensors") for which in ("a", name))
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert log_of(tmp_path / "a") == log_of(folder)
    lines = [line for line in log_of(tmp_path / "a") if "loss/total" in line]
    assert [line["phase"] for line in lines] == [1, 1, 2, 2, 2, 2, 2, 2]
    assert all(("on_policy/tau" in line) == (line["phase"] == 2) for line in lines) and lines[-1]["on_policy/tau"] >= 1


def test_answers_are_kept_as_long_as_a_checkpoint_needs_them(tmp_path: Path, capsys):
    own = parts(checkpoint_every=1, keep_last=2)
    train(own, setup_of(own, rows_of(6), tmp_path), tmp_path)
    assert list(stored_answers(tmp_path)) == ["step-0000004.json", "step-0000006.json"]
    for path in (tmp_path / "on_policy").iterdir():
        path.unlink()
    longer = setup_of(own, rows_of(6), tmp_path)
    (tmp_path / "checkpoints" / "step-0000008").rename(tmp_path / "gone")
    train(own, longer, tmp_path)
    assert "the answers of step 6 are gone; drawn anew with the present weights" in capsys.readouterr().out


def test_with_a_feature_cache_the_answers_are_computed_online(tmp_path: Path):
    for name in ("online", "cached"):
        own = parts(data=dict(features=name))
        train(own, setup_of(own, rows_of(6), tmp_path / name), tmp_path / name)
    assert stored_answers(tmp_path / "online")["step-0000002.json"] == stored_answers(tmp_path / "cached")["step-0000002.json"]
    for a, b in zip(log_of(tmp_path / "online")[:3], log_of(tmp_path / "cached")[:3], strict=True):
        assert a["loss/total"] == pytest.approx(b["loss/total"], rel=1e-4)


def test_packed_batches_take_the_answers_too(tmp_path: Path):
    own = parts(packing="packed", tokens_per_batch=64)
    train(own, setup_of(own, rows_of(6), tmp_path), tmp_path)
    assert log_of(tmp_path)[-1]["on_policy/tau"] >= 1


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path: Path):
    setup = setup_of(parts(), rows_of(6), tmp_path)
    with pytest.raises(ValueError, match=r"objective.phases\[1\].on_policy: true needs the whole target on every rank"):
        train(parts(), dataclasses.replace(setup, target=None), tmp_path)
    long = parts(on_policy_tokens=600)
    with pytest.raises(ValueError, match="train.on_policy_tokens: 600 leaves no room for the prompt of any row within 512"):
        train(long, setup, tmp_path)
    assert not (tmp_path / "on_policy").exists()
