"""The runtime's server over a tiny random chat target, and a proxy in front of it that breaks answers on purpose."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from tiny_chat import chat_target

from draftsmith.data.chat import ChatFormat
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine
from draftsmith.runtime.openai_api import Served
from draftsmith.runtime.server import Server

CONTEXT = 128


def served(target, engine, model: str = "tiny") -> Served:
    chat = ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids)

    def render(messages, arguments):
        return chat.render(messages, generation_prompt=True)

    return Served(
        model=model, tokenizer=target.tokenizer, render=render, max_context=engine.max_context,
        vocab_size=engine.decoder.vocab_size, eos_ids=frozenset(target.eos_token_ids),
    )  # fmt: skip


def tiny_engine(target=None, *, slots: int = 4, max_context: int = CONTEXT, **settings) -> Engine:
    target = target or chat_target()
    return Engine(
        Decoder.from_target(target.model, dtype=torch.float32, backend="torch"), slots=slots, max_context=max_context,
        eos_ids=target.eos_token_ids, tokenizer=target.tokenizer, **settings,
    )  # fmt: skip


def tiny_server(target=None, *, max_waiting: int = 1024, engine=None, **settings) -> Server:
    target = target or chat_target()
    engine = engine or tiny_engine(target, **settings)
    return Server(engine, served(target, engine), max_waiting=max_waiting)


def call(url: str, path: str, body=None, *, timeout: float = 30.0):
    """(status, parsed JSON or text, headers) of one request."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, body=data, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        kind = response.headers.get("Content-Type", "")
        return response.status, json.loads(text) if kind.startswith("application/json") else text, response.headers
    finally:
        connection.close()


def pieces(text: str) -> list[dict]:
    """The JSON of a streamed answer; it must be terminated."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class FaultyProxy:
    """Forwards to a server, and treats each POST as `plan` says, a function of (number of the POST, its body) that gives None,
    "429", "500", "hang" (no answer for longer than the client waits), "cut" (half of the answer, then the connection ends),
    "no ids" (token ids taken out of the answer, as by a server that does not know them) or "short" (a stream without its end).

    seen: bodies in order; most: highest number of requests at once; faults: how many of each.
    """

    def __init__(self, target_url: str, plan, *, hang_s: float = 1.0) -> None:
        self.host, self.plan, self.hang_s = target_url.removeprefix("http://"), plan, hang_s
        self.seen: list[dict] = []
        self.at_once = self.most = 0
        self.faults: dict[str, int] = {}
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                status, data, headers = proxy.forward("GET", self.path, None)
                proxy.reply(self, status, data, headers)

            def do_POST(self):
                proxy.post(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.http.handle_error = lambda *args: None
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def forward(self, method, path, body):
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            connection.request(method, path, body=body, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read(), response.headers
        finally:
            connection.close()

    def post(self, handler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        with self.lock:
            number = len(self.seen)
            self.seen.append(json.loads(body))
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            fault = self.plan(number, self.seen[number])
            with self.lock:
                self.faults[fault] = self.faults.get(fault, 0) + 1
            self.treat(handler, fault, body)
        finally:
            with self.lock:
                self.at_once -= 1

    def treat(self, handler, fault, body) -> None:
        if fault in ("429", "500"):
            extra = {"Retry-After": "0.05"} if fault == "429" else {}
            error = json.dumps({"error": {"message": f"injected {fault}"}}).encode()
            self.reply(handler, int(fault), error, {"Content-Type": "application/json"} | extra)
            return
        if fault == "hang":
            time.sleep(self.hang_s)
            handler.close_connection = True
            return
        status, data, headers = self.forward("POST", handler.path, body)
        if fault == "no ids":
            data = b"\n\n".join(_without_ids(part) for part in data.split(b"\n\n"))
        if fault == "short":
            data = data[: data.rindex(b"data: [DONE]")]
        self.reply(handler, status, data, headers, cut=fault == "cut")

    def reply(self, handler, status, data, headers, *, cut=False) -> None:
        handler.send_response(status)
        for key in ("Content-Type", "Retry-After"):
            if headers.get(key):
                handler.send_header(key, headers[key])
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if cut:
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        handler.wfile.write(data)


def _without_ids(part: bytes) -> bytes:
    if not part.startswith(b"data: {"):
        return part
    body = json.loads(part[6:])
    for choice in body["choices"]:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    return b"data: " + json.dumps(body).encode()
