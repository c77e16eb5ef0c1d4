"""The client of an OpenAI-compatible server, against our own server behind a proxy that injects faults; real sockets only."""

import itertools
import random
import socket
import threading
import time

import pytest
from http_serving import FaultyProxy, tiny_server
from tiny_chat import chat_target

from draftsmith.data.openai_client import OpenAIClient, ServerError

PROMPTS = [[2, 8 + i, 9, 1, 3] for i in range(24)]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "seed": 0}
FAULTS = ("429", "500", "hang", "cut", "short")


@pytest.fixture(scope="module")
def server():
    with tiny_server(chat_target(), slots=8) as found:
        yield found


def client(url, **settings):
    return OpenAIClient(url, model="tiny", **({"concurrency": 6, "timeout": 0.5, "backoff": 0.01} | settings))


def requests(sampling=GREEDY):
    return [(f"p{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(server):
    asked = client(server.url, timeout=30)
    replies = [asked.complete(prompt, GREEDY) for prompt in PROMPTS]
    asked.close()
    assert all(reply.prompt_ids == prompt for reply, prompt in zip(replies, PROMPTS, strict=True))
    assert all(reply.completion_tokens == len(reply.token_ids) for reply in replies)
    return [reply.token_ids for reply in replies]


def faulty(rate, *, faults=FAULTS, seed=0):
    """A plan that breaks this share of the requests, in every way in turn."""
    numbers, turn = random.Random(seed), itertools.cycle(faults)

    def plan(number, body):
        return next(turn) if numbers.random() < rate else None

    return plan


def test_nothing_is_lost_or_doubled_under_faults(server, expected):
    before = threading.active_count()
    with FaultyProxy(server.url, faulty(0.35), hang_s=2.5) as proxy:
        found = {}
        for index, reply in client(proxy.url, timeout=1.5).map(requests()):
            assert index not in found
            found[index] = reply
        assert [found[i].token_ids for i in range(len(PROMPTS))] == expected
        assert proxy.most <= 6
        assert {fault for fault in proxy.faults if fault} == set(FAULTS)
        assert sum(reply.attempts for reply in found.values()) == len(proxy.seen) > len(PROMPTS) + 5
        reasons = " ".join(reason for reply in found.values() for reason in reply.retried)
        for what in ("HTTP 429", "HTTP 500", "time limit", "ended early"):
            assert what in reasons
    deadline = time.monotonic() + 10  # the server may still be at requests whose client gave up
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_concurrency_is_a_bound(server):
    def slowly(number, body):
        time.sleep(0.02)

    for most in (1, 3):
        with FaultyProxy(server.url, slowly) as proxy:
            assert len(list(client(proxy.url, concurrency=most, timeout=30).map(requests()))) == len(PROMPTS)
            assert proxy.most == most


def test_a_request_that_keeps_failing_fails_alone(server, expected):
    def plan(number, body):
        return "500" if body["prompt"] == PROMPTS[3] else None

    with FaultyProxy(server.url, plan) as proxy:
        found = dict(client(proxy.url, retries=2, timeout=30).map(requests()))
    assert isinstance(found[3], ServerError) and "failed 3 times" in str(found[3]) and "injected 500" in str(found[3])
    assert all(found[i].token_ids == expected[i] for i in range(len(PROMPTS)) if i != 3)


def test_mistakes_are_not_repeated(server):
    with FaultyProxy(server.url, lambda number, body: None) as proxy, pytest.raises(ServerError, match="top_p") as caught:
        client(proxy.url, timeout=30).complete(PROMPTS[0], {"top_p": 7})
    assert caught.value.status == 400 and len(proxy.seen) == 1


def test_waits_grow_are_jittered_and_keep_retry_after(server):
    waits = []
    plan = {0: "429", 1: "500", 2: "500"}
    with FaultyProxy(server.url, lambda number, body: plan.get(number)) as proxy:
        asked = client(proxy.url, timeout=30, backoff=0.01, wait=lambda seconds: waits.append(seconds) or False)
        assert asked.complete(PROMPTS[0], GREEDY, key="k").attempts == 4
    assert waits[0] == 0.05  # the server's Retry-After is longer than the backoff
    assert 0.01 <= waits[1] <= 0.02 and 0.02 <= waits[2] <= 0.04
    steady = client("http://127.0.0.1:1", backoff=1.0, longest=30.0)
    delays = [steady.delay("k", n) for n in range(1, 12)]
    assert all(0.5 * min(30, 2.0**n) <= delay <= min(30, 2.0**n) for n, delay in enumerate(delays))
    assert delays == [client("http://x:1", backoff=1.0).delay("k", n) for n in range(1, 12)]
    assert delays[0] != steady.delay("other", 1) and delays[0] != client("http://x:1", backoff=1.0, seed=1).delay("k", 1)


def test_logprobs_and_sampled_text(server):
    asked = client(server.url, timeout=30)
    plain = asked.complete(PROMPTS[0], {"temperature": 1.0, "seed": 4, "max_tokens": 9})
    scored = asked.complete(PROMPTS[0], {"temperature": 1.0, "seed": 4, "max_tokens": 9}, logprobs=True)
    asked.close()
    assert scored.token_ids == plain.token_ids and plain.logprobs is None
    assert len(scored.logprobs) == len(scored.token_ids) and all(value <= 0 for value in scored.logprobs)
    assert 0 < plain.first_s <= plain.seconds


def test_stopping_early_ends_the_workers(server):
    before = threading.active_count()
    with FaultyProxy(server.url, lambda number, body: "hang" if number > 2 else None, hang_s=20) as proxy:
        replies = client(proxy.url, timeout=30).map(requests())
        next(replies)
        began = time.monotonic()
        replies.close()
        assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "client"]
    assert threading.active_count() <= before + 8  # the proxy's own hanging answers


def test_models_are_chosen_and_checked(server):
    assert OpenAIClient(server.url + "/v1").choose_model(needs=128) == "tiny"
    with pytest.raises(ValueError, match="data.max_length: 129"):
        OpenAIClient(server.url).choose_model(needs=129)
    with pytest.raises(ValueError, match="does not serve 'big'"):
        OpenAIClient(server.url, model="big").choose_model()


def test_settings_and_a_server_that_is_not_there():
    for settings, key in (
        ({"url": "localhost:80"}, "server"), ({"concurrency": 0}, "concurrency"), ({"retries": -1}, "retries"),
        ({"timeout": 0}, "timeout"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=key):
            OpenAIClient(**({"url": "http://x:1"} | settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match="failed 3 times"):
        OpenAIClient(f"http://127.0.0.1:{port}", backoff=0.001).models()
