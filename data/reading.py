"""Rows of files, folders and Hub data sets, each with the place that an error message names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from .config import SourceConfig

BUILTIN = {"builtin": "train.jsonl", "builtin:train": "train.jsonl", "builtin:heldout": "heldout.jsonl"}
LOADERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
SUFFIXES = (".jsonl", ".json", *LOADERS)


class Row(NamedTuple):
    """One row as it was read: the file or data set, the place (`file:line` or `file: row n`), and the values."""

    file: str
    place: str
    values: Any


def raw_rows(source: SourceConfig, *, split: str = "train", streaming: int | None = None) -> Iterator[Row]:
    """Rows of one source in order. split: of a Hub data set or saved one, where the source names none. streaming: read no more
    than so many rows, and a Hub data set as a stream.

    Raises ValueError for a source that does not exist, a line that cannot be read, and a slice of a streamed split.
    """
    yield from islice(_rows(source, source.split or split, streaming is not None), streaming)


def _rows(source: SourceConfig, split: str, streaming: bool) -> Iterator[Row]:
    name = source.source
    if name in BUILTIN:
        file = resources.files(f"{__package__}.prompts") / BUILTIN[name]
        yield from _json_lines(BUILTIN[name], iter(file.read_text(encoding="utf-8").split("\n")))
        return
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _folder(path, split, streaming)
    elif path.exists():
        yield from _file(path, streaming)
    elif path.suffix.lower() in SUFFIXES or name.startswith((".", "/", "~")):
        raise ValueError(f"prompts={name!r}: no such file or folder")
    else:
        yield from hub_rows(source, split, streaming=streaming)


def _json_lines(file: str, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Row(file, f"{file}:{number}", json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: broken JSON line ({error.msg} at column {error.colno})") from None


def _lines(path: Path) -> Iterator[str]:
    """Lines of a text file. Not universal newlines or splitlines(): JSON texts may hold U+2028 and its like unescaped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not UTF-8 text") from None


def _json_file(path: Path) -> Iterator[Row]:
    # JSON is read here and not by `datasets`, whose errors do not name the broken line.
    if path.suffix.lower() == ".json":
        text = "".join(_lines(path))
        if text.lstrip()[:1] == "[" or "\n" in text.strip():  # a list, or an object over several lines
            try:
                rows = json.loads(text)
            except json.JSONDecodeError as error:
                if text.lstrip()[:1] == "[":
                    raise ValueError(f"{path}:{error.lineno}: broken JSON ({error.msg})") from None
            else:
                listed = rows if isinstance(rows, list) else [rows]
                yield from (Row(str(path), f"{path}: row {n}", row) for n, row in enumerate(listed, start=1))
                return
    yield from _json_lines(str(path), _lines(path))


def _table_file(path: Path, streaming: bool) -> Iterator[Row]:
    from datasets import Dataset, load_dataset

    suffix = path.suffix.lower()
    try:
        if streaming:
            table = load_dataset(LOADERS[suffix], data_files=str(path), split="train", streaming=True)
        elif suffix == ".parquet":
            table = Dataset.from_parquet(str(path), keep_in_memory=True)
        elif suffix == ".csv":
            table = Dataset.from_csv(str(path), keep_in_memory=True)
        else:
            table = Dataset.from_file(str(path), in_memory=True)
        yield from (Row(str(path), f"{path}: row {number}", row) for number, row in enumerate(table, start=1))
    except Exception as error:  # of pyarrow, pandas and datasets; streams raise while they are read
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: cannot be read as {LOADERS[suffix]} ({reason})") from None


def _folder(path: Path, split: str, streaming: bool) -> Iterator[Row]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        from datasets import DatasetDict, load_from_disk

        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            if split not in data:
                raise ValueError(f"split={split!r}: {path} has {', '.join(sorted(data))}")
            data = data[split]
        yield from (Row(str(path), f"{path}: row {number}", row) for number, row in enumerate(data, start=1))
        return
    files = sorted(item for item in path.rglob("*") if item.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{path}: the folder holds no file of the kinds {', '.join(SUFFIXES)}")
    for item in files:
        yield from _file(item, streaming)


def _file(path: Path, streaming: bool) -> Iterator[Row]:
    if path.suffix.lower() in (".jsonl", ".json"):
        yield from _json_file(path)
    elif path.suffix.lower() in LOADERS:
        yield from _table_file(path, streaming)
    else:
        raise ValueError(f"{path}: file kind {path.suffix or 'none'!r} is not known (one of {', '.join(SUFFIXES)})")


def hub_rows(source: SourceConfig, split: str, *, streaming: bool) -> Iterator[Row]:
    """Rows of a Hub data set `owner/name[@revision]`, downloaded whole or read as a stream.

    Raises ValueError when it cannot be read, and for a slice like train[:500] of a stream.
    """
    from datasets import load_dataset

    name, _, pinned = source.source.partition("@")
    if streaming and "[" in split:
        raise ValueError(f"split={split!r}: a stream has no slices; use data.streaming or cap for the number of rows")
    revision = source.revision or pinned or None
    try:
        data = load_dataset(name, source.subset, revision=revision, split=split, streaming=streaming)
        yield from (Row(source.source, f"{source.source}: row {n}", row) for n, row in enumerate(data, start=1))
    except Exception as error:  # the Hub client raises a dozen kinds; the user needs the source and the reason
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"prompts={source.source!r}: no such file here, and not readable from the Hub ({reason})") from None
