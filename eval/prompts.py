"""Held-out prompts as token ids, grouped by domain, for the measurement."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.chat import ChatFormat
from ..data.source import Prompt, deduplicate, normalise, read_prompts
from .config import EvalConfig


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt ready to serve: ids end where the first token of the answer is to be generated."""

    id: str
    domain: str
    prompt_ids: list[int]


def load_eval_prompts(
    cfg: EvalConfig,
    tokenizer: Any,
    *,
    max_prompt: int,
    context: int = 0,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> dict[str, list[EvalPrompt]]:
    """Held-out prompts by domain, in an order fixed by cfg.seed: first those of the evaluation part, then those of the
    calibration part (see `calibration_ids`), so that no measurement that the evaluation part suffices for sees a prompt that a
    calibration was fitted on.

    max_prompt: longest prompt in tokens that can still be answered; longer ones are left out. context > 0 fills every prompt
    up to that many tokens with other held-out texts in front of the question.
    system: the system prompt of prompts that bring none. Raises ValueError for an unknown domain, a broken
    file, fewer than two usable prompts in a domain, or a context beyond max_prompt.
    """
    if context > max_prompt:
        raise ValueError(f"eval.contexts: got {context}, allowed: at most {max_prompt} for this target and max_new_tokens")
    by_domain = read_heldout(cfg)
    found = [prompt for prompts in by_domain.values() for prompt in prompts]
    chat = ChatFormat(tokenizer, template_args=template_args)
    filler = [text for prompt in found for text in prompt.turns]
    chosen: dict[str, list[EvalPrompt]] = {}
    for domain in cfg.domains or sorted(by_domain):
        prompts = [replace(p, system=p.system or system) for p in sorted(by_domain[domain], key=lambda p: p.id)]
        random.Random(f"{cfg.seed}:{domain}").shuffle(prompts)
        fitted = calibration_ids(prompts, cfg.calibration.share)
        prompts.sort(key=lambda p: p.id in fitted)
        rendered = [_render(chat, prompt, filler, context) for prompt in prompts]
        usable = [EvalPrompt(p.id, domain, ids) for p, ids in zip(prompts, rendered, strict=True) if len(ids) <= max_prompt]
        if len(usable) < 2:
            raise ValueError(
                f"eval.prompts: {len(usable)} prompts of domain {domain!r} fit {max_prompt} tokens, allowed: 2 or more"
            )
        chosen[domain] = usable
    return chosen


def read_heldout(cfg: EvalConfig) -> dict[str, list[Prompt]]:
    """The held-out prompts by domain, duplicates left out. Needs no tokenizer, so it is called before a model loads.

    Raises ValueError for a broken file, an empty set, an unknown domain, and too few prompts for the operating points.
    """
    found = deduplicate(read_prompts("builtin:heldout" if cfg.prompts == "builtin" else cfg.prompts))
    if not found:
        raise ValueError(f"eval.prompts: {cfg.prompts!r} holds no prompt")
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in found:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    for name in cfg.domains or sorted(by_domain):
        if name not in by_domain:
            raise ValueError(f"eval.domains: got {name!r}, allowed: {', '.join(sorted(by_domain))}")
        have, need = len(by_domain[name]), 2 * max(cfg.concurrency)
        if have < need:
            raise ValueError(
                f"eval.prompts: {have} prompts of domain {name!r}, allowed: {need} or more (two groups per concurrency)"
            )
    return by_domain


def calibration_ids(prompts: Sequence[Prompt], share: float) -> set[str]:
    """Ids of the calibration part of one domain's prompts: about `share` of them, never all.

    Prompts about the same long text (25 words or more, as in the rewrite domain) stay on one side. Which side is decided by a
    hash of that text, or of the id: it depends on neither seed nor order, nor much on which other prompts there are.
    """
    groups: dict[bytes, list[str]] = {}
    for prompt in prompts:
        longest = max(prompt.turns[-1].split("\n"), key=len)
        key = normalise(longest) if len(longest.split()) >= 25 else f"id {prompt.id}"
        groups.setdefault(hashlib.blake2b(key.encode(), digest_size=8).digest(), []).append(prompt.id)
    chosen: set[str] = set()
    for digest in sorted(groups)[:-1]:
        if len(chosen) >= round(share * len(prompts)):
            break
        chosen |= set(groups[digest])
    return chosen


def take(prompts: Sequence[EvalPrompt], count: int, concurrency: int) -> list[list[EvalPrompt]]:
    """Groups of `concurrency` prompts that are served together.

    At least four groups (the bootstrap resamples groups) as far as the prompts reach; whole groups only, unless there are
    too few prompts for two. Raises ValueError when not even two groups can be made.
    """
    wanted = max(count, 4 * concurrency if concurrency > 1 else count)
    wanted = -(-wanted // concurrency) * concurrency
    available = min(wanted, len(prompts) // concurrency * concurrency)
    groups = [list(prompts[i : i + concurrency]) for i in range(0, available, concurrency)]
    if len(groups) < 2:
        raise ValueError(
            f"eval.concurrency: got {concurrency}, allowed: at most {len(prompts) // 2} with {len(prompts)} prompts"
        )
    return groups


def _render(chat: ChatFormat, prompt: Prompt, filler: Sequence[str], context: int) -> list[int]:
    ids = _ids(chat, prompt, prompt.turns[-1])
    if context <= len(ids):
        return ids
    # Other held-out texts are put in front of the question: natural text, and none of it was trained on.
    begin = random.Random(prompt.id).randrange(len(filler))
    source = [text for text in (*filler[begin:], *filler[:begin]) if text not in prompt.turns]
    tokens: list[int] = []
    for text in source * (1 + context // max(sum(map(len, source)) // 8, 1)):
        tokens += chat.tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]
        if len(tokens) >= context:
            break
    spare = context - len(ids)
    for _ in range(3):  # joining texts changes a few tokens; two corrections land within a token or so
        ids = _ids(chat, prompt, chat.tokenizer.decode(tokens[:spare]) + "\n\n" + prompt.turns[-1])
        if len(ids) == context:
            break
        spare += context - len(ids)
    return ids


def _ids(chat: ChatFormat, prompt: Prompt, last_turn: str) -> list[int]:
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    turns = (*prompt.turns[:-1], last_turn)
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if i < len(turns) - 1:
            reply = prompt.replies[i] if i < len(prompt.replies) else "I see."
            messages.append({"role": "assistant", "content": reply})
    return chat.render(messages, generation_prompt=True, tools=prompt.tools)
