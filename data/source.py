"""Prompts of a recipe: sources read, duplicates removed, mixed and capped, overlap with evaluation prompts refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .config import DataConfig, SourceConfig
from .reading import raw_rows
from .schema import TEXT_WORDS, Prompt, to_prompt

__all__ = [
    "Prompt", "Selection", "SourceRows", "check_overlap", "deduplicate", "load_prompts", "mixture", "normalise", "overlap",
    "prompts_hash", "read_prompts", "read_source", "select", "select_prompts", "to_prompt",
]  # fmt: skip


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceRows:
    """One source as it was read: its prompts in order, and the rows of each of its files."""

    source: SourceConfig
    prompts: list[Prompt]
    files: Counter[str]


def read_source(
    source: SourceConfig, *, split: str = "train", streaming: int | None = None, text_words: int = TEXT_WORDS
) -> SourceRows:
    """All prompts of one source. Raises ValueError naming the place, the field and what is allowed for a row that is none."""
    prompts: list[Prompt] = []
    files: Counter[str] = Counter()
    for file, place, row in raw_rows(source, split=split, streaming=streaming):
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: a row must be an object, got {type(row).__name__}")
        try:
            prompts.append(to_prompt(row, domain=source.domain, text_words=text_words))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        files[file] += 1
    return SourceRows(source, prompts, files)


def read_prompts(source: str, split: str = "train") -> list[Prompt]:
    """All prompts of one source, in order. Raises ValueError as `read_source`."""
    return read_source(SourceConfig(source=source), split=split).prompts


# ---- selection ----------------------------------------------------------------------------------------------------


def _same(prompt: Prompt) -> tuple[str | None, str]:
    """What two prompts must share besides their turns to be the same."""
    return prompt.system, json.dumps(prompt.tools, sort_keys=True, default=str) if prompt.tools else ""


def deduplicate(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Keep the first of prompts with equal system text, tools and turns; make ids unique by a suffix."""
    seen = set()
    ids: set[str] = set()
    kept = []
    for prompt in prompts:
        key = (*_same(prompt), prompt.turns)
        if key in seen:
            continue
        seen.add(key)
        name, count = prompt.id, 1
        while name in ids:
            count += 1
            name = f"{prompt.id}~{count}"
        ids.add(name)
        kept.append(prompt if name == prompt.id else replace(prompt, id=name))
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


def mixture(parts: Sequence[Sequence[Prompt]], weights: Sequence[float], limit: int | None) -> list[list[Prompt]]:
    """The largest part of each source such that their sizes are as the weights (to one prompt) and `limit` is kept.

    No prompt is repeated: the source that is scarcest for its weight sets the size of the whole.
    """
    share = [weight / sum(weights) for weight in weights]
    total = min(len(part) / own for part, own in zip(parts, share, strict=True))
    total = min(total, limit) if limit is not None else total
    sizes = [min(len(part), int(own * total + 1e-9)) for part, own in zip(parts, share, strict=True)]
    short = sorted(range(len(parts)), key=lambda n: sizes[n] - share[n] * total)  # largest remainders first
    for n in short[: int(total + 1e-9) - sum(sizes)]:
        sizes[n] = min(len(parts[n]), sizes[n] + 1)
    return [select(part, limit=size, per_domain={}) for part, size in zip(parts, sizes, strict=True)]


def _interleaved(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The parts in one list, in which every prefix holds each of them in proportion to its size."""
    placed = [((i + 0.5) / len(part), n, prompt) for n, part in enumerate(parts) for i, prompt in enumerate(part)]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]


@dataclass(frozen=True, slots=True)
class Selection:
    """The prompts of a recipe and how they came about.

    read: the sources; used: prompts of each that were chosen. near holds (dropped id, kept id, similarity).
    """

    prompts: list[Prompt]
    read: list[SourceRows]
    used: list[int]
    equal: int
    near: list[tuple[str, str, float]] = field(default_factory=list)

    @property
    def found(self) -> int:
        """Prompts read."""
        return sum(len(rows.prompts) for rows in self.read)

    def line(self) -> str:
        """The selection in one line."""
        gone = [f"{self.equal} duplicates"] + ([f"{len(self.near)} near duplicates"] if self.near else [])
        mix = ", ".join(f"{name} {count}" for name, count in sorted(Counter(p.domain for p in self.prompts).items()))
        parts = f"; sources {', '.join(map(str, self.used))}" if len(self.used) > 1 else ""
        return f"prompts: {len(self.prompts)} of {self.found} ({' and '.join(gone)} removed); {mix}{parts}"


def select_prompts(config: DataConfig) -> Selection:
    """Read all sources, leave out duplicates, order, cap and mix.

    The order is that of the sources, or that of `data.shuffle`; equal settings and files give equal prompts. Of duplicates the
    first is kept, also across sources.

    Raises ValueError for a broken row (named by file and line) and for an empty result.
    """
    read = [
        read_source(source, split=config.split, streaming=config.streaming, text_words=config.text_words)
        for source in config.sources
    ]
    found = [(n, prompt) for n, rows in enumerate(read) for prompt in rows.prompts]
    if not found:
        raise ValueError(f"prompts={config.prompts!r}: no prompt in it")
    if config.system is not None:
        found = [(n, prompt if prompt.system else replace(prompt, system=config.system)) for n, prompt in found]
    where: dict[tuple, int] = {}
    for n, prompt in found:
        where.setdefault((*_same(prompt), prompt.turns), n)
    unique = deduplicate(prompt for _, prompt in found)
    kept, near = _without_near(unique, config.near_duplicates)
    parts: list[list[Prompt]] = [[] for _ in read]
    for prompt in kept:
        parts[where[(*_same(prompt), prompt.turns)]].append(prompt)
    if config.shuffle is not None:
        for n, part in enumerate(parts):
            random.Random(f"{config.shuffle}:{n}").shuffle(part)
    parts = [part[: rows.source.cap] for part, rows in zip(parts, read, strict=True)]
    chosen = _mixed(parts, [rows.source.weight for rows in read], config)
    if not any(chosen):
        raise ValueError(f"per_domain={config.per_domain}: leaves no prompt of {len(unique)}")
    weighted = read[0].source.weight is not None
    together = _interleaved(chosen) if weighted and len(chosen) > 1 else [prompt for part in chosen for prompt in part]
    return Selection(together, read, [len(part) for part in chosen], len(found) - len(unique), near)


def _without_near(prompts: list[Prompt], threshold: float | None) -> tuple[list[Prompt], list[tuple[str, str, float]]]:
    if threshold is None:
        return prompts, []
    from .dedup import near_duplicates

    pairs = near_duplicates(["\n".join(p.turns) for p in prompts], threshold, [_same(p) for p in prompts])
    gone = {pair.index for pair in pairs}
    named = [(prompts[pair.index].id, prompts[pair.other].id, pair.similarity) for pair in pairs]
    return [prompt for n, prompt in enumerate(prompts) if n not in gone], named


def _mixed(parts: list[list[Prompt]], weights: Sequence[float | None], config: DataConfig) -> list[list[Prompt]]:
    """Caps of the domains over all sources, then the weights, or without weights the limit over all domains."""
    allowed = select([p for part in parts for p in part], limit=None, per_domain=config.per_domain)
    if weights[0] is None:
        allowed = select(allowed, limit=config.limit, per_domain={})
    ids = {prompt.id for prompt in allowed}
    parts = [[prompt for prompt in part if prompt.id in ids] for part in parts]
    if weights[0] is None:
        return parts
    empty = [n for n, part in enumerate(parts) if not part]
    if empty:
        raise ValueError(
            f"prompts[{empty[0]}]: no prompt of it is left after duplicates and caps, so no mixture can have it; leave it out"
        )
    return mixture(parts, [weight or 0.0 for weight in weights], config.limit)


def load_prompts(config: DataConfig, *, say: Callable[[str], None] | None = None) -> list[Prompt]:
    """The prompts of a DataConfig, as `select_prompts`, which is said in one line."""
    found = select_prompts(config)
    if say is not None:
        say(found.line())
    return found.prompts


# ---- overlap ------------------------------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Text for comparison: NFKC, lower case, every run of other than letters and digits becomes one space."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).lower()).strip()


def overlap(training: Sequence[Prompt], heldout: Sequence[Prompt], *, near: float | None = None) -> list[tuple[str, str]]:
    """Pairs (training id, held-out id) with the same normalised conversation or the same opening turn.

    With `near` also those whose conversations or opening turns are at least so similar (`dedup.near_overlap`).
    """
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
    if near is not None:
        pairs += _near_pairs(training, heldout, near, {ours for ours, _ in pairs})
    return pairs


def _near_pairs(training: Sequence[Prompt], heldout: Sequence[Prompt], near: float, known: set[str]) -> list[tuple[str, str]]:
    from .dedup import near_overlap

    own = _texts([prompt for prompt in training if prompt.id not in known])
    theirs = _texts(heldout)
    pairs: dict[str, str] = {}
    for pair in near_overlap([text for _, text in own], [text for _, text in theirs], near):
        pairs.setdefault(own[pair.index][0], theirs[pair.other][0])
    return list(pairs.items())


def _texts(prompts: Iterable[Prompt]) -> list[tuple[str, str]]:
    """(id, text) of every conversation and, where it is longer, of its opening turn."""
    out = []
    for prompt in prompts:
        out += [(prompt.id, text) for text in dict.fromkeys((" ".join(prompt.turns), prompt.turns[0]))]
    return out


def check_overlap(training: Iterable[Prompt], heldout: Iterable[Prompt], *, near: float | None = None) -> None:
    """Raise ValueError naming the pairs when a held-out prompt is also a training prompt: equal after `normalise`, or with
    `near` at least so similar.
    """
    training, heldout = list(training), list(heldout)
    if pairs := overlap(training, heldout, near=near):
        exact = set(overlap(training, heldout))
        shown = ", ".join(f"{ours} {'=' if (ours, theirs) in exact else '~'} {theirs}" for ours, theirs in pairs[:3])
        texts = {prompt.id: prompt.turns[0] for prompt in (*heldout, *training)}
        example = " ".join(texts[pairs[0][0]].split())
        example = example if len(example) <= 80 else example[:77] + "..."
        raise ValueError(
            f"{len(pairs)} training prompts are also held-out prompts ({shown}): remove them from one side; the first is "
            f"{example if len(example) <= 80 else example[:77] + '...'!r}"
        )


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over ids, system texts, turns and tools in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        tools = [prompt.tools] if prompt.tools else []
        digest.update(json.dumps([prompt.id, prompt.system, prompt.turns, *tools]).encode())
    return digest.hexdigest()
