"""Block attention of packed rows, chat by chat: the row's chats seen as padded rows of similar length.

A packed row of T tokens and A blocks would need scores [A, T] of which each block may see its own chat only. Seen as S chats
of length L they are [S, B, L], the same result for a fraction of the work, and nothing but attention meets the padding.
Where a kernel skips what is masked (flex_attention) this is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .masks import block_attention, context_mask

# Attention of all blocks: query [R,A,G,nh,hd], context (keys, values) [R,T,nkv,hd], block (keys, values) [R,A,G,nkv,hd].
Attend = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]


class Group(Protocol):
    """Chats as padded rows: tokens [S,L] and blocks [S,B] index the batch, anchors [S,B] count in the chat; all int64."""

    @property
    def tokens(self) -> Tensor:
        """int64 [S,L]."""

    @property
    def blocks(self) -> Tensor:
        """int64 [S,B]."""

    @property
    def anchors(self) -> Tensor:
        """int64 [S,B]."""


class Chats(Protocol):
    """The chats of a packed batch: groups, and order int64 [R*A], each block's place in the groups' blocks concatenated."""

    @property
    def groups(self) -> Sequence[Group]:
        """Together they hold every block that is in use."""

    @property
    def order(self) -> Tensor:
        """int64 [R*A]."""


def attention_by_chat(query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], chats: Chats) -> Tensor:
    """`block_attention` where a block sees the tokens of its own chat before its anchor. Shapes as there.

    Unused block slots get some finite value.
    """
    query_b = query.flatten(0, 1)
    outputs = []
    for group in chats.groups:
        found = block_attention(
            _take(query_b, group.blocks),
            (_take(context[0].flatten(0, 1), group.tokens), _take(context[1].flatten(0, 1), group.tokens)),
            (_take(block[0].flatten(0, 1), group.blocks), _take(block[1].flatten(0, 1), group.blocks)),
            context_mask(group.anchors, group.tokens.shape[1]),
        )
        outputs.append(found.flatten(0, 1))
    return torch.cat(outputs).index_select(0, chats.order).view_as(query)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [N, ...] at index [S, K] -> [S, K, ...]."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)
