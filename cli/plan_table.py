"""What `draftsmith plan` prints: the table over gamma with its bars, the table over cells, and the sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..eval.plan import Plan
    from ..eval.roofline import Roofline


def gamma_table(plan: Plan, *, rows: int, width: int) -> Table:
    """S over gamma; the best length bold, lengths as good as it green; a bar of S whose | is S = 1."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("gamma", "tokens\nE", "cost", "S", "to best", "arith-\nmetic"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("S, | is 1", no_wrap=True)
    shown = shown_gammas(plan, rows)
    top = max(1.0, *(plan.speedup[g] for g in shown))
    one = max(round(width / top), 1)
    low, high = plan.region
    for gamma in shown:
        s = plan.speedup[gamma]
        filled = round(width * s / top)
        bar = "".join("|" if i == one - 1 else "#" if i < filled else " " for i in range(max(filled, one)))
        best = gamma == plan.best_gamma
        style = "bold green" if best else "green" if low <= gamma <= high else "red" if s < 1.0 else None
        loss = 100.0 * (s / plan.best_speedup - 1.0)
        table.add_row(
            f"{gamma}{'*' if best else ' '}", f"{plan.tokens[gamma]:.2f}", f"{plan.cost[gamma]:.2f}", f"{s:.2f}",
            "best" if best else f"{loss:.1f} %", f"{plan.arithmetic[gamma]:.2f}", bar, style=style,
        )  # fmt: skip
    return table


def shown_gammas(plan: Plan, rows: int) -> list[int]:
    """Every gamma to a little beyond the region; thinned evenly when that is too many, its marks kept."""
    low, high = plan.region
    last = min(max(high + 3, 8), plan.gammas[-1])
    everything = list(range(last + 1))
    if len(everything) <= rows:
        return everything
    marks = {0, 1, low, plan.best_gamma, high, last}
    stride = -(-len(everything) // (rows - len(marks)))
    return sorted(marks | set(everything[::stride]))


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """(name, sentence) pairs under the table."""
    best, (low, high) = plan.best_gamma, plan.region
    if best == 0:
        lines = [("best", "do not speculate: no gamma gives S above 1")]
    else:
        lines = [("best", f"gamma {best}, S {plan.best_speedup:.2f}{_rising(plan)}")]
        lines += [(f"within {100 * plan.within:g} %", f"gamma {low} to {high}" if low < high else f"gamma {low} only")]
    bounds = ", ".join(f"{name} = {_bound(value)}" for name, value in plan.ceilings.items())
    lines += [("ceiling", f"S {_bound(plan.ceiling)} ({bounds})")]
    if plan.break_even is None:
        lines += [("break-even", f"none at gamma {max(best, 1)}: it loses even when every draft is accepted")]
    else:
        lines += [("break-even", f"alpha {plan.break_even:.3f} at gamma {max(best, 1)}")]
    if plan.lowest_break_even is not None:
        gamma, alpha = plan.lowest_break_even
        lines[-1] = (lines[-1][0], f"{lines[-1][1]}; lowest: {alpha:.3f} at gamma {gamma}")
    if best and plan.equal_slot_alpha is not None:
        lines += [("equal-slot alpha", f"{plan.equal_slot_alpha:.3f} gives the same tokens per cycle")]
    lines += [("arithmetic", f"{plan.arithmetic[best]:.2f} times the operations per token (c_hat {plan.c_hat:.3g})")]
    return lines


def _rising(plan: Plan) -> str:
    if not plan.rising:
        return ""
    if plan.next_slot is None:
        return ", the longest looked at: S still rises there"
    if plan.next_slot >= 1.0:
        return ", the last slot given; one more could not pay"
    return f", the last slot given; one more pays if it accepts more than {plan.next_slot:.2f}"


def _bound(value: float) -> str:
    return "none" if value == float("inf") else f"{value:.2f}"


def roofline_lines(roofline: Roofline) -> list[tuple[str, str]]:
    """(name, sentence) pairs of the roofline."""
    memory, compute = 1e3 * roofline.memory_seconds, 1e3 * roofline.compute_seconds(1)
    bound = f"concurrency {roofline.concurrency}: {'memory' if memory >= compute else 'compute'}-bound"
    free = roofline.free_positions
    return [
        ("plain step", f"{memory:.3g} ms of traffic, {compute:.2g} ms of arithmetic at {bound}"),
        ("ridge", f"{roofline.ridge:.0f} FLOP/byte, reached with {roofline.tokens_at_ridge:.0f} tokens in one pass"),
        ("free positions", f"{free} speculative per request before a pass gets dearer"),
    ]  # fmt: skip


def print_cells(rows: list[dict[str, Any]], measured: dict[str, Any], source: str, console: Console) -> None:
    """One line a cell: where, what was measured, what the equation says there and at its best length."""
    where = measured.get("environment") or {}
    name = (measured.get("target") or {}).get("name") if isinstance(measured.get("target"), dict) else measured.get("target")
    facts = [str(x) for x in (name, where.get("dtype"), where.get("hardware")) if x]
    console.print(f"{source}: {', '.join(facts) or 'measured cells'}", style="bold", highlight=False)
    # narrow enough for 80 columns: nothing may wrap or be cut
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("domain", no_wrap=True)
    names = [
        "T",
        "conc",
        "ctx",
        "gamma",
        "tau",
        "alpha",
        "S",
        "S\neq.",
        "best\ngamma",
        "S\nbest",
        "3 %",
        "pays\nfrom",
        "ceil-\ning",
    ]
    scheduled = any(row["scheduled"] is not None for row in rows)
    for name in [*names, *(["sche-\nduled"] if scheduled else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        plan = row["plan"]
        style = "red" if (row["measured"] or 1.0) < 1.0 else None
        cells = [_text(row[k], "g") for k in ("temperature", "concurrency", "context", "gamma")]
        cells += [_text(row["tau"]), _text(row["alpha"]), _text(row["measured"]), _text(row["predicted"])]
        if plan is None:
            cells += ["-"] * 5
        else:
            low, high = plan.region
            cells += [
                f"{plan.best_gamma}{'+' if may_rise(plan) else ''}", _text(row["predicted_best"]),
                f"{low}..{high}" if low < high else str(low), _text(plan.break_even), _text(plan.ceiling),
            ]  # fmt: skip
        cells += [_text(row["scheduled"])] if scheduled else []
        table.add_row(str(row["domain"] or "-"), *cells, style=style)
    console.print(table)
    missing = sorted({row["missing"] for row in rows if row["missing"]})
    if missing:
        count = sum(bool(row["missing"]) for row in rows)
        console.print(f"{count} of {len(rows)} cells lack {' or '.join(missing)}", highlight=False)
    console.print(
        "alpha: equal in every slot, gives this tau; S: measured; eq.: the equation with measured costs; 3 %: lengths as good "
        "as the best; pays from: break-even alpha at the best length; +: one more slot than measured may pay",
        highlight=False, style="dim",
    )  # fmt: skip


def may_rise(plan: Plan) -> bool:
    """The best is the longest measured length, and a longer one is not ruled out."""
    return plan.rising and (plan.next_slot is None or plan.next_slot < 1.0)


def _text(value: Any, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)
