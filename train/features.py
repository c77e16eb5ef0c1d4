"""Where the loop gets the target's states: computed in the step, or read from the feature cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..data.batch import TrainBatch
from ..data.chat import TokenRow
from ..data.features import FeatureCache, RowFeatures
from ..models.target import Target


@dataclass(frozen=True)
class Features:
    """taps [R, T, n*H]; last_hidden [R, T, H] after the final norm; lse float32 [R, T] log-normaliser of the target's full
    softmax and top int64 [R, T] its arg-max token, both only with a reduced draft vocabulary and a cache."""

    taps: Tensor
    last_hidden: Tensor
    lse: Tensor | None = None
    top: Tensor | None = None


class FeatureSource(Protocol):
    """Target states of a batch, on the batch's device."""

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """rows are the batch's rows in order; an all-masked batch brings none."""


class OnlineFeatures:
    """Runs the frozen target in every step."""

    def __init__(self, target: Target, tap_layers: tuple[int, ...]) -> None:
        self.target, self.tap_layers = target, tap_layers

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """See FeatureSource."""
        found = self.target.features(batch.input_ids, batch.attention_mask, self.tap_layers)
        return Features(found.taps, found.last_hidden)


class CachedFeatures:
    """Reads the feature cache. `rows` are the rows it was built for; with_law: hand on lse and top (reduced vocabulary)."""

    def __init__(self, cache: FeatureCache, rows: Sequence[TokenRow], *, with_law: bool) -> None:
        self.cache, self.with_law = cache, with_law
        self.index = {row.id: number for number, row in enumerate(rows)}

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """See FeatureSource."""
        found = self.cache.batch([self.index[row.id] for row in rows], width=batch.input_ids.shape[1])
        device = batch.input_ids.device
        taps, last_hidden = (t.to(device, non_blocking=True) for t in (found.taps, found.last_hidden))
        if not self.with_law:
            return Features(taps, last_hidden)
        assert found.lse is not None and found.top is not None
        return Features(taps, last_hidden, found.lse.to(device), found.top.to(device))


def compute_features(target: Target, tap_layers: tuple[int, ...], rows: Sequence[TokenRow], *, law: bool) -> list[RowFeatures]:
    """Target states of rows, each cut to its length; with `law` also the normaliser and arg-max of its softmax.

    The law is computed where it can teach a slot, which is at supervised positions (an anchor is one, and so is the
    predecessor of every valid slot), and is 0 elsewhere.
    """
    width = max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    for number, row in enumerate(rows):
        ids[number, : len(row.input_ids)] = torch.tensor(row.input_ids)
    mask = torch.arange(width) < lengths[:, None]
    found = target.features(ids.to(target.device), mask.to(target.device), tap_layers)
    out = []
    for number, length in enumerate(lengths.tolist()):
        last = found.last_hidden[number, :length]
        lse = top = None
        if law:
            taught = torch.tensor(rows[number].loss_mask, device=last.device)
            lse, top = last.new_zeros(length, dtype=torch.float32), torch.zeros_like(taught, dtype=torch.int64)
            lse[taught], top[taught] = normalisers(target, last[taught])
        out.append(RowFeatures(found.taps[number, :length], last, lse, top))
    return out


@torch.no_grad()
def normalisers(target: Target, last_hidden: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Log-normaliser float32 [T] and arg-max int64 [T] of the full softmax at states [T, H]."""
    lse, top = [], []
    for part in last_hidden.split(chunk):
        logits = target.logits(part).float()
        lse.append(torch.logsumexp(logits, dim=-1))
        top.append(logits.argmax(dim=-1))
    return torch.cat(lse), torch.cat(top)
