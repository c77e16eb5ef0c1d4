"""The operating-point grid: windows at constant load, the figures against hand values, restart, report, and what is refused."""

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import tiny_drafter
from grid_sample import sample_parts
from rich.console import Console
from tiny_chat import chat_target

from draftsmith.eval.config import EvalConfig, GridConfig
from draftsmith.eval.grid import arithmetic_of, grid_key, run_grid
from draftsmith.eval.grid_cells import (
    Arithmetic,
    equation_costs,
    paired_ratio,
    predicted_ms,
    stops_paying,
    summarise_cell,
    summarise_grid,
)
from draftsmith.eval.grid_plan import CellPlan, answer_room, check_grid, resolve_gammas
from draftsmith.eval.grid_report import build_grid, print_grid, read_grid, render_html, write_grid
from draftsmith.eval.grid_run import Watched, near_best, quarters, timed_window
from draftsmith.eval.plan_report import plan_cells
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.costs import CostTable
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.schedule import DraftPlan, FixedLength
from tiny import tiny_model

ROOT = Path(__file__).parent.parent
POINT = {"domain": "mixed", "temperature": 0.0, "concurrency": 2, "context_setting": 100}
# draft 1 + slots, verify 4 + tokens, rest 1: in ms; a plain cycle of two rows takes 0 + 6 + 1 = 7
COSTS = CostTable.from_functions(
    draft=lambda rows, slots, context: 1.0 + slots if slots else 0.0,
    verify=lambda rows, tokens, context: 4.0 + tokens,
    rest=lambda tokens: 1.0,
)


# ---- how a grid is cut ------------------------------------------------------------------------------------------------


def test_cells_are_cut_into_enough_windows_of_enough_tokens():
    grid = GridConfig(tokens=960, sampled_tokens=1200)  # 16 prompts
    plans = [CellPlan.build(grid, c) for c in (1, 4, 8, 16)]
    assert [(p.units, p.rounds, p.tokens) for p in plans] == [(16, 1, 60), (4, 1, 60), (2, 2, 30), (1, 3, 24)]
    assert [p.reach for p in plans] == [60, 60, 60, 72] and [p.more for p in plans] == [2, 2, 3, 4]
    big = CellPlan.build(grid, 32)  # more rows than prompts: as many prompts as rows
    assert (big.units, big.rounds, big.tokens) == (1, 3, 24)
    assert CellPlan.build(GridConfig(tokens=960, repeats=2, sampled_tokens=0), 1) == CellPlan(1, 16, 2, 30, 0)
    # the longest window: 72 tokens of earlier rounds, a budget of 2 * 24 + 3 * 8, a block of drafts
    assert answer_room(GridConfig(concurrency=(16,)), 7) == 72 + 72 + 9


def test_fixed_lengths_are_capped_by_block_and_setting():
    assert resolve_gammas(EvalConfig(), 7) == (1, 2, 4, 7)
    assert resolve_gammas(EvalConfig(), 3) == (1, 2, 3)
    assert resolve_gammas(EvalConfig(num_slots=4), 7) == (1, 2, 4)
    assert resolve_gammas(EvalConfig(grid=GridConfig(gammas=(5, 3))), 7) == (3, 5)
    with pytest.raises(ValueError, match=r"eval.grid.gammas: got 5, allowed: 1 to 4"):
        resolve_gammas(EvalConfig(num_slots=4, grid=GridConfig(gammas=(3, 5))), 7)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"gammas": (9,)}, "eval.grid.gammas: got 9"),
        ({"domains": ("poetry",)}, "eval.grid.domains: got 'poetry', allowed: mixed, chat"),
        ({"prompts": 900}, "eval.grid.prompts: 356 held-out prompts for 'mixed'"),
        ({"concurrency": (1, 512)}, "eval.grid.prompts"),
        ({"contexts": (128, 8150)}, "eval.grid.contexts: got 8150, allowed: at most"),
    ],
)
def test_a_grid_that_cannot_be_served_is_refused(grid, message):
    with pytest.raises(ValueError, match=message):
        check_grid(EvalConfig(grid=GridConfig(**grid)), 7, 8192)


@pytest.mark.parametrize("axes", [{"concurrency": ()}, {"contexts": (1, 1)}, {"gammas": (2, 2)}, {"domains": ()}])
def test_axes_hold_each_value_once(axes):
    with pytest.raises(ValueError, match=f"eval.grid.{next(iter(axes))}: got"):
        GridConfig(**axes)


def test_quarters_hold_all_time_and_tokens():
    assert quarters([(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]) == [[1.0, 1], [2.0, 1], [3.0, 1], [4.0, 1]]
    assert quarters([(1.0, 4), (2.0, 2), (3.0, 2)]) == [[0.0, 0], [1.0, 4], [2.0, 2], [3.0, 2]]
    found = quarters([(0.5, n % 3 + 1) for n in range(50)])
    assert sum(s for s, _ in found) == pytest.approx(25.0) and sum(n for _, n in found) == sum(n % 3 + 1 for n in range(50))


# ---- a window ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=drafter.tap_layers)
    limits = {"slots": 4, "max_context": 200}
    return Engine(decoder, proposer=DSparkProposer(drafter, heads, **limits), reuse_prefix=True, **limits)


def requests(count, temperature=0.0):
    params = SamplingParams(temperature=temperature, max_new_tokens=100, ignore_eos=True)
    return [Request(f"r{i}", [5 + i, *range(10, 40)], params) for i in range(count)]


def test_a_window_is_timed_at_constant_load_and_prefills_once(engine):
    timed_window(engine, Watched(FixedLength(0)), requests(3), 4)
    run = timed_window(engine, Watched(FixedLength(2)), requests(3), 20)
    assert run["prefill_tokens"] == 3, "the prompts are still there: only their last token runs again"
    assert engine.idle and 60 <= run["tokens"] < 60 + 3 * 3
    assert [cycles for cycles, _ in run["rows"]] == [run["steps"]] * 3, "every row decodes in every step"
    assert sum(tokens for _, tokens in run["rows"]) == run["tokens"]
    assert run["shapes"] == [[3, 2, 9, run["steps"]]]
    assert run["verified_tokens"] == 9 * run["steps"] and run["drafted_tokens"] == 6 * run["steps"]
    assert run["length_counts"] == [0, 0, 3 * run["steps"]] and run["plain_steps"] == 0
    assert 1 + run["accepted_per_slot"][0] / (3 * run["steps"]) <= run["tokens"] / (3 * run["steps"])
    parts = sum(run[f"{part}_s"] for part in ("draft", "head", "verify", "rest", "schedule"))
    assert parts <= run["seconds"] <= 1.2 * parts + 0.01
    plain = timed_window(engine, Watched(FixedLength(0)), requests(3), 20)
    assert plain["shapes"] == [[0, 0, 3, 20]] and plain["plain_steps"] == 20 and plain["tokens"] == 60


def test_sampled_sides_near_the_best_are_measured_further():
    def side(rate):
        return {"tokens": rate, "seconds": 1.0}

    sides = {"plain": side(93.0), "fixed-1": side(100.0), "fixed-2": side(91.0), "fixed-4": side(70.0), "scheduled": side(60.0)}
    assert near_best([{"sides": sides}, {"sides": sides}]) == ["plain", "fixed-1", "scheduled"]


class Alternating(FixedLength):
    """Two drafts for the first row in every second step."""

    def __init__(self):
        super().__init__(2)
        self.step = 0

    def plan(self, view):
        self.step += 1
        return DraftPlan([0], 2) if self.step % 2 else DraftPlan([], 0)


def test_shapes_tell_which_rows_were_drafted(engine):
    run = timed_window(engine, Watched(Alternating()), requests(2, temperature=1.0), 10)
    assert {tuple(shape[:3]) for shape in run["shapes"]} == {(1, 2, 4), (0, 0, 2)}
    assert sum(shape[3] for shape in run["shapes"]) == run["steps"]
    assert run["plain_steps"] == next(shape[3] for shape in run["shapes"] if shape[0] == 0)


# ---- figures against hand values --------------------------------------------------------------------------------------


def run_of(seconds, tokens, shapes, *, reached=(), accepted=(), lengths=(), concurrency=2):
    steps = sum(shape[3] for shape in shapes)
    return {
        "seconds": seconds, "tokens": tokens, "steps": steps,
        "draft_s": 0.2 * seconds, "head_s": 0.0, "verify_s": 0.7 * seconds, "rest_s": 0.1 * seconds, "schedule_s": 0.0,
        "verified_tokens": sum(s[2] * s[3] for s in shapes), "drafted_tokens": sum(s[0] * s[1] * s[3] for s in shapes),
        "draft_passes": sum(s[3] for s in shapes if s[0]), "plain_steps": sum(s[3] for s in shapes if not s[0]),
        "proposer_failures": 0, "prefill_tokens": 2, "reached_per_slot": list(reached), "accepted_per_slot": list(accepted),
        "length_counts": list(lengths), "rows": [[steps, tokens // concurrency]] * concurrency,
        "shapes": shapes, "quarters": [[seconds / 4, tokens / 4]] * 4,
    }  # fmt: skip


def hand_records():
    """Two windows of two rows. Plain: 20 steps in 0.14 s. Two drafts: 10 steps in 0.13 s, 40 tokens. Scheduled: both kinds."""
    sides = {
        "plain": run_of(0.14, 40, [[0, 0, 2, 20]], lengths=[40]),
        "fixed-2": run_of(0.13, 40, [[2, 2, 6, 10]], reached=[20, 12], accepted=[12, 8], lengths=[0, 0, 20]),
        "scheduled": run_of(0.10, 40, [[0, 0, 2, 4], [2, 2, 6, 8]], reached=[16, 9], accepted=[9, 7], lengths=[8, 0, 16]),
    }
    return [{"unit": i, "round": 0, "prompt_tokens": [90, 90], "sides": sides} for i in range(2)]


def test_a_cell_against_hand_values():
    arithmetic = Arithmetic(target=100, target_attention=1, block=30, block_attention=0, slot=5, context=10)
    cell = summarise_cell(POINT, hand_records(), costs=COSTS, arithmetic=arithmetic)
    plain, two, scheduled = (cell["sides"][name] for name in ("plain", "fixed-2", "scheduled"))
    assert cell["context"] == 100  # 90 and half of the 20 tokens that each row gets
    assert plain["tokens_per_second"] == pytest.approx(40 / 0.14)
    assert plain["tokens_per_second_per_user"] == pytest.approx(20 / 0.14)
    assert plain["speedup"] == 1.0 and two["speedup"] == pytest.approx(14 / 13) and cell["speedup"] == pytest.approx(1.4)
    assert (cell["best"], cell["best_gamma"], cell["pays"]) == ("fixed-2", 2, True)
    assert cell["ratio_to_best"] == pytest.approx(1.3) and cell["ratio_interval"] == pytest.approx([1.3, 1.3])
    assert two["tau"] == 2.0 and plain["tau"] == 1.0 and scheduled["tau"] == pytest.approx(40 / 24)
    assert (
        two["acceptance_per_slot"] == pytest.approx([0.6, 2 / 3]) and cell["acceptance_per_slot"] == two["acceptance_per_slot"]
    )
    assert scheduled["length_mean"] == pytest.approx(32 / 24) and scheduled["plain_share"] == pytest.approx(1 / 3)
    assert scheduled["time_split"]["verify"] == pytest.approx(0.7) and two["cycle_ms"] == pytest.approx(13.0)
    # plain: 7 ms for 2 tokens. Two drafts: 3 + 10 + 1 = 14 ms for 4 tokens. Scheduled: (4 * 7 + 8 * 14) / 40 a token
    assert two["predicted_speedup"] == pytest.approx(3.5 / 3.5)
    assert cell["predicted_speedup"] == pytest.approx(3.5 / (140 / 40))
    assert cell["prediction_error"] == pytest.approx(1 / 1.4 - 1)
    # 2 * (100 + 100) a plain token; with two drafts 60 verified of 40 emitted, 20 blocks, 40 slots, 60 context positions
    assert plain["flops_per_token"] == pytest.approx(400.0) and plain["arithmetic"] == 1.0
    assert two["arithmetic"] == pytest.approx((60 * 200 + 20 * 30 + 40 * 5 + 60 * 10) / (40 * 200))


def test_ratios_where_a_side_has_fewer_windows():
    both = paired_ratio(([2.0, 2.0], [10.0, 10.0]), ([1.0, 1.0], [10.0, 10.0]))
    assert both == pytest.approx((2.0, 2.0, 2.0))
    seconds, tokens = [1.0, 3.0, 0.0, 0.0], [10.0, 10.0, 0.0, 0.0]  # 5 tokens a second, from the first two items alone
    ratio, low, high = paired_ratio((seconds, tokens), ([1.0] * 4, [10.0] * 4))
    assert ratio == pytest.approx(2.0) and low == pytest.approx(1.0) and high == pytest.approx(3.0)
    records = hand_records()
    records[1] = records[1] | {"sides": {name: run for name, run in records[1]["sides"].items() if name != "plain"}}
    cell = summarise_cell(POINT, records, costs=COSTS, arithmetic=None)
    assert cell["speedup"] == pytest.approx(1.4) and cell["sides"]["plain"]["windows"] == 1
    assert cell["sides"]["scheduled"]["windows"] == cell["windows"] == 2


def test_predictions_follow_the_cost_table_and_the_equation():
    records = hand_records()
    runs = [record["sides"]["scheduled"] for record in records]
    assert predicted_ms(runs, COSTS, POINT, 100.0) == pytest.approx(2 * (4 * 7 + 8 * 14))
    cost = equation_costs(COSTS, POINT, 100.0, 3)
    # one pass over one token of both rows: 6 ms; drafting 1 slot 2 ms, 3 slots 4 ms
    assert cost["c_step"] == pytest.approx(1 / 6) and cost["c_block"] == pytest.approx(1 / 6)
    assert cost["v"] == pytest.approx(12 / 6) and cost["overhead"] == pytest.approx(1 / 6) == cost["plain_overhead"]
    # and so the equation gives the table's ratio: tau 2.5 in (c_block + 3 c_step + v + overhead) against 1 + plain_overhead
    speedup = 2.5 * (1 + cost["plain_overhead"]) / (cost["c_block"] + 3 * cost["c_step"] + cost["v"] + cost["overhead"])
    assert speedup == pytest.approx(2.5 * 7 / COSTS.cycle_ms(2, 3, 100.0, hot=False))
    assert equation_costs(COSTS, POINT, 100.0, 0) is None


def cell_of(speedups, concurrency, context, rate, *, temperature=0.0, predicted=None):
    sides = {
        name: {"speedup": s, "tokens_per_second": s * rate, "prediction_error": 0.05 if name != "plain" else 0.0}
        for name, s in speedups.items()
    }
    best = max((n for n in speedups if n != "scheduled"), key=lambda n: speedups[n])
    return {
        "domain": "mixed", "temperature": temperature, "concurrency": concurrency, "context_setting": context, "sides": sides,
        "ratio_to_best": speedups["scheduled"] / speedups[best], "ratio_interval": [0.9, 1.1], "speedup": speedups["scheduled"],
        "prediction_error": predicted, "pays": speedups[best] > 1.0,
    }  # fmt: skip


def test_the_grid_against_hand_values():
    cells = [
        cell_of({"plain": 1.0, "fixed-1": 1.2, "fixed-4": 1.6, "scheduled": 1.68}, 1, 128, 100.0, predicted=0.08),
        cell_of({"plain": 1.0, "fixed-1": 0.9, "fixed-4": 0.4, "scheduled": 0.98}, 16, 128, 400.0, predicted=-0.2),
    ]
    found = summarise_grid(cells)
    assert found["worst_ratio_to_best_fixed"] == pytest.approx(0.98)
    assert found["worst_cell"] == {"domain": "mixed", "temperature": 0.0, "concurrency": 16, "context_setting": 128}
    # geometric means: plain 1, gamma 1 1.0392, gamma 4 0.8, scheduled 1.2831
    assert found["best_fixed_gamma"] == 1
    assert found["gain_over_best_fixed"] == pytest.approx((1.68 * 0.98) ** 0.5 / 1.08**0.5)
    # seconds for one token in every cell: plain 1/100 + 1/400, gamma 1 1/120 + 1/360, gamma 4 1/160 + 1/160
    assert found["quickest_fixed_gamma"] == 1
    assert found["gain_in_total_time"] == pytest.approx((1 / 120 + 1 / 360) / (1 / 168 + 1 / 392))
    assert found["predicted_within_10_percent"] == 0.5 and found["worst_prediction_error"] == pytest.approx(0.2)
    assert found["predicted_within_10_percent_all_sides"] == 1.0
    assert [cell["concurrency"] for cell in found["losing_cells"]] == [16]
    assert found["stops_paying"] == [
        {"domain": "mixed", "temperature": 0.0, "context_setting": 128, "concurrency": 16}
    ]  # fmt: skip


def test_speculation_stops_paying_at_the_least_load_from_which_it_never_pays():
    def row(context, pays):
        return [
            {"domain": "m", "temperature": 0.0, "context_setting": context, "concurrency": c, "pays": p}
            for c, p in zip((1, 2, 4, 8), pays, strict=True)
        ]

    cells = row(0, "1100") + row(1, "1111") + row(2, "0000") + row(3, "1010")
    for cell in cells:
        cell["pays"] = cell["pays"] == "1"
    assert [found["concurrency"] for found in stops_paying(cells)] == [4, None, 1, 8]


def test_arithmetic_is_counted_from_the_weights():
    model = tiny_model()  # 3 layers, hidden 64, MLP 96, 4 heads and 2 KV heads of 16, vocabulary 97
    drafter, heads = tiny_drafter(model)  # 2 such layers with heads of their own, block 5, 2 taps, rank 8
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96
    found = arithmetic_of(model, drafter, heads)
    assert found.target == 3 * layer + 97 * 64 and found.target_attention == 2 * 3 * 4 * 16
    assert found.block == 5 * 2 * layer and found.block_attention == 5 * 2 * 2 * 4 * 16
    assert found.slot == 97 * 64 + 8 * 97 and found.context == 2 * 64 * 64 + 2 * 2 * 64 * 32
    flops = found.flops(verified=10, blocks=2, slots=6, context=50, follows=True)
    assert flops == 2 * (10 * (found.target + 50 * 384) + 2 * (found.block + 50 * 1280) + 6 * found.slot + 10 * found.context)


# ---- report -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    return build_grid(**sample_parts())


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """Path of the written page; drawing its figures takes seconds, so it is drawn once."""
    return write_grid(report, tmp_path_factory.mktemp("report"))


def test_the_report_survives_its_file_and_names_a_missing_key(report, written):
    tmp_path = written.parent
    assert written == tmp_path / "grid.html" and not list(tmp_path.glob("*.tmp"))
    found = read_grid(tmp_path / "grid.json")
    assert found == json.loads(json.dumps(report))
    del found["cells"][2]["ratio_to_best"]
    (tmp_path / "broken.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"cells\[2\].ratio_to_best"):
        read_grid(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="cells: got an empty list"):
        build_grid(**sample_parts(cells=[]))


def test_the_page_is_self_contained_and_shows_the_verdict(report, written):
    html = written.read_text()
    assert html.count("data:image/svg+xml;base64,") == 8
    assert "http://" not in html and "https://" not in html and "<script" not in html
    assert f"{report['summary']['worst_ratio_to_best_fixed']:.3f}" in html
    stream = io.StringIO()
    print_grid(report, Path("grid.html"), Console(file=stream, width=200))
    assert "speculation stops paying at concurrency 8 (mixed, T=1, context 128)" in stream.getvalue()


def test_a_small_grid_without_costs_has_a_page_too():
    cells = [summarise_cell(POINT, hand_records(), costs=None, arithmetic=None)]
    report = build_grid(**sample_parts(cells=cells, arithmetic=None, plain_check=None))
    html = render_html(json.loads(json.dumps(report)))
    assert html.count("data:image/svg+xml;base64,") == 5, "no prediction, no arithmetic, no curve of one point"


def test_the_plan_reads_a_grid(report):
    rows = plan_cells(json.loads(json.dumps(report)), source="grid")
    assert len(rows) == len(report["cells"])
    for row, cell in zip(rows, report["cells"], strict=True):
        assert row["missing"] is None and row["predicted_best"] == pytest.approx(cell["best_speedup"], rel=0.15)


# ---- the whole run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a tiny target, an untrained drafter of it, and a prompt file of two domains."""
    folder = tmp_path_factory.mktemp("grid")
    target = chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    cfg = DSparkConfig(num_layers=1, block_size=3, rank=4, tap_layers=(0,), num_taps=1)
    torch.manual_seed(1)
    drafter = DSpark(native.build_config(target.config, cfg, mask_token_id=0, target_name="tiny"))
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, None)
    native.save(folder / "drafter", drafter, heads, dtype=torch.float32)
    rows = [
        {"id": f"{domain}-{i}", "domain": domain, "turns": [f"hi w{i} w{(7 * i + len(domain)) % 40} ok"]}
        for domain in ("code", "rewrite") for i in range(4)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def measure(place, output, **grid):
    stream = io.StringIO()
    settings = {
        "concurrency": (1,),
        "contexts": (0,),
        "temperatures": (0.0,),
        "tokens": 24,
        "sampled_tokens": 24,
        "prompts": 2,
        "gammas": (2,),
    }
    cfg = EvalConfig(prompts=str(place / "prompts.jsonl"), dtype="float32", grid=GridConfig(**(settings | grid)))
    run_grid(
        TargetConfig(name=str(place / "target"), dtype="float32"), place / "drafter", cfg, output, costs=COSTS,
        console=Console(file=stream, width=200),
    )  # fmt: skip
    return read_grid(output / "grid.json"), stream.getvalue()


def test_the_run_keeps_finished_cells(place, tmp_path):
    first, said = measure(place, tmp_path)
    assert said.count(": measuring") == 2  # a cell, and the check of the plain side
    [cell] = first["cells"]
    assert set(cell["sides"]) == {"plain", "fixed-2", "scheduled"}
    assert cell["windows"] == 4 and cell["sides"]["plain"]["tokens"] == 4 * 24
    assert cell["sides"]["plain"]["tau"] == 1.0 and 1.0 <= cell["sides"]["fixed-2"]["tau"] <= 3.0
    records = json.loads((tmp_path / "measurements/grid/mixed-t0-c1-x0.json").read_text())["value"]
    assert [record["order"][0] for record in records] == ["plain", "plain", "scheduled", "scheduled"]
    assert records[0]["ids"] == ["code-0"] or records[0]["ids"][0].split("-")[0] in ("code", "rewrite")
    assert all(run["prefill_tokens"] <= 25 for record in records for run in record["sides"].values())
    # more points: the cell stays
    second, said = measure(place, tmp_path, concurrency=(1, 2), temperatures=(0.0, 1.0))
    assert said.count(": measuring") == 3 and said.count("reused") == 2
    assert [c for c in second["cells"] if c["concurrency"] == 1 and c["temperature"] == 0.0] == first["cells"]
    # a torn file is measured again, the rest stays
    (tmp_path / "measurements/grid/mixed-t0-c1-x0.json").write_text('{"fingerp')
    assert measure(place, tmp_path)[1].count(": measuring") == 1


def test_what_decides_a_cell_is_in_its_key(place):
    drafter, environment = place / "drafter", {"hardware": "h", "threads": 1, "dtype": "float32", "versions": {}}

    def key(costs=COSTS, **changes):
        grid = GridConfig(**(changes.pop("grid", {})))
        cfg = EvalConfig(**({"prompts": str(place / "prompts.jsonl"), "grid": grid} | changes))
        return grid_key(TargetConfig(name="tiny"), drafter, cfg, environment, {}, costs)

    same = [
        key(),
        key(grid={"concurrency": (3,), "contexts": (7,), "temperatures": (0.5,), "domains": ("code",)}),
        key(repeats=5),
    ]
    same.append(key(costs=COSTS.with_acceptance({"greedy": [0.5]})))
    assert len(set(same)) == 1, "the axes, other measurements and what a scheduler learnt"
    dearer = dataclasses.replace(COSTS, verify=(2 * np.array(COSTS.verify)).tolist())
    others = [key(costs=dearer), key(rule="token"), key(top_p=0.9), key(seed=1), key(num_slots=2)]
    others += [
        key(grid={name: value})
        for name, value in (("tokens", 99), ("sampled_tokens", 9), ("prompts", 5), ("repeats", 2), ("gammas", (3,)))
    ]
    assert len({*others, same[0]}) == len(others) + 1


def test_the_run_refuses_before_it_loads(place, tmp_path):
    with pytest.raises(ValueError, match="eval.grid.gammas: got 5, allowed: 1 to 3"):
        measure(place, tmp_path, gammas=(5,))
    with pytest.raises(ValueError, match="eval.grid.contexts: got 250, allowed: at most"):
        measure(place, tmp_path, contexts=(250,))
    assert not (tmp_path / "measurements").exists()


# ---- command lines ----------------------------------------------------------------------------------------------------


def test_bench_grid_refuses_in_one_line(tmp_path, capsys):
    from draftsmith.cli import app, pipeline

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output: {tmp_path / 'out'}\n")
    plain = pipeline.to_plain(pipeline.from_plain({"output": str(tmp_path / "out")}))
    del plain["eval"]["grid"]  # an output folder from before there was a grid
    pipeline.claim_folder(tmp_path / "out", plain)
    (tmp_path / "out" / "drafter").mkdir()
    for override, message in (
        ("eval.grid.gammas=[12]", "eval.grid.gammas: got 12, allowed: 1 to 7"),
        ("eval.grid.contexts=[9000]", "eval.grid.contexts: got 9000, allowed: at most"),
        ("eval.grid.concurency=[1]", "eval.grid.concurency: unknown key"),
    ):
        with pytest.raises(SystemExit) as caught:
            app.main(["bench", str(recipe), "--grid", override])
        [line] = capsys.readouterr().err.splitlines()
        assert caught.value.code == 2 and line.startswith(f"error: {message}")


def benchmark():
    spec = importlib.util.spec_from_file_location("schedule_benchmark", ROOT / "benchmarks" / "schedule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmark_flags_make_a_grid(tmp_path):
    module = benchmark()
    quick = module.configure(module.parse(["--json", "x.json", "--quick", "--concurrency", "1", "8", "--tokens", "99"]))
    assert quick.grid.concurrency == (1, 8) and quick.grid.tokens == 99 and quick.grid.contexts == (128, 1024)
    full = module.configure(module.parse(["--json", "x.json"]))
    assert (full.grid.concurrency, full.grid.contexts) == ((1, 2, 4, 8, 16), (128, 1024, 4096))
    assert full.grid.temperatures == (0.0, 1.0)


def test_benchmark_without_a_drafter_is_one_line(tmp_path):
    script, out = str(ROOT / "benchmarks" / "schedule.py"), str(tmp_path / "x.json")
    done = subprocess.run(
        [sys.executable, script, "--json", out, "--drafter", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "no exported drafter there" in done.stderr and len(done.stderr.splitlines()) == 1


def test_report_writes_the_grid_again(written, tmp_path, capsys):
    from draftsmith.cli import app, pipeline

    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(f"output: {out}\n")
    pipeline.claim_folder(out, pipeline.to_plain(pipeline.from_plain({"output": str(out)})))
    (out / "grid.json").write_bytes((written.parent / "grid.json").read_bytes())
    with pytest.raises(SystemExit) as caught:
        app.main(["report", str(recipe)])
    assert not caught.value.code
    assert (out / "grid.html").is_file() and "worst cell: " in capsys.readouterr().out
