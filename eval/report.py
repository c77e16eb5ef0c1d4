"""report.json (schema 1) and one self-contained report.html from what was measured. Computes nothing that it does not show."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from . import figures
from .stats import geometric_mean
from .table import lossless_line

SCHEMA = 1
TOP_KEYS = ("schema", "environment", "target", "drafter", "recipe", "cells", "cost", "lossless")
CELL_KEYS = (
    "domain", "temperature", "concurrency", "context", "tau", "speedup", "speedup_interval", "plain_tokens_per_second",
    "speculative_tokens_per_second", "predicted_speedup", "acceptance_per_slot", "time_split",
)  # fmt: skip
MAX_POINTS = 600  # of a training curve in the report
Report = dict[str, Any]


def build_report(
    *,
    environment: Report,
    target: Report,
    drafter: Report,
    recipe: Report | None,
    cells: list[Report],
    cost: Report,
    lossless: Report,
    training: Report | None = None,
    settings: Report | None = None,
) -> Report:
    """Assemble and check the report. Raises ValueError naming the missing key, or when there is no cell."""
    report = {
        "schema": SCHEMA, "environment": environment, "target": target, "drafter": drafter, "recipe": recipe,
        "settings": settings, "summary": summarise(cells), "cells": cells, "cost": cost, "lossless": lossless,
        "training": training,
    }  # fmt: skip
    check_report(report)
    return report


def summarise(cells: list[Report]) -> list[Report]:
    """Best domain, worst domain and geometric mean over the domains, per temperature x concurrency x context setting."""
    groups: dict[tuple[Any, ...], list[Report]] = {}
    for cell in cells:
        key = (cell["temperature"], cell["concurrency"], cell.get("context_setting", cell["context"]))
        groups.setdefault(key, []).append(cell)
    out = []
    for (temperature, concurrency, context), group in groups.items():
        best, worst = max(group, key=lambda c: c["speedup"]), min(group, key=lambda c: c["speedup"])
        out.append({
            "temperature": temperature, "concurrency": concurrency, "context_setting": context, "domains": len(group),
            "mean_speedup": geometric_mean([c["speedup"] for c in group]),
            "best_domain": best["domain"], "best_speedup": best["speedup"],
            "worst_domain": worst["domain"], "worst_speedup": worst["speedup"],
            "losing_domains": [c["domain"] for c in group if c["speedup"] < 1.0],
        })  # fmt: skip
    return out


def check_report(report: Report) -> None:
    """Raises ValueError, naming the key, when a report lacks what schema 1 promises."""
    if report.get("schema") != SCHEMA:
        raise ValueError(f"schema: got {report.get('schema')!r}, allowed: {SCHEMA}")
    for key in TOP_KEYS:
        if key not in report:
            raise ValueError(f"{key}: missing in the report")
    if not report["cells"]:
        raise ValueError("cells: got an empty list, allowed: at least one cell")
    for i, cell in enumerate(report["cells"]):
        for key in CELL_KEYS:
            if key not in cell:
                raise ValueError(f"cells[{i}].{key}: missing in the report")
    for key in ("c_block", "c_step", "v"):
        if key not in report["cost"]:
            raise ValueError(f"cost.{key}: missing in the report")
    for key in ("greedy_prompts", "greedy_mismatches", "sampling_p_value"):
        if key not in report["lossless"]:
            raise ValueError(f"lossless.{key}: missing in the report")


def read_report(path: Path) -> Report:
    """A report.json of ours. Raises ValueError when it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable report: {error}") from error
    check_report(report)
    return report


def read_history(path: Path) -> Report | None:
    """Training curves out of the JSONL log: {"steps": n, "series": {name: [[step, value], ..]}}; None without usable lines.

    A line is one JSON object with "step" and metrics; metrics need not be in every line. Later lines of the same step win (a
    resumed run), a torn last line is skipped, and long series are thinned to MAX_POINTS by keeping every n-th point.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    series: dict[str, dict[int, float]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            continue
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                series.setdefault(key, {})[step] = float(value)
    if not series:
        return None
    thinned = {}
    for key, points in series.items():
        ordered = [[step, points[step]] for step in sorted(points)]
        stride = -(-len(ordered) // MAX_POINTS)
        thinned[key] = ordered[::stride] + ([ordered[-1]] if (len(ordered) - 1) % stride else [])
    return {"steps": max(step for points in series.values() for step in points), "series": thinned}


def write_report(report: Report, folder: Path) -> Path:
    """Write report.json and report.html into `folder`, atomically; returns the path of the HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False, default=_plain) + "\n"
    _write(folder / "report.json", text)
    return _write(folder / "report.html", render_html(json.loads(text)))


def _plain(value: Any) -> Any:
    """Paths as text; arrays and numpy scalars as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _write(path: Path, text: str) -> Path:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def render_html(report: Report) -> str:
    """The page: no outside asset, figures inline. Everything shown is in report.json."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("draftsmith.eval").joinpath("report.html").read_text(encoding="utf-8")
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"number": _number, "percent": _percent}
    missing = {"verdict": None, "greedy": None, "served": None, "sampling": None}
    report = report | {
        "lossless": missing | report["lossless"],
        "cost": {"points": [report["cost"]], "verify_curve": []} | report["cost"],
    }
    return jinja.from_string(source).render(
        report=report, headline=headline(report), lossless=lossless_line(report["lossless"]), where=operating_point(report),
        figures=figures.all_figures(report), gaps=_served_differences(report), flat_recipe=_flat(report["recipe"] or {}),
        truncation=_truncation(report.get("settings") or {}),
    )  # fmt: skip


def headline(report: Report) -> Report:
    """The sentence on top: best and mean greedy speedup at the lowest concurrency, and how many cells lose."""
    first = min(report["summary"], key=lambda s: (s["temperature"], s["concurrency"], s["context_setting"]))
    cells = report["cells"]
    best = next(
        c for c in cells
        if c["domain"] == first["best_domain"] and c["temperature"] == first["temperature"]
        and c["concurrency"] == first["concurrency"] and c.get("context_setting", c["context"]) == first["context_setting"]
    )  # fmt: skip
    errors = [abs(c["predicted_speedup"] / c["speedup"] - 1.0) for c in cells if c["predicted_speedup"]]
    return {
        **first, "interval": best["speedup_interval"], "tau": best["tau"], "cells": len(cells),
        "losing": sum(c["speedup"] < 1.0 for c in cells), "winning": sum(c["speedup_interval"][0] > 1.0 for c in cells),
        "worst_prediction_error": max(errors) if errors else None,
    }  # fmt: skip


def operating_point(report: Report) -> str:
    """Hardware, threads, dtype, gamma: what every caption has to say."""
    environment = report["environment"]
    gamma = report["cost"].get("gamma", report["drafter"].get("block_size"))
    return f"{environment['hardware']}, {environment['threads']} threads, {environment['dtype']}, gamma {gamma}"


def _served_differences(report: Report) -> list[Report]:
    served = report["lossless"].get("served")
    exact = report["lossless"].get("greedy")
    found = [(part["dtype"], d) for part in (exact, served) if part for d in part["differences"]]
    seen, out = set(), []
    for dtype, difference in found:
        key = (dtype, difference["id"], difference["position"])
        if key not in seen:
            seen.add(key)
            out.append({"dtype": dtype, **difference})
    return out


def _truncation(settings: Report) -> str:
    parts = [f"top-k {settings['top_k']}"] if settings.get("top_k") else []
    parts += [f"top-p {settings['top_p']:g}"] if settings.get("top_p", 1.0) < 1.0 else []
    return ", ".join(parts) or "no truncation"


def _flat(value: Report, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        out |= _flat(item, f"{name}.") if isinstance(item, dict) and item else {name: item}
    return out


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
