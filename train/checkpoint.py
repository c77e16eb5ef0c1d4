"""Checkpoints that a kill at any moment cannot spoil: written to a temporary folder, made durable, then renamed.

A `*.tmp` folder is never read. With one process or DDP a checkpoint holds model.safetensors, optimizer.pt and one rng-RANK.pt a
process, and is written while the next step runs; sharded strategies leave Accelerate's own files, written at once. Every one
also holds drafter/, the whole drafter in the native layout without the target's matrices, which the runtime loads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.export import native
from .config import LAUNCH_KEYS, PLACED_KEYS, TrainConfig
from .strategy import REPLICATED, Engine

META, BEST, RUN_ID = "meta.json", "best.json", "wandb_run_id"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".tmp" and (p / META).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def identity_of(run_config: dict[str, Any], cfg: TrainConfig, world: int) -> dict[str, Any]:
    """What must be equal for a run to go on: the recipe but for how it is launched, and the size of a whole step."""
    train = {key: value for key, value in run_config["train"].items() if key not in LAUNCH_KEYS}
    size = cfg.accumulation * world * (cfg.rows if cfg.packing == "none" else 1)
    return json.loads(json.dumps({**run_config, "train": train, "step_size": size}))


# ---- saving ---------------------------------------------------------------------------------------------------------


class Saver:
    """Writes the checkpoints of a run below `folder`. All processes call save, wait and close alike.

    meta: what goes into meta.json beside step, world_size and strategy.
    """

    def __init__(self, engine: Engine, folder: Path, heads: FrozenHeads, meta: dict[str, Any], cfg: TrainConfig) -> None:
        self.engine, self.folder, self.heads, self.keep_last = engine, folder, heads, cfg.keep_last
        self.main = engine.accelerator.is_main_process
        world = engine.accelerator.num_processes
        self.meta = {**meta, "world_size": world, "strategy": engine.strategy}
        self.background = cfg.async_checkpoints and engine.strategy in REPLICATED
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int) -> Path:
        """Save after `step` completed steps. Returns the folder, which is there at the latest after `wait`."""
        self.wait()
        accelerator = self.engine.accelerator
        final = self.folder / f"step-{step:07d}"
        temporary = final.with_name(f"{final.name}.tmp")
        try:
            if self.main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            accelerator.wait_for_everyone()
            if not temporary.is_dir():
                raise ValueError(f"output: {self.folder} is not the same folder on every machine; it must be on a shared disk")
            write = self._begin(temporary)
        except (OSError, RuntimeError) as error:  # a full disk; torch says RuntimeError
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._failed(error) from error

        accelerator.wait_for_everyone()
        if self.main:
            self._start(lambda: self._complete(write, temporary, final, step))
        if not self.background:
            self.wait()
            accelerator.wait_for_everyone()
        return final

    def wait(self) -> None:
        """Until the last checkpoint is complete. Raises RuntimeError, on the main process, when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> RuntimeError:
        kept = list_checkpoints(self.folder)
        last = f"the last complete one is {kept[-1]}" if kept else "there is no complete one"
        return RuntimeError(f"checkpoint: cannot be written below {self.folder} ({error}); {last}")

    def close(self) -> None:
        """See wait."""
        self.wait()

    def _start(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:  # raised by wait, in the training's own thread
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def _begin(self, temporary: Path) -> Callable[[], None]:
        """What all processes write at once; returns what is left for the main process."""
        if self.engine.strategy in REPLICATED:
            return self._snapshot(temporary)
        self.engine.accelerator.save_state(str(temporary), safe_serialization=True)
        state = self.engine.whole_state()
        return lambda: self._write_drafter(temporary, state)

    def _snapshot(self, temporary: Path) -> Callable[[], None]:
        """Copy what the main process will write; every process writes its own random state at once."""
        torch.save(rng_state(), temporary / f"rng-{self.engine.accelerator.process_index}.pt")
        if not self.main:
            return lambda: None
        model = self.engine.whole_state()
        optimizer = _on_cpu(self.engine.optimizer.state_dict())

        def write() -> None:
            save_file({name: value.contiguous() for name, value in model.items()}, temporary / "model.safetensors")
            torch.save(optimizer, temporary / "optimizer.pt")
            self._write_drafter(temporary, model)

        return write

    def _write_drafter(self, temporary: Path, state: dict[str, Tensor]) -> None:
        folder = temporary / "drafter"
        folder.mkdir()
        native.write(folder, self.engine.drafter, self.heads, dtype=torch.float32, with_heads=False, state=state)
        record = {key: value for key, value in self.meta.items() if key != "identity"}
        (folder / "draftsmith.json").write_text(json.dumps(record, indent=2) + "\n")

    def _complete(self, write: Callable[[], None], temporary: Path, final: Path, step: int) -> None:
        try:
            write()
            run_id = self.folder.parent / RUN_ID
            meta = {**self.meta, "step": step, RUN_ID: run_id.read_text() if run_id.is_file() else None}
            (temporary / META).write_text(json.dumps(meta, indent=2) + "\n")
            for path in [*temporary.rglob("*"), temporary]:
                _sync(path)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk: give the space back
            raise
        if final.exists():
            final.rename(final.with_name(f"{final.name}.old.tmp"))
        temporary.replace(final)
        _sync(self.folder)
        shutil.rmtree(final.with_name(f"{final.name}.old.tmp"), ignore_errors=True)
        prune(self.folder, self.keep_last)


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the last checkpoints and the best one."""
    found = best(folder)
    for old in list_checkpoints(folder)[:-keep_last]:
        if found is None or old != found[0]:
            gone = old.with_name(f"{old.name}.old.tmp")
            old.rename(gone)  # a kill must not leave half of one that looks complete
            shutil.rmtree(gone)


def mark_best(folder: Path, step: int, value: float) -> bool:
    """Keep the checkpoint of `step` below `folder` unless an earlier one has a higher value; returns whether it is kept.

    The checkpoint may still be on its way to the disk. Main process only.
    """
    record = _read_best(folder)
    if record is not None and record["value"] > value and (folder / record["checkpoint"]).is_dir():
        return False
    temporary = folder / f"{BEST}.tmp"
    temporary.write_text(json.dumps({"checkpoint": f"step-{step:07d}", "value": value}) + "\n")
    _sync(temporary)
    temporary.replace(folder / BEST)
    return True


def best(folder: Path) -> tuple[Path, float] | None:
    """The checkpoint that mark_best chose, and its value."""
    record = _read_best(folder)
    return None if record is None else (folder / record["checkpoint"], record["value"])


def _read_best(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / BEST).read_text())
    except (OSError, ValueError):
        return None


# ---- resuming -------------------------------------------------------------------------------------------------------


def resume(
    engine: Engine,
    folder: Path,
    identity: dict[str, Any],
    *,
    choice: str = "auto",
    say: Callable[[str], None] = print,
    fill: Callable[[dict[str, Any]], dict[str, Any]] = lambda recipe: recipe,
) -> int:
    """Load a checkpoint; returns the number of completed steps (0: starts anew). All processes call it.

    choice: auto = the newest complete one below `folder`, if any; none = start anew; else the folder of a checkpoint.
    Checkpoints later than the start are set aside. fill: an older recipe with the keys that came since.

    Raises ValueError for a checkpoint of other settings (naming them) or one that this launch cannot load.
    """
    found = list_checkpoints(folder)
    path = {"auto": found[-1] if found else None, "none": None}.get(choice, Path(choice))
    step = 0
    if path is not None:
        meta = read_meta(path)
        _check(path, meta, identity, engine, fill)
        if engine.strategy in REPLICATED:
            _load_replicated(engine, path)
        else:
            engine.accelerator.load_state(str(path))
        step = int(meta["step"])
        world = engine.accelerator.num_processes
        if meta["world_size"] != world:
            say(
                f"{path}: saved by {meta['world_size']} process(es), goes on with {world}: the same rows in every step, but a "
                "process that was not there draws its random numbers from the seed on"
            )
        run_id = folder.parent / RUN_ID
        if meta.get(RUN_ID) and not run_id.is_file() and engine.accelerator.is_main_process:
            run_id.write_text(meta[RUN_ID])
    if engine.accelerator.is_main_process:
        for torn in folder.glob("step-*.tmp"):  # left by a kill or a full disk
            shutil.rmtree(torn, ignore_errors=True)
        for later in (p for p in found if int(p.name.removeprefix("step-")) > step):
            aside = later.with_name(f"aside-{later.name}")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)
            say(f"{later}: later than the start of this run, moved to {aside.name}")
    engine.accelerator.wait_for_everyone()
    return step


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises ValueError where it is none, or an incomplete one."""
    try:
        if path.suffix == ".tmp":
            raise OSError("it was never completed")
        return json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume: {str(path)!r} is no complete checkpoint ({error})") from None


def _check(
    path: Path,
    meta: dict[str, Any],
    identity: dict[str, Any],
    engine: Engine,
    fill: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    before = dict(meta.get("identity", {}))
    size = before.pop("step_size", None)
    wanted = {key: value for key, value in identity.items() if key != "step_size"}
    after, known = dict(_flat(wanted)), dict(_flat(fill(before)))
    differing = [
        f"{key} {known.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(after.keys() | known.keys())
        if after.get(key) != known.get(key) and key.removeprefix("train.") not in LAUNCH_KEYS and key not in PLACED_KEYS
    ]
    if differing:
        raise ValueError(f"{path}: made with other settings ({'; '.join(differing)}); choose another output folder")
    world, strategy = engine.accelerator.num_processes, engine.strategy
    if size != identity["step_size"]:
        raise ValueError(
            f"{path}: a step of that run has {size} rows (rows x accumulation x processes), this one "
            f"{identity['step_size']} on {world} process(es); set train.accumulation, or train.global_rows={size}"
        )
    family = {strategy, meta["strategy"]}
    if len(family) > 1 and not family <= set(REPLICATED):
        raise ValueError(
            f"{path}: saved under {meta['strategy']}, this launch is {strategy}; launch it as before, or start from its "
            f"weights in another output folder: drafter.init=checkpoint drafter.checkpoint={path / 'drafter'}"
        )
    if strategy.startswith("zero") and meta["world_size"] != world:
        raise ValueError(
            f"{path}: DeepSpeed's checkpoints load on as many processes as saved them: {meta['world_size']}, not {world}; "
            f"or start from its weights in another output folder: drafter.init=checkpoint "
            f"drafter.checkpoint={path / 'drafter'}"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _load_replicated(engine: Engine, path: Path) -> None:
    engine.drafter.load_state_dict(load_file(path / "model.safetensors"))
    engine.optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True))
    own = path / f"rng-{engine.accelerator.process_index}.pt"
    if own.is_file():
        set_rng_state(torch.load(own, weights_only=False))


def rng_state() -> dict[str, Any]:
    """Random states of Python, NumPy, PyTorch and the current GPU."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go back to what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _on_cpu(value: Any) -> Any:
    """A copy of nested containers with every tensor copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return [_on_cpu(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
