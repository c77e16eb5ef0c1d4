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

    A row without a draft has length 0; what its tokens and probs hold is never read. draft_ids int64 [Vd]: target id of each
    column of probs (None: Vd = V). survival float32 [B, G]: predicted probability that slots 1..k all survive, calibrated where
    the proposer has a calibration. survival_logits float32 [B, G]: the survival head's raw conditional logits z_k, what a
    calibration is fitted on. head_s: seconds of the sequential head inside propose, for the time split.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    draft_ids: Tensor | None = None
    survival: Tensor | None = None
    survival_logits: Tensor | None = None
    head_s: float = 0.0


class Proposer(Protocol):
    """num_slots: the most tokens it drafts; tap_layers: target states it needs (empty: none). One that can leave survivals out
    has an attribute ask_survival, which the engine sets before each propose.

    Per request: begin, then (optionally) first_token, then cycles of (propose, commit), where a cycle may skip the propose for
    some or all rows, then release. Rows are independent: other rows never change what a row is drafted.
    """

    num_slots: int
    tap_layers: tuple[int, ...]

    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        """A request joined slot `row`; its prompt (given whole) was prefilled.

        taps [len(prompt) - start, n*H] are the target's states at start .. len(prompt) - 1. start > 0: the slot still holds
        the positions before it, from earlier requests that began with the same tokens and whose commits were all seen.
        """

    def first_token(self, row: int, token: int) -> None:
        """The first token of the answer, drawn from the prefill: the anchor of the row's first cycle.

        Needed where that cycle may go without a draft, since `commit` never shows an anchor. An engine calls it once after
        begin; a proposer that has not been told takes the token from the anchors of its first propose.
        """

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """Draft up to max_slots tokens after each row's anchor (int64 [B], at absolute position sampling.positions).

        rows: the active rows to draft for, any subset of them; anchors and sampling have one entry for each.
        """

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """After every cycle, drafted or not: tokens[b] were committed after the anchor of row b, which stood at starts[b].

        taps [B, W, n*H] hold the target's states at starts[b]..starts[b]+W-1; the first len(tokens[b]) are those of the anchor
        and the accepted drafts, the rest belong to rejected drafts or to padding (maybe NaN) and must never be seen.
        """

    def release(self, row: int) -> None:
        """The request in slot `row` ended."""
