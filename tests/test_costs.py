"""The cost table: interpolation, monotone tables, files, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from draftsmith.runtime.costs import CostTable, monotone

HERE = {"hardware": "box, 2 cores", "dtype": "bfloat16", "target": "tiny"}


def table(**identity):
    return CostTable.from_functions(
        draft=lambda n, g, c: 0.1 * n + (1.0 + 0.5 * n + 0.2 * n * g + 0.001 * n * c if g else 0.0),
        verify=lambda r, t, c: 10.0 + 0.3 * t + 0.002 * r * c,
        rest=lambda t: 0.2 + 0.1 * t,
        slots=(0, 1, 3, 7),
        **(HERE | identity),
    )


def test_linear_costs_are_reproduced_between_and_beyond_the_grid_points():
    costs = table()
    for rows, context, slots in ((1, 128, 1), (3, 500, 2), (16, 4096, 7), (5, 3000, 5), (20, 5000, 9)):
        tokens = rows * (1 + slots)
        assert costs.verify_ms(rows, tokens, context) == pytest.approx(10 + 0.3 * tokens + 0.002 * rows * context)
        drafting = 1.0 + 0.6 * rows + 0.2 * rows * slots + 0.001 * rows * context
        assert costs.draft_ms(rows, slots, context) == pytest.approx(drafting)
        assert costs.rest_ms(tokens, False, rows) == pytest.approx(0.2 + 0.1 * tokens)
        assert costs.rest_ms(tokens, True) == pytest.approx(0.2 + 0.1 * tokens)
    assert costs.verify_ms(4, 4, 10) == costs.verify_ms(4, 4, 128)  # below the first context nothing is known
    assert costs.draft_ms(0, 5, 128) == 0.0


def test_a_cycle_is_the_sum_of_its_parts():
    costs = table()
    assert costs.cycle_ms(4, 0, 128, hot=False) == pytest.approx(0.4 + 10 + 1.2 + 1.024 + 0.6)
    whole = costs.draft_ms(4, 3, 1024) + costs.verify_ms(4, 16, 1024) + costs.rest_ms(16, True, 4)
    assert costs.cycle_ms(4, 3, 1024, hot=True) == pytest.approx(whole)
    part = costs.draft_ms(1, 3, 1024) + costs.draft_ms(3, 0, 1024) + costs.verify_ms(4, 6, 1024) + costs.rest_ms(6, False, 4)
    assert costs.cycle_ms(4, 3, 1024, hot=False, drafted=1, tokens=6) == pytest.approx(part)
    passes, drafts = costs.pass_curve(4, 1024, False, 28), costs.draft_table(4, 7, 1024, False)
    assert passes.shape == (29,) and drafts.shape == (5, 8)
    for drafted, slots, extra in ((4, 3, 12), (1, 3, 2), (2, 7, 14), (0, 0, 0)):
        expected = costs.cycle_ms(4, slots, 1024, hot=False, drafted=drafted, tokens=4 + extra)
        assert drafts[drafted, slots] + passes[extra] == pytest.approx(expected)
    assert (drafts[0] == drafts[0, 0]).all() and (drafts[:, 0] == drafts[0, 0]).all()


def test_monotone():
    noisy = np.array([[1.0, 3.0, 2.0], [2.0, 2.0, 5.0]])
    fitted = monotone(noisy)
    assert (np.diff(fitted, axis=0) >= 0).all() and (np.diff(fitted, axis=1) >= 0).all()
    assert fitted[0].tolist() == [1.0, 2.25, 2.25]  # noise moves both ways, not up alone
    rising = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(monotone(rising), rising)


def test_round_trip(tmp_path):
    costs = table(drafter="abc").with_acceptance({"greedy": [0.7, 0.6]})
    path = costs.save(tmp_path / "made" / "costs.json")
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]
    assert CostTable.load(path, **HERE, threads=1, drafter="abc") == costs


@pytest.mark.parametrize("key", ["hardware", "dtype", "target", "threads", "drafter"])
def test_a_table_of_another_setting_is_refused(tmp_path, key):
    path = table(drafter="abc").save(tmp_path / "costs.json")
    wanted = HERE | {"threads": 1, "drafter": "abc"}
    with pytest.raises(ValueError, match=rf"{key}.*other.*draftsmith profile"):
        CostTable.load(path, **(wanted | {key: "other"}))


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"schema": 99}', '{"schema": 1, "rows": [1]}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="costs"):
        CostTable.load(path, **HERE)
    with pytest.raises(ValueError, match="missing.json.*draftsmith profile"):
        CostTable.load(tmp_path / "missing.json", **HERE)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [2, 1]}, {"slots": [1, 2, 3, 7]}, {"contexts": []}, {"verify": [[1.0]]}, {"draft": {}},
        {"rest": {"greedy": []}},
    ],
)  # fmt: skip
def test_a_broken_table_is_refused(tmp_path, change):
    path = table().save(tmp_path / "costs.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="costs: "):
        CostTable.load(path, **HERE)
