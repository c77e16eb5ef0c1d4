"""The measured cost table: shape, order and honesty on a tiny target, and the command."""

from __future__ import annotations

import pytest
import torch
from drafters import tiny_drafter

from draftsmith.eval.profile import drafter_hash, measure_costs
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.costs import CostTable
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.schedule import FixedLength, LoadAware
from tiny import tiny_model

GRID = {"rows": (1, 3), "contexts": (16, 64, 10_000), "slots": (1, 5), "passes": 1}
SETTING = {"target": "tiny", "dtype": "float32", "drafter": "none"}


@pytest.fixture(scope="module")
def parts():
    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=drafter.tap_layers)
    return decoder, lambda slots, limit: DSparkProposer(drafter, heads, slots=slots, max_context=limit, with_survival=True)


@pytest.fixture(scope="module")
def table(parts):
    return measure_costs(*parts, **SETTING, **GRID)


def test_the_table_has_every_point_and_never_falls(table):
    assert table.rows == [1, 3] and table.slots == [0, 1, 5] and table.contexts == [16, 64]  # 10,000 does not fit the target
    assert table.ragged is False and table.threads == torch.get_num_threads() and table.notes["backend"] == "torch"
    for context in (16, 64):
        for hot in (False, True):
            cycles = [table.cycle_ms(3, slots, context, hot=hot) for slots in (0, 1, 5)]
            assert 0 < cycles[0] < cycles[1] <= cycles[2]
    assert table.draft_ms(1, 0, 16) < table.draft_ms(1, 1, 16)  # keeping up is cheaper than drafting
    assert table.notes["samples"]["least"] >= 2


def test_the_table_can_be_stored_and_schedules_the_engine_it_came_from(parts, table, tmp_path):
    path = table.save(tmp_path / "costs.json")
    loaded = CostTable.load(path, hardware=table.hardware, dtype="float32", target="tiny")
    decoder, make = parts
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    requests = [Request(str(i), [5 + i, 7, 9, 11][: 2 + i], params) for i in range(3)]
    answers = {}
    for name, scheduler in (("plain", FixedLength(0)), ("scheduled", LoadAware(loaded))):
        engine = Engine(decoder, proposer=make(2, 64), scheduler=scheduler, slots=2, max_context=64)
        answers[name] = [c.token_ids for c in engine.run(requests)]
    assert answers["plain"] == answers["scheduled"]


def test_a_grid_that_does_not_fit_is_refused(parts):
    for change in ({"contexts": (10_000,)}, {"slots": (6,)}, {"rows": ()}):
        with pytest.raises(ValueError, match="profile: "):
            measure_costs(*parts, **SETTING, **(GRID | change))


def test_a_proposer_that_fails_is_not_measured(parts):
    class Failing(DSparkProposer):
        def propose(self, *arguments):
            raise RuntimeError("no")

    drafter, heads = tiny_drafter(tiny_model())
    make = lambda slots, limit: Failing(drafter, heads, slots=slots, max_context=limit)  # noqa: E731
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="profile: the proposer failed"):
        measure_costs(parts[0], make, **SETTING, **GRID)


def test_drafters_are_told_apart(tmp_path):
    hashes = set()
    for seed in (1, 1, 2):
        drafter, heads = tiny_drafter(seed=seed)
        hashes.add(drafter_hash(native.save(tmp_path / f"d{seed}", drafter, heads)))
    assert len(hashes) == 2
