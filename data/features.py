"""What a cache of target features holds, and what it was made of: manifest, sizes, storage formats. Never runs a model.

Each row is stored whole under the names `{row}.taps` [T, n*H], `{row}.last_hidden` [T, H] and, optional, `{row}.lse` float32
[T] (log-sum-exp of the target's logits at each position) with `{row}.top` int32 [T] (their arg-max token). With 8-bit storage
every tap of a token has its own scale, in `{row}.taps_scale` float32 [T, n]; the last hidden state keeps its format, since its
error goes straight into the law that is taught (measured: benchmarks/feature_storage.py).
`data.feature_store` puts rows into shards. Shapes: T text length, n taps, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chat import TokenRow

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EIGHT_BIT = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
STORAGES = ("target", *EIGHT_BIT)
FORMAT = 3


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """Features of one row: taps [T, n*H], last_hidden [T, H], lse float32 [T] and top int [T], or None."""

    taps: Tensor
    last_hidden: Tensor
    lse: Tensor | None = None
    top: Tensor | None = None


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
    tokenizer: str,
    max_length: int,
    tap_layers: Sequence[int],
    hidden_size: int,
    dtype: str,
    storage: str = "target",
    lse: bool = False,
) -> dict[str, Any]:
    """Everything that the features depend on.

    target: `manifest.target_identity` (name, revision, dtype, weights); template and tokenizer: their hashes; dtype: of the
    taps and hidden states as they come back; storage: how they lie on disk, `target` = in that dtype.
    """
    for key, value, allowed in (("dtype", dtype, tuple(DTYPES)), ("storage", storage, STORAGES)):
        if value not in allowed:
            raise ValueError(f"features {key}={value!r}: allowed {', '.join(allowed)}")
    return {
        "format": FORMAT,
        "kind": "features",
        "target": dict(target),
        "template": template,
        "tokenizer": tokenizer,
        "max_length": max_length,
        "tap_layers": list(tap_layers),
        "hidden_size": hidden_size,
        "dtype": dtype,
        "storage": storage,
        "lse": lse,
        "rows": {"count": len(rows), "sha256": rows_hash(rows)},
    }


def row_bytes(length: int, manifest: Mapping[str, Any]) -> int:
    """Bytes of the features of a row of `length` tokens on disk."""
    vector = DTYPES[manifest["dtype"]].itemsize * manifest["hidden_size"]
    tap = vector if manifest.get("storage", "target") == "target" else manifest["hidden_size"] + 4
    return length * (len(manifest["tap_layers"]) * tap + vector + (8 if manifest["lse"] else 0))


def estimate_bytes(rows: Sequence[TokenRow], manifest: Mapping[str, Any]) -> int:
    """Bytes that a cache of these rows takes, known before anything is written."""
    return sum(row_bytes(len(row.input_ids), manifest) for row in rows)


# ---- storage --------------------------------------------------------------------------------------------------------


def compress(values: Tensor, hidden: int, storage: str) -> tuple[Tensor, Tensor]:
    """[T, n*H] -> 8-bit values [T, n*H] and their scales float32 [T, n]: the largest of each H values meets the format's."""
    dtype, most = EIGHT_BIT[storage]
    blocks = values.float().unflatten(-1, (-1, hidden))
    scale = blocks.abs().amax(-1) / most
    scaled = blocks / scale.clamp_min(1e-30)[..., None]
    if storage == "int8":
        scaled = scaled.round()
    return scaled.clamp(-most, most).to(dtype).flatten(-2), scale


def expand(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `compress`: [T, n*H] in `dtype`."""
    return (values.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)


def encode(number: int, found: RowFeatures, row: TokenRow, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a row as they are stored. Raises ValueError for features that are not finite."""
    _check(found, row, manifest)
    out: dict[str, Tensor] = {}
    for name in ("taps", "last_hidden"):
        values = getattr(found, name).detach().to("cpu")
        if manifest["storage"] == "target" or name == "last_hidden":
            out[f"{number}.{name}"] = values.to(DTYPES[manifest["dtype"]]).contiguous()
        else:
            packed, scale = compress(values, manifest["hidden_size"], manifest["storage"])
            out |= {f"{number}.{name}": packed.contiguous(), f"{number}.{name}_scale": scale.contiguous()}
    if manifest["lse"]:
        assert found.lse is not None and found.top is not None
        out[f"{number}.lse"] = found.lse.detach().to("cpu", torch.float32).contiguous()
        out[f"{number}.top"] = found.top.detach().to("cpu", torch.int32).contiguous()
    return out


def decode(number: int, shard: Any, manifest: Mapping[str, Any]) -> RowFeatures:
    """A row of `shard` (anything with get_tensor(name)), in the manifest's dtype."""
    dtype = DTYPES[manifest["dtype"]]
    parts: dict[str, Tensor] = {}
    for name in ("taps", "last_hidden"):
        values = shard.get_tensor(f"{number}.{name}")
        if manifest["storage"] != "target" and name == "taps":
            values = expand(values, shard.get_tensor(f"{number}.{name}_scale"), dtype)
        parts[name] = values
    if not manifest["lse"]:
        return RowFeatures(**parts)
    return RowFeatures(**parts, lse=shard.get_tensor(f"{number}.lse"), top=shard.get_tensor(f"{number}.top"))


def _check(found: RowFeatures, row: TokenRow, manifest: Mapping[str, Any]) -> None:
    length, hidden = len(row.input_ids), manifest["hidden_size"]
    want: dict[str, tuple[int, ...]] = {"taps": (length, hidden * len(manifest["tap_layers"])), "last_hidden": (length, hidden)}
    if manifest["lse"]:
        want |= {"lse": (length,), "top": (length,)}
    for name, shape in want.items():
        tensor = getattr(found, name)
        assert tensor is not None and tuple(tensor.shape) == shape, f"{name} of row {row.id}: {shape} expected"
        if not torch.isfinite(tensor).all():
            raise ValueError(f"row {row.id!r}: {name} of the target holds values that are not finite")
