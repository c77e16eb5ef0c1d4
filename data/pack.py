"""Several chats in one row: which chats share a row, and where each one's tokens and blocks are found again.

A packed row holds chats one after the other up to a token budget, so nothing is padding but the row's end. Linear layers run
over the row as it is; attention, and a target without variable-length attention, see the chats as padded rows of similar
length (`ChatView`), which costs an index and wastes little, since a row is filled longest chat first.

Shapes: R rows, T row length, A blocks per row, S chats of a group, L their longest, B their most blocks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PACK_WINDOW = 64  # rows of chats that are packed at a time: a window's last row is the only one left partly empty
MAX_GROUPS = 4  # padded calls of one packed row
GROUP_OVERHEAD = 96  # tokens of padding that are cheaper than another call


# ---- which chats share a row ----------------------------------------------------------------------------------------


def fill_rows(lengths: Sequence[int], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Pack the rows `chosen` (indices into `lengths`): each pack takes the longest chat left, then the longest that fits."""
    left = sorted(chosen, key=lambda index: lengths[index])
    sizes = [lengths[index] for index in left]
    packs = []
    while left:
        room, pack = budget, []
        while left and (place := bisect.bisect_right(sizes, room)):
            room -= sizes.pop(place - 1)
            pack.append(left.pop(place - 1))
        assert pack, "a chat is longer than the budget"
        packs.append(pack)
    return packs


def pack_order(lengths: Sequence[int], budget: int, *, generator: torch.Generator) -> list[list[int]]:
    """Packs of an epoch in training order, each at most `budget` tokens; every chat comes exactly once.

    Chats are shuffled, packed within windows of PACK_WINDOW budgets, and the packs shuffled: a function of
    (lengths, budget, generator) alone, whatever the number of ranks or micro-batches.
    """
    packs: list[list[int]] = []
    window: list[int] = []
    held = 0
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        window.append(index)
        held += lengths[index]
        if held >= PACK_WINDOW * budget:
            packs += fill_rows(lengths, window, budget)
            window, held = [], 0
    packs += fill_rows(lengths, window, budget)
    return [packs[i] for i in torch.randperm(len(packs), generator=generator).tolist()]


# ---- static shapes --------------------------------------------------------------------------------------------------


def round_up(size: int, multiple: int) -> int:
    """`size` rounded up to `multiple` times 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: at most a quarter more.

    Few distinct sizes, so that a compiled drafter meets few shapes. multiple 1 changes nothing.
    """
    if multiple == 1:
        return size
    units = math.ceil(size / multiple)
    step = 2 ** max(0, units.bit_length() - 3)
    return math.ceil(units / step) * step * multiple


@dataclass(frozen=True, slots=True)
class Pad:
    """What a batch's shape is rounded up to: rows R to `rows` at least, T and A by `round_up`."""

    rows: int = 1
    tokens: int = 1
    anchors: int = 1


NO_PAD = Pad()


# ---- chats as padded rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatGroup:
    """Chats of similar length seen as padded rows.

    tokens int64 [S,L]: index into the batch's R * T tokens, 0 beyond the chat; lengths int64 [S]; blocks int64 [S,B]: index
    into its R * A blocks, 0 beyond the last; anchors int64 [S,B]: the block's anchor counted from its chat's first token.
    """

    tokens: Tensor
    lengths: Tensor
    blocks: Tensor
    anchors: Tensor

    @property
    def attention_mask(self) -> Tensor:
        """bool [S,L]: true at the tokens of a chat."""
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def map(self, function: Callable[[Tensor], Tensor]) -> ChatGroup:
        """The group with `function` applied to every tensor."""
        return ChatGroup(*(function(t) for t in (self.tokens, self.lengths, self.blocks, self.anchors)))


@dataclass(frozen=True, slots=True)
class ChatView:
    """All chats of a packed batch. order int64 [R*A]: each block's place in the groups' blocks [S*B], concatenated."""

    groups: tuple[ChatGroup, ...]
    order: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> ChatView:
        """The view with `function` applied to every tensor."""
        return ChatView(tuple(group.map(function) for group in self.groups), function(self.order))


def group_chats(lengths: Sequence[int], limit: int = MAX_GROUPS) -> list[list[int]]:
    """Chats (indices into `lengths`, longest first) in at most `limit` groups of least padding plus GROUP_OVERHEAD a group."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    stride = math.ceil(len(order) / 24)  # cuts are looked for at 24 places at most
    cuts = [*range(0, len(order), stride), len(order)]
    none: tuple[float, list[int]] = (math.inf, [])
    table = [[(0.0, list[int]())] + [none] * (len(cuts) - 1)]  # [groups used][chats before cuts[i]]: cost and ends
    for _ in range(limit):
        row = [none] * len(cuts)
        for end in range(1, len(cuts)):
            for start in range(end):
                cost, found = table[-1][start]
                total = cost + (cuts[end] - cuts[start]) * lengths[order[cuts[start]]] + GROUP_OVERHEAD
                if total < row[end][0]:
                    row[end] = (total, [*found, cuts[end]])
        table.append(row)
    chosen = min(row[-1] for row in table[1:])[1]
    return [order[a:b] for a, b in pairwise([0, *chosen])]


def chat_view(spans: Sequence[tuple[int, int]], anchors: Sequence[Tensor], blocks: Sequence[int], slots: int) -> ChatView:
    """The view of chats at `spans` (first flat token, length) with `anchors` counted from their first token.

    blocks: flat index of each chat's first block (its blocks follow one another); slots: R * A.
    """
    groups, order, base = [], torch.zeros(slots, dtype=torch.int64), 0
    for members in group_chats([length for _, length in spans]):
        longest, most = max(spans[i][1] for i in members), max(1, *(len(anchors[i]) for i in members))
        tokens = torch.zeros(len(members), longest, dtype=torch.int64)
        at = torch.zeros(len(members), most, dtype=torch.int64)
        local = torch.zeros(len(members), most, dtype=torch.int64)
        for number, index in enumerate(members):
            first, length = spans[index]
            count = len(anchors[index])
            tokens[number, :length] = torch.arange(first, first + length)
            at[number, :count] = torch.arange(blocks[index], blocks[index] + count)
            local[number, :count] = anchors[index]
            start = base + number * most
            order[blocks[index] : blocks[index] + count] = torch.arange(start, start + count)
        base += len(members) * most
        groups.append(ChatGroup(tokens, torch.tensor([spans[i][1] for i in members]), at, local))
    return ChatView(tuple(groups), order)
