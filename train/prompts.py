"""Which prompts must not be trained on. Loads no torch, so that prompts are checked before a model loads."""

from __future__ import annotations

from ..data.config import DataConfig
from ..data.source import Prompt, load_prompts


def heldout_prompts(source: str) -> list[Prompt]:
    """The prompts of the measurement (`eval.prompts`). Raises ValueError for a broken or empty set."""
    return load_prompts(DataConfig(prompts="builtin:heldout" if source == "builtin" else source, near_duplicates=None))
