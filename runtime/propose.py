"""The proposer contract: whatever drafts for the engine, from a trained drafter to an n-gram table.

A proposal is a chain of tokens per row with the law each was drawn from. Losslessness rests on one rule: `probs` is the very
tensor the tokens were sampled from (or None: the draft was certain, a one-hot). Anything a proposer decides about the length of
its chain may look at hidden states, earlier tokens and whole q vectors, never at the token whose own slot is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .sampling import SamplingBatch


@dataclass
class Proposal:
    """tokens int64 [B, G] in target ids; lengths int64 [B] (drafts valid per row, 0..G); probs float32 [B, G, Vd] or None.

    draft_ids int64 [Vd]: target id of each column of probs (None: Vd = V). survival float32 [B, G]: predicted probability that
    slots 1..k all survive. head_s: seconds of the sequential head inside propose, for the time split.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    draft_ids: Tensor | None = None
    survival: Tensor | None = None
    head_s: float = 0.0


class Proposer(Protocol):
    """num_slots: the most tokens it drafts; tap_layers: target states it needs (empty: none)."""

    num_slots: int
    tap_layers: tuple[int, ...]

    def begin(self, row: int, prompt: list[int], taps: Tensor | None) -> None:
        """A request joined slot `row`; its prompt was prefilled. taps [P, n*H] are the target's states at 0..P-1."""

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """Draft up to max_slots tokens after each row's anchor (int64 [B], at absolute position sampling.positions)."""

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """After verification: tokens[b] were committed after the anchor of row b, which stood at starts[b].

        taps [B, W, n*H] hold the target's states at starts[b]..starts[b]+W-1; the first len(tokens[b]) are those of the anchor
        and the accepted drafts, the rest belong to rejected drafts and must never be seen.
        """

    def release(self, row: int) -> None:
        """The request in slot `row` ended."""
