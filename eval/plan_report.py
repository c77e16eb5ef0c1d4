"""Plans from measurements of ours: acceptance per slot and costs out of report.json and grid.json, one row per cell.

Reads only fields that are there; a cell without acceptance or costs keeps its measured values and says what is missing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .equation import with_prefill
from .plan import WITHIN, Plan, Point, equal_slot_alpha, make_plan, piecewise
from .report import read_report

Record = dict[str, Any]
COSTS = ("c_block", "c_step", "v", "gamma")


def read_measurements(path: Path) -> dict[str, Record]:
    """{"report": ..., "grid": ...}, what there is of both: `path` is one file, or a folder with report.json or grid.json.

    ValueError when there is neither, or a file is not one of ours.
    """
    if path.is_dir():
        files = [file for name in ("report.json", "grid.json") if (file := path / name).is_file()]
        if not files:
            raise ValueError(f"--report: no report.json or grid.json in {path}, allowed: a folder of bench, or the file")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"--report: {path} does not exist, allowed: a report.json, a grid.json, or their folder")
    found: dict[str, Record] = {}
    for file in files:
        content = _read(file)
        if "lossless" in content or "schema" in content and file.name == "report.json":
            found["report"] = read_report(file)
        elif isinstance(content.get("cells"), list):
            found["grid"] = content
        else:
            raise ValueError(f"--report: {file} has no cells, allowed: a report.json or grid.json of ours")
    return found


def _read(file: Path) -> Record:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--report: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--report: {file} is a list or a number, allowed: a report.json or grid.json of ours")
    return content


def plan_cells(measured: Record, *, within: float = WITHIN, source: str = "report") -> list[Record]:
    """One row per cell of a report or grid, in its order: see `plan_cell`."""
    cost = measured.get("cost") or measured.get("costs") or {}
    cost = cost if isinstance(cost, dict) else {"points": cost}
    points = cost.get("points") or ([cost] if "v" in cost else [])
    curve = cost.get("verify_curve") or []
    rows = []
    for cell in measured["cells"]:
        if not isinstance(cell, dict):
            continue
        if isinstance(cell.get("sides"), dict):
            row = plan_grid_cell(cell, within=within)
        else:
            row = plan_cell(cell, _nearest(points, cell), curve, within=within)
        rows.append(row | {"source": source})
    return rows


def _nearest(points: Sequence[Record], cell: Record) -> Record | None:
    """The costs whose operating point is closest: concurrency first, then kind of decoding, then context."""

    def distance(point: Record) -> tuple[float, bool, float]:
        return (
            abs(point.get("concurrency", 1) - cell.get("concurrency", 1)),
            (point.get("temperature", 0.0) > 0) != (cell.get("temperature", 0.0) > 0),
            abs(point.get("context", 0) - cell.get("context", 0)),
        )

    usable = [point for point in points if all(_number(point.get(name)) is not None for name in COSTS)]
    return min(usable, key=distance) if usable else None


def plan_cell(cell: Record, cost: Record | None, curve: Sequence[Record] = (), *, within: float = WITHIN) -> Record:
    """The equation at a measured cell.

    Returns domain, temperature, concurrency, context, gamma, tau and `measured` (whole requests) as they stand in the cell;
    `alpha`, the equal-slot acceptance that gives this tau; `plan`, the Plan without prefill (None with `missing` naming the
    reason); `predicted` and `predicted_best`, S at the measured and at the best gamma, after the cell's prefill where it is
    known (`request_speedup`: at every gamma); `point`, the costs that were used. Costs of the cell itself win over `cost`,
    those of the nearest measured point.
    """
    own = cell.get("cost")
    own = own if isinstance(own, dict) else cell
    if all(_number(own.get(name, cell.get(name))) is not None for name in COSTS):
        cost = {"gamma": cell.get("gamma")} | own
    row = _row(cell, cell, _whole(cell.get("gamma")))
    acceptance = _acceptance(cell.get("acceptance_per_slot") or cell.get("acceptance"))
    if not acceptance or cost is None:
        return row | {"missing": "acceptance per slot" if not acceptance else "costs"}
    v, reach = verify_cost(cost, curve)
    acceptance = acceptance[:reach]
    point = Point(
        acceptance=acceptance, c_block=float(cost["c_block"]), c_step=float(cost["c_step"]), v=v,
        overhead=_number(cost.get("overhead")) or 0.0, plain_overhead=_number(cost.get("plain_overhead")) or 0.0,
    )  # fmt: skip
    plan = _fill(row, point, cell, within)
    names = ("c_block", "c_step", "overhead", "plain_overhead", "gamma", "target_pass_ms")
    row["point"] = {name: cost[name] for name in names if name in cost} | {"v": [v(g) for g in plan.gammas]}
    return row


def plan_grid_cell(cell: Record, *, within: float = WITHIN) -> Record:
    """The equation at a cell of a grid, whose sides ran plain, several fixed lengths, and the scheduler.

    The costs come from the sides' own cycles: v and c_block at every fixed length, straight lines between; acceptance from the
    longest side. A row as of `plan_cell`, gamma and `measured` being the best fixed length's (0: plain); beside it
    `measured_by_gamma` and `scheduled`, the speedup of the scheduled side.
    """
    sides = {name: side for name, side in cell["sides"].items() if isinstance(side, dict)}
    fixed = {g: side for name, side in sides.items() if (g := _gamma_of(name))}
    found = {g: speedup for g, side in fixed.items() if (speedup := _number(side.get("speedup"))) is not None}
    best = max({0: 1.0} | found, key=lambda g: found.get(g, 1.0))
    row = _row(cell, fixed.get(best, {}) | {"speedup": found.get(best, 1.0)}, best)
    scheduled = sides.get("scheduled", {})
    row |= {"measured_by_gamma": {0: 1.0} | found, "scheduled": _number(scheduled.get("speedup"))}
    plain = _parts(sides.get("plain", {}))
    parts = {g: found_parts for g, side in sorted(fixed.items()) if (found_parts := _parts(side)) is not None}
    acceptance = _acceptance(fixed[max(parts)].get("acceptance_per_slot")) if parts else ()
    if plain is None or not parts or not acceptance or plain["verify"] <= 0.0:
        return row | {"missing": "acceptance per slot" if plain and parts else "costs"}
    unit, last = plain["verify"], max(parts)
    draft = [(float(g), p["draft"] / unit) for g, p in parts.items()]
    point = Point(
        acceptance=acceptance[:last],
        c_block=piecewise([(0.0, max(draft[0][1], 1e-9)), *((g, max(value, 1e-9)) for g, value in draft)], "c_block"),
        c_step=parts[last]["head"] / last / unit, v=piecewise([(float(g), p["verify"] / unit) for g, p in parts.items()]),
        overhead=statistics.median(p["rest"] for p in parts.values()) / unit, plain_overhead=plain["rest"] / unit,
    )  # fmt: skip
    plan = _fill(row, point, cell, within)
    row["point"] = {
        "c_block": [point.block(g) for g in plan.gammas], "c_step": point.c_step, "v": [point.v(g) for g in plan.gammas],
        "overhead": point.overhead, "plain_overhead": point.plain_overhead, "target_pass_ms": unit,
    }  # fmt: skip
    return row


def _gamma_of(side: str) -> int | None:
    name, _, length = side.partition("-")
    return int(length) if name == "fixed" and length.isdigit() and int(length) > 0 else None


def _parts(side: Record) -> dict[str, float] | None:
    """Milliseconds of a cycle by part, everything outside drafter and target as `rest`."""
    cycle, split = _number(side.get("cycle_ms")), side.get("time_split")
    if cycle is None or not isinstance(split, dict):
        return None
    shares = {part: _number(split.get(part)) or 0.0 for part in ("draft", "head", "verify")}
    return {part: cycle * share for part, share in shares.items()} | {"rest": cycle * max(1.0 - sum(shares.values()), 0.0)}


def _row(cell: Record, side: Record, gamma: int | None) -> Record:
    """Where a cell lies and what was measured there, with room for what the equation says."""
    row: Record = {name: cell.get(name) for name in ("domain", "temperature", "concurrency", "context")}
    row["context_setting"] = cell.get("context_setting", cell.get("context"))
    tau = _number(side.get("tau"))
    row |= {"gamma": gamma, "tau": tau, "measured": _number(side.get("speedup")), "interval": side.get("speedup_interval")}
    row["alpha"] = equal_slot_alpha(tau, gamma) if gamma and tau is not None and 1.0 <= tau <= gamma + 1.0 else None
    empty = ("predicted", "predicted_best", "request_speedup", "plan", "point", "missing", "scheduled", "measured_by_gamma")
    return row | dict.fromkeys(empty)


def _fill(row: Record, point: Point, cell: Record, within: float) -> Plan:
    plan = make_plan(point, within=within)
    whole = [_whole_request(speedup, g, cell) for g, speedup in enumerate(plan.speedup)]
    row |= {"plan": plan, "request_speedup": whole, "predicted_best": whole[plan.best_gamma]}
    if row["gamma"] is not None and row["gamma"] < len(whole):
        row["predicted"] = whole[row["gamma"]]
    return plan


def verify_cost(cost: Record, curve: Sequence[Record]) -> tuple[Callable[[int], float], int]:
    """(v over gamma, longest gamma it covers) at a measured point.

    The point has v at its own gamma only; other lengths take the shape of the verify curve, measured apart at one operating
    point, made monotone and stretched so that it passes through the point. Without a usable curve: a straight line.
    """
    gamma, level = int(cost["gamma"]), float(cost["v"])
    pairs, top = [(0.0, 1.0)], 1.0
    for entry in sorted(curve, key=lambda entry: entry["tokens"]):
        top = max(top, float(entry["v"]))
        if entry["tokens"] > 1:
            pairs.append((entry["tokens"] - 1.0, top))
    reach = int(pairs[-1][0])
    shape = piecewise(pairs)
    if reach < gamma or shape(gamma) < 1.01 or level <= 1.0:  # too flat to be stretched: its noise would be magnified
        return piecewise([(0.0, 1.0), (float(gamma), level)]), gamma
    stretch = (level - 1.0) / (shape(gamma) - 1.0)
    return piecewise([(x, 1.0 + stretch * (y - 1.0)) for x, y in pairs]), reach


def _whole_request(speedup: float, gamma: int, cell: Record) -> float:
    share, ratio = _number(cell.get("prefill_share")), _number(cell.get("prefill_ratio"))
    if gamma == 0 or share is None or ratio is None:
        return speedup
    return with_prefill(speedup, min(max(share, 0.0), 1.0), ratio)


def _acceptance(values: Any) -> tuple[float, ...]:
    """Conditional acceptance up to the first slot that was never reached."""
    out: list[float] = []
    for value in values if isinstance(values, list) else ():
        number = _number(value)
        if number is None or not 0.0 <= number <= 1.0:
            break
        out.append(number)
    return tuple(out)


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) and number >= 0 else None


def row_to_dict(row: Record) -> Record:
    """A row as plain JSON."""
    plan = row["plan"]
    return row | {"plan": plan.to_dict() if isinstance(plan, Plan) else None}
