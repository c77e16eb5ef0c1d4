"""Every proposer x rule x scheduler leaves the greedy text of the real target untouched: float32, 1, 4 and 16 requests at once.

Budgets differ, so requests leave and the next ones join in the middle; some requests sample, so that greedy rows too go through
the verification rule. DRAFTSMITH_DRAFTER names an exported drafter of the embedded target (make quickstart leaves
outputs/quickstart/drafter); without it a drafter started from the target's own layers is used.
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
from draftsmith.runtime.costs import CostTable
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine, Request
from draftsmith.runtime.proposers import ProposerSource
from draftsmith.runtime.schedule import FixedLength, LoadAware, Threshold
from draftsmith.runtime.variants import skip_layers
from draftsmith.runtime.verify import RULES
from draftsmith.train.prompts import heldout_prompts

pytestmark = [pytest.mark.target, pytest.mark.slow]
NUM_PROMPTS, NEW_TOKENS, CONTEXT, SAMPLED = 30, 20, 512, 5
SCHEDULERS = {
    "whole": lambda: None,
    "fixed": lambda: FixedLength(2),
    "threshold": lambda: Threshold(0.5),
    "load": lambda: LoadAware(
        CostTable.from_functions(draft=lambda r, k, c: 0.4 * k, verify=lambda r, tokens, c: 10 + 0.9 * tokens), probe=3
    ),
}
SPECS = {
    "ngram": "ngram", "suffix": "suffix", "suffix-corpus": "suffix:corpus_tokens=2000", "layerskip": "layerskip",
    "int8": "int8",
}  # fmt: skip


def new_drafter(target, folder: Path, **settings) -> Path:
    cfg = DSparkConfig(draft_vocab_size=8192, **settings)
    config = native.build_config(target.config, cfg, mask_token_id=16, target_name="smollm2")
    torch.manual_seed(0)
    drafter = DSpark(config)
    init_from_target(drafter, target.layers, target.final_norm, target.embedding_weight)
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, torch.arange(8192))
    return native.save(folder, drafter, heads, dtype=torch.float32)


class Served:
    """Requests, their plain answers, and an engine for each proposer and number of slots."""

    def __init__(self, target, folder: Path) -> None:
        self.target, self.folder = target, folder
        chat = ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids)
        prompts = [p.turns[0] for p in heldout_prompts("builtin")]
        self.requests = [
            Request(
                str(i), chat.render([{"role": "user", "content": text}], generation_prompt=True),
                SamplingParams(max_new_tokens=NEW_TOKENS - i % 7, temperature=float(i % 6 == SAMPLED), seed=i),
            )
            for i, text in enumerate(prompts[:: len(prompts) // NUM_PROMPTS][:NUM_PROMPTS])
        ]  # fmt: skip
        self.sources: dict[str, ProposerSource] = {}
        self.drafter = Path(os.environ.get("DRAFTSMITH_DRAFTER") or new_drafter(target, folder / "drafter"))
        taps = tuple(native.read_config(self.drafter)["target_layer_ids"])
        self.decoder = Decoder.from_target(target.model, dtype=torch.float32, tap_layers=taps)
        engine = Engine(self.decoder, slots=4, max_context=CONTEXT, eos_ids=target.eos_token_ids)
        self.plain = [c.token_ids for c in engine.run(self.requests)]

    def source(self, name: str) -> ProposerSource:
        if name not in self.sources:
            spec, drafter = SPECS.get(name, "dspark"), self.drafter
            if name == "dflash":
                drafter = new_drafter(self.target, self.folder / "dflash", head="none", tap_layers=self.decoder.tap_layers)
            if name == "small":
                spec = f"small:num_slots=3,model={self.folder / 'small'}"
                skip_layers(self.target.model, (*range(20), 29)).save_pretrained(self.folder / "small")
                self.target.tokenizer.save_pretrained(self.folder / "small")
            self.sources[name] = ProposerSource(
                spec, target=self.target, dtype=torch.float32, drafter_folder=drafter, decoder=self.decoder
            )  # fmt: skip
        return self.sources[name]

    def engine(self, name: str, slots: int) -> Engine:
        answers = {tuple(r.prompt_ids): ids for r, ids in zip(self.requests, self.plain, strict=True)}
        controls = {
            "oracle": lambda: OracleProposer(answers),
            "wrong": lambda: WrongProposer(answers, self.target.vocab_size),
            "random": lambda: RandomProposer(self.target.vocab_size),
        }
        proposer = controls[name]() if name in controls else self.source(name)(slots=slots, max_context=CONTEXT)
        return Engine(self.decoder, proposer=proposer, slots=slots, max_context=CONTEXT, eos_ids=self.target.eos_token_ids)


@pytest.fixture(scope="module")
def served(smollm2, tmp_path_factory):
    return Served(smollm2, tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    "name", ["oracle", "wrong", "random", "dspark", "dflash", "ngram", "suffix", "suffix-corpus", "small", "layerskip", "int8"]
)
def test_greedy_text_is_the_targets(served, name, rule, scheduler, slots):
    engine = served.engine(name, slots)
    engine.rule, engine.scheduler = rule, SCHEDULERS[scheduler]()
    found = engine.run(served.requests)
    for completion, request, plain in zip(found, served.requests, served.plain, strict=True):
        if request.sampling.greedy:
            assert completion.token_ids == plain
        assert len(completion.token_ids) <= request.sampling.max_new_tokens
    stats = engine.stats
    assert stats.proposer_failures == 0
    if scheduler in ("whole", "fixed"):
        assert stats.drafted_tokens > 0
        if name in ("oracle", "int8"):
            assert stats.tau > 2
        if name == "wrong" and slots == 1:
            greedy = [c for c, r in zip(found, served.requests, strict=True) if r.sampling.greedy]
            assert all(cycle.committed == 1 for completion in greedy for cycle in completion.cycles)
