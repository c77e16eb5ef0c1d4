"""Checks on training rows: cheap, no model. The doctor shows all of their findings, the trainer stops at the first refusal.

Every finding names rows, the reason and the fix. An "error" refuses the rows, a "warning" costs acceptance or time, a "note"
says what was done.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import vocab
from .chat import DropReason, MaskSource, TokenRow, tokenizer_hash
from .coverage import anchor_facts, folds, held_out_coverage
from .findings import SHOWN, Finding, Level, Subject
from .loops import Loop, find_loop
from .manifest import flatten
from .probe import MIN_Z, Probe
from .source import overlap

AGAIN = "run `draftsmith data regenerate` into a fresh output folder"
RESUME = "run `draftsmith data regenerate` again"
THINK = re.compile(r"</?think(?:ing)?>|<\|(?:begin|end)_of_thought\|>")
GOOD_COVERAGE = 0.95


# ---- where the rows come from -------------------------------------------------------------------------------------


def check_origin(subject: Subject) -> Iterator[Finding]:
    """The manifest beside the answers against the recipe: target, tokenizer, template, sampling, prompts."""
    first = [str(subject.source[0].get("id", ""))] if subject.source else []
    if subject.config.answers == "given":
        yield subject.finding(
            "answers", "warning", [str(row.get("id", "")) for row in subject.source],
            "the answers came with the prompts and are another model's text: a drafter trained on paths that its target does "
            "not take accepts less (0.28 instead of 0.41 in a published case)", "set data.answers: target",
        )  # fmt: skip
        return
    made = subject.manifest
    if made is None:
        return
    wrong = _changed(made.get("target") or {}, subject.target)
    if made.get("kind") != "answers" or wrong:
        said = "; ".join(wrong) or f"the manifest says kind {made.get('kind')!r}"
        yield subject.finding("answers", "error", first, f"answers of another model ({said})", AGAIN)
    tokenizer = tokenizer_hash(subject.chat.tokenizer)
    if made.get("tokenizer") not in (None, tokenizer):
        yield subject.finding(
            "tokenizer", "error", first,
            f"the token ids are of another tokenizer ({str(made['tokenizer'])[:8]}, this target's is {tokenizer[:8]})", AGAIN,
        )  # fmt: skip
    args = _changed({"template_args": made.get("template_args") or {}}, {"template_args": subject.chat.template_args})
    if args:
        yield subject.finding(
            "thinking", "error", first, f"answered under other template arguments than the recipe's ({'; '.join(args)})",
            f"set data.template_args to those of the manifest, which serving must use too, or {AGAIN}",
        )  # fmt: skip
    elif made.get("template") not in (None, subject.chat.template_hash):
        yield subject.finding("template", "error", first, "answered under another chat template than this target's", AGAIN)
    yield from _other_settings(subject, made, first)


def _other_settings(subject: Subject, made: Mapping[str, Any], first: Sequence[str]) -> Iterator[Finding]:
    config, generation = subject.config, made.get("generation") or {}
    names = [name for name in generation if name not in ("dtype", "batch_size") and hasattr(config.generation, name)]
    wrong = _changed(
        {"generation": {name: generation[name] for name in names}, "max_length": made.get("max_length", config.max_length)},
        {"generation": {name: getattr(config.generation, name) for name in names}, "max_length": config.max_length},
    )
    if wrong:
        yield subject.finding("settings", "error", first, f"answered under other settings ({'; '.join(wrong)})", AGAIN)
    sha = (made.get("prompts") or {}).get("sha256")
    if subject.prompts_sha256 is not None and sha not in (None, subject.prompts_sha256):
        count = (made.get("prompts") or {}).get("count")
        yield subject.finding(
            "prompts", "error", first,
            f"the answers belong to {count} other prompts; the recipe's {len(subject.prompts)} prompts changed since", AGAIN,
        )  # fmt: skip


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` of the keys of `new` that differ; an unknown fingerprint (absent in `new`) is no difference."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in sorted({*before, *after}) if key in after or key.split(".")[0] in new]
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in keys if _plain(before, key) != _plain(after, key)]


def _plain(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    return None if value == {} else value


def check_broken(subject: Subject) -> Iterator[Finding]:
    """Rows that cannot be used at all: other prompt ids than the template renders, missing fields, foreign token ids."""
    broken = subject.tokenised.broken
    if broken:
        other = [pair for pair in broken if "chat template" in pair[1]]
        for check, pairs in (("template", other), ("row", [pair for pair in broken if pair not in other])):
            if pairs:
                fix = AGAIN if check == "template" else f"delete the line and {RESUME}"
                yield subject.finding(check, "error", [i for i, _ in pairs], pairs[0][1], fix)
    foreign = [row.id for row in subject.rows if row.input_ids and max(row.input_ids) >= subject.vocab_size]
    if foreign:
        yield subject.finding(
            "tokenizer", "error", foreign, f"token ids outside the target's vocabulary of {subject.vocab_size}", AGAIN
        )
    ids = [row.id for row in subject.rows]
    if double := [i for i, count in Counter(ids).items() if count > 1]:
        yield subject.finding("row", "error", double, "the id comes twice", f"delete one of the lines and {RESUME}")
    if subject.unanswered:
        yield subject.finding(
            "answers", "warning", list(subject.unanswered), "no answer yet", f"{RESUME}: it answers what is missing"
        )


def check_overlap(subject: Subject) -> Iterator[Finding]:
    """Training prompts that are evaluation prompts."""
    pairs = overlap(subject.prompts, subject.heldout, near=subject.config.doctor.max_overlap)
    if pairs:
        shown = ", ".join(f"{ours!r} = {theirs!r}" for ours, theirs in pairs[:SHOWN])
        yield subject.finding(
            "overlap", "error", [ours for ours, _ in pairs], f"also an evaluation prompt ({shown})",
            "remove them from data.prompts or from eval.prompts: the measurement would be of what was trained on",
        )  # fmt: skip


# ---- template -----------------------------------------------------------------------------------------------------


def check_template(subject: Subject) -> Iterator[Finding]:
    """Announces a derived mask, a padding token that ends turns, and switches left to chance."""
    chat, sources = subject.chat, subject.tokenised.sources
    derived = sources[MaskSource.NO_TAGS] + sources[MaskSource.EMPTY_TAGS]
    if derived:
        what = "has no generation tags" if not chat.has_tags else "has generation tags that mark nothing"
        yield subject.finding(
            "mask", "note", [row.id for row in subject.rows][:derived],
            f"the template {what}, so the mask is derived by rendering the prefix of each turn",
            "look at the coloured rows; nothing is to be done if only answers and their end tokens are coloured",
        )  # fmt: skip
    switch = next(iter(re.findall(r"\b(enable_thinking|thinking|reasoning_effort)\b", chat.template or "")), None)
    if switch and switch not in chat.template_args:
        yield subject.finding(
            "thinking", "warning", [row.id for row in subject.rows],
            f"the template has a switch {switch!r} which the recipe leaves to its default; a server may set it otherwise",
            f"set data.template_args.{switch} to what serving uses",
        )  # fmt: skip
    pad = getattr(chat.tokenizer, "pad_token_id", None)
    if pad is not None and pad in chat.eos_ids:
        yield subject.finding(
            "padding", "note", [row.id for row in subject.rows],
            f"the tokenizer pads with an end token ({pad})",
            "nothing is to be done: padding is masked by length, so end tokens stay supervised",
        )  # fmt: skip


def check_thinking(subject: Subject) -> Iterator[Finding]:
    """Thinking text in the answers against the template's switch."""
    switch = subject.chat.template_args.get("enable_thinking", subject.chat.template_args.get("thinking"))
    if switch is None:
        return
    said = [str(row.get("id", "")) for row in subject.source if THINK.search(_last_answer(row))]
    if not switch and said:
        yield subject.finding(
            "thinking", "error", said, "the answer holds thinking text, but the template arguments switch thinking off",
            f"set data.template_args to what the rows were answered under, or {AGAIN}",
        )  # fmt: skip
    if switch and not said and subject.source:
        yield subject.finding(
            "thinking", "error", [str(row.get("id", "")) for row in subject.source],
            "no answer holds thinking text, but the template arguments switch thinking on",
            f"set data.template_args to what the rows were answered under, or {AGAIN}",
        )  # fmt: skip


def _last_answer(row: Mapping[str, Any]) -> str:
    last = (row.get("messages") or [{}])[-1]
    parts = [last.get("reasoning_content"), last.get("content")] if last.get("role") == "assistant" else []
    thought = "<think>" if parts and parts[0] else ""
    return thought + " ".join(str(part) for part in parts if part)


# ---- rows and masks -----------------------------------------------------------------------------------------------


def check_dropped(subject: Subject) -> Iterator[Finding]:
    """Conversations that gave no row, with the counted reasons."""
    counts = Counter(reason for _, reason in subject.tokenised.lost)
    ids: dict[DropReason, list[str]] = {reason: [i for i, r in subject.tokenised.lost if r is reason] for reason in counts}
    filled = [i for i, _ in subject.skipped]
    if filled:
        ids[DropReason.PROMPT_FILLS_WINDOW] = [*filled, *ids.get(DropReason.PROMPT_FILLS_WINDOW, [])]
    lost = sum(len(found) for found in ids.values())
    total = lost + len(subject.rows) + len(subject.tokenised.broken)
    share, limit = lost / total if total else 0.0, subject.config.doctor.max_dropped_share
    level: Level = "error" if not subject.rows or share > limit else "warning"
    for reason, found in ids.items():
        part = f"{len(found)} of {total} conversations give no row: {reason}"
        if level == "error":
            over = "all rows were dropped" if not subject.rows else f"more than data.doctor.max_dropped_share={limit:g}"
            part = f"{part} ({over})"
        yield subject.finding("dropped", level, found, part, _fix_drop(subject, reason))
    if not subject.rows and not ids:
        yield Finding("dropped", "error", "there is no row to train on", RESUME)


def _fix_drop(subject: Subject, reason: DropReason) -> str:
    if reason is DropReason.PROMPT_FILLS_WINDOW:
        by_id = subject.by_id()
        sizes = [size for _, size in subject.skipped]
        sizes += [len(by_id[i].get("prompt_ids") or ()) for i, r in subject.tokenised.lost if r is reason and i in by_id]
        longest = max([*sizes, 0])
        need = f" (the longest prompt has {longest} tokens)" if longest else ""
        return f"raise data.max_length above {subject.config.max_length}{need}, or shorten the prompts"
    if reason is DropReason.NO_SUPERVISED_TOKEN:
        return "give the conversation an answer, or set data.answers: target"
    if reason is DropReason.TAGS_ELSEWHERE:
        return "put {% generation %} around the answer in the chat template, or take the tags out (the mask is then derived)"
    if reason is DropReason.TEMPLATE_REWRITES:
        return "set data.answers: target, whose rows hold the ids as generated"
    return "raise data.max_length, or leave the row out"


def check_mask(subject: Subject) -> Iterator[Finding]:
    """Masks that supervise nothing, everything, or next to nothing."""
    rows, limit = subject.rows, subject.config.doctor.min_supervised_share
    if empty := [row.id for row in rows if not any(row.loss_mask)]:
        yield subject.finding(
            "mask", "error", empty, "the mask is all zero: the run would train on nothing",
            "check the generation tags of the template, and that the conversation has an answer inside max_length",
        )  # fmt: skip
    if full := [row.id for row in rows if row.loss_mask and all(row.loss_mask) and subject.chat.template is not None]:
        yield subject.finding(
            "mask", "error", full, "the mask is all one: prompt and role headers would be trained on",
            "make the rows again from messages, or with the prompt in prompt_ids and only the answer in answer_ids",
        )  # fmt: skip
    tokens = sum(len(row.input_ids) for row in rows)
    share = sum(row.num_supervised for row in rows) / tokens if tokens else 0.0
    if rows and len(empty) < len(rows) and share < limit:
        yield subject.finding(
            "mask", "error", [row.id for row in sorted(rows, key=lambda row: row.num_supervised / len(row.input_ids))],
            f"{share:.2%} of the tokens are supervised, less than data.doctor.min_supervised_share={limit:g}",
            "shorten the prompts or lengthen the answers (data.generation.max_new_tokens)",
        )  # fmt: skip


def check_ends(subject: Subject) -> Iterator[Finding]:
    """End tokens: supervised where a turn ended, once, and not missing everywhere."""
    eos = subject.chat.eos_ids
    if not eos or not subject.rows:
        return
    by_id, unmarked, padded, ended = subject.by_id(), [], [], 0
    for row in subject.rows:
        parts = subject.answers(row)
        last = parts[-1] if parts else []
        ended += bool(last) and last[-1] in eos
        if len(last) > 1 and last[-2] in eos:
            padded.append(row.id)
        if _finished(by_id.get(row.id, {}), row, subject.config.max_length) and (not last or last[-1] not in eos):
            unmarked.append(row.id)
    if unmarked:
        yield subject.finding(
            "end", "error", unmarked,
            "the turn ended, but its end token is not supervised (masked by its id as padding, or left out?)",
            "mask padding by length, never by id, and keep the end token as the last of answer_ids",
        )  # fmt: skip
    if padded:
        yield subject.finding(
            "padding", "error", padded, "several end tokens at the end of the answer: padding was saved as text",
            "cut answer_ids after the first end token",
        )  # fmt: skip
    share, limit = ended / len(subject.rows), subject.config.doctor.min_eos_share
    cut = [row.id for row in subject.rows if not (parts := subject.answers(row)) or parts[-1][-1] not in eos]
    if share < limit or (not ended and not unmarked):
        level: Level = "error" if share < limit else "warning"
        yield subject.finding(
            "end", level, cut, f"{share:.0%} of the answers end with an end token (data.doctor.min_eos_share={limit:g})",
            "raise data.generation.max_new_tokens and data.max_length: the drafter never sees how an answer ends",
        )  # fmt: skip


def _finished(source: Mapping[str, Any], row: TokenRow, max_length: int) -> bool:
    """Whether the row's last turn is whole: it said stop, or came as a message and was not cut."""
    if len(row.input_ids) >= max_length:
        return False
    return source.get("finish_reason", "stop" if "answer_ids" not in source else None) == "stop"


def check_loops(subject: Subject) -> Iterator[Finding]:
    """Answers that repeat themselves."""
    looping, limit = loop_rows(subject), subject.config.doctor.max_loop_share
    if not looping:
        return
    share = len(looping) / len(subject.rows)
    first = subject.names(looping)[0]
    loop = looping[next(iter(looping))]
    yield subject.finding(
        "loops", "error" if share > limit else "warning" if share > limit / 2 else "note", list(looping),
        f"{share:.1%} of the answers repeat themselves (data.doctor.max_loop_share={limit:g}); {first} repeats {loop.period} "
        f"tokens over {loop.length}",
        "lower data.generation.greedy_share or max_new_tokens: loops are easy to draft and teach little",
    )  # fmt: skip


def loop_rows(subject: Subject) -> dict[str, Loop]:
    """The loop of every row that has one, by id, longest first."""
    settings = subject.config.doctor
    found: dict[str, Loop] = {}
    for row in subject.rows:
        loops = [
            loop
            for part in subject.answers(row)
            if (loop := find_loop(part, repeats=settings.loop_repeats, tokens=settings.loop_tokens)) is not None
        ]
        if loops:
            found[row.id] = max(loops, key=lambda loop: loop.length)
    return dict(sorted(found.items(), key=lambda pair: -pair[1].length))


def check_first_token(subject: Subject) -> Iterator[Finding]:
    """An answer that always begins alike: the generation prompt may be in the mask."""
    firsts = Counter(part[0] for row in subject.rows for part in subject.answers(row))
    total = sum(firsts.values())
    if total < 20:
        return
    token, count = firsts.most_common(1)[0]
    special = token in set(subject.chat.tokenizer.all_special_ids) | subject.chat.eos_ids
    text = subject.chat.tokenizer.decode([token])
    if count / total > (0.5 if special else 0.95):
        yield subject.finding(
            "mask", "warning", [row.id for row in subject.rows if (p := subject.answers(row)) and p[0][0] == token],
            f"{count / total:.0%} of the answers begin with {text!r} ({token}), as if the generation prompt were supervised",
            "look at the coloured rows; the template must put such text into its generation prompt",
        )  # fmt: skip


# ---- anchors and vocabulary ---------------------------------------------------------------------------------------


def check_anchors(subject: Subject) -> Iterator[Finding]:
    """How much of the rows an epoch visits."""
    limit = subject.config.doctor.min_anchor_coverage
    facts = anchor_facts(subject.rows, subject.anchor_share, subject.block_size)
    if facts.possible and facts.drawn / facts.possible < limit:
        yield subject.finding(
            "anchors", "error", [row.id for row in subject.rows],
            f"an epoch starts blocks at {facts.drawn / facts.possible:.1%} of the {facts.possible} places "
            f"(data.doctor.min_anchor_coverage={limit:g})", "raise train.anchor_share",
        )  # fmt: skip


def check_vocab(subject: Subject) -> Iterator[Finding]:
    """What the reduced draft vocabulary covers of answers that it was not made from."""
    size, limit = subject.draft_vocab_size, subject.config.doctor.min_vocab_coverage
    if size is None or size >= subject.vocab_size or any(max(row.input_ids) >= subject.vocab_size for row in subject.rows):
        return
    required = vocab.required_ids(subject.chat.tokenizer, subject.chat.eos_ids, size)
    parts = folds(subject.rows, vocab.merge_ranks(subject.chat.tokenizer, subject.vocab_size))
    found = held_out_coverage(parts, size, vocab_size=subject.vocab_size, required=required)
    if not found:
        return
    domain, worst = min(((k, v) for k, v in found.items() if k), key=lambda pair: pair[1])
    if found[""] < limit or worst < GOOD_COVERAGE:
        ids = [row.id for row in subject.rows if row.domain == domain]
        yield subject.finding(
            "vocabulary", "error" if found[""] < limit else "warning", ids,
            f"a draft vocabulary of {size} covers {found['']:.1%} of answers that it was not made from ({domain} {worst:.1%}; "
            f"data.doctor.min_vocab_coverage={limit:g}), and what it lacks is never accepted",
            "raise drafter.draft_vocab_size, or have more prompts answered",
        )  # fmt: skip


# ---- the target's own word ----------------------------------------------------------------------------------------


def check_probe(subject: Subject, found: Probe) -> Iterator[Finding]:
    """Whether the target wrote the rows that it read."""
    settings = subject.config.doctor
    level: Level = "warning" if subject.config.answers == "given" else "error"
    sampled = [row for row in found.rows if row.temperature > 0]
    reasons = []
    if found.distance > max(settings.max_probe_distance, found.critical):
        reasons.append(f"ranks are {found.distance:.3f} from uniform, allowed {settings.max_probe_distance:g}")
    if abs(found.z) >= MIN_Z and abs(found.excess) > settings.max_probe_excess:
        less = "less" if found.excess > 0 else "more"
        reasons.append(f"{abs(found.excess):.2f} nats a token {less} likely than the target's own, z {found.z:.1f}")
    if reasons:
        worst = sorted(sampled, key=lambda row: -abs(row.nll - row.entropy))
        yield subject.finding(
            "answers", level, [row.id for row in worst],
            f"the target did not sample this text at the recorded settings ({'; '.join(reasons)})", AGAIN,
        )  # fmt: skip
    if found.agreement < settings.min_greedy_agreement and found.greedy_tokens >= 20:
        greedy = sorted((row for row in found.rows if not row.temperature), key=lambda row: row.agreement)
        yield subject.finding(
            "answers", level, [row.id for row in greedy],
            f"only {found.agreement:.0%} of the tokens of greedy answers are the target's choice, allowed "
            f"{settings.min_greedy_agreement:.0%}: another model's text", AGAIN,
        )  # fmt: skip


# ---- all ----------------------------------------------------------------------------------------------------------

Check = Callable[[Subject], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    check_origin, check_broken, check_overlap, check_dropped, check_mask, check_ends, check_template, check_thinking,
    check_loops, check_first_token, check_anchors, check_vocab,
)  # fmt: skip
ORDER = ("error", "warning", "note")


def find_all(subject: Subject, found: Probe | None = None) -> list[Finding]:
    """All findings, refusals first."""
    out = [*subject.file, *(finding for check in CHECKS for finding in check(subject))]
    out += check_probe(subject, found) if found is not None else ()
    return sorted(out, key=lambda finding: ORDER.index(finding.level))


def refuse(findings: Sequence[Finding], *, where: str = "") -> None:
    """Raise ValueError with the first refusal in one line, if there is any."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        more = f" ({len(errors) - 1} more refusals)" if len(errors) > 1 else ""
        raise ValueError(f"data: {errors[0].line()}{more}{where}")
