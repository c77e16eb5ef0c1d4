"""Suffix-automaton drafting: continue the longest repeated suffix of prompt + output by what followed it most often.

An online suffix automaton (Blumer et al. 1985) of each row's text knows, for the longest suffix seen before, every
continuation and how often it occurred. An optional shared automaton over earlier outputs serves new requests; the longer match
of the two drafts. The draft is certain (a one-hot law): it is verified with q = None. The frequencies give a survival estimate,
which depends on the text alone. Cost per token: a few dictionary operations, bounded by `_COUNT_STEPS`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .ngram import UNKNOWN, pack
from .propose import Proposal
from .sampling import SamplingBatch

# Occurrences are counted along at most this many suffix links for each new token: a loop of n tokens would cost n each.
_COUNT_STEPS = 64
# Longest match looked for in the corpus after it has changed under a running row.
_REMATCH = 64


class SuffixAutomaton:
    """States are classes of substrings with equal end positions. Negative tokens separate texts and are never drafted."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]
        self._recent: list[int] = [0]  # end of the latest occurrence
        self._last = 0

    def __len__(self) -> int:
        return len(self._next)

    def _state(self, length: int, link: int, moves: dict[int, int], count: int, recent: int) -> int:
        self._next.append(moves)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._recent.append(recent)
        return len(self._next) - 1

    def append(self, token: int) -> None:
        """Extend the text by one token (amortised constant time, but for the counting)."""
        moves, link, length = self._next, self._link, self._length
        state, new = self._last, self._state(length[self._last] + 1, 0, {}, 0, 0)
        while state != -1 and token not in moves[state]:
            moves[state][token] = new
            state = link[state]
        if state != -1:
            target = moves[state][token]
            if length[target] == length[state] + 1:
                link[new] = target
            else:
                seen = (self._count[target], self._recent[target])
                clone = self._state(length[state] + 1, link[target], dict(moves[target]), *seen)
                while state != -1 and moves[state].get(token) == target:
                    moves[state][token] = clone
                    state = link[state]
                link[target] = link[new] = clone
        self._last = new
        state = new
        for _ in range(_COUNT_STEPS):
            if state <= 0:
                break
            self._count[state] += 1
            self._recent[state] = length[new]
            state = link[state]

    def repeated_suffix(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that occurs earlier in it; (0, 0) for none."""
        state = max(self._link[self._last], 0)
        return state, self._length[state]

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Longest suffix of (the match, token) that occurs in this automaton's text, as (state, length)."""
        if token < 0:
            return 0, 0
        while token not in self._next[state]:
            if state == 0:
                return 0, 0
            state = self._link[state]
            matched = self._length[state]
        return self._next[state][token], matched + 1

    def continuation(self, state: int, count: int) -> tuple[list[int], list[float]]:
        """Follow the most frequent continuation (ties: the most recent) for up to `count` tokens.

        Returns the tokens and the product of their relative frequencies so far, one per token.
        """
        draft: list[int] = []
        survival: list[float] = []
        product = 1.0
        while len(draft) < count and state != -1:
            options = [(self._count[t], self._recent[t], token, t) for token, t in self._next[state].items() if token >= 0]
            if not options:
                # The text ends here: go on from the next shorter suffix that has been continued.
                state = self._link[state]
                continue
            if state == 0:
                break  # nothing matched: the commonest token of the text is no draft
            best, _, token, state = max(options)
            product *= best / max(sum(option[0] for option in options), 1)
            draft.append(token)
            survival.append(product)
        return draft, survival


class _Row:
    def __init__(self) -> None:
        self.text = SuffixAutomaton()
        self.tokens: list[int] = []
        self.prompt_length = 0
        self.needs_anchor = True
        self.match = (0, 0)
        self.corpus_version = -1


class SuffixProposer:
    """Drafts the most frequent continuation of the longest suffix seen before.

    num_slots      most tokens drafted
    min_match      shortest suffix that may draft
    min_survival   the draft ends before the product of relative frequencies falls below this
    corpus_tokens  0: no shared corpus; otherwise outputs of finished requests are kept up to this many tokens (the oldest
                   half is dropped when full)
    """

    tap_layers: tuple[int, ...] = ()

    def __init__(self, num_slots: int = 7, min_match: int = 1, min_survival: float = 0.0, corpus_tokens: int = 0) -> None:
        if num_slots < 1 or min_match < 1:
            raise ValueError(f"num_slots, min_match: {num_slots}, {min_match} is not allowed (each 1 or more)")
        if not 0 <= min_survival <= 1:
            raise ValueError(f"min_survival: {min_survival} is not allowed (0 to 1)")
        if corpus_tokens < 0:
            raise ValueError(f"corpus_tokens: {corpus_tokens} is not allowed (0 or more)")
        self.num_slots = num_slots
        self._min_match, self._min_survival = min_match, min_survival
        self._rows: dict[int, _Row] = {}
        self._limit = corpus_tokens
        self._outputs: deque[list[int]] = deque()
        self._corpus = SuffixAutomaton()
        self._corpus_size = 0
        self._version = 0

    def begin(self, row: int, prompt: list[int], taps: Tensor | None = None, start: int = 0) -> None:
        """Index the prompt of the request that joined slot `row`, whatever `start` is."""
        state = _Row()
        self._rows[row] = state
        self._extend(state, prompt)
        state.prompt_length = len(prompt)

    def first_token(self, row: int, token: int) -> None:
        """Append the first token of the answer, drawn from the prefill."""
        self._rows[row].needs_anchor = False
        self._extend(self._rows[row], [token])

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """Draft up to max_slots tokens per row: tokens int64 [B,G], lengths int64 [B], survival float32 [B,G]."""
        width = min(self.num_slots, max_slots)
        states = [self._rows[row] for row in rows]
        first = anchors.tolist() if any(state.needs_anchor for state in states) else []
        drafts, survivals = [], []
        for index, state in enumerate(states):
            if state.needs_anchor:
                state.needs_anchor = False
                self._extend(state, [first[index]])
            draft, survival = self._draft(state, width)
            drafts.append(draft)
            survivals.append(survival + [0.0] * (width - len(survival)))
        tokens, lengths = pack(drafts, width, anchors.device)
        estimate = torch.tensor(survivals, dtype=torch.float32).reshape(len(rows), width)
        return Proposal(tokens=tokens, lengths=lengths, survival=estimate.to(anchors.device))

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None = None) -> None:
        """Append each row's committed tokens to its text."""
        for row, committed in zip(rows, tokens, strict=True):
            state = self._rows[row]
            if state.needs_anchor:
                state.needs_anchor = False
                self._extend(state, [UNKNOWN])
            self._extend(state, committed)

    def release(self, row: int) -> None:
        """Forget slot `row`; its output joins the shared corpus where there is one."""
        state = self._rows.pop(row, None)
        if state is not None and self._limit:
            self.add_output(state.tokens[state.prompt_length :])

    def add_output(self, tokens: list[int]) -> None:
        """Add one text to the shared corpus (nothing where corpus_tokens is 0)."""
        tokens = tokens[: self._limit]
        if not tokens:
            return
        self._outputs.append(tokens)
        self._corpus_size += len(tokens)
        self._version += 1
        fresh = [tokens]
        if self._corpus_size > self._limit:
            while self._corpus_size > self._limit // 2 and len(self._outputs) > 1:
                self._corpus_size -= len(self._outputs.popleft())
            self._corpus, fresh = SuffixAutomaton(), list(self._outputs)
        for text in fresh:
            for token in text:
                self._corpus.append(token)
            self._corpus.append(UNKNOWN)

    def _extend(self, state: _Row, tokens: list[int]) -> None:
        for token in tokens:
            state.text.append(token)
        state.tokens.extend(tokens)
        if self._limit and state.corpus_version == self._version:
            for token in tokens:
                state.match = self._corpus.step(*state.match, token)

    def _draft(self, state: _Row, width: int) -> tuple[list[int], list[float]]:
        automaton, (node, matched) = state.text, state.text.repeated_suffix()
        if self._limit:
            if state.corpus_version != self._version:
                # The corpus grew: states may have been split, so the match is walked anew.
                state.corpus_version, state.match = self._version, (0, 0)
                for token in state.tokens[-_REMATCH:]:
                    state.match = self._corpus.step(*state.match, token)
            if state.match[1] > matched:
                automaton, (node, matched) = self._corpus, state.match
        if matched < self._min_match:
            return [], []
        draft, survival = automaton.continuation(node, width)
        kept = sum(value >= self._min_survival for value in survival)  # the products never rise
        return draft[:kept], survival[:kept]
