"""The doctor: what training would see of a recipe's rows, read from the output folder without loading the target."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import vocab
from .chat import ChatFormat, TokenRow, tokenise_each, tokenizer_hash
from .checks import RESUME, find_all, loop_rows
from .config import DataConfig
from .coverage import anchor_facts, folds, held_out_coverage
from .features import row_bytes
from .findings import Finding, Subject, runs
from .manifest import read
from .probe import Probe, probe, spread, target_logits
from .regenerate import make_jobs
from .source import Prompt, prompts_hash
from .stage import Prepared, given_rows

SAMPLES = 5  # rows shown in full
SHOWN_TOKENS = 1500  # of such a row
MIX_ROWS = 2000  # rows whose text is looked at for the mix of languages
ADVISED_COVERAGE = 0.98
SMALLEST_VOCAB = 1024
WORDS = {
    "English": {"the", "and", "of", "to", "is", "in", "that", "it", "for", "with"},
    "German": {"der", "die", "und", "das", "ist", "nicht", "ein", "zu", "mit", "auf"},
    "French": {"le", "la", "les", "et", "des", "est", "une", "dans", "pour", "que"},
    "Spanish": {"el", "los", "y", "de", "que", "una", "es", "por", "con", "las"},
}


# ---- reading ------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rows of an answers file in the order of their prompts, and a finding for every line that is none. Repairs nothing."""
    if not path.exists():
        return [], []
    rows: list[dict[str, Any]] = []
    found: list[Finding] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        last = number == len(lines)  # a whole file ends with a line end, so its last part is empty
        try:
            row = json.loads(line)
            if last or not isinstance(row, dict) or "id" not in row or not isinstance(row.get("messages"), list):
                raise ValueError
        except ValueError:
            name = re.match(rb'\s*\{"id": ?"([^"]*)"', line)
            place = f"{path.name}:{number}" + (f" ({name[1].decode(errors='replace')!r})" if name else "")
            reason = "half-written row: writing was cut off" if last else "broken row"
            fix = f"{RESUME}: it removes the half row and has it answered" if last else f"delete the line and {RESUME}"
            found.append(Finding("row", "error", reason, fix, (place,), 1))
            continue
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("index", 0)), found


def gather(
    config: DataConfig,
    chat: ChatFormat,
    folder: Path,
    *,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    target: Mapping[str, Any],
    vocab_size: int,
    anchor_share: float,
    block_size: int,
    draft_vocab_size: int | None,
) -> Subject:
    """What lies under `folder`/answers for this recipe; broken things become findings. target: as in Subject."""
    manifest, found = None, []
    source: list[dict[str, Any]]
    if config.answers == "given":
        source = []
        for prompt in prompts:
            try:
                source += given_rows([prompt])
            except ValueError as error:
                found.append(Finding("answers", "error", str(error), "leave the prompt out", (repr(prompt.id),), 1))
    else:
        source, found = read_rows(folder / "answers" / "answers.jsonl")
        if source or found:
            try:
                manifest = read(folder / "answers")
            except ValueError as error:
                found.append(Finding("answers", "error", str(error), "delete the folder: it is not known what made it"))
    tokenised = tokenise_each(source, chat, config.max_length, supervise=config.supervise, keep_going=True)
    skipped, unanswered = _without_row(prompts, source, config, chat)
    return Subject(
        config=config, chat=chat, source=source, tokenised=tokenised, vocab_size=vocab_size, target=target, prompts=prompts,
        heldout=heldout, skipped=skipped, unanswered=unanswered, manifest=manifest, prompts_sha256=prompts_hash(prompts),
        file=found, anchor_share=anchor_share, block_size=block_size, draft_vocab_size=draft_vocab_size,
    )  # fmt: skip


def of_prepared(
    prepared: Prepared,
    config: DataConfig,
    chat: ChatFormat,
    *,
    heldout: Sequence[Prompt],
    target: Mapping[str, Any],
    vocab_size: int,
    anchor_share: float,
    block_size: int,
    draft_vocab_size: int | None,
) -> Subject:
    """The rows that training is about to use."""
    answers = prepared.answers
    source = given_rows(prepared.prompts) if answers is None else answers.rows
    skipped, unanswered = _without_row(prepared.prompts, source, config, chat)
    return Subject(
        config=config, chat=chat, source=source, tokenised=prepared.tokenised, vocab_size=vocab_size, target=target,
        prompts=prepared.prompts, heldout=heldout, skipped=skipped, unanswered=unanswered,
        manifest=None if answers is None else read(answers.folder), prompts_sha256=prompts_hash(prepared.prompts),
        anchor_share=anchor_share, block_size=block_size, draft_vocab_size=draft_vocab_size,
    )  # fmt: skip


def _without_row(
    prompts: Sequence[Prompt], source: Sequence[Mapping[str, Any]], config: DataConfig, chat: ChatFormat
) -> tuple[list[tuple[str, int]], list[str]]:
    """(id, prompt tokens) of the prompts that fill the window, and ids of the others that have no row."""
    if config.answers == "given":
        return [], []
    there = {row.get("id") for row in source}
    skipped, unanswered = [], []
    for job in make_jobs(prompts, config.generation):
        if job.id in there:
            continue
        opening = [*job.messages, {"role": "user", "content": job.prompt.turns[0]}]
        length = len(chat.render(opening, generation_prompt=True, tools=job.prompt.tools))
        if config.max_length - length < 2:
            skipped.append((job.id, length))
        else:
            unanswered.append(job.id)
    return skipped, unanswered


# ---- report -------------------------------------------------------------------------------------------------------


def examine(
    subject: Subject,
    *,
    probe: Probe | None = None,
    cache: Mapping[str, Any] | None = None,
    epochs: float | None = None,
    extra: Sequence[Finding] = (),
) -> dict[str, Any]:
    """Everything that doctor.json holds.

    cache: hidden_size, num_taps, dtype, lse, storage, tokens_per_second and basis (in words) for the estimate; epochs: that
    the recipe trains; extra: findings from elsewhere.
    """
    findings = [*find_all(subject, probe), *extra]
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.level))
    levels = Counter(finding.level for finding in findings)
    verdict = "refused" if levels["error"] else "usable with warnings" if levels["warning"] else "usable"
    rows = subject.rows
    return {
        "schema": 1, "verdict": verdict, "target": dict(subject.target),
        "findings": [
            {"check": f.check, "level": f.level, "rows": list(f.rows), "count": f.count, "reason": f.reason, "fix": f.fix}
            for f in findings
        ],
        "counts": _counts(subject), "lengths": _lengths(rows), "supervised": _supervised(rows),
        "anchors": _anchors(subject) | {"epochs": epochs}, "template": _template(subject),
        "samples": [_sample(subject, row) for row in pick_samples(rows)],
        "first_tokens": _edge_tokens(subject, 0), "last_tokens": _edge_tokens(subject, -1), "ends": _ends(subject),
        "loops": _loops(subject), "mix": _mix(subject), "vocabulary": vocab_table(subject),
        "cache": cache_estimate(rows, cache) if cache else None, "probe": probe.plain() if probe is not None else None,
    }  # fmt: skip


def _counts(subject: Subject) -> dict[str, Any]:
    dropped = Counter(str(reason) for _, reason in subject.tokenised.lost)
    if subject.skipped:
        dropped["the prompt fills max_length, so it was not answered"] = len(subject.skipped)
    return {
        "prompts": len(subject.prompts), "answered": len(subject.source), "rows": len(subject.rows),
        "dropped": dict(dropped.most_common()), "broken": len(subject.tokenised.broken) + len(subject.file),
        "unanswered": len(subject.unanswered), "tokens": sum(len(row.input_ids) for row in subject.rows),
        "supervised": sum(row.num_supervised for row in subject.rows),
    }  # fmt: skip


def histogram(values: Sequence[int], bins: int = 16) -> dict[str, Any]:
    """Counts in equal bins [edge, next edge) of whole numbers, and the usual figures; {} without values."""
    if not values:
        return {}
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // bins))
    edges = list(range(low, high + width, width))
    if edges[-1] <= high:
        edges.append(edges[-1] + width)
    counts = [0] * (len(edges) - 1)
    for value in ordered:
        counts[(value - low) // width] += 1
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {
        "edges": edges, "counts": counts, "min": low, "median": at(0.5), "p95": at(0.95), "max": high,
        "mean": sum(ordered) / len(ordered),
    }  # fmt: skip


def _lengths(rows: Sequence[TokenRow]) -> dict[str, Any]:
    return {
        "prompt": histogram([row.loss_mask.index(True) for row in rows if any(row.loss_mask)]),
        "answer": histogram([row.num_supervised for row in rows]),
        "row": histogram([len(row.input_ids) for row in rows]),
    }


def _supervised(rows: Sequence[TokenRow]) -> dict[str, Any]:
    tokens = sum(len(row.input_ids) for row in rows)
    shares = sorted(row.num_supervised / len(row.input_ids) for row in rows)
    return {
        "share": sum(row.num_supervised for row in rows) / tokens if tokens else 0.0,
        "lowest": shares[0] if shares else None, "highest": shares[-1] if shares else None,
        "turns": sum(len(runs(row.loss_mask)) for row in rows),
    }  # fmt: skip


def _anchors(subject: Subject) -> dict[str, Any]:
    facts, rows = anchor_facts(subject.rows, subject.anchor_share, subject.block_size), max(1, len(subject.rows))
    supervised = sum(row.num_supervised for row in subject.rows)
    return {
        "share": subject.anchor_share, "block_size": subject.block_size, "possible": facts.possible, "drawn": facts.drawn,
        "possible_per_row": facts.possible / rows, "drawn_per_row": facts.drawn / rows,
        "drawn_per_supervised": facts.drawn / supervised if supervised else 0.0,
        "coverage": facts.drawn / facts.possible if facts.possible else 0.0, "label_coverage": facts.labels,
    }  # fmt: skip


def _template(subject: Subject) -> dict[str, Any]:
    chat = subject.chat
    turn = [{"role": "user", "content": "Hello"}]
    before = chat.render(turn, generation_prompt=False) if chat.template is not None else []
    supplied = chat.render(turn, generation_prompt=True)[len(before) :] if chat.template is not None else []
    pad = getattr(chat.tokenizer, "pad_token_id", None)
    return {
        "hash": chat.template_hash, "args": chat.template_args, "tags": chat.has_tags, "text": chat.template,
        "mask_source": subject.tokenised.mask_source, "tokenizer": tokenizer_hash(chat.tokenizer),
        "end_tokens": [[i, show(chat, [i])] for i in sorted(chat.eos_ids)],
        "pad_token": None if pad is None else [pad, show(chat, [pad])], "generation_prompt": show(chat, supplied),
        "supervise": subject.config.supervise, "answers": subject.config.answers,
    }  # fmt: skip


def show(chat: ChatFormat, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pick_samples(rows: Sequence[TokenRow], count: int = SAMPLES) -> list[TokenRow]:
    """Rows to show: domains in turn, of middle length, short and long."""
    chosen: list[TokenRow] = []
    queues = [
        sorted((row for row in rows if row.domain == name), key=lambda row: (row.num_supervised, row.id))
        for name in sorted({row.domain for row in rows})
    ]
    for number in range(min(count, len(rows))):
        queue = [queue for queue in queues if queue][number % sum(map(bool, queues))]
        chosen.append(queue.pop(int((0.5, 0.25, 0.75, 0.05, 0.95)[number % 5] * len(queue))))
    return chosen


def pieces(chat: ChatFormat, row: TokenRow) -> list[tuple[str, int, int]]:
    """(text, supervised 0 or 1, token id) of every token, joined exactly the row's text; bytes of a split character come with
    its last token. At most SHOWN_TOKENS."""
    out: list[tuple[str, int, int]] = []
    ids, held = row.input_ids[:SHOWN_TOKENS], 0  # held: the first token whose text is not out yet
    for place, token in enumerate(ids):
        window = max(0, held - 8)
        known, text = show(chat, ids[window:held]), show(chat, ids[window : place + 1])
        if text.endswith("\ufffd") and place + 1 < len(ids) and place - held < 3:
            out.append(("", int(row.loss_mask[place]), token))
            continue
        new = text[len(known) :] if text.startswith(known) else show(chat, ids[held : place + 1])
        out.append((new, int(row.loss_mask[place]), token))
        held = place + 1
    return out


def _sample(subject: Subject, row: TokenRow) -> dict[str, Any]:
    source = subject.by_id().get(row.id, {})
    return {
        "id": row.id, "index": subject.places.get(row.id), "domain": row.domain, "temperature": source.get("temperature"),
        "tokens": len(row.input_ids), "supervised": row.num_supervised, "cut": len(row.input_ids) > SHOWN_TOKENS,
        "pieces": pieces(subject.chat, row),
    }  # fmt: skip


def _edge_tokens(subject: Subject, place: int) -> list[dict[str, Any]]:
    """The most frequent first (0) or last (-1) supervised tokens of turns."""
    counts = Counter(part[place] for row in subject.rows for part in subject.answers(row))
    total = sum(counts.values())
    return [
        {"id": token, "text": show(subject.chat, [token]), "count": count, "share": count / total}
        for token, count in counts.most_common(8)
    ]


def _ends(subject: Subject) -> dict[str, Any]:
    ended = sum(1 for row in subject.rows if (p := subject.answers(row)) and p[-1][-1] in subject.chat.eos_ids)
    reasons = Counter(str(row.get("finish_reason", "not recorded")) for row in subject.source)
    return {"share": ended / len(subject.rows) if subject.rows else 0.0, "finish_reasons": dict(reasons.most_common())}


def _loops(subject: Subject) -> dict[str, Any]:
    found, by_id, rows = loop_rows(subject), subject.by_id(), {row.id: row for row in subject.rows}
    kinds: dict[str, list[bool]] = {}
    for row in subject.rows:
        temperature = by_id.get(row.id, {}).get("temperature")
        names = [f"domain {row.domain}", *([f"temperature {temperature:g}"] if temperature is not None else [])]
        for name in names:
            kinds.setdefault(name, []).append(row.id in found)
    shown = []
    for name, loop in list(found.items())[:5]:
        part = max(subject.answers(rows[name]), key=len)
        shown.append({
            "id": name, "period": loop.period, "length": loop.length,
            "text": show(subject.chat, part[loop.start : loop.start + min(loop.length, 2 * loop.period, 60)]),
        })  # fmt: skip
    return {
        "share": len(found) / len(subject.rows) if subject.rows else 0.0, "count": len(found), "rows": shown,
        "by": {name: sum(flags) / len(flags) for name, flags in sorted(kinds.items())},
    }  # fmt: skip


# ---- mix, vocabulary, cache ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def script_of(letter: str) -> str:
    """The script of a letter by its Unicode name: Latin, Cyrillic, CJK, ..."""
    return unicodedata.name(letter, "unknown").split()[0].capitalize()


def language_of(text: str) -> str:
    """A guess from the most frequent words, and for texts in other letters from the script; "unclear" where neither speaks."""
    words = set("".join(c if c.isalpha() else " " for c in text.lower()).split())
    score = {name: len(words & known) for name, known in WORDS.items()}
    best = max(score, key=lambda name: score[name])
    if score[best] >= 3:
        return best
    scripts = Counter(script_of(c) for c in text if c.isalpha())
    return f"{scripts.most_common(1)[0][0]} script" if scripts and scripts.most_common(1)[0][0] != "Latin" else "unclear"


def _mix(subject: Subject) -> dict[str, Any]:
    rows = subject.rows[:: max(1, -(-len(subject.rows) // MIX_ROWS))]
    letters: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    plain = total = 0
    for row in rows:
        text = subject.chat.tokenizer.decode([t for t, f in zip(row.input_ids, row.loss_mask, strict=True) if f])
        letters.update(script_of(c) for c in text if c.isalpha())
        plain, total = plain + sum(c.isascii() for c in text), total + len(text)
        languages[language_of(text)] += 1
    known = sum(letters.values())
    domains = []
    for name in sorted({row.domain for row in subject.rows}):
        part = [row for row in subject.rows if row.domain == name]
        domains.append({
            "name": name, "rows": len(part), "share": len(part) / len(subject.rows),
            "supervised": sum(row.num_supervised for row in part),
            "mean_answer": sum(row.num_supervised for row in part) / len(part),
        })  # fmt: skip
    return {
        "domains": domains, "ascii": plain / total if total else None,
        "scripts": {name: count / known for name, count in letters.most_common(6) if count > known / 2000},
        "languages": {name: count / len(rows) for name, count in languages.most_common(6)},
    }  # fmt: skip


def vocab_table(subject: Subject) -> dict[str, Any] | None:
    """Coverage by size of the draft vocabulary, of the answers that it is made from and of others, with advice."""
    width, chosen = subject.vocab_size, subject.draft_vocab_size
    if len(subject.rows) < 2 or any(max(row.input_ids) >= width for row in subject.rows):
        return None
    tokenizer, eos = subject.chat.tokenizer, subject.chat.eos_ids
    sizes = {size for size in (SMALLEST_VOCAB << n for n in range(12)) if max(len(eos), 1) <= size < width}
    sizes |= {chosen} if chosen is not None and len(eos) <= chosen <= width else set()
    parts, out = folds(subject.rows, vocab.merge_ranks(tokenizer, width)), []
    for size in sorted(sizes):
        required = vocab.required_ids(tokenizer, eos, size)
        ids = parts.choose(size, required)
        held = held_out_coverage(parts, size, vocab_size=width, required=required)
        domains = {name: share for name, share in held.items() if name}
        worst = min(domains, key=lambda name: domains[name]) if domains else None
        seen = vocab.coverage(ids, subject.rows, vocab_size=width)
        out.append({
            "size": size, "seen": seen, "held_out": held.get(""), "worst_domain": worst,
            "worst": domains[worst] if worst else None, "domains": domains,
        })  # fmt: skip
    return {"recipe": chosen, "full": width, "sizes": out, "advice": _advice(out, chosen, width)}


def _advice(table: Sequence[Mapping[str, Any]], chosen: int | None, width: int) -> str:
    good = [entry for entry in table if entry["worst"] is not None and entry["worst"] >= ADVISED_COVERAGE]
    ours = next((entry for entry in table if entry["size"] == chosen), None)
    said = ""
    if ours is not None and ours["held_out"] is not None:
        said = f"The recipe's {chosen} cap the acceptance at about {ours['held_out']:.1%} on unseen answers. "
    if good:
        size = good[0]["size"]
        more = "" if size == chosen else f" Try drafter.draft_vocab_size: {size}; the head costs in proportion to the size."
        return f"{said}{size} is the smallest size that covers {ADVISED_COVERAGE:.0%} in every domain.{more}"
    return (
        f"{said}No reduced size covers {ADVISED_COVERAGE:.0%} of unseen answers in every domain: have more prompts answered, "
        f"or leave drafter.draft_vocab_size at null ({width}) where the head's cost allows it."
    )


def cache_estimate(rows: Iterable[TokenRow], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes and seconds of a feature cache of these rows. facts: see `examine`."""
    manifest = {
        "hidden_size": facts["hidden_size"], "tap_layers": range(facts["num_taps"]), "dtype": facts["dtype"],
        "lse": facts["lse"], "storage": facts.get("storage", "target"),
    }  # fmt: skip
    lengths = [len(row.input_ids) for row in rows]
    speed = facts.get("tokens_per_second")
    return {
        "bytes": sum(row_bytes(length, manifest) for length in lengths), "tokens": sum(lengths),
        "seconds": sum(lengths) / speed if speed else None, "tokens_per_second": speed, "basis": facts.get("basis", ""),
        "features": facts.get("features"),
    }  # fmt: skip


def probe_rows(subject: Subject, target: Any, count: int) -> Probe | None:
    """Let a loaded target read `count` of the rows, at the temperature recorded for each. None without rows."""
    by_id, settings = subject.by_id(), subject.config.generation
    rows = spread(subject.rows, count)
    if not rows:
        return None
    temperatures = [float(by_id.get(row.id, {}).get("temperature", settings.temperature)) for row in rows]
    return probe(
        rows, lambda row: target_logits(target, row), temperatures, top_k=settings.top_k, top_p=settings.top_p
    )  # fmt: skip
