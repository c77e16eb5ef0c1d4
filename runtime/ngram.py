"""Prompt lookup: draft by copying what followed the last occurrence of the current n-gram in prompt + output.

The draft is certain (a one-hot law), so it is verified with q = None. Each new token costs max_ngram dictionary entries, each
proposal at most max_ngram look-ups, whatever the length of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .propose import Proposal
from .sampling import SamplingBatch

# Stands for a token the proposer was never shown (the row's first, when its first cycle had no draft and nobody told).
UNKNOWN = -1


class _History:
    """Tokens of one row and, for each n, where each n-gram last ended with a token after it."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self.needs_anchor = True
        self._sizes = range(min_ngram, max_ngram + 1)
        # An n-gram of length n: key (t_1..t_n), value = index of the token that followed its latest occurrence.
        self._follower: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        # Only now do the n-grams that end at the previous token have a follower: the current suffix never finds itself.
        here = len(self.tokens)
        for size in self._sizes:
            if here >= size:
                self._follower[tuple(self.tokens[here - size :])] = here
        self.tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        here = len(self.tokens)
        for size in reversed(self._sizes):
            start = self._follower.get(tuple(self.tokens[here - size :])) if here >= size else None
            if start is not None:
                return self._copy(start, count)
        return []

    def _copy(self, start: int, count: int) -> list[int]:
        # Past the end the copy reads what it has just written: a loop in the text goes on looping.
        period = len(self.tokens) - start
        draft: list[int] = []
        for index in range(count):
            token = self.tokens[start + index] if index < period else draft[index - period]
            if token == UNKNOWN:
                break
            draft.append(token)
        return draft


def pack(drafts: list[list[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged drafts -> tokens int64 [B,width] (0 after the end) and lengths int64 [B], in one copy to the device."""
    rows = [[len(draft), *draft, *[0] * (width - len(draft))] for draft in drafts]
    packed = torch.tensor(rows, dtype=torch.int64).reshape(len(drafts), width + 1).to(device)
    return packed[:, 1:], packed[:, 0]


class NgramProposer:
    """Longest match of the last max_ngram..min_ngram tokens, most recent occurrence; no match drafts nothing."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, num_slots: int = 7, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots: {num_slots} is not allowed (1 or more)")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram: {min_ngram} is not allowed (1 to max_ngram = {max_ngram})")
        self.num_slots = num_slots
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._rows: dict[int, _History] = {}

    def begin(self, row: int, prompt: list[int], taps: Tensor | None = None, start: int = 0) -> None:
        """Index the prompt of the request that joined slot `row`, whatever `start` is."""
        history = _History(self._min_ngram, self._max_ngram)
        for token in prompt:
            history.append(token)
        self._rows[row] = history

    def first_token(self, row: int, token: int) -> None:
        """Append the first token of the answer, drawn from the prefill."""
        self._rows[row].append(token)
        self._rows[row].needs_anchor = False

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """Draft up to max_slots tokens per row: tokens int64 [B,G], lengths int64 [B], no probs (one-hot)."""
        width = min(self.num_slots, max_slots)
        histories = [self._rows[row] for row in rows]
        # The anchor of a row's first cycle comes from prefill; later ones are the last committed token.
        first = anchors.tolist() if any(history.needs_anchor for history in histories) else []
        for index, history in enumerate(histories):
            if history.needs_anchor:
                history.append(first[index])
                history.needs_anchor = False
        tokens, lengths = pack([history.lookup(width) for history in histories], width, anchors.device)
        return Proposal(tokens=tokens, lengths=lengths)

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None = None) -> None:
        """Append each row's committed tokens to its text."""
        for row, committed in zip(rows, tokens, strict=True):
            history = self._rows[row]
            if history.needs_anchor:
                history.append(UNKNOWN)
                history.needs_anchor = False
            for token in committed:
                history.append(token)

    def release(self, row: int) -> None:
        """Forget the text of slot `row`."""
        self._rows.pop(row, None)
