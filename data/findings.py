"""What the doctor looks at, and what it says about it. Used by the checks, the report and the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .chat import ChatFormat, Tokenised, TokenRow
from .config import DataConfig
from .source import Prompt

Level = Literal["error", "warning", "note"]
SHOWN = 3  # rows named in a finding


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found: `check` is its stable name, `rows` names the first few of `count` rows."""

    check: str
    level: Level
    reason: str
    fix: str
    rows: tuple[str, ...] = ()
    count: int = 0

    def line(self) -> str:
        """The finding in one line."""
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        where = f"{', '.join(self.rows)}{more}: " if self.rows else ""
        return f"{self.check}: {where}{self.reason}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Everything that is looked at.

    source: the answered conversations as they lie in the file (or came with the prompts), in order; tokenised: made of them.
    skipped: (id, prompt tokens) of prompts that fill the window; unanswered: ids of the others without an answer.
    target: name, revision, dtype and where known `weights` of the recipe's target. file: findings of reading.
    """

    config: DataConfig
    chat: ChatFormat
    source: Sequence[Mapping[str, Any]]
    tokenised: Tokenised
    vocab_size: int
    target: Mapping[str, Any]
    prompts: Sequence[Prompt] = ()
    heldout: Sequence[Prompt] = ()
    skipped: Sequence[tuple[str, int]] = ()
    unanswered: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None
    prompts_sha256: str | None = None
    file: Sequence[Finding] = ()
    anchor_share: float = 0.25
    block_size: int = 7
    draft_vocab_size: int | None = None
    places: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places.update({str(row.get("id", "")): int(row.get("index", n)) for n, row in enumerate(self.source)})

    @property
    def rows(self) -> list[TokenRow]:
        """The training rows."""
        return self.tokenised.rows

    def names(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Names of the first few rows: id and index."""
        return tuple(f"{i!r} (index {self.places[i]})" if i in self.places else repr(i) for i in list(ids)[:SHOWN])

    def finding(self, check: str, level: Level, ids: Sequence[str], reason: str, fix: str) -> Finding:
        """A finding about the rows of `ids`."""
        return Finding(check, level, reason, fix, self.names(ids), len(ids))

    def by_id(self) -> dict[str, Mapping[str, Any]]:
        """Source rows by id."""
        return {str(row.get("id", "")): row for row in self.source}

    def answers(self, row: TokenRow) -> list[list[int]]:
        """Token ids of every supervised run of a row."""
        return [row.input_ids[start:end] for start, end in runs(row.loss_mask)]


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Maximal runs [start, end) of true."""
    out, start = [], None
    for place, flag in enumerate([*mask, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            out.append((start, place))
            start = None
    return out
