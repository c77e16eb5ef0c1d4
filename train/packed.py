"""Target states in the shape of a batch: packed rows, and rows that only fill up a static shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.batch import TrainBatch
from ..data.features import RowFeatures
from ..data.pack import MAX_GROUPS
from ..models.target import Target, TargetFeatures


def packed_states(target: Target, tap_layers: tuple[int, ...], batch: TrainBatch) -> TargetFeatures:
    """States of a packed batch, taps [R, T, n*H] and last_hidden [R, T, H]: no chat sees another.

    A flash attention, which knows variable lengths, takes the row as it is, with positions that restart at every chat.
    Otherwise the chats go through as padded rows of similar length: a mask over the whole row would cost attention in the
    square of its length. A target that is sharded over the ranks is called equally often on all of them.
    """
    assert batch.chats is not None
    if str(getattr(target.config, "_attn_implementation", "")).startswith("flash"):
        return target.features(batch.input_ids, None, tap_layers, position_ids=batch.positions)
    ids, taps, last_hidden = batch.input_ids.flatten(), torch.empty(0), torch.empty(0)
    for number, group in enumerate(batch.chats.groups):
        real = group.attention_mask
        found = target.features(ids[group.tokens], real, tap_layers)
        if number == 0:  # positions of no chat keep 0; one more takes the padding of the groups
            taps = found.taps.new_zeros(len(ids) + 1, found.taps.shape[-1])
            last_hidden = found.last_hidden.new_zeros(len(ids) + 1, found.last_hidden.shape[-1])
        # not `taps[tokens[real]]`: how many are real is on the device, and the host would wait for the target's forward
        where = group.tokens.masked_fill(~real, len(ids)).flatten()
        taps.index_copy_(0, where, found.taps.flatten(0, 1))
        last_hidden.index_copy_(0, where, found.last_hidden.flatten(0, 1))
    for _ in range(MAX_GROUPS - len(batch.chats.groups) if target.collective else 0):
        target.features(ids[:1, None], None, tap_layers)
    shape = batch.input_ids.shape
    return TargetFeatures(taps[:-1].view(*shape, -1), last_hidden[:-1].view(*shape, -1))


def concatenate(found: Sequence[RowFeatures], width: int) -> RowFeatures:
    """States of chats, in the order of a packed row, one after the other: [1, width, ...] each, 0 beyond the last."""

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in parts if part is not None]
        if not given:
            return None
        out = given[0].new_zeros(1, width, *given[0].shape[1:])
        torch.cat(given, out=out[0, : sum(map(len, given))])
        return out

    taps, last_hidden = joined([item.taps for item in found]), joined([item.last_hidden for item in found])
    assert taps is not None and last_hidden is not None
    top = joined([item.top for item in found])
    return RowFeatures(taps, last_hidden, joined([item.lse for item in found]), None if top is None else top.long())


def with_rows(states: Tensor | None, rows: int) -> Tensor | None:
    """states [r, ...] with rows of zeros up to `rows`, for batches that are filled up to a static shape."""
    if states is None or len(states) == rows:
        return states
    return torch.cat((states, states.new_zeros(rows - len(states), *states.shape[1:])))
