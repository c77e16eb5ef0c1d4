"""What tests of the engine share: tiny targets, prompts, and their greedy answers by transformers' own forward."""

from __future__ import annotations

import functools

import torch
from drafters import tiny_drafter
from proposers import OracleProposer, RandomProposer, WrongProposer

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.ngram import NgramProposer
from tiny import tiny_model

VOCAB = 97


@functools.cache
def decoder(taps: tuple[int, ...] = ()) -> Decoder:
    return Decoder.from_target(tiny_model(), dtype=torch.float32, tap_layers=taps, backend="torch")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (3 + 5 * i % 17,), generator=generator).tolist() for i in range(count)]


def long_prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests(texts: list[list[int]], **sampling) -> list[Request]:
    return [Request(f"r{i}", text, SamplingParams(**sampling)) for i, text in enumerate(texts)]


def plain(text: list[int], count: int, model: torch.nn.Module | None = None) -> list[int]:
    """Greedy continuation by transformers' own forward, one token at a time, without any of our code."""
    model, ids = model or tiny_model(), list(text)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(text) :]


@functools.cache
def answers(count: int = 6, length: int = 26) -> dict[tuple[int, ...], list[int]]:
    return {tuple(text): plain(text, length) for text in prompts(count)}


def proposer_of(kind: str, slots: int):
    if kind.startswith("dspark"):
        drafter, heads = tiny_drafter(reduced=kind.endswith("reduced"), head="rnn" if kind.endswith("rnn") else "vanilla")
        return DSparkProposer(drafter, heads, slots=slots, max_context=128)
    return {
        "none": lambda: None,
        "oracle": lambda: OracleProposer(answers()),
        "wrong": lambda: WrongProposer(answers(), VOCAB),
        "random": lambda: RandomProposer(VOCAB),
        "ngram": NgramProposer,
    }[kind]()


def engine(kind: str = "none", slots: int = 1, **settings) -> Engine:
    proposer = proposer_of(kind, slots)
    taps = proposer.tap_layers if proposer is not None else ()
    return Engine(decoder(tuple(taps)), proposer=proposer, slots=slots, **({"max_context": 128} | settings))


def drain(e: Engine, on_commit=None, limit: int = 1000) -> list:
    """Step until the engine is idle."""
    done = []
    for _ in range(limit):
        if e.idle:
            return done
        done += e.step(on_commit)
    raise AssertionError(f"not idle after {limit} steps")


SMALL = 5


@functools.cache
def small_model():
    return tiny_model(
        vocab_size=SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@functools.cache
def small_drafter():
    from draftsmith.models.config import DSparkConfig
    from draftsmith.models.draft import FrozenHeads
    from draftsmith.models.dspark import DSpark
    from draftsmith.models.export import native

    model = small_model()
    cfg = DSparkConfig(num_layers=1, block_size=2, tap_layers=(0,), rank=4, draft_vocab_size=3)
    torch.manual_seed(2)
    drafter = DSpark(native.build_config(model.config, cfg, mask_token_id=0, target_name="small"))
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter, FrozenHeads.build(model.get_input_embeddings().weight, model.lm_head.weight, torch.tensor([0, 1, 4]))
