"""Schemas recognised by shape: content parts, tools and tool calls, plain text; broken rows named by field."""

import json

import pytest

from draftsmith.data.schema import shape_of, to_prompt

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "cold"},
    {"role": "assistant", "content": "It is cold."},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        ({"messages": TALK[:1]}, "messages"),
        ({"conversation": TALK[:1]}, "messages"),
        ({"prompt": TALK[:1]}, "messages"),
        ({"conversations": TALK[:1]}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "sharegpt"),
        ({"turns": ["hi"], "reference": ["x"]}, "turns"),
        ({"prompt": "hi"}, "prompt"),
        ({"prompt": "hi", "completion": "ho"}, "prompt/completion"),
        ({"prompt": "hi", "response": "ho"}, "prompt/response"),
        ({"question": "hi", "answer": "ho"}, "question/answer"),
        ({"instruction": "hi", "input": "", "output": "ho"}, "alpaca/output"),
        ({"text": "hi"}, "text"),
    ],
)
def test_schema_is_recognised_by_shape(row, schema):
    assert shape_of(row) == schema.partition("/")[0]
    assert (to_prompt(row).schema, to_prompt(row).turns) == (schema, ("hi",))


def test_ids_and_domains_come_from_the_row_the_source_or_the_text():
    assert to_prompt({"prompt": "x", "prompt_id": 7, "category": "math"}, domain="chat").id == "7"
    assert to_prompt({"prompt": "x", "category": "math"}, domain="chat").domain == "math"
    first, second = (to_prompt({"prompt": "x", "prompt_id": None}, domain="chat") for _ in range(2))
    assert first.id == second.id and first.id.startswith("chat-")


def test_content_parts_are_joined_and_pictures_refused():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert to_prompt({"messages": [{"role": "user", "content": parts}]}).turns == ("one two",)
    parts[1] = {"type": "image_url", "image_url": "x"}
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\]\.type: 'image_url' is not allowed; it must be text"):
        to_prompt({"messages": [{"role": "user", "content": parts}]})


def test_a_conversation_ends_for_the_target_at_the_first_call():
    prompt = to_prompt({"messages": TALK, "tools": [TOOL]})
    assert (prompt.turns, prompt.replies, prompt.tools) == (("hi", "Oslo?"), ("hello",), (TOOL,))
    assert [m["role"] for m in prompt.messages] == [m["role"] for m in TALK], "kept whole for answers: given"
    assert prompt.messages[3] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert to_prompt({"messages": TALK[:3]}).messages == ()


def test_sharegpt_calls_tools_as_json_text_and_the_empty_fields_of_columns():
    conversations = [
        {"from": "system", "value": "be short"},
        {"from": "human", "value": "Oslo?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})},
        {"from": "observation", "value": "cold"},
        {"from": "gpt", "value": "Cold."},
    ]
    prompt = to_prompt({"conversations": conversations, "tools": json.dumps([TOOL["function"]])})
    assert (prompt.system, prompt.turns, prompt.tools) == ("be short", ("Oslo?",), (TOOL,))
    assert prompt.messages[2]["tool_calls"] == [CALL]
    column = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "int"}, "b": None}}}}
    found = to_prompt({"prompt": "x", "tools": [column]}).tools[0]
    assert found["function"]["parameters"] == {"properties": {"a": {"type": "int"}}}


def test_openai_arguments_as_text_become_an_object():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    prompt = to_prompt({"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert prompt.messages[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"n": 1}}}]


def test_plain_text_is_cut_after_its_first_words():
    prompt = to_prompt({"text": "One two\nthree  four five"}, text_words=3)
    assert (prompt.turns, prompt.replies) == (("One two\nthree",), ("  four five",))
    assert to_prompt({"text": "One two"}, text_words=3).replies == ()


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, r"messages: 'hi' is not allowed; it must be a list of \{role, content\}"),
        ({"messages": ["hi"]}, r"messages\[0\]: 'hi' is not allowed; it must be an object"),
        ({"messages": [{"role": "user", "content": " "}]}, r"messages\[0\]\.content: ' ' is not allowed; it must be a text"),
        ({"messages": [USER, {"role": "system", "content": "s"}]}, r"messages\[1\]\.role: .* it must be the first message"),
        ({"messages": [USER, {"role": "tool", "content": "s"}]}, r"messages\[1\]\.role: .* without a call before it"),
        ({"messages": [{"role": "system", "content": "s"}]}, "messages: no user turn"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\]\.value: None is not allowed"),
        ({"prompt": "x", "tools": "{"}, "tools: '{' is not allowed; it must be JSON"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, r"tools\[0\]: .* it must be an object \{type: function"),
        ({"prompt": "x", "system": 3}, "system: 3 is not allowed; it must be a text"),
        ({"instruction": "x", "input": 3}, "input: 3 is not allowed"),
        ({"question": 3}, "question: 3 is not allowed; it must be a text that is not empty"),
        ({"turns": "hi"}, "turns: 'hi' is not allowed; it must be a list of texts"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\]: .* with a function name"),
    ],
)
def test_broken_rows_name_field_value_and_what_is_allowed(row, message):
    with pytest.raises(ValueError, match=message):
        to_prompt(row)
