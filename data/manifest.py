"""Manifests: what a folder of generated data was made of, compared before anything in it is reused."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

INFORMATION = frozenset({"versions", "batch_size", "answered_by"})  # recorded, but no reason to refuse


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is either absent, the old one, or complete; several processes may write the same one."""
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")  # nodes may share the disk
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk: leave nothing behind on it
        temporary.unlink(missing_ok=True)
        raise


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differing fields as `field: old -> new`, information-only fields left out."""
    keep = [{k: v for k, v in values.items() if k not in INFORMATION} for values in (old, new)]
    a, b = (flatten(json.loads(json.dumps(values))) for values in keep)
    return [f"{key}: {_short(a.get(key))} -> {_short(b.get(key))}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:12] + "..." + text[-9:]


def claim(folder: Path, manifest: Mapping[str, Any], *, what: str) -> bool:
    """Take `folder` for data made as `manifest` says; true when such data may be there already.

    The manifest is written before any data, so data without one is never picked up. Raises ValueError naming every field
    in which a manifest that is there differs, or when the folder holds files but no manifest.
    """
    path = folder / "manifest.json"
    if not path.exists():
        strange = folder.is_dir() and any(item.suffix != ".tmp" for item in folder.iterdir())
        if strange and not path.exists():  # another rank may have written it just now
            raise ValueError(f"{folder}: holds files but no manifest.json, so it is not known what made them: move it away")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        return False
    if found := differences(read(folder), manifest):
        raise ValueError(
            f"{folder}: {what} were made under other settings ({'; '.join(found)}): choose another folder or delete it"
        )
    return True


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises ValueError when there is none or it cannot be read."""
    path = folder / "manifest.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no manifest.json") from None
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"{path}: broken manifest ({error})") from None


def versions() -> dict[str, str]:
    """Versions of the packages that shape the data."""
    found = {}
    for name in ("draftsmith", "torch", "transformers", "datasets"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def target_identity(target: Any, *, name: str, revision: str | None) -> dict[str, Any]:
    """Name, revision, dtype and a fingerprint of the weights of a loaded target.

    The fingerprint hashes 64 rows at each end of the embedding and of the LM head, so a folder or a Hub branch whose
    content changed under the same name is noticed.
    """
    digest = hashlib.sha256()
    for weight in (target.embedding_weight, target.lm_head_weight):
        for part in (weight[:64], weight[-64:]):
            digest.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    dtype = str(target.dtype).removeprefix("torch.")
    known = {"name": name, "revision": revision, "dtype": dtype, "weights": digest.hexdigest()}
    quantization = getattr(target, "quantization", None)
    return known if quantization is None else {**known, "quantization": quantization}
