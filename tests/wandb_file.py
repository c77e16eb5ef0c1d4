"""Reads the transaction log of an offline W&B run: the package writes it and ships no reader in Python."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768


@dataclass
class WandbRun:
    """history: rows in order; exit_code None: the run did not end."""

    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    artifacts: list[Any] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.history]


def payloads(data: bytes) -> list[bytes]:
    """Records of the file, their parts joined; a torn last one is left out."""
    assert data[:4] == b":W&B" and struct.unpack("<H", data[4:6])[0] == 0xBEE1
    found, parts, place = [], b"", 7
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part = data[place + 7 : place + 7 + length]
        if kind == 0 or len(part) < length:
            break
        place += 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            found.append(parts)
    return found


def _items(items) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = list(item.nested_key) or [item.key]
        place = found
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)
    return found


def read(folder: Path) -> WandbRun:
    """The run in an `offline-run-*` folder."""
    (file,) = folder.glob("*.wandb")
    run = WandbRun()
    for payload in payloads(file.read_bytes()):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project = record.run.run_id, record.run.project
            run.config |= _items(record.run.config.update)
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
        elif kind == "artifact" or (kind == "request" and record.request.WhichOneof("request_type") == "log_artifact"):
            run.artifacts.append(record.artifact if kind == "artifact" else record.request.log_artifact.artifact)
    return run


def runs(output: Path, *, ended: bool = True) -> list[WandbRun]:
    """All offline runs under an output folder, oldest first. ended: wait until W&B's own process has written their ends."""
    deadline = time.monotonic() + 30
    while True:
        found = [read(folder) for folder in sorted(output.glob("wandb/offline-run-*"))]  # the name begins with the date
        if not ended or all(run.exit_code is not None for run in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
