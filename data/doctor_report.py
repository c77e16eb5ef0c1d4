"""The doctor's report on the terminal, as doctor.json, and as one self-contained page. Computes nothing of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .manifest import write_atomic

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
WORDS = {"error": "REFUSED", "warning": "warning", "note": "note"}
SUPERVISED = "black on pale_green3"
BARS = " ▁▂▃▄▅▆▇█"
Report = Mapping[str, Any]


def write(report: Report, folder: Path) -> Path:
    """Write doctor.json and doctor.html into `folder`, atomically; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_atomic(folder / "doctor.json", text)
    page = folder / "doctor.html"
    write_atomic(page, render_html(json.loads(text)))
    return page


def render_html(report: Report) -> str:
    """The page: no outside asset. Everything shown is in the report."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files(__package__).joinpath("doctor.html").read_text(encoding="utf-8")
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"percent": percent, "size": size, "duration": duration, "visible": visible, "number": _number}
    return jinja.from_string(source).render(r=report, bars=_bars)


def _bars(histogram: Report) -> list[dict[str, Any]]:
    """Bars of a histogram: height in percent of the tallest, and what they hold."""
    tallest = max(histogram["counts"])
    edges = histogram["edges"]
    return [
        {"height": 100 * count / tallest, "count": count, "low": low, "high": high - 1}
        for count, low, high in zip(histogram["counts"], edges[:-1], edges[1:], strict=True)
    ]


# ---- terminal -----------------------------------------------------------------------------------------------------


def show(report: Report, page: Path, console: Console) -> None:
    """Print the report: verdict, findings, figures, one coloured row; the page has them all."""
    counts, supervised = report["counts"], report["supervised"]
    style = {"refused": "bold red", "usable with warnings": "bold yellow"}.get(report["verdict"], "bold green")
    console.print(Text(f"{report['target']['name']}: rows are {report['verdict']}", style=style))
    for finding in report["findings"]:
        _show_finding(finding, console)
    console.print(_facts(report))
    lengths = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tokens", "min", "median", "mean", "95 %", "max", "distribution"):
        lengths.add_column(name, justify="left" if name in ("tokens", "distribution") else "right", no_wrap=True)
    for name, entry in report["lengths"].items():
        if entry:
            figures = [f"{entry[key]:.0f}" for key in ("min", "median", "mean", "p95", "max")]
            lengths.add_row(name, *figures, spark(entry["counts"]))
    if counts["rows"]:
        console.print(lengths)
    _show_vocabulary(report["vocabulary"], console)
    if report["samples"]:
        sample = report["samples"][0]
        title = f"row {sample['id']!r}, supervised tokens coloured ({percent(supervised['share'])} in all rows):"
        console.print(Text(title, style="bold"))
        console.print(coloured(sample["pieces"]), soft_wrap=True)
    console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)


def _show_finding(finding: Report, console: Console) -> None:
    line = Text(f"{WORDS[finding['level']]} {finding['check']}: ", style=STYLES[finding["level"]])
    more = f" and {finding['count'] - len(finding['rows'])} more" if finding["count"] > len(finding["rows"]) else ""
    where = f"{', '.join(finding['rows'])}{more}: " if finding["rows"] else ""
    line.append(f"{where}{finding['reason']}", style="default")
    line.append(f"\n    fix: {finding['fix']}", style="dim")
    console.print(line, soft_wrap=True)


def _facts(report: Report) -> Table:
    """The figures, one a line."""
    counts, anchors, template = report["counts"], report["anchors"], report["template"]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    lost = "; ".join(f"{count}: {reason}" for reason, count in counts["dropped"].items())
    table.add_row("conversations", f"{counts['prompts']} prompts, {counts['answered']} answered, {counts['unanswered']} to go")
    table.add_row("rows", f"{counts['rows']} with {counts['tokens']} tokens" + (f"; dropped {lost}" if lost else ""))
    table.add_row("supervised", f"{counts['supervised']} tokens, {percent(report['supervised']['share'])}")
    table.add_row(
        "anchors",
        f"{anchors['possible_per_row']:.0f} possible a row, {anchors['drawn_per_row']:.0f} drawn an epoch "
        f"({percent(anchors['coverage'])}; {anchors['drawn_per_supervised']:.2f} a supervised token), which train "
        f"{percent(anchors['label_coverage'])} of the supervised tokens",
    )
    args = json.dumps(template["args"]) if template["args"] else "no arguments"
    table.add_row("template", f"{template['hash'][:12]}, {args}, generation tags: {'yes' if template['tags'] else 'no'}")
    table.add_row("mask", f"marked by {template['mask_source'] or 'nothing'}")
    for key, name in (("first_tokens", "first tokens"), ("last_tokens", "last tokens")):
        table.add_row(name, Text(", ".join(f"{visible(t['text'])} {percent(t['share'])}" for t in report[key][:5])))
    table.add_row("ends", f"{percent(report['ends']['share'])} of the answers end with an end token")
    table.add_row("loops", f"{percent(report['loops']['share'])} of the answers repeat themselves")
    domains = ", ".join(f"{entry['name']} {percent(entry['share'])}" for entry in report["mix"]["domains"])
    languages = ", ".join(f"{name} {percent(share)}" for name, share in report["mix"]["languages"].items())
    table.add_row("mix", f"{domains}; {languages}")
    if cache := report["cache"]:
        time = f", about {duration(cache['seconds'])} ({cache['basis']})" if cache["seconds"] else ""
        use = f"data.features: {cache['features']}"
        table.add_row("feature cache", f"{size(cache['bytes'])} for {cache['tokens']} tokens{time}; {use}")
    if probe := report["probe"]:
        table.add_row("probe", probe_line(probe))
    return table


def probe_line(probe: Report) -> str:
    """What the target said about its rows."""
    parts = []
    if probe["sampled_tokens"]:
        mean = "" if probe["excess"] is None else f", {probe['excess']:+.2f} nats a token against its own (z {probe['z']:+.1f})"
        parts.append(f"{probe['sampled_tokens']} sampled tokens: ranks {probe['distance']:.3f} from uniform{mean}")
    if probe["greedy_tokens"]:
        parts.append(f"{percent(probe['agreement'])} of {probe['greedy_tokens']} greedy tokens are its choice")
    return "; ".join(parts) or "nothing was read"


def _show_vocabulary(found: Report | None, console: Console) -> None:
    if not found:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("draft vocabulary", "coverage", "of unseen answers", "worst domain"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found["sizes"]:
        worst = f"{entry['worst_domain']} {percent(entry['worst'])}" if entry["worst"] is not None else "-"
        style = "bold" if entry["size"] == found["recipe"] else None
        table.add_row(str(entry["size"]), percent(entry["seen"]), percent(entry["held_out"]), worst, style=style)
    console.print(table)
    console.print(found["advice"])


def coloured(pieces: Sequence[Sequence[Any]]) -> Text:
    """The text of a row, supervised tokens on a coloured ground."""
    out = Text()
    for text, flag, _ in pieces:
        out.append(text, style=SUPERVISED if flag else "")
    return out


def spark(counts: Sequence[int]) -> str:
    """A histogram in one line."""
    tallest = max(counts)
    return "".join(BARS[max(1 if count else 0, round(8 * count / tallest))] for count in counts)


# ---- words --------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """A share in percent, with a decimal where it tells something."""
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if value in (0.0, 1.0) else f"{100 * value:.1f} %"


def size(value: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def duration(seconds: float | None) -> str:
    """Seconds in words."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def visible(text: str) -> str:
    """White space made visible, for a token shown alone."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "(nothing)"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
