"""Phases of the objective: which one a step has, what may not be trained where, and that a run goes on in the middle of one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from phases_worker import SCENARIOS, scenario, stored_answers
from safetensors.torch import load_file
from tiny_chat import chat_tokenizer
from training import Breaking, Interrupted, log_of, parts_of, rows_of, setup_of, train

from draftsmith.data.chat import TokenRow, tokenise
from draftsmith.data.config import DataConfig
from draftsmith.losses.config import ObjectiveConfig, PhaseConfig
from draftsmith.losses.phases import Phases
from draftsmith.recipes.check import check_recipe
from draftsmith.recipes.load import ConfigError
from draftsmith.recipes.schema import from_plain, load_recipe, to_plain
from draftsmith.train.law import drawn_rows, refuse_other_law

PLAN = (dict(until=0.2, nla=1.0, tv=0.0), dict(until=0.7), dict(until=0.9, tv=0.0, exact=1.0), dict(until=1.0, on_policy=True))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


# ---- which objective a step has -----------------------------------------------------------------------------------------


def test_a_phase_holds_up_to_its_share_of_the_steps():
    phases = Phases(ObjectiveConfig(phases=PLAN), 10)
    assert [phases.at(step).active for step in (0, 1)] == [("kl", "nla", "survival")] * 2
    assert [phases.at(step).active for step in range(2, 7)] == [("kl", "tv", "survival")] * 5
    assert [phases.at(step).active for step in (7, 8)] == [("kl", "exact", "survival")] * 2
    assert [phases.phase(step).on_policy for step in range(10)] == [False] * 9 + [True]
    assert phases.at(10) == phases.at(9)
    assert [(p.number, p.first, p.end) for p in phases.phases] == [(1, 0, 2), (2, 2, 7), (3, 7, 9), (4, 9, 10)]
    assert phases.phases[2].line() == "steps 8..9: kl 0.1, exact 1, survival 1"
    assert phases.phases[3].line().endswith("survival 1, on-policy")


def test_after_the_last_phase_the_section_holds_and_phases_without_a_step_are_left_out():
    phases = Phases(ObjectiveConfig(phases=(dict(until=0.01, nla=1.0), dict(until=0.5, ce=1.0))), 10)
    assert [phases.at(step).ce for step in range(10)] == [1.0] * 5 + [0.0] * 5
    assert [p.number for p in phases.phases] == [1, 2]
    assert [p.end for p in Phases(ObjectiveConfig(), 10).phases] == [10]


def test_what_a_run_needs_is_what_any_phase_needs():
    late = ObjectiveConfig(survival=0.0, phases=(dict(until=0.5), dict(until=1.0, survival=1.0)))
    assert Phases(late, 10).uses("survival") and not Phases(late, 10).uses("exact")
    assert not Phases(late, 10, survival=False).uses("survival")
    never_reached = ObjectiveConfig(survival=0.0, phases=(dict(until=0.01, survival=1.0),))
    assert not Phases(never_reached, 10).uses("survival")


def test_a_phase_can_replace_every_setting():
    names = {f.name: f for f in dataclasses.fields(ObjectiveConfig) if f.name != "phases"}
    own = {f.name: f for f in dataclasses.fields(PhaseConfig) if f.name not in ("until", "on_policy")}
    assert own.keys() == names.keys()
    for name, field in own.items():
        assert field.metadata == names[name].metadata and field.default is None, name


# ---- recipes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output: out\n", encoding="utf-8")
    return str(path)


def test_every_mistake_in_the_phases_is_one_line(recipe: str):
    with pytest.raises(ConfigError) as caught:
        load_recipe(
            recipe, ["objective.phases=[{until: 1.5, exakt: 1}, {until: 0.5, tv: -1}, {on_policy: 1}]", "train.steps=0"]
        )
    assert caught.value.lines == [
        "objective.phases[0].until: 1.5 is not allowed; it must be a number above 0.0 and at most 1.0",
        "objective.phases[0].exakt: unknown key; did you mean objective.phases[0].exact?",
        "objective.phases[1].tv: -1 is not allowed; it must be a number at least 0 or null",
        "objective.phases[2].on_policy: 1 is not allowed; it must be true or false",
        "objective.phases[2].until: missing; it must be a number above 0.0 and at most 1.0",
        "train.steps: 0 is not allowed; it must be an integer at least 1",
    ]
    with pytest.raises(ConfigError, match=r"phases\[0\]: objective: every weight is 0.*phases\[1\].until: 0.4 .* above 0.5"):
        load_recipe(recipe, ["objective.phases=[{until: 0.5, kl: 0, tv: 0, survival: 0}, {until: 0.4}]"])
    with pytest.raises(ConfigError, match="objective.phases: 3 is not allowed; it is a list of sections with the keys until"):
        load_recipe(recipe, ["objective.phases=3"])


def test_phases_come_back_from_the_lock(recipe: str):
    found = load_recipe(recipe, ["objective.phases=[{until: 0.5, exact: 1, tv: 0}, {until: 0.9, on_policy: true}]"]).value
    assert from_plain(to_plain(found)) == found
    assert [p.until for p in found.objective.phases] == [0.5, 0.9] and found.objective.phases[1].on_policy


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("data.generation.temperature=0.7", "data.generation.temperature is 0.7 (must be 1.0)"),
        ("data.generation.top_p=0.8", "data.generation.top_p is 0.8 (must be 1.0)"),
        ("data.generation.top_k=20", "data.generation.top_k is 20 (must be 0)"),
        ("data.generation.greedy_share=1.0", "data.generation.greedy_share is 1.0 (must be below 1)"),
        ("data.answers=given", "data.answers is given (must be target)"),
    ],
)
def test_exact_refuses_answers_of_another_law(recipe: str, override: str, found: str):
    exact = "objective.phases=[{until: 0.7}, {until: 1.0, exact: 1, tv: 0}]"
    loaded = load_recipe(recipe, [exact, override])
    line = f"objective.phases[1].exact: above 0 needs answers drawn from the law in the loss, but {found}"
    with pytest.raises(ConfigError) as caught:
        check_recipe(loaded.value, loaded.given)
    assert caught.value.lines == [line]
    with pytest.raises(ValueError, match=r"objective.phases\[1\].exact: above 0 needs"):
        refuse_other_law(loaded.value.objective, loaded.value.data)
    for harmless in (["objective.phases=[{until: 1.0, exact: 1, on_policy: true}]", override], [exact], [override]):
        good = load_recipe(recipe, harmless)
        check_recipe(good.value, good.given)
        refuse_other_law(good.value.objective, good.value.data)


def test_exact_refuses_answers_whose_manifest_says_otherwise():
    made = {"generation": dict(temperature=1.0, top_k=0, top_p=0.8, greedy_share=0.0, dtype="float32")}
    with pytest.raises(ValueError, match=r"objective.exact: above 0 .* the answers' manifest has top_p is 0.8 \(must be 1.0\)"):
        refuse_other_law(ObjectiveConfig(exact=1.0), DataConfig(), made)
    refuse_other_law(ObjectiveConfig(), DataConfig(), made)
    made["generation"] |= dict(top_p=1.0, greedy_share=0.7)
    refuse_other_law(ObjectiveConfig(exact=1.0), DataConfig(), made)


def test_a_phase_with_survival_needs_the_head(recipe: str):
    loaded = load_recipe(recipe, ["drafter.survival_head=false", "objective.phases=[{until: 0.5, survival: 1}]"])
    with pytest.raises(ConfigError, match=r"phases\[0\].survival: 1(.0)? needs drafter.survival_head true"):
        check_recipe(loaded.value, loaded.given)


# ---- rows -------------------------------------------------------------------------------------------------------------------


class Seen:
    """A feature source that notes the rows of every call."""

    def __init__(self, inner) -> None:
        self.inner, self.calls = inner, []

    def features(self, batch, rows):
        self.calls.append([row.id for row in rows])
        return self.inner.features(batch, rows)


def test_rows_know_how_they_were_drawn():
    chat = chat_tokenizer()
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    prompt = chat.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    row = {"id": "x", "messages": messages, "prompt_ids": prompt, "answer_ids": [5, 6, 7], "temperature": 0.0}
    assert tokenise(row, chat, 64).temperature == 0.0
    rows = [TokenRow(str(t), "chat", [1, 2], [False, True], t) for t in (None, 0.0, 0.7, 1.0)]
    assert [row.id for row in drawn_rows(rows)] == ["None", "1.0"]


def test_an_exact_phase_sees_drawn_rows_only_and_says_so(tmp_path: Path, capsys):
    rows = [dataclasses.replace(row, temperature=float(i % 2)) for i, row in enumerate(rows_of(8))]
    parts = parts_of(
        objective=dict(phases=(dict(until=0.5), dict(until=1.0, exact=1.0, tv=0.0))), train=dict(steps=8, prefetch=False)
    )
    setup = setup_of(parts, rows, tmp_path)
    seen = Seen(setup.source)
    train(parts, dataclasses.replace(setup, source=seen), tmp_path)
    early, late = ({i for call in part for i in call} for part in (seen.calls[:4], seen.calls[4:]))
    assert early == {f"p{i}" for i in range(8)} and late == {f"p{i}" for i in range(1, 8, 2)}
    assert "steps 5..8: kl 0.1, exact 1, survival 1; on the 4 of 8 rows drawn at temperature 1" in capsys.readouterr().out
    greedy = dataclasses.replace(setup, rows=[dataclasses.replace(row, temperature=0.0) for row in rows])
    with pytest.raises(ValueError, match=r"phases\[1\].exact: above 0 needs answers drawn at temperature 1, but no row is one"):
        train(parts, greedy, tmp_path / "greedy")


# ---- runs -------------------------------------------------------------------------------------------------------------------


def test_phases_that_replace_nothing_change_nothing(tmp_path: Path):
    for name, phases in (("a", ()), ("b", (dict(until=0.3), dict(until=0.8)))):
        parts = parts_of(objective=dict(phases=phases), train=dict(steps=8))
        train(parts, setup_of(parts, rows_of(6), tmp_path / name), tmp_path / name)
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "phase" not in log_of(tmp_path / "a")[0]


def test_the_log_names_the_phase_and_averages_within_it(tmp_path: Path):
    phases = (dict(until=0.25, nla=1.0, tv=0.0, survival=0.0), dict(until=0.7))
    parts = parts_of(objective=dict(survival=0.0, phases=phases), train=dict(steps=8, log_every=4))
    train(parts, setup_of(parts, rows_of(6), tmp_path), tmp_path)
    lines = [line for line in log_of(tmp_path) if "loss/total" in line]
    assert [(line["step"], line["phase"]) for line in lines] == [(2, 1), (4, 2), (6, 2), (8, 3)]
    assert "loss/nla" in lines[0] and "loss/nla" not in lines[1]


@pytest.mark.parametrize("stop", [4, 7])
def test_a_run_goes_on_in_the_middle_of_a_phase(tmp_path: Path, stop: int):
    phases = (dict(until=0.3, nla=1.0, tv=0.0, survival=0.0), dict(until=0.6), dict(until=1.0, exact=1.0))
    parts = parts_of(objective=dict(phases=phases), train=dict(steps=10, checkpoint_every=2, prefetch=False))
    train(parts, setup_of(parts, rows_of(7), tmp_path / "a"), tmp_path / "a")
    setup = setup_of(parts, rows_of(7), tmp_path / "b")
    with pytest.raises(Interrupted):
        train(parts, dataclasses.replace(setup, source=Breaking(setup.source, stop, "raise")), tmp_path / "b")
    train(parts, setup_of(parts, rows_of(7), tmp_path / "b"), tmp_path / "b")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


def moved(tmp_path: Path, phases: tuple, steps: int) -> set[str]:
    """Parameters that the last of `steps` steps moves, in a run of 6."""
    states = []
    for until in (steps - 1, steps):
        folder = tmp_path / str(until)
        parts = parts_of(objective=dict(phases=phases), train=dict(steps=6, checkpoint_every=until, warmup=0.0, prefetch=False))
        setup = setup_of(parts, rows_of(4), folder)
        with pytest.raises(Interrupted):
            train(parts, dataclasses.replace(setup, source=Breaking(setup.source, until + 1, "raise")), folder)
        states.append({name: p.detach().clone() for name, p in setup.drafter.named_parameters()})
    return {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}


def test_what_a_phase_does_not_train_stays_where_it_is(tmp_path: Path):
    off = moved(tmp_path / "off", (dict(until=0.5), dict(until=1.0, survival=0.0)), 5)
    assert off and not [name for name in off if name.startswith("confidence_head")]
    alone = dict(until=1.0, kl=0.0, tv=0.0, detach_survival=True)
    only = moved(tmp_path / "only", (dict(until=0.5), alone), 5)
    assert only == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    through = moved(tmp_path / "through", (dict(until=0.5), {**alone, "detach_survival": False}), 5)
    assert "confidence_head.proj.weight" in through and "layers.0.mlp.up_proj.weight" in through
    assert "markov_head.markov_w1.weight" in through and "markov_head.markov_w2.weight" not in through


def test_a_drafter_without_a_survival_head_drops_the_term(tmp_path: Path):
    parts = parts_of(drafter=dict(survival_head=False), train=dict(steps=2))
    train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path)
    assert "loss/survival" not in log_of(tmp_path)[0]


@pytest.mark.distributed
def test_two_processes_go_through_phases_as_one_does(tmp_path: Path):
    config = tmp_path / "ddp.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: true\nnum_machines: 1\nmachine_rank: 0\n"
        "num_processes: 2\nmixed_precision: 'no'\nmain_process_port: 0\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    worker = str(Path(__file__).with_name("phases_worker.py"))
    done = subprocess.run(
        [*command, worker, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for rank in (0, 1):
        assert (tmp_path / f"done-{rank}").exists(), done.stdout[-2000:] + done.stderr[-5000:]
    for name in SCENARIOS:
        parts, rows = scenario(name, world=1)
        alone = tmp_path / f"{name}-alone"
        train(parts, setup_of(parts, rows, alone), alone)
        for a, b in zip(log_of(tmp_path / name), log_of(alone), strict=True):
            for key in ("loss/total", "grad_norm", "phase", "accept/tau_expected"):
                assert a[key] == pytest.approx(b[key], rel=1e-4), (name, key)
    stored = [stored_answers(tmp_path / name) for name in ("on-policy", "on-policy-alone")]
    assert stored[0] == stored[1] and list(stored[0]) == ["step-0000003.json", "step-0000005.json"]
