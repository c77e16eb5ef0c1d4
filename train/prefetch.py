"""Works ahead: the next micro-batch is collated, and its target states are fetched or computed, during the drafter's step.

A thread collates batches, and reads states where the source says that this needs neither the device nor a collective (its
attribute `background`: a complete feature cache, a server). On CUDA the batch is copied from pinned memory and an online
target runs its forward on a side stream, issued by the main thread, so that collectives keep their order on every rank; at
most one micro-batch is ahead. The values are those of working in turn: batches are a function of their index, and no global
random generator is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..data.batch import TrainBatch
from ..data.chat import TokenRow
from .features import Features, FeatureSource
from .metrics import Clock

Item = tuple[TrainBatch, list[TokenRow]]
AHEAD = 2  # micro-batches whose states the thread holds at most, beside the one in use


@dataclass
class _Launched:
    """A micro-batch on its way on the side stream."""

    index: int
    batch: TrainBatch
    features: Features
    start: Any
    end: Any


class Feed:
    """Micro-batches in turn (`next`), and each one on the device with its target states (`take`).

    stream: micro-batches on the CPU; count: how many will be asked for, so that nothing is computed in vain. ahead False
    does everything when it is asked for. `take` also serves batches that are not of the stream (validation), in turn.
    """

    def __init__(
        self, stream: Iterator[Item], source: FeatureSource, device: torch.device, *, count: int, ahead: bool = True
    ) -> None:
        self.stream, self.source, self.device, self.count = stream, source, device, count
        self.thread = ThreadPoolExecutor(1, "prefetch") if ahead else None
        self.background = ahead and bool(getattr(source, "background", False))
        self.side = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None
        self.items: dict[int, Future[Item]] = {}
        self.states: dict[int, Future[Features]] = {}
        self.index: dict[int, int] = {}  # id of a batch that was handed out and not taken yet -> its number
        self.given = self.collated = self.fetched = 0
        self.launched: _Launched | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Item:
        """The next micro-batch, on the CPU, and its chats."""
        if self.thread is None:
            return next(self.stream)
        number, self.given = self.given, self.given + 1
        self._schedule(number)
        item = self.items[number].result()
        self.index[id(item[0])] = number
        return item

    def take(self, batch: TrainBatch, rows: Sequence[TokenRow], clock: Clock) -> tuple[TrainBatch, Features]:
        """A micro-batch on the device and its states; the time goes to `data` and `target` of the clock."""
        number = self.index.pop(id(batch), None)
        if number is None:
            moved = batch.to(self.device)
            clock.mark("data")
            if self.background and self.thread is not None:  # one reader at a time
                features = self.thread.submit(self.source.features, moved, rows).result()
            else:
                features = self.source.features(moved, rows)
            clock.mark("target")
            return moved, features
        if self.side is None:
            moved = batch.to(self.device)
            clock.mark("data")
            features = self._states(number, moved, rows)
        else:
            found = self.launched if self.launched is not None and self.launched.index == number else None
            moved, features = self._arrive(found or self._launch(number, clock), clock)
        self.items.pop(number)
        self._schedule(number + 1)
        if self.side is not None and self._can_launch(number + 1):
            self.launched = self._launch(number + 1, clock)
        clock.mark("target")
        return moved, features

    def close(self) -> None:
        """Stop the thread; nothing of the run depends on what it was doing."""
        if self.thread is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _schedule(self, number: int) -> None:
        """Have micro-batches up to `number` + 1 collated, and the states of the next AHEAD fetched, in that order."""
        assert self.thread is not None
        while self.collated < max(self.given, min(number + 2, self.count)):
            self.items[self.collated] = self.thread.submit(self._collate)
            self.collated += 1
        taken = min(self.items) if self.items else self.collated
        while self.background and self.fetched < min(self.collated, taken + AHEAD):
            self.states[self.fetched] = self.thread.submit(self._fetch, self.items[self.fetched])
            self.fetched += 1

    def _collate(self) -> Item:
        batch, rows = next(self.stream)
        return (batch.pinned() if self.side is not None else batch), rows

    def _fetch(self, item: Future[Item]) -> Features:
        batch, rows = item.result()  # submitted before this, to the one thread: it is there
        features = self.source.features(batch, rows)
        if self.side is None:
            return features
        return Features(*(None if x is None else x.pin_memory() for x in tensors_of(features)))

    def _states(self, number: int, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        if not self.background:
            return self.source.features(batch, rows)
        features = self.states.pop(number).result()
        values = (None if x is None else x.to(self.device, non_blocking=True) for x in tensors_of(features))
        return Features(*values)

    # ---- the side stream --------------------------------------------------------------------------------------------

    def _can_launch(self, number: int) -> bool:
        """Whether that micro-batch exists, and its states, where the thread fetches them, would not be waited for."""
        return number < self.count and (not self.background or self.states[number].done())

    def _launch(self, number: int, clock: Clock) -> _Launched:
        """Copy a micro-batch and issue its target forward on the side stream; the host does not wait for either."""
        assert self.side is not None
        host, rows = self.items[number].result()
        with torch.cuda.stream(self.side):
            start = clock.stamp()
            batch = host.to(self.device)
            features = self._states(number, batch, rows)
            return _Launched(number, batch, features, start, clock.stamp())

    def _arrive(self, found: _Launched, clock: Clock) -> tuple[TrainBatch, Features]:
        """The main stream waits for the side stream, and the allocator learns who uses the memory."""
        main = torch.cuda.current_stream(self.device)
        clock.mark("data")
        main.wait_event(found.end)
        for tensor in (*found.batch.tensors(), *tensors_of(found.features)):
            if tensor is not None:
                tensor.record_stream(main)
        clock.add("target_busy", found.start, found.end)
        self.launched = None
        return found.batch, found.features


def tensors_of(features: Features) -> tuple[torch.Tensor | None, ...]:
    """The tensors of `features`, not copied."""
    return features.taps, features.last_hidden, features.lse, features.top
