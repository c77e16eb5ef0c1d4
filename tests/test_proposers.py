"""Every proposer keeps the contract of runtime/propose.py, and leaves the target's text and law untouched."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from drafters import tiny_drafter
from eagle3 import tiny_eagle3

from draftsmith.eval.stats import two_sample_sequences
from draftsmith.models.target import Target
from draftsmith.runtime.config import PROPOSERS, ProposerConfig, SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.eagle3 import Eagle3Proposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.model_proposer import DecoderProposer
from draftsmith.runtime.proposers import ProposerSource, check_vocabulary, draft_slots, make_proposer, tap_layers
from draftsmith.runtime.sampling import SamplingBatch
from draftsmith.runtime.variants import Int8Decoder, Int8Weight, default_layers, layerskip_decoder, skip_layers
from tiny import tiny_model

VOCAB, SLOTS, CONTEXT = 97, 4, 128
KINDS = ("dspark", "dspark-reduced", "dflash", "eagle3", "ngram", "suffix", "suffix-corpus", "small", "layerskip", "int8")
MODELS = ("small", "layerskip", "int8")


@functools.cache
def target(seed: int = 0, **changes: Any) -> Target:
    return Target(tiny_model(seed=seed, **changes), None, "tiny")


@functools.cache
def near_target() -> torch.nn.Module:
    """Another model that often agrees with the target."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    return model


@functools.cache
def decoder(taps: tuple[int, ...] = ()) -> Decoder:
    return Decoder.from_target(target().model, dtype=torch.float32, tap_layers=taps, backend="torch")


def make(kind: str, *, slots: int = SLOTS, context: int = CONTEXT, **settings: Any):
    if kind in ("dspark", "dspark-reduced", "dflash"):
        source = ProposerSource("dspark", target=target(), dtype=torch.float32, drafter=drafter_of(kind))
        return source(slots=slots, max_context=context)
    if kind == "eagle3":
        return Eagle3Proposer(*tiny_eagle3(target().model), slots=slots, max_context=context)
    if kind == "small":
        small = Decoder.from_target(near_target(), dtype=torch.float32, backend="torch")
        return DecoderProposer(small, slots=slots, max_context=context, **settings)
    spec = {"suffix-corpus": "suffix:corpus_tokens=500", "layerskip": "layerskip:layers=0+2"}.get(kind, kind)
    source = ProposerSource(spec, target=target(), dtype=torch.float32)
    if settings:
        return DecoderProposer(source._decoder, slots=slots, max_context=context, **settings)
    return source(slots=slots, max_context=context)


@functools.cache
def drafter_of(kind: str):
    """Random drafters; the head of those that have one knows which token follows which in greedy text."""
    if kind == "dflash":
        return tiny_drafter(target().model, head="none")
    drafter, heads = tiny_drafter(target().model, reduced=kind == "dspark-reduced", rank=VOCAB)
    columns = range(VOCAB) if heads.draft_ids is None else heads.draft_ids.tolist()
    follows = {a: b for prompt in prompts(6) for a, b in itertools.pairwise(greedy_text(tuple(prompt)))}
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.copy_(
            torch.tensor([[9.0 * (follows.get(a) == b) for a in range(VOCAB)] for b in columns])
        )
    return drafter, heads


@functools.cache
def greedy_text(prompt: tuple[int, ...], count: int = 40) -> list[int]:
    """Prompt and greedy continuation by transformers' own forward."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target().model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (4 + 7 * i % 23,), generator=generator).tolist() for i in range(count)]


def taps_of(proposer, ids: list[int]) -> torch.Tensor | None:
    if not proposer.tap_layers:
        return None
    served = decoder(proposer.tap_layers)
    return served.forward(torch.tensor([ids]), served.new_cache(1, CONTEXT), [0], [0], logits="none", taps=True).taps[0]


def sampling_of(positions: list[int], temperature: float = 0.0) -> SamplingBatch:
    return SamplingBatch.build([SamplingParams(temperature=temperature, seed=9)] * len(positions), positions)


def draft(proposer, rows: list[int], texts: list[list[int]], slots: int = 4, temperature: float = 0.0) -> list[tuple]:
    """Proposals after these texts, the anchor being the last token: (tokens, q of them) per row."""
    positions = [len(text) - 1 for text in texts]
    anchors = torch.tensor([text[-1] for text in texts])
    found = proposer.propose(rows, anchors, sampling_of(positions, temperature), slots)
    assert found.tokens.shape == (len(rows), min(slots, proposer.num_slots)) and found.tokens.dtype == torch.int64
    assert (found.probs is None) == (temperature == 0 or proposer.__class__.__name__ in ("NgramProposer", "SuffixProposer"))
    out = []
    for i, length in enumerate(found.lengths.tolist()):
        law = None if found.probs is None else found.probs[i, :length]
        if law is not None:
            torch.testing.assert_close(law.sum(-1), torch.ones(length), rtol=0, atol=1e-5)
        out.append((found.tokens[i, :length].tolist(), law))
    return out


def same(a: list[tuple], b: list[tuple]) -> None:
    assert [tokens for tokens, _ in a] == [tokens for tokens, _ in b]
    for (_, law), (_, other) in zip(a, b, strict=True):
        if law is not None:
            torch.testing.assert_close(law, other, rtol=0, atol=1e-5)


class Driver:
    """Plays the engine for chosen texts: what is committed next is known, a draft is accepted as far as it agrees."""

    def __init__(self, proposer, texts: dict[int, list[int]]) -> None:
        self.proposer, self.texts = proposer, texts
        self.done: dict[int, int] = {}  # tokens of the text committed so far
        self.drafted: dict[int, list[int]] = {}

    def begin(self, row: int, prompt: int, start: int = 0, *, tell: bool = True) -> None:
        text, taps = self.texts[row], taps_of(self.proposer, self.texts[row][:prompt])
        self.proposer.begin(row, text[:prompt], None if taps is None else taps[start:], *((start,) if start else ()))
        if tell:
            self.proposer.first_token(row, text[prompt])
        self.done[row] = prompt + 1

    def text(self, row: int) -> list[int]:
        return self.texts[row][: self.done[row]]

    def propose(self, rows: list[int], slots: int = 4, temperature: float = 0.0) -> list[tuple]:
        found = draft(self.proposer, rows, [self.text(row) for row in rows], slots, temperature)
        self.drafted = {row: tokens for row, (tokens, _) in zip(rows, found, strict=True)}
        return found

    def commit(self, rows: list[int], most: int = 8) -> None:
        """Commit for all rows: the agreeing part of the draft, at most `most` tokens, then the text's own next token."""
        committed, parts, width = [], [], 9
        for row in rows:
            ahead = self.texts[row][self.done[row] :]
            hits = 0
            for token, wanted in zip(self.drafted.get(row, [])[:most], ahead, strict=False):
                if token != wanted:
                    break
                hits += 1
            committed.append(ahead[: hits + 1])
        starts = [self.done[row] - 1 for row in rows]
        if self.proposer.tap_layers:
            for row, start, tokens in zip(rows, starts, committed, strict=True):
                own = taps_of(self.proposer, self.texts[row][: start + len(tokens)])[start:]
                rest = torch.full((width - len(own), own.shape[1]), float("nan"))  # of rejected drafts and padding
                parts.append(torch.cat((own, rest)))
        self.proposer.commit(rows, torch.tensor(starts), committed, torch.stack(parts) if parts else None)
        for row, tokens in zip(rows, committed, strict=True):
            self.done[row] += len(tokens)
        self.drafted = {}


def fresh_draft(kind: str, text: list[int], temperature: float, row: int = 2) -> list[tuple]:
    """What a new proposer drafts after a prompt that is the whole text."""
    proposer = make(kind)
    proposer.begin(row, text[:-1], taps_of(proposer, text[:-1]))
    return draft(proposer, [row], [text], temperature=temperature)


# ---- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_came_before_a_draft_depends_on_the_rows_text_alone(kind: str, temperature: float):
    texts = dict(enumerate(greedy_text(tuple(p)) for p in prompts(SLOTS)))
    driver, choice = Driver(make(kind), texts), random.Random(3)
    rows = list(texts)
    for row in rows:
        driver.begin(row, len(prompts(SLOTS)[row]))
    hits = 0
    for cycle in range(9):
        # Plain cycles, subsets in any order, all rows, and fewer slots.
        subset = [] if cycle in (0, 4, 5) else choice.sample(rows, choice.randint(1, SLOTS))
        if subset:
            driver.propose(subset, slots=choice.choice([1, 2, 4]), temperature=temperature)
        before = dict(driver.done)
        driver.commit(choice.sample(rows, SLOTS))
        hits += sum(driver.done[row] - before[row] - 1 for row in rows)
    found = driver.propose(rows, temperature=temperature)
    for row in rows:
        same([found[row]], fresh_draft(kind, driver.text(row), temperature))
    assert hits or temperature or kind not in ("dspark", "ngram", "small", "int8"), "no draft was accepted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_begin_behind_what_its_slot_holds(kind: str):
    text = greedy_text(tuple(prompts(1)[0]))
    other = text[:14] + [token % 90 + 4 for token in text[14:]]
    driver = Driver(make(kind), {1: text})
    driver.begin(1, 6)
    for cycle in range(6):
        if cycle in (1, 4):
            driver.propose([1])
        driver.commit([1])
    known = driver.done[1] - 1  # the engine's cache holds all but the anchor
    assert known >= 12
    driver.proposer.release(1)
    for start in (known, 9):
        driver.texts[1] = text if start == known else other
        driver.begin(1, max(start + 1, 20), min(start, 12) if start != known else start)
        same(driver.propose([1]), fresh_draft(kind, driver.text(1), 0.0))
        driver.commit([1])
        same(driver.propose([1]), fresh_draft(kind, driver.text(1), 0.0))
        driver.proposer.release(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_forgets_its_request(kind: str):
    first, second = (greedy_text(tuple(p)) for p in prompts(2, seed=5))
    driver = Driver(make(kind), {0: first})
    driver.begin(0, 9)
    driver.propose([0])
    driver.proposer.release(0)  # in the middle of a cycle: cancelled, or failed
    driver.texts[0] = second
    driver.begin(0, 6)
    if kind != "suffix-corpus":
        same(driver.propose([0]), fresh_draft(kind, driver.text(0), 0.0))
    driver.commit([0])
    driver.proposer.release(0)
    driver.proposer.release(0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_need_not_be_told_where_it_is_drafted_from(kind: str):
    text = greedy_text(tuple(prompts(1)[0]))
    driver = Driver(make(kind), {3: text})
    driver.begin(3, 8, tell=False)
    same(driver.propose([3]), fresh_draft(kind, text[:9], 0.0))
    # Told by nobody, after a plain first cycle: still no error, and no draft from a text with a hole.
    driver.begin(3, 8, tell=False)
    driver.commit([3])
    found = driver.propose([3])
    if kind in (*MODELS, "eagle3"):
        assert found[0][0] == []


@pytest.mark.parametrize("kind", ["dspark", "eagle3", *MODELS])
def test_a_missed_commit_is_an_error_and_not_a_wrong_context(kind: str):
    text = greedy_text(tuple(prompts(1)[0]))
    driver = Driver(make(kind), {0: text})
    driver.begin(0, 8)
    driver.done[0] += 2
    with pytest.raises(ValueError, match="slot 0: commit at position 10, but the drafter has seen 8"):
        driver.commit([0])


def test_pending_states_are_few_and_bounded():
    text = greedy_text(tuple(prompts(1)[0]), 90)
    driver = Driver(make("dspark"), {0: text})
    driver.begin(0, 5)
    written = []
    plain = driver.proposer.backbone.write_context
    driver.proposer.backbone.write_context = lambda rows, *rest: (written.append(len(rows)), plain(rows, *rest))
    for _ in range(70):
        driver.commit([0])
    assert written == [32, 32]  # nothing else ran in 70 plain cycles
    found = driver.propose([0])
    assert written == [32, 32, 6]
    same(found, fresh_draft("dspark", driver.text(0), 0.0))


# ---- lossless -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets_own(kind: str, rule: str, slots: int):
    proposer = make(kind, slots=slots)
    engine = Engine(decoder(proposer.tap_layers), proposer=proposer, slots=slots, max_context=CONTEXT, rule=rule)
    budgets = [24, 9, 17, 25, 12, 20]
    wanted = [
        Request(f"r{i}", p, SamplingParams(max_new_tokens=b)) for i, (p, b) in enumerate(zip(prompts(6), budgets, strict=True))
    ]
    for completion, request, budget in zip(engine.run(wanted), wanted, budgets, strict=True):
        text = greedy_text(tuple(request.prompt_ids))
        assert completion.token_ids == text[len(request.prompt_ids) :][:budget]
    assert kind in ("dflash", "eagle3") or engine.stats.tau > 1.05  # those two are random


@pytest.mark.parametrize("kind", ["dspark", "small", "layerskip", "int8"])
def test_a_sampled_answer_does_not_depend_on_its_batch(kind: str):
    settings = [dict(temperature=1.0), dict(temperature=0.7, top_k=20), dict(), dict(temperature=1.3, top_p=0.9)]
    wanted = [
        Request(f"r{i}", text, SamplingParams(max_new_tokens=10 + i, seed=40 + i, **settings[i % 4]))
        for i, text in enumerate(prompts(6))
    ]

    def run(part: list[Request], slots: int):
        proposer = make(kind, slots=slots)
        return Engine(decoder(proposer.tap_layers), proposer=proposer, slots=slots, max_context=CONTEXT).run(part)

    assert run(wanted, 4) == [run([request], 1)[0] for request in wanted]


TINY_LAW = dict(
    vocab_size=6, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["small", "small-reduced", "layerskip", "int8"])
def test_sampled_answers_follow_the_targets_law(kind: str, rule: str):
    own = target(**TINY_LAW)
    if kind == "layerskip":
        drafting = layerskip_decoder(own.model, (1,), dtype=torch.float32)
    elif kind == "int8":
        drafting = Int8Decoder(own.model, dtype=torch.float32)
    else:
        size = 4 if kind == "small-reduced" else 6  # the small model may have fewer rows than the target's head
        drafting = Decoder.from_target(tiny_model(seed=3, **{**TINY_LAW, "vocab_size": size}), dtype=torch.float32)
    served = Decoder.from_target(own.model, dtype=torch.float32, backend="torch")
    proposer = DecoderProposer(drafting, slots=64, max_context=16, num_slots=2, vocab_size=6)
    count, length = 1500, 3
    sides = []
    for side, drafter in enumerate((None, proposer)):
        engine = Engine(served, proposer=drafter, slots=64, max_context=16, rule=rule)
        params = [SamplingParams(temperature=1.4, max_new_tokens=length, seed=s + side * 10_000) for s in range(count)]
        requests = [Request(str(i), [1, 3], p) for i, p in enumerate(params)]
        sides.append(np.array([c.token_ids for c in engine.run(requests)]))
    assert two_sample_sequences([sides[0]], [sides[1]], permutations=499).p_value > 0.01
    share = engine.stats.accepted_per_slot[0] / engine.stats.reached_per_slot[0]
    assert 0.2 < share < (1.0 if kind == "int8" else 0.98)


def test_outputs_of_ended_requests_fill_the_shared_corpus():
    proposer = make("suffix-corpus", slots=2)
    engine = Engine(decoder(), proposer=proposer, slots=2, max_context=CONTEXT)
    text = prompts(3)[2]
    requests = [Request(f"r{i}", text, SamplingParams(max_new_tokens=20)) for i in range(3)]
    first = engine.run(requests[:1])[0]
    assert list(proposer._outputs) == [first.token_ids]
    engine.reset_stats()
    second = engine.run(requests[1:2])[0]
    assert second.token_ids == first.token_ids and engine.stats.tau > 4  # its whole answer was there to copy
    assert len(proposer._outputs) == 2 and sum(map(len, proposer._outputs)) == proposer._corpus_size


# ---- catching up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_prompt_is_caught_up_in_parts_and_holds_nobody_up(kind: str, temperature: float):
    long, short = greedy_text(tuple(prompts(6)[3]), 60), greedy_text(tuple(prompts(6)[0]))
    driver = Driver(make(kind, catch_up=20), {0: long, 1: short})
    driver.begin(0, 55)
    driver.begin(1, 6)
    for behind in (True, True, False):
        found = driver.propose([0, 1], temperature=temperature)
        assert (found[0][0] == []) == behind and len(found[1][0]) == 4
        same(found[1:], fresh_draft(kind, driver.text(1), temperature))
        if not behind:
            same(found[:1], fresh_draft(kind, driver.text(0), temperature))
        driver.commit([0, 1])


def test_a_model_of_fewer_positions_drafts_until_they_end():
    small = Decoder.from_target(tiny_model(max_position_embeddings=16), dtype=torch.float32, backend="torch")
    driver = Driver(DecoderProposer(small, slots=1, max_context=CONTEXT), {0: greedy_text(tuple(prompts(1)[0]))})
    driver.begin(0, 12)
    lengths = []
    for _ in range(6):
        found = driver.propose([0])
        lengths.append(len(found[0][0]))
        driver.drafted = {}
        driver.commit([0])
    assert lengths == [4, 3, 2, 1, 0, 0]  # the last position it can run is 15


def test_a_token_beyond_the_small_vocabulary_ends_its_drafts():
    small = Decoder.from_target(tiny_model(vocab_size=90), dtype=torch.float32, backend="torch")
    proposer = DecoderProposer(small, slots=2, max_context=64, vocab_size=VOCAB)
    proposer.begin(0, [5, 6, 95])
    proposer.begin(1, [5, 6, 7])
    found = proposer.propose([0, 1], torch.tensor([8, 8]), sampling_of([3, 3], 1.0), 3)
    assert found.lengths.tolist() == [0, 3] and found.probs.shape == (2, 3, 90) and len(found.draft_ids) == 90


# ---- variants of the target -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_skipped_layers_are_left_out_and_the_others_shared(family: str):
    changes = dict(head_dim=16, sliding_window=4) if family == "gemma2" else {}
    model = tiny_model(family, num_hidden_layers=4, **changes)
    ids = torch.tensor([prompts(6)[1]])
    before = model(input_ids=ids).logits
    twin = skip_layers(model, (0, 3))
    assert {p.data_ptr() for p in twin.parameters()} < {p.data_ptr() for p in model.parameters()}
    layers = model.model.layers
    for module in (layers[1], layers[2]):
        module.forward = lambda hidden_states, *rest, **more: hidden_states
    want = model(input_ids=ids).logits
    served = Decoder.from_target(twin, dtype=torch.float32, backend="torch")
    got = served.forward(ids, served.new_cache(1, 64), [0], [0]).logits
    if family != "gemma2":  # the fused families share what the serving decoder holds
        whole = Decoder.from_target(model, dtype=torch.float32, backend="torch")
        part = layerskip_decoder(model, (0, 3), dtype=torch.float32, decoder=whole)
        assert torch.equal(part.forward(ids, part.new_cache(1, 64), [0], [0]).logits, got)
        assert part.weights.layers[1].qkv.data_ptr() == whole.weights.layers[3].qkv.data_ptr()
    for module in (layers[1], layers[2]):
        del module.forward
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    assert not torch.allclose(want, before, atol=0.1)
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    for bad in ((), (1, 0), (0, 4), (-1,)):
        with pytest.raises(ValueError, match=r"proposer.layers: .* from 0 to 3"):
            skip_layers(model, bad)


def test_the_layers_left_out_are_those_that_do_least():
    model, ids = tiny_model(num_hidden_layers=8), torch.tensor([prompts(6)[1]])
    with torch.no_grad():
        for i in (2, 5):
            model.model.layers[i].self_attn.o_proj.weight.mul_(0.01)
            model.model.layers[i].mlp.down_proj.weight.mul_(0.01)
    assert default_layers(model, ids) == (0, 1, 3, 4, 6, 7)
    assert default_layers(model, ids, 1) in ((0, 1, 2, 3, 4, 6, 7), (0, 1, 3, 4, 5, 6, 7)), "the least influential of the two"
    assert default_layers(tiny_model(num_hidden_layers=1), ids) == (0,)


def test_int8_products_are_exact_per_token_and_channel():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator) * torch.logspace(-2, 1, 48)[:, None]
    x = torch.randn(5, 80, generator=generator) * torch.logspace(-1, 2, 5)[:, None]
    x[3] = 0
    quantised = Int8Weight(weight)
    scales = weight.double().abs().amax(1) / 127, x.double().abs().amax(1) / 127
    whole = (weight.double() / scales[0][:, None]).round()
    rows = torch.where(scales[1][:, None] > 0, (x.double() / scales[1][:, None]).round(), 0.0)
    want = (rows @ whole.T) * scales[0] * scales[1][:, None]
    bias = torch.randn(48, generator=generator)
    torch.testing.assert_close(quantised(x, bias).double(), want + bias, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(quantised(x), x @ weight.T, rtol=0, atol=0.02 * float((x @ weight.T).abs().max()))
    for row in range(5):
        assert torch.equal(quantised(x[row : row + 1]), quantised(x)[row : row + 1])
    assert quantised(x.bfloat16()).dtype == torch.bfloat16


def test_int8_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="proposer: int8 serves llama, mistral, qwen2, qwen3 only"):
        Int8Decoder(tiny_model("gemma2", head_dim=16), dtype=torch.float32)


# ---- settings -----------------------------------------------------------------------------------------------------


def test_specs_are_read_and_checked():
    assert ProposerConfig.parse("ngram") == ProposerConfig(kind="ngram")
    assert ProposerConfig.parse("ngram:min_ngram=2,num_slots=5") == ProposerConfig(kind="ngram", min_ngram=2, num_slots=5)
    assert ProposerConfig.parse("layerskip:layers=0+3+5").layers == (0, 3, 5)
    assert ProposerConfig.parse("small:model=owner/name").model == "owner/name"
    assert ProposerConfig.parse("suffix:min_survival=0.25,corpus_tokens=9").min_survival == 0.25
    for text, words in (
        ("eagle", "proposer.kind: 'eagle' is not allowed"),
        ("ngram:gram=2", "proposer: 'gram=2' is not allowed"),
        ("ngram:min_ngram", "proposer: 'min_ngram' is not allowed"),
        ("ngram:min_ngram=two", "proposer.min_ngram: 'two' is not allowed"),
        ("ngram:min_ngram=4", "proposer.min_ngram: 4 is not allowed"),
        ("ngram:num_slots=0", "proposer.num_slots: 0 is not allowed"),
        ("small", "proposer.model: None is not allowed"),
        ("layerskip:layers=3+1", "proposer.layers"),
        ("suffix:min_survival=2", "proposer.min_survival"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            ProposerConfig.parse(text)
        assert "\n" not in str(error.value)


def test_every_name_makes_a_proposer(tmp_path):
    from draftsmith.models.export import native
    from draftsmith.runtime.calibration import Calibration, Entry, Setting

    drafter, heads = tiny_drafter(target().model, head="none")
    folder = native.save(tmp_path / "drafter", drafter, heads, dtype=torch.float32)
    Calibration(5, [Entry.identity(Setting(0.0, 0, 1.0, "block"), 5)]).save(folder)
    target().model.save_pretrained(tmp_path / "small")
    for kind in PROPOSERS:
        if kind in ("small", "eagle3"):
            continue  # name a folder: tests/test_real_parity.py, tests/test_eagle3.py
        made = make_proposer(
            kind, target=target(), slots=2, max_context=64, dtype=torch.float32, drafter_folder=folder
        )  # fmt: skip
        assert made.num_slots == draft_slots(kind, folder) == {"dspark": 5, "ngram": 7, "suffix": 7}.get(kind, 4)
        assert tuple(made.tap_layers) == tap_layers(kind, folder) == ((0, 1) if kind == "dspark" else ())
        assert (kind == "dspark") == (getattr(made, "calibration", None) is not None)
    assert draft_slots("dspark:num_slots=3", folder) == 3
    with pytest.raises(ValueError, match=r"proposer.num_slots: 6 is not allowed \(1 to 5"):
        draft_slots("dspark:num_slots=6", folder)
    with pytest.raises(ValueError, match="dspark needs an exported drafter"):
        ProposerSource("dspark", target=target(), dtype=torch.float32)


class Words:
    def __init__(self, count: int, shift: int = 0) -> None:
        self.count, self.shift = count, shift

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": (i + self.shift) % self.count for i in range(self.count)}


def test_a_small_model_needs_the_targets_tokens():
    def of(size: int, tokenizer) -> Target:
        return Target(tiny_model(vocab_size=size), tokenizer, "x")

    check_vocabulary(of(97, None), of(97, None), "x")
    check_vocabulary(of(97, Words(90)), of(97, Words(90)), "x")
    check_vocabulary(of(92, Words(90)), of(97, Words(90)), "x")  # padded differently
    check_vocabulary(of(97, Words(90)), of(92, Words(90)), "x")
    for small, big, words in (
        (of(96, None), of(97, None), "vocabulary of 96, the target one of 97"),
        (of(97, Words(90, 1)), of(97, Words(90)), r"another tokenizer than the target \(90 tokens differ\)"),
        (of(97, Words(89)), of(97, Words(90)), r"\(1 tokens differ\)"),
        (of(89, Words(90)), of(97, Words(90)), "vocabulary of 89"),
    ):
        with pytest.raises(ValueError, match=words):
            check_vocabulary(small, big, "x")
