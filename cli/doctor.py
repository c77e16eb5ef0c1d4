"""`draftsmith data doctor`: read what a recipe would train on, without the target unless it is to read rows itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..recipes.schema import ConfigError, Recipe
from . import pipeline


def run(name: str, overrides: list[str], *, probe: int = 0, to: Path | None = None, device: str = "auto") -> None:
    """Write doctor.html and doctor.json, print the findings, and raise ValueError when a check refuses the rows.

    probe: rows that the target reads to see whether it wrote them. Raises ConfigError or ValueError for a mistake in the recipe
    or its prompts, and for an output folder that is none of ours.
    """
    if probe < 0:
        raise ValueError(f"--probe: {probe} is not allowed; it must be at least 0")
    from ..recipes.check import check_recipe
    from ..recipes.schema import load_recipe, to_plain

    loaded = load_recipe(name, overrides)
    recipe, folder = loaded.value, Path(loaded.value.output)
    check_recipe(recipe, loaded.given)
    place = pipeline.pick_device(device) if probe else "cpu"
    locked = _lock(folder, to_plain(recipe), claim=to is None)

    from ..data import doctor, doctor_report
    from ..data.checks import refuse
    from ..data.findings import Finding, Subject
    from ..data.source import load_prompts
    from ..train.prompts import heldout_prompts

    prompts, heldout = load_prompts(recipe.data), heldout_prompts(recipe.eval.prompts)
    target = _load(recipe, place) if probe else None
    identity, facts, chat = _target(recipe, target)
    subject: Subject = doctor.gather(
        recipe.data, chat, folder, prompts=prompts, heldout=heldout, target=identity, vocab_size=facts.vocab_size,
        anchor_share=recipe.train.anchor_share, block_size=recipe.drafter.block_size,
        draft_vocab_size=recipe.drafter.draft_vocab_size,
    )  # fmt: skip
    found = doctor.probe_rows(subject, target, probe) if target is not None else None
    extra = []
    if locked:
        fix = "use the recipe that made it, or another output folder; the rows are judged against this recipe"
        extra.append(Finding("recipe", "warning", f"{folder} belongs to another recipe ({'; '.join(locked)})", fix))
    rows = len(subject.rows)
    report = doctor.examine(
        subject, probe=found, cache=_cache(recipe, facts, found.tokens_per_second if found else None), extra=extra,
        epochs=recipe.train.steps * recipe.train.rows * recipe.train.accumulation / rows if rows else None,
    )  # fmt: skip
    page = doctor_report.write(report, to or folder)
    doctor_report.show(report, page, pipeline.console())
    refuse([Finding(**{**entry, "rows": tuple(entry["rows"])}) for entry in report["findings"]])


def _lock(folder: Path, plain: dict[str, Any], *, claim: bool) -> list[str]:
    """Keys in which the folder's recipe differs; claims a free folder when `claim`. Raises ConfigError for a foreign one."""
    try:
        if pipeline.check_folder(folder, plain) and claim:
            pipeline.claim_folder(folder, plain)
    except ConfigError:
        differing = pipeline.lock_differences(folder, plain)
        if not differing:
            raise
        return differing
    return []


def _load(recipe: Recipe, device: str) -> Any:
    from ..models.target import load_target

    return load_target(recipe.target, device)


def _target(recipe: Recipe, target: Any | None) -> tuple[dict[str, Any], Any, Any]:
    """Identity, facts and chat format of the recipe's target; its weights are known only when it is loaded."""
    from ..data.chat import ChatFormat
    from ..data.manifest import target_identity
    from ..models.facts import resolve_target, target_facts

    facts, cfg = target_facts(recipe.target), recipe.target
    if target is not None:
        chat = ChatFormat(target.tokenizer, template_args=recipe.data.template_args, eos_ids=target.eos_token_ids)
        return target_identity(target, name=cfg.name, revision=cfg.revision), facts, chat
    from transformers import AutoTokenizer, GenerationConfig

    source = resolve_target(cfg)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=cfg.revision)
    try:  # as Target.eos_token_ids: those of the generation config and of the tokenizer
        declared = GenerationConfig.from_pretrained(source, revision=cfg.revision).eos_token_id
    except OSError:
        declared = list(facts.eos_token_ids)
    ids = {i for i in [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id] if i is not None}
    chat = ChatFormat(tokenizer, template_args=recipe.data.template_args, eos_ids=ids)
    return {"name": cfg.name, "revision": cfg.revision, "dtype": cfg.dtype}, facts, chat


def _cache(recipe: Recipe, facts: Any, measured: float | None) -> dict[str, Any]:
    """What `doctor.cache_estimate` needs to know of the target."""
    from ..models.config import default_tap_layers

    drafter = recipe.drafter
    taps = drafter.tap_layers or default_tap_layers(facts.num_layers, drafter.num_taps)
    speed, basis = (measured, "measured on the rows of the probe") if measured else _speed(recipe)
    return {
        "hidden_size": facts.hidden_size, "num_taps": len(taps), "dtype": recipe.target.dtype,
        "lse": drafter.draft_vocab_size is not None, "tokens_per_second": speed, "basis": basis,
        "features": recipe.data.features, "storage": recipe.data.cache_storage,
    }  # fmt: skip


def _speed(recipe: Recipe) -> tuple[float, str]:
    """Tokens a second of the target's forward pass on this machine, from its weights and one matrix product of its shape."""
    import time

    import torch

    from ..models.facts import read_config, text_config

    text = text_config(read_config(recipe.target))
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or hidden // heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    weights = text.num_hidden_layers * hidden * (2 * width * (heads + keys) + 3 * inner)
    dtype = getattr(torch, recipe.target.dtype)
    left, right = torch.ones(256, hidden, dtype=dtype), torch.ones(hidden, inner, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return 256 * hidden * inner / best / weights, "at the speed of one matrix product on this CPU; --probe measures"
