"""`draftsmith data sources` and `data vocab`: what they print, and one line for what is wrong."""

import json

import pytest

from draftsmith.cli.app import main
from draftsmith.data.config import DataConfig
from draftsmith.data.listing import listing
from draftsmith.data.source import Prompt, select_prompts

TALK = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"},
    {"from": "human", "value": "r"},
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "p" / "a.jsonl",
        [{"id": "c1", "conversations": TALK}, {"prompt": "one", "completion": "1", "domain": "math"}],
    )
    write(tmp_path / "p" / "b.jsonl", [{"prompt": "one"}, {"turns": ["what is held out?"], "domain": "chat"}])
    return tmp_path


def test_facts_of_a_source(folder):
    found = listing(
        select_prompts(DataConfig(prompts=str(folder / "p"))), [Prompt("h", "chat", ("What is held out",))], near=0.6
    )
    (facts,) = found["sources"]
    assert facts["files"] == {str(folder / "p" / name): 2 for name in ("a.jsonl", "b.jsonl")}
    assert facts["schemas"] == {"sharegpt": 1, "prompt/completion": 1, "prompt": 1, "turns": 1}
    assert (facts["rows"], facts["used"], facts["turns"]) == (4, 3, {1: 3, 2: 1})
    assert (facts["system"], facts["tools"], facts["answers"], facts["cut"]) == (1, 0, 2, 0)
    assert facts["domains"] == {"other": 2, "math": 1, "chat": 1} and facts["examples"][0] == ("c1", "q")
    assert (found["found"], found["chosen"], found["equal"]) == (4, 3, 1)
    assert [pair[1] for pair in found["overlap"]] == ["h"]


def run(*arguments):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code


def recipe(folder, **data):
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"output": str(folder / "out"), "data": data}))
    return str(path)


def test_command_lists_sources_without_touching_the_output(folder, capsys):
    mix = [{"source": str(folder / "p"), "weight": 1}, {"source": "builtin", "weight": 3}]
    assert run("data", "sources", recipe(folder, prompts=mix)) == 0
    out = capsys.readouterr().out
    for text in (
        "sharegpt 1",
        "weight 3",
        "turns 3385",
        "c1: q",
        "12 of 3389 prompts used (1 duplicates",
        "none of them is one of",
    ):
        assert text in out, out
    assert not (folder / "out").exists()


def test_command_names_the_broken_row(folder, capsys):
    write(folder / "p" / "c.jsonl", [{"prompt": "x"}, {"messages": [{"role": "robot", "content": "x"}]}])
    assert run("data", "sources", recipe(folder, prompts=str(folder / "p"))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "c.jsonl:2: messages[0].role: 'robot' is not allowed; it must be one of" in error


def test_command_shows_an_evaluation_prompt_among_the_training_prompts(folder, capsys):
    assert run("data", "sources", recipe(folder, prompts="builtin:heldout", limit=5)) == 0
    assert "5 of them are also evaluation prompts" in capsys.readouterr().out


def test_vocab_without_answers_says_what_to_run(folder, capsys):
    assert run("data", "vocab", recipe(folder, prompts="builtin")) == 2
    error = capsys.readouterr().err
    assert "answers.jsonl: no answers yet; run `draftsmith data regenerate" in error and error.count("\n") == 1


@pytest.mark.target
def test_vocab_prints_coverage_by_size_temperature_and_domain(folder, capsys):
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    rows = [
        {
            "id": f"p{n}", "index": n, "domain": "code", "messages": talk, "answer_ids": [100 + n % 3] * 20 + [2],
            "finish_reason": "stop", "temperature": float(n % 2),
        }
        for n in range(12)
    ]  # fmt: skip
    from transformers import AutoTokenizer

    from draftsmith.models.config import TargetConfig
    from draftsmith.models.facts import resolve_target

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(TargetConfig()))
    for row in rows:
        out = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=True)
        row["prompt_ids"] = list(out["input_ids"])
    write(folder / "out" / "answers" / "answers.jsonl", rows)
    assert run("data", "vocab", recipe(folder, prompts="builtin")) == 0
    out = capsys.readouterr().out
    for text in (
        "12 answers with 252 tokens",
        "T=0",
        "T=1",
        "code",
        "1024",
        "100.0%",
        "1024 is the smallest size here that covers 99%",
    ):
        assert text in out, out
