"""Where the loop gets the target's states: computed in the step, or read from the feature cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..data.batch import TrainBatch
from ..data.chat import TokenRow
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
        found = self.target.features(batch.input_ids, batch.attention_mask, self.tap_layers)
        return Features(found.taps, found.last_hidden)


def normalisers(target: Target, last_hidden: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Log-normaliser float32 [T] and arg-max int64 [T] of the full softmax at states [T, H]."""
    lse, top = [], []
    for part in last_hidden.split(chunk):
        logits = target.logits(part).float()
        lse.append(torch.logsumexp(logits, dim=-1))
        top.append(logits.argmax(dim=-1))
    return torch.cat(lse), torch.cat(top)
