"""Cache of target features on disk: safetensors shards and a manifest. Stores and loads tensors, never runs a model.

Folder: `manifest.json`, written first, and `shard-NNNNN.safetensors`, each holding whole rows under the names
`{row}.taps` [T, n*H], `{row}.last_hidden` [T, H] and, optional, `{row}.lse` float32 [T] (log-sum-exp of the target's
logits at each position) with `{row}.top` int32 [T] (their arg-max token). Which rows a shard holds follows from the row
lengths, so a build can stop and go on anywhere.
Shapes: T text length, n taps, H hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .chat import TokenRow
from .manifest import claim, differences, read

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """Features of one row: taps [T, n*H], last_hidden [T, H], lse float32 [T] and top int [T], or None."""

    taps: torch.Tensor
    last_hidden: torch.Tensor
    lse: torch.Tensor | None = None
    top: torch.Tensor | None = None


Compute = Callable[[Sequence[TokenRow]], Sequence[RowFeatures]]


def rows_hash(rows: Sequence[TokenRow]) -> str:
    """sha256 over ids, token ids and masks of the rows in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.input_ids, [int(flag) for flag in row.loss_mask]]).encode())
    return digest.hexdigest()


def feature_manifest(
    rows: Sequence[TokenRow],
    *,
    target: Mapping[str, Any],
    template: str,
    max_length: int,
    tap_layers: Sequence[int],
    hidden_size: int,
    dtype: str,
    lse: bool = False,
) -> dict[str, Any]:
    """Everything that the features depend on.

    target: `manifest.target_identity`; template: `ChatFormat.template_hash`; dtype: of the stored taps and hidden states.
    """
    if dtype not in DTYPES:
        raise ValueError(f"features dtype={dtype!r}: allowed {', '.join(DTYPES)}")
    return {
        "format": 2,
        "kind": "features",
        "target": dict(target),
        "template": template,
        "max_length": max_length,
        "tap_layers": list(tap_layers),
        "hidden_size": hidden_size,
        "dtype": dtype,
        "lse": lse,
        "rows": {"count": len(rows), "sha256": rows_hash(rows)},
    }


def row_bytes(length: int, manifest: Mapping[str, Any]) -> int:
    """Bytes of the features of a row of `length` tokens."""
    width = manifest["hidden_size"] * (len(manifest["tap_layers"]) + 1)
    return length * (width * DTYPES[manifest["dtype"]].itemsize + (8 if manifest["lse"] else 0))


def estimate_bytes(rows: Sequence[TokenRow], manifest: Mapping[str, Any]) -> int:
    """Bytes that a cache of these rows takes, known before anything is written."""
    return sum(row_bytes(len(row.input_ids), manifest) for row in rows)


def shard_plan(lengths: Sequence[int], manifest: Mapping[str, Any], shard_bytes: int = SHARD_BYTES) -> list[range]:
    """Rows of every shard: consecutive rows, closed before they exceed `shard_bytes` (a longer row stands alone)."""
    plan, start, held = [], 0, 0
    for index, length in enumerate(lengths):
        size = row_bytes(length, manifest)
        if held and held + size > shard_bytes:
            plan.append(range(start, index))
            start, held = index, 0
        held += size
    return [*plan, range(start, len(lengths))] if lengths else []


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _is_complete(path: Path, rows: range) -> bool:
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            return {int(name.split(".")[0]) for name in shard.keys()} == set(rows)  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def _check(found: RowFeatures, row: TokenRow, manifest: Mapping[str, Any]) -> None:
    length, hidden = len(row.input_ids), manifest["hidden_size"]
    want = {"taps": (length, hidden * len(manifest["tap_layers"])), "last_hidden": (length, hidden)}
    if manifest["lse"]:
        want |= {"lse": (length,), "top": (length,)}  # type: ignore[dict-item]
    for name, shape in want.items():
        tensor = getattr(found, name)
        assert tensor is not None and tuple(tensor.shape) == shape, f"{name} of row {row.id}: {shape} expected"
        if not torch.isfinite(tensor).all():
            raise ValueError(f"row {row.id!r}: {name} of the target holds values that are not finite")


def build(
    folder: Path,
    rows: Sequence[TokenRow],
    manifest: Mapping[str, Any],
    compute: Compute,
    *,
    rows_per_call: int = 8,
    shard_bytes: int = SHARD_BYTES,
    max_bytes: int | None = None,
    say: Callable[[str], None] = print,
) -> FeatureCache:
    """Fill the cache with the features that `compute` gives for batches of rows, and open it.

    Complete shards that are there already are kept. Each shard is written whole under another name and then renamed.
    Raises ValueError when the folder was made under other settings (naming them), when the estimate exceeds `max_bytes`
    (before anything is written), and for features that are not finite.
    """
    assert manifest["rows"]["count"] == len(rows), "the manifest is of other rows"
    size = estimate_bytes(rows, manifest)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"the feature cache needs {size / 2**30:.2f} GiB, allowed {max_bytes / 2**30:.2f} GiB")
    full = {**manifest, "shard_bytes": shard_bytes}
    claim(folder, full, what="features")
    plan = shard_plan([len(row.input_ids) for row in rows], manifest, shard_bytes)
    missing = [number for number, part in enumerate(plan) if not _is_complete(_shard_path(folder, number), part)]
    if len(missing) < len(plan):
        say(f"features: {len(plan) - len(missing)} of {len(plan)} shards reused from {folder}")
    if missing:
        say(f"features: {size / 2**20:.0f} MiB in {len(plan)} shards, {len(missing)} to compute")
    for number in missing:
        _write_shard(_shard_path(folder, number), plan[number], rows, manifest, compute, rows_per_call)
    return FeatureCache(folder, rows, manifest)


def _write_shard(
    path: Path, part: range, rows: Sequence[TokenRow], manifest: Mapping[str, Any], compute: Compute, rows_per_call: int
) -> None:
    dtype = DTYPES[manifest["dtype"]]
    tensors: dict[str, torch.Tensor] = {}
    for start in range(part.start, part.stop, rows_per_call):
        numbers = range(start, min(start + rows_per_call, part.stop))
        for number, found in zip(numbers, compute([rows[i] for i in numbers]), strict=True):
            _check(found, rows[number], manifest)
            tensors[f"{number}.taps"] = found.taps.detach().to("cpu", dtype).contiguous()
            tensors[f"{number}.last_hidden"] = found.last_hidden.detach().to("cpu", dtype).contiguous()
            if manifest["lse"]:
                assert found.lse is not None and found.top is not None
                tensors[f"{number}.lse"] = found.lse.detach().to("cpu", torch.float32).contiguous()
                tensors[f"{number}.top"] = found.top.detach().to("cpu", torch.int32).contiguous()
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


class FeatureCache:
    """Reads a complete cache, memory-mapped. Open one in each process; the same rows must be given as at the build.

    Raises ValueError naming every field in which the manifest on disk differs, and for a missing shard.
    """

    def __init__(self, folder: Path, rows: Sequence[TokenRow], manifest: Mapping[str, Any]) -> None:
        found = read(folder)
        shard_bytes = int(found.get("shard_bytes", SHARD_BYTES))
        if wrong := differences(found, {**manifest, "shard_bytes": shard_bytes}):
            raise ValueError(
                f"{folder}: features were made under other settings ({'; '.join(wrong)}): build them again elsewhere"
            )
        self.folder, self.manifest = folder, dict(manifest)
        self.lengths = [len(row.input_ids) for row in rows]
        self._shard_of: list[int] = []
        self._open: dict[int, Any] = {}
        for number, part in enumerate(shard_plan(self.lengths, manifest, shard_bytes)):
            if not _shard_path(folder, number).exists():
                raise ValueError(f"{folder}: shard {number} is missing, the build did not finish")
            self._shard_of += [number] * len(part)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> RowFeatures:
        """Features of row `index`, in the cache's dtype."""
        number = self._shard_of[index]
        if number not in self._open:
            self._open[number] = safe_open(_shard_path(self.folder, number), framework="pt")
        shard = self._open[number]
        names = ("taps", "last_hidden", "lse", "top") if self.manifest["lse"] else ("taps", "last_hidden")
        return RowFeatures(*(shard.get_tensor(f"{index}.{name}") for name in names))

    def batch(self, indices: Sequence[int], width: int | None = None) -> RowFeatures:
        """Features of several rows padded with zeros: taps [R, T, n*H], last_hidden [R, T, H], lse and top [R, T] or None.

        T is `width`, or the longest row. Without rows R is 1, as in `batch.collate`.
        """
        found = [self.row(index) for index in indices]
        length = width or max([1, *(len(item.last_hidden) for item in found)])
        num_rows, hidden, dtype = max(1, len(found)), self.manifest["hidden_size"], DTYPES[self.manifest["dtype"]]
        taps = torch.zeros(num_rows, length, hidden * len(self.manifest["tap_layers"]), dtype=dtype)
        last_hidden = torch.zeros(num_rows, length, hidden, dtype=dtype)
        lse = torch.zeros(num_rows, length) if self.manifest["lse"] else None
        top = torch.zeros(num_rows, length, dtype=torch.int64) if self.manifest["lse"] else None
        for number, item in enumerate(found):
            for padded, values in ((taps, item.taps), (last_hidden, item.last_hidden), (lse, item.lse), (top, item.top)):
                if padded is not None and values is not None:
                    padded[number, : len(values)] = values
        return RowFeatures(taps, last_hidden, lse, top)
