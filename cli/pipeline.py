"""The stages behind the subcommands, in order: answers, training and export, measurement, report.

Every entry reads the recipe, checks it and claims the output folder before anything heavy is imported. A stage that is valid
is not run again, and says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipes.check import check_recipe
from ..recipes.schema import ConfigError, Recipe, differences, from_plain, load_recipe, to_plain
from ..train.config import LAUNCH_KEYS, PLACED_KEYS, check_tracker
from .allocator import keep_freed_memory

LOCK = "recipe.lock.json"
# Another measurement of the same drafter may go into the same folder: its parts are remeasured where they differ.
# Limits of the doctor's checks change no row. How training is launched and watched may change while it goes on.
NOT_LOCKED = ("eval", "output", "data.doctor", *sorted(PLACED_KEYS), *(f"train.{key}" for key in sorted(LAUNCH_KEYS)))


@dataclass(frozen=True)
class Run:
    """A checked recipe and its output folder."""

    recipe: Recipe
    folder: Path

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved recipe as nested dictionaries."""
        return to_plain(self.recipe)


def open_run(name: str, overrides: list[str], *, prompts: bool = False, claim: bool = True) -> Run:
    """Read and check a recipe, its prompts (`prompts` true), and claim its output folder.

    With `claim` false the folder must be this recipe's already.

    Raises ConfigError or ValueError, before a model loads, for every mistake and for a folder of another recipe.
    """
    loaded = load_recipe(name, overrides)
    found = Run(loaded.value, Path(loaded.value.output))
    check_recipe(loaded.value, loaded.given)
    fresh = check_folder(found.folder, found.plain)
    if fresh and not claim:
        raise ConfigError([f"output: {str(found.folder)!r} holds no run of this recipe yet; train it first"])
    if prompts:
        check_prompts(found.recipe)
    if fresh:
        claim_folder(found.folder, found.plain)
    return found


def check_folder(folder: Path, plain: dict[str, Any]) -> bool:
    """Whether output `folder` is free; False when it holds a run of this very recipe.

    Raises ConfigError naming the keys that differ, or when the folder holds something else.
    """
    lock = folder / LOCK
    if not lock.is_file():
        # another rank of the same launch may be writing its lock just now
        if folder.exists() and not (folder.is_dir() and all(e.name.startswith(f".{LOCK}") for e in folder.iterdir())):
            raise ConfigError([f"output: {str(folder)!r} exists and was not made by a recipe; choose another folder"])
        return True
    if all(entry.name.lstrip(".").startswith((LOCK, "doctor.")) for entry in folder.iterdir()):
        return True  # claimed, but nothing was made
    found = lock_differences(folder, plain)
    if found:
        keys = "; ".join(found)
        raise ConfigError([f"output: {str(folder)!r} belongs to another recipe ({keys}); choose another folder or remove it"])
    return False


def lock_differences(folder: Path, plain: dict[str, Any]) -> list[str]:
    """`key: old -> new` of every key in which the recipe that `folder` is locked to differs; empty where it has no lock.

    Raises ConfigError when the lock cannot be read.
    """
    lock = folder / LOCK
    if not lock.is_file():
        return []
    try:
        before = json.loads(lock.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"output: {lock} cannot be read: {error}"]) from error
    return differences(_filled(before), _filled(plain), ignore=NOT_LOCKED)


def _filled(before: dict[str, Any]) -> dict[str, Any]:
    """An older lock with the keys that came since at their defaults; unchanged where it no longer parses."""
    kept = {key: value for key, value in before.items() if key not in NOT_LOCKED}
    try:
        return to_plain(from_plain({**kept, "output": before.get("output", "-")}))
    except ValueError:
        return before


def claim_folder(folder: Path, plain: dict[str, Any]) -> None:
    """Write the resolved recipe into `folder` (atomically: every rank of a launch may do so)."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{LOCK}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / LOCK)


def check_prompts(recipe: Recipe) -> None:
    """Read the training and held-out prompts and measure them with the tokenizer alone.

    Raises ValueError for a broken line, an empty set, a held-out prompt among the training ones, and when no prompt leaves
    room for an answer.
    """
    from ..data.chat import ChatFormat
    from ..data.source import check_overlap, load_prompts
    from ..data.stage import check_chat
    from ..eval.prompts import read_heldout
    from ..models.target import load_tokenizer
    from ..train.prompts import heldout_prompts

    prompts = load_prompts(recipe.data)
    read_heldout(recipe.eval)
    check_overlap(prompts, heldout_prompts(recipe.eval.prompts), near=recipe.data.doctor.max_overlap)
    tokenizer = load_tokenizer(recipe.target)
    chat = ChatFormat(tokenizer, template_args=recipe.data.template_args)
    check_chat(prompts, chat, lambda line: None)
    shortest = None
    for prompt in prompts:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        opening = [*messages, {"role": "user", "content": prompt.turns[0]}]
        length = len(chat.render(opening, generation_prompt=True, tools=prompt.tools))
        if length + 2 <= recipe.data.max_length:
            return
        shortest = length if shortest is None else min(shortest, length)
    raise ValueError(
        f"data.max_length: {recipe.data.max_length} is not allowed; the shortest prompt has {shortest} tokens, "
        f"so it must be at least {(shortest or 0) + 2}"
    )


def pick_device(device: str) -> str:
    """`auto` as cuda where there is one, else cpu. Raises ValueError for a device that is not there."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device: {device!r} is not allowed; it must be auto, cpu or cuda")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    index = device.partition(":")[2] or "0"
    if not index.isdecimal() or int(index) >= count:
        raise ValueError(f"--device: {device!r} is not there; this PyTorch sees {count} {kind} device(s)")
    if kind == "cuda":
        torch.cuda.set_device(int(index))  # Accelerate takes the current one
    return device


def run(name: str, overrides: list[str], device: str = "auto") -> None:
    """Answers, training, export, measurement and report."""
    found = open_run(name, overrides, prompts=True)
    place = pick_device(device)
    _train(found, place)
    _bench(found, place)


def train(name: str, overrides: list[str], device: str = "auto", *, resume: str = "auto") -> None:
    """Answers where they are missing, then training; leaves OUTPUT/drafter. Also run by accelerate, on every rank.

    resume: auto goes on from the newest checkpoint, none starts anew, else the folder of a checkpoint.
    """
    if resume not in ("auto", "none") and not Path(resume).is_dir():
        raise ValueError(f"--resume: {resume!r} is not allowed; it must be auto, none or the folder of a checkpoint")
    found = open_run(name, overrides, prompts=True)
    _train(found, pick_device(device), resume)


def bench(name: str, overrides: list[str], device: str = "auto", *, grid: bool = False) -> None:
    """The measurement of a trained drafter: report.json, or with `grid` the operating points in grid.json."""
    found = open_run(name, overrides, claim=False)
    if grid:
        from ..eval.grid_plan import check_grid
        from ..models.facts import target_facts

        check_grid(found.recipe.eval, found.recipe.drafter.block_size, target_facts(found.recipe.target).max_positions)
        _grid(found, pick_device(device))
        return
    from ..eval.prompts import read_heldout

    read_heldout(found.recipe.eval)
    _bench(found, pick_device(device))


def report(name: str, overrides: list[str]) -> None:
    """Table and page of the last measurement, and of the last grid where there is one."""
    found = open_run(name, overrides, claim=False)
    from ..eval.grid_report import print_grid, read_grid, write_grid
    from ..eval.report import read_report, write_report
    from ..eval.table import print_summary

    grid = found.folder / "grid.json"
    if (found.folder / "report.json").is_file() or not grid.is_file():
        read = read_report(found.folder / "report.json")
        print_summary(read, write_report(read, found.folder), console())
    if grid.is_file():
        measured = read_grid(grid)
        print_grid(measured, write_grid(measured, found.folder), console())


def console() -> Any:
    """The terminal; wide enough for the tables where the output goes to a file."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=140)


def parts_of(recipe: Recipe) -> Any:
    """The sections that training depends on (train.stage.Parts)."""
    from ..train.stage import Parts

    return Parts(
        target=recipe.target, data=recipe.data, drafter=recipe.drafter, objective=recipe.objective, train=recipe.train,
        seed=recipe.seed,
    )  # fmt: skip


def _train(found: Run, device: str, resume: str = "auto") -> None:
    check_tracker(found.recipe.train)
    keep_freed_memory()

    from ..data.source import load_prompts, prompts_hash
    from ..train import failure, stage, strategy

    parts = parts_of(found.recipe)
    made_from = prompts_hash(load_prompts(found.recipe.data, say=lambda line: None))
    if resume == "auto" and stage.is_trained(found.folder, parts, made_from):
        print(f"answers and drafter: {found.folder / 'drafter'} is valid, reused", flush=True)
        return
    accelerator = strategy.build(found.recipe.train, device, found.folder)
    with failure.whole_job(accelerator):
        try:
            folder = _train_with(found, accelerator, parts, made_from, resume)
        except failure.Stopped as stopped:
            accelerator.print(stopped, flush=True)
            failure.finish(accelerator)
            raise
    accelerator.print(f"drafter: {folder}", flush=True)
    failure.finish(accelerator)


def _train_with(found: Run, accelerator: Any, parts: Any, made_from: str, resume: str) -> Path:
    """Target, rows, training and gate in every process; returns the drafter's folder."""
    from dataclasses import replace

    from ..train import loop, stage, strategy
    from ..train.prompts import heldout_prompts
    from ..train.target import open_target
    from .export import gate_trained

    recipe, say = found.recipe, accelerator.print
    heldout = heldout_prompts(recipe.eval.prompts)
    target = open_target(recipe.target, accelerator.device)
    with strategy.main_first(accelerator):
        prepared = stage.prepare_rows(parts, target, found.folder, heldout=heldout, say=say)
    # on all ranks at once: they share the work of the feature cache, and a sharded target answers all of them or none
    setup = stage.build_setup(parts, target, prepared.rows, found.folder, say=say)
    return loop.run(
        cfg=recipe.train, objective_cfg=recipe.objective, setup=setup, accelerator=accelerator, output=found.folder,
        seed=recipe.seed, run_config=parts.plain(), resume=resume,
        provenance={**stage.provenance(made_from), "chat": stage.chat_record(parts, target)},
        accept=lambda folder, drafter: (
            gate_trained(folder, target, replace(setup, drafter=drafter), recipe)
            if target.whole
            else say("gate: left out, the target is sharded or remote; `draftsmith export` runs it")
        ),
    )  # fmt: skip


def _bench(found: Run, device: str) -> None:
    from ..eval.stage import bench as measure

    keep_freed_memory()

    measure(
        found.recipe.target, found.folder / "drafter", found.recipe.eval, found.folder, recipe=found.plain,
        train_log=found.folder / "train.jsonl", template_args=found.recipe.data.template_args,
        system=found.recipe.data.system, device=device,
        console=console(),
    )  # fmt: skip


def _grid(found: Run, device: str) -> None:
    from ..eval.grid import run_grid

    keep_freed_memory()

    run_grid(
        found.recipe.target, found.folder / "drafter", found.recipe.eval, found.folder, recipe=found.plain,
        template_args=found.recipe.data.template_args, system=found.recipe.data.system, device=device, console=console(),
    )  # fmt: skip
