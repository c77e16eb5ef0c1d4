"""Thousands of short requests that come, stop, are cancelled and meet a failing proposer: none lost or wrong, memory flat."""

from __future__ import annotations

import functools
import gc
import random
import tracemalloc
import warnings
from collections import defaultdict

import pytest
import torch
from proposers import OracleProposer

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.schedule import FixedLength
from tiny import tiny_model

VOCAB, ANSWER, CONTEXT, PROMPTS = 61, 24, 40, 150


@functools.cache
def model() -> torch.nn.Module:
    return tiny_model(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
    )


@functools.cache
def answers() -> dict[tuple[int, ...], list[int]]:
    """Plain greedy answers by transformers' forward, prompts of one length at a time. Some prompts share their beginnings."""
    rng = random.Random(1)
    texts: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    heads = [[rng.randrange(3, VOCAB) for _ in range(36)] for _ in range(5)]
    for i in range(PROMPTS):
        length = rng.choice((1, 3, 6, 10, 15, 22, 38))
        own = [rng.randrange(3, VOCAB) for _ in range(length)]
        texts[length].append(tuple((heads[i % 5][: length - 2] + own[-2:]) if i % 2 and length > 2 else own))
    found = {}
    for same in texts.values():
        ids = torch.tensor(same)
        for _ in range(ANSWER):
            ids = torch.cat((ids, model()(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
        found |= {text: row[len(text) :].tolist() for text, row in zip(same, ids, strict=True)}
    return found


class Unreliable(OracleProposer):
    """Right for half of the tokens; one call in a hundred raises, one in a hundred hands over rubbish."""

    def __init__(self, seed: int) -> None:
        half = {p: [t if i % 4 else (t + 1) % VOCAB for i, t in enumerate(a)] for p, a in answers().items()}
        super().__init__(half, num_slots=5)
        self.rng, self.failed = random.Random(seed), 0

    def _maybe_fail(self, chance: float) -> None:
        if self.rng.random() < chance:
            self.failed += 1
            raise RuntimeError("injected")

    def begin(self, row, prompt, taps, start=0):
        super().begin(row, prompt, taps)
        self._maybe_fail(0.005)

    def propose(self, rows, anchors, sampling, max_slots):
        self._maybe_fail(0.01)
        proposal = super().propose(rows, anchors, sampling, max_slots)
        if self.rng.random() < 0.01 and proposal.tokens.shape[1] > 0:
            self.failed += 1
            proposal.tokens[0, 0], proposal.lengths[0] = self.rng.choice((-1, VOCAB, 10**9)), 1
        return proposal

    def commit(self, rows, starts, tokens, taps):
        self._maybe_fail(0.005)
        self.committed.clear()  # what the tests of single answers read, and would grow here
        super().commit(rows, starts, tokens, taps)


class Erratic(FixedLength):
    """Any length for any row."""

    def __init__(self, seed: int) -> None:
        super().__init__(5)
        self.rng = random.Random(seed)

    def plan(self, view):
        plan = super().plan(view)
        return type(plan)([i for i in plan.rows if self.rng.random() < 0.8], plan.slots)

    def allocate(self, view, plan, proposal):
        most = super().allocate(view, plan, proposal)
        return torch.tensor([self.rng.randint(0, n) for n in most.tolist()])


def expected(request: Request) -> tuple[list[int], str]:
    answer, params = answers()[tuple(request.prompt_ids)], request.sampling
    room = CONTEXT - len(request.prompt_ids)
    most = min(params.max_new_tokens, room)
    for i, token in enumerate(answer[:most]):
        if token in params.stop_token_ids or (token == 2 and not params.ignore_eos):
            return answer[: i + 1], "stop"
    return answer[:most], "length" if most == params.max_new_tokens else "context"


def draw_request(rng: random.Random, number: int) -> Request:
    prompt = rng.choice(list(answers()))
    stops = tuple(rng.sample(range(3, VOCAB), 2)) if rng.random() < 0.4 else ()
    sampled = rng.random() < 0.2
    return Request(
        f"q{number}", list(prompt),
        SamplingParams(
            temperature=rng.choice((0.5, 1.0)) if sampled else 0.0, top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(1000),
            max_new_tokens=rng.randint(1, ANSWER if len(prompt) < 20 else 6), stop_token_ids=stops,
            ignore_eos=rng.random() < 0.5,
        ),
    )  # fmt: skip


class Client:
    """Submits, cancels and checks; keeps what is open, and nothing of what is over."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.open: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.seen: dict[str, list[int]] = {}
        self.ended: dict[str, int] = defaultdict(int)
        self.greedy = 0

    def serve(self, first: int, count: int) -> None:
        left = count
        while left or not self.engine.idle:
            for _ in range(min(left, self.rng.choice((0, 0, 1, 3, 9)) if len(self.open) < 40 else 0)):
                request = draw_request(self.rng, first + count - left)
                self.open[request.id] = request
                self.engine.submit(request)
                left -= 1
            if self.open and self.rng.random() < 0.3:
                self._cancel(self.rng.choice(list(self.open)))
            for completion in self.engine.step(self._on_commit):
                self._check(completion)
        assert not self.open and not self.cancelled and not self.seen

    def _cancel(self, name: str) -> None:
        if self.engine.cancel(name):
            assert name not in self.cancelled
            self.cancelled.add(name)

    def _on_commit(self, request, tokens, record) -> None:
        self.seen.setdefault(request.id, []).extend(tokens)
        if self.rng.random() < 0.01:
            self._cancel(self.rng.choice(list(self.open)))

    def _check(self, completion) -> None:
        request = self.open.pop(completion.id)  # once, and only what was asked
        tokens, reason = expected(request)
        assert completion.token_ids == self.seen.pop(completion.id, [])
        assert completion.prompt_tokens == len(request.prompt_ids)
        assert sum(cycle.committed for cycle in completion.cycles) == max(0, len(completion.token_ids) - 1)
        assert (completion.finish_reason == "cancelled") == (completion.id in self.cancelled)
        self.cancelled.discard(completion.id)
        self.ended[completion.finish_reason] += 1
        if not request.sampling.greedy:
            assert len(completion.token_ids) <= min(request.sampling.max_new_tokens, CONTEXT - len(request.prompt_ids))
            assert all(0 <= token < VOCAB for token in completion.token_ids)
            return
        self.greedy += 1
        if completion.finish_reason == "cancelled":
            assert completion.token_ids == tokens[: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason) == (tokens, reason)


def make(seed: int) -> tuple[Client, Unreliable]:
    proposer = Unreliable(seed)
    served = Decoder.from_target(model(), dtype=torch.float32, backend="torch")
    e = Engine(
        served, proposer=proposer, scheduler=Erratic(seed), slots=16, max_context=CONTEXT, eos_ids=(2,), prefill_tokens=48,
        reuse_prefix=True,
    )  # fmt: skip
    return Client(e, seed), proposer


def check_whole(client: Client, proposer: Unreliable, count: int) -> None:
    e = client.engine
    assert sum(client.ended.values()) == count and client.greedy > 0.7 * count
    assert set(client.ended) == {"stop", "length", "context", "cancelled"} and min(client.ended.values()) > count / 50
    assert e.stats.proposer_failures == proposer.failed > count / 200 and e._drafting.on
    assert e.stats.accepted_per_slot[0] > count / 10 and e.stats.reused_tokens > count / 2
    assert not e._live and not e._active and not e._waiting and not e._events and not proposer.prompts
    assert len(e._slots) == 16 and len(e._batches) <= 8


@pytest.mark.filterwarnings("ignore:the proposer failed")
def test_five_hundred_requests():
    client, proposer = make(3)
    client.serve(0, 500)
    check_whole(client, proposer, 500)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the proposer failed")
def test_ten_thousand_requests_and_flat_memory():
    client, proposer = make(4)
    client.serve(0, 5000)
    gc.collect()
    tracemalloc.start()
    client.serve(5000, 5000)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    check_whole(client, proposer, 10_000)
    assert grown < 200_000, f"{grown} bytes were kept of 5,000 requests"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.serve(10_000, 0)
