"""Rows of other people's data sets as prompts: the schema is recognised by the keys and by the shape of their values.

messages         {"messages": [{"role", "content"}]}, also under "conversation" or "prompt"; content may be a list of
                 text parts; tool calls, tool results and "tools" are kept
sharegpt         {"conversations": [{"from", "value"}]}
turns            {"turns": [user texts]}
prompt           {"prompt"}, with an answer in "completion", "response" or "chosen"
question         {"question"}, with an answer in "answer"
alpaca           {"instruction", "input", "output"}
text             {"text"}: plain text; its opening is the prompt, for targets without a chat template
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYSTEM_ROLES = ("system", "developer")
USER_ROLES = ("user", "human", "prompter")
ASSISTANT_ROLES = ("assistant", "gpt", "model", "chatgpt", "bot")
CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: an assistant message that is a call
TOOL_ROLES = ("tool", "function", "observation", "tool_response", "function_response")
ROLES = "system, user, assistant, tool"
ANSWERS = {"prompt": ("completion", "response", "chosen"), "question": ("answer",), "alpaca": ("output",)}
ID_KEYS = ("id", "prompt_id", "conversation_id", "question_id")
KNOWN = "messages, conversations, turns, prompt, question, instruction or text"
TEXT_WORDS = 48


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered.

    `turns` are the user turns. `replies` are the answers that came with the source, one for each of the first turns; they
    are used only where answers are "given". `tools` are the functions offered to the target, for its chat template.
    `messages` is the whole conversation as it came, only where it holds tool calls: `turns` then ends with the turn that the
    first call answers, because what follows depends on a call that the target may not make. `schema` is what the row was
    recognised as.
    """

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None
    replies: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    schema: str = field(default="", compare=False)


def shape_of(row: Mapping[str, Any]) -> str | None:
    """Name of the schema of a row (see the module), None if it has none."""
    if row.get("turns"):
        return "turns"
    for key in ("messages", "conversation"):
        if row.get(key):
            return "messages"
    if items := row.get("conversations"):
        shared = isinstance(items, (list, tuple)) and any(isinstance(item, Mapping) and "from" in item for item in items)
        return "sharegpt" if shared else "messages"
    if row.get("prompt"):
        return "messages" if isinstance(row["prompt"], (list, tuple)) else "prompt"
    for key, name in (("question", "question"), ("instruction", "alpaca"), ("text", "text")):
        if row.get(key):
            return name
    return None


def to_prompt(row: Mapping[str, Any], *, domain: str | None = None, text_words: int = TEXT_WORDS) -> Prompt:
    """A row of any known shape as a Prompt.

    domain: of rows that name none. text_words: words of a plain text that are its prompt, the rest is its answer.

    Raises ValueError `field: value is not allowed; it must be ...`.
    """
    shape = shape_of(row)
    system = row.get("system") or row.get("system_prompt") or None
    if system is not None and not isinstance(system, str):
        raise _wrong("system", system, "a text")
    tools = _tools(row.get("tools") or row.get("functions"))
    turns: list[str] = []
    replies: list[str] = []
    kept: tuple[Mapping[str, Any], ...] = ()
    if shape is None:
        raise ValueError(f"no known schema in the keys {', '.join(sorted(map(str, row)))}; one of them must be {KNOWN}")
    if shape in ("messages", "sharegpt"):
        key = next(k for k in ("messages", "conversation", "conversations", "prompt") if row.get(k))
        messages = _messages(row[key], key, ("from", "value") if shape == "sharegpt" else ("role", "content"))
        if shape == "messages" and key == "prompt":
            messages += _reply_messages(row)
        found, turns, replies, called = _split(messages, key)
        if system and not found:
            messages = [{"role": "system", "content": system}, *messages]
        system, kept = found or system, tuple(messages) if called else ()
    elif shape == "turns":
        if not isinstance(row["turns"], (list, tuple)):
            raise _wrong("turns", row["turns"], "a list of texts")
        turns = [_text(turn, f"turns[{n}]") for n, turn in enumerate(row["turns"])]
    elif shape == "text":
        opening, rest = _cut(_text(row["text"], "text"), text_words)
        turns, replies = [opening], [rest] if rest.strip() else []
    else:
        turns, replies = _one_turn(row, shape)
    name = row.get("domain") or row.get("category") or domain or "other"
    return Prompt(
        _id(row, str(name), system, turns), str(name), tuple(turns), system, tuple(replies), tools, kept, _shown(shape, row)
    )  # fmt: skip


def _shown(shape: str, row: Mapping[str, Any]) -> str:
    answer = next((key for key in ANSWERS.get(shape, ()) if row.get(key)), None)
    return f"{shape}/{answer}" if answer else shape


def _id(row: Mapping[str, Any], domain: str, system: str | None, turns: Sequence[str]) -> str:
    for key in ID_KEYS:
        if row.get(key) not in (None, ""):
            return str(row[key])
    return f"{domain}-{hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:12]}"


def _wrong(where: str, value: Any, allowed: str) -> ValueError:
    shown = repr(value)
    return ValueError(f"{where}: {shown if len(shown) <= 60 else shown[:57] + '...'} is not allowed; it must be {allowed}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, value, "a text that is not empty")
    return value


def _one_turn(row: Mapping[str, Any], shape: str) -> tuple[list[str], list[str]]:
    key = "instruction" if shape == "alpaca" else shape
    turn = _text(row[key], key)
    if shape == "alpaca" and row.get("input"):
        turn = f"{turn}\n\n{_text(row['input'], 'input')}"
    for name in ANSWERS[shape]:
        if isinstance(row.get(name), str) and row[name].strip():
            return [turn], [row[name]]
    return [turn], []


def _cut(text: str, words: int) -> tuple[str, str]:
    """The first `words` words of a text, and what follows them (with its leading space)."""
    end = 0
    for count, match in enumerate(re.finditer(r"\S+", text), start=1):
        if count > words:
            return text[:end], text[end:]
        end = match.end()
    return text, ""


# ---- conversations ------------------------------------------------------------------------------------------------


def _content(value: Any, where: str) -> str:
    """A text, or text parts joined."""
    if not isinstance(value, (list, tuple)):
        return _text(value, where)
    texts = []
    for n, part in enumerate(value):
        if isinstance(part, Mapping):
            if part.get("type", "text") != "text":
                raise _wrong(f"{where}[{n}].type", part["type"], "text (pictures and sound cannot be used)")
            part = part.get("text")
        if not isinstance(part, str):
            raise _wrong(f"{where}[{n}]", part, "a text part")
        texts.append(part)
    return _text("".join(texts), where)


def _messages(items: Any, key: str, names: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages {role, content} with the roles system, user, assistant and tool; assistants may have tool_calls."""
    if not isinstance(items, (list, tuple)):
        raise _wrong(key, items, f"a list of {{{', '.join(names)}}}")
    out: list[dict[str, Any]] = []
    for n, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise _wrong(f"{key}[{n}]", item, f"an object {{{', '.join(names)}}}")
        role, value, where = str(item.get(names[0], "")).lower(), item.get(names[1]), f"{key}[{n}].{names[1]}"
        if role in CALL_ROLES:
            out.append({"role": "assistant", "content": "", "tool_calls": _calls(value, where)})
        elif role in ASSISTANT_ROLES and (calls := item.get("tool_calls") or item.get("function_call")):
            text = _content(value, where) if value else ""
            out.append({"role": "assistant", "content": text, "tool_calls": _calls(calls, f"{key}[{n}].tool_calls")})
        elif role in SYSTEM_ROLES + USER_ROLES + ASSISTANT_ROLES + TOOL_ROLES:
            plain = next(name for name, group in GROUPS if role in group)
            extra = {k: item[k] for k in ("name", "tool_call_id") if plain == "tool" and item.get(k)}
            if plain == "tool" and not isinstance(value, (str, list, tuple)):
                value = json.dumps(value)
            out.append({"role": plain, "content": _content(value, where), **extra})
        else:
            raise _wrong(f"{key}[{n}].{names[0]}", item.get(names[0]), f"one of {ROLES}")
    return out


GROUPS = (("system", SYSTEM_ROLES), ("user", USER_ROLES), ("assistant", ASSISTANT_ROLES), ("tool", TOOL_ROLES))


def _reply_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer of a row {prompt: [messages], completion: text or [messages]}."""
    for key in ANSWERS["prompt"]:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return [{"role": "assistant", "content": value}]
        if isinstance(value, (list, tuple)) and value:
            return _messages(value, key, ("role", "content"))
    return []


def _split(messages: Sequence[Mapping[str, Any]], key: str) -> tuple[str | None, list[str], list[str], bool]:
    """System text, user turns, replies, and whether a tool is called (turns and replies then end before the call)."""
    system: str | None = None
    turns: list[str] = []
    replies: list[str] = []
    called = False
    for n, message in enumerate(messages):
        role, where = message["role"], f"{key}[{n}].role"
        if role == "system":
            if turns or system is not None:
                raise _wrong(where, role, "the first message")
            system = message["content"]
        elif called:
            continue
        elif role == "user":
            if len(replies) < len(turns):
                raise _wrong(where, role, "assistant (two user messages in a row)")
            turns.append(message["content"])
        elif role == "assistant":
            if len(replies) >= len(turns):
                raise _wrong(where, role, "user (an assistant message without a user message before it)")
            if message.get("tool_calls"):
                called = True
            else:
                replies.append(message["content"])
        else:
            raise _wrong(where, role, "user or assistant (a tool result without a call before it)")
    if not turns:
        raise ValueError(f"{key}: no user turn; it must hold at least one message of role user")
    return system, turns, replies, called


def _dense(value: Any) -> Any:
    """Without the empty fields that column formats put where one row has a key and another has not."""
    if isinstance(value, Mapping):
        return {key: _dense(entry) for key, entry in value.items() if entry is not None}
    return [_dense(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return _dense(value)
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise _wrong(where, value, "JSON") from None


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as {type, function: {name, arguments}}, arguments as an object."""
    found = _json(value, where)
    out = []
    for n, call in enumerate(found if isinstance(found, list) else [found]):
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise _wrong(f"{where}[{n}]", call, "an object with a function name")
        arguments = inner.get("arguments", inner.get("parameters", {}))
        function = {"name": inner["name"], "arguments": _json(arguments, f"{where}[{n}].arguments")}
        out.append({"type": "function", "function": function, **({"id": call["id"]} if call.get("id") else {})})
    return out


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Functions offered to the target as {type: function, function: {name, ...}}, also from JSON text or bare functions."""
    if not value:
        return ()
    found = _json(value, "tools")
    out = []
    for n, tool in enumerate(found if isinstance(found, list) else [found]):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise _wrong(f"tools[{n}]", tool, "an object {type: function, function: {name, ...}}")
        out.append({"type": "function", "function": dict(inner)})
    return tuple(out)
