"""`draftsmith plan`: the equation of speculative decoding at a point, at the cells of a report, or as four pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..eval.plan import Plan, Point
    from ..eval.roofline import Roofline

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_ROWS = 26  # of the table over gamma
_BAR = 24


@dataclass(frozen=True)
class Inputs:
    """The flags, as given: lists and sizes are text, None is "not given"."""

    alpha: float | None = None
    acceptance: str | None = None
    c: float | None = None
    c_block: float | None = None
    c_step: float | None = None
    v: str | None = None
    overhead: float = 0.0
    plain_overhead: float = 0.0
    c_hat: float | None = None
    target_params: str | None = None
    drafter_params: str | None = None
    head_params: str | None = None
    bytes_per_weight: float = 2.0
    bandwidth: float | None = None
    peak: float | None = None
    concurrency: int = 1
    context: int = 0
    kv_bytes_per_token: float = 0.0
    max_gamma: int | None = None
    within: float = 0.03


def run(
    inputs: Inputs, *, report: Path | None = None, json_file: Path | None = None, plot: Path | None = None,
    figures: Path | None = None,
) -> None:  # fmt: skip
    """Check the flags, print what was asked for, write the files. ValueError names flag, value and allowed range."""
    from rich.console import Console

    check(inputs)
    _check_outputs(json_file, plot)
    console = Console()
    roofline = make_roofline(inputs)
    point_given = inputs.alpha is not None or inputs.acceptance is not None
    if report is not None and point_given:
        raise ValueError("--report: got --alpha or --acceptance beside it, allowed: one source of acceptance")
    if report is not None:
        result, draw = _from_report(report, inputs, console)
    elif point_given:
        result, draw = _from_point(inputs, roofline, console)
    elif roofline is None and figures is None:
        raise ValueError("--alpha: not given, allowed: --alpha or --acceptance with costs, --report, --figures, or sizes")
    else:
        result, draw = {}, None
    if roofline is not None:
        print_roofline(roofline, console)
    if json_file is not None:
        given = {name: value for name, value in vars(inputs).items() if value is not None}
        whole = {"schema": 1, "inputs": given, **result, "roofline": roofline.to_dict() if roofline else None}
        json_file.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"json: {json_file}", soft_wrap=True, highlight=False)
    if plot is not None:
        if draw is None:
            raise ValueError("--plot: nothing to draw, allowed: with --alpha, --acceptance or --report")
        draw(plot)
        console.print(f"plot: {plot}", soft_wrap=True, highlight=False)
    if figures is not None:
        _figures(figures, inputs, console)


# ------------------------------------------------------------------------------------------------------------- flags


def check(inputs: Inputs) -> None:
    """Every flag within its range, and no two that exclude each other."""
    _range("--alpha", inputs.alpha, 0.0, 1.0)
    for flag in ("c", "c_block", "c_step", "overhead", "plain_overhead", "c_hat", "context", "kv_bytes_per_token"):
        _range(_flag(flag), getattr(inputs, flag), 0.0, math.inf)
    for flag in ("bytes_per_weight", "bandwidth", "peak"):
        value = getattr(inputs, flag)
        if value is not None and not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"{_flag(flag)}: got {value:g}, allowed: above 0")
    _range("--concurrency", inputs.concurrency, 1, math.inf)
    _range("--max-gamma", inputs.max_gamma, 1, 100_000)
    if not 0.0 <= inputs.within < 1.0:
        raise ValueError(f"--within: got {inputs.within:g}, allowed: 0 to below 1")
    for one, other in (("alpha", "acceptance"), ("c", "c_block"), ("c", "c_step"), ("c", "head_params")):
        if getattr(inputs, one) is not None and getattr(inputs, other) is not None:
            raise ValueError(f"{_flag(other)}: got it beside {_flag(one)}, allowed: one of the two")
    if inputs.c_step is not None and inputs.c_block is None:
        raise ValueError("--c-step: got it without --c-block, allowed: both (parallel), or --c (sequential)")
    for name in ("drafter_params", "head_params"):
        if getattr(inputs, name) is not None and inputs.target_params is None:
            raise ValueError(f"{_flag(name)}: got it without --target-params, allowed: with the target's size")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _range(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        bound = f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{flag}: got {value:g}, allowed: {bound}")


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    for flag, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag}: {path.parent} is no folder, allowed: a file in a folder that exists")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: got {plot.name}, allowed: a name that ends in .png, .svg or .pdf")


def parse_size(flag: str, text: str) -> float:
    """A number of weights: 135e6, 135M, 70B."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        value = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not (value >= 0.0 and math.isfinite(value)):
        raise ValueError(f"{flag}: got {text!r}, allowed: a number of weights, such as 135e6, 135M or 70B")
    return value


def parse_acceptance(text: str) -> tuple[float, ...]:
    """0.9,0.85,0.8: conditional acceptance of slots 1, 2, ..."""
    out = []
    for k, part in enumerate(text.split(","), 1):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"--acceptance: got {part.strip()!r} for slot {k}, allowed: 0 to 1, separated by commas")
        out.append(value)
    return tuple(out)


def parse_v(text: str) -> Callable[[int], float]:
    """4:1.06,7:1.11: cost of a target pass over gamma + 1 tokens by gamma, straight lines between, v(0) = 1."""
    return _v_pairs(text)[0]


def _v_pairs(text: str) -> tuple[Callable[[int], float], int]:
    from ..eval.plan import piecewise

    pairs = []
    for part in text.split(","):
        gamma, _, value = part.partition(":")
        try:
            pair = int(gamma), float(value)
        except ValueError:
            pair = -1, math.nan
        if pair[0] < 0 or not (pair[1] > 0.0 and math.isfinite(pair[1])):
            raise ValueError(f"--v: got {part.strip()!r}, allowed: gamma:value pairs with commas, such as 4:1.06,7:1.11")
        pairs.append(pair)
    last = max(gamma for gamma, _ in pairs)
    if last < 1:
        raise ValueError(f"--v: got {text!r}, allowed: at least one pair with gamma above 0")
    return piecewise(pairs, "--v"), last


# ------------------------------------------------------------------------------------------------------------ points


def make_roofline(inputs: Inputs) -> Roofline | None:
    """From the sizes; None when no target size is given. ValueError when only some of them are."""
    from ..eval.roofline import Roofline

    if inputs.target_params is None:
        return None
    for name in ("bandwidth", "peak"):
        if getattr(inputs, name) is None:
            raise ValueError(f"{_flag(name)}: not given, allowed: --target-params with --bandwidth GB/s and --peak TFLOP/s")
    assert inputs.bandwidth is not None and inputs.peak is not None
    params = parse_size("--target-params", inputs.target_params)
    if params <= 0.0:
        raise ValueError(f"--target-params: got {inputs.target_params!r}, allowed: above 0")
    return Roofline(
        params=params, bytes_per_weight=inputs.bytes_per_weight, bandwidth=inputs.bandwidth * 1e9, peak=inputs.peak * 1e12,
        concurrency=inputs.concurrency, context=inputs.context, kv_bytes_per_token=inputs.kv_bytes_per_token,
    )  # fmt: skip


def make_point(inputs: Inputs, roofline: Roofline | None) -> tuple[Point, int | None]:
    """(the operating point, longest gamma to look at). Costs that are not given come from the sizes."""
    from ..eval.plan import Point

    costs = _costs(inputs, roofline)
    acceptance = parse_acceptance(inputs.acceptance) if inputs.acceptance is not None else ()
    limits = [(f"slots of --acceptance: {len(acceptance)}", len(acceptance))] if acceptance else []
    v: Callable[[int], float] = lambda gamma: 1.0  # noqa: E731
    if inputs.v is not None:
        v, last = _v_pairs(inputs.v)
        limits.append((f"last gamma of --v: {last}", last))
    elif roofline is not None:
        v = roofline.v
    longest = inputs.max_gamma
    if limits:
        why, most = min(limits, key=lambda limit: limit[1])
        if longest is not None and longest > most:
            raise ValueError(f"--max-gamma: got {longest}, allowed: 1 to {most} ({why})")
        longest = longest or most
    point = Point(
        alpha=inputs.alpha, acceptance=acceptance, v=v, overhead=inputs.overhead, plain_overhead=inputs.plain_overhead, **costs
    )
    return point, longest


def _costs(inputs: Inputs, roofline: Roofline | None) -> dict[str, Any]:
    """c, or c_block and c_step, and c_hat: as given, else from the sizes."""
    if inputs.c is not None:
        found: dict[str, Any] = {"c": inputs.c}
    elif inputs.c_block is not None:
        found = {"c_block": inputs.c_block, "c_step": inputs.c_step or 0.0}
    elif roofline is not None and inputs.drafter_params is not None:
        found = _costs_from_sizes(inputs, roofline)
    else:
        raise ValueError("--c: not given, allowed: --c, --c-block with --c-step, or --drafter-params with --target-params")
    if inputs.c_hat is not None:
        found["c_hat"] = inputs.c_hat
    elif roofline is not None and inputs.drafter_params is not None:
        operations = parse_size("--drafter-params", inputs.drafter_params)
        operations += parse_size("--head-params", inputs.head_params) if inputs.head_params is not None else 0.0
        found["c_hat"] = operations / roofline.params
    return found


def _costs_from_sizes(inputs: Inputs, target: Roofline) -> dict[str, Any]:
    """The drafter's passes on the target's roofline, its own KV cache left out. With --head-params it is a parallel drafter."""
    import dataclasses

    assert inputs.drafter_params is not None
    sizes = [("--drafter-params", inputs.drafter_params)]
    sizes += [("--head-params", inputs.head_params)] if inputs.head_params is not None else []
    passes = []
    for flag, text in sizes:
        params = parse_size(flag, text)
        passes.append(dataclasses.replace(target, params=params, context=0) if params > 0.0 else None)
    unit = target.seconds(1)
    drafter = passes[0]
    if drafter is None:
        raise ValueError(f"--drafter-params: got {inputs.drafter_params!r}, allowed: above 0")
    if inputs.head_params is None:
        return {"c": drafter.seconds(1) / unit}
    step = passes[1].seconds(1) / unit if passes[1] is not None else 0.0
    return {"c_block": lambda gamma: drafter.seconds(gamma) / unit, "c_step": step}


def _from_point(inputs: Inputs, roofline: Roofline | None, console: Console) -> tuple[dict[str, Any], Callable[[Path], None]]:
    from ..eval.plan import make_plan

    point, longest = make_point(inputs, roofline)
    plan = make_plan(point, longest=longest, within=inputs.within)
    title = describe(point, plan)
    print_plan(plan, title, console)

    def draw(path: Path) -> None:
        from ..eval.plan_figures import plot_plan

        plot_plan(plan, title, path)

    costs = {"c": point.c, "c_block": [point.block(g) for g in plan.gammas] if point.c is None else None}
    costs |= {"c_step": point.c_step if point.c is None else None, "v": [point.v(g) for g in plan.gammas]}
    return {"kind": "point", "costs": costs, "plan": plan.to_dict()}, draw


def _from_report(path: Path, inputs: Inputs, console: Console) -> tuple[dict[str, Any], Callable[[Path], None]]:
    from ..eval.plan_report import plan_cells, read_measurements, row_to_dict
    from .plan_table import print_cells

    for flag in ("c", "c_block", "c_step", "v", "drafter_params", "head_params", "c_hat", "max_gamma"):
        if getattr(inputs, flag) is not None:
            raise ValueError(f"{_flag(flag)}: got it beside --report, allowed: the report's costs or those of the flags")
    found = read_measurements(path)
    rows = []
    for source, measured in found.items():
        part = plan_cells(measured, within=inputs.within, source=source)
        print_cells(part, measured, source, console)
        rows += part

    def draw(file: Path) -> None:
        from ..eval.plan_figures import plot_cells

        plot_cells(rows, file)

    return {"kind": "report", "source": str(path), "cells": [row_to_dict(row) for row in rows]}, draw


def _figures(folder: Path, inputs: Inputs, console: Console) -> None:
    from ..eval.plan_figures import Device, draw_figures

    device = Device()
    if inputs.peak is not None and inputs.bandwidth is not None:
        device = Device("the given device", inputs.peak * 1e12, inputs.bandwidth * 1e9, inputs.bytes_per_weight)
    elif inputs.peak is not None or inputs.bandwidth is not None:
        raise ValueError("--figures: got one of --peak and --bandwidth, allowed: both or neither (H100)")
    c = 0.05 if inputs.c is None else inputs.c
    if not 0.0 < c < 1.0:
        raise ValueError(f"--c: got {c:g}, allowed with --figures: above 0 and below 1")
    for path in draw_figures(folder, device=device, c=c):
        console.print(f"figure: {path}", soft_wrap=True, highlight=False)


# ---------------------------------------------------------------------------------------------------------- printing


def describe(point: Point, plan: Plan) -> str:
    """The point in one line."""
    gamma = max(plan.best_gamma, 1)
    given = f"alpha {point.alpha:g}" if point.alpha is not None else f"{len(point.acceptance)} slots"
    costs = f"c {point.c:.3g}" if point.c is not None else f"c_block {point.block(gamma):.3g}, c_step {point.c_step:.3g}"
    text = f"{given}, {costs}, v({gamma}) {point.v(gamma):.3g}"
    if point.overhead or point.plain_overhead:
        text += f", engine {point.overhead:.3g} a cycle, {point.plain_overhead:.3g} a plain step"
    return text


def print_plan(plan: Plan, title: str, console: Console) -> None:
    """Table over gamma with bars, then the numbers read off it."""
    from .plan_table import gamma_table, plan_lines

    console.print(title, style="bold", highlight=False)
    console.print(gamma_table(plan, rows=_ROWS, width=_BAR))
    for name, text in plan_lines(plan):
        console.print(f"{name:<22}{text}", highlight=False, soft_wrap=True)


def print_roofline(roofline: Roofline, console: Console) -> None:
    """Traffic against arithmetic, the ridge, and how many speculative positions are free."""
    from .plan_table import roofline_lines

    console.print("roofline (peak figures, nothing timed)", style="bold", highlight=False)
    for name, text in roofline_lines(roofline):
        console.print(f"{name:<22}{text}", highlight=False, soft_wrap=True)
