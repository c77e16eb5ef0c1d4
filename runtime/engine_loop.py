"""One thread that owns an engine, and tickets by which other threads follow their requests.

Requests and cancellations reach the engine between two of its steps. All counts are kept by the engine's thread; other threads
read them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from .engine import Completion, CycleRecord, Engine, Request

log = logging.getLogger(__name__)
_SCORED = 256  # tokens per forward while log-probabilities are computed


class Unavailable(RuntimeError):
    """The request cannot be taken now: the queue is full (`full`), or the loop is stopping or has failed."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


@dataclass(frozen=True)
class TokenLogprob:
    """log p of the token under the target at temperature 1, untruncated, and its likeliest alternatives [(id, log p), ...]."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Event:
    """What happened to a request. kind: "accepted"; "tokens" (committed ids, while streaming); "done" (completion, logprobs
    where asked for); "refused" (the engine's ValueError); "failed" (the engine broke)."""

    kind: str
    tokens: list[int] = field(default_factory=list)
    completion: Completion | None = None
    logprobs: list[TokenLogprob] | None = None
    message: str = ""


@dataclass(eq=False)
class Ticket:
    """A submitted request. events: what happened to it, in order. stream: "tokens" events are wanted. logprobs: number of
    alternatives wanted beside each token's log-probability, None for none at all."""

    request: Request
    stream: bool = False
    logprobs: int | None = None
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)


@dataclass
class Counts:
    """Totals since the loop was made, all monotone.

    drafts: verifications that held a draft, accepted_per_position[k]: those of them in which drafts 0..k were all accepted,
    counted as engines do, before an end token cuts the answer.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def cycle(self, record: CycleRecord) -> None:
        """Add one verification of one row."""
        if not record.proposed:
            return
        self.drafts += 1
        self.draft_tokens += record.proposed
        self.accepted_tokens += record.accepted
        self.accepted_per_position.extend([0] * (record.proposed - len(self.accepted_per_position)))
        for position in range(record.accepted):
            self.accepted_per_position[position] += 1


class EngineLoop:
    """Runs an engine in a thread of its own. max_waiting bounds the requests that wait for a slot."""

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self.engine, self.max_waiting, self.counts = engine, max_waiting, Counts()
        self.error: str | None = None  # what broke the engine
        self._wake = threading.Condition()
        self._inbox: list[tuple[str, Ticket]] = []
        self._live: dict[str, Ticket] = {}
        self._closing = self._stopping = False
        self._numbers = count()
        self._score_cache: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Requests that hold a slot of the engine."""
        return min(self.live, self.engine.slots)

    @property
    def closing(self) -> bool:
        """No request is taken any more."""
        return self._closing or self.error is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, prompt_ids: list[int], sampling: Any, *, stream: bool = False, logprobs: int | None = None) -> Ticket:
        """Hand a request to the engine; its events tell the rest. Raises Unavailable."""
        with self._wake:
            if self.closing:
                raise Unavailable(self.error or "the server is shutting down")
            if self.live >= self.engine.slots + self.max_waiting:
                raise Unavailable(f"{self.live - self.running} requests are waiting already", full=True)
            ticket = Ticket(Request(f"request-{next(self._numbers)}", prompt_ids, sampling), stream, logprobs)
            self._live[ticket.request.id] = ticket
            self._inbox.append(("submit", ticket))
            self._wake.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request wherever it stands; nothing happens to one that has ended."""
        with self._wake:
            self._inbox.append(("cancel", ticket))
            self._wake.notify_all()

    def close(self) -> None:
        """Take no more requests; the live ones go on."""
        with self._wake:
            self._closing = True

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, let the live ones finish for `grace` seconds, cancel the others, end the thread."""
        with self._wake:
            self._closing = True
            self._wake.wait_for(lambda: not self._live, timeout=grace)
            self._inbox += [("cancel", ticket) for ticket in self._live.values()]
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._inbox or self._stopping or not self.engine.idle)
                    if self._stopping and not self._inbox and self.engine.idle:
                        return
                    inbox, self._inbox = self._inbox, []
                for action, ticket in inbox:
                    self._act(action, ticket)
                if not self.engine.idle:
                    for completion in self.engine.step(self._on_commit):
                        self._finish(completion)
        except Exception as error:
            log.exception("the engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")

    def _act(self, action: str, ticket: Ticket) -> None:
        if action == "cancel":
            self.engine.cancel(ticket.request.id)
            return
        try:
            self.engine.submit(ticket.request)
        except ValueError as error:
            self._end(ticket, Event("refused", message=str(error).partition(": ")[2] or str(error)))
            return
        ticket.events.put(Event("accepted"))

    def _on_commit(self, request: Request, tokens: list[int], record: CycleRecord | None) -> None:
        self.counts.generation_tokens += len(tokens)
        if record is None:
            self.counts.prompt_tokens += len(request.prompt_ids)
        else:
            self.counts.cycle(record)
        ticket = self._live[request.id]
        if ticket.stream:
            ticket.events.put(Event("tokens", tokens))

    def _finish(self, completion: Completion) -> None:
        ticket = self._live[completion.id]
        self.counts.finished[completion.finish_reason] += 1
        scores = None
        if ticket.logprobs is not None and completion.finish_reason != "cancelled":
            scores = self._score(ticket.request.prompt_ids, completion.token_ids, ticket.logprobs)
        self._end(ticket, Event("done", completion=completion, logprobs=scores))

    def _end(self, ticket: Ticket, event: Event) -> None:
        with self._wake:
            del self._live[ticket.request.id]
            self._wake.notify_all()
        ticket.events.put(event)

    def _fail(self, message: str) -> None:
        with self._wake:
            self.error = message
            live, self._live = list(self._live.values()), {}
            self._wake.notify_all()
        for ticket in live:
            ticket.events.put(Event("failed", message=message))

    @torch.inference_mode()
    def _score(self, prompt: list[int], answer: list[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of an answer, by one more pass of the target over the whole row in a cache of its own."""
        decoder = self.engine.decoder
        if self._score_cache is None:
            self._score_cache = decoder.new_cache(1, self.engine.max_context)
        ids, first = prompt + answer[:-1], len(prompt) - 1
        found: list[TokenLogprob] = []
        # what precedes the first predicted position needs no logits: its chunks end there
        starts = [*range(0, first, _SCORED), *range(first, len(ids), _SCORED)]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            out = decoder.forward(
                torch.tensor([ids[start:end]], device=decoder.device), self._score_cache, [0],
                torch.tensor([start], device=decoder.device), logits="all" if start >= first else "none", bound=end,
            )  # fmt: skip
            if out.logits is None:
                continue
            laws = out.logits[0].float().log_softmax(-1).cpu()
            tokens = answer[start - first : end - first]
            values, indices = laws.topk(min(top, laws.shape[-1])) if top else (laws[:, :0], laws[:, :0].long())
            chosen = laws.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            for token, value, ranked, scores in zip(tokens, chosen, indices.tolist(), values.tolist(), strict=True):
                found.append(TokenLogprob(token, value, list(zip(ranked, scores, strict=True))))
        return found
