"""A minimal OpenAI-compatible HTTP server over one engine: standard library only, one thread a connection.

GET /health, /v1/models, /metrics, /version; POST /v1/completions, /v1/chat/completions (see openai_api). A client that goes
away cancels its request. No authentication and no TLS: it is meant for this machine or a trusted network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from typing import Any

from . import openai_api as api
from .engine import Engine
from .engine_loop import EngineLoop, Event, Ticket, Unavailable
from .openai_api import BadRequest, Call, Served
from .text import TextAssembler

log = logging.getLogger(__name__)
MAX_BODY = 16 * 2**20
POLL = 0.2  # seconds between looks at whether the client is still there
CHATS = {"/v1/completions": False, "/v1/chat/completions": True}


class Server:
    """Serves an engine until `stop`. Port 0 takes a free one; `url` says which.

        with Server(engine, served) as server:
            ...

    max_waiting: requests that may wait for a slot, more are refused with 429. version: what /version says.
    Raises OSError when the address is taken.
    """

    def __init__(
        self, engine: Engine, served: Served, *, host: str = "127.0.0.1", port: int = 0, max_waiting: int = 1024,
        version: str = "",
    ) -> None:  # fmt: skip
        self.served, self.version, self.loop = served, version, EngineLoop(engine, max_waiting=max_waiting)
        self.lock = threading.Lock()  # of the tokenizer: encoding is not safe in several threads
        self._http = _Http((host, port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="http", daemon=True)

    @property
    def url(self) -> str:
        """http://host:port"""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Start to serve, in threads."""
        self.loop.start()
        self._thread.start()

    def stop(self, grace: float = 5.0) -> None:
        """Stop listening, let running requests finish for `grace` seconds, cancel the others; no thread is left behind."""
        self.loop.close()
        self._http.shutdown()
        self._thread.join()
        self._http.close_idle()
        self.loop.stop(grace)
        self._http.close(1.0)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop(0.0 if exception[0] is not None else 5.0)


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], server: Server) -> None:
        self.owner = server
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection of %s ended", client_address, exc_info=True)

    def close_idle(self) -> None:
        """Connections read nothing more: those that wait for a request end, the others finish theirs."""
        self._shut(socket.SHUT_RD)

    def close(self, patience: float) -> None:
        """Close everything and wait for the threads. Clients that take no more bytes are cut off after `patience` seconds."""
        timer = threading.Timer(patience, self._shut, (socket.SHUT_RDWR,))
        timer.start()
        self.server_close()
        timer.cancel()
        timer.join()

    def _shut(self, how: int) -> None:
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):  # closed by the client meanwhile
                    connection.shutdown(how)


class _Gone(ConnectionError):
    """The client has closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "draftsmith"
    disable_nagle_algorithm = True
    timeout = 600  # seconds that a connection may be idle
    server: _Http

    @property
    def _owner(self) -> Server:
        return self.server.owner

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)

    def do_GET(self) -> None:
        """See the module."""
        owner, loop = self._owner, self._owner.loop
        path = self.path.partition("?")[0]
        if path == "/health":
            self._json({"status": loop.error or "ok"}, 200 if not loop.closing else 503)
        elif path == "/v1/models":
            self._json(api.models(owner.served))
        elif path == "/version":
            self._json({"version": owner.version})
        elif path == "/metrics":
            stats = loop.engine.stats
            parts = {name: getattr(stats, f"{name}_s") for name in ("prefill", "draft", "head", "schedule", "verify", "rest")}
            text = api.metrics(owner.served, loop.counts, running=loop.running, waiting=loop.live - loop.running, seconds=parts)
            self._send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._refuse(BadRequest(None, f"nothing at {path}", status=404))

    def do_POST(self) -> None:
        """See the module."""
        path = self.path.partition("?")[0]
        try:
            body = self._body()
            if path not in CHATS:
                raise BadRequest(None, f"nothing at {path}", status=404)
            with self._owner.lock:
                call = api.parse(body, self._owner.served, chat=CHATS[path])
            self._answer(call)
        except BadRequest as error:
            self._refuse(error)
        except Unavailable as error:
            self._refuse(
                BadRequest(None, str(error), status=429 if error.full else 503), {"Retry-After": "1"} if error.full else {}
            )
        except ConnectionError:
            self.close_connection = True

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # what follows on this connection cannot be told from the body
            status = 413 if length else 411
            raise BadRequest(None, f"Content-Length: {length!r} is not allowed (0 to {MAX_BODY})", status=status)
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise _Gone
        try:
            return json.loads(data)
        except ValueError as error:
            raise BadRequest(None, f"the body is not JSON: {error}") from None

    # ---- one request ----------------------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        owner = self._owner
        ticket = owner.loop.submit(call.prompt_ids, call.sampling, stream=call.stream, logprobs=call.logprobs)
        name = ("chatcmpl-" if call.chat else "cmpl-") + ticket.request.id.removeprefix("request-")
        ends = call.ends | (frozenset() if call.sampling.ignore_eos else owner.served.eos_ids)

        def decode(ids: list[int]) -> str:
            return str(owner.served.tokenizer.decode(ids, skip_special_tokens=call.skip_special))

        text = TextAssembler(decode, ends=ends, stop=call.sampling.stop)
        try:
            events = self._events(ticket)
            next(events)  # accepted, or an error before anything was sent
            if call.stream:
                self._stream(call, name, text, events)
            else:
                self._whole(call, name, text, events)
        except (ConnectionError, TimeoutError):
            owner.loop.cancel(ticket)
            raise _Gone from None

    def _events(self, ticket: Ticket) -> Iterator[Event]:
        """The events of a request, while the client is there. Raises BadRequest, Unavailable or _Gone."""
        looked = time.monotonic()
        while True:
            event = None
            with contextlib.suppress(Empty):
                event = ticket.events.get(timeout=POLL)
            if event is None or time.monotonic() - looked > POLL:
                looked = time.monotonic()
                if self._gone():
                    raise _Gone
            if event is None:
                continue
            if event.kind == "refused":
                raise BadRequest("prompt", event.message)
            if event.kind == "failed":
                raise Unavailable(event.message)
            yield event
            if event.kind == "done":
                return

    def _gone(self) -> bool:
        if self._owner.loop.closing:
            return False  # our own end of the connection is closed for reading
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _whole(self, call: Call, name: str, text: TextAssembler, events: Iterator[Event]) -> None:
        event = next(events)
        completion = event.completion
        assert completion is not None
        if completion.finish_reason == "cancelled":
            raise Unavailable("the server is shutting down")
        shown = text.push(completion.token_ids) + text.finish()
        reason = _stop_reason(call, event, text)
        self._json(api.answer(name, self._owner.served, call, completion, shown, reason, event.logprobs))

    def _stream(self, call: Call, name: str, text: TextAssembler, events: Iterator[Event]) -> None:
        served = self._owner.served
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        first, tokens = True, 0
        try:
            for event in events:
                if event.kind == "tokens":
                    piece = text.push(event.tokens)
                    tokens += len(event.tokens)
                    self._event(api.chunk(name, served, call, piece, tokens=event.tokens, first=first))
                    first = False
                    continue
                assert event.completion is not None
                reason = api.finish_reason(event.completion)
                rest = text.finish()
                self._event(
                    api.chunk(name, served, call, rest, first=first, finish=reason, stop_reason=_stop_reason(call, event, text))
                )
        except Unavailable as error:  # the status is sent already
            self._event(BadRequest(None, str(error), status=503).body())
        if call.usage_chunk:
            last = api.chunk(name, served, call, "")
            self._event(last | {"choices": [], "usage": api.usage(len(call.prompt_ids), tokens)})
        self._piece(b"data: [DONE]\n\n")
        self._piece(b"")

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def _event(self, body: dict[str, Any]) -> None:
        self._piece(b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n")

    def _piece(self, data: bytes) -> None:
        """One piece of a chunked body; an empty one ends it."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body, ensure_ascii=False).encode(), "application/json", headers)

    def _send(self, status: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        if self._owner.loop.closing:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, error: BadRequest, headers: dict[str, str] | None = None) -> None:
        try:
            self._json(error.body(), error.status, headers)
        except ConnectionError:
            self.close_connection = True


def _stop_reason(call: Call, event: Event, text: TextAssembler) -> int | str | None:
    """As in vLLM: the stop string or the request's stop token that ended the answer, null for the model's own end token."""
    assert event.completion is not None
    if text.stopped is not None:
        return text.stopped
    last = event.completion.token_ids[-1:]
    if event.completion.finish_reason == "stop" and last and last[0] in call.ends:
        return last[0]
    return None
