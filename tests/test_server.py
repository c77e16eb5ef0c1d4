"""The OpenAI-compatible server over a real socket: answers, streams, errors, disconnects, metrics, shutdown."""

import http.client
import json
import socket
import threading
import time

import pytest
import torch
from http_serving import call, pieces, served, tiny_engine, tiny_server
from proposers import OracleProposer
from tiny_chat import chat_target

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.engine import Request
from draftsmith.runtime.server import Server
from draftsmith.runtime.text import TextAssembler

PROMPT = [2, 8, 9, 1, 3]  # user w0 w1 </s> assistant


@pytest.fixture(scope="module")
def target():
    return chat_target()


@pytest.fixture(scope="module")
def server(target):
    with tiny_server(target) as found:
        yield found


def direct(target, prompt=PROMPT, **sampling):
    (done,) = tiny_engine(target).run([Request("x", prompt, SamplingParams(**sampling))])
    return done.token_ids


def complete(server, **body):
    return call(server.url, "/v1/completions", {"prompt": PROMPT, **body})


def test_completion_equals_the_engine(server, target):
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6, "top_k": 5}):
        status, body, _ = complete(server, max_tokens=20, return_token_ids=True, **settings)
        (choice,) = body["choices"]
        ids = direct(target, max_new_tokens=20, **settings)
        assert status == 200 and choice["token_ids"] == ids and choice["prompt_token_ids"] == PROMPT
        text = [token for token in ids if token not in target.eos_token_ids]
        assert choice["text"] == target.tokenizer.decode(text, skip_special_tokens=True)
        assert choice["finish_reason"] == ("stop" if ids[-1] == 1 else "length")
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": len(ids), "total_tokens": 5 + len(ids)}
        assert body["object"] == "text_completion" and body["model"] == "tiny"


def test_chat_renders_the_template(server, target):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "w3"}]}]
    status, body, _ = call(
        server.url, "/v1/chat/completions",
        {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 0, "return_token_ids": True},
    )  # fmt: skip
    prompt = target.tokenizer.convert_tokens_to_ids(["user", "hi", "w3", "</s>", "assistant"])
    assert status == 200 and body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] == direct(target, prompt, max_new_tokens=9)
    assert body["choices"][0]["message"]["role"] == "assistant" and body["object"] == "chat.completion"


@pytest.mark.parametrize("chat", [False, True])
def test_stream_joins_to_the_whole_answer(server, chat):
    body = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    _, whole, _ = call(server.url, path, body)
    _, text, headers = call(server.url, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert headers["Content-Type"].startswith("text/event-stream")
    *parts, last = pieces(text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    choices = [part["choices"][0] for part in parts]
    (expected,) = whole["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    if chat:
        assert choices[0]["delta"]["role"] == "assistant" and parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == expected["message"]["content"]
    else:
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected["finish_reason"]]
    assert len(choices) > 3


def test_stop_strings_end_the_text_before_them(server, target):
    words = complete(server, max_tokens=20, temperature=0, ignore_eos=True)[1]["choices"][0]["text"].split()
    stop = " ".join(words[3:5])
    for stream in (False, True):
        _, body, _ = complete(server, max_tokens=20, temperature=0, ignore_eos=True, stop=["never", stop], stream=stream)
        choices = [part["choices"][0] for part in pieces(body)] if stream else body["choices"]
        text = "".join(choice["text"] for choice in choices)
        assert text.split() == words[:3] and stop not in text
        assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == stop


def test_stop_token_and_ignore_eos(server, target):
    ids = direct(target, max_new_tokens=20, ignore_eos=True)
    _, body, _ = complete(server, max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[ids[4]], return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1] and choice["stop_reason"] == ids[4]


def test_logprobs_are_the_targets(server, target):
    _, body, _ = complete(server, max_tokens=12, temperature=0, logprobs=2, return_token_ids=True)
    (choice,) = body["choices"]
    ids = choice["token_ids"]
    with torch.no_grad():
        laws = target.model(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
    expected = [float(laws[len(PROMPT) - 1 + i, token]) for i, token in enumerate(ids)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    assert max(choice["logprobs"]["top_logprobs"][0].values()) == pytest.approx(expected[0], abs=1e-4)  # greedy
    messages = [{"role": "user", "content": "hi"}]
    _, body, _ = call(
        server.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 3, "logprobs": True, "temperature": 0}
    )
    content = body["choices"][0]["logprobs"]["content"]
    assert content and all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in content)


BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 124}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"seed": -1}, "seed"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "logprobs": 1}, "logprobs"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"min_p": 0.1}, "min_p"),
    ({"echo": True}, "echo"),
    ({"temprature": 1.0}, "temprature"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [2, 4000]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [2] * 128}, "prompt"),
    ({"stream_options": 1}, "stream_options"),
]


@pytest.mark.parametrize(("change", "key"), BAD, ids=[f"{key}-{i}" for i, (_, key) in enumerate(BAD)])
def test_bad_requests_name_the_key(server, change, key):
    status, body, _ = complete(server, **({"max_tokens": 4} | change))
    assert status == 400 and body["error"]["param"] == key and key in body["error"]["message"]


def test_other_refusals(server):
    assert complete(server, model="other")[0] == 404
    assert call(server.url, "/v1/embeddings", {})[0] == 404
    assert call(server.url, "/nothing")[0] == 404
    assert call(server.url, "/v1/completions", b"{nonsense")[0] == 400
    assert call(server.url, "/v1/completions", b"[]")[0] == 400
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], "hi"):
        status, body, _ = call(server.url, "/v1/chat/completions", {"messages": messages})
        assert status == 400 and body["error"]["param"].startswith("messages")
    assert complete(server, max_tokens=2, user="me", min_p=0.0, frequency_penalty=0, seed=None)[0] == 200


def test_models_health_version(server):
    status, body, _ = call(server.url, "/v1/models")
    assert status == 200 and body["data"][0]["id"] == "tiny" and body["data"][0]["max_model_len"] == 128
    assert call(server.url, "/health")[1] == {"status": "ok"}
    assert call(server.url, "/version")[0] == 200


def counter(text, name):
    return {
        line.split("{")[1].split("}")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(name + "{")
    }


def test_metrics_are_vllms(target):
    ids = direct(target, max_new_tokens=17, ignore_eos=True)
    oracle = OracleProposer({tuple(PROMPT): ids}, 4)
    engine = tiny_engine(target, slots=1, proposer=oracle)
    with Server(engine, served(target, engine)) as server:
        status, body, _ = complete(server, max_tokens=17, temperature=0, ignore_eos=True, return_token_ids=True)
        assert status == 200 and body["choices"][0]["token_ids"] == ids
        _, text, headers = call(server.url, "/metrics")
    assert headers["Content-Type"].startswith("text/plain")
    names = 'engine="0",model_name="tiny"'
    drafts = counter(text, "vllm:spec_decode_num_drafts_total")[names]
    tokens = counter(text, "vllm:spec_decode_num_draft_tokens_total")[names]
    accepted = counter(text, "vllm:spec_decode_num_accepted_tokens_total")[names]
    places = counter(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    # 17 tokens: one from prefill, then (4 accepted + 1) three times, then the last one
    assert (drafts, tokens, accepted) == (3, 12, 12)
    assert places == {f'{names},position="{k}"': 3.0 for k in range(4)}
    assert counter(text, "vllm:generation_tokens_total")[names] == 17
    assert counter(text, "vllm:prompt_tokens_total")[names] == 5
    assert counter(text, "vllm:request_success_total")[f'{names},finished_reason="length"'] == 1
    assert counter(text, "vllm:num_requests_running")[names] == 0


def open_stream(server, **body):
    """A raw socket with a streamed request under way; its first bytes have arrived."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"prompt": PROMPT, "temperature": 1.0, "seed": 1, "ignore_eos": True, **body}).encode()
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("never came true")


class Slow:
    """A tokenizer-free brake: a scheduler-less engine whose steps take a while."""

    def __init__(self, engine, seconds):
        self.engine, self.seconds, self.step = engine, seconds, engine.step

    def __call__(self, on_commit=None):
        time.sleep(self.seconds)
        return self.step(on_commit)


def slow_server(target, seconds=0.03, **settings):
    engine = tiny_engine(target, **settings)
    engine.step = Slow(engine, seconds)
    return tiny_server(target, engine=engine)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(target, stream):
    with slow_server(target, slots=1) as server:
        connection = open_stream(server, max_tokens=120, stream=stream)
        wait_for(lambda: server.loop.live == 1 and server.loop.counts.generation_tokens > 2)
        connection.close()
        wait_for(lambda: server.loop.live == 0)
        assert server.loop.counts.finished == {"cancelled": 1}
        assert server.loop.counts.generation_tokens < 100
        assert complete(server, max_tokens=3)[0] == 200  # the slot is free again


def test_a_full_queue_is_429(target):
    engine = tiny_engine(target, slots=1)
    engine.step = Slow(engine, 0.03)
    with Server(engine, served(target, engine), max_waiting=0) as server:
        connection = open_stream(server, max_tokens=100, stream=True)
        wait_for(lambda: server.loop.live == 1)
        status, body, headers = complete(server, max_tokens=2)
        assert status == 429 and headers["Retry-After"] == "1" and body["error"]["type"] == "RateLimitError"
        connection.close()
        wait_for(lambda: server.loop.live == 0)
        assert complete(server, max_tokens=2)[0] == 200


def test_many_clients_at_once_get_their_own_answers(target):
    prompts = [[2, 8 + i, 9, 1, 3] for i in range(12)]
    expected = [direct(target, prompt, max_new_tokens=15) for prompt in prompts]
    found = {}
    with tiny_server(target, slots=3) as server:

        def ask(i):
            body = {"prompt": prompts[i], "max_tokens": 15, "temperature": 0, "return_token_ids": True}
            found[i] = call(server.url, "/v1/completions", body)[1]["choices"][0]["token_ids"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(12)] == expected


def test_stop_lets_running_answers_finish_and_leaves_no_thread(target):
    before = threading.active_count()
    server = slow_server(target, seconds=0.01)
    server.start()
    idle = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)  # a connection that is kept open
    idle.request("GET", "/health")
    idle.getresponse().read()
    connection = open_stream(server, max_tokens=40, stream=True)
    wait_for(lambda: server.loop.counts.generation_tokens > 0)
    server.stop(grace=10)
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and server.loop.counts.finished == {"length": 1}
    assert threading.active_count() == before
    with pytest.raises(ConnectionError):
        call(server.url, "/health")


def test_stop_without_patience_cancels(target):
    server = slow_server(target)
    server.start()
    connection = open_stream(server, max_tokens=120, stream=True)
    wait_for(lambda: server.loop.counts.generation_tokens > 0)
    began = time.monotonic()
    server.stop(grace=0)
    assert time.monotonic() - began < 3 and server.loop.counts.finished == {"cancelled": 1}
    assert b'"finish_reason": "abort"' in b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_broken_engine_is_reported_and_refuses(target):
    engine = tiny_engine(target)

    def broken(on_commit=None):
        raise RuntimeError("out of luck")

    engine.step = broken
    with tiny_server(target, engine=engine) as server:
        status, body, _ = complete(server, max_tokens=3)
        assert status == 503 and "out of luck" in body["error"]["message"]
        assert complete(server, max_tokens=3)[0] == 503
        assert call(server.url, "/health")[0] == 503


def test_text_pieces_hold_back_halves_of_characters_and_of_stop_strings():
    data = "naïve – ok".encode()
    text = TextAssembler(lambda ids: bytes(ids).decode(errors="replace"))
    parts = [text.push([byte]) for byte in data]
    assert "".join(parts) + text.finish() == "naïve – ok" and "\ufffd" not in "".join(parts)
    text = TextAssembler(lambda ids: bytes(ids).decode(), stop=["STOP", "TO"])
    parts = [text.push([byte]) for byte in b"a S S STO b"]
    assert "".join(parts) == "a S S S" and text.finish() == "" and text.stopped == "TO"
    text = TextAssembler(lambda ids: bytes(ids).decode(), stop=["STOP"], ends=[33])
    assert text.push(list(b"a ST!")) == "a " and text.finish() == "ST"
