"""`draftsmith profile`: measure what cycles cost on this machine, for the scheduler."""

from __future__ import annotations

from pathlib import Path

from .allocator import keep_freed_memory
from .pipeline import console, open_run, pick_device


def run(name: str, overrides: list[str], to: Path | None, device: str = "auto") -> None:
    """Measure the cost table of a run's target and drafter; writes OUTPUT/costs.json unless `to` says otherwise.

    Raises ConfigError or ValueError before a model loads for a bad recipe, a run without a drafter, or a `to` that is a folder.
    """
    found = open_run(name, overrides, claim=False)
    path = to or found.folder / "costs.json"
    if path.is_dir():
        raise ValueError(f"--to: {str(path)!r} is a folder, give a file")
    place = pick_device(device)
    keep_freed_memory()
    from ..eval.profile import profile
    from ..models.export.native import read_config

    read_config(found.folder / "drafter")
    out = console()
    table = profile(
        found.recipe.target, found.folder / "drafter", found.recipe.eval, path, device=place,
        say=lambda line: out.print(line, style="dim"),
    )  # fmt: skip
    print_table(table, out)
    out.print(f"{path} ({table.notes['seconds']} s, {table.hardware}, {table.threads} threads, {table.dtype})")


def print_table(table, out) -> None:  # type: ignore[no-untyped-def]
    """The greedy costs as one table: milliseconds of a plain cycle, and of one that drafts and verifies the longest block."""
    from rich.table import Table

    longest = table.slots[-1]
    shown = Table("context", "rows", "plain step", f"cycle of {longest}", "draft", "verify", "rest")
    for context in table.contexts:
        for rows in table.rows:
            tokens = rows * (1 + longest)
            parts = (
                table.cycle_ms(rows, 0, context, hot=False), table.cycle_ms(rows, longest, context, hot=False),
                table.draft_ms(rows, longest, context), table.verify_ms(rows, tokens, context),
                table.rest_ms(tokens, False, rows),
            )  # fmt: skip
            shown.add_row(str(context), str(rows), *(f"{part:.1f}" for part in parts))
    out.print(shown)
