"""The engine's answers: greedy text is the target's whatever drafts, limits cut where they should, the law is kept."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch
from drafters import tiny_drafter
from proposers import OracleProposer, PerPrompt, RandomProposer, WrongProposer
from scipy import stats
from serving import SMALL, VOCAB, answers, decoder, engine, long_prompt, plain, prompts, requests, small_drafter, small_model

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import CycleRecord, Engine, EngineStats, Request
from draftsmith.runtime.ngram import NgramProposer
from draftsmith.runtime.verify import token_wise
from tiny import tiny_model

# ---- greedy parity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("kind", ["none", "oracle", "wrong", "random", "ngram", "dspark", "dspark-reduced", "dspark-rnn"])
def test_greedy_text_is_the_targets_own(kind: str, slots: int):
    # Budgets differ: rows end at different cycles and the two requests left over join in the middle.
    budgets = [24, 9, 17, 25, 12, 20]
    wanted = [
        Request(f"r{i}", p, SamplingParams(max_new_tokens=b)) for i, (p, b) in enumerate(zip(prompts(6), budgets, strict=True))
    ]
    found = engine(kind, slots).run(wanted)
    for completion, request, budget in zip(found, wanted, budgets, strict=True):
        assert completion.id == request.id and completion.prompt_tokens == len(request.prompt_ids)
        assert completion.token_ids == answers()[tuple(request.prompt_ids)][:budget]
        assert completion.finish_reason == "length"
        assert 1 + sum(cycle.committed for cycle in completion.cycles) == budget


@pytest.mark.parametrize("kind", ["dspark", "random"])
def test_greedy_text_on_the_cpu_kernels(kind: str):
    from draftsmith.runtime.kernels import unsupported_reason

    model = tiny_model(head_dim=32)
    if (reason := unsupported_reason(model, torch.float32)) is not None:
        pytest.skip(reason)
    texts = prompts(4)
    served = Decoder.from_target(model, dtype=torch.float32, tap_layers=(0, 1) if kind == "dspark" else (), backend="kernels")
    drafter, heads = tiny_drafter(model)
    proposer = DSparkProposer(drafter, heads, slots=3, max_context=64) if kind == "dspark" else RandomProposer(VOCAB)
    found = Engine(served, proposer=proposer, slots=3, max_context=64).run(requests(texts, max_new_tokens=12))
    for completion, text in zip(found, texts, strict=True):
        assert completion.token_ids == plain(text, 12, model)


def test_oracle_and_wrong_drafts_are_all_accepted_and_all_refused():
    text = prompts(6)[1]
    # 26 tokens: one from prefill, then 8, 8, 8 and what is left, 1.
    oracle = engine("oracle").run(requests([text], max_new_tokens=26))[0]
    assert oracle.cycles == [CycleRecord(7, 7, 8)] * 3 + [CycleRecord(0, 0, 1)]
    wrong = engine("wrong").run(requests([text], max_new_tokens=10))[0]
    assert [(cycle.accepted, cycle.committed) for cycle in wrong.cycles] == [(0, 1)] * 9
    # Drafts that could not be committed any more are not proposed.
    assert [cycle.proposed for cycle in wrong.cycles] == [7, 7, 6, 5, 4, 3, 2, 1, 0]


def test_each_row_of_a_ragged_batch_equals_its_single_run():
    texts = prompts(6)
    oracle, wrong = OracleProposer(answers()), WrongProposer(answers(), VOCAB)
    half = {p: [t if i % 3 else (t + 1) % VOCAB for i, t in enumerate(a)] for p, a in answers().items()}
    kinds = [oracle, wrong, OracleProposer(half), oracle, wrong, OracleProposer(half)]
    choice = {tuple(text): kind for text, kind in zip(texts, kinds, strict=True)}
    budgets = [25, 11, 18, 9, 25, 14]
    wanted = [
        Request(f"r{i}", p, SamplingParams(max_new_tokens=b)) for i, (p, b) in enumerate(zip(texts, budgets, strict=True))
    ]

    def run(part: list[Request], slots: int):
        return Engine(decoder(), proposer=PerPrompt(choice), slots=slots, max_context=64).run(part)

    together = run(wanted, 3)
    alone = [run([request], 1)[0] for request in wanted]
    assert together == alone
    assert len({len(c.cycles) for c in together}) > 4 and together[0].cycles[0].accepted == 7
    assert 0 < sum(c.accepted for c in together[2].cycles) < sum(c.proposed for c in together[2].cycles)


def test_an_engine_can_be_used_again_and_commits_are_seen_as_they_happen():
    e, seen = engine("oracle", 2), []
    wanted = requests(prompts(3), max_new_tokens=12)
    first = e.run(wanted, on_commit=lambda request, tokens, record: seen.append((request.id, tokens, record)))
    assert e.run(wanted) == first
    for completion in first:
        mine = [(tokens, record) for name, tokens, record in seen if name == completion.id]
        assert [t for tokens, _ in mine for t in tokens] == completion.token_ids
        assert [record for _, record in mine] == [None, *completion.cycles]
        assert all(len(tokens) == (1 if record is None else record.committed) for tokens, record in mine)


# ---- where an answer ends -------------------------------------------------------------------------------------


@functools.cache
def text_with_news_at(place: int) -> tuple[list[int], list[int]]:
    """A prompt and its answer whose token `place` has not occurred before in the answer."""
    for text in prompts(60, seed=1):
        answer = plain(text, place + 1)
        if answer[place] not in answer[:place]:
            return text, plain(text, 26)
    raise AssertionError(place)


@pytest.mark.parametrize("place", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_an_end_token_anywhere_in_the_block_ends_the_answer(place: int, how: str):
    # From prefill (0), first draft (1), inside (2), last draft (7), bonus (8), first draft of the second block (9).
    text, answer = text_with_news_at(place)
    end = answer[place]
    settings = dict(eos_ids=[end]) if how == "eos" else {}
    sampling = dict(max_new_tokens=20) | (dict(stop_token_ids=(end,)) if how != "eos" else {})
    oracle = OracleProposer({tuple(text): answer})
    found = Engine(decoder(), proposer=oracle, max_context=128, **settings).run(requests([text], **sampling))[0]
    assert found.token_ids == answer[: place + 1] and found.finish_reason == "stop"
    committed = [cycle.committed for cycle in found.cycles]
    assert committed == {0: [], 1: [1], 2: [2], 7: [7], 8: [8], 9: [8, 1]}[place]


def test_ignore_eos_runs_to_the_budget_and_stop_tokens_still_end():
    text = prompts(6)[1]
    answer = answers()[tuple(text)]
    found = engine("oracle", eos_ids=answer[:4]).run(requests([text], max_new_tokens=9, ignore_eos=True))[0]
    assert found.token_ids == answer[:9] and found.finish_reason == "length"
    found = engine("oracle").run(requests([text], max_new_tokens=9, ignore_eos=True, stop_token_ids=(answer[0],)))[0]
    assert found.token_ids == answer[:1] and found.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["none", "oracle", "wrong", "ngram", "dspark"])
@pytest.mark.parametrize("budget", [1, 2, 7, 8, 9])
def test_the_budget_is_exact(kind: str, budget: int):
    found = engine(kind, 2).run(requests(prompts(3), max_new_tokens=budget))
    for completion, text in zip(found, prompts(3), strict=True):
        assert completion.token_ids == answers()[tuple(text)][:budget] and completion.finish_reason == "length"


def test_stop_wins_over_the_budget_in_one_chunk():
    text = prompts(6)[3]
    answer = answers()[tuple(text)]
    assert answer[3] not in answer[:3]
    found = engine("oracle", eos_ids=[answer[3]]).run(requests([text], max_new_tokens=6))[0]
    assert (found.token_ids, found.finish_reason) == (answer[:4], "stop")
    # The end token as the very last token of the budget.
    found = engine("oracle", eos_ids=[answer[3]]).run(requests([text], max_new_tokens=4))[0]
    assert (found.token_ids, found.finish_reason) == (answer[:4], "stop")


@pytest.mark.parametrize("kind", ["none", "oracle", "wrong", "ngram", "dspark"])
@pytest.mark.parametrize("left", [1, 2, 3, 5, 9, 10])
def test_the_context_limit_is_the_same_for_every_drafter(kind: str, left: int):
    # `left` tokens fit behind the first prompt; the second row is shorter and makes the batch wider than that room.
    text, other = prompts(6)[1], prompts(6)[0]
    wanted = requests([text, other], max_new_tokens=20)
    found = engine(kind, 2, max_context=len(text) + left).run(wanted)
    assert found[0].token_ids == answers()[tuple(text)][:left] and found[0].finish_reason == "context"
    room = len(text) + left - len(other)
    assert found[1].token_ids == answers()[tuple(other)][: min(room, 20)]


def test_a_prompt_longer_than_a_prefill_chunk():
    text = long_prompt(300)
    want = plain(text, 8)
    for kind in ("none", "dspark"):
        proposer = None
        if kind == "dspark":
            drafter, heads = tiny_drafter()
            proposer = DSparkProposer(drafter, heads, slots=1, max_context=320)
        e = Engine(decoder((0, 1)), proposer=proposer, max_context=320)
        assert e.run(requests([text], max_new_tokens=8))[0].token_ids == want
        assert e.stats.prefill_tokens == 300


class Letters:
    """Token i decodes to the i-th letter of an alphabet, one letter a token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens)


def test_stop_strings_span_tokens_and_blocks():
    text = prompts(6)[1]
    answer = answers()[tuple(text)]
    letters = Letters()
    for first, last in ((1, 2), (6, 9), (3, 3)):
        stop = letters.decode(answer[first : last + 1])
        end = letters.decode(answer).find(stop) + last - first
        for kind in ("none", "oracle", "wrong"):
            found = engine(kind, tokenizer=letters).run(requests([text], max_new_tokens=20, stop=("absent", stop)))[0]
            assert (found.token_ids, found.finish_reason) == (answer[: end + 1], "stop")


# ---- counts -------------------------------------------------------------------------------------------------------


def test_counts_follow_the_rows_111_011_101_110():
    # Rows of per-slot agreement. A chain stops at the first miss: accepted 3, 0, 1, 2.
    counted = EngineStats()
    for accepted in (3, 0, 1, 2):
        counted.count(CycleRecord(proposed=3, accepted=accepted, committed=accepted + 1))
    assert counted.tau == 2.5 and counted.cycles == 4
    assert counted.reached_per_slot == [4, 3, 2] and counted.accepted_per_slot == [3, 2, 1]


def test_slots_behind_an_end_token_were_neither_reached_nor_accepted():
    counted = EngineStats()
    counted.count(CycleRecord(proposed=7, accepted=7, committed=2))
    assert counted.tau == 2 and counted.reached_per_slot == [1, 1, 0, 0, 0, 0, 0] == counted.accepted_per_slot


def test_the_engine_counts_what_its_completions_say():
    e = engine("dspark", 3)
    found = e.run(requests(prompts(6), max_new_tokens=20))
    cycles = [cycle for completion in found for cycle in completion.cycles]
    assert e.stats.cycles == len(cycles) and e.stats.committed == sum(c.committed for c in cycles) == 6 * 19
    assert e.stats.tau == pytest.approx(6 * 19 / len(cycles))
    assert sum(e.stats.accepted_per_slot) == sum(min(c.accepted, c.committed) for c in cycles)
    assert e.stats.reached_per_slot[0] == sum(c.proposed > 0 for c in cycles)
    assert e.stats.prefill_tokens == sum(map(len, prompts(6)))
    assert min(e.stats.prefill_s, e.stats.draft_s, e.stats.verify_s, e.stats.rest_s, e.stats.head_s) > 0
    e.reset_stats()
    assert e.stats == EngineStats()


# ---- sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["none", "random", "ngram", "dspark", "dspark-reduced"])
def test_a_sampled_answer_does_not_depend_on_its_batch(kind: str, rule: str):
    settings = [dict(temperature=1.0), dict(temperature=0.7, top_k=20), dict(), dict(temperature=1.3, top_p=0.9)]
    wanted = [
        Request(f"r{i}", text, SamplingParams(max_new_tokens=10 + i, seed=40 + i, **settings[i % 4]))
        for i, text in enumerate(prompts(6))
    ]
    together = engine(kind, 4, rule=rule).run(wanted)
    alone = [engine(kind, 1, rule=rule).run([request])[0] for request in wanted]
    assert together == alone
    assert together[2].token_ids == answers()[tuple(wanted[2].prompt_ids)][:12]
    other = engine(kind, 1, rule=rule).run(
        [Request("r0", wanted[0].prompt_ids, SamplingParams(max_new_tokens=10, temperature=1.0, seed=7))]
    )
    assert other[0].token_ids != together[0].token_ids


COUNT, LENGTH = 1500, 3


@functools.cache
def exact_law(temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens, by transformers' forward on all of them."""
    texts = list(itertools.product(range(SMALL), repeat=LENGTH))
    ids = torch.tensor([[1, 3, *text] for text in texts])
    law = (small_model()(input_ids=ids).logits.double() / temperature).softmax(-1)
    return {
        text: float(torch.stack([law[i, 1 + k, token] for k, token in enumerate(text)]).prod()) for i, text in enumerate(texts)
    }


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("none", "token"), ("random", "token"), ("random", "block"), ("dspark", "token"), ("dspark", "block"), ("ngram", "block")],
)
def test_answers_follow_the_targets_law(kind: str, rule: str):
    proposer = {"none": lambda: None, "random": lambda: RandomProposer(SMALL, 2), "ngram": lambda: NgramProposer(2)}
    if kind == "dspark":
        drafter, heads = small_drafter()
        build = lambda: DSparkProposer(drafter, heads, slots=64, max_context=16)  # noqa: E731
    else:
        build = proposer[kind]
    served = Decoder.from_target(small_model(), dtype=torch.float32, tap_layers=(0,), backend="torch")
    e = Engine(served, proposer=build(), slots=64, max_context=16, rule=rule)
    temperature = 1.4
    wanted = [
        Request(str(s), [1, 3], SamplingParams(temperature=temperature, max_new_tokens=LENGTH, seed=s)) for s in range(COUNT)
    ]
    counts = Counter(tuple(completion.token_ids) for completion in e.run(wanted))
    law = exact_law(temperature)
    common = [text for text, p in law.items() if p * COUNT >= 5]
    observed = [counts[text] for text in common]
    expected = [law[text] * COUNT for text in common]
    observed, expected = [*observed, COUNT - sum(observed)], [*expected, COUNT - sum(expected)]
    assert len(common) > 20 and counts.keys() <= law.keys()
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    if kind != "none":
        drafted = e.stats.reached_per_slot
        assert 0.02 < e.stats.accepted_per_slot[0] / drafted[0] < 0.99, "every draft has one fate: nothing is tested"


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="rule: 'toekn' must be one of"):
        engine(rule="toekn")
    with pytest.raises(ValueError, match="must be one of"):
        engine(rule=token_wise)  # a rule is a name: a function would not be recognised by the native code
    with pytest.raises(ValueError, match="slots: 0"):
        engine(slots=0)
    with pytest.raises(ValueError, match="max_context: 513 exceeds the target's 512"):
        engine(max_context=513)
    drafter, heads = tiny_drafter()
    with pytest.raises(ValueError, match=r"decoder taps \(0,\), the drafter needs \(0, 1\)"):
        Engine(decoder((0,)), proposer=DSparkProposer(drafter, heads, slots=1, max_context=64), max_context=64)


def test_requests_that_cannot_be_served_are_refused_before_anything_runs():
    e = engine(max_context=16)
    for bad, words in (([], "empty prompt"), ([5] * 16, "prompt of 16 tokens does not fit max_context 16")):
        with pytest.raises(ValueError, match=f"request bad: {words}"):
            e.run([Request("good", [5, 6]), Request("bad", bad)])
    with pytest.raises(ValueError, match="stop strings need the engine's tokenizer"):
        e.run(requests([[5, 6]], stop=("x",)))
    assert e.stats == EngineStats()
    assert e.run([]) == []
