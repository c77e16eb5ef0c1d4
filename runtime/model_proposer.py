"""Drafting with an ordinary language model: a small one, some layers of the target, or the target in int8.

Any `Decoder` of the target's vocabulary drafts token by token over a cache of its own: the sequential drafter of Leviathan et
al. (ICML 2023). B rows, G slots, V target vocabulary, Vd the drafting model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from .decoder import Decoder
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, argmax, draw

_SHORT = 16  # a row with at most so many unseen tokens joins the batched pass; a longer one first runs alone


@dataclass
class _Row:
    """One slot. text: prompt and committed tokens, the anchor last (once it is known)."""

    text: list[int]
    known: int  # positions from 0 whose keys and values in the cache are those of the text
    ahead: int = 0  # drafts of the running cycle whose keys and values stand behind the anchor
    anchored: bool = False
    lost: bool = False  # holds a token this model was never shown or does not know: no drafts

    @property
    def unseen(self) -> int:
        return len(self.text) - self.known


class DecoderProposer:
    """Drafts up to num_slots tokens with `decoder`, greedily at temperature 0, else sampled with the full q.

    vocab_size: the target's; the models share token ids below the smaller of the two sizes. catch_up: most tokens of a row that
    one propose runs to catch up with its text; until it has, the row is drafted nothing (so a long prompt stalls nobody, and no
    row's drafts depend on other rows). Rollback is by length only, like the engine's.
    """

    tap_layers: tuple[int, ...] = ()

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        max_context: int,
        num_slots: int = 4,
        vocab_size: int | None = None,
        catch_up: int = 512,
    ) -> None:
        if num_slots < 1 or catch_up < 1:
            raise ValueError(f"num_slots, catch_up: {num_slots}, {catch_up} is not allowed (each 1 or more)")
        self.decoder, self.num_slots, self.catch_up = decoder, num_slots, catch_up
        self.vocab_size = vocab_size or decoder.vocab_size
        self._limit = min(max_context, decoder.max_positions)
        self._cache = decoder.new_cache(slots, self._limit)
        self._rows: dict[int, _Row] = {}
        self._resident: dict[int, list[int]] = {}  # text of ended requests that still stands in the cache
        self.draft_ids = None
        if decoder.vocab_size < self.vocab_size:
            self.draft_ids = torch.arange(decoder.vocab_size, device=decoder.device)

    def begin(self, row: int, prompt: list[int], taps: Tensor | None = None, start: int = 0) -> None:
        """See Proposer. Nothing runs yet: the first propose catches up, behind what the slot shares up to `start`."""
        before = self._resident.pop(row, [])[:start]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
        self._rows[row] = _Row(list(prompt), shared, lost=self._unknown(prompt))

    def first_token(self, row: int, token: int) -> None:
        """See Proposer."""
        self._extend(self._rows[row], [token])
        self._rows[row].anchored = True

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None = None) -> None:
        """See Proposer: the accepted drafts stay in the cache, the rest is forgotten."""
        for row, start, committed in zip(rows, starts.tolist(), tokens, strict=True):
            state = self._rows[row]
            if not state.anchored:
                state.anchored = state.lost = True  # the first cycle had no draft and nobody told the anchor
                state.text.append(0)
            elif start != len(state.text) - 1:
                raise ValueError(f"slot {row}: commit at position {start}, but the drafter has seen {len(state.text) - 1}")
            # The last token committed is the target's own: the drafts before it are the accepted ones.
            state.known += min(state.ahead, len(committed) - 1)
            state.ahead = 0
            self._extend(state, committed)

    def release(self, row: int) -> None:
        """Forget slot `row`, but for what a request with the same beginning may use."""
        state = self._rows.pop(row, None)
        if state is not None:
            self._resident[row] = state.text[: state.known]

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. A row that is behind, or at the end of this model's positions, has length 0."""
        width = min(self.num_slots, max_slots)
        states = [self._rows[row] for row in rows]
        if not all(state.anchored for state in states):
            for row, state, token in zip(rows, states, anchors.tolist(), strict=True):
                if not state.anchored:
                    self.first_token(row, token)
        room = [0 if state.lost else min(width, self._limit - len(state.text) + 1) for state in states]
        for row, state, space in zip(rows, states, room, strict=True):
            if space > 0 and state.unseen > _SHORT:
                self._catch_up(row, state)
        ready = [i for i, state in enumerate(states) if room[i] > 0 and state.unseen <= _SHORT]
        lengths = torch.tensor([room[i] if i in ready else 0 for i in range(len(rows))], dtype=torch.int64)
        hot = not sampling.all_greedy
        if len(ready) == len(rows) and max(room) == width:
            tokens, probs = self._draft(rows, states, room, sampling if hot else None)
            return Proposal(tokens, lengths.to(tokens.device), probs, self.draft_ids)
        columns = min(self.decoder.vocab_size, self.vocab_size)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=self.decoder.device)
        probs = torch.zeros(len(rows), width, columns, device=self.decoder.device) if hot else None
        if ready:
            own = [rows[i] for i in ready], [states[i] for i in ready], [room[i] for i in ready]
            drafted, laws = self._draft(*own, sampling.select(ready) if hot else None)
            index = torch.tensor(ready, device=tokens.device)
            tokens[index, : drafted.shape[1]] = drafted
            if probs is not None:
                probs[index, : drafted.shape[1]] = laws
        return Proposal(tokens, lengths.to(tokens.device), probs, self.draft_ids)

    def _catch_up(self, row: int, state: _Row) -> None:
        """Run a long stretch of unseen text, at most catch_up tokens, and never the anchor (its logits are wanted)."""
        stop = min(state.known + self.catch_up, len(state.text) - 1)
        tokens = torch.tensor([state.text[state.known : stop]], device=self.decoder.device)
        self.decoder.forward(tokens, self._cache, [row], torch.tensor([state.known]), logits="none", bound=stop)
        state.known = stop

    def _draft(
        self, rows: list[int], states: list[_Row], room: list[int], sampling: SamplingBatch | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows that are up to date: their unseen text in one ragged pass, then token by token, max(room) in all.

        sampling None: all greedy. Returns tokens int64 [B,max(room)] and q float32 [B,max(room),Vd] or None.
        """
        depth, choices, laws = max(room), [], []
        u = None if sampling is None else uniforms(sampling.seeds, sampling.positions, depth, DRAFT)
        fresh = [state.text[state.known :] for state in states]
        widths, starts = [len(part) for part in fresh], [state.known for state in states]
        most = max(widths)
        tokens = torch.tensor([[*part, *[0] * (most - len(part))] for part in fresh], device=self.decoder.device)
        for k in range(depth):
            out = self.decoder.forward(
                tokens, self._cache, rows, torch.tensor(starts), logits="last",
                last=torch.tensor([n - 1 for n in widths]), bound=max(starts) + tokens.shape[1], widths=widths,
            )  # fmt: skip
            assert out.logits is not None
            logits = out.logits[:, 0, : self.vocab_size]
            if u is None or sampling is None:
                choice = argmax(logits)
            else:
                law = sampling.probabilities(logits[:, None])[:, 0]
                choice = draw(law, u[:, k])
                laws.append(law)
            choices.append(choice)
            tokens, starts, widths = choice[:, None], [len(state.text) + k for state in states], [1] * len(states)
        for state, space in zip(states, room, strict=True):
            state.known, state.ahead = len(state.text), space - 1
        return torch.stack(choices, dim=1), torch.stack(laws, dim=1) if laws else None

    def _extend(self, state: _Row, tokens: list[int]) -> None:
        state.text.extend(tokens)
        state.lost = state.lost or self._unknown(tokens)

    def _unknown(self, tokens: list[int]) -> bool:
        """Whether a token lies beyond this model's vocabulary (the sizes differ by padding)."""
        return self.decoder.vocab_size < self.vocab_size and max(tokens, default=0) >= self.decoder.vocab_size
