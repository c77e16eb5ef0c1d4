"""The recipe: the config dataclasses of all parts composed. Only entry points (cli/, a part's __main__) import this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from ..data.config import DataConfig
from ..eval.config import EvalConfig
from ..losses.config import ObjectiveConfig
from ..models.config import DSparkConfig, TargetConfig
from ..train.config import TrainConfig
from .load import ConfigError, Loaded, build, flatten, load, to_plain

__all__ = ["ConfigError", "Recipe", "differences", "find_recipe", "from_plain", "load_recipe", "shipped_files", "to_plain"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that one run needs, from prompts to report."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    output: str = field(metadata={"help": "folder for answers, checkpoints, drafter and report"})
    seed: int = field(default=0, metadata={"help": "seed of initialisation, order of the data and anchors", "ge": 0})
    target: TargetConfig = field(default_factory=TargetConfig, metadata={"help": "the frozen model"})
    data: DataConfig = field(default_factory=DataConfig, metadata={"help": "prompts and answers"})
    drafter: DSparkConfig = field(default_factory=DSparkConfig, metadata={"help": "what is trained"})
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig, metadata={"help": "the loss"})
    train: TrainConfig = field(default_factory=TrainConfig, metadata={"help": "the optimiser's run"})
    eval: EvalConfig = field(default_factory=EvalConfig, metadata={"help": "the measurement"})

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise ValueError("output: '' is not allowed; it must name a folder")


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped recipe without `.yaml`.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {Path(entry.name).stem: entry for entry in resources.files(__package__).iterdir() if entry.name.endswith(".yaml")}
    if name in shipped:
        return Path(str(shipped[name]))
    raise ConfigError([f"{name}: no such recipe file; shipped recipes: {', '.join(sorted(shipped)) or 'none'}"])


def shipped_files() -> dict[str, Path]:
    """Every shipped YAML file by its name without .yaml: recipes, and under accelerate/ the launch configs."""
    root = Path(str(resources.files(__package__)))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.yaml")}


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Loaded[Recipe]:
    """The recipe in file `name` (or the shipped one of that name) with `section.key=value` overrides.

    Raises:
        ConfigError: one line for each mistake.
    """
    return load(Recipe, find_recipe(name), overrides)


def from_plain(values: dict[str, Any]) -> Recipe:
    """The recipe that to_plain() wrote. Raises ConfigError."""
    return build(Recipe, values).value


def differences(old: dict[str, Any], new: dict[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    """`key: old -> new` for every key in which two plain recipes differ, sections and keys in `ignore` left out."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not any(key == name or key.startswith(f"{name}.") for name in ignore)
    ]
