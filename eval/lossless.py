"""Is speculation lossless here? Greedy: the same tokens as plain decoding. Sampled: the same law, by a two-sample test.

In float32 every greedy token must agree. In bfloat16 a pass over gamma + 1 tokens and a pass over one may round differently and
part ways where the two best logits nearly tie: each difference is reported with that gap, so that ties can be told from errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..runtime.config import SamplingParams
from ..runtime.decoder import Decoder
from ..runtime.engine import Engine, Request
from .bench import Record, requests_of
from .prompts import EvalPrompt
from .stats import two_sample_sequences

SUSPICIOUS_P = 1e-3  # below this the sampling test counts as failed


@dataclass(frozen=True)
class Difference:
    """First greedy token that differs. gap: best minus second-best logit of a one-token pass there."""

    id: str
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None


@dataclass(frozen=True)
class GreedyVerdict:
    """Prompts compared, and the first difference of each that differs."""

    dtype: str
    prompts: int
    tokens: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def mismatches(self) -> int:
        """Prompts whose text differs."""
        return len(self.differences)

    @classmethod
    def from_json(cls, value: Record) -> GreedyVerdict:
        """Back from dataclasses.asdict."""
        return cls(**{**value, "differences": [Difference(**item) for item in value["differences"]]})


@dataclass(frozen=True)
class Verdict:
    """What report.json says about losslessness. float32 decides; the served dtype is reported beside it."""

    greedy: GreedyVerdict | None
    served: GreedyVerdict | None = None
    sampling: dict[str, Any] | None = None

    @property
    def lossless(self) -> bool | None:
        """False on a float32 mismatch or a suspicious sampling p-value; None when greedy was never compared in float32."""
        if self.greedy is not None and self.greedy.mismatches:
            return False
        if self.sampling is not None and self.sampling["p_value"] < SUSPICIOUS_P:
            return False
        return None if self.greedy is None else True

    def to_json(self) -> Record:
        """The `lossless` section of report.json."""
        return {
            "greedy_prompts": self.greedy.prompts if self.greedy else 0,
            "greedy_mismatches": self.greedy.mismatches if self.greedy else 0,
            "sampling_p_value": self.sampling["p_value"] if self.sampling else None,
            "verdict": self.lossless,
            "greedy": dataclasses.asdict(self.greedy) if self.greedy else None,
            "served": dataclasses.asdict(self.served) if self.served else None,
            "sampling": self.sampling,
        }


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first token that differs (the shorter length when one is a prefix of the other); None when equal."""
    for i, (a, b) in enumerate(zip(plain, speculative, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


@torch.inference_mode()
def logit_gap(decoder: Decoder, ids: Sequence[int]) -> float:
    """Best minus second-best logit of the token after `ids`, in the decoder's precision: prefill, then one token alone."""
    cache = decoder.new_cache(1, len(ids) + 1)
    tokens = torch.tensor([list(ids)], device=decoder.device)
    if len(ids) > 1:
        decoder.forward(tokens[:, :-1], cache, [0], torch.tensor([0]), logits="none")
    out = decoder.forward(tokens[:, -1:], cache, [0], torch.tensor([len(ids) - 1]), logits="all")
    assert out.logits is not None
    best = out.logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def compare_greedy(
    decoder: Decoder,
    prompts: Iterable[tuple[str, Sequence[int]]],
    plain: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
) -> GreedyVerdict:
    """Compare token lists prompt by prompt; decoder (of the compared precision) gives the gap at each first difference."""
    prompts = list(prompts)
    assert len(prompts) == len(plain) == len(speculative)
    differences = []
    for (name, ids), a, b in zip(prompts, plain, speculative, strict=True):
        at = first_difference(a, b)
        if at is not None:
            gap = logit_gap(decoder, [*ids, *a[:at]])
            differences.append(Difference(name, at, a[at] if at < len(a) else None, b[at] if at < len(b) else None, gap))
    dtype = str(decoder.dtype).removeprefix("torch.")
    return GreedyVerdict(dtype, len(prompts), sum(len(a) for a in plain), differences)


def greedy_from_records(decoder: Decoder, records: Iterable[Record], prompt_ids: dict[str, list[int]]) -> GreedyVerdict:
    """Verdict over the token ids that greedy cells of `bench.measure_cell` kept; costs nothing when all agree."""
    prompts, plain, speculative = [], [], []
    for record in records:
        if record["repeat"] == 0:
            prompts += [(name, prompt_ids[name]) for name in record["ids"]]
            plain += record["plain"]["token_ids"]
            speculative += record["speculative"]["token_ids"]
    return compare_greedy(decoder, prompts, plain, speculative)


def check_greedy(
    plain: Engine,
    speculative: Engine,
    groups: Sequence[Sequence[EvalPrompt]],
    *,
    max_new_tokens: int,
    on_unit: Callable[[int, int], None] | None = None,
) -> GreedyVerdict:
    """Decode every group greedily on both sides and compare the tokens."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    prompts: list[tuple[str, list[int]]] = []
    tokens: tuple[list[list[int]], list[list[int]]] = ([], [])
    for done, group in enumerate(groups, 1):
        requests = requests_of(group, sampling)
        prompts += [(prompt.id, prompt.prompt_ids) for prompt in group]
        for engine, found in zip((plain, speculative), tokens, strict=True):
            found.extend(completion.token_ids for completion in engine.run(requests))
        if on_unit is not None:
            on_unit(done, len(groups))
    return compare_greedy(plain.decoder, prompts, *tokens)


def check_sampling(
    plain: Engine,
    speculative: Engine,
    prompts: Sequence[EvalPrompt],
    sampling: SamplingParams,
    *,
    seeds: int,
    positions: int = 3,
    on_unit: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Draw `seeds` answers of `positions` tokens per prompt on both sides, with disjoint seeds, and test for one law.

    The first token comes out of the prefill; the later ones are drafted, verified and corrected. Each request may run one token
    further than is compared, so that the last compared token is an ordinary one and not the end of the budget.
    """
    if sampling.temperature <= 0.0:
        raise ValueError(f"sampling test: got temperature {sampling.temperature}, allowed: above 0")
    drawn: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for done, prompt in enumerate(prompts, 1):
        for side, engine in enumerate((plain, speculative)):
            requests = []
            for i in range(seeds):
                seed = sampling.seed + (2 * done + side) * 1_000_003 + i
                params = dataclasses.replace(sampling, seed=seed, max_new_tokens=positions + 1)
                requests.append(Request(f"{prompt.id}#{i}", prompt.prompt_ids, params))
            tokens = np.full((seeds, positions), -1, dtype=np.int64)
            for row, completion in zip(tokens, engine.run(requests), strict=True):
                kept = completion.token_ids[:positions]
                row[: len(kept)] = kept
            drawn[side].append(tokens)
        if on_unit is not None:
            on_unit(done, len(prompts))
    result = two_sample_sequences(*drawn, seed=sampling.seed)
    return dataclasses.asdict(result) | {
        "prompts": len(prompts), "positions": positions, "temperature": sampling.temperature,
        "top_k": sampling.top_k, "top_p": sampling.top_p, "ids": [p.id for p in prompts],
    }  # fmt: skip
