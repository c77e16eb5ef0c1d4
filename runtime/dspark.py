"""The trained drafter as a proposer: one parallel pass per cycle, then a short serial loop of the correction head.

Per slot it keeps the draft layers' keys and values of the committed context only; the block's own are dropped every cycle.
B rows, G block slots, D draft layers, S context length, n*H tap width, Vd draft vocabulary.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.masks import block_attention
from .linear import pack_linears
from .propose import Proposal
from .random import DRAFT, uniforms
from .sampling import SamplingBatch, draw

BUCKET = 64


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
        attn = drafter.layers[0].self_attn.shape
        device = drafter.fc.weight.device
        # Slack of one block: a commit writes all W verified positions, the rejected ones beyond the length.
        length = max_context + 2 * (drafter.block_size + 1)
        length += -length % BUCKET
        shape = (len(drafter.layers), slots, length, attn.num_kv_heads, attn.head_dim)
        self.keys = torch.zeros(shape, dtype=drafter.fc.weight.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.linear = pack_linears(drafter, self.heads.draft_head)

    def begin(self, row: int, prompt: list[int], taps: Tensor | None) -> None:
        """See Proposer: writes the prompt's context keys and values."""
        assert taps is not None and len(taps) == len(prompt)
        self._extend([row], torch.zeros(1, dtype=torch.int64), taps[None])

    def commit(self, rows: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None) -> None:
        """See Proposer: writes all verified positions; those of rejected drafts lie beyond the next anchor."""
        assert taps is not None
        self._extend(rows, starts, taps)

    def release(self, row: int) -> None:
        """Nothing to do: the next request overwrites the slot."""

    def _extend(self, rows: list[int], starts: Tensor, taps: Tensor) -> None:
        """Write the context keys and values of taps [B, W, n*H] at starts[b].. of each row."""
        device = self.keys.device
        positions = starts.to(device)[:, None] + torch.arange(taps.shape[1], device=device)
        context = self.drafter.hidden_norm(self.linear.fc(taps.to(self.keys.dtype)))
        rope = self.drafter.rope(positions)
        index = torch.tensor(rows, device=device)[:, None].expand_as(positions)
        for i, layer in enumerate(self.drafter.layers):
            key, value = self.linear.key_value(i, layer.self_attn, context, rope)
            self.keys[i].index_put_((index, positions), key)
            self.values[i].index_put_((index, positions), value)

    def _context(self, layer: int, rows: list[int], length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer, :, :length], self.values[layer, :, :length]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            part = slice(rows[0], rows[0] + len(rows))
            return keys[part], values[part]
        index = torch.tensor(rows, device=keys.device)
        return keys[index], values[index]

    def _bucket(self, batch: SamplingBatch) -> int:
        """Context length to attend over: a host-known bound, so that nothing waits for the device."""
        bound = self.keys.shape[2] if batch.max_position is None else batch.max_position
        return min(-(-max(bound, 1) // BUCKET) * BUCKET, self.keys.shape[2])

    def _backbone(self, rows: list[int], anchors: Tensor, batch: SamplingBatch) -> Tensor:
        """anchors int64 [B] at batch.positions -> normed hidden states [B, G, H]."""
        drafter, positions = self.drafter, batch.positions
        length = self._bucket(batch)
        visible = (torch.arange(length, device=positions.device) < positions[:, None])[:, None]
        rope = drafter.rope((positions[:, None] + torch.arange(drafter.block_size, device=positions.device))[:, None])
        x = drafter.block_inputs(anchors[:, None], self.heads.embedding)
        for i, layer in enumerate(drafter.layers):
            normed = layer.input_layernorm(x)
            query, key, value = self.linear.query_key_value(i, layer.self_attn, normed, rope)
            out = block_attention(query, self._context(i, rows, length), (key, value), visible)
            x = x + self.linear.output(i, out.flatten(-2))
            x = x + self.linear.mlp(i, layer.post_attention_layernorm(x))
        return drafter.norm(x)[:, 0]

    def propose(self, rows: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> Proposal:
        """See Proposer. q is built once per slot, in float32, after temperature and truncation, and handed on as it is."""
        hidden = self._backbone(rows, anchors, sampling)[:, :max_slots]
        base = self.linear.head(hidden).float()
        began = time.perf_counter()
        tokens, probs, survival = self._chain(hidden, base, anchors, sampling)
        lengths = torch.full((len(rows),), tokens.shape[1], device=tokens.device)
        return Proposal(
            tokens, lengths, probs, self.heads.draft_ids, survival, head_s=time.perf_counter() - began
        )

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
            if head is not None and self.linear.bias is not None:
                previous = head.markov_w1(previous_token)
                feature, state = head.step(hidden[:, k], previous, state)
                logits = logits + self.linear.bias(feature).float()
            if self.with_survival:
                assert self.drafter.confidence_head is not None
                with_previous = previous if self.drafter.confidence_head.rank else None
                conditionals.append(torch.sigmoid(self.drafter.confidence_head(hidden[:, k], with_previous).float()))
            if u is None:
                choice = logits.argmax(-1)
            else:
                law = sampling.probabilities(logits[:, None])[:, 0]
                choice = draw(law, u[:, k])
                laws.append(law)
            previous_token = choice if self.heads.draft_ids is None else self.heads.draft_ids[choice]
            tokens.append(previous_token)
        survival = torch.stack(conditionals, dim=1).cumprod(dim=1) if conditionals else None
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None, survival
