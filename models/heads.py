"""Sequential logit-correction heads and the survival head (DSpark eq. 4-7; `gated` from DeepSpec's code).

Every correction head has the same output stage, B_k = W2 u_k, so the objective and the runtime see one form:
    vanilla  u_k = W1[x_{k-1}]
    gated    u_k = sigmoid(Linear([h_k ; W1[x_{k-1}]])) * W1[x_{k-1}]
    rnn      s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c);  u_k = tanh(o)
             with (g, c, o) = Linear([s_{k-1} ; W1[x_{k-1}] ; h_k])
where x_{k-1} is the token before slot k (the anchor for slot 0). Tensor names follow the exported files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CorrectionHead(nn.Module):
    """Base: W1 [V, r] embeds the previous token, W2 [Vd, r] maps the head's state to a logit bias."""

    kind = "vanilla"

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.build(hidden_size)
        # W2 = 0: the untrained head changes nothing, and W1 starts to learn as soon as W2 has moved.
        nn.init.normal_(self.markov_w1.weight, std=1.0)
        nn.init.zeros_(self.markov_w2.weight)

    def build(self, hidden_size: int) -> None:
        """Extra parameters of a head kind."""

    def initial_state(self, hidden: Tensor) -> Tensor | None:
        """State before slot 0 for `hidden` [..., H]."""
        return None

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: hidden [..., H], previous = W1[x_{k-1}] [..., r] -> (u_k [..., r], next state)."""
        return previous, state

    def unroll(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """All slots under teacher forcing: hidden [..., G, H], previous [..., G, r] -> u [..., G, r]."""
        return self.step(hidden, previous, None)[0]


class GatedHead(CorrectionHead):
    """The block state gates the previous token's embedding."""

    kind = "gated"

    def build(self, hidden_size: int) -> None:
        """See CorrectionHead."""
        self.gate_proj = nn.Linear(hidden_size + self.rank, self.rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See CorrectionHead."""
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)))
        return gate * previous, state


class RnnHead(CorrectionHead):
    """A gated state carried over the block."""

    kind = "rnn"

    def build(self, hidden_size: int) -> None:
        """See CorrectionHead."""
        self.joint_proj = nn.Linear(2 * self.rank + hidden_size, 3 * self.rank)

    def initial_state(self, hidden: Tensor) -> Tensor | None:
        """Zeros [..., r]."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See CorrectionHead."""
        assert state is not None
        joint = self.joint_proj(torch.cat([state.to(hidden.dtype), previous.to(hidden.dtype), hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def unroll(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """See CorrectionHead: slot after slot, since the state is carried."""
        state, outputs = self.initial_state(hidden[..., 0, :]), []
        for k in range(hidden.shape[-2]):
            output, state = self.step(hidden[..., k, :], previous[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)


CORRECTION_HEADS = {"vanilla": CorrectionHead, "gated": GatedHead, "rnn": RnnHead}


class SurvivalHead(nn.Module):
    """c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b): depends on the previous token, never on slot k's own (DSpark eq. 7)."""

    def __init__(self, *, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """hidden [..., H], previous [..., r] (None when rank is 0) -> logits [...]."""
        if self.rank:
            assert previous is not None
            hidden = torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        return self.proj(hidden).squeeze(-1)
