"""What `draftsmith calibrate` shows: report.json, a self-contained report.html, reliability.png, a table in the terminal."""

from __future__ import annotations

import base64
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich import box
from rich.console import Console
from rich.table import Table

from .figures import GRID, INK, LOSS, MUTED, STYLE, WIN

Record = dict[str, Any]
BEFORE, AFTER = "#d55e00", WIN
LEAST = 20  # bins of fewer observations are drawn faint: they say little
NAMES = {"none": "none", "sts": "STS", "platt": "Platt", "isotonic": "isotonic"}


def write_report(report: Record, folder: Path) -> Path:
    """Write report.json, reliability.png and report.html into `folder`, each atomically; returns the HTML's path."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False, default=str) + "\n"
    with matplotlib.rc_context(STYLE):
        figures = {"reliability": reliability(report), "errors": errors(report)}
        _write(folder / "report.json", text.encode())
        _write(folder / "reliability.png", _render(figures["reliability"], "png"))
        sources = {name: _uri(_render(figure, "svg")) for name, figure in figures.items()}
    return _write(folder / "report.html", render_html(json.loads(text), sources).encode())


def render_html(report: Record, sources: dict[str, str]) -> str:
    """The page, figures inline as data URIs `sources` (reliability, errors)."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"percent": percent, "number": number}
    source = resources.files("draftsmith.eval").joinpath("calibration.html").read_text(encoding="utf-8")
    return jinja.from_string(source).render(report=report, figures=sources, names=NAMES, verdict=verdict(report))


def verdict(report: Record) -> str:
    """One sentence: whether every slot of every setting keeps to the goal."""
    worst = max(entry["after"]["worst_ece"] for entry in report["entries"])
    raw = max(entry["before"]["worst_ece"] for entry in report["entries"])
    word = "met" if report["goal_met"] else "MISSED"
    return (
        f"goal {word}: the largest calibration error of the cumulative survival, over slots and settings, is {percent(worst)} "
        f"(goal {percent(report['goal'])}, uncalibrated {percent(raw)})"
    )


def print_summary(report: Record, html: Path, stored: Path, console: Console) -> None:
    """One line per setting and slot, pooled over domains, and where things lie."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in (
        "kind",
        "slot",
        "n",
        "survives",
        "ECE\nbefore",
        "ECE\nafter",
        "chance",
        "AUROC",
        "Brier\nbefore",
        "Brier\nafter",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report["entries"]:
        for first, before, after in _pairs(entry, "all"):
            style = "red" if (after["ece"] or 0.0) > report["goal"] else None
            table.add_row(
                entry["label"] if first else "", NAMES[entry["kind"]] if first else "", str(after["slot"]),
                str(after["observations"]), percent(after["mean_label"]), percent(before["ece"]), percent(after["ece"]),
                percent(after["ece_floor"]), number(after["auroc"]), number(before["brier"], 4), number(after["brier"], 4),
                style=style,
            )  # fmt: skip
    console.print(table)
    for entry in report["entries"]:
        shown = ", ".join(f"{NAMES[k]} {percent(sum(v) / len(v))}" for k, v in entry["cross_validation"].items())
        console.print(f"{entry['label']}: mean ECE, cross-validated on the calibration part: {shown}")
    console.print(verdict(report), style="green" if report["goal_met"] else "bold red")
    console.print(f"calibration: {stored}", soft_wrap=True)
    console.print(f"report: {html}", soft_wrap=True)


def _pairs(entry: Record, domain: str) -> list[tuple[bool, Record, Record]]:
    before, after = ([row for row in entry[side]["metrics"] if row["domain"] == domain] for side in ("before", "after"))
    return [(i == 0, b, a) for i, (b, a) in enumerate(zip(before, after, strict=True))]


# ---- figures --------------------------------------------------------------------------------------------------------


def reliability(report: Record) -> Figure:
    """Realised against predicted survival, before and after: one column per slot, one row per setting. The area of a point is
    its share of the observations."""
    entries = report["entries"]
    slots = len(entries[0]["before"]["reliability"])
    figure = Figure(
        figsize=(1.1 + 1.75 * slots, 0.9 + 2.15 * len(entries)), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.04)
    )
    axes: list[list[Axes]] = figure.subplots(len(entries), slots, squeeze=False, sharex=True, sharey=True).tolist()
    for row, entry in zip(axes, entries, strict=True):
        for k, axis in enumerate(row):
            axis.plot([0, 1], [0, 1], color=MUTED, lw=1, zorder=1)
            for side, colour, marker in (("before", BEFORE, "s"), ("after", AFTER, "o")):
                _curve(axis, entry[side]["reliability"][k], colour, marker)
            before, after = entry["before"]["ece"][k], entry["after"]["ece"][k]
            axis.set_title(f"slot {k + 1}: {100 * before:.1f} → {100 * after:.1f} %", fontsize=9.5, pad=5)
            axis.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            axis.set_xticklabels(("0", ".5", "1"))
            axis.set_yticklabels(("0", ".5", "1"))
            axis.grid(color=GRID)
        row[0].set_ylabel(f"{entry['label']}\n{NAMES[entry['kind']]}\n\nrealised")
    for axis in axes[-1]:
        axis.set_xlabel("predicted")
    handles = [
        Line2D([], [], color=BEFORE, marker="s", mfc="white", lw=1.2, label="uncalibrated"),
        Line2D([], [], color=AFTER, marker="o", lw=1.5, label="calibrated"),
        Line2D([], [], color=MUTED, lw=1, label="perfect"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(
        "Survival of the draft's first k tokens, on evaluation prompts (title: ECE before → after)",
        fontsize=10.5, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _curve(axis: Axes, bins: list[list[float]], colour: str, marker: str) -> None:
    total = sum(n for _, _, n in bins)
    firm = [point for point in bins if point[2] >= LEAST]
    if firm:
        axis.plot([p for p, _, _ in firm], [a for _, a, _ in firm], color=colour, lw=1.2, zorder=2)
    for predicted, actual, n in bins:
        axis.plot(
            predicted, actual, marker, ms=2.5 + 8 * (n / total) ** 0.5, color=colour, mec=colour,
            mfc="white" if marker == "s" else colour, alpha=1.0 if n >= LEAST else 0.25, zorder=3,
        )  # fmt: skip


def errors(report: Record) -> Figure:
    """ECE per slot before and after, pooled (bars) and per domain after (dots), with the goal and the level of chance."""
    entries = report["entries"]
    figure = Figure(figsize=(9.4, 0.7 + 2.5 * len(entries)), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1))
    axes: list[list[Axes]] = figure.subplots(len(entries), 1, squeeze=False, sharex=True).tolist()
    for (axis,), entry in zip(axes, entries, strict=True):
        slots = range(1, len(entry["after"]["ece"]) + 1)
        axis.bar([k - 0.2 for k in slots], [100 * e for e in entry["before"]["ece"]], width=0.36, color=BEFORE, zorder=2)
        axis.bar([k + 0.2 for k in slots], [100 * e for e in entry["after"]["ece"]], width=0.36, color=AFTER, zorder=2)
        for row in entry["after"]["metrics"]:
            if row["domain"] == "all":
                floor = 100 * (row["ece_floor"] or 0.0)
                axis.plot([row["slot"] + 0.02, row["slot"] + 0.38], [floor, floor], color=INK, lw=1.6, zorder=4)
            elif row["ece"] is not None:
                axis.plot(row["slot"] + 0.2, 100 * row["ece"], "o", mfc="white", mec=INK, ms=3.6, mew=0.9, zorder=5)
        axis.axhline(100 * report["goal"], color=LOSS, lw=1, ls="--", zorder=3)
        axis.set_title(f"{entry['label']}: {NAMES[entry['kind']]}", pad=6)
        axis.set_ylabel("ECE, %")
        axis.set_xticks(list(slots))
        axis.grid(axis="y", color=GRID)
    axes[-1][0].set_xlabel("draft slot")
    handles = [
        Patch(color=BEFORE, label="uncalibrated"), Patch(color=AFTER, label="calibrated"),
        Line2D([], [], ls="", marker="o", mfc="white", mec=INK, ms=4, label="one domain, calibrated"),
        Line2D([], [], color=INK, lw=1.6, label="by chance"), Line2D([], [], color=LOSS, lw=1, ls="--", label="goal"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


# ---- small things ---------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """0.0123 as "1.2 %"."""
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    """Fixed digits, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(buffer, format=kind, dpi=130, metadata=metadata, bbox_inches="tight", pad_inches=0.08)
    return buffer.getvalue()


def _uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _write(path: Path, content: bytes) -> Path:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
    return path
