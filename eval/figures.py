"""Figures of the report as inline SVG (data URIs). Text is drawn as paths, so a page looks the same everywhere."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

Report = dict[str, Any]

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ed"
WIN, OPEN, LOSS = "#2f6db5", "#9fb3c8", "#c8452f"
# Okabe-Ito: told apart by people with colour blindness; each series also has its own marker
SERIES = ("#0072b2", "#d55e00", "#009e73", "#8e5a9e", "#b58900", "#56a0c8", "#7a4b2a", "#555555")
MARKERS = "osD^vPX*"
PARTS = {"draft": "#2f6db5", "head": "#e0a030", "verify": "#5c6f82", "rest": "#c9d3dc"}
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.titlesize": 10.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "legend.frameon": False, "svg.fonttype": "path", "svg.hashsalt": "draftsmith",
}  # fmt: skip


def all_figures(report: Report) -> dict[str, Report | None]:
    """{name: {"src", "alt"} or None}: speedup, acceptance, cycle, prediction, training."""
    makers = {
        "speedup": (speedup, "Measured speedup per domain with 95 % intervals, beside the predicted one"),
        "acceptance": (acceptance, "Conditional acceptance by draft slot and domain"),
        "cycle": (cycle, "Cost of a speculative cycle in plain steps by part, beside the tokens it commits"),
        "prediction": (prediction, "Predicted against measured speedup of every cell"),
        "training": (training, "Training loss, acceptance by slot and expected tokens per cycle over steps"),
    }
    out: dict[str, Report | None] = {}
    with matplotlib.rc_context(STYLE):
        for name, (make, alt) in makers.items():
            figure = make(report)
            out[name] = None if figure is None else {"src": _data_uri(figure), "alt": alt}
    return out


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1))
    axes: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False).tolist()
    return figure, axes


def _domains(cells: list[Report]) -> list[str]:
    return list(dict.fromkeys(cell["domain"] for cell in cells))


def _setting(cell: Report) -> tuple[int, int]:
    context: int = cell["context_setting"] if "context_setting" in cell else cell["context"]
    return cell["concurrency"], context


def _first_setting(cells: list[Report]) -> list[Report]:
    """Cells of the lowest concurrency and first context: what single-setting figures show."""
    first = min(_setting(cell) for cell in cells)
    return [cell for cell in cells if _setting(cell) == first]


def _temperature(value: float) -> str:
    return "T = 0 (greedy)" if value == 0.0 else f"T = {value:g} (sampled)"


def state_colour(cell: Report) -> str:
    """Warning colour for a measured loss, grey while the interval holds 1.0, blue for a win."""
    if cell["speedup"] < 1.0:
        return LOSS
    return WIN if cell["speedup_interval"][0] > 1.0 else OPEN


def speedup(report: Report) -> Figure:
    """Bars with intervals, one panel per temperature (columns) and concurrency x context (rows)."""
    cells = report["cells"]
    settings = sorted({_setting(cell) for cell in cells})
    temperatures = sorted({cell["temperature"] for cell in cells})
    figure, axes = _panels(len(settings), len(temperatures), 9.4, 0.5 + 2.9 * len(settings))
    top = max(max(cell["speedup_interval"][1], cell["predicted_speedup"] or 0.0) for cell in cells)
    for i, setting in enumerate(settings):
        for j, temperature in enumerate(temperatures):
            chosen = [c for c in cells if _setting(c) == setting and c["temperature"] == temperature]
            axis = axes[i][j]
            _speedup_panel(axis, chosen)
            axis.set_ylim(0, max(top * 1.14, 1.25))
            axis.set_title(f"{_temperature(temperature)}, concurrency {setting[0]}{_context_note(setting[1])}", pad=8)
            if j == 0:
                axis.set_ylabel("speedup over plain")
    handles = [
        Patch(color=WIN, label="win: interval above 1"), Patch(color=OPEN, label="undecided: interval holds 1"),
        Patch(color=LOSS, label="loss: below 1"),
        Line2D([], [], ls="", marker="D", mfc="white", mec=INK, label="predicted by the equation"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _context_note(context: int) -> str:
    return f", context {context}" if context else ""


def _speedup_panel(axis: Axes, cells: list[Report]) -> None:
    axis.axhline(1.0, color=INK, lw=1.0, zorder=3)
    for x, cell in enumerate(cells):
        low, high = cell["speedup_interval"]
        value = cell["speedup"]
        axis.bar(x, value, width=0.58, color=state_colour(cell), zorder=2)
        axis.errorbar(x, value, yerr=[[max(value - low, 0)], [max(high - value, 0)]], color=INK, capsize=4, lw=1.2, zorder=4)
        peak, gap = high, 6
        if cell["predicted_speedup"] is not None:
            # beside the bar's middle, or it would sit on the error bar
            axis.plot(x + 0.2, cell["predicted_speedup"], "D", mfc="white", mec=INK, ms=5, zorder=5)
            if cell["predicted_speedup"] > high:
                peak, gap = cell["predicted_speedup"], 9
        axis.annotate(
            f"{value:.2f}×", (x, peak), xytext=(0, gap), textcoords="offset points", ha="center", fontsize=9.5,
            color=LOSS if value < 1.0 else INK, fontweight="bold", zorder=6,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},  # the line at 1.0 must not strike it through
        )  # fmt: skip
    axis.set_xticks(range(len(cells)), [cell["domain"] for cell in cells])
    axis.set_xlim(-0.6, len(cells) - 0.4)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y", color=GRID)


def acceptance(report: Report) -> Figure | None:
    """Conditional acceptance by slot; slots reached fewer than 30 times are drawn faint."""
    cells = _first_setting(report["cells"])
    if not any(cell["acceptance_per_slot"] for cell in cells):
        return None
    temperatures = sorted({cell["temperature"] for cell in cells})
    domains = _domains(cells)
    figure, axes = _panels(1, len(temperatures), 9.4, 3.3)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for cell in (c for c in cells if c["temperature"] == temperature):
            index = domains.index(cell["domain"]) % len(SERIES)
            points = [(k + 1, a) for k, a in enumerate(cell["acceptance_per_slot"]) if a is not None]
            reached = cell.get("reached_per_slot") or [30] * len(cell["acceptance_per_slot"])
            firm = [point for point in points if reached[point[0] - 1] >= 30]
            axis.plot(*zip(*points, strict=True), color=SERIES[index], lw=1, alpha=0.35) if points else None
            axis.plot([p[0] for p in points], [p[1] for p in points], MARKERS[index], color=SERIES[index], ms=5, alpha=0.35)
            if firm:
                axis.plot(
                    *zip(*firm, strict=True), MARKERS[index] + "-", color=SERIES[index], lw=1.8, ms=5.5, label=cell["domain"]
                )
        slots = max((len(c["acceptance_per_slot"]) for c in cells), default=1)
        axis.set_xticks(range(1, slots + 1))
        axis.set(ylim=(0, 1.02), xlabel="draft slot", title=_temperature(temperature))
        axis.grid(color=GRID)
    axes[0][0].set_ylabel("accepted, of those reached")
    handles = [
        Line2D([], [], color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)], label=name)
        for i, name in enumerate(domains)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(domains), 6), fontsize=9)
    return figure


def cycle(report: Report) -> Figure | None:
    """Cost of a cycle in plain steps, stacked by part; the marker is tau. Speculation wins where it lies beyond the bar."""
    cells = [c for c in _first_setting(report["cells"]) if c.get("cycle_ms") and c.get("plain_step_ms") and c["tau"]]
    if not cells:
        return None
    figure, axes = _panels(1, 1, 9.4, 1.3 + 0.34 * len(cells))
    axis = axes[0][0]
    limit = 1.16 * max(max(c["tau"], c["cycle_ms"] / c["plain_step_ms"]) for c in cells)
    for y, cell in enumerate(cells):
        left, unit = 0.0, cell["cycle_ms"] / cell["plain_step_ms"]
        for part, colour in PARTS.items():
            width = cell["time_split"][part] * unit
            axis.barh(y, width, left=left, color=colour, height=0.62, zorder=2)
            if width > 0.03 * limit:  # narrower parts have no room for their number
                light = part in ("draft", "verify")
                axis.text(
                    left + width / 2, y, f"{width:.2f}", ha="center", va="center", fontsize=8, color="white" if light else INK
                )
            left += width
        colour = LOSS if cell["tau"] < left else INK
        axis.plot([cell["tau"]] * 2, [y - 0.38, y + 0.38], color=colour, lw=2.6, zorder=4)
        axis.text(max(cell["tau"], left) + 0.012 * limit, y, f"tau {cell['tau']:.2f}", va="center", fontsize=9, color=colour)
    axis.set_yticks(range(len(cells)), [f"{c['domain']}, T = {c['temperature']:g}" for c in cells])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, limit)
    axis.set_xlabel("cost of one cycle, in steps of plain decoding; black line: tokens committed per cycle (tau)")
    axis.grid(axis="x", color=GRID)
    handles = [Patch(color=colour, label=part) for part, colour in PARTS.items()]
    handles.append(Line2D([], [], color=INK, lw=2.6, label="tau beyond the bar: faster"))
    handles.append(Line2D([], [], color=LOSS, lw=2.6, label="tau inside the bar: slower"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6, fontsize=9)
    return figure


def prediction(report: Report) -> Figure | None:
    """Predicted against measured, all cells, with the 15 % band."""
    cells = [c for c in report["cells"] if c["predicted_speedup"] is not None]
    if not cells:
        return None
    figure, axes = _panels(1, 1, 6.4, 4.2)
    axis = axes[0][0]
    values = [v for c in cells for v in (c["predicted_speedup"], *c["speedup_interval"])]
    low, high = min(values) * 0.9, max(values) * 1.1
    axis.fill_between([low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color=GRID, lw=0, label="within 15 %")
    axis.plot([low, high], [low, high], color=MUTED, lw=1)
    for bound in (axis.axhline, axis.axvline):
        bound(1.0, color=LOSS, lw=0.9, ls=":")
    domains, labelled = _domains(cells), set()
    for cell in cells:
        colour = SERIES[domains.index(cell["domain"]) % len(SERIES)]
        x, (a, b) = cell["speedup"], cell["speedup_interval"]
        axis.errorbar(x, cell["predicted_speedup"], xerr=[[max(x - a, 0)], [max(b - x, 0)]], color=colour, lw=0.9, capsize=2)
        marker = "o" if cell["temperature"] == 0.0 else "s"
        label = None if cell["domain"] in labelled else cell["domain"]
        labelled.add(cell["domain"])
        filled = colour if cell["temperature"] == 0.0 else "white"
        axis.plot(x, cell["predicted_speedup"], marker, mfc=filled, mec=colour, mew=1.5, ms=6.5, ls="", label=label)
    axis.set(xlim=(low, high), ylim=(low, high), xlabel="measured speedup", ylabel="predicted speedup", aspect="equal")
    handles, _ = axis.get_legend_handles_labels()
    handles += [Line2D([], [], ls="", marker="o", color=MUTED, label="greedy (filled)")]
    handles += [Line2D([], [], ls="", marker="s", mfc="white", mec=MUTED, label="sampled (hollow)")]
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=9)
    axis.grid(color=GRID)
    return figure


def training(report: Report) -> Figure | None:
    """Loss terms, alpha by slot, expected tau over optimiser steps: thin raw values under a smoothed line."""
    history = report.get("training")
    if not history:
        return None
    series = history["series"]
    losses = [key for key in series if key == "loss" or key.startswith("loss/")]
    alphas = sorted(
        (key for key in series if key.startswith("accept/alpha_") and key[13:].isdigit()), key=lambda k: int(k[13:])
    )
    taus = [key for key in series if key.removeprefix("val/").startswith("accept/tau")]
    groups = [("loss", losses, "loss"), ("acceptance by slot", alphas, "alpha"), ("expected tokens per cycle", taus, "tau")]
    groups = [group for group in groups if group[1]]
    if not groups:
        return None
    figure, axes = _panels(1, len(groups), 9.4, 3.2)
    ramp = matplotlib.colormaps["viridis"]
    for axis, (title, keys, label) in zip(axes[0], groups, strict=True):
        for i, key in enumerate(keys):
            colour = ramp(0.9 * i / max(len(keys) - 1, 1)) if keys is alphas else SERIES[i % len(SERIES)]
            steps, values = zip(*series[key], strict=True)
            if key.startswith("val/"):  # few points, measured on held-back text: no smoothing
                axis.plot(steps, values, "o--", color=INK, lw=1.2, ms=4, label="validation")
                continue
            axis.plot(steps, values, color=colour, lw=0.7, alpha=0.3)
            axis.plot(steps, smooth(list(values)), color=colour, lw=1.7, label=_short(key))
        axis.set(title=title, xlabel="optimiser step", ylabel=label)
        axis.set_ylim(bottom=0 if keys is not taus else 1, top=1 if keys is alphas else None)
        axis.grid(color=GRID)
        axis.legend(fontsize=8, ncols=2 if len(keys) > 4 else 1, labelspacing=0.25, columnspacing=0.9, handlelength=1.2)
    return figure


def _short(key: str) -> str:
    return key.removeprefix("loss/").removeprefix("accept/").replace("alpha_", "slot ").replace("_", " ")


def smooth(values: list[float]) -> list[float]:
    """Centred moving average over about a thirtieth of the curve; the window shrinks at both ends, so nothing lags."""
    half = len(values) // 60
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    out = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return out
