"""How much of the rows is trained on: places where blocks start, and what a reduced vocabulary covers of unseen answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import vocab
from .batch import anchor_budget, anchor_positions
from .chat import TokenRow
from .findings import runs


@dataclass(frozen=True, slots=True)
class AnchorFacts:
    """possible: places where a block may start; drawn: started per epoch; labels: expected share of supervised tokens that
    an epoch trains some slot on."""

    possible: int
    drawn: int
    labels: float


def anchor_facts(rows: Sequence[TokenRow], share: float, block: int) -> AnchorFacts:
    """Anchors of all rows at `share` anchors per supervised token and blocks of `block` slots."""
    possible = drawn = supervised = 0
    hit = 0.0
    for row in rows:
        places = len(anchor_positions(row.loss_mask))
        budget = min(places, anchor_budget(row.loss_mask, anchors_per_row=None, anchor_share=share))
        possible, drawn, supervised = possible + places, drawn + budget, supervised + row.num_supervised
        missed = [1.0]  # missed[m]: probability that none of m given places is drawn
        for m in range(min(block, places)):
            missed.append(missed[-1] * max(0, places - m - budget) / (places - m))
        for start, end in runs(row.loss_mask):
            hit += sum(1.0 - missed[min(offset, block)] for offset in range(end - start))
    return AnchorFacts(possible, drawn, hit / supervised if supervised else 0.0)


def folds(rows: Sequence[TokenRow], ranks: torch.Tensor | None = None) -> vocab.Sample:
    """Token counts of the rows in parts that share no prompt. ranks: merge ranks of the tokenizer, default its ids."""
    return vocab.Sample(rows, None if ranks is None else len(ranks), ranks=ranks)


def held_out_coverage(parts: vocab.Sample, size: int, *, vocab_size: int, required: Sequence[int]) -> dict[str, float]:
    """Coverage of answers that the vocabulary of `size` ids was not made from, by domain and in all (""); empty with rows of
    one prompt only."""
    return parts.padded(vocab_size).held_out(size, required)
