"""`draftsmith calibrate`: fit the survival calibration of a trained drafter and store it beside the drafter."""

from __future__ import annotations

from .allocator import keep_freed_memory
from .pipeline import console, open_run, pick_device


def run(name: str, overrides: list[str], device: str = "auto") -> None:
    """Rollouts on held-out prompts, fits, report; leaves OUTPUT/drafter/calibration.json and OUTPUT/calibration.

    Raises ConfigError or ValueError before a model loads for a bad recipe, a run without a drafter or a survival head, and
    prompts that cannot be split.
    """
    found = open_run(name, overrides, claim=False)
    place = pick_device(device)
    keep_freed_memory()
    from ..eval.calibrate import calibrate

    recipe = found.recipe
    calibrate(
        recipe.target, found.folder / "drafter", recipe.eval, found.folder, template_args=recipe.data.template_args,
        system=recipe.data.system, device=place, console=console(),
    )  # fmt: skip
