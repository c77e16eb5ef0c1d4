"""What the doctor's report says: figures against plain counting, the exact text of rows, the page."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from doctor_world import World
from rich.console import Console
from tiny_chat import TAGGED

from draftsmith.data import doctor, doctor_report
from draftsmith.data.chat import ChatFormat, TokenRow
from draftsmith.data.coverage import anchor_facts, folds, held_out_coverage
from draftsmith.data.findings import runs
from draftsmith.data.loops import Loop, find_loop


def test_loops_by_period():
    assert find_loop([1, 2, 3] * 6) == Loop(0, 18, 3)
    assert find_loop([5, 6, 7, *[1, 2] * 9, 8]) == Loop(3, 18, 2)
    assert find_loop([4] * 16) == Loop(0, 16, 1)
    assert find_loop([4] * 15) is None
    assert find_loop(list(range(100))) is None
    assert find_loop([*range(10), *range(10)], tokens=20) is None, "twice is not three times"
    assert find_loop([*range(10), *range(10)], tokens=20, repeats=2) == Loop(0, 20, 10)
    assert find_loop([]) is None


@pytest.mark.parametrize("mask", ["0111100110", "0011111111", "011011"])
def test_anchor_facts_agree_with_enumeration(mask):
    flags = [char == "1" for char in mask]
    row = TokenRow("r", "chat", list(range(len(mask))), flags)
    places = [i for i in range(len(mask) - 1) if flags[i] and flags[i + 1]]
    for share, block in [(0.25, 2), (0.5, 3), (1.0, 1)]:
        facts = anchor_facts([row], share, block)
        budget = min(len(places), math.ceil(share * sum(flags)))
        assert (facts.possible, facts.drawn) == (len(places), budget)
        labels = []
        for drawn in itertools.combinations(places, budget):
            trained = set()
            for anchor in drawn:
                for k in range(block):
                    if anchor + k + 1 >= len(mask) or not flags[anchor + k + 1]:
                        break
                    trained.add(anchor + k + 1)
            labels.append(len(trained) / sum(flags))
        assert facts.labels == pytest.approx(sum(labels) / len(labels))


def test_held_out_coverage_is_of_other_prompts():
    rows = [TokenRow(f"a{i}#{j}", "x" if i % 2 else "y", [1, 10 + i], [True, True]) for i in range(6) for j in range(2)]
    found = held_out_coverage(folds(rows), 3, vocab_size=40, required=[2])
    assert found[""] == 0.5, "every row shares id 1 with the others, and has an id of its own"
    assert set(found) == {"", "x", "y"}
    assert held_out_coverage(folds(rows[:2]), 3, vocab_size=40, required=[2]) == {}, "samples of one prompt are not unseen"


def test_histogram_holds_every_value():
    found = doctor.histogram([3, 3, 9, 100])
    assert sum(found["counts"]) == 4 and found["edges"][0] == 3 and found["edges"][-1] > 100
    assert (found["min"], found["max"], found["mean"]) == (3, 100, 28.75)
    assert doctor.histogram([7]) | {"mean": 7} == {
        "edges": [7, 8], "counts": [1], "min": 7, "median": 7, "p95": 7, "max": 7, "mean": 7
    }  # fmt: skip
    assert doctor.histogram([]) == {}


def test_languages_are_guessed():
    assert doctor.language_of("The cat is in the house and it sleeps.") == "English"
    assert doctor.language_of("Der Hund ist nicht auf dem Sofa und schläft.") == "German"
    assert doctor.language_of("Кошка спит на диване") == "Cyrillic script"
    assert doctor.language_of("x = 3") == "unclear"


@pytest.mark.target
def test_pieces_are_the_exact_text_of_a_real_row():
    from transformers import AutoTokenizer

    from draftsmith.models.config import TargetConfig
    from draftsmith.models.facts import resolve_target

    chat = ChatFormat(AutoTokenizer.from_pretrained(resolve_target(TargetConfig())))
    messages = [{"role": "user", "content": "Grüße, 你好 🙂?"}, {"role": "assistant", "content": "  Ça va 🤖🤖, naïve\n\tend."}]
    ids = chat.render(messages, generation_prompt=False)
    mask = [i > 20 for i in range(len(ids))]
    found = doctor.pieces(chat, TokenRow("r", "chat", ids, mask))
    assert "".join(text for text, _, _ in found) == chat.tokenizer.apply_chat_template(messages, tokenize=False)
    assert [token for _, _, token in found] == ids and [bool(flag) for _, flag, _ in found] == mask


def test_page_is_self_contained_and_colours_what_is_supervised(tmp_path):
    world = World(tmp_path, template=TAGGED)
    cache = {
        "hidden_size": 32, "num_taps": 2, "dtype": "bfloat16", "lse": True, "tokens_per_second": 10.0, "basis": "guess",
        "features": "cached",
    }  # fmt: skip
    subject = world.subject(draft_vocab_size=16)
    report = doctor.examine(subject, cache=cache, epochs=2.0)
    page = doctor_report.write(report, tmp_path / "out")
    html = page.read_text()
    assert "<script" not in html and "src=" not in html and "href=" not in html and "url(" not in html
    tokens = sum(len(row.input_ids) for row in subject.rows)
    assert report["cache"]["bytes"] == tokens * (32 * 3 * 2 + 8) and report["cache"]["seconds"] == tokens / 10
    eighth = doctor.cache_estimate(subject.rows, cache | {"storage": "int8"})  # two taps of 32 bytes and a scale each
    assert eighth["bytes"] == tokens * (2 * (32 + 4) + 32 * 2 + 8)
    assert len(report["samples"]) == 5 and html.count('<div class="text">') >= 5
    sample = report["samples"][0]
    start = html.index(f"<h3>{sample['id']}")
    text = html[start : html.index("</div>", start)]
    assert text.count('class="y"') == sample["supervised"] == 6
    assert json.loads((tmp_path / "out" / "doctor.json").read_text())["verdict"] == report["verdict"]
    with (tmp_path / "terminal").open("w") as file:
        doctor_report.show(report, page, Console(file=file, width=100))
    said = (tmp_path / "terminal").read_text()
    assert "supervised tokens coloured" in said and "doctor.html" in said and "16" in said


def test_answers_are_escaped_in_the_page(tmp_path):
    world = World(tmp_path, template=TAGGED)
    subject = world.subject()
    report = doctor.examine(subject)
    report["samples"][0]["pieces"][0] = ("<b>&", 1, 3)
    assert "&lt;b&gt;&amp;" in doctor_report.render_html(report)


def test_runs():
    assert runs([True, True, False, True]) == [(0, 2), (3, 4)] and runs([False]) == []
