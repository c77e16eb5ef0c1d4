"""Training log: JSONL files always, and a tracker by Accelerate's switch (W&B, TensorBoard) when the recipe asks for one.

JSONL: train.jsonl holds one line for every write, rollouts.jsonl one for every answer shown. The tracker gets one row a step,
with what was written for that step together; its names are those of train.jsonl, but that a rate and a norm stand under optim/.
A resumed run continues both: lines after the resumed step are dropped, the W&B run keeps its id, and steps that it has are not
sent again, so that its history has every step once.
"""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO
from urllib.parse import urlsplit

from accelerate import Accelerator

from .config import TrainConfig

RENAMED = {"lr": "optim/lr", "grad_norm": "optim/grad_norm"}
COLUMNS = ("step", "temperature", "domain", "id", "prompt", "output", "tau", "tokens")
Record = dict[str, Any]


class TrainLog:
    """One writer per run, active on the main process only. Use it as a context: an exception marks the W&B run as failed.

    path: train.jsonl, in the output folder. run_config: what the tracker keeps as the run's configuration, nested.
    start: completed steps of the checkpoint that the run goes on from.
    Raises ValueError where the tracker did not start.
    """

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, path: Path, run_config: Record, start: int) -> None:
        self.accelerator, self.cfg, self.path, self.start = accelerator, cfg, path, start
        self.tracking = cfg.tracker != "none"
        self.sent = -1  # last step that W&B has
        self._step, self._pending = -1, Record()
        self.file: TextIO | None = None
        if accelerator.is_main_process:
            for name in (path, path.with_name("rollouts.jsonl")):
                _truncate(name, start)
            self.file = path.open("a", encoding="utf-8")
        if self.tracking:
            self._init_tracker(run_config)

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        # SystemExit carries its own code: a run that was asked to stop and saved is no failure
        failed = kind is not None and not (kind is SystemExit and not getattr(value, "code", 1))
        self.close(exit_code=int(failed))

    def _init_tracker(self, run_config: Record) -> None:
        kwargs: Record = {}
        if self.cfg.tracker == "wandb" and self.accelerator.is_main_process:
            kwargs = {"wandb": self._wandb_settings()}
        elif self.cfg.tracker == "tensorboard":
            kwargs = {"tensorboard": {"purge_step": self.start + 1}}  # hides what an interrupted run logged beyond
        config = _flat(run_config)
        if self.cfg.tracker == "tensorboard":
            config = {key: str(value) if value is None or isinstance(value, list) else value for key, value in config.items()}
        self.accelerator.init_trackers(self.cfg.project, config=config, init_kwargs=kwargs)
        if self.accelerator.is_main_process and not self.accelerator.trackers:
            raise ValueError(
                f"train.tracker: {self.cfg.tracker!r} is not installed or was not given to Accelerator(log_with=...)"
            )

    def _wandb_settings(self) -> Record:
        folder = self.path.parent
        # artifacts wait for their upload beside the run, so that the folder can be synced from anywhere
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
        run_id, sent = folder / "wandb_run_id", folder / "wandb_step"
        if self.start == 0 and sent.exists():  # training starts anew: so does its curve
            run_id.unlink(missing_ok=True)
            sent.unlink()
        if not run_id.exists():
            _replace(run_id, os.environ.get("WANDB_RUN_ID") or os.urandom(4).hex())  # a sweep's agent brings the id
        if sent.exists():
            self.sent = int(sent.read_text())
        mode = wandb_mode(self.cfg.wandb_mode, self.accelerator.print)
        return {
            "dir": str(folder), "id": run_id.read_text(), "resume": "allow", "mode": mode, "name": folder.resolve().name,
            "job_type": "train", "settings": _flush_often(),
        }  # fmt: skip

    def write(self, step: int, values: Record) -> None:
        """Append one line for `step` completed steps; the tracker gets it with the rest of its step."""
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        self._add(step, {RENAMED.get(key, key): value for key, value in values.items()})

    def rollouts(self, step: int, rows: Sequence[Record], acceptance: dict[float, list[float | None]]) -> None:
        """Answers with their accepted drafts marked (keys: COLUMNS), and acceptance by slot for each temperature."""
        if not self.accelerator.is_main_process:
            return
        with self.path.with_name("rollouts.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self.cfg.tracker == "wandb":
            self._add(step, _wandb_media(rows, acceptance))
        elif self.cfg.tracker == "tensorboard":
            self._add(step, {"eval/rollouts": _markdown(rows)})

    def commit(self) -> None:
        """Hand what was written for the last step to the tracker, for good: nothing can be added to that step."""
        step, values = self._step, self._pending
        self._step, self._pending = -1, {}
        if not (self.tracking and values and self.accelerator.is_main_process):
            return
        if self.cfg.tracker != "wandb":
            self.accelerator.log(values, step=step)
        elif step > self.sent:
            # without `commit` W&B keeps a row open until the next one, and a killed run loses it
            self.accelerator.log(values, step=step, log_kwargs={"wandb": {"commit": True}})
            self.sent = step
            _replace(self.path.with_name("wandb_step"), str(step))

    def artifact(self, folder: Path) -> None:
        """The exported drafter as a W&B artifact of type model, named after the run's output folder."""
        if self.cfg.tracker == "wandb" and self.cfg.wandb_artifact and self.accelerator.is_main_process:
            import wandb

            name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.path.parent.resolve().name)
            artifact = wandb.Artifact(f"{name}-drafter", type="model", metadata={"steps": self.cfg.steps})
            artifact.add_dir(str(folder))
            self.accelerator.get_tracker("wandb", unwrap=True).log_artifact(artifact)

    def close(self, exit_code: int = 0) -> None:
        """Flush and end the trackers. A second call does nothing."""
        self.commit()
        if self.file is not None:
            self.file.close()
            self.file = None
        # not Accelerator.end_training: that also ends the process group, which saving the drafter still needs
        for tracker in self.accelerator.trackers if self.tracking else ():
            if tracker.name == "wandb" and self.accelerator.is_main_process:
                tracker.run.finish(exit_code=exit_code)
            else:
                tracker.finish()
        if self.tracking:
            self.accelerator.trackers = []
        self.tracking = False

    def _add(self, step: int, values: Record) -> None:
        if step != self._step:
            self.commit()
        self._step = step
        self._pending |= values


# ---- W&B -------------------------------------------------------------------------------------------------------------


def wandb_mode(asked: str, say: Callable[[str], None]) -> str:
    """The mode to start W&B in: `asked`, but offline without a login, since W&B would ask for one on the terminal and hang a
    batch job. WANDB_MODE=offline or disabled in the environment wins."""
    said = os.environ.get("WANDB_MODE", "")
    if said in ("offline", "dryrun", "disabled"):
        return "offline" if said == "dryrun" else said
    if asked == "online" and not _has_login():
        say("W&B: no login found, so this run is kept offline (wandb sync uploads it later)")
        return "offline"
    return asked


def _flush_often() -> Record:
    """W&B writes its file every 15 seconds; a killed run should lose less."""
    import wandb

    key = "x_transaction_log_flush_interval"
    return {key: 1.0} if key in wandb.Settings.model_fields else {}


def _has_login() -> bool:
    """Whether W&B finds a key without asking: a variable, or an entry of its host in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for place in places:
        try:
            hosts = netrc.netrc(str(place)).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if any(name == host if host else "wandb" in name for name in hosts):
            return True
    return False


def _wandb_media(rows: Sequence[Record], acceptance: dict[float, list[float | None]]) -> Record:
    """A table of answers, and acceptance by slot as a chart with a line for each temperature."""
    import wandb

    table = wandb.Table(columns=list(COLUMNS), data=[[row[name] for name in COLUMNS] for row in rows])
    lines = {f"T={t:g}": [(k + 1, rate) for k, rate in enumerate(rates) if rate is not None] for t, rates in acceptance.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return {"eval/rollouts": table}
    chart = wandb.plot.line_series(
        xs=[[slot for slot, _ in points] for points in lines.values()],
        ys=[[rate for _, rate in points] for points in lines.values()],
        keys=list(lines), title="acceptance by slot", xname="slot",
    )  # fmt: skip
    return {"eval/rollouts": table, "eval/acceptance_by_slot": chart}


def _markdown(rows: Sequence[Record]) -> str:
    """Answers as a Markdown table, which TensorBoard shows."""
    names = ("temperature", "domain", "tau", "prompt", "output")
    clean = ((str(row[name]).replace("|", "\\|").replace("\n", " ") for name in names) for row in rows)
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *(f"| {' | '.join(cells)} |" for cells in clean)])


# ---- files -----------------------------------------------------------------------------------------------------------


def _truncate(path: Path, start: int) -> None:
    """Drop lines after the resumed step (and a torn last line), so that a resumed run continues one curve."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    _replace(path, "".join(f"{line}\n" for line in kept))


def _replace(path: Path, text: str) -> None:
    """Write a file so that a kill, or a full disk, leaves the old one or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _flat(config: Record, prefix: str = "") -> Record:
    flat: Record = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            flat[name] = list(value)
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool)) or value is None else str(value)
    return flat
