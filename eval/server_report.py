"""report.json (schema 1, kind "server") and one page for an engine behind HTTP; its cells beside ours of the same points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from . import figures, grid_figures
from .grid_cells import stops_paying
from .report import SCHEMA, check_report, summarise
from .server_cells import greedy_differences

Report = dict[str, Any]
OURS = ("speedup", "speedup_interval", "tau", "acceptance_per_slot")
FILES = ("report.json", "grid.json")


def build_server_report(
    cells: list[Report],
    kept: Sequence[Report],
    *,
    environment: Report,
    target: Report,
    servers: Report,
    settings: Report,
    recipe: Report | None = None,
    ours: Path | None = None,
    mismatched: int = 0,
) -> Report:
    """Assemble and check the report: what `bench` writes, with nothing in the places that only our own engine can fill.

    ours: folder of our own report.json and grid.json; each cell gets `ours`, our figures at its point, where there are any.
    mismatched: answers whose text did not fit the recipe's tokenizer.
    """
    measured = own_cells(ours, grid=bool(settings.get("server_grid")))
    cells = [cell | {"ours": measured.get(_point(cell))} for cell in cells]
    prompts, tokens, differences = greedy_differences(kept)
    engine = servers["speculative"]["engine"]
    report: Report = {
        "schema": SCHEMA, "kind": "server", "environment": environment, "target": target, "servers": servers,
        "drafter": {"engine": engine, "block_size": None}, "recipe": recipe, "settings": settings,
        "summary": summarise(cells) if all(cell["speedup"] is not None for cell in cells) else [], "cells": cells,
        "cost": {"c_block": None, "c_step": None, "v": None, "gamma": None},
        "lossless": {
            "greedy_prompts": prompts, "greedy_mismatches": len(differences), "sampling_p_value": None,
            "verdict": None, "greedy": None, "sampling": None,
            "served": {"dtype": None, "prompts": prompts, "tokens": tokens, "differences": differences} if prompts else None,
        },
        "warnings": warnings(cells, servers, mismatched), "training": None,
    }  # fmt: skip
    check_report(report)
    return report


def _point(cell: Report) -> tuple[Any, ...]:
    context = cell["context_setting"] if "context_setting" in cell else cell["context"]
    return cell["domain"], cell["temperature"], cell["concurrency"], context


def own_cells(folder: Path | None, *, grid: bool = False) -> dict[tuple[Any, ...], Report]:
    """Our own figures by operating point, from report.json and grid.json in `folder`; the kind asked for wins."""
    found: dict[tuple[Any, ...], Report] = {}
    for name in FILES if grid else FILES[::-1]:
        path = None if folder is None else folder / name
        if path is None or not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if content.get("kind") == "server":
            continue
        for cell in content.get("cells", ()):
            found[_point(cell)] = {key: cell.get(key) for key in OURS} | {"file": name}
    return found


def warnings(cells: Sequence[Report], servers: Report, mismatched: int) -> list[str]:
    """What a reader must know before he trusts the figures."""
    found = [f"{side}: {entry['note']}" for side, entry in servers.items() if entry["note"]]
    for side in servers:
        retried = sum(cell[f"{side}_retried"] or 0 for cell in cells)
        foreign = sum(cell[f"{side}_foreign_tokens"] or 0 for cell in cells)
        if retried:
            found.append(f"{side}: {retried} requests were repeated after a failure; their times hold the waiting")
        if foreign:
            found.append(f"{side}: the engine counted {foreign:g} tokens that this client did not ask for")
    if any(cell["tau_source"] == "gauge" for cell in cells):
        found.append("tau is a gauge of SGLang's last logging interval, not a count over the cell")
    if servers["speculative"]["engine"] and not any(cell["tau"] for cell in cells):
        found.append("the engine counted no drafts: it serves without speculation")
    if mismatched:
        found.append(f"{mismatched} answers are no texts of the recipe's tokenizer: is this the recipe's target?")
    return found


def write_server_report(report: Report, kept: Sequence[Report], folder: Path) -> Path:
    """report.json, report.html and records.json (all that was measured) in `folder`, each whole; returns the HTML's path."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "records.json", json.dumps(list(kept)) + "\n")
    text = json.dumps(report, indent=1, allow_nan=False, default=str) + "\n"
    _write(folder / "report.json", text)
    return _write(folder / "report.html", render_html(json.loads(text)))


def _write(path: Path, text: str) -> Path:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def render_html(report: Report) -> str:
    """The page: no outside asset, figures inline. Everything shown is in report.json."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("draftsmith.eval").joinpath("server.html").read_text(encoding="utf-8")
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"number": _number}
    return jinja.from_string(source).render(
        report=report, where=operating_point(report), figures=all_figures(report), engine=engine_name(report),
        beside=any(cell["ours"] for cell in report["cells"]), both="plain" in report["servers"],
    )  # fmt: skip


def engine_name(report: Report) -> str:
    """The engine as its makers write it, as far as its metrics tell."""
    return {"vllm": "vLLM", "sglang": "SGLang"}.get(report["servers"]["speculative"]["engine"], "the server")


def operating_point(report: Report) -> str:
    """What every caption has to say: the hardware is the client's, where the server may or may not run too."""
    return f"client on {report['environment']['hardware']}"


def all_figures(report: Report) -> dict[str, Report]:
    """{name: {"src", "alt"}}: bars by domain or a heat map over the grid, and acceptance by slot; those that can be drawn."""
    cells, out = report["cells"], {}
    loads, contexts = ({cell[key] for cell in cells} for key in ("concurrency", "context_setting"))
    with matplotlib.rc_context(figures.STYLE):
        if all(cell["speedup_interval"] is not None for cell in cells):
            if len(loads) * len(contexts) > 1:
                view = {"cells": cells, "summary": {"stops_paying": stops_paying(cells)}}
                out["map"] = _image(
                    grid_figures.speedup_map(view), "Heat map of the speedup over concurrency and context, per temperature"
                )
            else:
                out["speedup"] = _image(figures.speedup(report), "Measured speedup per domain with 95 % intervals")
        acceptance = figures.acceptance(report)
        if acceptance is not None:
            out["acceptance"] = _image(acceptance, "Acceptance by draft slot as the engine counts it")
    return out


def _image(figure: Any, alt: str) -> Report:
    return {"src": figures._data_uri(figure), "alt": alt}


def cell_line(cell: Report) -> str:
    """One line of progress for a finished cell."""
    rate = f"{cell['speculative_tokens_per_second']:.1f} tok/s"
    if cell["speedup"] is not None:
        low, high = cell["speedup_interval"] or (None, None)
        rate += f", {cell['speedup']:.2f}x [{_number(low)}, {_number(high)}]"
    return (
        f"  {cell['domain']:<10} T={cell['temperature']:g} concurrency {cell['concurrency']} context {cell['context']}: "
        f"{rate}, tau {_number(cell['tau'])}"
    )


def print_server(report: Report, html: Path, console: Console) -> None:
    """The table on a terminal: the engine's cells, ours beside where the same point was measured."""
    beside = any(cell["ours"] for cell in report["cells"])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("domain", no_wrap=True)
    names = ["T", "conc", "ctx", "plain\ntok/s", "spec.\ntok/s", "speedup", "95 %\ninterval", "tau", "first\ntoken ms"]
    for name in [*names, *(["ours:\nspeedup", "ours:\ntau"] if beside else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report["cells"]:
        low, high = cell["speedup_interval"] or (None, None)
        style = None if cell["speedup"] is None else "red" if cell["speedup"] < 1.0 else "green" if (low or 0) > 1.0 else None
        first = cell["speculative_first_token_s"]
        row = [
            cell["domain"], f"{cell['temperature']:g}", str(cell["concurrency"]), str(cell["context"]),
            _number(cell["plain_tokens_per_second"], 1), _number(cell["speculative_tokens_per_second"], 1),
            _number(cell["speedup"]), "-" if low is None else f"{low:.2f}..{high:.2f}", _number(cell["tau"]),
            _number(None if first is None else 1e3 * first, 0),
        ]  # fmt: skip
        own = cell["ours"] or {}
        table.add_row(*row, *([_number(own.get("speedup")), _number(own.get("tau"))] if beside else []), style=style)
    console.print(table)
    found = report["lossless"]
    if found["greedy_prompts"]:
        console.print(f"greedy answers of the two servers differ in {found['greedy_mismatches']} of {found['greedy_prompts']}")
    for line in report["warnings"]:
        console.print(f"warning: {line}", style="yellow", highlight=False)
    console.print(f"report: {html}", soft_wrap=True)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
