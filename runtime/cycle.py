"""One cycle's tensors: the block that the target runs, what it accepts, and the one transfer that tells the host.

R running rows, the first D of them drafted; G drafted slots, W = G + 1 tokens per row; V, Vd target and draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .random import EMIT, VERIFY, uniforms
from .sampling import SamplingBatch, argmax
from .verify import greedy, verify_and_draw


@dataclass
class Draft:
    """The drafts of D rows as they are verified: tokens int64 [D, G], lengths int64 [D], probs float32 [D, G, Vd] or None.

    On a CPU `host` holds the lengths as numbers. Elsewhere they stay on the device until the commit, and so does `sound`,
    bool [D]: which rows' drafts are drafts at all (the others have length 0).
    """

    sampling: SamplingBatch
    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None
    draft_ids: Tensor | None
    host: list[int] | None = None
    sound: Tensor | None = None

    def cut(self, slots: int) -> Draft:
        """Only the first `slots` slots, which hold all that is live."""
        if slots < self.tokens.shape[1]:
            self.tokens = self.tokens[:, :slots]
            self.probs = None if self.probs is None else self.probs[:, :slots]
        return self

    @property
    def widths(self) -> list[int] | None:
        """Live tokens of each row with its anchor, where they are known and differ."""
        if self.host is None or min(self.host) == self.tokens.shape[1]:
            return None
        return [1 + n for n in self.host]


class Verdict(NamedTuple):
    """What a row's verification gave: drafts verified, drafts accepted, and the tokens to commit (before any end token)."""

    length: int
    accepted: int
    tokens: list[int]


def block(anchors: Tensor, draft: Draft | None) -> tuple[Tensor, list[int] | None]:
    """anchors int64 [R] -> tokens [R, W] of the target's pass, and the rows' own widths where they are known and differ."""
    if draft is None:
        return anchors[:, None], None
    rest = len(anchors) - len(draft.tokens)
    drafts = F.pad(draft.tokens, (0, 0, 0, rest)) if rest else draft.tokens
    widths = draft.widths
    if rest and draft.host is not None:
        widths = [*(1 + n for n in draft.host), *[1] * rest]
    return torch.cat((anchors[:, None], drafts), dim=1), widths


def next_tokens(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """One token of the target's law per row: logits [B, V] -> int64 [B]."""
    if sampling.all_greedy:
        return argmax(logits)
    return sampling.sample(logits, uniforms(sampling.seeds, sampling.positions, 1, EMIT)[:, 0])[0]


def accept(rule: str, logits: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each draft and draw the token after it: logits [D, W, V] -> (accepted int64 [D], next int64 [D])."""
    sampling, widths = draft.sampling, draft.widths
    if sampling.all_greedy:
        return greedy(argmax(logits, widths), draft.tokens, draft.lengths)
    u = uniforms(sampling.seeds, sampling.positions, draft.tokens.shape[1], VERIFY)
    emit = uniforms(sampling.seeds, sampling.positions, 1, EMIT)[:, 0]
    p = sampling.probabilities(logits, widths)
    return verify_and_draw(rule, p, draft.probs, draft.tokens, draft.lengths, u, emit, draft.draft_ids)


def verify(rule: str, logits: Tensor, draft: Draft, rest: SamplingBatch | None) -> tuple[list[Verdict], list[bool] | None]:
    """Verdicts of R rows from logits [R, W, V]; rest: settings of the rows that were not drafted. Waits for the device, once.

    Returns also which drafted rows were sound, where that was still on the device.
    """
    count, width = draft.tokens.shape
    accepted, following = accept(rule, logits[:count], draft)
    if rest is not None:
        following = torch.cat((following, next_tokens(logits[count:, 0], rest)))
    parts = [draft.lengths, accepted, following, draft.tokens.flatten()]
    if draft.sound is not None:
        parts.append(draft.sound.long())
    numbers = torch.cat(parts).tolist()
    lengths, hits, tokens = numbers[:count], numbers[count : 2 * count], numbers[2 * count : 2 * count + len(following)]
    at = 2 * count + len(following)
    verdicts = [
        Verdict(length, hit, [*numbers[at + i * width : at + i * width + hit], tokens[i]])
        for i, (length, hit) in enumerate(zip(lengths, hits, strict=True))
    ]
    verdicts += [Verdict(0, 0, [token]) for token in tokens[count:]]
    return verdicts, None if draft.sound is None else [bool(flag) for flag in numbers[at + count * width :]]
