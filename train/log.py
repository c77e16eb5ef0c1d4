"""Training log: a JSONL file always, and Accelerate's tracker (W&B) when the recipe asks for one."""

from __future__ import annotations

import json
import netrc
import os
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator

from .config import TrainConfig


class TrainLog:
    """One writer per run, active on the main process only."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, path: Path, run_config: dict[str, Any], start: int) -> None:
        self.accelerator, self.path = accelerator, path
        self.tracking = cfg.tracker != "none"
        self.file: TextIO | None = None
        if accelerator.is_main_process:
            _truncate(path, start)
            self.file = path.open("a")
        if self.tracking:
            self._init_tracker(cfg, run_config)

    def _init_tracker(self, cfg: TrainConfig, run_config: dict[str, Any]) -> None:
        kwargs: dict[str, Any] = {}
        if cfg.tracker == "wandb":
            # Without a login an online init asks on the terminal and hangs a batch job: offline unless a key is there.
            if cfg.wandb_mode == "online" and not _has_login():
                self.accelerator.print("W&B: no login found, so this run is kept offline (wandb sync uploads it later)")
            if cfg.wandb_mode == "offline" or not _has_login():
                os.environ.setdefault("WANDB_MODE", "offline")
                if os.environ["WANDB_MODE"] == "online":
                    os.environ["WANDB_MODE"] = "offline"
            run_id = self.path.with_name("wandb_run_id")
            if self.accelerator.is_main_process and not run_id.exists():
                run_id.write_text(os.urandom(4).hex())
            kwargs = {"wandb": {"dir": str(self.path.parent), "resume": "allow"}}
            if run_id.exists():
                kwargs["wandb"]["id"] = run_id.read_text()
        self.accelerator.init_trackers(cfg.project, config=_flat(run_config), init_kwargs=kwargs)
        if self.accelerator.is_main_process and not self.accelerator.trackers:
            raise ValueError(f"train.tracker: {cfg.tracker!r} is not installed or was not given to Accelerator(log_with=...)")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one line for `step` completed steps."""
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        if self.tracking:
            self.accelerator.log(values, step=step)

    def close(self) -> None:
        """Flush and end the trackers."""
        if self.file is not None:
            self.file.close()
        if self.tracking:
            self.accelerator.end_training()


def _has_login() -> bool:
    """Whether W&B finds a key without asking: the variable, or an entry of its host in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(str(Path.home() / ".netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _truncate(path: Path, start: int) -> None:
    """Drop lines after the resumed step (and a torn last line), so that a resumed run continues one curve."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    path.write_text("".join(f"{line}\n" for line in kept))


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool)) or value is None else str(value)
    return flat
