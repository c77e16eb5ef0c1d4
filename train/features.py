"""Where the loop gets the target's states: computed in the step, or kept on disk (cached ahead, or as the epochs go).

Shapes: R rows, T text length, n taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batch import TrainBatch
from ..data.chat import TokenRow
from ..data.feature_store import FeatureStore
from ..data.features import RowFeatures, row_bytes
from ..data.pack import group_chats
from ..models.target import Target
from .packed import concatenate, packed_states


@dataclass(frozen=True)
class Features:
    """taps [R, T, n*H]; last_hidden [R, T, H] after the final norm; lse float32 [R, T] log-normaliser of the target's full
    softmax and top int64 [R, T] its arg-max token, both only with a reduced draft vocabulary and a cache."""

    taps: Tensor
    last_hidden: Tensor
    lse: Tensor | None = None
    top: Tensor | None = None


class FeatureSource(Protocol):
    """Target states of a batch, on the batch's device.

    Optional attribute `background`: true when `features` needs neither the device nor the other ranks, so that a thread may
    call it ahead (train.prefetch).
    """

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """rows are the batch's rows in order; an all-masked batch brings none."""


class OnlineFeatures:
    """Runs the frozen target in every step."""

    def __init__(self, target: Target, tap_layers: tuple[int, ...]) -> None:
        self.target, self.tap_layers = target, tap_layers
        self.background = target.by_request  # a server's states: a thread may ask ahead

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """See FeatureSource."""
        if self.target.by_request:
            found = self.target.states({row.id: row.input_ids for row in rows}, self.tap_layers)
            placed = place([RowFeatures(found[r.id].taps, found[r.id].last_hidden) for r in rows], batch, self.target,
                           len(self.tap_layers))  # fmt: skip
            return Features(placed.taps, placed.last_hidden)
        if batch.chats is not None:
            states = packed_states(self.target, self.tap_layers, batch)
        else:
            states = self.target.features(batch.input_ids, batch.attention_mask, self.tap_layers)
        return Features(states.taps, states.last_hidden)


@dataclass
class Schedule:
    """How often a row will still be read. Positions are in epochs, from 0 to `total`.

    step: epochs that one micro-batch of this rank stands for (it and those of the other ranks together). evaluations: passes
    over the validation rows in a whole run.
    """

    total: float
    step: float
    evaluations: float
    position: float = 0.0

    def training(self, last: int | None) -> float:
        """Reads to come of a training row last read in epoch `last`; None: not in this epoch yet, as far as we know."""
        done = int(self.position) if last is None else last + 1
        return max(0.0, self.total - done)

    def validation(self) -> float:
        """Reads to come of a validation row."""
        return self.evaluations * max(0.0, 1.0 - self.position / max(self.total, 1e-9))


class StoredFeatures:
    """Reads the store, and runs the target for the rows that are not there, which the store may then keep.

    rows: those the store was opened for. with_law: hand on lse and top (reduced vocabulary). Where the target is sharded, all
    ranks run it as soon as one of them misses a row.
    """

    def __init__(
        self,
        store: FeatureStore,
        target: Target,
        tap_layers: tuple[int, ...],
        *,
        with_law: bool,
        schedule: Schedule,
        training: Sequence[TokenRow],
    ) -> None:
        self.store, self.target, self.tap_layers, self.with_law = store, target, tap_layers, with_law
        self.schedule = schedule
        self.index = {row.id: number for number, row in enumerate(store.rows)}
        self.training = frozenset(self.index[row.id] for row in training)
        self.last: dict[int, int] = {}
        store.left = self.left

    @property
    def background(self) -> bool:
        """Whether every row is on disk, so that the target is not needed."""
        return not self.target.collective and all(index in self.store for index in range(len(self.store.rows)))

    def begin(self, micro_batch: int) -> None:
        """The run goes on with this micro-batch (counted on one rank)."""
        self.schedule.position = micro_batch * self.schedule.step

    def left(self, index: int) -> float:
        """How often row `index` will still be read."""
        if index in self.training:
            return self.schedule.training(self.last.get(index))
        return self.schedule.validation()

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """See FeatureSource."""
        numbers, schedule = [self.index[row.id] for row in rows], self.schedule
        epoch = int(schedule.position)
        self.last |= {number: epoch for number in numbers if number in self.training}
        found: dict[int, RowFeatures | None] = {number: self.store.read(number) for number in numbers}
        missing = [number for number in numbers if found[number] is None]
        if _any_rank(bool(missing), self.target):
            wanted = [self.store.rows[number] for number in missing]
            made = compute_features(self.target, self.tap_layers, wanted, law=self.with_law)
            for number, item in zip(missing, made, strict=True):
                self.store.put(number, item)
                found[number] = item
        if not numbers or numbers[0] in self.training:
            schedule.position += schedule.step
            if int(schedule.position) > epoch:
                self.store.flush()
        ordered = [row for number in numbers if (row := found[number]) is not None]
        placed = place(ordered, batch, self.target, len(self.tap_layers), law=self.with_law)
        return Features(placed.taps, placed.last_hidden, placed.lse, placed.top)

    def close(self) -> None:
        """Write what waits for a full shard."""
        self.store.flush()


@contextmanager
def finishing(source: FeatureSource, say: Callable[[str], None]) -> Iterator[None]:
    """When the run is over or stopped, write what a source still holds, and say what its disk was good for."""
    failed = True
    try:
        yield
        failed = False
    except SystemExit:
        failed = False
        raise
    finally:
        if isinstance(source, StoredFeatures) and not failed:  # the disk may be why a run failed
            source.close()
            say(f"features: {source.store.stats.line()}")


def begin_at(source: FeatureSource, micro_batch: int) -> None:
    """Tell a source that keeps count where the run goes on."""
    if isinstance(source, StoredFeatures):
        source.begin(micro_batch)


def _any_rank(flag: bool, target: Target) -> bool:
    if not target.collective:
        return flag
    votes = torch.tensor(int(flag), device=target.device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes)


def place(found: Sequence[RowFeatures], batch: TrainBatch, target: Target, taps: int, *, law: bool = False) -> RowFeatures:
    """States of a batch's rows in the batch's shape and on its device, zeros elsewhere: [R, T, ...]; see Features."""
    device, dtype = batch.input_ids.device, target.dtype
    rows, width = batch.input_ids.shape
    if batch.chats is not None and found:
        one = concatenate([_on(item, device) for item in found], width)
        return RowFeatures(one.taps.to(dtype), one.last_hidden.to(dtype), one.lse, one.top)
    hidden = target.hidden_size
    out = RowFeatures(
        torch.zeros(rows, width, taps * hidden, dtype=dtype, device=device),
        torch.zeros(rows, width, hidden, dtype=dtype, device=device),
        torch.zeros(rows, width, device=device) if law else None,
        torch.zeros(rows, width, dtype=torch.int64, device=device) if law else None,
    )
    for number, item in enumerate(found):
        pairs = ((out.taps, item.taps), (out.last_hidden, item.last_hidden), (out.lse, item.lse), (out.top, item.top))
        for padded, values in pairs:
            if padded is not None and values is not None:
                padded[number, : len(values)] = _moved(values, device)
    return out


def _on(item: RowFeatures, device: torch.device) -> RowFeatures:
    parts = (item.taps, item.last_hidden, item.lse, item.top)
    return RowFeatures(*(None if part is None else _moved(part, device) for part in parts))


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """On `device`. A copy to the CPU is waited for: it is read at once, by a host that no stream holds back."""
    return values.to(device, non_blocking=device.type != "cpu")


# ---- computing ------------------------------------------------------------------------------------------------------


def compute_features(target: Target, tap_layers: tuple[int, ...], rows: Sequence[TokenRow], *, law: bool) -> list[RowFeatures]:
    """Target states of rows, each cut to its length; with `law` also the normaliser and arg-max of its softmax.

    The law is computed where it can teach a slot, which is at supervised positions (an anchor is one, and so is the
    predecessor of every valid slot), and is 0 elsewhere. A sharded target runs once, also without rows.
    """
    groups = group_chats([len(row.input_ids) for row in rows]) if rows and not target.collective else [range(len(rows))]
    out: dict[int, RowFeatures] = {}
    for group in groups:
        states = target.states({str(number): rows[number].input_ids for number in group}, tap_layers)
        for number in group:
            last, lse, top = states[str(number)].last_hidden, None, None
            if law:
                taught = torch.tensor(rows[number].loss_mask, device=last.device)
                lse = last.new_zeros(len(last), dtype=torch.float32)
                top = torch.zeros_like(taught, dtype=torch.int64)
                lse[taught], top[taught] = normalisers(target, last[taught])
            out[number] = RowFeatures(states[str(number)].taps, last, lse, top)
    return [out[number] for number in range(len(rows))]


@torch.no_grad()
def normalisers(target: Target, last_hidden: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Log-normaliser float32 [T] and arg-max int64 [T] of the full softmax at states [T, H]."""
    lse, top = [], []
    for part in last_hidden.split(chunk):
        logits = target.logits(part).float()
        lse.append(torch.logsumexp(logits, dim=-1))
        top.append(logits.argmax(dim=-1))
    return torch.cat(lse), torch.cat(top)


def fill(source: StoredFeatures, *, rows_per_call: int = 8, say: Callable[[str], None] = print) -> None:
    """Compute the rows that the store lacks before training, each rank its share, longest first, until the budget is met.

    A fill that was stopped goes on with the rows that are missing. Collective in a launch of several processes.
    Raises RuntimeError when the disk is full.
    """
    store, target = source.store, source.target
    if store.world > 1:
        dist.barrier()  # nothing is written before all have seen what is missing: they deal it out among them alike
    lengths = [len(row.input_ids) for row in store.rows]
    missing = sorted((i for i in range(len(lengths)) if i not in store), key=lambda i: -lengths[i])
    here = len(lengths) - len(missing)
    if here:
        say(f"features: {here} of {len(lengths)} rows are in {store.folder}, reused")
    chunks = [missing[start : start + rows_per_call] for start in range(0, len(missing), rows_per_call)]
    mine, room, wanted = chunks[store.rank :: store.world], store.budget, 0
    planned: list[list[int]] = []
    for chunk in mine:
        wanted += sum(row_bytes(lengths[i], store.manifest) for i in chunk)
        if room is not None and store.stats.bytes + wanted > room:
            break
        planned.append(chunk)
    if missing:
        kept = sum(map(len, planned))
        limit = (
            ""
            if len(planned) == len(mine)
            else f", {kept} fit the budget (data.cache_gib), the others are computed in the steps"
        )
        say(f"features: {len(missing)} rows to compute{limit}")
    calls = torch.tensor(len(planned), device=target.device)
    if target.collective:
        dist.all_reduce(calls, op=dist.ReduceOp.MAX)
    for number in range(int(calls)):
        chunk = planned[number] if number < len(planned) else []
        made = compute_features(target, source.tap_layers, [store.rows[i] for i in chunk], law=source.with_law)
        for index, item in zip(chunk, made, strict=True):
            store.put(index, item)
    store.flush()
    if store.world > 1:
        dist.barrier()
    store.refresh()
