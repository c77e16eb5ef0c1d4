"""Every proposer leaves the greedy text of the real target untouched: float32, one request at a time and a ragged batch of 4.

DRAFTSMITH_DRAFTER names an exported drafter of the embedded target (make quickstart leaves outputs/quickstart/drafter); without
it a drafter started from the target's own layers is used.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from proposers import OracleProposer, RandomProposer, WrongProposer

from draftsmith.data.chat import ChatFormat
from draftsmith.models.config import DSparkConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from draftsmith.models.init import init_from_target
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.ngram import NgramProposer
from draftsmith.train.prompts import heldout_prompts

pytestmark = [pytest.mark.target, pytest.mark.slow]
NUM_PROMPTS, NEW_TOKENS, CONTEXT = 20, 32, 512


def load_drafter(target, folder: Path):
    source = os.environ.get("DRAFTSMITH_DRAFTER")
    if source is None:
        config = native.build_config(
            target.config, DSparkConfig(draft_vocab_size=8192), mask_token_id=16, target_name="smollm2"
        )
        torch.manual_seed(0)
        drafter = DSpark(config)
        init_from_target(drafter, target.layers, target.final_norm, target.embedding_weight)
        heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, torch.arange(8192))
        source = str(native.save(folder / "drafter", drafter, heads, dtype=torch.float32))
    return native.load(Path(source), embedding=target.embedding_weight, lm_head=target.lm_head_weight)


@pytest.fixture(scope="module")
def served(smollm2, tmp_path_factory):
    drafter, heads = load_drafter(smollm2, tmp_path_factory.mktemp("drafter"))
    chat = ChatFormat(smollm2.tokenizer, eos_ids=smollm2.eos_token_ids)
    step = len(heldout_prompts("builtin")) // NUM_PROMPTS
    prompts = [
        chat.render([{"role": "user", "content": p.turns[0]}], generation_prompt=True) for p in heldout_prompts("builtin")
    ]
    requests = [
        Request(str(i), list(ids), SamplingParams(max_new_tokens=NEW_TOKENS - i % 5))  # unequal: rows leave at different times
        for i, ids in enumerate(prompts[::step][:NUM_PROMPTS])
    ]
    decoder = Decoder.from_target(smollm2.model, dtype=torch.float32, tap_layers=drafter.tap_layers)
    plain = Engine(decoder, max_context=CONTEXT, eos_ids=smollm2.eos_token_ids).run(requests)
    return smollm2, decoder, drafter, heads, requests, [c.token_ids for c in plain]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", ["oracle", "wrong", "random", "ngram", "dspark"])
def test_greedy_text_is_the_targets(served, name, slots):
    target, decoder, drafter, heads, requests, plain = served
    answers = {tuple(r.prompt_ids): ids for r, ids in zip(requests, plain, strict=True)}
    proposer = {
        "oracle": lambda: OracleProposer(answers),
        "wrong": lambda: WrongProposer(answers, target.vocab_size),
        "random": lambda: RandomProposer(target.vocab_size),
        "ngram": NgramProposer,
        "dspark": lambda: DSparkProposer(drafter, heads, slots=slots, max_context=CONTEXT),
    }[name]()
    engine = Engine(decoder, proposer=proposer, slots=slots, max_context=CONTEXT, eos_ids=target.eos_token_ids)
    got = [c.token_ids for c in engine.run(requests)]
    assert got == plain
    if name == "oracle":
        assert engine.stats.tau > 5
    if name == "wrong":
        assert engine.stats.tau == 1
