"""What a cycle costs on this machine: a measured table, interpolated.

A cycle of R rows that drafts n of them with G slots and verifies T tokens in all takes

    draft(n, G) + draft(R - n, 0) + verify(R, T) + rest(R, T)

in the parts of EngineStats: draft = draft_s + head_s (the context update of a commit belongs to it; slots = 0 is what a row
without a draft costs the proposer), verify = verify_s, rest = rest_s + schedule_s. The tables are measured by
`draftsmith profile` (eval/profile.py) and say nothing about another machine, dtype or target: `load` refuses those.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1
GREEDY, SAMPLED = "greedy", "sampled"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostTable:
    """Milliseconds by grid point; forced monotone along every axis when made.

    rows, slots, contexts: the grid, ascending; slots[0] = 0 is a plain cycle, and slots[k] stands for slots[k] drafts in every
    row, so 1 + slots[k] tokens a row. verify[c][r][k]; draft[kind][c][r][k] and rest[kind][r][k] for kind greedy and sampled.
    ragged: the target's pass costs what its tokens cost, not rows x the widest row. acceptance[kind]: conditional acceptance
    per slot seen so far, the scheduler's prior. drafter: what identifies the proposer (a hash, a name). notes: how it was
    measured.
    """

    hardware: str
    threads: int
    dtype: str
    target: str
    drafter: str
    ragged: bool
    rows: list[int]
    slots: list[int]
    contexts: list[int]
    verify: list[list[list[float]]]
    draft: dict[str, list[list[list[float]]]]
    rest: dict[str, list[list[float]]]
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = (len(self.contexts), len(self.rows), len(self.slots))
        for name, axis in (("rows", self.rows), ("slots", self.slots), ("contexts", self.contexts)):
            if not axis or sorted(set(axis)) != list(axis):
                raise ValueError(f"costs: {name}: {axis} is not allowed (ascending and not empty)")
        if self.slots[0] != 0 or self.rows[0] < 1:
            raise ValueError(f"costs: slots {self.slots}, rows {self.rows}: slots start at 0, rows at 1 or more")
        parts: list[tuple[str, Any, tuple[int, ...]]] = [("verify", self.verify, grid)]
        parts += [(f"draft.{kind}", self.draft.get(kind), grid) for kind in (GREEDY, SAMPLED)]
        parts += [(f"rest.{kind}", self.rest.get(kind), grid[1:]) for kind in (GREEDY, SAMPLED)]
        for name, values, shape in parts:
            if values is None or np.shape(values) != shape or not np.isfinite(values).all() or np.min(values) < 0:
                raise ValueError(f"costs: {name}: a table of {shape} finite times of 0 or more is needed")

    @classmethod
    def from_functions(
        cls,
        *,
        draft: Callable[[int, int, int], float],
        verify: Callable[[int, int, int], float],
        rest: Callable[[int], float] = lambda tokens: 0.0,
        rows: Sequence[int] = (1, 2, 4, 8, 16),
        slots: Sequence[int] = tuple(range(9)),
        contexts: Sequence[int] = (128, 1024, 4096),
        **identity: Any,
    ) -> CostTable:
        """A table out of formulas in milliseconds (tests, what-if questions): draft(rows, slots, context), verify(rows, tokens,
        context), rest(tokens). Greedy and sampled cost the same."""
        drafts = [[[float(draft(r, k, c)) for k in slots] for r in rows] for c in contexts]
        rests = [[float(rest(r * (1 + k))) for k in slots] for r in rows]
        named: dict[str, Any] = {
            "hardware": "formula",
            "threads": 1,
            "dtype": "float32",
            "target": "formula",
            "drafter": "",
            "ragged": True,
        }
        return cls(
            rows=list(rows), slots=list(slots), contexts=list(contexts),
            verify=[[[float(verify(r, r * (1 + k), c)) for k in slots] for r in rows] for c in contexts],
            draft={GREEDY: drafts, SAMPLED: drafts}, rest={GREEDY: rests, SAMPLED: rests}, **(named | identity),
        )  # fmt: skip

    # ---- questions ----------------------------------------------------------------------------------------------------

    def draft_ms(self, rows: int, slots: int, context: float, hot: bool = False) -> float:
        """Drafting `slots` tokens for each of `rows` rows, its context update included; slots = 0: the update alone."""
        return _lookup(self._drafts[hot], self._axes, context, rows, slots) if rows else 0.0

    def verify_ms(self, rows: int, tokens: float, context: float) -> float:
        """The target's pass over `tokens` tokens (anchors included) of `rows` rows at a mean committed length `context`."""
        return _lookup(self._verify, self._axes, context, rows, tokens / rows - 1)

    def rest_ms(self, tokens: float, hot: bool, rows: int | None = None) -> float:
        """Rule, sampling and bookkeeping over `tokens` positions; rows None: the fewest the table can spread them over."""
        if rows is None:
            rows = next((r for r in self.rows if tokens <= r * (1 + self.slots[-1])), self.rows[-1])
        return _lookup(self._rest[hot], ([0.0], *self._axes[1:]), 0.0, rows, tokens / rows - 1)

    def cycle_ms(
        self, rows: int, slots: int, context: float, *, hot: bool, drafted: int | None = None, tokens: float | None = None
    ) -> float:
        """A whole cycle: `drafted` of the rows (None: all) with `slots` slots, `tokens` verified (None: all of them)."""
        drafted = (rows if drafted is None else drafted) if slots else 0
        tokens = rows + drafted * slots if tokens is None else tokens
        draft = self.draft_ms(drafted, slots, context, hot) + self.draft_ms(rows - drafted, 0, context, hot)
        return draft + self.verify_ms(rows, tokens, context) + self.rest_ms(tokens, hot, rows)

    def pass_curve(self, rows: int, context: float, hot: bool, extra: int) -> Floats:
        """verify + rest over rows + m tokens, m = 0..extra: float64 [extra + 1], never falling."""
        width = np.arange(extra + 1) / rows
        curve = _along_slots(self._verify, self._axes, context, rows, width)
        curve = curve + _along_slots(self._rest[hot], ([0.0], *self._axes[1:]), 0.0, rows, width)
        return np.maximum.accumulate(curve)

    def draft_table(self, rows: int, slots: int, context: float, hot: bool) -> Floats:
        """Cost of drafting n of the rows with g slots, the others' upkeep included: float64 [rows + 1, slots + 1].

        n = 0 and g = 0 are the plain cycle.
        """
        width = np.arange(slots + 1, dtype=np.float64)
        table = np.zeros((rows + 1, slots + 1))
        for n in range(1, rows + 1):
            table[n] = _along_slots(self._drafts[hot], self._axes, context, n, width)
        idle = table[:, 0].copy()
        table += idle[::-1, None]  # the rows - n that are not drafted
        table[:, 0] = table[0] = idle[rows]
        return table

    @cached_property
    def _axes(self) -> tuple[list[float], list[float], list[float]]:
        return [float(c) for c in self.contexts], [float(r) for r in self.rows], [float(k) for k in self.slots]

    @cached_property
    def _verify(self) -> Floats:
        return np.asarray(self.verify, dtype=np.float64)

    @cached_property
    def _drafts(self) -> dict[bool, Floats]:
        return {kind == SAMPLED: np.asarray(values, dtype=np.float64) for kind, values in self.draft.items()}

    @cached_property
    def _rest(self) -> dict[bool, Floats]:
        return {kind == SAMPLED: np.asarray(values, dtype=np.float64)[None] for kind, values in self.rest.items()}

    # ---- files --------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> Path:
        """Write the JSON file (atomically). Returns its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        hardware: str,
        dtype: str,
        target: str,
        threads: int | None = None,
        drafter: str | None = None,
    ) -> CostTable:
        """Read a table that was measured here: ValueError naming what differs, or when the file is no cost table.

        threads and drafter are compared where given.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"costs: {path} {error.strerror}; measure it with `draftsmith profile`") from error
        except ValueError as error:
            raise ValueError(f"costs: {path} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise ValueError(f"costs: {path} is not a cost table of schema {SCHEMA}; measure it with `draftsmith profile`")
        try:
            table = cls(**content)
        except TypeError as error:
            raise ValueError(f"costs: {path} is not a cost table: {error}") from error
        wanted = {"hardware": hardware, "dtype": dtype, "target": target, "threads": threads, "drafter": drafter}
        for key, value in wanted.items():
            if value is not None and getattr(table, key) != value:
                raise ValueError(
                    f"costs: {path} was measured with {key} {getattr(table, key)!r}, this is {value!r}; "
                    "measure again with `draftsmith profile`"
                )
        return table

    def with_acceptance(self, acceptance: dict[str, list[float]]) -> CostTable:
        """The same table with another prior (LoadAware.learnt())."""
        return dataclasses.replace(self, acceptance={**self.acceptance, **acceptance})


def monotone(table: Floats) -> Floats:
    """Non-decreasing along every axis: isotonic fits in turn, which move noise both ways, then a running maximum."""
    fitted = np.asarray(table, dtype=np.float64)
    for _ in range(2):
        for axis in range(fitted.ndim):
            fitted = np.apply_along_axis(_isotonic, axis, fitted)
    for axis in range(fitted.ndim):
        fitted = np.maximum.accumulate(fitted, axis=axis)
    return fitted


def _isotonic(values: Floats) -> Floats:
    """Least-squares non-decreasing fit: neighbours that violate the order are pooled into their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, count), (other, more) = pools[-2], pools.pop()
            pools[-1] = [(mean * count + other * more) / (count + more), count + more]
    return np.concatenate([np.full(int(count), mean) for mean, count in pools])


def _bracket(axis: Sequence[float], value: float) -> tuple[int, float]:
    """(i, w): value = (1 - w) axis[i] + w axis[i+1]; w > 1 beyond the last point, never below 0."""
    if len(axis) == 1:
        return 0, 0.0
    i = 0
    while i < len(axis) - 2 and value >= axis[i + 1]:
        i += 1
    return i, max(0.0, (value - axis[i]) / (axis[i + 1] - axis[i]))


def _plane(table: Floats, axes: tuple[Sequence[float], ...], context: float, rows: float) -> Floats:
    """The costs over slots at one context and number of rows: float64 [K]. Linear in both (bytes and operations are)."""
    c, w = _bracket(axes[0], context)
    plane = table[c] if w == 0.0 else (1 - w) * table[c] + w * table[c + 1]
    r, w = _bracket(axes[1], rows)
    return plane[r] if w == 0.0 else (1 - w) * plane[r] + w * plane[r + 1]


def _along_slots(table: Floats, axes: tuple[Sequence[float], ...], context: float, rows: float, slots: Floats) -> Floats:
    values, grid = _plane(table, axes, context, rows), axes[2]
    found = np.interp(slots, grid, values)
    if len(grid) > 1:
        slope = max(0.0, float(values[-1] - values[-2]) / (grid[-1] - grid[-2]))
        found = found + slope * np.clip(slots - grid[-1], 0.0, None)
    return found


def _lookup(table: Floats, axes: tuple[Sequence[float], ...], context: float, rows: float, slots: float) -> float:
    values = _plane(table, axes, context, rows)
    k, w = _bracket(axes[2], slots)
    return float(values[k]) if w == 0.0 else float((1 - w) * values[k] + w * values[k + 1])
