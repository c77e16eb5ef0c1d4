"""Client of an OpenAI-compatible server (vLLM, SGLang, `draftsmith serve`): streamed completions of token ids, with retries.

Standard library only. Every worker keeps one connection, so `concurrency` bounds what is in flight. A request is repeated from
its beginning when the server is busy (429, its Retry-After is kept), fails (5xx), is silent too long, or ends a stream early;
what had arrived of it is dropped, so nothing is lost and nothing doubled. The same seed is sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

RETRIED = frozenset({408, 409, 425, 429})  # and all of 500 and above


class ServerError(RuntimeError):
    """A request that failed for good. status: of the HTTP answer, None where there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Again(Exception):
    """A failure that may pass; `after`: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class Reply:
    """One finished completion.

    token_ids and prompt_ids are None where the server gives none; logprobs (one a token) where they were not asked for or not
    given. completion_tokens is the server's own count. stop_id: the id of the token that ended the answer, where the server
    names it. first_s: seconds to the first piece, seconds: to the last, of the attempt that succeeded; attempts counts all.
    """

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    logprobs: list[float] | None = None
    completion_tokens: int | None = None
    stop_id: int | None = None
    first_s: float = 0.0
    seconds: float = 0.0
    attempts: int = 1
    retried: list[str] = field(default_factory=list)


class OpenAIClient:
    """Talks to the server at `url` (with or without /v1). One object may be used by many threads.

    concurrency  requests in flight at once, of `map`
    retries      repetitions of one request before it counts as failed
    timeout      seconds without a byte after which a request is repeated
    backoff      seconds before the first repetition; doubles with each, up to `longest`, times a factor in [1/2, 1] that is
                 drawn from the seed and the request's id
    api_key      sent as a bearer token
    wait         replaces the waiting (a function of seconds that returns true when it was cut short)

    Raises ValueError for a setting out of range.
    """

    def __init__(
        self, url: str, *, model: str | None = None, concurrency: int = 32, retries: int = 8, timeout: float = 120.0,
        backoff: float = 0.5, longest: float = 30.0, seed: int = 0, api_key: str | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server: {url!r} is not allowed (http://host:port or https://host:port)")
        for name, value, low in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < low:
                raise ValueError(f"{name}: {value} is not allowed ({low} or more)")
        if timeout <= 0:
            raise ValueError(f"timeout: {timeout} is not allowed (above 0)")
        self.url, self.model, self.concurrency, self.retries, self.timeout = url, model, concurrency, retries, timeout
        self.backoff, self.longest, self.seed, self.api_key = backoff, longest, seed, api_key
        self._secure, self._address = parts.scheme == "https", (parts.hostname, parts.port)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._local = threading.local()
        self._sockets: dict[http.client.HTTPConnection, socket.socket] = {}
        self._lock = threading.Lock()

    # ---- requests -------------------------------------------------------------------------------------------------

    def models(self) -> list[dict[str, Any]]:
        """What the server serves, as /v1/models lists it. Raises ServerError, soon: a wrong address should not wait long."""
        found = self._repeat("models", lambda: self._get("/v1/models"), Reply(), most=2)
        try:
            return [dict(card) for card in json.loads(found)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.url}/v1/models: no list of models, so no OpenAI-compatible server") from None

    def metrics(self) -> str:
        """The text of /metrics. Raises ServerError."""
        return str(self._repeat("metrics", lambda: self._get("/metrics"), Reply(), most=2))

    def choose_model(self, *, needs: int | None = None) -> str:
        """The model asked for, or the only one served; sets `model`. needs: positions it must have, where the server says.

        Raises ValueError when it is not served, there are several, or its context is too short.
        """
        cards = {str(card["id"]): card for card in self.models()}
        if self.model is None and len(cards) != 1:
            raise ValueError(f"model: {self.url} serves {', '.join(sorted(cards)) or 'nothing'}; name one of them")
        name = self.model or next(iter(cards))
        if name not in cards:
            raise ValueError(f"model: {self.url} does not serve {name!r} ({', '.join(sorted(cards))})")
        longest = cards[name].get("max_model_len")
        if needs is not None and isinstance(longest, int) and longest < needs:
            raise ValueError(f"data.max_length: {needs} is not allowed; {self.url} has a context of {longest}")
        self.model = name
        return name

    def complete(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, key: str = "", logprobs: bool = False
    ) -> Reply:  # fmt: skip
        """One completion of a prompt of token ids. sampling: the body's other keys; key: names the request for the backoff.

        Raises ServerError when it failed for good.
        """
        body = {
            "model": self.model, "prompt": list(prompt_ids), "stream": not logprobs, "return_token_ids": True, **sampling
        }  # fmt: skip
        body |= {"logprobs": 1} if logprobs else {"stream_options": {"include_usage": True}}
        reply = Reply()

        def attempt() -> Reply:
            fresh = Reply(attempts=reply.attempts, retried=reply.retried)
            began = time.perf_counter()
            for chunk in self.events("/v1/completions", body):
                if not fresh.first_s:
                    fresh.first_s = time.perf_counter() - began
                _take(fresh, chunk)
            if fresh.finish_reason is None:
                raise _Again("the stream ended early")
            if fresh.finish_reason == "abort":
                raise _Again("the server aborted the request")
            fresh.seconds = time.perf_counter() - began
            return fresh

        done: Reply = self._repeat(key or str(prompt_ids), attempt, reply)
        return done

    def post(self, path: str, body: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
        """The JSON answer to one POST, repeated like a completion. key: names it for the backoff. Raises ServerError."""
        found: dict[str, Any] = self._repeat(key, lambda: next(self.events(path, body)), Reply())
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """One attempt: POST a body, yield the answer's JSON, or every piece of it where it is streamed. Not repeated."""
        response = self._request("POST", path, json.dumps(body).encode())
        with _Translated():
            if "text/event-stream" not in response.headers.get("Content-Type", ""):
                yield json.loads(response.read())
                return
            for line in iter(response.readline, b""):
                if not line.endswith(b"\n"):
                    break  # cut in the middle
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    response.read()  # the end of the body: the connection can be used again
                    return
                piece = json.loads(data)
                if "error" in piece:
                    raise _Again(f"the server reports {piece['error']}")
                yield piece
        raise _Again("the stream ended early")

    def map(
        self, requests: Sequence[tuple[str, Sequence[int], Mapping[str, Any]]], *, logprobs: bool = False
    ) -> Generator[tuple[int, Reply | ServerError], None, None]:
        """Completions of many (key, prompt ids, sampling), as (index, reply or what failed) in the order they finish.

        At most `concurrency` are in flight. Ending the iteration early ends the workers and their requests.
        """
        todo = iter(range(len(requests)))
        found: SimpleQueue[tuple[int, Reply | Exception]] = SimpleQueue()

        def work() -> None:
            while not self._stop.is_set():
                with self._lock:
                    index = next(todo, None)
                if index is None:
                    break
                key, prompt_ids, sampling = requests[index]
                try:
                    found.put((index, self.complete(prompt_ids, sampling, key=key, logprobs=logprobs)))
                except Exception as error:  # whatever it is: the caller waits for this index
                    found.put((index, error))
            self._drop()

        count = min(self.concurrency, len(requests))
        workers = [threading.Thread(target=work, name="client", daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        try:
            for _ in requests:
                index, result = found.get()
                if isinstance(result, Exception) and not isinstance(result, ServerError):
                    raise result
                yield index, result
        finally:
            self._stop.set()
            with self._lock:
                for connected in self._sockets.values():
                    with contextlib.suppress(OSError):  # closed meanwhile
                        connected.shutdown(socket.SHUT_RDWR)
            for worker in workers:
                worker.join()
            self._stop.clear()

    def close(self) -> None:
        """Close this thread's connection."""
        self._drop()

    # ---- one request ----------------------------------------------------------------------------------------------

    def _repeat(self, key: str, attempt: Callable[[], Any], reply: Reply, most: int | None = None) -> Any:
        most = self.retries if most is None else min(most, self.retries)
        while True:
            try:
                return attempt()
            except _Again as error:
                self._drop()
                reply.retried.append(str(error))
                if self._stop.is_set():
                    raise ServerError("stopped") from None
                if reply.attempts > most:
                    raise ServerError(f"{self.url}: failed {reply.attempts} times, at last: {error}") from None
                delay = max(error.after, self.delay(key, reply.attempts))
                reply.attempts += 1
                self._wait(delay)
            except ServerError:
                self._drop()
                raise

    def delay(self, key: str, attempt: int) -> float:
        """Seconds to wait before repetition number `attempt` (from 1) of a request."""
        number = int.from_bytes(hashlib.blake2b(f"{self.seed}/{key}/{attempt}".encode(), digest_size=8).digest(), "big")
        bounded = min(self.longest, self.backoff * 2.0 ** min(attempt - 1, 60))
        return bounded * (0.5 + number / 2**65)

    def _get(self, path: str) -> str:
        response = self._request("GET", path, None)
        with _Translated():
            return response.read().decode()

    def _request(self, method: str, path: str, data: bytes | None) -> http.client.HTTPResponse:
        """The response with its headers read; its status is 200. Raises _Again or ServerError."""
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with _Translated():
            connection = self._connection()
            connection.request(method, self._base + path, body=data, headers=headers)
            with self._lock:  # kept apart: http.client forgets the socket of an answer that ends its connection
                self._sockets[connection] = connection.sock
            if self._stop.is_set():  # who stops shuts the sockets that were there
                raise _Again("stopped")
            response = connection.getresponse()
            if response.status == 200:
                return response
            said = _message(response.read())
        what = f"HTTP {response.status}: {said}"
        if response.status in RETRIED or response.status >= 500:
            raise _Again(what, _retry_after(response.headers.get("Retry-After")))
        raise ServerError(f"{self.url}{path}: {what}", response.status)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            host, port = self._address
            assert host is not None
            found = self._local.connection = kind(host, port, timeout=self.timeout)
        return found

    def _drop(self) -> None:
        """Close this thread's connection: after an error nothing more can be read from it."""
        found = getattr(self._local, "connection", None)
        if found is not None:
            self._local.connection = None
            with self._lock:
                self._sockets.pop(found, None)
            found.close()


class _Translated:
    """Turns what the network and broken answers raise into _Again."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TimeoutError):
            raise _Again("no answer within the time limit") from error
        if isinstance(error, (OSError, http.client.HTTPException)):
            raise _Again(f"{type(error).__name__}: {error}") from error
        if isinstance(error, ValueError):
            raise _Again(f"the answer is not JSON: {error}") from error


def _take(reply: Reply, body: Mapping[str, Any]) -> None:
    """Add one body of an answer, whole or a piece."""
    count = (body.get("usage") or {}).get("completion_tokens")
    if count is not None:
        reply.completion_tokens = count
    for choice in body.get("choices") or ():
        reply.text += choice.get("text") or ""
        for ids, name in (("token_ids", "token_ids"), ("prompt_token_ids", "prompt_ids")):
            if choice.get(ids) is not None:
                setattr(reply, name, [*(getattr(reply, name) or []), *choice[ids]])
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if values is not None:
            reply.logprobs = [*(reply.logprobs or []), *values]
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        for name in ("stop_reason", "matched_stop"):
            if isinstance(choice.get(name), int):
                reply.stop_id = choice[name]


def _message(data: bytes) -> str:
    """The reason in an error's body, shortened."""
    text = data.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
