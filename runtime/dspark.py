"""The trained drafter as a proposer: one parallel pass per cycle, then a short serial loop of the correction head.

B rows, G block slots, n*H tap width, V and Vd target and draft vocabulary.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from .backbone import make_backbone, make_linear
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, argmax, draw


class DSparkProposer:
    """drafter and heads as loaded by models/export/native.py; slots and max_context as the engine's."""

    def __init__(
        self, drafter: DSpark, heads: FrozenHeads, *, slots: int, max_context: int, with_survival: bool = False
    ) -> None:
        self.drafter = drafter.eval()
        self.heads = heads.to(drafter.fc.weight.dtype)
        self.num_slots = drafter.block_size
        self.tap_layers = drafter.tap_layers
        self.with_survival = with_survival and drafter.confidence_head is not None
        self.backbone = make_backbone(drafter, self.heads.embedding, slots=slots, max_context=max_context)
        self.base_logits = make_linear(self.heads.draft_head)
        markov = drafter.markov_head
        self.bias = None if markov is None else make_linear(markov.markov_w2.weight)

    def begin(self, row: int, prompt: list[int], taps: Tensor | None) -> None:
        """See Proposer: writes the prompt's context keys and values."""
        assert taps is not None and len(taps) == len(prompt)
        self.backbone.write_context([row], torch.zeros(1, dtype=torch.int64), taps[None])

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """See Proposer: writes all verified positions; those of rejected drafts lie beyond the next anchor."""
        assert taps is not None
        self.backbone.write_context(rows, starts, taps)

    def release(self, row: int) -> None:
        """Nothing to do: the next request overwrites the slot."""

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. q is built once per slot, in float32, after temperature and truncation, and handed on as it is."""
        hidden = self.backbone.hidden(rows, anchors, sampling.positions, sampling.max_position)[:, :max_slots]
        base = self.base_logits(hidden)
        began = time.perf_counter()
        tokens, probs, survival = self._chain(hidden, base, anchors, sampling)
        lengths = torch.full((len(rows),), tokens.shape[1], device=tokens.device)
        return Proposal(tokens, lengths, probs, self.heads.draft_ids, survival, head_s=time.perf_counter() - began)

    def _chain(
        self, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The serial part: slot k's logits are base_k plus the head's bias given the token just drafted."""
        head, previous_token = self.drafter.markov_head, anchors
        state = head.initial_state(hidden[:, 0]) if head is not None else None
        slots = base.shape[1]
        u = None if sampling.all_greedy else uniforms(sampling.seeds, sampling.positions, slots, DRAFT)
        tokens, laws, conditionals = [], [], []
        for k in range(slots):
            logits, previous = base[:, k], None
            if head is not None and self.bias is not None:
                previous = head.markov_w1(previous_token)
                feature, state = head.step(hidden[:, k], previous, state)
                logits = logits + self.bias(feature)
            if self.with_survival:
                conditionals.append(self._conditional(hidden[:, k], previous))
            if u is None:
                choice = argmax(logits)
            else:
                law = sampling.probabilities(logits[:, None])[:, 0]
                choice = draw(law, u[:, k])
                laws.append(law)
            previous_token = choice if self.heads.draft_ids is None else self.heads.draft_ids[choice]
            tokens.append(previous_token)
        survival = torch.stack(conditionals, dim=1).cumprod(dim=1) if conditionals else None
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None, survival

    def _conditional(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """c_k of one slot, float32 [B]: from h_k and the previous token, never from the slot's own token."""
        head = self.drafter.confidence_head
        assert head is not None
        return torch.sigmoid(head(hidden, previous if head.rank else None).float())
