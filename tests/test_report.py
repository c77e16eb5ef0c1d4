"""The report: schema 1 in full, self-contained HTML, losses shown and marked, curves out of the training log."""

import json
import re

import pytest
from report_sample import sample_cell, sample_parts, write_history

from draftsmith.eval import figures
from draftsmith.eval.report import build_report, headline, read_history, read_report, render_html, summarise, write_report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    history = read_history(write_history(tmp_path_factory.mktemp("log") / "train.jsonl"))
    return build_report(**sample_parts(concurrencies=(1, 4)), training=history)


@pytest.fixture(scope="module")
def html(report):
    return render_html(report)


def test_schema_1_is_complete_and_survives_the_file(report, tmp_path):
    path = write_report(report, tmp_path)
    assert path == tmp_path / "report.html" and path.stat().st_size > 10_000
    found = read_report(tmp_path / "report.json")
    assert found == json.loads(json.dumps(report))
    assert found["schema"] == 1
    assert {"hardware", "threads", "versions", "dtype"} <= set(found["environment"])
    assert {"c_block", "c_step", "v"} <= set(found["cost"])
    assert {"greedy_prompts", "greedy_mismatches", "sampling_p_value"} <= set(found["lossless"])
    for cell in found["cells"]:
        assert set(cell["time_split"]) == {"draft", "head", "verify", "rest"}
        assert len(cell["speedup_interval"]) == 2
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("path", ["cells.0.tau", "cells.3.time_split", "cost.v", "lossless.sampling_p_value", "environment"])
def test_a_missing_key_is_named(path, tmp_path):
    broken = json.loads(json.dumps(build_report(**sample_parts())))
    *outer, last = path.split(".")
    place = broken
    for key in outer:
        place = place[int(key) if key.isdigit() else key]
    del place[last]
    (tmp_path / "report.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=last):
        read_report(tmp_path / "report.json")


def test_no_cells_and_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cells"):
        build_report(**{**sample_parts(), "cells": []})
    (tmp_path / "report.json").write_text("not json")
    with pytest.raises(ValueError, match="not a readable report"):
        read_report(tmp_path / "report.json")


def test_not_a_number_never_reaches_the_file(tmp_path):
    parts = sample_parts()
    parts["cells"][0]["tau"] = float("nan")
    with pytest.raises(ValueError):
        write_report(build_report(**parts), tmp_path)
    assert not (tmp_path / "report.json").exists()


def test_html_is_self_contained(html):
    for source in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert source.startswith("data:image/svg+xml;base64,")
    assert not re.search(r"https?://|<script|@import|url\(", html)
    assert html.count("<img") == 5


def test_losses_are_marked_and_never_hidden(report, html):
    losing = [c for c in report["cells"] if c["speedup"] < 1.0]
    assert losing
    assert html.count('<tr class="loses">') == len(losing)
    for cell in report["cells"]:
        assert f"{cell['speedup']:.2f}&times;" in html
    assert headline(report)["losing"] == len(losing)
    assert f"{len(losing)} of {len(report['cells'])}" in html
    assert {figures.state_colour(c) for c in losing} == {figures.LOSS}
    open_cell = sample_cell("code", 0.0) | {"speedup": 1.02, "speedup_interval": [0.97, 1.08]}
    assert figures.state_colour(open_cell) == figures.OPEN


def test_every_caption_names_the_operating_point(html):
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html, re.S)
    captions += re.findall(r'<p class="note">(Speedup|Measured apart)(.*?)</p>', html, re.S)
    assert len(captions) == 7
    where = [c if isinstance(c, str) else c[1] for c in captions]
    named = [c for c in where if "INVENTED TEST DATA, 2 threads, bfloat16, gamma 7" in c]
    assert len(named) == 6  # all but the training curves, which no serving setting bears on


def test_text_from_recipes_is_escaped(html):
    assert "<b>not bold</b>" not in html
    assert "&lt;b&gt;not bold&lt;/b&gt;" in html


def test_failed_losslessness_is_loud():
    parts = sample_parts()
    parts["lossless"] |= {"greedy_mismatches": 3, "verdict": False}
    page = render_html(build_report(**parts))
    assert "NOT lossless" in page and 'class="verdict bad"' in page


def test_summary_is_per_setting(report):
    found = summarise(report["cells"])
    assert len(found) == 4
    greedy = next(s for s in found if s["temperature"] == 0.0 and s["concurrency"] == 1)
    cells = [c["speedup"] for c in report["cells"] if c["temperature"] == 0.0 and c["concurrency"] == 1]
    assert min(cells) < greedy["mean_speedup"] < max(cells)
    assert greedy["mean_speedup"] ** 4 == pytest.approx(cells[0] * cells[1] * cells[2] * cells[3])
    assert greedy["best_speedup"] == max(cells) and greedy["worst_speedup"] == min(cells)


def test_one_cell_without_extras_still_renders():
    cell = sample_cell("code", 0.0)
    for key in ("decode_speedup", "reached_per_slot", "cycle_ms", "plain_step_ms", "prompts", "context_setting"):
        del cell[key]
    cell["predicted_speedup"] = None
    parts = sample_parts() | {
        "cells": [cell],
        "cost": {"c_block": 0.3, "c_step": 0.02, "v": 1.3},
        "recipe": None,
        "settings": None,
    }
    parts["lossless"] = {"greedy_prompts": 0, "greedy_mismatches": 0, "sampling_p_value": None}
    page = render_html(build_report(**parts))
    assert page.count("<img") == 2
    assert "losslessness undecided" in page


def test_history_merges_a_resumed_run_thins_and_skips_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"step": s, "loss": float(s)} for s in range(1, 1501)] + [{"step": 1400, "loss": -1.0}, {"step": 1500, "eval/x": 2}]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 15')
    history = read_history(path)
    assert history["steps"] == 1500
    points = history["series"]["loss"]
    assert len(points) <= 601 and points[0] == [1, 1.0] and points[-1] == [1500, 1500.0]
    assert history["series"]["eval/x"] == [[1500, 2.0]]
    assert [1400, 1400.0] not in points
    assert read_history(tmp_path / "absent.jsonl") is None


def test_smoothing_keeps_a_constant_and_short_curves():
    assert figures.smooth([2.0] * 100) == pytest.approx([2.0] * 100)
    assert figures.smooth([1.0, 5.0, 3.0]) == [1.0, 5.0, 3.0]
    noisy = figures.smooth([i % 2 for i in range(300)])
    assert max(noisy[20:280]) - min(noisy[20:280]) < 0.2
