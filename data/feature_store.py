"""The feature cache on disk: rows in safetensors shards under a byte budget, each shard with a checksum. Runs no model.

Folder: `manifest.json`, written first; `shard-RANK-NUMBER.safetensors`, each with a side file of the same name and `.json`:
its rows, its bytes and the hash of its content. The side file is written after the shard, both atomically, so a shard without
one is a writer that was killed and is written anew. A shard whose content does not match its hash is dropped and its rows
count as missing. Every rank of a launch writes and evicts its own shards, within its equal share of the budget, and reads
those of all (on a folder that the ranks do not share each keeps its own).

What stays when the budget is reached: a row is worth `cost per byte x times still needed`. The cost of computing T tokens
grows like T (2 P + 2 L H T) operations (P weights of the L decoder layers of width H), its bytes like T, so a long row is
worth more a byte; the times still needed fall by one whenever the row was used. A full cache takes a new shard in only by
evicting a shard that is worth less, so a run that goes round and round its rows keeps what it has instead of replacing
everything before it is used again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .chat import TokenRow
from .features import RowFeatures, decode, encode, row_bytes
from .manifest import claim, write_atomic

SHARD_BYTES = 128 * 2**20
MIN_SHARDS = 16  # of a rank's budget: what is evicted at once should be a small part of it
HEADER = 160  # bytes of a shard's header a tensor, at most
MAX_OPEN = 64  # memory-mapped shards at a time


@dataclass
class _Shard:
    """One shard on disk. checked: its content was compared with its hash in this process."""

    path: Path
    rows: list[int]
    size: int
    digest: str
    own: bool
    checked: bool = False


@dataclass
class StoreStats:
    """Counts since the store was opened, of this rank. bytes: on disk in its own shards."""

    hits: int = 0
    misses: int = 0
    written: int = 0
    evicted: int = 0
    refused: int = 0  # rows that were worth less than what was there
    torn: int = 0
    bytes: int = 0

    def line(self) -> str:
        """In words."""
        return (
            f"{self.hits} rows read, {self.misses} computed, {self.written} shards written, {self.evicted} evicted, "
            f"{self.torn} torn, {self.bytes / 2**20:.1f} MiB held"
        )


@dataclass
class _Pending:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, RowFeatures] = field(default_factory=dict)
    size: int = 0


class FeatureStore:
    """Reads and writes the features of `rows`, by index. Opening claims the folder and finds what is there.

    manifest: `features.feature_manifest` of these rows. max_bytes: of all ranks together, None = no limit. attention: L H / P,
    see the module. left: row index -> how often it will still be asked for; replaceable at any time.

    Raises ValueError naming every field in which the manifest on disk differs; RuntimeError when a shard cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[TokenRow],
        manifest: Mapping[str, Any],
        *,
        max_bytes: int | None = None,
        rank: int = 0,
        world: int = 1,
        attention: float = 0.0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        assert manifest["rows"]["count"] == len(rows), "the manifest is of other rows"
        self.folder, self.rows, self.manifest, self.attention = folder, rows, dict(manifest), attention
        self.rank, self.world = rank, world
        self.budget = None if max_bytes is None else max_bytes // world
        self.shard_bytes = shard_bytes if self.budget is None else min(shard_bytes, max(self.budget // MIN_SHARDS, 1))
        self.left: Callable[[int], float] = lambda index: 1.0
        self.stats = StoreStats()
        self._shards: dict[str, _Shard] = {}
        self._where: dict[int, str] = {}
        self._open: dict[str, Any] = {}
        self._pending = _Pending()
        self._next = 0
        claim(folder, self.manifest, what="features")
        for half in folder.glob(f"shard-{rank}-*.tmp"):  # of a writer that was killed
            half.unlink(missing_ok=True)
        self.refresh()
        self._shrink()

    # ---- reading ------------------------------------------------------------------------------------------------------

    def __contains__(self, index: int) -> bool:
        return index in self._where or index in self._pending.rows

    def refresh(self) -> None:
        """Find shards that appeared since, of other ranks too. A half-written one of ours is removed."""
        for side in sorted(self.folder.glob("shard-*.json")):
            name = side.stem
            if name in self._shards:
                continue
            writer, number = (int(part) for part in name.split("-")[1:])
            own = writer % self.world == self.rank
            if own and writer == self.rank:
                self._next = max(self._next, number + 1)
            path = side.with_suffix(".safetensors")
            try:
                said = json.loads(side.read_text(encoding="utf-8"))
                shard = _Shard(path, [int(i) for i in said["rows"]], int(said["bytes"]), str(said["digest"]), own)
                whole = path.stat().st_size == shard.size
            except (OSError, ValueError, KeyError, TypeError):
                whole, shard = False, _Shard(path, [], 0, "", own)
            if not whole:
                if own:  # another rank's may be on its way here, or out
                    self._tear(name, shard)
                continue
            self._add(name, shard)

    def read(self, index: int) -> RowFeatures | None:
        """Features of row `index` in the manifest's dtype, or None where they are not there (any more)."""
        found = self._pending.rows.get(index)
        if found is None and index not in self._where and self.world > 1:
            self.refresh()
        while found is None and index in self._where:
            name = self._where[index]
            shard = self._file(name)
            if shard is not None:
                found = decode(index, shard, self.manifest)
        self.stats.hits += found is not None
        self.stats.misses += found is None
        return found

    def _file(self, name: str) -> Any:
        """The opened shard, its content verified at the first use; None, and forgotten, where it is torn or gone."""
        if name in self._open:
            return self._open[name]
        shard = self._shards[name]
        try:
            if not shard.checked and _digest(shard.path) != shard.digest:
                raise OSError("its content does not match its hash")
            opened = safe_open(shard.path, framework="pt")
        except FileNotFoundError:  # evicted by its owner
            self._forget(name)
            return None
        except (OSError, SafetensorError):
            self._forget(name)
            self._tear(name, shard)
            return None
        shard.checked = True
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[name] = opened
        return opened

    def _tear(self, name: str, shard: _Shard) -> None:
        self.stats.torn += 1
        _remove(shard.path)

    # ---- writing ------------------------------------------------------------------------------------------------------

    def put(self, index: int, found: RowFeatures) -> None:
        """Keep a row that was computed, where it is worth it. Raises ValueError for values that are not finite."""
        if index in self or self.left(index) <= 0:
            return
        pending = self._pending
        pending.tensors |= encode(index, found, self.rows[index], self.manifest)
        pending.size += row_bytes(len(self.rows[index].input_ids), self.manifest)
        # as it will come back: a row must not depend on whether its shard was written yet
        pending.rows[index] = decode(index, _Tensors(pending.tensors), self.manifest)
        if pending.size >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait for a full shard. Raises RuntimeError when the disk is full or cannot be written."""
        pending, self._pending = self._pending, _Pending()
        if not pending.rows:
            return
        indices = sorted(pending.rows)
        if not self._make_room(pending.size + HEADER * (1 + len(pending.tensors)), self.worth(indices)):
            self.stats.refused += len(indices)
            return
        name = f"shard-{self.rank}-{self._next:06d}"
        self._next += 1
        path = self.folder / f"{name}.safetensors"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(pending.tensors, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            size, digest = path.stat().st_size, _digest(path)
            said = {"rows": indices, "bytes": size, "digest": digest}
            write_atomic(path.with_suffix(".json"), json.dumps(said))
        except (OSError, SafetensorError) as error:
            for part in (temporary, path, path.with_suffix(".json")):
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
            raise RuntimeError(self._complaint(error, pending.size)) from error
        self.stats.written += 1
        self._add(name, _Shard(path, indices, size, digest, True, checked=True))

    def _complaint(self, error: Exception, size: int) -> str:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
            word in str(error).lower() for word in ("no space", "quota", "file too large", "os error 28")
        )
        why = "the disk is full" if full else f"{type(error).__name__}: {error}"
        return (
            f"{self.folder}: a shard of {size / 2**20:.1f} MiB of features cannot be written, {why}: free some space, set "
            "data.cache_gib below what is free, or data.features to online, and start again (the last checkpoint is intact)"
        )

    # ---- budget -------------------------------------------------------------------------------------------------------

    def worth(self, indices: Sequence[int]) -> float:
        """Worth of these rows a byte: see the module."""
        lengths = [len(self.rows[i].input_ids) for i in indices]
        cost = sum(n * (1.0 + self.attention * n) * max(self.left(i), 0.0) for i, n in zip(indices, lengths, strict=True))
        return cost / max(sum(row_bytes(n, self.manifest) for n in lengths), 1)

    def _make_room(self, size: int, worth: float) -> bool:
        """Evict what is worth less than `worth` a byte until `size` bytes fit; else false, and nothing is evicted."""
        if self.budget is None:
            return True
        order = sorted((self.worth(shard.rows), name) for name, shard in self._shards.items() if shard.own)
        freed, victims = 0, []
        for value, name in order:
            if self.stats.bytes - freed + size <= self.budget or value >= worth:
                break
            victims.append(name)
            freed += self._shards[name].size
        if self.stats.bytes - freed + size > self.budget:
            return False
        for name in victims:
            self._evict(name)
        return True

    def _shrink(self) -> None:
        """A store that was filled under a larger budget gives back what is worth least."""
        while self.budget is not None and self.stats.bytes > self.budget:
            self._evict(min((self.worth(shard.rows), name) for name, shard in self._shards.items() if shard.own)[1])

    def _evict(self, name: str) -> None:
        path = self._shards[name].path
        self._forget(name)
        self.stats.evicted += 1
        _remove(path)

    def _add(self, name: str, shard: _Shard) -> None:
        self._shards[name] = shard
        self._where |= dict.fromkeys(shard.rows, name)
        self.stats.bytes += shard.size if shard.own else 0

    def _forget(self, name: str) -> None:
        shard = self._shards.pop(name)
        self._open.pop(name, None)
        self.stats.bytes -= shard.size if shard.own else 0
        for index in shard.rows:
            if self._where.get(index) == name:
                del self._where[index]


class _Tensors:
    """Tensors in memory, read like a shard."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _remove(path: Path) -> None:
    """Delete a shard, its side file first: a shard without one is not read. Readers that mapped it keep what they mapped."""
    for part in (path.with_suffix(".json"), path):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
