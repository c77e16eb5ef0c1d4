"""`draftsmith plan data`: bytes, hours and time of a recipe's answers and features, before anything is written.

Everything is computed from the prompts, the tokenizer and the target's config.json; no weights load. Where the answers are
there already their real lengths are used, else every answer is taken to be `max_new_tokens` long, or as the window allows.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Speeds:
    """Tokens a second: features (the target reads) and answers (it writes), each with how it was found."""

    features: float
    features_by: str
    answers: float
    answers_by: str


@dataclass(frozen=True)
class DataPlan:
    """What a recipe will write and compute. Bytes; seconds of one device; times every row's features are computed."""

    rows: int
    tokens: int
    supervised: int
    measured: bool  # lengths are of answers that exist
    epochs: float
    bytes_per_token: int
    cache_bytes: int
    kept_bytes: int
    free_bytes: int
    answer_seconds: float
    passes: dict[str, float]  # mode -> how often a row is computed, on average
    seconds: dict[str, float]  # mode -> of computing features
    speeds: Speeds


def run(recipe: str, overrides: list[str], *, speed: float | None = None, answer_speed: float | None = None,
        to: Path | None = None) -> DataPlan:  # fmt: skip
    """Print the plan; `to`: also write it as JSON. Raises ValueError for a recipe that does not hold together."""
    from rich.console import Console

    from ..recipes.check import check_recipe
    from ..recipes.schema import load_recipe

    for flag, value in (("--tokens-per-second", speed), ("--answers-per-second", answer_speed)):
        if value is not None and not value > 0:
            raise ValueError(f"{flag}: got {value:g}, allowed: above 0")
    loaded = load_recipe(recipe, overrides)
    check_recipe(loaded.value, loaded.given)
    plan = make(loaded.value, speed=speed, answer_speed=answer_speed)
    console = Console()
    for name, text in lines(plan, loaded.value):
        console.print(f"{name:<22}{text}", highlight=False, soft_wrap=True)
    if to is not None:
        to.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
        console.print(f"json: {to}", soft_wrap=True, highlight=False)
    return plan


def make(recipe: Any, *, speed: float | None = None, answer_speed: float | None = None) -> DataPlan:
    """The plan of a checked recipe. speed, answer_speed: tokens a second, measured elsewhere."""
    from ..data.features import row_bytes
    from ..models.config import default_tap_layers
    from ..models.facts import target_facts
    from ..train.feature_cache import epochs_per_micro_batch
    from ..train.strategy import resolved

    rows, missing = _lengths(recipe)
    facts, data, train = target_facts(recipe.target), recipe.data, recipe.train
    taps = recipe.drafter.tap_layers or default_tap_layers(facts.num_layers, recipe.drafter.num_taps)
    manifest = {
        "hidden_size": facts.hidden_size, "tap_layers": taps, "dtype": recipe.target.dtype, "storage": data.cache_storage,
        "lse": recipe.drafter.draft_vocab_size is not None,
    }  # fmt: skip
    whole = sum(row_bytes(length, manifest) for length, _ in rows)
    world = train.expected_world_size or 1
    train = resolved(train, world)
    stand_in = [_Row(range(length)) for length, _ in rows]
    epochs = train.steps * train.accumulation * epochs_per_micro_batch(train, stand_in, world)  # type: ignore[arg-type]
    budget = whole if data.cache_gib is None else int(data.cache_gib * GIB)
    kept = min(whole, budget)
    tokens, speeds = sum(length for length, _ in rows), _speeds(recipe, speed, answer_speed)
    lost = (1.0 - kept / max(whole, 1)) * max(epochs - 1.0, 0.0)  # reads of rows that found no room
    passes = {"online": epochs, "hybrid": min(epochs, 1.0) + lost, "cached": 1.0 + lost}
    return DataPlan(
        rows=len(rows), tokens=tokens, supervised=sum(taught for _, taught in rows), measured=missing == 0, epochs=epochs,
        bytes_per_token=row_bytes(1, manifest), cache_bytes=whole, kept_bytes=kept if data.features != "online" else 0,
        free_bytes=_free(Path(recipe.output)), answer_seconds=missing / speeds.answers,
        passes=passes, seconds={mode: tokens * count / speeds.features for mode, count in passes.items()}, speeds=speeds,
    )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    input_ids: range


def _lengths(recipe: Any) -> tuple[list[tuple[int, int]], int]:
    """(tokens, supervised tokens) of every row, and how many answer tokens are still to be made."""
    from ..data.chat import ChatFormat, tokenise_all
    from ..data.regenerate import read_answers
    from ..data.source import load_prompts
    from ..data.stage import given_rows
    from ..models.facts import target_facts
    from ..models.target import load_tokenizer

    data, quiet = recipe.data, lambda line: None
    prompts = load_prompts(data, say=quiet)
    tokenizer = load_tokenizer(recipe.target)
    chat = ChatFormat(tokenizer, template_args=data.template_args, eos_ids=target_facts(recipe.target).eos_token_ids)
    answers = Path(recipe.output) / "answers" / "answers.jsonl"
    answered = given_rows(prompts) if data.answers == "given" else read_answers(answers) if answers.is_file() else []
    done: list[tuple[int, int]] = []
    if answered:
        rows = tokenise_all(answered, chat, data.max_length, supervise=data.supervise, say=quiet).rows
        done = [(len(row.input_ids), row.num_supervised) for row in rows]
    if data.answers == "given" or len(answered) >= len(prompts) * data.generation.samples_per_prompt:
        return done, 0
    known = {row["id"].split("#")[0] for row in answered}
    missing = 0
    for prompt in prompts:
        if prompt.id in known:
            continue
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        length, taught = 0, 0
        for turn in prompt.turns:
            messages = [*messages, {"role": "user", "content": turn}]
            opening = length + len(
                chat.render(messages[-1:] if length else messages, generation_prompt=True, tools=prompt.tools)
            )
            answer = min(data.generation.max_new_tokens, data.max_length - opening)
            if answer < 2:
                break
            length, taught = opening + answer, taught + answer
        if taught:
            done += [(length, taught)] * data.generation.samples_per_prompt
            missing += taught * data.generation.samples_per_prompt
    if not done:
        raise ValueError(f"data.max_length: {data.max_length} leaves no row of {len(prompts)} prompts")
    return done, missing


def _speeds(recipe: Any, speed: float | None, answer_speed: float | None) -> Speeds:
    """As given, else the matrix-product rate of this CPU over 2 P operations a token: an upper bound of what is reached."""
    weights = _decoder_weights(recipe)
    rate, where = _operations_per_second(recipe.target.dtype)
    guess = rate / (2.0 * weights)
    by = f"at most: {rate / 1e12:.2g} TFLOP/s of one matrix product on {where}, {weights / 1e6:.0f}M decoder weights"
    return Speeds(
        speed or guess, "as given" if speed else by,
        answer_speed or (speed or guess) / 4.0, "as given" if answer_speed else "a quarter of the above (decoding, batched)",
    )  # fmt: skip


def _decoder_weights(recipe: Any) -> int:
    from ..models.facts import read_config, text_config

    text = text_config(read_config(recipe.target))
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or hidden // heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    return int(text.num_hidden_layers * hidden * (2 * width * (heads + keys) + 3 * inner))


def _operations_per_second(dtype_name: str) -> tuple[float, str]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 512
    left = torch.ones(size, size, dtype=getattr(torch, dtype_name), device=device)
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        left @ left
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best, "this GPU" if device == "cuda" else "this CPU"


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def lines(plan: DataPlan, recipe: Any) -> list[tuple[str, str]]:
    """The plan in words: (name, text)."""
    from ..train.strategy import resolved

    data, world = recipe.data, recipe.train.expected_world_size or 1
    together = resolved(recipe.train, world).accumulation * world
    most = data.generation.max_new_tokens
    lengths = "as answered" if plan.measured else f"answers not made yet are taken as {most} tokens, the most"
    out = [
        ("rows", f"{plan.rows} with {plan.tokens:,} tokens, {plan.supervised:,} supervised ({lengths})"),
        ("epochs", f"{plan.epochs:.2f} ({recipe.train.steps} steps of {together} micro-batches)"),
    ]
    if plan.answer_seconds:
        out.append(
            ("answers", f"{_hours(plan.answer_seconds)} at {plan.speeds.answers:,.0f} tokens/s ({plan.speeds.answers_by})")
        )
    size = f"{plan.bytes_per_token:,} bytes a token, {_size(plan.cache_bytes)} for all rows (storage: {data.cache_storage})"
    out.append(("features", f"{size}; {_size(plan.free_bytes)} free"))
    for mode, seconds in plan.seconds.items():
        disk = (
            "nothing on disk" if mode == "online" else f"{_size(min(plan.cache_bytes, _limit(data.cache_gib, plan)))} on disk"
        )
        mark = "  <- data.features" if mode == data.features else ""
        spread = f", {_hours(seconds / world)} on {world} processes" if world > 1 else ""
        out.append((f"  {mode}", f"{_hours(seconds)}{spread}, rows computed {plan.passes[mode]:.2f} times, {disk}{mark}"))
    out.append(
        ("speed", f"{plan.speeds.features:,.0f} tokens/s a device ({plan.speeds.features_by}); measure: --tokens-per-second")
    )
    if plan.kept_bytes > plan.free_bytes:
        out.append(
            ("warning", f"the cache does not fit: set data.cache_gib below {plan.free_bytes / GIB:.1f}, or features online")
        )
    return out


def _limit(gib: float | None, plan: DataPlan) -> int:
    return plan.cache_bytes if gib is None else int(gib * GIB)


def _size(count: float) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min ({seconds / 3600:.2f} device-hours)"
