"""The measurement on a terminal: one table, the verdict, the path of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_summary(report: dict[str, Any], html: Path, console: Console) -> None:
    """Print what report.json says, losses in red, and where report.html lies."""
    environment = report["environment"]
    held = f" ({report['target']['quantization']})" if report["target"].get("quantization") else ""
    place = f"{environment['hardware']}, {environment['threads']} threads"
    title = f"{report['target']['name']}{held}, {environment['dtype']}, {place}"
    console.print(title, style="bold")
    # narrow enough for 80 columns: nothing may wrap or be cut
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("domain", no_wrap=True)
    for name in ("T", "conc", "ctx", "tau", "plain\ntok/s", "spec.\ntok/s", "speedup", "95 %\ninterval", "eq."):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report["cells"]:
        low, high = cell["speedup_interval"]
        style = "red" if cell["speedup"] < 1.0 else "green" if low > 1.0 else None
        table.add_row(
            cell["domain"], f"{cell['temperature']:g}", str(cell["concurrency"]), str(cell["context"]), _number(cell["tau"]),
            f"{cell['plain_tokens_per_second']:.1f}", f"{cell['speculative_tokens_per_second']:.1f}",
            f"{cell['speedup']:.2f}x", f"{low:.2f}..{high:.2f}", _number(cell["predicted_speedup"], "x"), style=style,
        )  # fmt: skip
    console.print(table)
    cost = report["cost"]
    console.print(
        f"c_block {cost['c_block']:.2f}, c_step {cost['c_step']:.3f}, v({cost['gamma']}) {cost['v']:.2f}, "
        f"one target pass {cost['target_pass_ms']:.1f} ms"
    )
    console.print(lossless_line(report["lossless"]))
    console.print(f"report: {html}", soft_wrap=True)


def lossless_line(found: dict[str, Any]) -> str:
    """The losslessness verdict in one sentence."""
    parts = []
    if found["greedy_prompts"]:
        parts.append(f"greedy tokens differ in {found['greedy_mismatches']} of {found['greedy_prompts']} prompts (float32)")
    served = found.get("served")
    if served and served["dtype"] != "float32":
        parts.append(f"{len(served['differences'])} of {served['prompts']} in {served['dtype']}")
    if found["sampling_p_value"] is not None:
        parts.append(f"sampling test p = {found['sampling_p_value']:.3f}")
    verdict = {True: "lossless", False: "NOT lossless", None: "losslessness undecided"}[found.get("verdict")]
    return f"{verdict}: {'; '.join(parts) or 'nothing was compared'}"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
