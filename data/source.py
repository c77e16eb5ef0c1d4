"""Prompts from files, folders and the Hub: schemas recognised by shape, duplicates removed, overlap refused."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from .config import DataConfig

BUILTIN = {"builtin": "train.jsonl", "builtin:train": "train.jsonl", "builtin:heldout": "heldout.jsonl"}
LOADERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
SUFFIXES = (".jsonl", ".json", *LOADERS)
USER_ROLES = ("user", "human", "prompter")
ASSISTANT_ROLES = ("assistant", "gpt", "model", "chatgpt", "bot")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered.

    `turns` are the user turns. `replies` are the answers that came with the source, one for each of the first turns; they
    are used only where answers are "given".
    """

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None
    replies: tuple[str, ...] = ()


# ---- shapes -------------------------------------------------------------------------------------------------------


def shape_of(row: Mapping[str, Any]) -> str | None:
    """Name of the schema of a row: turns, messages, conversations, prompt, alpaca; None if it has none of them."""
    for key in ("turns", "messages", "conversations", "prompt"):
        if row.get(key):
            return key
    return "alpaca" if row.get("instruction") else None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a text that is not empty, got {value!r:.60}")
    return value


def _from_messages(items: Any, role_key: str, text_key: str) -> tuple[str | None, list[str], list[str]]:
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, Mapping) for item in items):
        raise ValueError("messages must be a list of {role, content}")
    system: str | None = None
    turns: list[str] = []
    replies: list[str] = []
    for item in items:
        role = str(item.get(role_key, "")).lower()
        if role == "system":
            system = _text(item.get(text_key), "system message")
        elif role in USER_ROLES:
            if len(replies) < len(turns):
                raise ValueError("two user messages in a row")
            turns.append(_text(item.get(text_key), "user message"))
        elif role in ASSISTANT_ROLES:
            if len(replies) >= len(turns):
                raise ValueError("an assistant message without a user message before it")
            replies.append(_text(item.get(text_key), "assistant message"))
        else:
            raise ValueError(f"role {item.get(role_key)!r} is not known (system, user, assistant)")
    return system, turns, replies


def to_prompt(row: Mapping[str, Any]) -> Prompt:
    """A row of any known shape as a Prompt. Raises ValueError saying what is wrong with the row."""
    shape = shape_of(row)
    system = row.get("system") or row.get("system_prompt")
    replies: list[str] = []
    if shape == "turns":
        turns = row["turns"]
        if not isinstance(turns, (list, tuple)):
            raise ValueError("turns must be a list of texts")
        turns = [_text(turn, "turn") for turn in turns]
    elif shape == "messages" or (shape == "prompt" and isinstance(row["prompt"], (list, tuple))):
        found, turns, replies = _from_messages(row[shape], "role", "content")
        system = found or system
    elif shape == "conversations":
        sharegpt = any(isinstance(item, Mapping) and "from" in item for item in row["conversations"])
        keys = ("from", "value") if sharegpt else ("role", "content")
        found, turns, replies = _from_messages(row["conversations"], *keys)
        system = found or system
    elif shape == "prompt":
        turns = [_text(row["prompt"], "prompt")]
        answer = row.get("completion") or row.get("response")
        replies = [answer] if isinstance(answer, str) and answer.strip() else []
    elif shape == "alpaca":
        extra = row.get("input")
        turns = [_text(row["instruction"], "instruction") + (f"\n\n{extra}" if extra else "")]
        answer = row.get("output")
        replies = [answer] if isinstance(answer, str) and answer.strip() else []
    else:
        raise ValueError(
            f"no known schema in the keys {sorted(row)} (one of turns, messages, conversations, prompt, instruction)"
        )
    if not turns:
        raise ValueError("no user turn")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"system must be a text, got {system!r:.60}")
    domain = str(row.get("domain") or row.get("category") or "other")
    key = hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:12]
    name = row.get("id")
    return Prompt(str(name) if name not in (None, "") else f"{domain}-{key}", domain, tuple(turns), system, tuple(replies))


# ---- sources ------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): JSON texts may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: broken JSON line ({error.msg} at column {error.colno})") from None


def _json_file(path: Path) -> Iterator[tuple[str, Any]]:
    # JSON is read here and not by `datasets`, whose errors do not name the broken line.
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text") from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: broken JSON ({error.msg})") from None
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
    else:
        yield from _json_lines(path, text)


def _table_file(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import Dataset

    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            table = Dataset.from_parquet(str(path), keep_in_memory=True)
        elif suffix == ".csv":
            table = Dataset.from_csv(str(path), keep_in_memory=True)
        else:
            table = Dataset.from_file(str(path), in_memory=True)
    except Exception as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as {LOADERS[suffix]} ({reason})") from None
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(table, start=1))


def _folder(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        from datasets import DatasetDict, load_from_disk

        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            if split not in data:
                raise ValueError(f"split={split!r}: {path} has {sorted(data)}")
            data = data[split]
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(data, start=1))
        return
    files = sorted(item for item in path.rglob("*") if item.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{path}: the folder holds no file of the kinds {', '.join(SUFFIXES)}")
    for item in files:
        yield from _file(item)


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() in (".jsonl", ".json"):
        yield from _json_file(path)
    elif path.suffix.lower() in LOADERS:
        yield from _table_file(path)
    else:
        raise ValueError(f"{path}: file kind {path.suffix or 'none'!r} is not known (one of {', '.join(SUFFIXES)})")


def _hub(source: str, split: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    name, _, revision = source.partition("@")
    try:
        data = load_dataset(name, revision=revision or None, split=split)
    except Exception as error:  # the Hub client raises a dozen kinds; the user needs the source and the reason
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"prompts={source!r}: no such file here, and not readable from the Hub ({reason})") from None
    yield from ((f"{source}: row {number}", row) for number, row in enumerate(data, start=1))


def raw_rows(source: str, split: str = "train") -> Iterator[tuple[str, Any]]:
    """Pairs (place, row) of one source; place is `file:line` or `source: row n`.

    Raises ValueError for a source that does not exist or a line that cannot be read.
    """
    if source in BUILTIN:
        file = resources.files(f"{__package__}.prompts") / BUILTIN[source]
        yield from _json_lines(Path(BUILTIN[source]), file.read_text(encoding="utf-8"))
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, split)
    elif path.exists():
        yield from _file(path)
    elif path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")):
        raise ValueError(f"prompts={source!r}: no such file or folder")
    else:
        yield from _hub(source, split)


def read_prompts(source: str, split: str = "train") -> list[Prompt]:
    """All prompts of one source, in order. Raises ValueError naming the place of a row that is no prompt."""
    prompts = []
    for place, row in raw_rows(source, split):
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: a row must be an object, got {type(row).__name__}")
        try:
            prompts.append(to_prompt(row))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return prompts


# ---- selection ----------------------------------------------------------------------------------------------------


def deduplicate(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Keep the first of prompts with equal system text and turns; make ids unique by a suffix."""
    seen: set[tuple[str | None, tuple[str, ...]]] = set()
    ids: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        key = (prompt.system, prompt.turns)
        if key in seen:
            continue
        seen.add(key)
        ids[prompt.id] += 1
        kept.append(prompt if ids[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}~{ids[prompt.id]}"))
    return kept


def select(prompts: Sequence[Prompt], *, limit: int | None, per_domain: Mapping[str, int]) -> list[Prompt]:
    """Cap each domain, then take domains in turn up to `limit`; source order is kept in the result."""
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        cap = per_domain.get(prompt.domain, per_domain.get("*"))
        if cap is None or len(by_domain[prompt.domain]) < cap:
            by_domain[prompt.domain].append(index)
    ranked = sorted((place, index) for indices in by_domain.values() for place, index in enumerate(indices))
    keep = sorted(index for _, index in ranked[:limit])
    return [prompts[index] for index in keep]


def load_prompts(config: DataConfig, *, say: Callable[[str], None] | None = None) -> list[Prompt]:
    """The prompts of a DataConfig: read, deduplicated, capped, with the default system text filled in.

    Raises ValueError for a broken row (named by file and line) and for an empty result.
    """
    found = [prompt for source in config.sources for prompt in read_prompts(source, config.split)]
    if not found:
        raise ValueError(f"prompts={config.prompts!r}: no prompt in it")
    if config.system is not None:
        found = [prompt if prompt.system else replace(prompt, system=config.system) for prompt in found]
    unique = deduplicate(found)
    chosen = select(unique, limit=config.limit, per_domain=config.per_domain)
    if not chosen:
        raise ValueError(f"per_domain={config.per_domain}: leaves no prompt of {len(unique)}")
    if say is not None:
        mix = ", ".join(f"{name} {count}" for name, count in sorted(Counter(p.domain for p in chosen).items()))
        say(f"prompts: {len(chosen)} of {len(found)} ({len(found) - len(unique)} duplicates removed); {mix}")
    return chosen


# ---- overlap ------------------------------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Text for comparison: NFKC, lower case, every run of other than letters and digits becomes one space."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).lower()).strip()


def overlap(training: Iterable[Prompt], heldout: Iterable[Prompt]) -> list[tuple[str, str]]:
    """Pairs (training id, held-out id) with the same normalised conversation or the same opening turn."""
    keys: dict[str, str] = {}
    for prompt in heldout:
        keys.setdefault(normalise(" ".join(prompt.turns)), prompt.id)
        keys.setdefault(normalise(prompt.turns[0]), prompt.id)
    pairs = []
    for prompt in training:
        for text in (" ".join(prompt.turns), prompt.turns[0]):
            if (other := keys.get(normalise(text))) is not None:
                pairs.append((prompt.id, other))
                break
    return pairs


def check_overlap(training: Iterable[Prompt], heldout: Iterable[Prompt]) -> None:
    """Raise ValueError when a held-out prompt is also a training prompt (equal after `normalise`)."""
    if pairs := overlap(training, heldout):
        shown = ", ".join(f"{ours} = {theirs}" for ours, theirs in pairs[:3])
        raise ValueError(f"{len(pairs)} training prompts are also held-out prompts ({shown}): remove them from one side")


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over ids, system texts and turns in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.system, prompt.turns]).encode())
    return digest.hexdigest()
