"""Tools and plain text on their way from the source to token rows."""

import json

import pytest
from tiny_chat import chat_target, chat_tokenizer

from draftsmith.data.chat import ChatFormat, TokenRow, tokenise
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.stage import check_chat, given_rows, prepare

TEMPLATE = (
    "{% for t in tools or [] %}{{ 'system ' + t.function.name + ' </s> ' }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' }}{% endfor %}{{ '</s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "w7"}}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "w7", "arguments": {}}}]},
    {"role": "tool", "content": "w9"},
    {"role": "assistant", "content": "ok"},
]


def config(tmp_path, rows, **changed):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return DataConfig(prompts=str(path), max_length=64, generation=GenerationConfig(max_new_tokens=6, batch_size=2), **changed)


def test_tools_are_shown_to_the_target_and_recorded(tmp_path):
    target, said = chat_target(template=TEMPLATE), []
    settings = config(tmp_path, [{"id": "t", "messages": TALK, "tools": [TOOL]}, {"id": "p", "prompt": "hi"}])
    out = prepare(settings, target, tmp_path / "out", name="tiny", say=said.append, progress=False)
    rows = {row["id"]: row for row in out.answers.rows}
    assert rows["t"]["tools"] == [TOOL] and "tools" not in rows["p"]
    shown = target.tokenizer.decode(rows["t"]["prompt_ids"])
    assert shown.startswith("system w7 </s> user hi </s> assistant") and "tool w9" not in shown
    assert [m["role"] for m in rows["t"]["messages"]] == ["user", "assistant"] * 2, "up to the turn that the call answers"
    assert len(out.rows) + sum(out.tokenised.dropped.values()) == 2 and not any("does not show" in line for line in said)
    # without the recorded tools the ids are not what the template renders
    row = {key: value for key, value in rows["t"].items() if key != "tools"}
    with pytest.raises(ValueError, match="prompt ids differ from this target's chat template at token 0"):
        tokenise(row, target.tokenizer, 64)


def test_a_template_without_tools_is_announced(tmp_path):
    said = []
    rows = [{"id": "t", "prompt": "hi", "tools": [TOOL]}]
    prepare(config(tmp_path, rows), chat_target(), tmp_path / "out", name="tiny", say=said.append, progress=False)
    assert any(line.startswith("tools: 1 prompts offer some, but the target's chat template does not show") for line in said)


def test_given_answers_keep_calls_and_results(tmp_path):
    from draftsmith.data.source import load_prompts

    (row,) = given_rows(load_prompts(config(tmp_path, [{"id": "t", "messages": TALK, "tools": [TOOL]}], system="w5")))
    assert row["messages"][0] == {"role": "system", "content": "w5"} and row["messages"][1:] == TALK and row["tools"] == [TOOL]
    found = tokenise(row, chat_tokenizer(TEMPLATE), 64)
    assert isinstance(found, TokenRow)
    words = chat_tokenizer(TEMPLATE).convert_ids_to_tokens(found.input_ids)
    assert [w for w, m in zip(words, found.loss_mask, strict=True) if m] == ["yes", "</s>", "w7", "</s>", "ok", "</s>"]


def test_plain_text_is_for_targets_without_a_chat_template(tmp_path):
    from draftsmith.data.source import load_prompts

    prompts = load_prompts(config(tmp_path, [{"text": "hi yes ok w1 w2 w3"}], text_words=2))
    with pytest.raises(ValueError, match="1 rows are plain text .* this target has one"):
        check_chat(prompts, ChatFormat(chat_tokenizer()), print)
    base = chat_tokenizer()
    base.chat_template = None
    check_chat(prompts, ChatFormat(base), print)
    found = tokenise(given_rows(prompts)[0], base, 64)
    words = base.convert_ids_to_tokens(found.input_ids)
    assert words == ["hi", "yes", "ok", "w1", "w2", "w3", "</s>"] and sum(found.loss_mask) == 5
