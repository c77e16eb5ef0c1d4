"""The pure parts of benchmarks/answer_source.py: equal prompts and tokens, foreign texts, the line of the table."""

from __future__ import annotations

import pytest
from test_objectives_benchmark import load

from draftsmith.data.chat import TokenRow
from draftsmith.data.source import Prompt

load("_objectives_lab")  # what the lab imports by its plain name
lab, script = load("_answer_source_lab"), load("answer_source")


def row(key: str, answer: list[int], prompt: tuple[int, ...] = (1, 2)) -> TokenRow:
    return TokenRow(key, "chat", [*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def test_every_source_has_the_same_prompts_and_tokens():
    found = lab.equal_answers(
        {
            "target": [row("a", [5, 6, 7, 8]), row("b", [5, 6, 7]), row("c", [5, 6, 7]), row("d", [5])],
            "other": [row("d", [9, 9, 9]), row("b", [9, 9, 9, 9, 9]), row("a", [9, 9])],
        },
        shortest=2,
    )
    assert {name: [r.id for r in rows] for name, rows in found.items()} == {"target": ["a", "b"], "other": ["a", "b"]}
    assert [r.input_ids for r in found["target"]] == [[1, 2, 5, 6], [1, 2, 5, 6, 7]]
    assert [r.input_ids for r in found["other"]] == [[1, 2, 9, 9], [1, 2, 9, 9, 9]]
    assert [r.loss_mask for r in found["target"]] == [r.loss_mask for r in found["other"]]


def test_prompts_rendered_otherwise_are_refused_by_name():
    with pytest.raises(ValueError, match="'a': 'other' answered other token ids than 'target'"):
        lab.equal_answers({"target": [row("a", [5, 6])], "other": [row("a", [5, 6], prompt=(1, 3))]}, shortest=2)
    with pytest.raises(ValueError, match="no prompt has 9 answer tokens"):
        lab.equal_answers({"target": [row("a", [5, 6])]}, shortest=9)


def test_rows_of_several_answers_are_left_out():
    several = TokenRow("m", "chat", [1, 5, 5, 1, 5, 5], [False, True, True, False, True, True])
    found = lab.equal_answers({"target": [several, row("a", [5, 6])], "other": [several, row("a", [7, 8])]}, shortest=2)
    assert [r.id for r in found["target"]] == ["a"]


def test_prose_is_never_the_text_in_the_prompt():
    rows = [row(key, [5, 6, 7]) for key in "abc"]
    prompts = [Prompt(key, "rewrite", (turn,)) for key, turn in zip("abc", ("q", "Shorten: one", "q"), strict=True)]
    found = lab.prose_rows(rows, prompts, ["two", "one"], lambda text: [len(text), ord(text[0])], 99)
    assert [r.input_ids for r in found] == [[1, 2, 3, ord(c), 99] for c in ("t", "t", "o")]
    assert [r.num_supervised for r in found] == [3, 3, 3]


def test_a_line_holds_tau_and_its_difference_to_the_target():
    def run(committed: int) -> dict:
        pair = {"committed": [committed, committed], "cycles": [10, 10]}
        return {"rollouts_t1": pair, "rollouts_t0": pair, "replay_heldout": {**pair, "alpha": [0.5, 0.25]},
                "replay_validation": pair}  # fmt: skip

    line = script.row_of("weaker", [run(18), run(22)], [run(25), run(25)], {"coverage": 0.5})
    assert line["t1"]["value"] == 2.0 and line["own_validation"] == 2.0 and line["alpha"] == [0.5, 0.25]
    assert line["t1_difference"]["value"] == -0.5 and line["t1_difference"]["relative"]["value"] == pytest.approx(-0.2)
    assert line["t1_difference"]["by_seed"] == pytest.approx([-0.7, -0.3]) and line["coverage"] == 0.5
    base = script.row_of("target", [run(25), run(25)], [run(25), run(25)], {"coverage": 0.5})
    doctor = {name: {"target": {"refused": said, "distance": 0.16, "excess": 0.86}}
              for name, said in (("target", None), ("weaker", "no"))}  # fmt: skip
    shown = script.show({"table": [base, line], "doctor": doctor}).splitlines()
    assert "| 2.500 |  |" in shown[2] and shown[2].endswith("| accepted (D 0.16, +0.86 nats) |")
    assert "| 2.000 | -20.0 % [-28.0, -12.0] |" in shown[3] and shown[3].endswith("| refused (D 0.16, +0.86 nats) |")
