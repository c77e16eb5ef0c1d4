"""`draftsmith bench --server`: a running engine over a recipe's evaluation prompts and operating points. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Options of the command. to: None is OUTPUT/server."""

    server: str | None
    server_plain: str | None
    grid: bool
    model: str | None
    timeout: float
    to: Path | None


def run(name: str, overrides: list[str], options: Options) -> Path:
    """Measure and write; returns the page's path. ValueError for a bad option or recipe, before anything is asked."""
    if options.server is None:
        raise ValueError("--server-plain: needs --server, the same target served with speculation")
    if options.timeout <= 0:
        raise ValueError(f"--timeout: {options.timeout:g} is not allowed (above 0)")
    from ..recipes.check import check_recipe
    from ..recipes.schema import load_recipe, to_plain

    loaded = load_recipe(name, overrides)
    recipe = loaded.value
    check_recipe(recipe, loaded.given)
    output = Path(recipe.output)
    to = options.to or output / "server"
    if options.to is None and not output.is_dir():
        raise ValueError(f"--to: not given, and there is no run in {output}; name a folder for the report")
    if to.resolve() == output.resolve():
        raise ValueError(f"--to: {to} holds our own measurement; choose another folder")
    from ..eval.prompts import read_heldout

    read_heldout(recipe.eval)
    from ..eval.server_bench import run_server_bench
    from .pipeline import console

    return run_server_bench(
        recipe.target, recipe.eval, to, server=options.server, server_plain=options.server_plain, grid=options.grid,
        ours=output, model=options.model, timeout=options.timeout, recipe=to_plain(recipe),
        template_args=recipe.data.template_args, system=recipe.data.system, console=console(),
    )  # fmt: skip
