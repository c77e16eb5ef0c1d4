"""`draftsmith data sources` and `draftsmith data vocab`: look at prompts and at the draft vocabulary; no weights load."""

from __future__ import annotations

from pathlib import Path

from . import pipeline


def sources(name: str, overrides: list[str]) -> None:
    """Print what was recognised in the recipe's prompt sources. Raises ValueError for a broken source."""
    from ..data.listing import listing, show
    from ..data.source import select_prompts
    from ..recipes.schema import load_recipe
    from ..train.prompts import heldout_prompts

    recipe = load_recipe(name, overrides).value
    found = select_prompts(recipe.data)
    heldout = heldout_prompts(recipe.eval.prompts)
    show(listing(found, heldout, near=recipe.data.doctor.max_overlap), pipeline.console())


def vocab(name: str, overrides: list[str]) -> None:
    """Print what draft vocabularies cover of the recipe's answers, by size. Raises ValueError where there are none."""
    from ..recipes.check import check_recipe
    from ..recipes.schema import load_recipe

    loaded = load_recipe(name, overrides)
    recipe = loaded.value
    check_recipe(recipe, loaded.given)

    from ..data import vocab as vocabulary
    from ..data import vocab_report
    from ..data.chat import tokenise_each
    from ..data.regenerate import read_answers
    from ..data.source import load_prompts
    from ..data.stage import given_rows
    from .doctor import _target

    _, facts, chat = _target(recipe, None)
    path = Path(recipe.output) / "answers" / "answers.jsonl"
    given = recipe.data.answers == "given"
    source = given_rows(load_prompts(recipe.data)) if given else read_answers(path)
    if not source:
        raise ValueError(f"{path}: no answers yet; run `draftsmith data regenerate {name}` first")
    rows = tokenise_each(source, chat, recipe.data.max_length, supervise=recipe.data.supervise).rows
    warmth = {str(row.get("id", "")): row["temperature"] for row in source if "temperature" in row}
    if len(set(warmth.values())) < 2:
        warmth = {}
    size = recipe.drafter.draft_vocab_size
    sample = vocabulary.Sample(
        rows, facts.vocab_size, ranks=vocabulary.merge_ranks(chat.tokenizer, facts.vocab_size),
        groups=lambda row: (row.domain, *([f"T={warmth[row.id]:g}"] if row.id in warmth else [])),
    )  # fmt: skip
    entries = vocab_report.table(sample, tokenizer=chat.tokenizer, eos_ids=sorted(chat.eos_ids), recipe=size)
    console = pipeline.console()
    console.print(f"{len(rows)} answers with {sum(row.num_supervised for row in rows)} tokens", highlight=False)
    vocab_report.show(entries, width=facts.vocab_size, recipe=size, console=console)
