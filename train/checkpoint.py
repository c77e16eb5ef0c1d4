"""Atomic checkpoints: written to a temporary folder, made durable, then renamed. A `*.tmp` folder is never read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

META = "meta.json"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".tmp" and (p / META).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def save(accelerator: Accelerator, folder: Path, step: int, meta: dict[str, Any], keep_last: int) -> Path:
    """Save after `step` completed steps: model, optimiser and RNG of every rank, then `meta` (all ranks call this)."""
    final = folder / f"step-{step:07d}"
    temporary = final.with_suffix(".tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / META).write_text(json.dumps({**meta, "step": step}, indent=2) + "\n")
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
        _sync(folder)
        for old in list_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def resume(accelerator: Accelerator, folder: Path, identity: dict[str, Any]) -> int:
    """Load the newest complete checkpoint; returns the number of completed steps (0: none found).

    `identity` must equal what the checkpoint was made with: ValueError naming the differing keys.
    """
    found = list_checkpoints(folder)
    if not found:
        return 0
    meta = json.loads((found[-1] / META).read_text())
    differing = [k for k, v in identity.items() if meta.get("identity", {}).get(k) != json.loads(json.dumps(v))]
    if differing:
        raise ValueError(
            f"{found[-1]}: made with other settings of {', '.join(differing)}; choose another output folder or remove it"
        )
    accelerator.load_state(str(found[-1]))
    return int(meta["step"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
