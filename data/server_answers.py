"""Answers through an OpenAI-compatible server, with the interface that `regenerate` uses of the runtime's engine.

Prompts are sent as token ids, rendered here from the served chat template, so the server's own template plays no part. The
answer's ids are the server's where it gives them (vLLM and SGLang: return_token_ids). Where it does not, the text is tokenised
again and kept only if that is stable: it decodes to the same text, and has as many tokens as the server counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatFormat
from .openai_client import OpenAIClient, Reply, ServerError

DROPPED, FAILED = "dropped", "failed"


@dataclass
class ServerCompletion:
    """One answer. finish_reason: stop or length, or "dropped" and "failed", which have no ids and `reason` instead."""

    id: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    reason: str = ""


@dataclass
class ServerGenerator:
    """Answers requests through a client; see Generator in regenerate.

    logprobs: keep each token's log-probability where the server gives it. Counters cover the object's life: `retries` by
    reason, `retokenised` answers whose ids come from their text.
    """

    client: OpenAIClient
    chat: ChatFormat
    logprobs: bool = False
    retries: Counter[str] = field(default_factory=Counter)
    retokenised: int = 0

    def run(
        self, requests: Sequence[Any], on_commit: Callable[[Any, list[int], ServerCompletion], None] | None = None
    ) -> list[ServerCompletion]:
        """Answers in request order; on_commit(request, all its ids, its completion) as each is complete, in this thread.

        Raises ServerError when as many requests in a row have failed as may be in flight: the server is gone.
        """
        done: list[ServerCompletion | None] = [None] * len(requests)
        calls = [(str(request.id), request.prompt_ids, request_body(request.sampling)) for request in requests]
        failed_in_a_row = 0
        with closing(self.client.map(calls, logprobs=self.logprobs)) as replies:
            for index, reply in replies:
                request = requests[index]
                completion = self._failed(request, reply) if isinstance(reply, ServerError) else self._completed(request, reply)
                done[index] = completion
                failed_in_a_row = failed_in_a_row + 1 if completion.finish_reason == FAILED else 0
                if failed_in_a_row >= max(8, self.client.concurrency):
                    raise ServerError(f"{failed_in_a_row} requests in a row failed; the last: {completion.reason}")
                if on_commit is not None and completion.token_ids:
                    on_commit(request, completion.token_ids, completion)
        assert all(completion is not None for completion in done)
        return [completion for completion in done if completion is not None]

    def _failed(self, request: Any, error: ServerError) -> ServerCompletion:
        return ServerCompletion(request.id, [], FAILED, reason=str(error))

    def _completed(self, request: Any, reply: Reply) -> ServerCompletion:
        self.retries.update(reason.split(":")[0] for reason in reply.retried)
        if reply.prompt_ids is not None and reply.prompt_ids != list(request.prompt_ids):
            return ServerCompletion(request.id, [], FAILED, reason="the server answered another prompt than was sent")
        stopped = reply.finish_reason == "stop"
        ids = reply.token_ids
        if ids is None:
            ids = self._from_text(reply, stopped)
            if ids is None:
                return ServerCompletion(request.id, [], DROPPED, reason="its text does not tokenise back to what was generated")
            self.retokenised += 1
        elif stopped and (not ids or ids[-1] not in self.chat.eos_ids):
            ids = [*ids, self._end(reply)]  # a server that strips the end token from the ids as well
        ids, most = list(ids), request.sampling.max_new_tokens
        if not stopped and len(ids) < most:
            return ServerCompletion(
                request.id, [], FAILED, reason=f"the server ended the answer after {len(ids)} of {most} tokens"
                f" ({reply.finish_reason}): its context is shorter than data.max_length",
            )  # fmt: skip
        if len(ids) > most or any(token in self.chat.eos_ids for token in ids[:-1]):
            return ServerCompletion(request.id, [], FAILED, reason="the server went on after the end token or the budget")
        logprobs = reply.logprobs if reply.logprobs is not None and len(reply.logprobs) == len(ids) else None
        return ServerCompletion(request.id, ids, "stop" if stopped else "length", logprobs)

    def _from_text(self, reply: Reply, stopped: bool) -> list[int] | None:
        tokenizer = self.chat.tokenizer
        ids = list(tokenizer(reply.text, add_special_tokens=False)["input_ids"])
        if tokenizer.decode(ids, skip_special_tokens=False) != reply.text:
            return None
        if stopped:
            ids.append(self._end(reply))
        # Servers count the end token, some do not.
        if reply.completion_tokens not in (None, len(ids), len(ids) - stopped) or not ids:
            return None
        return ids

    def _end(self, reply: Reply) -> int:
        """The token that ended an answer: what the server names, else the tokenizer's."""
        if reply.stop_id in self.chat.eos_ids:
            assert reply.stop_id is not None
            return reply.stop_id
        own = self.chat.tokenizer.eos_token_id
        return own if own in self.chat.eos_ids else min(self.chat.eos_ids)


def request_body(sampling: Any) -> dict[str, Any]:
    """The sampling keys of a request. All are written: a server's defaults may come from the model's generation config."""
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": sampling.max_new_tokens,
        "seed": sampling.seed % 2**63, "n": 1, "skip_special_tokens": False,
    }  # fmt: skip
