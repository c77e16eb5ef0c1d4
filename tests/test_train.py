"""The loop: schedule, frame of the loss, split invariance, resume, refusals, one curve in the log."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import PROMPTS, Breaking, Interrupted, log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.data.batch import Batches, collate
from draftsmith.data.chat import TokenRow
from draftsmith.losses.reduce import denominators
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.train import checkpoint, stage
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import Features
from draftsmith.train.metrics import Clock
from draftsmith.train.optim import build_optimizer, learning_rate
from draftsmith.train.step import StepContext


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


def assert_same(a: Path, b: Path, *, atol: float | None = None) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if atol is None:
            assert torch.equal(ours[name], theirs[name]), name
        else:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


# ---- schedule and optimiser -----------------------------------------------------------------------------------------


def test_the_rate_rises_to_exactly_the_peak_and_ends_at_exactly_the_floor():
    cfg = TrainConfig(steps=10, warmup=0.2, lr=3e-4, final_lr=0.1, accumulation=4)
    rates = [learning_rate(step, cfg) for step in range(10)]
    assert rates[:2] == [1.5e-4, 3e-4] and max(rates) == 3e-4 and rates[9] == pytest.approx(3e-5, rel=1e-12)
    for step in range(2, 10):
        want = 3e-5 + 0.5 * (3e-4 - 3e-5) * (1 + math.cos(math.pi * (step - 1) / 8))
        assert rates[step] == pytest.approx(want, rel=1e-9)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    for settings in (
        dict(steps=1),
        dict(steps=1, warmup=0.0),
        dict(steps=7, warmup=1.0),
        dict(steps=5, warmup=0.0, final_lr=1.0),
    ):
        cfg = TrainConfig(lr=1e-3, **settings)
        assert max(learning_rate(s, cfg) for s in range(cfg.steps)) == 1e-3


def test_the_log_has_one_rate_per_optimiser_step(tmp_path: Path):
    parts = parts_of(train=dict(steps=10, accumulation=4, rows=1, warmup=0.2))
    train(parts, setup_of(parts, rows_of(5), tmp_path), tmp_path)
    assert [line["lr"] for line in log_of(tmp_path)] == [learning_rate(step, parts.train) for step in range(10)]


def test_the_optimiser_holds_the_drafter_and_nothing_of_the_target(tmp_path: Path):
    parts, target = parts_of(train=dict(weight_decay=0.1, steps=2)), tiny_target()
    setup = stage.build_setup(parts, target, rows_of(4), tmp_path, say=lambda text: None)
    optimizer = build_optimizer(setup.drafter, parts.train)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in setup.drafter.parameters())
    assert not set(held) & {id(p) for p in target.model.parameters()}
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in setup.drafter.named_parameters():
        assert (id(parameter) in decayed) == (parameter.dim() == 2 and "markov_w1" not in name), name
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    train(parts, setup, tmp_path)
    assert all(torch.equal(v, before[k]) for k, v in target.model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


# ---- what is learned -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_loss_is_the_hand_written_one(tmp_path: Path):
    # TV of the served draft law against the target's law at the position before each label, weighed exp(-k/4).
    parts = parts_of(objective=dict(tv=1.0, kl=0.0, survival=0.0))
    setup = setup_of(parts, rows_of(3), tmp_path)
    torch.nn.init.normal_(setup.drafter.markov_head.markov_w2.weight)
    context = StepContext(parts.train, parts.objective, setup, setup.heads, torch.device("cpu"))
    batches = Batches(setup.rows, rows_per_batch=3, block_size=4, anchor_share=0.5)
    batch, rows = batches.batch(0, 0), [setup.rows[i] for i in batches.indices(0, 0)]
    loss, _ = context.loss(setup.drafter, batch, rows, None, Clock())
    target, total, weight = tiny_target(), 0.0, 0.0
    for i, row in enumerate(rows):
        ids = torch.tensor(row.input_ids)
        law = target.model(input_ids=ids[None]).logits[0].softmax(-1)
        taps = target.features(ids[None], None, (0, 1)).taps
        for anchor in batch.anchors[i][batch.anchor_mask[i]].tolist():
            proposer = DSparkProposer(setup.drafter, setup.heads, slots=1, max_context=64)
            hidden = served_states(proposer, taps[0, :anchor], int(ids[anchor]), anchor)
            for k in range(4):
                if anchor + k + 1 >= len(ids) or not all(row.loss_mask[anchor : anchor + k + 2]):
                    break
                bias = setup.drafter.markov_head.markov_w1(ids[anchor + k]) @ setup.drafter.markov_head.markov_w2.weight.T
                q = (setup.heads.lm_head @ hidden[k] + bias).softmax(-1)
                total += math.exp(-k / 4) * 0.5 * float((q - law[anchor + k]).abs().sum())
                weight += math.exp(-k / 4)
    assert weight > 10 and float(loss) == pytest.approx(total / weight, abs=1e-5)


@torch.no_grad()
def served_states(proposer: DSparkProposer, taps: torch.Tensor, token: int, position: int) -> torch.Tensor:

    proposer.begin(0, [0] * len(taps), taps)
    size = proposer.drafter.block_size
    return proposer.backbone.block([0], torch.tensor([token]), torch.tensor([position]), position, size)[0][0].clone()


def test_the_loss_falls_and_the_exported_drafter_is_the_trained_one(tmp_path: Path):
    parts = parts_of(train=dict(steps=40, rows=4, lr=5e-3, anchor_share=1.0))
    setup = setup_of(parts, rows_of(4), tmp_path)
    folder = train(parts, setup, tmp_path)
    losses = [line["loss/total"] for line in log_of(tmp_path)]
    assert len(losses) == 40 and losses[-1] < 0.75 * losses[0]
    alphas = [line["accept/alpha_1"] for line in log_of(tmp_path)]
    assert alphas[-1] > alphas[0] + 0.1
    target = tiny_target()
    drafter, heads = native.load(folder, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    assert all(torch.equal(v, setup.drafter.state_dict()[k]) for k, v in drafter.state_dict().items())
    # It serves: the text is the target's own, and on a text it has learned, drafts are accepted.
    row = setup.rows[0]
    prompt = row.input_ids[: row.loss_mask.index(True)]
    decoder = Decoder.from_target(target.model, dtype=torch.float32, tap_layers=drafter.tap_layers, backend="torch")
    request = Request("r", prompt, SamplingParams(max_new_tokens=12))
    plain = Engine(decoder, max_context=64).run([request])[0]
    drafted = Engine(decoder, proposer=DSparkProposer(drafter, heads, slots=1, max_context=64), max_context=64).run([request])[
        0
    ]
    assert drafted.token_ids == plain.token_ids


def test_detached_survival_teaches_its_own_head_alone(tmp_path: Path):
    batch = None
    for detach in (True, False):
        parts = parts_of(objective=dict(tv=0.0, kl=0.0, survival=1.0, detach_survival=detach))
        setup = setup_of(parts, rows_of(3), tmp_path)
        torch.nn.init.normal_(setup.drafter.confidence_head.proj.weight)
        context = StepContext(parts.train, parts.objective, setup, setup.heads, torch.device("cpu"))
        batch = batch or collate(setup.rows, 3, 4)
        context.loss(setup.drafter, batch, setup.rows, None, Clock())[0].backward()
        moved = {name.split(".")[0] for name, p in setup.drafter.named_parameters() if p.grad is not None and p.grad.any()}
        assert (moved == {"confidence_head"}) == detach and "confidence_head" in moved


def test_times_are_per_step_even_in_a_short_last_window(tmp_path: Path):
    class Slow:
        def __init__(self, inner) -> None:
            self.inner = inner

        def features(self, batch, rows) -> Features:
            time.sleep(0.1)
            return self.inner.features(batch, rows)

    parts = parts_of(train=dict(steps=4, log_every=3))
    setup = setup_of(parts, rows_of(4), tmp_path)
    train(parts, dataclasses.replace(setup, source=Slow(setup.source)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert all(line["perf/target_s"] >= 0.1 for line in lines)


@pytest.mark.parametrize(
    "changes",
    [
        dict(objective=dict(survival=0.0)),
        dict(drafter=dict(rank=0)),
        dict(drafter=dict(head="rnn")),
        dict(drafter=dict(head="gated", draft_vocab_size=40)),
        dict(drafter=dict(survival_head=False), objective=dict(survival=0.0)),
        dict(objective=dict(tv=0.0, kl=0.0, ce=1.0, slot_weighting="dpace")),
        dict(objective=dict(exact=1.0, e2e=0.5), train=dict(precision="bf16")),
        dict(train=dict(clip=0.0, weight_decay=0.1)),
    ],
    ids=str,
)
def test_every_switch_trains(tmp_path: Path, changes: dict):
    parts = parts_of(**changes)
    setup = setup_of(parts, rows_of(5), tmp_path)
    before = {k: v.clone() for k, v in setup.drafter.state_dict().items()}
    train(parts, setup, tmp_path)
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3, 4]
    assert all(math.isfinite(v) for line in log_of(tmp_path) for v in line.values())
    still = {k for k, v in setup.drafter.state_dict().items() if torch.equal(v, before[k])}
    assert still <= ({"confidence_head.proj.weight", "confidence_head.proj.bias"} if parts.objective.survival == 0 else set())


# ---- splits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [{}, dict(slot_weighting="half_reach"), dict(tv=0.0, kl=0.0, ce=1.0, slot_weighting="dpace"), dict(exact=1.0)],
    ids=str,
)
def test_every_split_of_a_step_has_the_same_gradient(tmp_path: Path, objective: dict):
    parts = parts_of(objective=objective)
    rows = [
        TokenRow(f"p{i}", "chat", torch.randint(3, 96, (14 + i,)).tolist(), [False] * 4 + [True] * (10 + i)) for i in range(4)
    ]
    places = [torch.tensor([5]), torch.tensor([11]), torch.tensor([4, 6, 9, 10]), torch.tensor([5, 7, 8, 12])]
    setup = setup_of(parts, rows, tmp_path)
    torch.nn.init.normal_(setup.drafter.markov_head.markov_w2.weight)
    context = StepContext(parts.train, parts.objective, setup, setup.heads, torch.device("cpu"))

    def gradient(split: list[list[int]]) -> tuple[float, torch.Tensor]:
        micro = [
            (collate([rows[i] for i in part], None, 4, anchors=[places[i] for i in part]), [rows[i] for i in part])
            for part in split
        ]
        totals = torch.stack([denominators(parts.objective, batch.valid.flatten(0, 1)) for batch, _ in micro]).sum(0)
        setup.drafter.zero_grad(set_to_none=True)
        loss = 0.0
        for batch, part in micro:
            value, _ = context.loss(setup.drafter, batch, part, totals, Clock())
            value.backward()
            loss += value.item()
        return loss, torch.cat([p.grad.flatten() for p in setup.drafter.parameters()])

    loss, want = gradient([[0, 1, 2, 3]])
    assert want.norm() > 1e-2
    for split in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3], []], [[3, 1], [], [2, 0]]):
        found_loss, found = gradient(split)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert float((found - want).norm() / want.norm()) < 1e-5, split


def test_a_launcher_that_starts_too_few_processes_is_refused(tmp_path: Path):
    parts = parts_of(train=dict(expected_world_size=2))
    with pytest.raises(ValueError, match=r"train.expected_world_size: 2, but 1 process\(es\) run"):
        train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


# ---- resume ---------------------------------------------------------------------------------------------------------


def run_config(**train_settings) -> stage.Parts:
    return parts_of(train=dict(steps=10, checkpoint_every=5, validation_share=0.3, **train_settings), drafter=dict(head="rnn"))


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path: Path):
    rows = rows_of(9)
    plain, broken = run_config(eval_every=0), run_config(eval_every=5)
    train(plain, setup_of(plain, rows, tmp_path / "a"), tmp_path / "a")
    setup = setup_of(broken, rows, tmp_path / "b")
    assert setup.validation and setup.rows
    # Validation at step 5 takes calls of its own: stop while step 8 is computed, three steps after the checkpoint.
    passes = len(Batches(setup.validation, rows_per_batch=2, block_size=4, anchor_share=0.5))
    stopped = setup_of(broken, rows, tmp_path / "b", source=Breaking(setup.source, 8 + passes, "raise"))
    with pytest.raises(Interrupted):
        train(broken, stopped, tmp_path / "b")
    assert not (tmp_path / "b" / "drafter").exists()
    (tmp_path / "b" / "checkpoints" / "step-0000009.tmp").mkdir()  # a save that was cut short
    with (tmp_path / "b" / "train.jsonl").open("a") as file:
        file.write('{"step": 8, "loss/to')
    fresh = setup_of(broken, rows, tmp_path / "b")
    with torch.no_grad():
        fresh.drafter.fc.weight.fill_(3.0)  # every weight comes from the checkpoint
    torch.manual_seed(999)
    train(broken, fresh, tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    curves = [[line for line in log_of(tmp_path / name) if "loss/total" in line] for name in "ab"]
    assert curves[0] == curves[1] and [line["step"] for line in curves[0]] == list(range(1, 11))
    validations = [line["step"] for line in log_of(tmp_path / "b") if "loss/total" not in line]
    assert validations == [5, 10]
    assert any(key.startswith("val/accept/") for key in log_of(tmp_path / "b")[-1])


def test_a_finished_run_is_not_run_again(tmp_path: Path):
    parts = parts_of(train=dict(steps=2))
    train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path)
    before, log = weights(tmp_path), log_of(tmp_path)
    assert stage.is_trained(tmp_path, parts, PROMPTS)
    made = json.loads((tmp_path / "drafter" / "draftsmith.json").read_text())
    del made["recipe"]["train"]["tracker"]
    (tmp_path / "drafter" / "draftsmith.json").write_text(json.dumps(made))
    assert stage.is_trained(tmp_path, parts, PROMPTS), "a setting that came after the run counts as its default"
    assert not stage.is_trained(tmp_path, parts_of(train=dict(steps=3)), PROMPTS)
    assert not stage.is_trained(tmp_path, parts, "prompts that were edited since")
    stopped = setup_of(parts, rows_of(4), tmp_path)
    train(parts, setup_of(parts, rows_of(4), tmp_path, source=Breaking(stopped.source, 1, "raise")), tmp_path)
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path).items()) and log_of(tmp_path) == log


def test_a_finished_run_with_another_step_size_is_not_taken_for_this_one(tmp_path: Path):
    train_with = lambda **settings: parts_of(train=dict(steps=2) | settings)  # noqa: E731
    train(train_with(), setup_of(train_with(), rows_of(4), tmp_path), tmp_path)
    before = weights(tmp_path)
    other = train_with(rows=4)
    assert not stage.is_trained(tmp_path, other, PROMPTS)
    with pytest.raises(ValueError, match=r"a step of that run has 2 rows .* this one 4"):
        train(other, setup_of(other, rows_of(4), tmp_path), tmp_path)
    same = train_with(rows=1, accumulation=2)  # the same rows in every step: its checkpoint is taken
    train(same, setup_of(same, rows_of(4), tmp_path), tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path).items())


@pytest.mark.parametrize(
    "changes",
    [dict(objective=dict(kl=0.5)), dict(seed=4), dict(train=dict(steps=2, lr=1e-3)), dict(data=dict(max_length=99))],
    ids=str,
)
def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path, changes: dict):
    parts = parts_of(train=dict(steps=2))
    train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path)
    other = parts_of(**({"train": dict(steps=2)} | changes))
    with pytest.raises(ValueError, match="made with other settings"):
        train(other, setup_of(other, rows_of(4), tmp_path), tmp_path)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path, clip: float):
    parts = parts_of(train=dict(steps=6, checkpoint_every=2, clip=clip))
    train(parts, setup_of(parts, rows_of(4), tmp_path / "a"), tmp_path / "a")
    setup = setup_of(parts, rows_of(4), tmp_path / "b")
    sick = setup_of(parts, rows_of(4), tmp_path / "b", source=Breaking(setup.source, 4, "nan"))
    with pytest.raises(RuntimeError, match="step 4: loss nan"):
        train(parts, sick, tmp_path / "b")
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "b" / "checkpoints")] == ["step-0000002"]
    assert all(torch.isfinite(p).all() for p in sick.drafter.parameters())
    train(parts, setup, tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_only_the_last_checkpoints_are_kept(tmp_path: Path):
    parts = parts_of(train=dict(steps=5, checkpoint_every=1, keep_last=2))
    train(parts, setup_of(parts, rows_of(4), tmp_path), tmp_path)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["step-0000004", "step-0000005"]


# ---- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [None, 40])
def test_cached_features_train_the_same_drafter(tmp_path: Path, reduced: int | None):
    rows = rows_of(6)
    for name in ("online", "cached"):
        parts = parts_of(data=dict(features=name), drafter=dict(draft_vocab_size=reduced))
        setup = setup_of(parts, rows, tmp_path / name)
        assert type(setup.source).__name__ == {"online": "OnlineFeatures", "cached": "StoredFeatures"}[name]
        train(parts, setup, tmp_path / name)
    for a, b in zip(log_of(tmp_path / "online"), log_of(tmp_path / "cached"), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    assert_same(tmp_path / "online", tmp_path / "cached", atol=1e-4)


def test_a_split_that_leaves_nothing_is_refused(tmp_path: Path):
    rows = rows_of(40)
    training, validation = stage.split_validation(rows, 0.3)
    assert {row.id for row in training} | {row.id for row in validation} == {row.id for row in rows}
    assert not {row.id for row in training} & {row.id for row in validation} and 4 <= len(validation) <= 20
    twins = [TokenRow(f"{row.id}#{k}", row.domain, row.input_ids, row.loss_mask) for row in rows for k in (0, 1)]
    held = {row.id.split("#")[0] for row in stage.split_validation(twins, 0.3)[1]}
    assert held == {row.id for row in validation}
    with pytest.raises(ValueError, match="train.validation_share: 0.3 leaves none of"):
        setup_of(parts_of(train=dict(validation_share=0.3)), validation, tmp_path)


def test_a_run_starts_from_a_checkpoint_and_keeps_its_vocabulary(tmp_path: Path):
    rows = rows_of(6)
    first = parts_of(drafter=dict(draft_vocab_size=40), train=dict(steps=2))
    trained = train(first, setup_of(first, rows, tmp_path / "a"), tmp_path / "a")
    # other rows would choose another draft vocabulary
    again = parts_of(drafter=dict(draft_vocab_size=40, init="checkpoint", checkpoint=str(trained)))
    start = setup_of(again, rows_of(9, seed=7), tmp_path / "b")
    target = tiny_target()
    loaded, heads = native.load(trained, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    assert torch.equal(start.heads.draft_ids, heads.draft_ids)
    assert all(torch.equal(start.drafter.state_dict()[name], value) for name, value in loaded.state_dict().items())
    with pytest.raises(ValueError, match="drafter.checkpoint: .* has markov_rank 8, the recipe's drafter 4"):
        other = parts_of(drafter=dict(draft_vocab_size=40, rank=4, init="checkpoint", checkpoint=str(trained)))
        setup_of(other, rows, tmp_path / "c")
