"""Checks that need more than one section of a recipe, or the target's config.json. No weights load, nothing is converted."""

from __future__ import annotations

from collections.abc import Iterator

from ..models.facts import TargetFacts, target_facts
from .load import ConfigError
from .schema import Recipe


def check_recipe(recipe: Recipe, given: frozenset[str] = frozenset()) -> None:
    """Refuses a recipe whose parts do not fit together or do not fit its target.

    Args:
        recipe: a recipe whose fields are valid one by one.
        given: the keys that the user wrote. A default that cannot apply is dropped in silence, a written one is refused.

    Raises:
        ConfigError: every mistake, one line each.
    """
    lines = list(_among_sections(recipe, given))
    try:
        facts = target_facts(recipe.target)
    except ValueError as error:
        lines.append(str(error))
    else:
        lines += _against_target(recipe, facts)
    if lines:
        raise ConfigError(lines)


def _among_sections(recipe: Recipe, given: frozenset[str]) -> Iterator[str]:
    drafter, data = recipe.drafter, recipe.data
    headless = drafter.rank == 0 or drafter.head == "none"
    if headless and "drafter.survival_with_head" in given and drafter.survival_with_head:
        yield (
            "drafter.survival_with_head: True needs a correction head, but "
            + (
                f"drafter.rank is {drafter.rank}; set rank at least 1"
                if drafter.rank == 0
                else "drafter.head is none; choose one"
            )
            + ", or survival_with_head false"
        )
    if not drafter.survival_head and "objective.survival" in given and recipe.objective.survival > 0:
        yield f"objective.survival: {recipe.objective.survival} needs drafter.survival_head true; set one of them to 0 or true"
    yield from _phases(recipe)
    train = recipe.train
    if train.packing == "packed" and train.tokens_per_batch < data.max_length:
        yield (
            f"train.tokens_per_batch: {train.tokens_per_batch} is not allowed with packing; a row must hold the longest chat, "
            f"at least {data.max_length} (data.max_length)"
        )
    if train.fp8 and train.precision != "bf16":
        yield f"train.fp8: true is not allowed with train.precision {train.precision}; allowed with bf16"
    if (drafter.init == "checkpoint") != (drafter.checkpoint is not None):
        yield (
            f"drafter.checkpoint: {drafter.checkpoint!r} is not allowed with drafter.init {drafter.init}; it must be a folder "
            "with init checkpoint, and null otherwise"
        )
    if drafter.init != "checkpoint":
        for key in ("lora_rank", "checkpoint_layout"):
            if getattr(drafter, key):
                yield f"drafter.{key}: {getattr(drafter, key)!r} needs drafter.init checkpoint, got {drafter.init}"
    proposer = recipe.eval.proposer
    for key, slots in (("num_slots", recipe.eval.num_slots), ("proposer.num_slots", proposer.num_slots)):
        if slots is not None and slots > drafter.block_size and proposer.kind == "dspark":
            yield f"eval.{key}: {slots} is not allowed; it must be from 1 to {drafter.block_size} (drafter.block_size)"
    if data.max_length <= drafter.block_size:
        yield (
            f"data.max_length: {data.max_length} is not allowed; a row must be longer than a block, "
            f"at least {drafter.block_size + 1}"
        )
    if drafter.mask_token_id is not None and drafter.mask_token_id < 0:
        yield f"drafter.mask_token_id: {drafter.mask_token_id} is not allowed; it must be at least 0"


def _phases(recipe: Recipe) -> Iterator[str]:
    """Phases of the objective that the drafter or the answers cannot serve."""
    for number, phase in enumerate(recipe.objective.phases):
        if phase.survival and not recipe.drafter.survival_head:
            yield f"objective.phases[{number}].survival: {phase.survival} needs drafter.survival_head true"
    exact = recipe.objective.exact_on_answers
    if exact and (wrong := recipe.data.off_law()):
        yield f"{', '.join(exact)}: above 0 needs answers drawn from the law in the loss, but {'; '.join(wrong)}"


def _against_target(recipe: Recipe, facts: TargetFacts) -> Iterator[str]:
    drafter = recipe.drafter
    last = facts.num_layers - 2  # the last layer's output is never tapped: engines disagree on whether its norm is in it
    taps = drafter.tap_layers
    if taps is not None:
        allowed = f"it must be ascending layer ids from 0 to {last} ({facts.name} has {facts.num_layers} layers)"
        if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > last:
            yield f"drafter.tap_layers: {list(taps)} is not allowed; {allowed}"
    mask = drafter.mask_token_id
    if mask is not None and mask >= facts.vocab_size:
        yield f"drafter.mask_token_id: {mask} is not allowed; it must be from 0 to {facts.vocab_size - 1}"
    if mask is not None and mask in facts.eos_token_ids:
        yield (
            f"drafter.mask_token_id: {mask} is not allowed; it ends an answer of {facts.name}: choose a token from 0 to "
            f"{facts.vocab_size - 1} that never occurs in text"
        )
    reduced = drafter.draft_vocab_size
    if reduced is not None and reduced > facts.vocab_size:
        yield f"drafter.draft_vocab_size: {reduced} is not allowed; it must be from 2 to {facts.vocab_size}"
    if facts.max_positions:
        if recipe.data.max_length > facts.max_positions:
            yield (
                f"data.max_length: {recipe.data.max_length} is not allowed; it must be at most {facts.max_positions}, "
                f"the context of {facts.name}"
            )
        longest = max(recipe.eval.contexts) + recipe.eval.max_new_tokens
        if longest > facts.max_positions:
            yield (
                f"eval.contexts: {list(recipe.eval.contexts)} with max_new_tokens {recipe.eval.max_new_tokens} is not allowed; "
                f"together they must be at most {facts.max_positions}, the context of {facts.name}"
            )
