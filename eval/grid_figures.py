"""Figures of the operating-point grid as inline SVG (data URIs): heat maps, prediction, serving curve, time split."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from .figures import GRID, INK, LOSS, MARKERS, MUTED, SERIES, STYLE, WIN
from .figures import PARTS as PART_COLOURS
from .grid_cells import PLAIN, SCHEDULED

Report = dict[str, Any]
DIVERGING = LinearSegmentedColormap.from_list(  # the middle is 1.0
    "speed", [(0.0, LOSS), (0.3, "#f0b9ac"), (0.5, "#fbfaf8"), (0.66, "#b9d2ea"), (0.85, WIN), (1.0, "#1b4a80")]
)
LENGTHS = LinearSegmentedColormap.from_list("length", ["#f4f1ea", "#bfd8c8", "#5fa38a", "#1f6f5c"])
ARITHMETIC = LinearSegmentedColormap.from_list("arithmetic", ["#fbfaf8", "#f2d6a2", "#d68a3c", "#8f4a17"])
TIMES = PART_COLOURS | {"schedule": "#c8452f"}


def all_figures(report: Report) -> dict[str, Report]:
    """{name: {"src", "alt"}}: speedup, best, ratio, lengths, arithmetic, prediction, serving, time."""
    makers: dict[str, tuple[Callable[[Report], Figure | None], str]] = {
        "speedup": (speedup_map, "Heat map of the scheduled speedup over concurrency and context, per temperature"),
        "best": (best_map, "Heat map of the best constant draft length over concurrency and context, per temperature"),
        "ratio": (ratio_map, "Heat map of scheduled throughput over that of the best constant choice"),
        "lengths": (length_map, "Heat map of the mean draft length that the scheduler verified"),
        "arithmetic": (arithmetic_map, "Heat map of operations per emitted token relative to plain decoding"),
        "prediction": (prediction, "Predicted against measured speedup of every side of every cell"),
        "serving": (serving, "Throughput against speed per user for plain, best fixed and scheduled decoding"),
        "time": (time_split, "Where the time of a scheduled cycle goes, per cell"),
    }
    out: dict[str, Report] = {}
    with matplotlib.rc_context(STYLE):
        for name, (make, alt) in makers.items():
            figure = make(report)
            if figure is not None:
                out[name] = {"src": _data_uri(figure), "alt": alt}
    return out


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12))
    axes: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False).tolist()
    return figure, axes


def _values(cells: Sequence[Report], key: str) -> list[Any]:
    """Distinct values of a key, ascending where they are numbers, in order of appearance otherwise."""
    found = list(dict.fromkeys(cell[key] for cell in cells))
    return found if isinstance(found[0], str) else sorted(found)


def _label(temperature: float) -> str:
    return "T = 0 (greedy)" if temperature == 0.0 else f"T = {temperature:g} (sampled)"


# ---- heat maps --------------------------------------------------------------------------------------------------------


def speedup_map(report: Report) -> Figure:
    """S of the scheduled side; the small line is its 95 % interval."""

    def note(cell: Report) -> tuple[str, str]:
        low, high = cell["speedup_interval"]
        return f"{cell['speedup']:.2f}", f"{low:.2f} to {high:.2f}"

    values = [cell["speedup"] for cell in report["cells"]]
    return _maps(report, lambda c: c["speedup"], note, *_around_one(values), "speedup over plain")


def best_map(report: Report) -> Figure:
    """The constant draft length with the highest throughput; the small line is its speedup."""
    gammas = sorted({_gamma(side) for cell in report["cells"] for side in cell["sides"] if side != SCHEDULED})
    norm = Normalize(0, max(gammas[-1], 1))

    def note(cell: Report) -> tuple[str, str]:
        name = "plain" if cell["best_gamma"] == 0 else f"{cell['best_gamma']}"
        return name, "" if cell["best_gamma"] == 0 else f"S {cell['best_speedup']:.2f}"

    return _maps(report, lambda c: c["best_gamma"], note, LENGTHS, norm, "best constant draft length", ticks=gammas)


def ratio_map(report: Report) -> Figure:
    """Scheduled over the best of plain and every fixed length; the small line is its 95 % interval."""

    def note(cell: Report) -> tuple[str, str]:
        low, high = cell["ratio_interval"]
        return f"{cell['ratio_to_best']:.3f}", f"{low:.2f} to {high:.2f}"

    values = [cell["ratio_to_best"] for cell in report["cells"]]
    return _maps(report, lambda c: c["ratio_to_best"], note, *_around_one(values, 0.06), "scheduled / best constant")


def length_map(report: Report) -> Figure:
    """Mean verified draft length of the scheduled side; the small line is the share of steps without any draft."""

    def value(cell: Report) -> float:
        return cell["sides"][SCHEDULED]["length_mean"]

    def note(cell: Report) -> tuple[str, str]:
        return f"{value(cell):.1f}", f"{100 * cell['sides'][SCHEDULED]['plain_share']:.0f} % plain"

    most = max([1.0, *(value(cell) for cell in report["cells"])])
    return _maps(report, value, note, LENGTHS, Normalize(0, most), "mean length verified")


def arithmetic_map(report: Report) -> Figure | None:
    """Counted operations per emitted token, scheduled over plain; the small line is that of the best constant choice."""
    if report["cells"][0]["sides"][SCHEDULED]["arithmetic"] is None:
        return None

    def value(cell: Report) -> float:
        return cell["sides"][SCHEDULED]["arithmetic"]

    def note(cell: Report) -> tuple[str, str]:
        return f"{value(cell):.2f}", f"best {cell['sides'][cell['best']]['arithmetic']:.2f}"

    most = max([1.5, *(value(cell) for cell in report["cells"])])
    return _maps(report, value, note, ARITHMETIC, Normalize(1.0, most), "operations per token, plain = 1")


def _around_one(values: Sequence[float], least: float = 0.15) -> tuple[Colormap, Normalize]:
    """A colour means the same distance from 1 on both sides; the scale shows the part that occurs, and 1."""
    reach = max([least, *(abs(value - 1.0) for value in values)])
    low, high = min([*values, 1.0 - 0.2 * least]), max([*values, 1.0 + 0.2 * least])
    places = np.linspace(low, high, 256)
    return ListedColormap(DIVERGING(0.5 + 0.5 * (places - 1.0) / reach)), Normalize(low, high)


def _gamma(side: str) -> int:
    return 0 if side == PLAIN else int(side.removeprefix("fixed-"))


def _maps(
    report: Report, value: Callable[[Report], float], note: Callable[[Report], tuple[str, str]], colours: Colormap,
    norm: Normalize, label: str, *, ticks: Sequence[float] | None = None,
) -> Figure:  # fmt: skip
    """One panel per temperature (columns) and domain (rows): concurrency along x, context along y."""
    cells = report["cells"]
    domains, temperatures = _values(cells, "domain"), _values(cells, "temperature")
    loads, contexts = _values(cells, "concurrency"), _values(cells, "context_setting")
    width = max(6.4, 1.4 + len(temperatures) * (0.5 + 0.84 * len(loads)))
    figure, axes = _panels(len(domains), len(temperatures), width, 0.75 + len(domains) * (0.85 + 0.62 * len(contexts)))
    image = None
    for i, domain in enumerate(domains):
        for j, temperature in enumerate(temperatures):
            axis = axes[i][j]
            chosen = [c for c in cells if c["domain"] == domain and c["temperature"] == temperature]
            grid = np.full((len(contexts), len(loads)), np.nan)
            for cell in chosen:
                grid[contexts.index(cell["context_setting"]), loads.index(cell["concurrency"])] = value(cell)
            image = axis.imshow(np.ma.masked_invalid(grid), cmap=colours, norm=norm, aspect="auto")
            for cell in chosen:
                x, y = loads.index(cell["concurrency"]), contexts.index(cell["context_setting"])
                _write(axis, x, y, *note(cell), colours(norm(value(cell))))
            _mark(axis, report["summary"]["stops_paying"], domain, temperature, loads, contexts)
            axis.set_xticks(range(len(loads)), [str(load) for load in loads])
            axis.set_yticks(range(len(contexts)), [str(c) if c else "as is" for c in contexts])
            axis.tick_params(length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
            axis.set_title(_label(temperature) + ("" if len(domains) == 1 else f", {domain}"), pad=7)
            axis.set_xlabel("concurrency" if i == len(domains) - 1 else "")
            axis.set_ylabel("context" if j == 0 else "")
    bar = figure.colorbar(image, ax=[axis for line in axes for axis in line], label=label, shrink=0.92, aspect=18, pad=0.02)
    bar.outline.set_visible(False)
    if ticks is not None:
        bar.set_ticks(list(ticks))
    _legend(figure, report["summary"]["stops_paying"], loads[-1])
    return figure


def _legend(figure: Figure, stops: Sequence[Report], last: int) -> None:
    found = [row["concurrency"] for row in stops if row["concurrency"] is not None]
    if not found:
        return
    handles = [Patch(fill=False, ec=INK, lw=2.0, label="speculation stops paying here: no fixed draft length beats plain")]
    if min(found) < last:
        handles.append(Patch(fill=False, ec=MUTED, lw=0.0, hatch="//", label="nor at higher load"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8.5)


def _write(axis: Axes, x: int, y: int, large: str, small: str, colour: tuple[float, ...]) -> None:
    red, green, blue = colour[:3]
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
    axis.text(x, y - (0.12 if small else 0.0), large, ha="center", va="center", fontsize=10.5, fontweight="bold", color=ink)
    if small:
        axis.text(x, y + 0.24, small, ha="center", va="center", fontsize=7, color=ink)


def _mark(
    axis: Axes, stops: Sequence[Report], domain: str, temperature: float, loads: Sequence[int], contexts: Sequence[int]
) -> None:
    """A frame around the cell from which speculation no longer pays, dots on those after it."""
    for row in stops:
        if (row["domain"], row["temperature"]) != (domain, temperature) or row["concurrency"] is None:
            continue
        y, first = contexts.index(row["context_setting"]), loads.index(row["concurrency"])
        axis.add_patch(Rectangle((first - 0.46, y - 0.46), 0.92, 0.92, fill=False, ec=INK, lw=2.0, zorder=4))
        for x in range(first + 1, len(loads)):
            box = Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, ec="#c3ccd5", lw=0.0, hatch="//", zorder=1)
            axis.add_patch(box)


# ---- prediction, serving, time ----------------------------------------------------------------------------------------


def prediction(report: Report) -> Figure | None:
    """Predicted against measured speedup: scheduled filled, fixed lengths hollow; the band is 10 %."""
    cells = report["cells"]
    points = [
        (side["speedup"], side["predicted_speedup"], name) for cell in cells for name, side in cell["sides"].items()
        if name != PLAIN and side["predicted_speedup"] is not None
    ]  # fmt: skip
    if not points:
        return None
    figure, axes = _panels(1, 1, 6.6, 4.3)
    axis = axes[0][0]
    values = [value for x, y, _ in points for value in (x, y)]
    low, high = 0.92 * min(values), 1.06 * max(values)
    line = [low, high]
    axis.fill_between(line, [0.9 * v for v in line], [1.1 * v for v in line], color=GRID, lw=0, label="within 10 %")
    axis.plot(line, line, color=MUTED, lw=1)
    for bound in (axis.axhline, axis.axvline):
        bound(1.0, color=LOSS, lw=0.9, ls=":")
    names = [name for name in dict.fromkeys(name for _, _, name in points) if name != SCHEDULED]
    for i, name in enumerate(names):
        xs, ys = zip(*[(x, y) for x, y, side in points if side == name], strict=True)
        colour = SERIES[(i + 1) % len(SERIES)]
        axis.plot(xs, ys, MARKERS[(i + 1) % len(MARKERS)], mfc="white", mec=colour, mew=1.1, ms=5, ls="", label=_name(name))
    xs, ys = zip(*[(x, y) for x, y, side in points if side == SCHEDULED], strict=True)
    axis.plot(xs, ys, "o", color=SERIES[0], ms=6, ls="", label="scheduled", zorder=4)
    axis.set(xlim=(low, high), ylim=(low, high), xlabel="measured speedup", ylabel="predicted speedup", aspect="equal")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=9)
    axis.grid(color=GRID)
    return figure


def _name(side: str) -> str:
    return f"fixed {_gamma(side)}" if side.startswith("fixed-") else side


def serving(report: Report) -> Figure | None:
    """Throughput over per-user speed, one line per side along concurrency; one panel per context (rows: temperature)."""
    cells = [cell for cell in report["cells"] if cell["domain"] == report["cells"][0]["domain"]]
    contexts, temperatures = _values(cells, "context_setting"), _values(cells, "temperature")
    if len(_values(cells, "concurrency")) < 2:
        return None
    figure, axes = _panels(len(temperatures), len(contexts), max(3.1 * len(contexts), 6.4), 0.6 + 2.5 * len(temperatures))
    for i, temperature in enumerate(temperatures):
        for j, context in enumerate(contexts):
            axis = axes[i][j]
            chosen = sorted(
                (c for c in cells if c["temperature"] == temperature and c["context_setting"] == context),
                key=lambda c: c["concurrency"],
            )
            lines = {"plain": lambda c: PLAIN, "best constant": lambda c: c["best"], "scheduled": lambda c: SCHEDULED}
            styles = {"plain": (MUTED, "s", "-"), "best constant": (SERIES[1], "D", "--"), "scheduled": (SERIES[0], "o", "-")}
            for name, pick in lines.items():
                sides = [cell["sides"][pick(cell)] for cell in chosen]
                xs, ys = ([s[key] for s in sides] for key in ("tokens_per_second_per_user", "tokens_per_second"))
                colour, marker, style = styles[name]
                filled = "white" if name == "best constant" else colour
                axis.plot(xs, ys, style, marker=marker, color=colour, mfc=filled, lw=1.5, ms=5, label=name)
                if name == "scheduled":
                    for cell, x, y in zip(chosen, xs, ys, strict=True):
                        axis.annotate(
                            f"{cell['concurrency']}", (x, y), xytext=(6, 3), textcoords="offset points", fontsize=8, color=INK
                        )
            axis.margins(0.14)
            axis.set(xlim=(0, None), ylim=(0, None))
            axis.set_title(f"{_label(temperature)}, context {context or 'as is'}", fontsize=9.5)
            axis.grid(color=GRID)
            axis.set_xlabel("tok/s per user" if i == len(temperatures) - 1 else "")
            axis.set_ylabel("tok/s in all" if j == 0 else "")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def time_split(report: Report) -> Figure:
    """Stacked shares of a scheduled cycle, one bar per cell, one panel per temperature; the number is the cycle in ms."""
    cells = [cell for cell in report["cells"] if cell["domain"] == report["cells"][0]["domain"]]
    temperatures = _values(cells, "temperature")
    count = max(sum(c["temperature"] == t for c in cells) for t in temperatures)
    figure, axes = _panels(1, len(temperatures), max(4.9 * len(temperatures), 6.4), 1.1 + 0.27 * count)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        chosen = [c for c in cells if c["temperature"] == temperature]
        chosen.sort(key=lambda c: (c["context_setting"], c["concurrency"]))
        for y, cell in enumerate(chosen):
            side, left = cell["sides"][SCHEDULED], 0.0
            for part, colour in TIMES.items():
                share = side["time_split"][part] or 0.0
                axis.barh(y, share, left=left, color=colour, height=0.72)
                left += share
            axis.text(1.015, y, f"{side['cycle_ms']:.1f} ms", va="center", fontsize=8, color=INK)
        labels = [f"{c['context_setting'] or 'as is'} x {c['concurrency']}" for c in chosen]
        axis.set_yticks(range(len(chosen)), labels, fontsize=8.5)
        axis.set_ylim(len(chosen) - 0.5, -0.5)
        axis.tick_params(length=0)
        axis.set_xlim(0, 1.16)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25", "50", "75", "100 %"])
        axis.set_title(_label(temperature))
        axis.spines[["left", "bottom"]].set_visible(False)
    axes[0][0].set_ylabel("context x concurrency")
    handles = [Patch(color=colour, label=part) for part, colour in TIMES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(TIMES), fontsize=9)
    return figure
