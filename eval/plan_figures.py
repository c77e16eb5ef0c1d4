"""Pictures of the equation: four of the field, one of a plan, one of measured cells. PNG and SVG, no network, no torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from .equation import best_gamma, ceiling_sequential, flat_region, ridge_point, speedup_sequential
from .figures import GRID, INK, LOSS, MARKERS, MUTED, SERIES, STYLE
from .plan import Plan, best_speedups
from .roofline import Roofline

ALPHAS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.4)
FREE = "#dbe9f6"


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's peak figures: FLOP/s, bytes/s, bytes per weight. Default: H100, dense bf16."""

    name: str = "H100, dense bf16"
    peak: float = 989e12
    bandwidth: float = 3.35e12
    bytes_per_weight: float = 2.0


def draw_figures(folder: Path, *, device: Device | None = None, c: float = 0.05) -> list[Path]:
    """Write roofline, speedup_over_gamma, best_speedup and ceiling_gap as PNG and SVG; returns the paths.

    c is the drafter's cost in the second picture and the line marked in the fourth, above 0 and below 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = device or Device()
    paths = []
    with matplotlib.rc_context(STYLE):
        makers = {
            "roofline": lambda: roofline(device), "speedup_over_gamma": lambda: speedup_over_gamma(c),
            "best_speedup": best_speedup_plane, "ceiling_gap": lambda: ceiling_gap(c),
        }  # fmt: skip
        for name, make in makers.items():
            figure = make()
            paths += [_save(figure, folder / f"{name}{suffix}") for suffix in (".png", ".svg")]
    return paths


def _save(figure: Figure, path: Path) -> Path:
    # no date in the file: the same figures give the same bytes
    extra = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.08, **extra)
    return path


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12))
    axes: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False).tolist()
    return figure, axes


def _log_axis(axis: Any, ticks: list[float]) -> None:
    """Plain numbers at the given ticks of a log axis, nothing between."""
    axis.set_ticks(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _label(axis: Axes, text: str, at: tuple[float, float], offset: tuple[float, float] = (0, 0), **options: Any) -> None:
    """Text on a white ground, so that no line strikes it through."""
    box = {"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.9}
    axis.annotate(text, at, xytext=offset, textcoords="offset points", **({"fontsize": 9, "bbox": box, "zorder": 8} | options))


# ---------------------------------------------------------------------------------------------------- the four pictures


def roofline(device: Device) -> Figure:
    """Attainable arithmetic over the tokens of one pass with the ridge, and the free positions per request over concurrency."""
    figure, axes = _panels(1, 2, 11.4, 4.4)
    _roofline_panel(axes[0][0], device)
    _free_panel(axes[0][1], device)
    return figure


def _roofline_panel(axis: Axes, device: Device) -> None:
    ridge = ridge_point(device.peak, device.bandwidth) * device.bytes_per_weight / 2.0  # in tokens of one pass
    tera, last = device.peak / 1e12, 2.0 ** math.ceil(math.log2(max(16 * ridge, 4096)))
    tokens = np.geomspace(1, last, 400)
    axis.plot(tokens, tera * np.minimum(tokens / ridge, 1.0), color=INK, lw=2.2, zorder=4)
    axis.axvspan(1, ridge, color=FREE, zorder=0)
    axis.axvline(ridge, color=LOSS, lw=1.2, ls="--", zorder=2)
    points = [(1, "plain decoding, 1 request"), (8, "7 drafts, 1 request"), (8 * 8, "7 drafts, 8 requests")]
    points += [(64 * 8, "7 drafts, 64 requests")]
    on_roof = 0
    for index, (x, text) in enumerate(points):
        y = tera * min(x / ridge, 1.0)
        axis.plot(x, y, MARKERS[index], color=SERIES[index], ms=8, zorder=6)
        # on the slope the free side is below on the right, near the ridge above on the left; on the roof it is below
        side = "left" if x < ridge / 12 or x >= ridge else "right"
        offset = (9, -4.0) if side == "left" else (-9, 1.0)
        if x >= ridge:
            offset, on_roof = (-4, -10.0 - 13.0 * on_roof), on_roof + 1
        axis.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=9, ha=side,
                      va="bottom" if side == "right" else "top", color=SERIES[index])  # fmt: skip
    _label(axis, f"ridge: {ridge:.0f} tokens", (ridge, tera / ridge), (-5, 6), color=LOSS, ha="right", va="bottom",
           bbox={"fc": FREE, "ec": "none", "boxstyle": "square,pad=0.15"})  # fmt: skip
    y = 1.55 * tera
    axis.annotate("", (ridge, y), (1, y), arrowprops={"arrowstyle": "<->", "color": SERIES[0], "shrinkA": 0, "shrinkB": 0})
    # two lines: beside a low ridge there is little room
    axis.annotate(f"memory-bound:\n{max(math.floor(ridge) - 1, 0)} free speculative positions", (1, y), xytext=(2, 4),
                  textcoords="offset points", ha="left", va="bottom", fontsize=9, color=SERIES[0])  # fmt: skip
    axis.annotate("compute-bound", (last, y), xytext=(-2, 4), textcoords="offset points", ha="right", va="bottom", fontsize=9,
                  color=MUTED)  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(0.8, last), ylim=(tera / ridge * 0.6, tera * 5))
    _log_axis(axis.xaxis, [2.0**k for k in range(0, int(math.log2(last)) + 1, 2)])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("tokens in one target pass = requests x (gamma + 1)")
    axis.set_ylabel("attainable TFLOP/s")
    axis.set_title(f"Roofline of decoding ({device.name})", pad=8)
    axis.grid(color=GRID, lw=0.7)


def _free_panel(axis: Axes, device: Device) -> None:
    """Free positions per request of a 70B model (80 layers, 8 KV heads of 128, 16-bit cache)."""
    requests = np.unique(np.round(np.geomspace(1, 1024, 90)).astype(int))
    series = [(0, "short context", "-"), (8192, "8k tokens of context", "--"), (32768, "32k tokens of context", ":")]
    for index, (context, text, style) in enumerate(series):
        values = []
        for count in requests:
            line = Roofline(
                70e9, device.bytes_per_weight, device.bandwidth, device.peak, int(count), context, 80 * 8 * 128 * 2 * 2
            )
            values.append(line.tokens_at_ridge / count - 1.0)
        axis.plot(requests, values, style, color=SERIES[index], lw=2.2, label=text)
    axis.axhline(7, color=MUTED, lw=1)
    axis.annotate("7 drafts a cycle", (1000, 7), xytext=(0, 4), textcoords="offset points", fontsize=9, color=MUTED, ha="right")
    axis.set(xscale="log", yscale="log", xlim=(1, 1024), ylim=(0.5, 500))
    _log_axis(axis.xaxis, [1, 4, 16, 64, 256, 1024])
    _log_axis(axis.yaxis, [1, 2, 5, 10, 20, 50, 100, 200, 500])
    axis.set(xlabel="concurrent requests", ylabel="free speculative positions per request")
    axis.set_title("Load spends them, long contexts keep some (70B)", pad=8)
    axis.legend(fontsize=9, loc="upper right")
    axis.grid(color=GRID, lw=0.7)


def speedup_over_gamma(c: float) -> Figure:
    """S over gamma for several alpha: optimum, the lengths within 3 % of it, the ceiling 1/c."""
    figure, axes = _panels(1, 1, 10.0, 4.8)
    axis = axes[0][0]
    last = max(12, min(2 * best_gamma(ALPHAS[0], c)[0], 60))
    gammas = np.arange(last + 1)
    ceiling = ceiling_sequential(1.0, c)
    entries: list[Line2D] = []
    for index, alpha in enumerate(ALPHAS):
        values = [speedup_sequential(alpha, int(g), c) for g in gammas]
        gamma, best = best_gamma(alpha, c)
        colour = SERIES[index]
        axis.plot(gammas, values, color=colour, lw=1.5, zorder=3)
        low, high = flat_region(alpha, c)
        inside = gammas[low : high + 1]
        axis.plot(inside, [values[g] for g in inside], color=colour, lw=5, alpha=0.35, solid_capstyle="round", zorder=2)
        axis.plot(gamma, best, MARKERS[index], color=colour, ms=8, mec="white", mew=0.8, zorder=5)
        found = f"{best:.2f} at gamma {gamma}" if gamma else "no drafts"
        entries.append(Line2D([], [], color=colour, marker=MARKERS[index], ms=7, label=f"alpha {alpha:g}: best {found}"))
    axis.axhline(ceiling, color=LOSS, lw=1.4, ls="--")
    axis.axhline(1.0, color=INK, lw=1)
    entries += [
        Line2D([], [], color=LOSS, lw=1.4, ls="--", label=f"ceiling 1/c = {ceiling:.3g}"),
        Line2D([], [], color=INK, lw=1, label="plain decoding"),
        Line2D([], [], color=MUTED, lw=5, alpha=0.35, label="within 3 % of the best"),
    ]
    axis.set(yscale="log", xlim=(0, last), ylim=(0.5, ceiling * 1.25), xlabel="draft length gamma")
    axis.set_ylabel("speedup S, log scale")
    _log_axis(axis.yaxis, [tick for tick in (0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 50, 100) if tick <= ceiling * 1.2])
    axis.set_title(f"Speedup over draft length: the optimum is flat (sequential drafter, c = {c:g})", pad=8)
    axis.grid(color=GRID, lw=0.7)
    axis.legend(handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, labelspacing=0.8)
    return figure


def best_speedup_plane() -> Figure:
    """Best S over the (alpha, c) plane with the line alpha = c, beyond which no length helps."""
    figure, axes = _panels(1, 1, 7.6, 5.6)
    axis = axes[0][0]
    alpha, c = np.linspace(0.0, 0.99, 200), np.linspace(0.01, 1.0, 200)
    values, _ = best_speedups(alpha[None, :], c[:, None], longest=200)
    levels = np.geomspace(1.0, 20.0, 40)
    # cividis: made for colour-blind readers, even in lightness
    shade = axis.contourf(alpha, c, np.clip(values, 1.0, 20.0), levels=levels, cmap="cividis", norm="log")
    lines = axis.contour(alpha, c, values, levels=[1.1, 1.25, 1.5, 2, 3, 5, 10], colors="white", linewidths=1.1)
    # where each line of equal S crosses a slanted ray: labels side by side instead of over one another
    spots = [
        _crossing(level, c_at)
        for level, c_at in ((1.1, 0.45), (1.25, 0.38), (1.5, 0.31), (2, 0.22), (3, 0.13), (5, 0.07), (10, 0.028))
    ]
    axis.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=9, manual=spots)
    axis.fill_between([0, 1], [0, 1], [1.01, 1.01], color="#f3f4f6", zorder=3, lw=0)
    axis.plot([0, 1], [0, 1], color=LOSS, lw=2.2, zorder=4)
    axis.text(0.6, 0.625, "alpha = c: S = 1 starts here", rotation=math.degrees(math.atan(5.0 / 6.1)), rotation_mode="anchor",
              ha="center", va="bottom", fontsize=9.5, color=LOSS, zorder=5)  # fmt: skip
    axis.text(
        0.3, 0.82, "no draft length helps:\nbest is plain decoding, S = 1", ha="center", va="center", fontsize=10, zorder=5
    )
    for a, b, mark in ((0.8, 0.05, "o"), (0.95, 0.05, "s")):
        gamma, best = best_gamma(a, b)
        axis.plot(
            a, b, mark, mfc="white", mec=INK, ms=7, zorder=7, label=f"alpha {a:g}, c {b:g}: S {best:.1f} at gamma {gamma}"
        )
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, 0.7), fontsize=9, labelcolor=INK).set_zorder(9)
    axis.set(xlim=(0, 0.99), ylim=(0.01, 1), xlabel="acceptance alpha, equal in every slot")
    axis.set_ylabel("c = one draft step / one target step")
    axis.set_title("Best speedup over acceptance and cost", pad=8)
    ticks = [1, 1.5, 2, 3, 5, 10, 20]
    bar = figure.colorbar(shade, ax=axis, ticks=ticks, label="best S over gamma, log scale")
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    return figure


def _crossing(level: float, c: float) -> tuple[float, float]:
    """(alpha, c) where the best S at this c is `level`."""
    alpha = np.linspace(0.0, 0.999, 2000)
    values, _ = best_speedups(alpha, np.full(alpha.shape, c))
    return float(np.interp(level, values, alpha)), c


def ceiling_gap(mark: float) -> Figure:
    """Best S beside the ceiling 1/c over c, and which share of the ceiling is reached."""
    figure, axes = _panels(1, 2, 11.4, 4.6)
    left, right = axes[0]
    c = np.geomspace(0.01, 1.0, 300)
    left.plot(c, 1.0 / c, color=LOSS, lw=2, ls="--")
    left.annotate("ceiling 1/c", (0.0125, 80), xytext=(8, 2), textcoords="offset points", fontsize=9.5, color=LOSS)
    for index, alpha in enumerate(ALPHAS[:5]):
        values, _ = best_speedups(np.full(c.shape, alpha), c)
        colour = SERIES[index]
        for axis, series in ((left, values), (right, 100.0 * values * c)):
            axis.plot(c, series, color=colour, lw=1.9)
            every = slice(20 + 9 * index, None, 60)
            axis.plot(c[every], series[every], MARKERS[index], color=colour, ms=5)
    at = [(alpha, best_gamma(alpha, mark)[1]) for alpha in (0.95, 0.8)]
    top = 1.0 / mark
    left.axvline(mark, color=MUTED, lw=1)
    left.plot(mark, top, "o", mfc="white", mec=LOSS, ms=7, zorder=6)
    # the numbers go into corners that no curve reaches, whatever c is marked
    _label(left, f"at c = {mark:g}: ceiling {top:.3g}", (0.95, 85), color=LOSS, ha="right")
    for line, (alpha, best) in enumerate(at):
        colour = SERIES[ALPHAS.index(alpha)]
        left.plot(mark, best, "o", mfc="white", mec=colour, ms=7, zorder=6)
        _label(left, f"alpha {alpha:g}: {best:.1f}", (0.95, (58, 40)[line]), color=colour, ha="right")
        right.plot(mark, 100.0 * best * mark, "o", mfc="white", mec=colour, ms=7, zorder=6)
        _label(right, f"{100.0 * best * mark:.0f} % (alpha {alpha:g})", (0.011, 90 - 7 * line), color=colour)
    right.axvline(mark, color=MUTED, lw=1)
    right.axhline(100, color=LOSS, lw=2, ls="--")
    for axis in (left, right):
        axis.set(xscale="log", xlim=(0.01, 1.0), xlabel="c = one draft step / one target step")
        _log_axis(axis.xaxis, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
        axis.grid(color=GRID, lw=0.7)
    left.set(yscale="log", ylim=(0.9, 110), ylabel="speedup, log scale")
    _log_axis(left.yaxis, [1, 2, 3, 5, 10, 20, 50, 100])
    left.set_title("Best speedup under its ceiling", pad=8)
    right.set(ylim=(0, 108), ylabel="best S as a share of 1/c, %")
    right.set_title("Share of the ceiling that is reached", pad=8)
    handles = [
        Line2D([], [], color=SERIES[i], marker=MARKERS[i], ms=5, label=f"alpha {alpha:g}") for i, alpha in enumerate(ALPHAS[:5])
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


# ------------------------------------------------------------------------------------------------- a plan, measured cells


def plot_plan(plan: Plan, title: str, path: Path) -> Path:
    """S over gamma of one point with optimum, flat region, ceiling and arithmetic; the suffix of `path` chooses the format."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(1, 1, 7.6, 4.4)
        axis = axes[0][0]
        low, high = plan.region
        last = min(plan.gammas[-1], max(2 * high, 10))
        shown = slice(0, last + 1)
        marker = "o" if last <= 30 else ""
        axis.axvspan(low - 0.5, high + 0.5, color=FREE, zorder=0, label=f"within {100 * plan.within:g} % of the best")
        axis.plot(plan.gammas[shown], plan.speedup[shown], color=SERIES[0], marker=marker, ms=4, lw=1.9, label="speedup S")
        axis.plot(plan.gammas[shown], plan.arithmetic[shown], color=SERIES[1], lw=1.4, ls="--", label="operations per token")
        axis.plot(plan.best_gamma, plan.best_speedup, "D", color=SERIES[0], mec=INK, ms=8, zorder=6)
        side = "left" if plan.best_gamma < 0.12 * last else "right" if plan.best_gamma > 0.88 * last else "center"
        _label(axis, f"gamma {plan.best_gamma}: S {plan.best_speedup:.2f}", (plan.best_gamma, plan.best_speedup),
               ({"left": 8, "right": -4}.get(side, 0), 10), ha=side, fontweight="bold")  # fmt: skip
        axis.axhline(1.0, color=INK, lw=1)
        top = max(max(plan.speedup[shown]) * 1.3, 1.6)
        if plan.ceiling <= 1.6 * top:
            top = max(top, plan.ceiling * 1.1)
            axis.axhline(plan.ceiling, color=LOSS, lw=1.4, ls=":", label=f"ceiling {plan.ceiling:.2f}")
        elif math.isfinite(plan.ceiling):
            axis.plot([], [], color=LOSS, lw=1.4, ls=":", label=f"ceiling {plan.ceiling:.1f} (above)")
        axis.set(xlim=(-0.5, last + 0.5), ylim=(0, top), xlabel="draft length gamma", ylabel="times plain decoding")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_title(title, pad=8)
        axis.grid(color=GRID, lw=0.7)
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
        return _save(figure, path)


def plot_cells(rows: list[dict[str, Any]], path: Path, *, most: int = 12) -> Path:
    """S over gamma of every cell, one panel per temperature and context (at most `most`); hollow markers were measured.

    The curves of a panel are domains or, where there is only one, concurrencies. They show decoding without prefill unless the
    cell knows its prefill. ValueError without a cell that has acceptance and costs.
    """
    rows = [row for row in rows if row["plan"] is not None]
    series = "domain" if len({row["domain"] for row in rows}) > 1 else "concurrency"
    split = ["source", "temperature", "context_setting"] + (["concurrency"] if series == "domain" else [])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in split), []).append(row)
    if not groups:
        raise ValueError("--plot: got no cell with acceptance and costs, allowed: at least one")
    chosen = list(groups.items())[:most]
    names = list(dict.fromkeys(row[series] for _, group in chosen for row in group))
    columns = 2 if len(chosen) == 4 else min(len(chosen), 3)
    lines = -(-len(chosen) // columns)
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(lines, columns, max(4.2 * columns, 6.4), 0.7 + 3.2 * lines)
        flat = [axis for line in axes for axis in line]
        for axis, (_, group) in zip(flat, chosen, strict=False):
            for row in group:
                _cell_curve(axis, row, names.index(row[series]))
            first = group[0]
            where = [f"T = {first['temperature']:g}"] if first["temperature"] is not None else []
            where += [f"context {first['context_setting']}"] if first["context_setting"] else []
            where += [f"concurrency {first['concurrency']}"] if series == "domain" and first["concurrency"] else []
            axis.axhline(1.0, color=INK, lw=1)
            axis.set_title(", ".join(where), pad=6)
            axis.set_xlabel("draft length gamma")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(color=GRID, lw=0.7)
        for axis in flat[len(chosen) :]:
            axis.set_visible(False)
        for line in axes:
            line[0].set_ylabel("speedup S")
        labels = [str(name) if series == "domain" else f"concurrency {name}" for name in names]
        handles = [Line2D([], [], color=SERIES[i % 8], marker=MARKERS[i % 8], ms=5, label=x) for i, x in enumerate(labels)]
        handles += [Line2D([], [], ls="", marker="o", mfc="white", mec=MUTED, ms=7, label="measured")]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=9)
        return _save(figure, path)


def _cell_curve(axis: Axes, row: dict[str, Any], index: int) -> None:
    plan, colour, marker = row["plan"], SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    # the whole request where its prefill is known: the same quantity as the measured one
    curve = row.get("request_speedup") or plan.speedup
    axis.plot(plan.gammas, curve, color=colour, marker=marker, ms=4, lw=1.6)
    measured = row["measured_by_gamma"] or ({row["gamma"]: row["measured"]} if row["gamma"] and row["measured"] else {})
    for gamma, value in measured.items():
        if gamma:
            axis.plot(gamma, value, marker, mfc="white", mec=colour, mew=1.6, ms=9, zorder=6)
