"""The doctor on ready-made broken inputs: each is found, with the row, the reason and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_world import END, TARGET, World, the
from rich.console import Console
from tiny_chat import PLAIN, TAGGED, WORDS, chat_target
from training import parts_of

from draftsmith.data import checks, doctor, doctor_report
from draftsmith.data.chat import TokenRow
from draftsmith.data.config import DoctorConfig, GenerationConfig
from draftsmith.data.findings import Finding
from draftsmith.data.source import Prompt, prompts_hash
from draftsmith.train import stage


def errors(findings: list[Finding]) -> list[str]:
    return [item.line() for item in findings if item.level == "error"]


def test_a_sound_folder_is_usable(tmp_path):
    world = World(tmp_path, template=TAGGED)
    report = doctor.examine(world.subject())
    assert report["verdict"] == "usable" and report["findings"] == []
    assert report["counts"]["rows"] == report["counts"]["answered"] == 12
    assert report["supervised"]["share"] == pytest.approx(6 / 11)
    assert report["lengths"]["answer"]["min"] == report["lengths"]["answer"]["max"] == 6
    assert report["ends"] == {"share": 1.0, "finish_reasons": {"stop": 12}}
    assert report["first_tokens"][0]["text"] == "yes" and report["last_tokens"][0]["text"] == "</s>"


# ---- the list of the issue ----------------------------------------------------------------------------------------


def no_generation_tags(world: World) -> None:
    world.given()


def mask_all_zero(world: World) -> None:
    world.given()


def mask_all_one(world: World) -> None:
    row = world.rows[3]
    row["earlier_spans"] = [[0, len(row["prompt_ids"])]]


def thinking_mismatch(world: World) -> None:
    world.manifest["template_args"] = {"enable_thinking": True}


def pad_is_eos(world: World) -> None:
    world.rows[4]["answer_ids"] += [END] * 5


def end_masked_by_id(world: World) -> None:
    world.rows[4]["answer_ids"].pop()


def prompt_too_long(world: World) -> None:
    world.prompts[5] = Prompt("p5", "chat", ("hi " * 60,))
    del world.rows[5]
    world.manifest["prompts"]["sha256"] = prompts_hash(world.prompts)


def another_model(world: World) -> None:
    world.manifest["target"] = {**TARGET, "name": "other"}


def evaluation_prompt(world: World) -> None:
    world.heldout.append(Prompt("h1", "chat", ("W6, HI!",)))


def another_tokenizer(world: World) -> None:
    world.manifest["tokenizer"] = "f" * 64


def foreign_ids(world: World) -> None:
    world.rows[7]["answer_ids"][1] = 4000


def looping(world: World) -> None:
    for row in world.rows[:6]:
        row["answer_ids"] = [*[9, 10, 11] * 8, END]


def half_written(world: World) -> None:
    world.tail = json.dumps(world.rows[-1])[:70]
    del world.rows[-1]


ELSEWHERE = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "").replace(
    "{{ m['role'] + ' '", "{% generation %}{{ m['role'] + ' '"
).replace("' </s> ' }}{% endif %}{% endfor %}", "' </s> ' }}{% endgeneration %}{% endif %}{% endfor %}")  # fmt: skip
THINKING = "{% set _ = enable_thinking %}" + TAGGED
REGENERATE = "run `draftsmith data regenerate` into a fresh output folder"
ISSUE = [
    # break, template, config, check, level, row, reason, fix
    (no_generation_tags, PLAIN, {}, "mask", "note", "'p0' (index 0)",
     "no generation tags, so the mask is derived", "coloured"),
    (mask_all_zero, ELSEWHERE, {}, "dropped", "error", "'p0' (index 0)",
     "12 of 12 conversations give no row: the generation tags of the template do not mark the answer (all rows were dropped)",
     "put {% generation %} around the answer"),
    (mask_all_one, TAGGED, {}, "mask", "error", "'p3' (index 3)",
     "the mask is all one", "only the answer in answer_ids"),
    (thinking_mismatch, THINKING, {"template_args": {"enable_thinking": False}}, "thinking", "error", "'p0' (index 0)",
     "template_args.enable_thinking: True -> False", "data.template_args"),
    (pad_is_eos, TAGGED, {}, "padding", "error", "'p4' (index 4)",
     "several end tokens", "cut answer_ids after the first end token"),
    (end_masked_by_id, TAGGED, {}, "end", "error", "'p4' (index 4)",
     "its end token is not supervised", "mask padding by length, never by id"),
    (prompt_too_long, TAGGED, {}, "dropped", "warning", "'p5'",
     "the prompt fills max_length", "raise data.max_length above 48 (the longest prompt has 63 tokens)"),
    (another_model, TAGGED, {}, "answers", "error", "'p0' (index 0)",
     "answers of another model (name: 'other' -> 'tiny')", REGENERATE),
    (evaluation_prompt, TAGGED, {}, "overlap", "error", "'p6' (index 6)",
     "also an evaluation prompt ('p6' = 'h1')", "remove them from data.prompts"),
    (another_tokenizer, TAGGED, {}, "tokenizer", "error", "'p0' (index 0)",
     "of another tokenizer (ffffffff", REGENERATE),
    (foreign_ids, TAGGED, {}, "tokenizer", "error", "'p7' (index 7)",
     "outside the target's vocabulary of 48", REGENERATE),
    (looping, TAGGED, {}, "loops", "error", "'p0' (index 0)",
     "50.0% of the answers repeat themselves", "greedy_share"),
    (half_written, TAGGED, {}, "row", "error", "answers.jsonl:12 ('p11')",
     "half-written row", "run `draftsmith data regenerate` again"),
]  # fmt: skip


@pytest.mark.parametrize(
    "damage, template, config, check, level, row, reason, fix", ISSUE, ids=[case[0].__name__ for case in ISSUE]
)
def test_broken_input_is_found(tmp_path, damage, template, config, check, level, row, reason, fix):
    world = World(tmp_path, template=template, config=config)
    damage(world)
    report = doctor.examine(world.subject())
    [found] = [item for item in report["findings"] if (item["check"], item["level"]) == (check, level)]
    assert found["rows"][0] == row
    assert reason in found["reason"]
    assert fix in found["fix"]
    others = [item for item in report["findings"] if item["level"] == "error" and item is not found]
    assert not others, "one fault, one refusal"
    assert (report["verdict"] == "refused") == (level == "error")
    html = doctor_report.render_html(json.loads(json.dumps(report)))
    assert row.replace("'", "&#39;") in html


# ---- more of the same kind ----------------------------------------------------------------------------------------


def test_rows_with_an_empty_mask_are_refused(tmp_path):
    subject = World(tmp_path, template=TAGGED).subject()
    subject.rows[2] = TokenRow("p2", "chat", [3, 4, 5], [False] * 3)
    found = the(checks.find_all(subject), "mask")
    assert found.rows == ("'p2' (index 2)",) and "all zero" in found.reason


def test_prompts_of_another_template_are_named_with_their_row(tmp_path):
    world = World(tmp_path, template=TAGGED)
    world.rows[8]["prompt_ids"] = [9, *world.rows[8]["prompt_ids"]]
    found = the(checks.find_all(world.subject()), "template")
    assert found.rows == ("'p8'" + " (index 8)",) and "chat template at token 0" in found.reason and "regenerate" in found.fix


def test_settings_and_prompts_that_changed_since_are_refused(tmp_path):
    world = World(tmp_path, template=TAGGED)
    world.manifest["generation"] |= {"temperature": 0.7}
    world.manifest["prompts"] = {"count": 9, "sha256": "0"}
    found = checks.find_all(world.subject())
    assert "generation.temperature: 0.7 -> 1.0" in the(found, "settings").reason
    assert "belong to 9 other prompts" in the(found, "prompts").reason


@pytest.mark.parametrize("on, text, said", [(False, "<think> w1 </think> ok", "thinking off"), (True, "ok", "thinking on")])
def test_thinking_text_against_the_switch(tmp_path, on, text, said):
    world = World(tmp_path, template=THINKING, config={"template_args": {"enable_thinking": on}})
    world.rows[1]["messages"][-1]["content"] = text
    found = the(checks.find_all(world.subject()), "thinking")
    assert said in found.reason
    assert found.rows[0] == ("'p0' (index 0)" if on else "'p1' (index 1)")


def test_a_switch_left_to_its_default_is_a_warning(tmp_path):
    found = the(checks.find_all(World(tmp_path, template=THINKING).subject()), "thinking", "warning")
    assert "'enable_thinking'" in found.reason and "data.template_args.enable_thinking" in found.fix


def test_a_padding_token_that_ends_turns_is_announced_and_changes_no_row(tmp_path):
    world = World(tmp_path, template=TAGGED)
    before = world.subject().rows
    world.chat.tokenizer.pad_token = "</s>"
    again = World(tmp_path / "again", template=TAGGED)
    (tmp_path / "again").mkdir()
    again.chat = world.chat
    subject = again.subject()
    assert [row.loss_mask for row in subject.rows] == [row.loss_mask for row in before]
    assert "by length" in the(checks.find_all(subject), "padding", "note").fix


def test_given_answers_are_a_warning(tmp_path):
    world = World(tmp_path, template=TAGGED)
    world.given()
    found = checks.find_all(world.subject())
    assert "another model's text" in the(found, "answers", "warning").reason and not errors(found)


def test_answers_that_never_end(tmp_path):
    world = World(tmp_path, template=TAGGED, config={"doctor": DoctorConfig(min_eos_share=0.5)})
    for row in world.rows:
        row["answer_ids"].pop()
        row["finish_reason"] = "length"
    found = checks.find_all(world.subject())
    assert "0% of the answers end" in the(found, "end").reason


def test_answers_that_all_begin_alike_look_like_a_supervised_generation_prompt(tmp_path):
    subject = World(tmp_path, template=TAGGED).subject()
    subject.rows[:] = [TokenRow(f"r{i}", "chat", [9, 3, 10 + i, 11 + i], [False, True, True, True]) for i in range(30)]
    found = the(checks.find_all(subject), "mask", "warning")
    assert "100% of the answers begin with 'assistant'" in found.reason and "generation prompt" in found.fix


def test_missing_answers_and_a_missing_manifest(tmp_path):
    world = World(tmp_path, template=TAGGED)
    del world.rows[4:6]
    subject = world.subject()
    assert the(checks.find_all(subject), "answers", "warning").rows == ("'p4'", "'p5'")
    (tmp_path / "answers" / "manifest.json").unlink()
    again = doctor.gather(
        world.data, world.chat, tmp_path, prompts=world.prompts, heldout=[], target=TARGET, vocab_size=len(WORDS),
        anchor_share=0.25, block_size=4, draft_vocab_size=None,
    )  # fmt: skip
    assert "no manifest.json" in the(checks.find_all(again), "answers").reason


def test_nothing_answered_yet(tmp_path):
    world = World(tmp_path, template=TAGGED)
    empty = doctor.gather(
        world.data, world.chat, tmp_path / "none", prompts=world.prompts, heldout=[], target=TARGET, vocab_size=len(WORDS),
        anchor_share=0.25, block_size=4, draft_vocab_size=8,
    )  # fmt: skip
    report = doctor.examine(empty)
    assert report["verdict"] == "refused" and report["counts"]["unanswered"] == 12
    assert "there is no row" in report["findings"][0]["reason"]
    doctor_report.render_html(json.loads(json.dumps(report)))
    with (tmp_path / "terminal").open("w") as file:
        doctor_report.show(report, Path("page"), Console(file=file, width=100))
    assert "there is no row" in (tmp_path / "terminal").read_text()


def test_a_row_that_comes_twice_and_a_broken_line(tmp_path):
    world = World(tmp_path, template=TAGGED)
    world.rows[6] = world.rows[2]
    subject = world.subject()
    assert the(checks.find_all(subject), "row").reason == "the id comes twice"
    path = tmp_path / "answers" / "answers.jsonl"
    path.write_text(path.read_text().replace('"answer_ids"', '"answer_ids', 1))
    _, found = doctor.read_rows(path)
    assert found[0].rows == ("answers.jsonl:1 ('p0')",) and found[0].reason == "broken row"


def test_thresholds_are_the_recipes(tmp_path):
    limits = DoctorConfig(min_supervised_share=0.9, min_anchor_coverage=1.0, max_loop_share=0.01, loop_tokens=6, loop_repeats=2)
    world = World(tmp_path, template=TAGGED, config={"doctor": limits})
    world.rows[9]["answer_ids"] = [9, 10, 9, 10, 9, 10, END]
    found = checks.find_all(world.subject())
    assert "less than data.doctor.min_supervised_share=0.9" in the(found, "mask").reason
    assert "min_anchor_coverage=1" in the(found, "anchors").reason
    assert the(found, "loops").rows == ("'p9' (index 9)",)
    with pytest.raises(ValueError, match=r"max_loop_share=1.5: allowed 0.0 to 1.0"):
        DoctorConfig(max_loop_share=1.5)


def test_vocabulary_that_covers_too_little(tmp_path):
    world = World(tmp_path, template=TAGGED)
    subject = world.subject(draft_vocab_size=1)
    found = the(checks.find_all(subject), "vocabulary")
    assert "a draft vocabulary of 1 covers 16.7%" in found.reason, "the end token is one of six"
    assert "raise drafter.draft_vocab_size" in found.fix and found.rows
    table = doctor.vocab_table(subject)
    assert table["recipe"] == 1 and table["sizes"][0]["held_out"] == pytest.approx(1 / 6)
    assert "No reduced size covers 98%" in table["advice"]


# ---- the trainer --------------------------------------------------------------------------------------------------


def prompts_file(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "domain": "chat", "prompt": f"w{i} hi"}) + "\n" for i in range(8)))
    return path


def test_trainer_stops_at_a_refusal_before_the_first_step(tmp_path):
    target = chat_target()
    settings = {"prompts": str(prompts_file(tmp_path)), "max_length": 48}
    made = {"generation": GenerationConfig(max_new_tokens=10, batch_size=4)}
    said: list[str] = []
    parts = parts_of(data=settings | made)
    good = stage.prepare_rows(parts, target, tmp_path / "out", heldout=[], say=said.append)
    assert good.rows
    strict = parts_of(data=settings | made | {"doctor": DoctorConfig(min_supervised_share=0.99)})
    with pytest.raises(ValueError, match=r"^data: mask: 'p\d' \(index \d\).*min_supervised_share=0.99; shorten.*data doctor"):
        stage.prepare_rows(strict, target, tmp_path / "out", heldout=[], say=said.append)
    assert parts.plain() == strict.plain(), "limits are no part of a run's identity"


def test_trainer_asks_the_target_whether_it_wrote_the_answers(tmp_path):
    target = chat_target()
    settings = {
        "prompts": str(prompts_file(tmp_path)), "max_length": 200,
        "generation": GenerationConfig(max_new_tokens=150, batch_size=8),
    }  # fmt: skip
    stage.prepare_rows(parts_of(data=settings), target, tmp_path / "out", heldout=[], say=lambda text: None)
    path = tmp_path / "out" / "answers" / "answers.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        row["answer_ids"] = torch.randint(2, len(WORDS), (150,), generator=generator).tolist()
        row["finish_reason"] = "length"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="data: answers: 'p.*did not sample this text"):
        stage.prepare_rows(parts_of(data=settings), target, tmp_path / "out", heldout=[], say=lambda text: None)


def test_the_drafter_says_under_which_chat_it_was_trained(tmp_path):
    from draftsmith.cli.generate import chat_warning

    parts = parts_of(data={"template_args": {"enable_thinking": False}, "system": "w1"})
    record = stage.chat_record(parts, chat_target(template=THINKING))
    assert record["template_args"] == {"enable_thinking": False} and record["system"] == "w1" and record["eos_ids"] == [END]
    (tmp_path / "draftsmith.json").write_text(json.dumps({"chat": record}))
    assert chat_warning(tmp_path, record["template"]) is None
    assert "enable_thinking" in chat_warning(tmp_path, "0" * 64)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    """A recipe with a folder of answers that is not sound."""
    lines = [json.dumps({"id": f"p{i}", "domain": "math", "turns": [f"What is {i} plus {i}?"]}) for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines[2:]) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path / 'out'}\n"
        f"data: {{prompts: {tmp_path / 'train.jsonl'}}}\n"
        f"eval: {{prompts: {tmp_path / 'heldout.jsonl'}}}\n"
    )
    return path


def call(*arguments: Any) -> int:
    from draftsmith.cli import app

    with pytest.raises(SystemExit) as caught:
        app.main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.mark.target
def test_command_writes_the_page_and_exits_with_2(recipe, tmp_path, capsys):
    assert call("data", "doctor", recipe) == 2
    out, err = capsys.readouterr()
    assert "REFUSED overlap" in out and "'p2' = 'p2'" in out
    assert len(err.splitlines()) == 1 and err.startswith("error: data: ")
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert {"overlap", "dropped"} <= {item["check"] for item in report["findings"]}
    assert (tmp_path / "out" / "doctor.html").is_file()
    # the page alone makes no run: another recipe may still take the folder
    assert call("data", "doctor", recipe, "data.max_length=300") == 2
    assert "belongs to another recipe" not in capsys.readouterr().out


def test_command_refuses_a_foreign_folder(recipe, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    assert call("data", "doctor", recipe) == 2
    assert "was not made by a recipe" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert call("data", "doctor", recipe, "--probe", "-1") == 2
    assert "--probe" in capsys.readouterr().err


def test_another_limit_is_no_other_recipe(tmp_path):
    from draftsmith.cli import pipeline

    folder = tmp_path / "out"
    plain = pipeline.to_plain(pipeline.from_plain({"output": str(folder)}))
    pipeline.claim_folder(folder, plain)
    (folder / "train.jsonl").write_text("")
    other = pipeline.to_plain(pipeline.from_plain({"output": str(folder), "data": {"doctor": {"max_loop_share": 0.9}}}))
    assert other != plain and not pipeline.check_folder(folder, other)
    longer = pipeline.to_plain(pipeline.from_plain({"output": str(folder), "data": {"max_length": 99}}))
    assert pipeline.lock_differences(folder, longer) == ["data.max_length: 512 -> 99"]


def test_data_commands_are_listed(capsys):
    assert call("data", "--help") == 0
    out = capsys.readouterr().out
    assert "regenerate" in out and "doctor" in out
