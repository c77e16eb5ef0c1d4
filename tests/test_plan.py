"""`draftsmith plan`: the numbers of the equation, plans at a point and at measured cells, the command line, the pictures."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from report_sample import COST, DOMAINS, sample_parts

from draftsmith.cli import app as cli
from draftsmith.cli import plan as command
from draftsmith.eval import equation as eq
from draftsmith.eval.plan import Point, best_speedups, equal_slot_alpha, make_plan, piecewise
from draftsmith.eval.plan_report import plan_cells, read_measurements, verify_cost
from draftsmith.eval.report import build_report, write_report
from draftsmith.eval.roofline import Roofline, Shape, c_eagle3_from_sizes, c_from_sizes

H100 = {"bandwidth": 3.35e12, "peak": 989e12}
SHAPES = {
    "SmolLM2-135M": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "Qwen3-0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "Qwen3-4B": Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": Shape(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen3-14B": Shape(5120, 40, 40, 8, 128, 17408, 151936),
}


def call(arguments, capsys):
    """(exit code, stdout, lines of stderr) of the console script, in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return caught.value.code, out, err.splitlines()


# ---- the equation ----------------------------------------------------------------------------------------------------


def test_the_known_optimum_and_its_flat_region():
    plan = make_plan(Point(alpha=0.8, c=0.05))
    assert (plan.best_gamma, plan.region, plan.rising) == (8, (6, 11), False)
    assert plan.best_speedup == pytest.approx(3.09, abs=0.005)
    for outside in (5, 12):
        assert 1 - plan.speedup[outside] / plan.best_speedup == pytest.approx(0.045, abs=0.001)
    assert plan.arithmetic[7] == pytest.approx(2.01, abs=0.005)
    assert plan.tokens[7] == pytest.approx((1 - 0.8**8) / 0.2)
    assert plan.ceilings == pytest.approx({"1/c": 20.0, "1/(1-alpha)": 5.0})
    assert plan.ceiling == pytest.approx(5.0)
    assert eq.expected_tokens(plan.break_even, 8) == pytest.approx(1.4)
    gamma, alpha = plan.lowest_break_even
    assert gamma == 1 and alpha == pytest.approx(0.05)


@pytest.mark.parametrize("alpha, best, gamma", [(0.95, 6.6, 21), (0.8, 3.1, 8)])
def test_best_speedup_at_c_005(alpha, best, gamma):
    plan = make_plan(Point(alpha=alpha, c=0.05))
    assert plan.best_speedup == pytest.approx(best, abs=0.05)
    assert plan.best_gamma == gamma
    assert plan.ceilings["1/c"] == pytest.approx(20.0)
    values, where = best_speedups(np.array([alpha]), np.array([0.05]))
    assert values[0] == pytest.approx(plan.best_speedup, rel=1e-12) and where[0] == gamma


def test_unimodal_over_9900_pairs():
    """S rises while alpha^(gamma+1) > c S(gamma), and never again after it has failed once."""
    alpha, c = (x.ravel() for x in np.meshgrid(np.arange(1, 100) / 100, np.arange(1, 101) / 100))
    assert alpha.size == 9900
    speedup, tokens, power = np.ones(alpha.size), np.ones(alpha.size), np.ones(alpha.size)
    rising, best = np.ones(alpha.size, bool), np.ones(alpha.size)
    for gamma in range(1, 400):
        power = power * alpha
        tokens = tokens + power
        value = tokens / (c * gamma + 1)
        pays = power > c * speedup * (1 + 1e-12)
        assert not np.any(pays & ~rising), "the test passed again after it had failed"
        clear = np.abs(value / speedup - 1) > 1e-12  # beyond rounding, rule and S agree
        assert np.array_equal((value > speedup)[clear], pays[clear])
        if gamma == 1:
            assert value == pytest.approx((1 + alpha) / (1 + c))
            assert np.array_equal(pays[alpha != c], (alpha > c)[alpha != c])
        rising, speedup = rising & pays, value
        best = np.maximum(best, value)
    assert np.all(best[c < 1] < 1 / c[c < 1])
    assert np.all(best[alpha <= c] <= 1 + 1e-12) and np.all(best[alpha > c] > 1)
    found, _ = best_speedups(alpha, c, longest=399)
    assert found == pytest.approx(best, rel=1e-12)


def test_alpha_at_most_c_means_no_drafts():
    plan = make_plan(Point(alpha=0.3, c=0.3), longest=50)
    assert (plan.best_gamma, plan.best_speedup, plan.region[0]) == (0, 1.0, 0)
    assert plan.break_even == pytest.approx(0.3)


def test_parallel_ceiling_break_even_and_arithmetic():
    point = Point(alpha=0.7, c_block=0.3, c_step=0.02, v=piecewise([(7, 1.35)]), overhead=0.05, plain_overhead=0.1, c_hat=0.4)
    plan = make_plan(point, longest=7)
    for gamma in range(1, 8):
        cost = 0.3 + 0.02 * gamma + (1 + 0.05 * gamma) + 0.05
        assert plan.cost[gamma] == pytest.approx(cost)
        assert plan.speedup[gamma] == pytest.approx(eq.expected_tokens(0.7, gamma) * 1.1 / cost)
        assert plan.arithmetic[gamma] == pytest.approx(eq.arithmetic_increase(0.7, gamma, 0.4))
    best = plan.best_gamma
    assert plan.speedup[best] == max(plan.speedup)
    assert plan.ceilings["(gamma+1)/(c_block+v)"] == pytest.approx((best + 1) * 1.1 / (0.3 + 1 + 0.05 * best + 0.05))
    # at the break-even acceptance the cycle gives exactly what it costs
    even = Point(**{**vars(point), "alpha": plan.break_even})
    assert even.speedup(best) == pytest.approx(1.0)


def test_slots_given_to_the_end_say_what_one_more_needs():
    acceptance = (0.9, 0.88, 0.86, 0.84)
    v = piecewise([(5, 1.25)])
    plan = make_plan(Point(acceptance=acceptance, c_block=0.2, c_step=0.02, v=v))
    assert plan.best_gamma == 4 and plan.rising
    for extra, pays in ((plan.next_slot + 0.01, True), (plan.next_slot - 0.01, False)):
        longer = make_plan(Point(acceptance=(*acceptance, extra), c_block=0.2, c_step=0.02, v=v))
        assert (longer.best_gamma == 5) == pays
    assert make_plan(Point(acceptance=acceptance, c_block=0.2, v=piecewise([(4, 1.2)]))).next_slot is None
    with pytest.raises(ValueError, match="longest: got 5, allowed: 1 to 4"):
        make_plan(Point(acceptance=acceptance, c=0.1), longest=5)


def test_free_and_perfect_drafts_rise_for_ever():
    plan = make_plan(Point(alpha=1.0, c=0.0), longest=64)
    assert plan.rising and plan.best_speedup == pytest.approx(65.0)
    assert plan.to_dict()["ceiling"] is None
    json.dumps(plan.to_dict(), allow_nan=False)


def test_piecewise():
    v = piecewise([(4, 1.2), (8, 2.0)])
    assert [v(g) for g in (0, 2, 4, 6, 8)] == pytest.approx([1.0, 1.1, 1.2, 1.6, 2.0])
    with pytest.raises(ValueError, match="v: got gamma 9, allowed: at most 8"):
        v(9)


def test_equal_slot_alpha_inverts_the_tokens():
    assert equal_slot_alpha(eq.expected_tokens(0.83, 7), 7) == pytest.approx(0.83)
    # DSpark on Qwen3-4B: tau 5.57 on math at gamma 7; Qwen3-8B: 3.50 on chat
    assert equal_slot_alpha(5.57, 7) == pytest.approx(0.893, abs=0.001)
    assert equal_slot_alpha(3.50, 7) == pytest.approx(0.740, abs=0.001)
    with pytest.raises(ValueError, match="tau: got 9"):
        equal_slot_alpha(9, 7)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_the_70b_example():
    model = Roofline(params=70e9, bytes_per_weight=2, **H100)
    assert model.ridge == pytest.approx(295, abs=0.5)
    assert 1e3 * model.memory_seconds == pytest.approx(42, abs=0.5)
    assert 1e3 * model.compute_seconds(1) == pytest.approx(0.14, abs=0.005)
    assert model.tokens_at_ridge == pytest.approx(295, abs=0.5)
    assert model.free_positions == 294
    assert model.v(7) == 1.0 and model.v(294) == 1.0


def test_load_spends_the_free_positions_and_context_keeps_some():
    busy = Roofline(params=70e9, bytes_per_weight=2, concurrency=64, **H100)
    assert busy.free_positions == 3
    assert busy.v(3) == 1.0 and busy.v(7) == pytest.approx(8 * 64 / 295.2, abs=0.01)
    full = Roofline(params=70e9, bytes_per_weight=2, concurrency=1024, **H100)
    assert full.free_positions == 0 and full.v(7) == pytest.approx(8.0)  # compute-bound: v = gamma + 1
    long = Roofline(params=70e9, bytes_per_weight=2, concurrency=64, context=32768, kv_bytes_per_token=327680, **H100)
    assert long.memory_seconds == pytest.approx((140e9 + 64 * 32768 * 327680) / 3.35e12)
    assert long.free_positions > 20
    # compute-bound speculation loses whatever alpha is
    assert make_plan(Point(alpha=0.99, c=0.05, v=full.v), longest=32).best_gamma == 0


@pytest.mark.parametrize(
    "name, block, head, thin, eagle, eagle_32k",
    [
        ("SmolLM2-135M", 0.35, 0.66, 0.16, 1.74, 1.22),
        ("Qwen3-0.6B", 0.40, 0.46, 0.11, 2.10, 0.66),
        ("Qwen3-4B", 0.23, 0.07, None, 0.91, 0.38),
        ("Qwen3-8B", 0.22, 0.04, None, 0.82, 0.37),
        ("Qwen3-14B", 0.18, 0.02, None, 0.61, 0.30),
    ],
)
def test_c_from_weight_bytes(name, block, head, thin, eagle, eagle_32k):
    shape = SHAPES[name]
    c_block, c_step = c_from_sizes(shape)
    assert c_block == pytest.approx(block, abs=0.0055)
    assert 7 * c_step == pytest.approx(head, abs=0.0055)
    if thin is not None:
        assert 7 * c_from_sizes(shape, rank=64)[1] == pytest.approx(thin, abs=0.0055)
    assert 7 * c_eagle3_from_sizes(shape) == pytest.approx(eagle, abs=0.0055)
    assert 7 * c_eagle3_from_sizes(shape, draft_vocab=32000) == pytest.approx(eagle_32k, abs=0.0055)


def test_the_paper_targets_predicted():
    c_block, c_step = c_from_sizes(SHAPES["Qwen3-8B"])
    for tau, expected in ((5.65, 4.50), (5.28, 4.20), (3.50, 2.78)):
        assert eq.speedup_parallel(tau, 7, c_block=c_block, c_step=c_step, v=1.0) == pytest.approx(expected, abs=0.01)
    c_block, c_step = c_from_sizes(SHAPES["Qwen3-4B"])
    for tau, expected in ((5.57, 4.29), (5.12, 3.94), (3.49, 2.69)):
        assert eq.speedup_parallel(tau, 7, c_block=c_block, c_step=c_step, v=1.0) == pytest.approx(expected, abs=0.01)
    with pytest.raises(ValueError, match="draft_vocab: got 200000, allowed: 1 to 151936"):
        c_from_sizes(SHAPES["Qwen3-4B"], draft_vocab=200000)


def test_costs_from_sizes_on_the_command_line():
    sizes = {"target_params": "8B", "bandwidth": 3350.0, "peak": 989.0}
    inputs = command.Inputs(alpha=0.8, drafter_params="0.4B", **sizes)
    point, _ = command.make_point(inputs, command.make_roofline(inputs))
    assert point.c == pytest.approx(0.05)
    assert make_plan(point).best_gamma == 8
    inputs = command.Inputs(alpha=0.8, drafter_params="1.6B", head_params="80M", concurrency=256, **sizes)
    point, _ = command.make_point(inputs, command.make_roofline(inputs))
    assert point.block(1) == pytest.approx(0.2) and point.c_step == pytest.approx(0.01)
    assert point.block(7) == pytest.approx(
        0.2 * 7 * 256 / 295.2, rel=0.01
    )  # a block of 7 x 256 tokens leaves the memory-bound side
    assert point.v(7) == pytest.approx(8 * 256 / 295.2, rel=0.01)
    assert point.c_hat == pytest.approx(1.68 / 8)


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def report():
    return build_report(**sample_parts((1, 4)), training=None)


def test_cells_of_a_report(report):
    rows = plan_cells(report)
    assert len(rows) == len(report["cells"]) == 16
    for row, cell in zip(rows, report["cells"], strict=True):
        tokens = eq.expected_tokens_per_slot(cell["acceptance_per_slot"])
        assert tokens == pytest.approx(cell["tau"])
        costs = {k: COST[k] for k in ("c_block", "c_step", "v", "overhead", "plain_overhead")}
        decode = eq.speedup_parallel(tokens, 7, **costs)
        assert row["plan"].speedup[7] == pytest.approx(decode)
        assert row["predicted"] == pytest.approx(eq.with_prefill(decode, cell["prefill_share"], cell["prefill_ratio"]))
        assert row["measured"] == cell["speedup"] and row["gamma"] == 7
        assert eq.expected_tokens(row["alpha"], 7) == pytest.approx(cell["tau"])
        assert row["plan"].best_speedup >= row["plan"].speedup[7]
        assert row["predicted_best"] == pytest.approx(max(row["request_speedup"]))
    assert {row["domain"] for row in rows} == set(DOMAINS)
    # at concurrency 1 and T = 0 the report's own prediction is the same number
    assert rows[0]["predicted"] == pytest.approx(report["cells"][0]["predicted_speedup"])


def test_verify_cost_takes_the_curves_shape_through_the_points_level():
    curve = [{"tokens": w, "v": v} for w, v in ((1, 1.0), (2, 0.98), (5, 1.2), (8, 1.5), (16, 2.0))]
    v, reach = verify_cost({"gamma": 7, "v": 2.0}, curve)
    assert reach == 15
    assert [v(g) for g in (0, 1, 4, 7, 15)] == pytest.approx([1.0, 1.0, 1.4, 2.0, 3.0])
    v, reach = verify_cost({"gamma": 4, "v": 1.2}, [])
    assert reach == 4 and v(2) == pytest.approx(1.1)


def test_cells_that_lack_fields_keep_their_measurement(report):
    del report["cost"]["points"]
    report["cells"][0]["acceptance_per_slot"] = [0.5, None, None]
    report["cells"][1]["acceptance_per_slot"] = []
    report["cells"][2] = {"domain": "chat", "speedup": 1.5}
    rows = plan_cells(report)
    assert rows[0]["plan"].gammas == [0, 1]
    assert rows[1]["plan"] is None and rows[1]["missing"] == "acceptance per slot"
    assert rows[2]["measured"] == 1.5 and rows[2]["plan"] is None


def grid_cell(concurrency, temperature=0.0, costs=(0.2, 0.01, 1.1, 0.05, 0.04), acceptance=(0.8, 0.7, 0.6, 0.5)):
    """A cell of grid.json whose cycles follow the equation exactly, at 10 ms a target pass."""
    c_block, c_step, slope, overhead, plain_overhead = costs

    def side(gamma):
        tokens = eq.expected_tokens_per_slot(acceptance[:gamma])
        v = 1.0 + (slope - 1.0) * gamma
        parts = {"draft": c_block, "head": c_step * gamma, "verify": v, "rest": 0.75 * overhead, "schedule": 0.25 * overhead}
        whole = sum(parts.values())
        return {
            "tau": tokens, "cycle_ms": 10.0 * whole, "time_split": {k: x / whole for k, x in parts.items()},
            "speedup": tokens * (1.0 + plain_overhead) / whole, "acceptance_per_slot": list(acceptance[:gamma]),
        }  # fmt: skip

    plain = {"draft": 0.0, "head": 0.0, "verify": 1.0, "rest": plain_overhead, "schedule": 0.0}
    sides = {f"fixed-{g}": side(g) for g in (1, 2, 4)} | {"scheduled": {"speedup": 1.9}}
    sides["plain"] = {
        "speedup": 1.0, "tau": 1.0, "cycle_ms": 10.0 * (1 + plain_overhead), "acceptance_per_slot": [],
        "time_split": {k: x / (1 + plain_overhead) for k, x in plain.items()},
    }  # fmt: skip
    where = {"domain": "mixed", "temperature": temperature, "concurrency": concurrency, "context": 140, "context_setting": 128}
    return where | {"sides": sides, "speedup": 1.9}


def test_cells_of_a_grid_are_planned_from_the_sides_own_cycles():
    cell = grid_cell(1)
    [row] = plan_cells({"cells": [cell]}, source="grid")
    for gamma in (1, 2, 4):
        assert row["plan"].speedup[gamma] == pytest.approx(cell["sides"][f"fixed-{gamma}"]["speedup"])
    assert row["measured_by_gamma"] == {0: 1.0} | {g: cell["sides"][f"fixed-{g}"]["speedup"] for g in (1, 2, 4)}
    assert row["gamma"] == max(row["measured_by_gamma"], key=row["measured_by_gamma"].get)
    assert row["predicted"] == pytest.approx(row["measured"])
    assert row["scheduled"] == 1.9
    assert row["point"]["v"] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])


def test_a_grid_cell_where_plain_wins():
    [row] = plan_cells({"cells": [grid_cell(16, costs=(0.9, 0.1, 1.9, 0.2, 0.0), acceptance=(0.3, 0.2, 0.1, 0.1))]})
    assert (row["gamma"], row["measured"], row["plan"].best_gamma, row["predicted"]) == (0, 1.0, 0, 1.0)
    cell = grid_cell(2)
    del cell["sides"]["plain"]["time_split"]
    [row] = plan_cells({"cells": [cell]})
    assert row["plan"] is None and row["missing"] == "costs" and row["scheduled"] == 1.9


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_point_on_the_terminal_and_as_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    code, out, err = call(["--alpha", 0.8, "--c", 0.05, "--json", file], capsys)
    assert code == 0 and not err
    assert "gamma 8, S 3.09" in out and "gamma 6 to 11" in out
    assert "1/c = 20.00" in out and "1/(1-alpha) = 5.00" in out
    assert "lowest: 0.050 at gamma 1" in out
    found = json.loads(file.read_text())
    assert found["plan"]["best_gamma"] == 8 and found["plan"]["region"] == [6, 11]
    assert found["inputs"]["alpha"] == 0.8 and found["roofline"] is None


def test_the_roofline_on_the_terminal(capsys):
    code, out, _ = call(["--target-params", "70B", "--bandwidth", 3350, "--peak", 989], capsys)
    assert code == 0
    assert "41.8 ms of traffic, 0.14 ms of arithmetic" in out
    assert "295 FLOP/byte" in out and "294 speculative per request" in out


def test_per_slot_and_parallel_on_the_terminal(tmp_path, capsys):
    file = tmp_path / "plan.json"
    arguments = ["--acceptance", "0.9,0.8,0.7", "--c-block", 0.2, "--c-step", 0.01, "--v", "3:1.3", "--json", file]
    code, out, _ = call(arguments, capsys)
    assert code == 0 and "3 slots, c_block 0.2, c_step 0.01" in out
    plan = json.loads(file.read_text())["plan"]
    tokens = 1 + 0.9 + 0.72 + 0.504
    assert plan["tokens"][3] == pytest.approx(tokens) and plan["speedup"][3] == pytest.approx(tokens / 1.53)


def test_a_report_on_the_terminal(report, tmp_path, capsys):
    write_report(report, tmp_path)
    (tmp_path / "grid.json").write_text(json.dumps({"cells": [grid_cell(c, t) for t in (0.0, 1.0) for c in (1, 4)]}))
    file, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    code, out, err = call(["--report", tmp_path, "--json", file, "--plot", plot], capsys)
    assert code == 0 and not err
    assert "synthetic-target" in out and "rewrite" in out and "mixed" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    rows = json.loads(file.read_text())["cells"]
    assert [row["source"] for row in rows] == ["report"] * 16 + ["grid"] * 4
    assert rows[0]["plan"]["speedup"][7] == pytest.approx(plan_cells(report)[0]["plan"].speedup[7])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert set(read_measurements(tmp_path)) == {"report", "grid"}
    assert set(read_measurements(tmp_path / "grid.json")) == {"grid"}


def test_four_figures_and_a_plot(tmp_path, capsys):
    plot = tmp_path / "s.svg"
    code, out, err = call(["--figures", tmp_path / "figs", "--alpha", 0.8, "--c", 0.05, "--plot", plot], capsys)
    assert code == 0 and not err
    for name in ("roofline", "speedup_over_gamma", "best_speedup", "ceiling_gap"):
        assert (tmp_path / "figs" / f"{name}.png").stat().st_size > 20_000
        assert (tmp_path / "figs" / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--alpha: not given, allowed: --alpha or --acceptance with costs, --report, --figures, or sizes"),
        (["--alpha", 1.2, "--c", 0.1], "--alpha: got 1.2, allowed: 0 to 1"),
        (["--alpha", "nan", "--c", 0.1], "--alpha: got nan, allowed: 0 to 1"),
        (["--alpha", 0.5], "--c: not given, allowed: --c, --c-block with --c-step, or --drafter-params with --target-params"),
        (["--alpha", 0.5, "--c", -0.1], "--c: got -0.1, allowed: at least 0"),
        (["--alpha", 0.5, "--c", 0.1, "--c-block", 0.1], "--c-block: got it beside --c, allowed: one of the two"),
        (
            ["--alpha", 0.5, "--c-step", 0.1],
            "--c-step: got it without --c-block, allowed: both (parallel), or --c (sequential)",
        ),
        (["--acceptance", "0.5,1.5", "--c", 0.1], "--acceptance: got '1.5' for slot 2, allowed: 0 to 1, separated by commas"),
        (
            ["--acceptance", "0.5,0.4", "--c", 0.1, "--max-gamma", 3],
            "--max-gamma: got 3, allowed: 1 to 2 (slots of --acceptance: 2)",
        ),
        (
            ["--alpha", 0.5, "--c", 0.1, "--v", "4:x"],
            "--v: got '4:x', allowed: gamma:value pairs with commas, such as 4:1.06,7:1.11",
        ),
        (["--alpha", 0.5, "--c", 0.1, "--v", "4:1.1,4:1.2"], "--v: got a gamma twice, allowed: one value each"),
        (
            ["--alpha", 0.5, "--c", 0.1, "--v", "4:1.1", "--max-gamma", 9],
            "--max-gamma: got 9, allowed: 1 to 4 (last gamma of --v: 4)",
        ),
        (
            ["--target-params", "7X", "--bandwidth", 100, "--peak", 1],
            "--target-params: got '7X', allowed: a number of weights, such as 135e6, 135M or 70B",
        ),
        (
            ["--target-params", "7B", "--peak", 1],
            "--bandwidth: not given, allowed: --target-params with --bandwidth GB/s and --peak TFLOP/s",
        ),
        (["--target-params", "7B", "--peak", 0, "--bandwidth", 9], "--peak: got 0, allowed: above 0"),
        (["--alpha", 0.5, "--c", 0.1, "--within", 1], "--within: got 1, allowed: 0 to below 1"),
        (["--report", "nowhere"], "--report: nowhere does not exist, allowed: a report.json, a grid.json, or their folder"),
        (["--alpha", 0.5, "--c", 0.1, "--plot", "x.gif"], "--plot: got x.gif, allowed: a name that ends in .png, .svg or .pdf"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    code, _, err = call(arguments, capsys)
    assert code == 2
    assert err == [f"error: {message}"]


def test_files_that_are_no_reports(tmp_path, capsys):
    file = tmp_path / "grid.json"
    for text, message in (("[1]", "is a list or a number"), ("{}", "has no cells"), ("{", "cannot be read")):
        file.write_text(text)
        code, _, [line] = call(["--report", file], capsys)
        assert code == 2 and message in line and line.startswith("error: --report")
    file.unlink()
    code, _, [line] = call(["--report", tmp_path], capsys)
    assert code == 2 and "no report.json or grid.json" in line


def test_plan_loads_no_torch():
    probe = (
        "import sys\nfrom draftsmith.cli.app import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print('torch' if 'torch' in sys.modules else 'light')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, "plan", "--alpha", "0.8", "--c", "0.05"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "light", done.stderr


def test_the_table_keeps_its_marks_when_it_is_long():
    from draftsmith.cli.plan_table import shown_gammas

    plan = make_plan(Point(alpha=0.99, c=0.005))
    shown = shown_gammas(plan, 26)
    assert {0, plan.best_gamma, *plan.region} <= set(shown) and len(shown) <= 26
    assert math.isfinite(plan.best_speedup) and plan.best_gamma > 60
