"""What was recognised in the sources of a recipe, without answering anything: `draftsmith data sources`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .schema import Prompt
from .source import Selection, SourceRows, overlap

EXAMPLES = 2
SHOWN = 70  # characters of an example
FILES = 4


def source_facts(rows: SourceRows, used: int) -> dict[str, Any]:
    """What one source holds: rows by file, schemas, domains, turns, and examples (id, text)."""
    prompts = rows.prompts
    turns = sorted(len(prompt.turns) for prompt in prompts)
    return {
        "source": rows.source.source, "rows": len(prompts), "used": used, "weight": rows.source.weight, "cap": rows.source.cap,
        "files": dict(rows.files), "schemas": _counts(prompt.schema for prompt in prompts),
        "domains": _counts(prompt.domain for prompt in prompts), "turns": dict(sorted(Counter(turns).items())),
        "system": sum(prompt.system is not None for prompt in prompts), "tools": sum(bool(prompt.tools) for prompt in prompts),
        "cut": sum(bool(prompt.messages) for prompt in prompts), "answers": sum(bool(p.replies or p.messages) for p in prompts),
        "examples": [(prompt.id, prompt.turns[0]) for prompt in prompts[:EXAMPLES]],
    }  # fmt: skip


def _counts(names: Any) -> dict[str, int]:
    return dict(Counter(names).most_common())


def listing(selection: Selection, heldout: Sequence[Prompt], *, near: float | None) -> dict[str, Any]:
    """Facts of every source, the selection, near duplicates that were dropped, and overlap with evaluation prompts."""
    facts = [source_facts(rows, used) for rows, used in zip(selection.read, selection.used, strict=True)]
    return {
        "sources": facts, "found": selection.found, "chosen": len(selection.prompts), "equal": selection.equal,
        "near": selection.near, "heldout": len(heldout), "overlap": overlap(selection.prompts, heldout, near=near),
        "domains": _counts(prompt.domain for prompt in selection.prompts),
    }  # fmt: skip


def _list(counts: dict[Any, int], most: int = 6) -> str:
    shown = [f"{name} {count}" for name, count in list(counts.items())[:most]]
    return ", ".join(shown) + (f", {len(counts) - most} more" if len(counts) > most else "")


def _turns(counts: dict[int, int]) -> str:
    """Smallest, median and largest number of user turns."""
    if not counts:
        return "-"
    sizes = sorted(Counter(counts).elements())
    first, half, last = sizes[0], sizes[(len(sizes) - 1) // 2], sizes[-1]
    return str(first) if first == last else f"{first} to {last}, half up to {half}"


def _short(file: str, source: str) -> str:
    """The path of a file inside its folder."""
    return file.removeprefix(source).lstrip("/") if file.startswith(source) else file


def show(found: dict[str, Any], console: Any) -> None:
    """Print the listing as a table, with examples under it."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="sources of prompts", show_lines=len(found["sources"]) > 1)
    for name in ("source", "rows", "used", "schema", "user turns", "system", "tools", "answers", "domains"):
        right = name in ("rows", "used", "system", "tools", "answers")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for facts in found["sources"]:
        files = [
            f"  {escape(_short(name, facts['source']))} {n}" for name, n in facts["files"].items() if name != facts["source"]
        ]
        more = [f"  and {len(files) - FILES} more files"] if len(files) > FILES else []
        limits = [f"  {key} {facts[key]:g}" for key in ("weight", "cap") if facts[key] is not None]
        table.add_row(
            "\n".join([escape(facts["source"]), *files[:FILES], *more, *limits]), str(facts["rows"]), str(facts["used"]),
            escape(_list(facts["schemas"])), _turns(facts["turns"]), str(facts["system"]), str(facts["tools"]),
            str(facts["answers"]), escape(_list(facts["domains"])),
        )  # fmt: skip
    console.print(table)
    for facts in found["sources"]:
        for name, text in facts["examples"]:
            line = " ".join(text.split())
            console.print(
                f"  {escape(name)}: {escape(line if len(line) <= SHOWN else line[: SHOWN - 3] + '...')}", highlight=False
            )
        if facts["cut"]:
            console.print(f"  {facts['cut']} conversations of {escape(facts['source'])} end at their first tool call")
    _show_rest(found, console)


def _show_rest(found: dict[str, Any], console: Any) -> None:
    from rich.markup import escape

    gone = f"{found['equal']} duplicates and {len(found['near'])} near duplicates removed"
    console.print(
        f"{found['chosen']} of {found['found']} prompts used ({gone}): {escape(_list(found['domains']))}", highlight=False
    )
    for ours, kept, similarity in found["near"][:3]:
        console.print(f"  near duplicate: {escape(ours)} ~ {escape(kept)} ({similarity:.2f})", highlight=False)
    if found["overlap"]:
        pairs = ", ".join(f"{ours} = {theirs}" for ours, theirs in found["overlap"][:3])
        console.print(
            f"[bold red]{len(found['overlap'])} of them are also evaluation prompts[/] ({escape(pairs)}): "
            "the run will refuse them"
        )
    else:
        console.print(f"none of them is one of the {found['heldout']} evaluation prompts")
