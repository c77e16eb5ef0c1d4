"""The target answers the prompts: rows as served, resumable at any byte, never mixed with other settings."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_chat import TAGGED, chat_target

from draftsmith.data.chat import ChatFormat, DropReason, tokenise
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.regenerate import build_engine, make_jobs, regenerate
from draftsmith.data.source import Prompt
from draftsmith.runtime.engine import Completion

PROMPTS = [
    *(Prompt(f"p{i}", "chat", (f"w{i} hi w{2 * i}",)) for i in range(9)),
    Prompt("two", "math", ("hi", "w1 w2", "ok"), system="w5"),
    Prompt("three", "math", ("w7", "yes")),
]
CONFIG = DataConfig(max_length=64, generation=GenerationConfig(max_new_tokens=12, batch_size=4, seed=3))


@pytest.fixture(scope="module")
def target():
    return chat_target()


def run(target, folder, config=CONFIG, prompts=PROMPTS, **options):
    said = []
    options = {"name": "tiny", "progress": False, "say": said.append, **options}
    return regenerate(prompts, config, target, folder, **options), said


def greedy_reference(target, prompt_ids, limit):
    """Plain greedy decoding with the model alone, no cache."""
    ids = list(prompt_ids)
    for _ in range(limit):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt_ids) :]


def test_rows_are_the_targets_greedy_answers(target, tmp_path):
    config = replace(CONFIG, generation=replace(CONFIG.generation, temperature=0.0))
    answers, said = run(target, tmp_path / "a", config)
    chat = ChatFormat(target.tokenizer)
    assert [row["id"] for row in answers.rows] == [p.id for p in PROMPTS]
    assert answers.generated == 11 and answers.reused == 0
    for row, prompt in zip(answers.rows, PROMPTS, strict=True):
        assert row["prompt_ids"] == chat.render(row["messages"][:-1], generation_prompt=True)
        assert row["answer_ids"] == greedy_reference(target, row["prompt_ids"], 12)
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == 1 else "length")
        assert [m["content"] for m in row["messages"] if m["role"] == "user"] == list(prompt.turns)
        assert row["temperature"] == 0.0
    assert "11 generated" in said[-1]


def test_later_turns_stand_on_the_targets_own_answers(target, tmp_path):
    rows = {row["id"]: row for row in run(target, tmp_path / "a")[0].rows}
    two = rows["two"]
    assert [m["role"] for m in two["messages"]] == ["system"] + ["user", "assistant"] * 3
    for start, end in two["earlier_spans"]:
        said = two["prompt_ids"][start:end]
        assert target.tokenizer.decode(said, skip_special_tokens=True) in [m["content"] for m in two["messages"]]
    assert two["earlier_spans"]
    row = tokenise(two, target.tokenizer, 64)
    assert row.num_supervised == len(two["answer_ids"]) + sum(end - start for start, end in two["earlier_spans"])
    assert tokenise(two, target.tokenizer, 64, supervise="last").num_supervised == len(two["answer_ids"])


class Scripted:
    """Answers with given ids, one list a turn."""

    def __init__(self, answers):
        self.answers, self.prompts = list(answers), []

    def run(self, requests, on_commit):
        (request,) = requests
        self.prompts.append(request.prompt_ids)
        ids = self.answers.pop(0)
        for token in ids:
            on_commit(request, [token], None)
        return [Completion(request.id, ids, "stop", [], len(request.prompt_ids))]


def test_only_turns_that_the_template_gives_back_unchanged_are_supervised(target, tmp_path):
    unknown, yes, ok, end = 0, 6, 7, 1
    engine = Scripted([[yes, ok, end], [unknown, yes, end], [ok, end]])  # the text of the second answer loses its <unk>
    prompts = [Prompt("x", "chat", ("hi", "w1", "w2"))]
    row = run(target, tmp_path / "a", prompts=prompts, engine=engine)[0].rows[0]
    words = target.tokenizer.convert_ids_to_tokens(row["prompt_ids"])
    text = "user hi </s> assistant yes ok </s> user w1 </s> assistant yes </s> user w2 </s> assistant"
    assert words == text.split() and engine.prompts[-1] == row["prompt_ids"]
    assert row["earlier_spans"] == [[4, 7]]
    assert tokenise(row, target.tokenizer, 64).num_supervised == 3 + 2


class Interrupting:
    """An engine that is killed after a number of commits."""

    def __init__(self, engine, commits):
        self.engine, self.left = engine, commits

    def run(self, requests, on_commit):
        def counted(*args):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            on_commit(*args)

        return self.engine.run(requests, counted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_killed_again_and_again_equals_the_uninterrupted_run(target, tmp_path, temperature):
    config = replace(CONFIG, generation=replace(CONFIG.generation, temperature=temperature))
    whole = run(target, tmp_path / "whole", config)[0].rows
    path = tmp_path / "killed" / "answers.jsonl"
    kills = 0
    for commits in range(10, 400, 13):
        engine = Interrupting(build_engine(target, config), commits)
        try:
            answers, _ = run(target, path.parent, config, engine=engine)
            break
        except KeyboardInterrupt:
            kills += 1
            data = path.read_bytes()
            path.write_bytes(data[: max(0, len(data) - 7 * kills)])  # the machine lost the tail of the file too
    assert kills >= 3
    assert answers.rows == whole
    assert len(path.read_text().splitlines()) == len(PROMPTS)


def test_second_run_reuses_everything_and_builds_no_engine(target, tmp_path):
    first, _ = run(target, tmp_path / "a")

    def never():
        raise AssertionError("no engine is needed")

    second, said = run(target, tmp_path / "a", engine=never)
    assert second.rows == first.rows and second.generated == 0 and second.reused == 11
    assert said == [f"answers: all 11 reused from {tmp_path / 'a'}"]


def changed(**generation):
    return replace(CONFIG, generation=replace(CONFIG.generation, **generation))


@pytest.mark.parametrize(
    ("field", "config", "options"),
    [
        ("generation.temperature: 1.0 -> 0.5", changed(temperature=0.5), {}),
        ("generation.seed", changed(seed=4), {}),
        ("generation.dtype", changed(dtype="bfloat16"), {}),
        ("max_length: 64 -> 60", replace(CONFIG, max_length=60), {}),
        ("template: ", replace(CONFIG, template_args={"thinking": False}), {}),
        ('target.revision: null -> "v2"', CONFIG, {"revision": "v2"}),
        ("prompts.count: 11 -> 10", CONFIG, {"prompts": PROMPTS[:10]}),
    ],
)
def test_other_settings_are_refused_by_name(target, tmp_path, field, config, options):
    run(target, tmp_path / "a")
    with pytest.raises(ValueError) as caught:
        run(target, tmp_path / "a", config, **options)
    assert field in str(caught.value)


def test_other_weights_or_template_are_refused(target, tmp_path):
    run(target, tmp_path / "a")
    with pytest.raises(ValueError, match=r"target\.weights"):
        run(chat_target(seed=1), tmp_path / "a")
    with pytest.raises(ValueError, match=r"template: "):
        run(chat_target(template=TAGGED), tmp_path / "a")


def test_batch_size_may_change_and_results_do_not(target, tmp_path):
    first = run(target, tmp_path / "a")[0].rows
    assert run(target, tmp_path / "b", changed(batch_size=1))[0].rows == first
    assert run(target, tmp_path / "a", changed(batch_size=2))[0].reused == 11


def test_files_without_a_manifest_are_never_picked_up(target, tmp_path):
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no manifest"):
        run(target, tmp_path)


def test_broken_row_in_the_middle_is_named(target, tmp_path):
    run(target, tmp_path / "a")
    path = tmp_path / "a" / "answers.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:2: broken row"):
        run(target, tmp_path / "a")
    path.write_text("\n".join([lines[0], lines[0]]) + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:2: id .* comes twice"):
        run(target, tmp_path / "a")


def test_prompts_without_room_are_counted_and_the_window_is_kept(target, tmp_path):
    turns = {"long": ("hi " * 70,), "near": ("hi " * 55,), "grow": ("hi " * 20, "ok " * 30)}
    long = [Prompt(name, "chat", texts) for name, texts in turns.items()]
    answers, _ = run(target, tmp_path / "a", prompts=long)
    assert answers.skipped == {DropReason.PROMPT_FILLS_WINDOW: 1}
    assert [row["id"] for row in answers.rows] == ["near", "grow"]
    assert all(len(row["prompt_ids"]) + len(row["answer_ids"]) <= 64 for row in answers.rows)
    for row in answers.rows:
        assert tokenise(row, target.tokenizer, 64).input_ids == row["prompt_ids"] + row["answer_ids"]


def test_a_conversation_that_outgrows_the_window_keeps_the_turns_that_fit(target, tmp_path):
    prompts = [Prompt("g", "chat", ("hi " * 20, "ok " * 50, "yes"))]
    answers, _ = run(target, tmp_path / "a", prompts=prompts)
    (row,) = answers.rows
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert tokenise(row, target.tokenizer, 64).input_ids == row["prompt_ids"] + row["answer_ids"]


def test_samples_and_greedy_share(target, tmp_path):
    config = changed(samples_per_prompt=3, greedy_share=0.4)
    answers, _ = run(target, tmp_path / "a", config, prompts=PROMPTS[:9])
    assert [row["id"] for row in answers.rows[:4]] == ["p0#0", "p0#1", "p0#2", "p1#0"]
    greedy = [row for row in answers.rows if row["temperature"] == 0.0]
    assert 0 < len(greedy) < 27
    assert all(row["answer_ids"] == greedy_reference(target, row["prompt_ids"], 12) for row in greedy)
    sampled = {tuple(row["answer_ids"]) for row in answers.rows if row["temperature"] and row["id"].startswith("p0")}
    assert len(sampled) == sum(1 for r in answers.rows if r["temperature"] and r["id"].startswith("p0"))
    many = make_jobs([Prompt(f"q{i}", "c", ("x",)) for i in range(2000)], config.generation)
    assert abs(sum(job.temperature == 0.0 for job in many) / len(many) - 0.4) < 0.03


def test_manifest_is_written_first_and_says_how(target, tmp_path):
    def broken():
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError):
        run(target, tmp_path / "a", engine=broken)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["generation"]["temperature"] == 1.0 and manifest["generation"]["dtype"] == "float32"
    assert manifest["target"]["name"] == "tiny" and manifest["prompts"]["count"] == 11
    assert set(manifest["versions"]) == {"draftsmith", "torch", "transformers", "datasets"}


def test_window_longer_than_the_target_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="max_length=512: the target has 256 positions"):
        run(target, tmp_path / "a", replace(CONFIG, max_length=512))
