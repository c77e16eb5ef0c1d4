"""Working ahead, compiled and recomputed drafters, float8, FLOPs and the time split."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from training import Interrupted, log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.data.batch import Batches, collate
from draftsmith.models import fp8
from draftsmith.recipes.check import check_recipe
from draftsmith.recipes.load import ConfigError, build
from draftsmith.recipes.schema import Recipe
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import Features, OnlineFeatures
from draftsmith.train.flops import FlopCounter, covered_positions, peak_flops, teacher_positions
from draftsmith.train.metrics import Clock, Meter
from draftsmith.train.prefetch import AHEAD, Feed
from draftsmith.train.speed import speed_up
from draftsmith.train.step import micro_batches

CPU = torch.device("cpu")


def curves(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in log_of(folder)]


def weights(setup) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in setup.drafter.parameters()])


# ---- working ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["online", "cached"])
def test_working_ahead_changes_nothing(tmp_path: Path, features: str):
    results = []
    for ahead in (False, True):
        settings = dict(prefetch=ahead, steps=4, accumulation=3, eval_every=2, validation_share=0.3)
        parts = parts_of(train=settings, data=dict(features=features))
        setup = setup_of(parts, rows_of(12), tmp_path / str(ahead))
        train(parts, setup, tmp_path / str(ahead))
        results.append((curves(tmp_path / str(ahead)), weights(setup)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


class Recording:
    """A background source that notes which thread asked for what."""

    background = True

    def __init__(self, fail: int | None = None) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.fail = fail

    def features(self, batch, rows) -> Features:
        if len(self.calls) == self.fail:
            raise Interrupted
        self.calls.append((int(batch.input_ids.sum()), threading.current_thread() is threading.main_thread()))
        return Features(batch.input_ids[..., None].float(), batch.input_ids[..., None].float())


def feed_of(source, count: int) -> tuple[Feed, Batches]:
    batches = Batches(rows_of(9), rows_per_batch=2, block_size=4, anchor_share=0.5)
    return Feed(micro_batches(batches, 0), source, CPU, count=count), batches


def test_states_are_read_by_the_thread_in_order_and_not_far_ahead():
    source = Recording()
    feed, batches = feed_of(source, count=8)
    clock, sums = Clock(), []
    for _ in range(2):  # two steps of four micro-batches
        micro = [next(feed) for _ in range(4)]
        for batch, rows in micro:
            feed.thread.submit(lambda: None).result()  # everything that was asked of the thread is done
            assert len(source.calls) <= len(sums) + AHEAD
            moved, found = feed.take(batch, rows, clock)
            assert torch.equal(found.taps[..., 0].long(), moved.input_ids)
            sums.append(int(moved.input_ids.sum()))
    want = [int(batch.input_ids.sum()) for batch, _ in itertools.islice(micro_batches(batches, 0), 8)]
    assert sums == want and [total for total, _ in source.calls] == want  # nothing beyond `count`
    assert not any(main for _, main in source.calls)
    feed.take(*next(micro_batches(batches, 3)), clock)  # not of the stream: validation
    assert source.calls[-1][1] is False
    feed.close()


def test_a_failure_in_the_thread_is_the_runs():
    feed, _ = feed_of(Recording(fail=2), count=8)
    with pytest.raises(Interrupted):
        for batch, rows in feed:
            feed.take(batch, rows, Clock())
    feed.close()


# ---- compiled, recomputed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("packing", "backend"), [("none", "eager"), ("packed", "aot_eager")])
def test_a_compiled_drafter_trains_the_same_with_few_graphs(tmp_path: Path, packing: str, backend: str):
    from torch._dynamo.utils import counters

    results = []
    for compiled in (False, True):
        settings = dict(steps=6, rows=3, packing=packing, tokens_per_batch=64, compile=compiled, compile_backend=backend)
        parts = parts_of(train=settings)
        setup = setup_of(parts, rows_of(25), tmp_path / str(compiled))
        torch._dynamo.reset()
        counters.clear()
        train(parts, setup, tmp_path / str(compiled))
        results.append((curves(tmp_path / str(compiled)), weights(setup)))
    assert 1 <= counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    torch._dynamo.reset()
    for line, want in zip(results[1][0], results[0][0], strict=True):
        assert line["loss/total"] == pytest.approx(want["loss/total"], abs=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=2e-4)


def test_recomputed_layers_have_the_same_gradient(tmp_path: Path):
    results = []
    for again in (False, True):
        parts = parts_of(train=dict(activation_checkpointing=again), drafter=dict(num_layers=2))
        setup = setup_of(parts, rows_of(8), tmp_path / str(again))
        train(parts, setup, tmp_path / str(again))
        assert setup.drafter.recompute_layers == again
        results.append(weights(setup))
    assert torch.equal(*results)


# ---- float8 ---------------------------------------------------------------------------------------------------------


def test_float8_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch):
    setup = setup_of(parts_of(), rows_of(3), tmp_path)
    with pytest.raises(
        ValueError, match=r"train\.fp8: true is not allowed here: .* compute capability 8\.9 or newer, this is cpu"
    ):
        speed_up(setup.drafter, TrainConfig(fp8=True), CPU)
    with pytest.raises(ValueError, match=r"train\.fp8: true is not allowed with train\.precision fp32; allowed with bf16"):
        speed_up(setup.drafter, TrainConfig(fp8=True, precision="fp32"), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert "A100 has 8.0" in str(fp8.fp8_refusal(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.fp8_refusal(torch.device("cuda")) is None


def test_float8_products_are_right_to_the_formats_digits():
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=False)
    x = torch.randn(5, 7, 48)
    plain_x = x.clone().requires_grad_()
    want = linear(plain_x)
    want.square().sum().backward()
    gradients = plain_x.grad, linear.weight.grad.clone()
    linear.zero_grad()
    assert fp8.fp8_layers(nn.ModuleDict({"fc": linear, "lm": nn.Linear(16, 16)})) == 1  # in place, and only where named
    low_x = x.clone().requires_grad_()
    found = linear(low_x)
    assert found.dtype == torch.bfloat16 and linear.weight.dtype == torch.float32

    def error(a, b):
        return float((a.float() - b).norm() / b.norm())

    assert 1e-3 < error(found, want) < 0.06  # e4m3 has 3 bits of mantissa: 2^-4 at worst
    found.float().square().sum().backward()
    assert error(low_x.grad, gradients[0]) < 0.12 and error(linear.weight.grad, gradients[1]) < 0.12  # e5m2: 2 bits
    assert linear.weight.grad.dtype == torch.float32


# ---- FLOPs and times ------------------------------------------------------------------------------------------------


def test_flops_are_those_that_torch_counts(tmp_path: Path):
    # Every block sees the whole context here and nothing is padded, so that the dense products do exactly the model's work.
    from torch.utils.flop_counter import FlopCounterMode

    parts = parts_of(drafter=dict(num_layers=2))
    setup = setup_of(parts, rows_of(3), tmp_path)
    drafter, heads = setup.drafter, setup.heads
    row = rows_of(1)[0]
    length, anchor = len(row.input_ids), len(row.input_ids) - 2
    batch = collate([row], None, 4, anchors=[torch.tensor([anchor])])
    taps = torch.randn(1, anchor, 2 * drafter.hidden_size)
    with FlopCounterMode(display=False) as counted:
        out = drafter(taps=taps, anchors=batch.anchors, previous_tokens=torch.zeros(1, 1, 4).long(), embedding=heads.embedding)
        out.hidden.sum().backward()
    found = FlopCounter(drafter, heads).count(batch, [anchor])
    survival = 2 * 4 * (drafter.hidden_size + drafter.config["markov_rank"])  # too small to be in the formula
    assert found.drafter == counted.get_total_flops() - survival
    valid, vocab, rank = batch.num_labels, heads.lm_head.shape[0], drafter.config["markov_rank"]
    assert found.loss == valid * vocab * (4 * drafter.hidden_size + 6 * rank) + valid * 2 * vocab * drafter.hidden_size
    target = setup.source.target
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        target.features(batch.input_ids[:, :length], None, (0, 1))
    ours = FlopCounter(drafter, heads, target.decoder).count(batch, [length]).target
    assert ours == counted.get_total_flops() + 2 * 3 * 64 * length**2  # torch does not count the attention kernel of a CPU


def test_positions_are_counted_once():
    row = rows_of(2)[1]
    first = row.loss_mask.index(True)
    batch = collate([row], None, 4, anchors=[torch.tensor([first, first + 1, first + 2])])
    # blocks of 4 at neighbouring anchors: taught from first..first+5, predicting first+1..first+6
    assert batch.num_labels == 12 and teacher_positions(batch) == covered_positions(batch) == 6
    assert covered_positions(collate([], 4, 4)) == 0


def test_the_log_splits_the_step_and_relates_it_to_the_peak(tmp_path: Path):
    parts = parts_of(train=dict(steps=4, log_every=2, peak_tflops=0.5))
    setup = setup_of(parts, rows_of(8), tmp_path)
    train(parts, setup, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        times = {key: line[f"perf/{key}_s"] for key in ("data", "target", "drafter", "loss", "communication")}
        assert all(value >= 0 for value in times.values()) and times["drafter"] > 0
        assert line["perf/mfu"] == pytest.approx(line["perf/tflops"] / 0.5)
        assert 0 < line["data/anchor_share"] < 1 and 0 < line["data/coverage"] <= 1 and 0 <= line["data/padding"] < 1


def test_the_clock_gives_every_second_to_one_part(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    monkeypatch.setattr("draftsmith.train.metrics.time.perf_counter", lambda: next(now))
    clock = Clock()
    clock.mark("data")  # 1
    clock.mark("target")  # 3
    clock.mark("drafter", at=5.0)  # an earlier stamp: until 5
    clock.mark("communication")  # 7
    clock.restart()  # 8
    clock.mark("data")  # 10
    assert clock.report(steps=2) == {"data": 1.5, "target": 1.0, "drafter": 1.0, "communication": 1.0}
    assert clock.report(steps=1) == {}


def test_peaks_are_known_or_measured(monkeypatch):
    peak, source = peak_flops(CPU, torch.float32)
    assert 1e8 < peak < 1e14 and source.startswith("measured")
    for name, want in (("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA L40S", 362e12), ("NVIDIA H100 PCIe", 756e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16)[0] == want
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla X")
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == (None, "unknown for Tesla X: set train.peak_tflops")


def test_an_idle_rank_counts_nothing():
    meter = Meter(None, None)
    meter.add(collate([], 4, 4), [])
    assert (meter.tokens, meter.anchors, meter.covered, meter.supervised) == (0, 0, 0, 0)


def test_online_states_wait_for_the_main_thread():
    assert not OnlineFeatures(tiny_target(), (0, 1)).background
    assert dataclasses.is_dataclass(Features)


@pytest.mark.distributed
def test_waiting_for_another_process_is_communication_and_the_gradient_is_ddps_own(tmp_path: Path):
    worker = str(Path(__file__).with_name("communication_worker.py"))
    started = [subprocess.Popen([sys.executable, worker, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    early, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert early["same"] and late["same"] and early["norm"] == late["norm"] > 0
    assert early["times"]["communication"] > 0.3 and early["times"]["drafter"] < 0.3
    assert late["times"]["communication"] < 0.3 and late["times"]["drafter"] > 0.4  # it slept before its backward


def test_a_recipe_is_refused_before_anything_loads():
    train = {"packing": "packed", "tokens_per_batch": 256, "fp8": True, "precision": "fp32"}
    with pytest.raises(ConfigError) as refused:
        check_recipe(build(Recipe, {"output": "run", "train": train}).value)
    found = "\n".join(refused.value.lines)
    assert "train.tokens_per_batch: 256 is not allowed with packing; a row must hold the longest chat, at least 512" in found
    assert "train.fp8: true is not allowed with train.precision fp32; allowed with bf16" in found
