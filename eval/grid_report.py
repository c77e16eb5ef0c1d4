"""grid.json (schema 1), one self-contained grid.html, and the table on the terminal. Shows what grid_cells.py computed."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import grid_figures
from .grid_cells import SCHEDULED, summarise_grid

SCHEMA = 1
TOP_KEYS = ("schema", "kind", "environment", "target", "drafter", "cells", "summary", "costs")
CELL_KEYS = (
    "domain", "temperature", "concurrency", "context", "context_setting", "sides", "best", "best_gamma", "ratio_to_best",
    "ratio_interval", "speedup", "speedup_interval", "predicted_speedup", "pays",
)  # fmt: skip
Report = dict[str, Any]


def build_grid(
    *,
    environment: Report,
    target: Report,
    drafter: Report,
    cells: list[Report],
    costs: Report,
    arithmetic: Report | None = None,
    plain_check: Report | None = None,
    recipe: Report | None = None,
    settings: Report | None = None,
) -> Report:
    """Assemble and check the report. ValueError naming a missing key, or when there is no cell."""
    report = {
        "schema": SCHEMA, "kind": "grid", "environment": environment, "target": target, "drafter": drafter, "costs": costs,
        "settings": settings, "summary": summarise_grid(cells) if cells else {}, "cells": cells, "arithmetic": arithmetic,
        "plain_check": plain_check, "recipe": recipe,
    }  # fmt: skip
    check_grid_report(report)
    return report


def check_grid_report(report: Report) -> None:
    """ValueError, naming the key, when a report lacks what schema 1 promises."""
    if report.get("schema") != SCHEMA or report.get("kind") != "grid":
        raise ValueError(
            f"grid: schema {report.get('schema')!r}, kind {report.get('kind')!r}: not a grid.json of schema {SCHEMA}"
        )
    for key in TOP_KEYS:
        if key not in report:
            raise ValueError(f"{key}: missing in the grid")
    if not report["cells"]:
        raise ValueError("cells: got an empty list, allowed: at least one cell")
    for i, cell in enumerate(report["cells"]):
        for key in CELL_KEYS:
            if key not in cell:
                raise ValueError(f"cells[{i}].{key}: missing in the grid")


def read_grid(path: Path) -> Report:
    """A grid.json of ours. ValueError when it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable grid: {error}") from error
    check_grid_report(report)
    return report


def write_grid(report: Report, folder: Path) -> Path:
    """Write grid.json and grid.html into `folder`, atomically; returns the path of the HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False, default=_plain) + "\n"
    _write(folder / "grid.json", text)
    return _write(folder / "grid.html", render_html(json.loads(text)))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _write(path: Path, text: str) -> Path:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def render_html(report: Report) -> str:
    """The page: no outside asset, figures inline. Everything shown is in grid.json."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("draftsmith.eval").joinpath("grid.html").read_text(encoding="utf-8")
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"number": _number, "percent": _percent}
    return jinja.from_string(source).render(
        report=report, summary=report["summary"], where=operating_point(report), figures=grid_figures.all_figures(report),
        best_cell=max(report["cells"], key=lambda c: c["speedup"]), sides=list(report["cells"][0]["sides"]),
        scheduled=SCHEDULED, name=side_name,
    )  # fmt: skip


def operating_point(report: Report) -> str:
    """Hardware, threads and precision: what every caption has to say."""
    environment = report["environment"]
    return f"{environment['hardware']}, {environment['threads']} threads, {environment['dtype']}"


def side_name(side: str) -> str:
    """A side as readers call it."""
    return f"gamma {side.removeprefix('fixed-')}" if side.startswith("fixed-") else side


def cell_line(cell: Report) -> str:
    """One line of progress for a finished cell."""
    low, high = cell["ratio_interval"]
    return (
        f"  {cell['domain']} T={cell['temperature']:g} concurrency {cell['concurrency']} context {cell['context_setting']}: "
        f"scheduled {cell['speedup']:.2f}x, best constant {side_name(cell['best'])} {cell['best_speedup']:.2f}x, "
        f"ratio {cell['ratio_to_best']:.3f} [{low:.3f}, {high:.3f}]"
    )


def print_grid(report: Report, html: Path | None, console: Console) -> None:
    """Print what grid.json says; cells that fall below 0.97 of the best constant choice in red."""
    console.print(f"{report['target']['name']}, {operating_point(report)}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    many = len({cell["domain"] for cell in report["cells"]}) > 1
    if many:
        table.add_column("domain", no_wrap=True)
    columns = (
        "T", "conc", "ctx", "plain\ntok/s", "sched.\ntok/s", "per\nuser", "S", "95 %\ninterval", "best\nfixed", "its S",
        "ratio", "tau", "mean\nlength", "plain\nsteps", "ops\nx", "pred.",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report["cells"]:
        side, (low, high) = cell["sides"][SCHEDULED], cell["speedup_interval"]
        style = "red" if cell["ratio_to_best"] < 0.97 else "green" if low > 1.0 else None
        row = [cell["domain"]] if many else []
        row += [
            f"{cell['temperature']:g}", str(cell["concurrency"]), str(cell["context_setting"] or cell["context"]),
            f"{cell['sides']['plain']['tokens_per_second']:.1f}", f"{side['tokens_per_second']:.1f}",
            f"{side['tokens_per_second_per_user']:.1f}", f"{cell['speedup']:.2f}x", f"{low:.2f}..{high:.2f}",
            "plain" if cell["best_gamma"] == 0 else str(cell["best_gamma"]), f"{cell['best_speedup']:.2f}x",
            f"{cell['ratio_to_best']:.3f}", f"{side['tau']:.2f}", f"{side['length_mean']:.1f}",
            f"{100 * side['plain_share']:.0f} %", _number(side["arithmetic"]), _number(cell["predicted_speedup"]),
        ]  # fmt: skip
        table.add_row(*row, style=style)
    console.print(table)
    for line in verdict(report["summary"]):
        console.print(line)
    if html is not None:
        console.print(f"report: {html}", soft_wrap=True)


def verdict(summary: Report) -> list[str]:
    """The summary in sentences."""
    worst, (low, high) = summary["worst_cell"], summary["worst_ratio_interval"]
    lines = [
        f"worst cell: {summary['worst_ratio_to_best_fixed']:.3f} [{low:.3f}, {high:.3f}] of the best constant choice "
        f"(T={worst['temperature']:g}, concurrency {worst['concurrency']}, context {worst['context_setting']})",
        f"over the grid: {summary['gain_over_best_fixed']:.3f} times the best single choice "
        f"(gamma {summary['best_fixed_gamma']}) by mean speedup, {summary['gain_in_total_time']:.3f} times by total time",
    ]
    if summary["predicted_within_10_percent"] is not None:
        lines.append(
            f"prediction within 10 %: {100 * summary['predicted_within_10_percent']:.0f} % of the cells, "
            f"worst error {100 * summary['worst_prediction_error']:.0f} %"
        )
    stops = [row for row in summary["stops_paying"] if row["concurrency"] is not None]
    for row in stops:
        lines.append(
            f"speculation stops paying at concurrency {row['concurrency']} "
            f"({row['domain']}, T={row['temperature']:g}, context {row['context_setting']})"
        )
    return lines if stops else [*lines, "speculation pays in every cell"]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
