"""A small server of a target's hidden states, under the two contracts that train/target_remote.py reads.

    python -m draftsmith.runtime.state_server NAME --layers 1 8 15 21 27 --folder /dev/shm/states --port 8001

POST /v1/completions answers like vLLM's hidden-state connector: `prompt` is a list of token ids, the states [T, n+1, H] (the
layers asked for, then the last layer before the final norm) and the ids go to a safetensors file in `folder`, whose name
comes back in kv_transfer_params.hidden_states_path; PATH.lock is held until the file is whole. POST /generate answers like
SGLang with return_hidden_states: `input_ids`, and in meta_info.hidden_states[0] the states [T, (n+1) * H] as JSON, the last
after the final norm. GET /v1/models names the model. It is the reference that the client is tested against, and a way to
keep a target on another device; it has no batching across requests, no authentication and no TLS: for this machine or a
trusted network.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..models.config import TargetConfig
from ..models.target import Target, load_target

log = logging.getLogger(__name__)
MAX_BODY = 16 * 2**20


class StateServer:
    """Serves `target`'s states of `layers` until `stop`. Port 0 takes a free one; `url` says which.

    folder: where the files go that /v1/completions names. late: seconds after the answer until a file is written, as where
    the writing runs behind. Raises ValueError for a layer that the target lacks.
    """

    def __init__(
        self, target: Target, layers: Sequence[int], folder: Path, *, model: str = "target", host: str = "127.0.0.1",
        port: int = 0, late: float = 0.0,
    ) -> None:  # fmt: skip
        target.check_taps(layers)
        self.target, self.layers, self.folder, self.model, self.late = target, tuple(layers), folder, model, late
        self.lock = threading.Lock()  # one forward at a time
        self._http = _Http((host, port), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="states", daemon=True)

    @property
    def url(self) -> str:
        """http://host:port"""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> StateServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and wait for the thread."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        self._thread.join()

    def states(self, tokens: Sequence[int], *, normed: bool) -> torch.Tensor:
        """[T, n+1, H] on the CPU: the layers, and the last state after (normed) or before the final norm."""
        last = () if normed else (self.target.num_layers - 1,)
        with self.lock:
            found = self.target.states({"": tokens}, (*self.layers, *last))[""]
        parts = [found.taps, found.last_hidden] if normed else [found.taps]
        return torch.cat(parts, dim=-1).unflatten(-1, (len(self.layers) + 1, -1)).cpu()

    def write(self, tokens: Sequence[int]) -> Path:
        """The file of a text, held locked from before its name is known until it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        lock = Path(f"{path}.lock").open("w")  # noqa: SIM115 - closed by the writer
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {"hidden_states": self.states(tokens, normed=False).contiguous(), "token_ids": torch.tensor(list(tokens))}

        def save() -> None:
            with lock:  # closing it releases the lock
                save_file(found, path)

        threading.Timer(self.late, save).start() if self.late else save()
        return path


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    owner: StateServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 600
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)

    def do_GET(self) -> None:
        """See the module."""
        if self.path.partition("?")[0] != "/v1/models":
            self._send({"error": {"message": f"nothing at {self.path}"}}, 404)
            return
        self._send({"object": "list", "data": [{"id": self.server.owner.model, "object": "model"}]})

    def do_POST(self) -> None:
        """See the module."""
        length = int(self.headers.get("Content-Length") or 0)
        answers = {"/v1/completions": self._completion, "/generate": self._generate}
        with self._refusing():
            if length > MAX_BODY:
                raise ValueError(f"a body of {length} bytes is too long, at most {MAX_BODY}")
            body = json.loads(self.rfile.read(length))
            if self.path not in answers:
                raise ValueError(f"nothing at {self.path}")
            self._send(answers[self.path](body))

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError) as error:
            self.close_connection = True
            self._send({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

    def _tokens(self, given: Any) -> list[int]:
        size = self.server.owner.target.vocab_size
        if not isinstance(given, list) or not given or not all(isinstance(i, int) and 0 <= i < size for i in given):
            raise ValueError(f"the prompt must be a list of token ids from 0 to {size - 1}")
        return given

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = self._tokens(body["prompt"])
        path = self.server.owner.write(tokens)
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": tokens}
        return {"object": "text_completion", "choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = self._tokens(body["input_ids"])
        if not body.get("return_hidden_states"):
            raise ValueError("return_hidden_states must be true: this server generates no text")
        states = self.server.owner.states(tokens, normed=True).flatten(1).float().tolist()
        return {"text": "", "meta_info": {"id": body.get("rid"), "prompt_tokens": len(tokens), "hidden_states": [states]}}

    def _send(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Serve a target's hidden states for training.")
    parser.add_argument("name", help="target.name")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="tapped layers, as drafter.tap_layers")
    parser.add_argument("--folder", type=Path, required=True, help="where states are left for the trainer; a RAM disk is best")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    given = parser.parse_args(arguments)
    target = load_target(TargetConfig(name=given.name, dtype=given.dtype), given.device)
    server = StateServer(target, given.layers, given.folder, model=given.name, host=given.host, port=given.port)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"states of {given.name}, layers {list(given.layers)}, at {server.url}", flush=True)  # noqa: T201 - a command
        server.wait()


if __name__ == "__main__":
    main()
