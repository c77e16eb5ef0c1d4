"""Requests that come and go: step by step, cancelled, prefilled in chunks, over a cache that remembers, scheduled."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter

import pytest
import torch
from drafters import tiny_drafter
from proposers import OracleProposer, RandomProposer, WrongProposer
from scipy import stats
from serving import (
    SMALL,
    VOCAB,
    answers,
    decoder,
    drain,
    engine,
    long_prompt,
    plain,
    prompts,
    requests,
    small_drafter,
    small_model,
)

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, EngineStats, Request
from draftsmith.runtime.schedule import CycleView, DraftPlan, FixedLength, Threshold
from tiny import tiny_model


def kernels_or_skip(model) -> None:
    from draftsmith.runtime.kernels import unsupported_reason

    if (reason := unsupported_reason(model, torch.float32)) is not None:
        pytest.skip(reason)


# ---- submit, step, cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "oracle", "dspark"])
def test_steps_serve_what_run_serves(kind: str):
    wanted = requests(prompts(5), max_new_tokens=14)
    e = engine(kind, 2)
    assert e.idle and e.step() == []
    for request in wanted[:3]:
        e.submit(request)
    assert not e.idle
    done = [*e.step(), *e.step()]
    for request in wanted[3:]:  # join while the others run
        e.submit(request)
    done += drain(e)
    assert sorted(done, key=lambda c: c.id) == engine(kind, 2).run(wanted)
    assert e.idle and e.stats.proposer_failures == 0


def test_a_completion_comes_with_the_step_that_ended_it():
    e = engine("oracle")
    e.submit(*requests(prompts(1), max_new_tokens=17))  # 1 + 8 + 8
    assert [len(e.step()) for _ in range(2)] == [0, 1] and e.idle


def test_an_id_is_free_again_once_its_request_ended():
    e = engine(slots=1)
    first, second = Request("a", [5, 6]), Request("b", [5, 6], SamplingParams(max_new_tokens=3))
    e.submit(first)
    e.submit(second)
    for id in "ab":  # running or waiting
        with pytest.raises(ValueError, match=f"request {id}: another request with this id is not finished"):
            e.submit(Request(id, [7]))
    drain(e)
    e.submit(second)
    assert [c.id for c in drain(e)] == ["b"]
    with pytest.raises(ValueError, match="request c: prompt token 97 is not in 0..96"):
        e.submit(Request("c", [5, 97]))
    assert [c.id for c in e.run([second, second])] == ["b", "b"]  # run tells them apart by place


@pytest.mark.parametrize("kind", ["none", "oracle", "dspark"])
def test_cancelled_requests_free_their_slot_and_disturb_nobody(kind: str):
    e = engine(kind, 2, prefill_tokens=24)
    texts = prompts(6)
    wanted = requests([texts[0], long_prompt(60), texts[2], texts[3], texts[4]], max_new_tokens=20)
    for request in wanted:
        e.submit(request)
    assert e.step() == []
    # r0 runs, r1 is being prefilled, r2..r4 wait
    assert [e.cancel(id) for id in ("r0", "r1", "r3", "r9")] == [True, True, True, False]
    assert not e.cancel("r0")
    seen: list[str] = []
    found = {c.id: c for c in e.step(lambda request, tokens, record: seen.append(request.id))}
    assert set(seen) == {"r2", "r4"}, "both slots were free before the next step"
    assert {c.id: c.finish_reason for c in found.values()} == dict.fromkeys(("r0", "r1", "r3"), "cancelled")
    assert found["r1"].token_ids == found["r3"].token_ids == []
    tokens = found["r0"].token_ids
    assert 0 < len(tokens) < 20 and tokens == answers()[tuple(texts[0])][: len(tokens)]
    for completion in drain(e):
        assert completion.token_ids == answers()[tuple(texts[int(completion.id[1:])])][:20]
    assert e.stats.proposer_failures == 0


def test_on_commit_may_cancel_and_submit():
    e, texts = engine("ngram", 2), prompts(4)
    wanted = requests(texts, max_new_tokens=12)

    def on_commit(request, tokens, record):
        if request.id == "r0" and record is not None:
            assert e.cancel("r1") and not e.cancel("r7")
        if request.id == "r2" and record is None:
            e.submit(Request("late", texts[3], SamplingParams(max_new_tokens=5)))

    first = True
    for request in wanted[:3]:
        e.submit(request)
    done = {}
    while not e.idle:
        done |= {c.id: c for c in e.step(on_commit if first else None)}
        first = "r1" not in done
    assert {id: c.finish_reason for id, c in done.items()} == {"r0": "length", "r1": "cancelled", "r2": "length"}
    assert done["r2"].token_ids == answers()[tuple(texts[2])][:12]


@pytest.mark.parametrize("kind", ["none", "dspark"])
def test_an_exception_from_on_commit_leaves_the_engine_whole(kind: str):
    e = engine(kind, 2)
    wanted = requests(prompts(3), max_new_tokens=12)
    e.submit(Request("mine", prompts(4)[3], SamplingParams(max_new_tokens=12)))

    def on_commit(request, tokens, record):
        if request.id == "r1" and record is not None:
            raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"):
        e.run(wanted, on_commit)
    assert [c.id for c in drain(e)] == ["mine"]  # a request of somebody else's goes on
    assert [c.token_ids for c in e.run(wanted)] == [answers()[tuple(text)][:12] for text in prompts(3)]


# ---- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "dspark"])
def test_a_long_prompt_stalls_nobody(kind: str):
    e, text = engine(kind, 2, prefill_tokens=8), prompts(1)[0]
    long = long_prompt(60)
    e.submit(Request("short", text, SamplingParams(max_new_tokens=26)))
    e.step()
    e.submit(Request("long", long, SamplingParams(max_new_tokens=6)))
    firsts = []
    done = []
    for step in range(8):
        before, seen = e.stats.prefill_tokens, Counter()
        done += e.step(lambda request, tokens, record, seen=seen: seen.update({request.id: len(tokens)}))
        assert e.stats.prefill_tokens - before <= 8
        assert seen["short"] or any(c.id == "short" for c in done)
        firsts += [step] if seen["long"] else []
    assert firsts[0] == 7, "60 prompt tokens at 8 a step"
    done = {c.id: c for c in [*done, *drain(e)]}
    assert done["short"].token_ids == answers()[tuple(text)]
    assert done["long"].token_ids == plain(long, 6) and done["long"].prompt_tokens == 60


def test_short_prompts_share_a_pass():
    e = engine(slots=4, prefill_tokens=20)
    texts = [[5] * 6, [6] * 5, [7] * 9, [8] * 4]
    for request in requests(texts, max_new_tokens=4):
        e.submit(request)
    seen = []
    for _ in range(2):
        step = set()
        e.step(lambda request, tokens, record, step=step: step.add(request.id))
        seen.append(step)
    assert seen == [{"r0", "r1", "r2"}, {"r0", "r1", "r2", "r3"}]  # 6 + 5 + 9, then 4
    assert [c.token_ids for c in sorted(drain(e), key=lambda c: c.id)] == [plain(text, 4) for text in texts]


def test_a_prompt_that_leaves_room_for_a_token_or_two():
    # Case 12: within 3 tokens of the context limit, in chunks and with drafts.
    for left, kind in itertools.product((1, 2, 3), ("none", "random", "dspark")):
        text = long_prompt(40 - left)
        found = engine(kind, 1, max_context=40, prefill_tokens=16).run(requests([text], max_new_tokens=9))[0]
        assert (found.token_ids, found.finish_reason) == (plain(text, left), "context")


@pytest.mark.parametrize("kind", ["none", "dspark"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_chunks_change_nothing(backend: str, kind: str):
    model = tiny_model(head_dim=32)
    if backend == "kernels":
        kernels_or_skip(model)
    served = Decoder.from_target(model, dtype=torch.float32, tap_layers=(0, 1), backend=backend)
    drafter, heads = tiny_drafter(model)
    texts = [long_prompt(50), *prompts(3), long_prompt(33, seed=4)]

    def run(prefill_tokens: int, slots: int):
        proposer = DSparkProposer(drafter, heads, slots=slots, max_context=80) if kind == "dspark" else None
        e = Engine(served, proposer=proposer, slots=slots, max_context=80, prefill_tokens=prefill_tokens)
        wanted = [
            Request(f"r{i}", text, SamplingParams(max_new_tokens=8 + i, temperature=float(i % 2), seed=i))
            for i, text in enumerate(texts)
        ]
        done = e.run(wanted)
        assert e.stats.prefill_tokens == sum(map(len, texts)) and e.stats.proposer_failures == 0
        return done, e.cache

    whole, cache = run(512, 1)
    for prefill_tokens, slots in ((1, 1), (7, 1), (20, 3), (512, 5)):
        chunked, other = run(prefill_tokens, slots)
        assert chunked == whole
        if slots == 1 and backend == "kernels":
            kept = len(texts[-1])  # the last request's prompt is still there, to the bit
            assert torch.equal(other.k[:, 0, :, :kept], cache.k[:, 0, :, :kept])
            assert torch.equal(other.values()[:, 0, :, :kept], cache.values()[:, 0, :, :kept])


# ---- reuse of prefixes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "ngram", "random", "dspark", "dspark-rnn"])
def test_a_shared_prefix_is_prefilled_once(kind: str):
    head, settings = long_prompt(40), dict(max_new_tokens=10, temperature=1.0, seed=5)
    first, second, third = head + [5, 6, 7], head + [8, 9], head
    e = engine(kind, 1, reuse_prefix=True)
    fresh = [engine(kind, 1).run(requests([text], **settings))[0] for text in (first, second, third, third)]
    found = []
    for text, left, start in ((first, 43, 0), (second, 2, 40), (third, 1, 39), (third, 1, 39)):
        e.reset_stats()
        found += e.run(requests([text], **settings))
        assert (e.stats.prefill_tokens, e.stats.reused_tokens) == (left, start)
    assert found == fresh and e.stats.proposer_failures == 0


@pytest.mark.parametrize("kind", ["none", "ngram", "dspark"])
def test_a_conversation_goes_on_behind_its_last_answer(kind: str):
    text, e = prompts(6)[1], engine(kind, 2, reuse_prefix=True)
    for turn in range(3):
        e.reset_stats()
        [found] = e.run(requests([text], max_new_tokens=9))
        assert found == engine(kind, 1).run(requests([text], max_new_tokens=9))[0]
        # all but the last token of the answer has been through the target
        assert turn == 0 or (e.stats.prefill_tokens, e.stats.proposer_failures) == (4, 0)
        text = [*text, *found.token_ids, 11, 12, 13]


def test_the_slot_with_the_longest_prefix_is_taken():
    heads = [long_prompt(20, seed=s) for s in range(3)]
    e = engine("dspark", 3, reuse_prefix=True)
    e.run(requests([[*head, 5] for head in heads], max_new_tokens=4))
    e.reset_stats()
    texts = [[*heads[2], 6], [*heads[0][:12], 6], [*heads[1], 6]]
    found = e.run(requests(texts, max_new_tokens=4))
    assert e.stats.reused_tokens == 20 + 12 + 20
    assert found == engine("dspark", 1).run(requests(texts, max_new_tokens=4))


def test_without_reuse_nothing_is_reused():
    e = engine("dspark", 1)
    for _ in range(2):
        e.run(requests([long_prompt(30)], max_new_tokens=4))
    assert e.stats.prefill_tokens == 60 and e.stats.reused_tokens == 0


def test_what_a_cancelled_prefill_left_behind_is_used_as_far_as_it_goes():
    for kind, reused in (("none", 16), ("dspark", 0)):  # the drafter never saw that prompt
        e = engine(kind, 1, prefill_tokens=8, reuse_prefix=True)
        e.submit(*requests([long_prompt(40)], max_new_tokens=5))
        e.step()
        e.step()
        e.cancel("r0")
        [gone] = e.step()
        assert gone.finish_reason == "cancelled" and e.stats.prefill_tokens == 16
        [found] = e.run(requests([long_prompt(40)], max_new_tokens=5))
        assert found.token_ids == plain(long_prompt(40), 5) and e.stats.reused_tokens == reused


# ---- schedules ----------------------------------------------------------------------------------------------------


class Scripted(FixedLength):
    """Lengths by a hash of slot and time: rows drafted or not, cut or not, without a look at any token."""

    def __init__(self, most: int = 7, seed: int = 0) -> None:
        super().__init__(most)
        self.clock, self.seed = 0, seed
        self.rows: set[int] = set()
        self.log: list[tuple[CycleView, DraftPlan, list[int], list[int]]] = []

    def begin(self, row: int) -> None:
        assert row not in self.rows
        self.rows.add(row)

    def release(self, row: int) -> None:
        self.rows.remove(row)

    def _number(self, slot: int, salt: int) -> int:
        return hash((self.seed, self.clock, slot, salt)) % 1009

    def plan(self, view: CycleView) -> DraftPlan:
        assert set(view.slots) <= self.rows
        self.clock += 1
        rows = [i for i, slot in enumerate(view.slots) if self._number(slot, 0) % 4]
        rows = rows[:: -1 if self.clock % 2 else 1]  # in any order
        self.planned = DraftPlan(rows, self._number(0, 1) % (self.gamma + 1))
        return self.planned

    def allocate(self, view: CycleView, plan: DraftPlan, proposal) -> torch.Tensor:
        assert proposal.tokens.shape[0] == len(plan.rows) and proposal.tokens.shape[1] <= plan.slots
        assert set(plan.rows) <= set(self.planned.rows) and all(view.room[i] > 0 for i in plan.rows)
        wanted = torch.tensor([self._number(view.slots[i], 2) % (plan.slots + 1) for i in plan.rows])
        return torch.minimum(wanted, super().allocate(view, plan, proposal))

    def observe(self, view: CycleView, lengths: list[int], accepted: list[int]) -> None:
        assert len(lengths) == len(accepted) == len(view.slots)
        assert all(a <= n <= max(0, room) for a, n, room in zip(accepted, lengths, view.room, strict=True))
        undrafted = set(range(len(lengths))) - set(self.planned.rows)
        assert all(lengths[i] == 0 for i in undrafted)
        self.log.append((view, self.planned, lengths, accepted))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", ["oracle", "wrong", "random", "ngram", "dspark", "dspark-reduced"])
def test_greedy_text_under_any_schedule(kind: str, slots: int):
    scheduler = Scripted()
    e = engine(kind, slots, scheduler=scheduler, prefill_tokens=16)
    budgets = [24, 9, 17, 25, 12, 20]
    wanted = [
        Request(f"r{i}", p, SamplingParams(max_new_tokens=b)) for i, (p, b) in enumerate(zip(prompts(6), budgets, strict=True))
    ]
    for completion, request, budget in zip(e.run(wanted), wanted, budgets, strict=True):
        assert completion.token_ids == answers()[tuple(request.prompt_ids)][:budget]
    seen = e.stats
    assert seen.proposer_failures == 0 and not scheduler.rows
    lengths = [n for _, _, row, _ in scheduler.log for n in row]
    assert len(scheduler.log) == seen.steps and len(lengths) == seen.cycles
    assert Counter(lengths) == Counter({n: c for n, c in enumerate(seen.length_counts) if c})
    assert seen.verified_tokens == sum(lengths) + len(lengths)
    assert len(set(lengths)) > 2 and seen.plain_steps == sum(not any(row) for _, _, row, _ in scheduler.log) < seen.steps
    assert sum(min(a, n) for _, _, n_, a_ in scheduler.log for a, n in zip(a_, n_, strict=True)) >= sum(seen.accepted_per_slot)
    if kind == "oracle":
        assert all(a == n for _, _, n_, a_ in scheduler.log for a, n in zip(a_, n_, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schedules_and_chunks_on_the_cpu_kernels(dtype: torch.dtype):
    # Bitwise: also in bfloat16 the text is that of plain decoding, one row at a time.
    model = tiny_model(head_dim=32)
    kernels_or_skip(model)
    served = Decoder.from_target(model.to(dtype), dtype=dtype, tap_layers=(0, 1), backend="kernels")
    texts = [*prompts(5), long_prompt(40)]
    want = Engine(served, max_context=64).run(requests(texts, max_new_tokens=18))
    for proposer in (DSparkProposer(*tiny_drafter(model.float()), slots=3, max_context=64), RandomProposer(VOCAB)):
        settings = dict(scheduler=Scripted(), slots=3, max_context=64, prefill_tokens=11, reuse_prefix=True)
        e = Engine(served, proposer=proposer, **settings)
        for order in (1, -1):
            found = e.run(requests(texts[::order], max_new_tokens=18))
            assert [c.token_ids for c in found] == [c.token_ids for c in want[::order]]
        assert e.stats.proposer_failures == 0 and e.stats.reused_tokens > 39


def test_no_draft_no_call_of_the_proposer():
    e = engine("oracle", 2, scheduler=FixedLength(0))
    found = e.run(requests(prompts(3), max_new_tokens=9))
    assert [c.token_ids for c in found] == [answers()[tuple(text)][:9] for text in prompts(3)]
    seen = e.stats
    assert seen.draft_passes == seen.drafted_tokens == 0 and seen.plain_steps == seen.steps == 16
    assert seen.length_counts == [24] and seen.verified_tokens == 24
    e.scheduler = FixedLength(3)
    assert [c.token_ids for c in e.run(requests(prompts(3), max_new_tokens=9))] == [c.token_ids for c in found]
    # 8 tokens after the first: 4 and 4, for two rows and then one
    assert e.stats.draft_passes == 4 and e.stats.drafted_tokens == 3 * 6 and e.stats.length_counts == [24, 0, 0, 6]


def test_the_scheduler_is_replaced_between_requests_only():
    e = engine("oracle")
    e.submit(*requests(prompts(1), max_new_tokens=20))
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="scheduler: requests are live"):
            e.scheduler = FixedLength(1)
        e.step()
    drain(e)
    e.scheduler = FixedLength(1)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_sampled_answer_does_not_depend_on_who_else_is_scheduled(backend: str):
    # Threshold looks at its own row's survivals only, so the row's cycles are its own affair.
    model = tiny_model(head_dim=32)
    if backend == "kernels":
        kernels_or_skip(model)
    served = Decoder.from_target(model, dtype=torch.float32, tap_layers=(0, 1), backend=backend)
    drafter, heads = tiny_drafter(model)
    wanted = [
        Request(f"r{i}", text, SamplingParams(max_new_tokens=12 + i, seed=40 + i, temperature=(0.0, 1.0, 0.7)[i % 3]))
        for i, text in enumerate(prompts(6))
    ]

    def run(part: list[Request], slots: int):
        proposer = DSparkProposer(drafter, heads, slots=slots, max_context=64, with_survival=True)
        e = Engine(served, proposer=proposer, slots=slots, max_context=64, scheduler=Threshold(0.4), prefill_tokens=9 * slots)
        return e.run(part)

    together = run(wanted, 4)
    assert together == [run([request], 1)[0] for request in wanted]
    assert len({c.proposed for completion in together for c in completion.cycles}) > 2


class Confident(Scripted):
    """A legal stop rule: slot k is kept while the whole vectors q_1..q_k, which depend on x_<k, are peaked enough."""

    def allocate(self, view: CycleView, plan: DraftPlan, proposal) -> torch.Tensor:
        peaked = (proposal.probs.amax(-1) > 0.6).to(torch.int64).cumprod(-1).sum(-1)
        return torch.minimum(peaked, FixedLength.allocate(self, view, plan, proposal))


class Peeking(FixedLength):
    """Forbidden: the first slot is kept only where its own token is 0."""

    def allocate(self, view: CycleView, plan: DraftPlan, proposal) -> torch.Tensor:
        return torch.where(proposal.tokens[:, 0] == 0, super().allocate(view, plan, proposal), 0)


@functools.cache
def plain_sample(count: int) -> Counter:
    served = Decoder.from_target(small_model(), dtype=torch.float32, backend="torch")
    return Counter(tuple(c.token_ids) for c in Engine(served, slots=64, max_context=16).run(sampled(count, seed=10**6)))


def sampled(count: int, seed: int) -> list[Request]:
    return [Request(str(s), [1, 3], SamplingParams(temperature=1.4, max_new_tokens=4, seed=seed + s)) for s in range(count)]


def two_samples(rule: str, scheduler: FixedLength, count: int) -> tuple[float, EngineStats]:
    """p that scheduled and plain answers of 4 tokens have one law (chi-square on neighbours), and what the engine counted."""
    served = Decoder.from_target(small_model(), dtype=torch.float32, tap_layers=(0,), backend="torch")
    proposer = DSparkProposer(*small_drafter(), slots=64, max_context=16)
    e = Engine(served, proposer=proposer, slots=64, max_context=16, rule=rule, scheduler=scheduler)
    mine, other = Counter(tuple(c.token_ids) for c in e.run(sampled(count, seed=0))), plain_sample(count)
    assert e.stats.proposer_failures == 0
    values = []
    for k in range(3):
        table = torch.zeros(2, SMALL * SMALL)
        for row, sample in zip(table, (mine, other), strict=True):
            for text, times in sample.items():
                row[SMALL * text[k] + text[k + 1]] += times
        values.append(float(stats.chi2_contingency(table[:, table.sum(0) > 0].numpy()).pvalue))
    return min(1.0, 3 * min(values)), e.stats


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("scheduler", "count"), [(Scripted, 1500), (Confident, 1500), pytest.param(Confident, 50_000, marks=pytest.mark.slow)]
)
def test_the_law_is_kept_under_a_legal_schedule(rule: str, scheduler: type[Scripted], count: int):
    p, counted = two_samples(rule, scheduler(2), count)
    assert p > 1e-3
    assert counted.accepted_per_slot[1] > count / 150 and min(counted.length_counts) > count / 15


def test_a_schedule_that_looks_at_the_token_is_seen_to_fail():
    assert two_samples("block", Peeking(2), 1500)[0] < 1e-6


# ---- other targets, times, the accelerator's path --------------------------------------------------------------------


@pytest.mark.parametrize(("family", "changes"), [("mistral", dict(sliding_window=8)), ("gemma2", dict(sliding_window=8))])
@pytest.mark.parametrize("kind", ["none", "random", "half", "dspark"])
def test_sliding_windows_roll_back(family: str, changes: dict, kind: str):
    model = tiny_model(family, **(changes | (dict(head_dim=16) if family == "gemma2" else {})))
    texts = prompts(4)  # 3 to 18 tokens, and 24 of answer: the window has moved on
    want = [plain(text, 24, model) for text in texts]
    half = {tuple(p): [t if i % 3 else (t + 1) % VOCAB for i, t in enumerate(a)] for p, a in zip(texts, want, strict=True)}
    proposer = {"none": None, "random": RandomProposer(VOCAB), "half": OracleProposer(half)}.get(kind)
    if kind == "dspark":
        proposer = DSparkProposer(*tiny_drafter(model), slots=3, max_context=64)
    served = Decoder.from_target(model, dtype=torch.float32, tap_layers=(0, 1) if kind == "dspark" else ())
    for settings in (dict(), dict(scheduler=Scripted(), prefill_tokens=5)):
        e = Engine(served, proposer=proposer, slots=3, max_context=64, **settings)
        assert [c.token_ids for c in e.run(requests(texts, max_new_tokens=24))] == want
        assert e.stats.proposer_failures == 0
        assert kind != "half" or e.stats.accepted_per_slot[1] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["random", "ngram", "dspark-reduced"])
def test_lengths_that_stay_on_the_device_give_the_same(kind: str, temperature: float):
    # An accelerator does not know the lengths before the commit: the padded block is verified.
    wanted = requests(prompts(5), max_new_tokens=15, temperature=temperature, seed=3)
    here, there = engine(kind, 3, scheduler=Scripted()), engine(kind, 3, scheduler=Scripted())
    there._on_host = there._drafting.on_host = False
    assert here.run(wanted) == there.run(wanted)
    for part in ("cycles", "committed", "verified_tokens", "drafted_tokens", "length_counts", "accepted_per_slot"):
        assert getattr(here.stats, part) == getattr(there.stats, part)


@pytest.mark.parametrize("kind", ["none", "dspark"])
def test_the_parts_of_the_time_add_up(kind: str):
    e = engine(kind, 3, scheduler=FixedLength(5), prefill_tokens=16)
    for request in requests(prompts(6), max_new_tokens=20):
        e.submit(request)
    began = time.perf_counter()
    while not e.idle:
        e.step()
    wall = time.perf_counter() - began
    s = e.stats
    parts = [s.prefill_s, s.draft_s, s.head_s, s.schedule_s, s.verify_s, s.rest_s]
    assert 0.9 * wall < sum(parts) <= wall
    assert min(s.prefill_s, s.verify_s, s.rest_s) > 0 and (kind == "none" or min(s.draft_s, s.head_s, s.schedule_s) > 0)


def test_mixed_kinds_of_rows_in_one_batch():
    # Greedy and sampled, stop tokens and budgets, prompts of all lengths, joins in the middle: each as if alone.
    wanted = [
        Request(
            f"r{i}", text,
            SamplingParams(
                max_new_tokens=5 + 3 * i, seed=i, temperature=(0.0, 1.0)[i % 2], stop_token_ids=tuple(range(3, 3 + 4 * (i % 3)))
            ),
        )
        for i, text in enumerate([*prompts(6), long_prompt(45)])
    ]  # fmt: skip
    for kind in ("wrong", "ngram", "dspark"):
        if kind == "wrong":
            table = {tuple(r.prompt_ids): list(range(3, 40)) for r in wanted}
            make = lambda slots, table=table: Engine(  # noqa: E731
                decoder(), proposer=WrongProposer(table, VOCAB), slots=slots, max_context=128, prefill_tokens=10
            )
        else:
            make = lambda slots, kind=kind: engine(kind, slots, prefill_tokens=10)  # noqa: E731
        together = make(3).run(wanted)
        assert together == [make(1).run([request])[0] for request in wanted]
        assert len({c.finish_reason for c in together}) == 2


def test_settings_of_serving_that_are_refused():
    with pytest.raises(ValueError, match="prefill_tokens: 0 must be at least 1"):
        engine(prefill_tokens=0)
    assert engine().stats == EngineStats()
