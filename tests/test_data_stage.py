"""The data stage as a whole: prompts to rows, said and reused."""

import json

import pytest
from tiny_chat import chat_target

from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.source import Prompt
from draftsmith.data.stage import prepare

ROWS = [{"id": f"p{i}", "domain": "chat", "prompt": f"w{i} hi"} for i in range(8)]


@pytest.fixture(scope="module")
def target():
    return chat_target()


def config(tmp_path, rows=None, **changed):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in (rows or ROWS)))
    settings = {"max_length": 48, "generation": GenerationConfig(max_new_tokens=10, batch_size=4), **changed}
    return DataConfig(prompts=str(path), **settings)


def test_prompts_become_rows_and_the_second_run_reuses_them(target, tmp_path):
    said = []
    first = prepare(config(tmp_path), target, tmp_path / "out", name="tiny", say=said.append, progress=False)
    assert len(first.rows) + sum(first.tokenised.dropped.values()) == 8
    by_id = {row["id"]: row for row in first.answers.rows}
    for row in first.rows:
        assert row.input_ids == by_id[row.id]["prompt_ids"] + by_id[row.id]["answer_ids"]
        assert row.loss_mask == [False] * len(by_id[row.id]["prompt_ids"]) + [True] * len(by_id[row.id]["answer_ids"])
    assert any("8 generated" in line for line in said)
    said.clear()
    second = prepare(config(tmp_path), target, tmp_path / "out", name="tiny", say=said.append, progress=False)
    assert second.rows == first.rows
    assert any("all 8 reused" in line for line in said)
    tokens = sum(len(row.input_ids) for row in first.rows)
    assert said[-1].startswith(f"rows: {len(first.rows)} with {tokens} tokens, {first.num_supervised} supervised (")


def test_heldout_prompt_in_training_stops_before_anything_is_generated(target, tmp_path):
    heldout = [Prompt("h1", "chat", ("W3, HI!",))]
    with pytest.raises(ValueError, match=r"\(p3 = h1\)"):
        prepare(config(tmp_path), target, tmp_path / "out", name="tiny", heldout=heldout, say=lambda t: None, progress=False)
    assert not (tmp_path / "out").exists()


def test_all_rows_truncated_away_is_an_error(target, tmp_path):
    rows = [{"prompt": "hi " * 60}, {"prompt": "ok " * 60}]
    with pytest.raises(ValueError, match="max_length=48: the prompt fills the window in all 2 rows"):
        prepare(config(tmp_path, rows), target, tmp_path / "out", name="tiny", say=lambda t: None, progress=False)


def test_given_answers_are_used_and_warned_about(target, tmp_path):
    rows = [{"prompt": "hi", "completion": "yes ok"}, {"prompt": "w1", "completion": "w2"}]
    said = []
    given = config(tmp_path, rows, answers="given")
    out = prepare(given, target, tmp_path / "out", name="tiny", say=said.append, progress=False)
    assert out.answers is None
    assert [row.num_supervised for row in out.rows] == [3, 2]
    assert any("not the target's own" in line for line in said) and any("no generation tags" in line for line in said)
    with pytest.raises(ValueError, match=r"'p0' brings no answer"):
        prepare(config(tmp_path, answers="given"), target, tmp_path / "o2", name="tiny", say=lambda t: None, progress=False)
