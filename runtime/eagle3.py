"""An EAGLE-3 drafter as a proposer: what was committed is entered once, then one serial step for each further draft.

Frame (models/eagle3.py): entry t pairs the token at t + 1 with the target's state at t. A commit brings both for every position
up to the new anchor, so the last pending entry of a row holds the anchor as its token and gives the first draft. Entries of
drafts stand behind it in the cache and are overwritten in the next cycle: rollback is by length only.
B rows, W entries per row, G slots, S cache length, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.blocks import Rope
from ..models.eagle3 import Eagle3
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, argmax, draw

_BUCKET = 64
_CHUNK = 512  # entries of a prompt that one pass takes


@dataclass
class _Row:
    """One slot. entered: entries 0 .. entered - 1 stand in the cache; known: positions whose target states are kept; tokens:
    those of the entries from `entered` on, one less than `known - entered` while the anchor is not known yet."""

    entered: int
    known: int
    tokens: list[int]
    lost: bool = False  # a token was committed that nobody named: no drafts

    @property
    def anchored(self) -> bool:
        return self.entered + len(self.tokens) == self.known


class Eagle3Proposer:
    """drafter and rope as `models/export/eagle3.py` loads them; slots and max_context as the engine's. Hands on the full q.

    num_slots: most tokens drafted. Meant for inference mode.
    """

    def __init__(self, drafter: Eagle3, rope: Rope, *, slots: int, max_context: int, num_slots: int = 5) -> None:
        self.drafter, self.rope, self.num_slots, self.tap_layers = drafter, rope, num_slots, drafter.tap_layers
        weight, shape = drafter.fc.weight, drafter.cfg.shape
        length = max_context + num_slots + 1
        length += -length % _BUCKET
        size = (drafter.cfg.num_layers, slots, length, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self._values = torch.zeros_like(self._keys)
        self._states = torch.zeros(slots, length, shape.hidden_size, dtype=weight.dtype, device=weight.device)
        self._rows: dict[int, _Row] = {}  # ended ones stay: the next request in the slot may share their text

    def begin(self, row: int, prompt: list[int], taps: Tensor | None, start: int = 0) -> None:
        """See Proposer: keeps the prompt's states; the first propose enters them. ValueError when the slot lacks positions
        before start."""
        assert taps is not None and len(taps) == len(prompt) - start, (len(prompt), start)
        before = self._rows.get(row, _Row(0, 0, []))
        if start > before.known:
            raise ValueError(f"slot {row}: begins at position {start}, but the drafter has seen {before.known}")
        # the entry at start - 1 holds the token at `start`, which the earlier request need not have shared
        entered = max(0, min(before.entered, start - 1))
        if len(taps):
            self._states[row, start : len(prompt)] = self.drafter.fuse(taps.to(self._states.dtype))
        self._rows[row] = _Row(entered, len(prompt), list(prompt[entered + 1 :]))

    def first_token(self, row: int, token: int) -> None:
        """See Proposer: the anchor of the first cycle completes the last entry of the prompt."""
        self._rows[row].tokens.append(token)

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """See Proposer: keeps the states of the committed positions until the row is drafted again."""
        assert taps is not None
        for i, (row, start, committed) in enumerate(zip(rows, starts.tolist(), tokens, strict=True)):
            state = self._rows[row]
            if not state.anchored and state.known == start:
                state.tokens.append(0)
                state.lost = True  # the first cycle had no draft and nobody told the anchor
            if state.known != start:
                raise ValueError(f"slot {row}: commit at position {start}, but the drafter has seen {state.known}")
            state.tokens += committed
            state.known += len(committed)
            self._states[row, start : state.known] = self.drafter.fuse(taps[i, : len(committed)].to(self._states.dtype))

    def release(self, row: int) -> None:
        """Nothing to do: the next request overwrites the slot, or goes on from what it shares with this one."""

    @torch.inference_mode()
    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. q is built once per slot, in float32, after temperature and truncation, and handed on as it is."""
        states = [self._rows[row] for row in rows]
        if not all(state.anchored for state in states):
            for state, token in zip(states, anchors.tolist(), strict=True):
                if not state.anchored:
                    state.tokens.append(token)
        for row, state in zip(rows, states, strict=True):
            while len(state.tokens) > self.num_slots + 1:  # a prompt, or cycles without a draft: alone, whoever else drafts
                self._enter([row], [min(_CHUNK, len(state.tokens) - 1)])
        state, logits = self._enter(rows, [len(found.tokens) for found in states])
        depth = min(self.num_slots, max_slots)
        u = None if sampling.all_greedy else uniforms(sampling.seeds, sampling.positions, depth, DRAFT)
        ends = torch.tensor([found.entered for found in states], device=anchors.device)
        bound = max(found.entered for found in states) + depth
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for k in range(depth):
            if k:
                state, logits = self._run(rows, tokens[-1][:, None], state, (ends + (k - 1))[:, None], bound)
            if u is None:
                choice = argmax(logits[:, 0])
            else:
                law = sampling.probabilities(logits)[:, 0]
                choice = draw(law, u[:, k])
                laws.append(law)
            tokens.append(choice if self.drafter.draft_ids is None else self.drafter.draft_ids[choice])
        lengths = torch.tensor([0 if found.lost else depth for found in states], device=anchors.device)
        probs = torch.stack(laws, dim=1) if laws else None
        return Proposal(torch.stack(tokens, dim=1), lengths, probs, self.drafter.draft_ids)

    @torch.inference_mode()
    def _enter(self, rows: list[int], widths: list[int]) -> tuple[Tensor, Tensor]:
        """Enter the first `widths` pending entries of each row; of the last of each, (state [B, 1, H], logits [B, 1, Vd])."""
        found, most, device = [self._rows[row] for row in rows], max(widths), self._keys.device
        tokens = torch.tensor([[*r.tokens[:n], *[0] * (most - n)] for r, n in zip(found, widths, strict=True)], device=device)
        starts = torch.tensor([row.entered for row in found], device=device)
        # Padding of short rows lands behind their last entry, where the drafts' entries follow: nobody sees it.
        places = starts[:, None] + torch.arange(most, device=device)
        states = self._states[torch.tensor(rows, device=device)[:, None], places]
        last = torch.tensor([n - 1 for n in widths], device=device)
        out = self._run(rows, tokens, states, places, max(row.entered for row in found) + most, last)
        for row, n in zip(found, widths, strict=True):
            row.entered += n
            row.tokens = row.tokens[n:]
        return out

    def _run(
        self, rows: list[int], tokens: Tensor, states: Tensor, places: Tensor, bound: int, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Entries (tokens int64 [B, W], states [B, W, H]) at places int64 [B, W] -> states that are fed back and draft logits,
        [B, W, ...], or those of entry `last` int64 [B] alone, [B, 1, ...]. bound: host-known limit of places."""
        drafter, device = self.drafter, places.device
        length = min(-(-bound // _BUCKET) * _BUCKET, self._keys.shape[2])
        index = torch.tensor(rows, device=device)
        visible = (torch.arange(length, device=device) <= places[..., None])[:, None]
        rope = self.rope(places)
        embeds, x = drafter.embed_tokens(tokens), states
        for i, layer in enumerate(drafter.layers):
            inputs, residual = layer.inputs(embeds if i == 0 else None, x)
            query, key, value = layer.self_attn.project(inputs, rope)
            self._keys[i].index_put_((index[:, None], places), key)
            self._values[i].index_put_((index[:, None], places), value)
            keys, values = (cache[i, index, :length].transpose(1, 2) for cache in (self._keys, self._values))
            out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=True)
            x = layer.finish(out.transpose(1, 2), residual)
        if last is not None:
            x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
        return drafter.outputs(x)
