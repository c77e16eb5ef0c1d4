"""Proposers whose acceptance is known beforehand: right, wrong, or random on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.runtime.ngram import pack
from draftsmith.runtime.propose import Proposal
from draftsmith.runtime.random import DRAFT, uniforms
from draftsmith.runtime.sampling import SamplingBatch, draw


class Stateless:
    """What a proposer without taps needs: it remembers which prompt is in which slot, and nothing else."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, num_slots: int = 7) -> None:
        self.num_slots = num_slots
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.committed: dict[tuple[int, ...], list[list[int]]] = {}

    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        assert row not in self.prompts, "the slot was not released"
        self.prompts[row] = tuple(prompt)

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        for row, part in zip(rows, tokens, strict=True):
            self.committed.setdefault(self.prompts[row], []).append(part)

    def release(self, row: int) -> None:
        del self.prompts[row]


class OracleProposer(Stateless):
    """Proposes the continuation it was given for each prompt (answer token ids, the first from prefill)."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], num_slots: int = 7) -> None:
        super().__init__(num_slots)
        self.answers = {tuple(prompt): list(answer) for prompt, answer in answers.items()}

    def draft(self, row: int, position: int, count: int) -> list[int]:
        prompt = self.prompts[row]
        after = position - len(prompt) + 1  # the anchor is answer[position - len(prompt)]
        return self.answers[prompt][after : after + count]

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        width = min(self.num_slots, max_slots)
        drafts = [self.draft(row, int(p), width) for row, p in zip(rows, sampling.positions, strict=True)]
        tokens, lengths = pack(drafts, width, anchors.device)
        return Proposal(tokens=tokens, lengths=lengths)


class WrongProposer(OracleProposer):
    """Always one id off: nothing it proposes is ever the target's own choice."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, num_slots: int = 7) -> None:
        super().__init__(answers, num_slots)
        self.vocab_size = vocab_size

    def draft(self, row: int, position: int, count: int) -> list[int]:
        return [(token + 1) % self.vocab_size for token in super().draft(row, position, count)]


class RandomProposer(Stateless):
    """Draws from its own fixed random laws, one per position, and hands the full q on."""

    def __init__(self, vocab_size: int, num_slots: int = 7, *, seed: int = 0, spread: float = 1.0) -> None:
        super().__init__(num_slots)
        table = torch.randn(64, num_slots, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.laws = (spread * table).softmax(-1)

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        width = min(self.num_slots, max_slots)
        laws = self.laws[sampling.positions % 64, :width]
        tokens = draw(laws, uniforms(sampling.seeds, sampling.positions, width, DRAFT))
        return Proposal(tokens=tokens, lengths=torch.full((len(rows),), width), probs=laws)


class PerPrompt(Stateless):
    """Each prompt has its own proposer: rows of one batch are drafted by different ones (all without q)."""

    def __init__(self, choice: Mapping[tuple[int, ...], OracleProposer], num_slots: int = 7) -> None:
        super().__init__(num_slots)
        self.choice = {tuple(prompt): proposer for prompt, proposer in choice.items()}

    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        super().begin(row, prompt, taps)
        self.choice[tuple(prompt)].begin(row, prompt, taps)

    def release(self, row: int) -> None:
        self.choice[self.prompts[row]].release(row)
        super().release(row)

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        width = min(self.num_slots, max_slots)
        positions = sampling.positions.tolist()
        drafts = [self.choice[self.prompts[row]].draft(row, p, width) for row, p in zip(rows, positions, strict=True)]
        tokens, lengths = pack(drafts, width, anchors.device)
        return Proposal(tokens=tokens, lengths=lengths)
