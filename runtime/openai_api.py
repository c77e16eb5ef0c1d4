"""The OpenAI completion and chat APIs as plain data: request bodies in, answers out. No HTTP here.

Beside the OpenAI keys, those of vLLM: top_k, ignore_eos, stop_token_ids, skip_special_tokens, chat_template_kwargs, and
return_token_ids, which adds prompt_token_ids and token_ids. A key that would change the answer and is not supported is refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import SamplingParams
from .engine_loop import Counts, TokenLogprob
from .rows import Completion

# keys that are read, by endpoint
COMMON = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "ignore_eos", "stream",
        "stream_options", "logprobs", "return_token_ids", "skip_special_tokens", "n",
    }
)  # fmt: skip
CHAT = frozenset({"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"})
KEYS = {False: COMMON | {"prompt"}, True: COMMON | CHAT}
# keys that change nothing here
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "request_id", "priority", "cache_salt", "session_id", "parallel_tool_calls",
     "include_reasoning", "spaces_between_special_tokens", "prompt_cache_key", "safety_identifier"}
)  # fmt: skip
# keys that are taken at these values only
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "length_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "use_beam_search": (False,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,), "allowed_token_ids": ([],), "bad_words": ([],), "modalities": (["text"],),
}  # fmt: skip
MAX_TOP = 20


class BadRequest(ValueError):
    """A request that cannot be answered: `key` is what is wrong in it, `status` the HTTP status."""

    def __init__(self, key: str | None, message: str, *, status: int = 400) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key, self.status = key, status

    def body(self) -> dict[str, Any]:
        """The error as clients of OpenAI and vLLM expect it."""
        kind = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}
        name = kind.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": str(self), "type": name, "param": self.key, "code": self.status}}


@dataclass(frozen=True)
class Served:
    """What is served. render: (messages, template arguments) to prompt ids, ValueError for what the template refuses."""

    model: str
    tokenizer: Any
    render: Callable[[list[dict[str, Any]], Mapping[str, Any]], list[int]]
    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Call:
    """A checked request. logprobs: alternatives beside each token's log-probability, None for no log-probabilities."""

    chat: bool
    prompt_ids: list[int]
    sampling: SamplingParams
    stream: bool
    usage_chunk: bool
    token_ids: bool
    logprobs: int | None
    skip_special: bool

    @property
    def ends(self) -> frozenset[int]:
        """Tokens of the request that end the answer, beside the model's own."""
        return frozenset(self.sampling.stop_token_ids)


# ---- requests -----------------------------------------------------------------------------------------------------


def parse(body: Any, served: Served, *, chat: bool) -> Call:
    """Check a request body. Raises BadRequest naming the key."""
    if not isinstance(body, Mapping):
        raise BadRequest(None, "the body must be a JSON object")
    values = {key: value for key, value in body.items() if value is not None}
    _check_keys(values, chat)
    model = values.get("model", served.model)
    if model != served.model:
        raise BadRequest("model", f"{model!r} is not served here ({served.model!r} is)", status=404)
    if values.get("n", 1) != 1:
        raise BadRequest("n", f"{values['n']!r} is not supported (1)")
    stream = _flag(values, "stream")
    logprobs = _logprobs(values, chat)
    if stream and logprobs is not None:
        raise BadRequest("logprobs", "not supported with stream")
    prompt = _messages(values, served) if chat else _prompt(values, served)
    if len(prompt) >= served.max_context:
        key = "messages" if chat else "prompt"
        raise BadRequest(key, f"{len(prompt)} tokens leave no room in the context of {served.max_context}")
    options = values.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise BadRequest("stream_options", "must be an object")
    return Call(
        chat, prompt, _sampling(values, served, len(prompt), chat), stream, bool(options.get("include_usage")),
        _flag(values, "return_token_ids"), logprobs, _flag(values, "skip_special_tokens", True),
    )  # fmt: skip


def _check_keys(values: Mapping[str, Any], chat: bool) -> None:
    for key, value in values.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                allowed = " or ".join(map(repr, NEUTRAL[key]))
                raise BadRequest(key, f"{value!r} is not supported by this server ({allowed})")
        elif key not in KEYS[chat] and key not in IGNORED:
            raise BadRequest(key, "no such key, or not supported by this server")


def _flag(values: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise BadRequest(key, f"{value!r} is not allowed (true or false)")
    return value


def _whole(value: Any, key: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(key, f"{value!r} is not allowed (an integer, {low} to {high})")
    return value


def _logprobs(values: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(values["logprobs"], "logprobs", 0, MAX_TOP) if "logprobs" in values else None
    top = _whole(values.get("top_logprobs", 0), "top_logprobs", 0, MAX_TOP)
    wanted = _flag(values, "logprobs")
    if top and not wanted:
        raise BadRequest("top_logprobs", "needs logprobs: true")
    return top if wanted else None


def _sampling(values: Mapping[str, Any], served: Served, prompt: int, chat: bool) -> SamplingParams:
    room = served.max_context - prompt
    key = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    budget = values.get(key, room if chat else min(16, room))
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= room:
        raise BadRequest(
            key, f"{budget!r} is not allowed (1 to {room}: the context of {served.max_context} less {prompt} of the prompt)"
        )
    stop = values.get("stop", ())
    top_k = values.get("top_k", 0)
    try:
        return SamplingParams(
            temperature=values.get("temperature", 1.0), top_k=0 if top_k == -1 else top_k, top_p=values.get("top_p", 1.0),
            max_new_tokens=budget, stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(values.get("stop_token_ids", ())), ignore_eos=_flag(values, "ignore_eos"),
            seed=values.get("seed", secrets.randbits(62)),
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error, BadRequest):
            raise
        key, _, rest = str(error).partition(": ")
        raise BadRequest(key, rest) from None
    except TypeError:
        raise BadRequest("stop", "must be a text or a list of texts, and stop_token_ids a list of ids") from None


def _prompt(values: Mapping[str, Any], served: Served) -> list[int]:
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return list(served.tokenizer(prompt)["input_ids"])
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if bad := [token for token in prompt if not 0 <= token < served.vocab_size]:
            raise BadRequest("prompt", f"token {bad[0]} is not in 0..{served.vocab_size - 1}")
        return list(prompt)
    raise BadRequest("prompt", "must be one text or one list of token ids, not empty")


def _messages(values: Mapping[str, Any], served: Served) -> list[int]:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", "must be a list of messages, not empty")
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}]", "must be an object with a role and a content")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
            content = None if None in parts else "".join(map(str, parts))
        if not isinstance(content, str):
            raise BadRequest(f"messages[{index}].content", "must be a text or a list of text parts")
        found.append({**message, "content": content})
    arguments = values.get("chat_template_kwargs", {})
    if not isinstance(arguments, Mapping):
        raise BadRequest("chat_template_kwargs", "must be an object")
    try:
        return served.render(found, arguments)
    except Exception as error:  # templates raise whatever they like on messages they do not know
        raise BadRequest("messages", f"the chat template refuses them: {' '.join(str(error).split())}") from None


# ---- answers ------------------------------------------------------------------------------------------------------

FINISH = {"context": "length", "cancelled": "abort"}


def finish_reason(completion: Completion) -> str:
    """stop, length or abort."""
    return FINISH.get(completion.finish_reason, completion.finish_reason)


def usage(prompt: int, answer: int) -> dict[str, int]:
    """The token counts of one request."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def answer(
    name: str, served: Served, call: Call, completion: Completion, text: str, stop_reason: int | str | None,
    logprobs: list[TokenLogprob] | None,
) -> dict[str, Any]:  # fmt: skip
    """The body of an answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(completion), "stop_reason": stop_reason}
    choice |= {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
    choice["logprobs"] = None if logprobs is None else shown_logprobs(served.tokenizer, logprobs, chat=call.chat)
    body: dict[str, Any] = {
        "id": name, "object": "chat.completion" if call.chat else "text_completion", "created": int(time.time()),
        "model": served.model, "choices": [choice], "usage": usage(len(call.prompt_ids), len(completion.token_ids)),
    }  # fmt: skip
    if call.token_ids:
        choice["token_ids"] = completion.token_ids
        (body if call.chat else choice)["prompt_token_ids"] = call.prompt_ids
    return body


def chunk(
    name: str, served: Served, call: Call, text: str, *, tokens: list[int] | None = None, first: bool = False,
    finish: str | None = None, stop_reason: int | str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One piece of a streamed answer."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = stop_reason
    if call.chat:
        choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
    else:
        choice["text"] = text
    body: dict[str, Any] = {
        "id": name, "object": "chat.completion.chunk" if call.chat else "text_completion", "created": int(time.time()),
        "model": served.model, "choices": [choice],
    }  # fmt: skip
    if call.token_ids:
        choice["token_ids"] = tokens or []
        if first:
            (body if call.chat else choice)["prompt_token_ids"] = call.prompt_ids
    return body


def shown_logprobs(tokenizer: Any, scores: list[TokenLogprob], *, chat: bool) -> dict[str, Any]:
    """Log-probabilities in the form of the chat or of the completion API."""
    texts = {token: tokenizer.decode([token]) for score in scores for token in (score.token, *(t for t, _ in score.top))}
    if not chat:
        return {
            "tokens": [texts[score.token] for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{texts[token]: value for token, value in score.top} for score in scores],
        }

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": texts[token], "logprob": value, "bytes": list(texts[token].encode())}

    return {
        "content": [
            entry(score.token, score.logprob) | {"top_logprobs": [entry(*pair) for pair in score.top]} for score in scores
        ]
    }


def models(served: Served) -> dict[str, Any]:
    """The list of the one model that is served."""
    card = {
        "id": served.model, "object": "model", "created": served.created, "owned_by": "draftsmith", "root": served.model,
        "parent": None, "max_model_len": served.max_context,
    }  # fmt: skip
    return {"object": "list", "data": [card]}


def metrics(served: Served, counts: Counts, *, running: int, waiting: int, seconds: Mapping[str, float]) -> str:
    """Counters in Prometheus' text format, under vLLM's names, so that what reads an engine reads this server too.

    seconds: the engine's time by part, under a name of ours.
    """
    label = f'engine="0",model_name="{served.model}"'
    lines: list[str] = []

    def add(name: str, kind: str, text: str, samples: Mapping[str, float]) -> None:
        lines.extend([f"# HELP {name} {text}", f"# TYPE {name} {kind}"])
        lines.extend(f"{name}{{{label}{more}}} {float(value)}" for more, value in samples.items())

    add("vllm:num_requests_running", "gauge", "Requests that hold a slot.", {"": running})
    add("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot.", {"": waiting})
    add("vllm:prompt_tokens_total", "counter", "Prompt tokens of requests that started.", {"": counts.prompt_tokens})
    add("vllm:generation_tokens_total", "counter", "Tokens generated.", {"": counts.generation_tokens})
    reasons = dict.fromkeys(("stop", "length", "abort"), 0)
    for reason, number in counts.finished.items():
        reasons[FINISH.get(reason, reason)] += number
    ended = {f',finished_reason="{reason}"': number for reason, number in reasons.items()}
    add("vllm:request_success_total", "counter", "Requests that ended.", ended)
    add("vllm:spec_decode_num_drafts_total", "counter", "Verifications of a draft.", {"": counts.drafts})
    add("vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.", {"": counts.draft_tokens})
    add("vllm:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", {"": counts.accepted_tokens})
    places = {f',position="{place}"': number for place, number in enumerate(counts.accepted_per_position)}
    add("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", "Accepted, by position in the draft.", places)
    parts = {f',part="{part}"': value for part, value in seconds.items()}
    add("draftsmith:engine_seconds_total", "counter", "Time of the engine by part.", parts)
    return "\n".join(lines) + "\n"
