"""Which answers the term `exact` may see: W_{k-1} alpha_k is an acceptance only on text drawn from the loss's own p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.chat import TokenRow
from ..data.config import DataConfig, GenerationConfig
from ..losses.config import ObjectiveConfig


def drawn_rows(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Rows whose answers were drawn at temperature 1 (rows that do not say are taken to be)."""
    return [row for row in rows if row.temperature in (None, 1.0)]


def refuse_other_law(objective: ObjectiveConfig, data: DataConfig, manifest: Mapping[str, Any] | None = None) -> None:
    """Refuse a phase with `exact` whose answers were not drawn at temperature 1 without truncation, as p is in the loss.

    manifest: of the answers, where they are made already.

    Raises ValueError naming the phase and every setting that differs.
    """
    keys = objective.exact_on_answers
    wrong = data.off_law() if keys else []
    if keys and manifest is not None:
        made = {name: manifest["generation"][name] for name in ("temperature", "top_k", "top_p", "greedy_share")}
        wrong = [f"the answers' manifest has {line}" for line in GenerationConfig(**made).off_law()]
    if wrong:
        raise ValueError(f"{', '.join(keys)}: above 0 needs answers drawn from the law in the loss, but {'; '.join(wrong)}")
