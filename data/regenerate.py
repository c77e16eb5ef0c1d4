"""Answers by the target itself, with the runtime's engine or through a server: written row by row, resumable, never mixed with
other settings.

A drafter learns the law of its target on paths that the target takes. Answers of another model are other paths.

Folder: `manifest.json`, written first, and `answers.jsonl`, one row per answered conversation:
    {"id", "index", "domain", "messages": [{"role", "content"}, ...], "prompt_ids": [...], "answer_ids": [...],
     "finish_reason": "stop" | "length", "temperature", "earlier_spans": [[start, end], ...] (several turns only),
     "answer_logprobs": [...] (where a server was asked for them)}
and `dropped.jsonl`, where a server's answer could not be used: {"id", "reason"}. Both are only appended to, and synced.
`prompt_ids` is the chat template's rendering up to the last answer; `earlier_spans` are the parts of it that are exactly
the ids which the target generated in earlier turns.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..runtime.config import SamplingParams
from .chat import ChatFormat, DropReason, tokenizer_hash
from .config import DataConfig, GenerationConfig
from .manifest import claim, read, target_identity, versions
from .server_answers import DROPPED, FAILED, ServerGenerator
from .source import Prompt, prompts_hash

RUNTIME = {"by": "runtime"}
DROPPED_FILE = "dropped.jsonl"
SYNC_S = 1.0  # seconds between syncs of the answers file to the disk
SECTION = 8  # conversations of several turns are answered in sections of this many times batch_size


class Generator(Protocol):
    """What is needed of the runtime's Engine, and kept by ServerGenerator."""

    def run(self, requests: Sequence[Any], on_commit: Callable[..., None] | None = None) -> list[Any]:
        """Completions in request order; on_commit(request, tokens, record) as tokens are committed."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answered conversations in prompt order, and how they came about.

    skipped counts the conversations that were not answered: their prompt fills max_length, or a server's answer could not be
    used. tokens and seconds cover this call alone.
    """

    folder: Path
    rows: list[dict[str, Any]]
    reused: int
    generated: int
    skipped: Counter[DropReason] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Job:
    index: int
    id: str
    prompt: Prompt
    temperature: float
    messages: list[dict[str, str]]
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    history: list[tuple[int, list[int]]] = field(default_factory=list)  # (start, generated ids) of finished turns
    turn: int = 0
    logprobs: list[float] | None = None  # of answer_ids


def _number(*parts: Any) -> int:
    """A stable 62-bit number of its arguments: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big") >> 2


def make_jobs(prompts: Sequence[Prompt], config: GenerationConfig) -> list[_Job]:
    """One job per prompt and sample. Which ones are greedy depends on their id and the seed alone."""
    jobs: list[_Job] = []
    for prompt in prompts:
        for sample in range(config.samples_per_prompt):
            name = prompt.id if config.samples_per_prompt == 1 else f"{prompt.id}#{sample}"
            greedy = _number(config.seed, name, "greedy") / 2**62 < config.greedy_share
            messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
            jobs.append(_Job(len(jobs), name, prompt, 0.0 if greedy else config.temperature, messages))
    return jobs


# ---- file ---------------------------------------------------------------------------------------------------------


def read_answers(path: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """Rows of an answers file, in file order. A torn last line is left out, and with `repair` cut from the file.

    Raises ValueError naming the line for a broken row elsewhere, and for an id that comes twice.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if repair and len(whole) < len(data):
        with path.open("rb+") as file:
            file.truncate(len(whole))
    rows, seen = [], set()
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            key = row["id"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: broken row; delete the line to have it answered again") from None
        if key in seen:
            raise ValueError(f"{path}:{number}: id {key!r} comes twice")
        seen.add(key)
        rows.append(row)
    return rows


def answers_manifest(
    prompts: Sequence[Prompt],
    config: DataConfig,
    target: Any,
    chat: ChatFormat,
    *,
    name: str,
    revision: str | None,
    answered_by: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that the answers depend on, and (not compared) batch size, versions and who answers."""
    generation = {key: value for key, value in asdict(config.generation).items() if key != "batch_size"}
    generation["dtype"] = _dtype_name(config.generation, target)
    return {
        "format": 1,
        "kind": "answers",
        "target": target_identity(target, name=name, revision=revision),
        "template": chat.template_hash,
        "template_args": chat.template_args,
        "tokenizer": tokenizer_hash(target.tokenizer),
        "eos_ids": sorted(chat.eos_ids),
        "generation": generation,
        "max_length": config.max_length,
        "prompts": {"count": len(prompts), "sha256": prompts_hash(prompts)},
        "batch_size": config.generation.batch_size,
        "answered_by": dict(answered_by or RUNTIME),
        "versions": versions(),
    }


def _dtype_name(config: GenerationConfig, target: Any) -> str:
    return str(target.dtype).removeprefix("torch.") if config.dtype == "target" else config.dtype


def build_engine(target: Any, config: DataConfig) -> Generator:
    """The runtime's engine for plain decoding with the target, with batch_size slots."""
    import torch

    from ..runtime.decoder import Decoder
    from ..runtime.engine import Engine

    decoder = Decoder.from_target(target.model, dtype=getattr(torch, _dtype_name(config.generation, target)))
    if config.max_length > decoder.max_positions:
        raise ValueError(f"max_length={config.max_length}: the target has {decoder.max_positions} positions")
    return Engine(decoder, slots=config.generation.batch_size, max_context=config.max_length, eos_ids=target.eos_token_ids)


# ---- turns --------------------------------------------------------------------------------------------------------


def _ask(job: _Job, chat: ChatFormat, config: DataConfig) -> SamplingParams | None:
    """Put the next user turn to the job. None when the prompt leaves no room for two tokens."""
    job.messages.append({"role": "user", "content": job.prompt.turns[job.turn]})
    job.prompt_ids = chat.render(job.messages, generation_prompt=True, tools=job.prompt.tools)
    job.answer_ids = []
    room = config.max_length - len(job.prompt_ids)
    if room < 2:
        return None
    settings = config.generation
    return SamplingParams(
        temperature=job.temperature,
        top_k=settings.top_k if job.temperature else 0,
        top_p=settings.top_p if job.temperature else 1.0,
        max_new_tokens=min(settings.max_new_tokens, room),
        seed=_number(settings.seed, job.id, job.turn),
    )


def _answered(job: _Job, chat: ChatFormat) -> None:
    """The job's current turn is finished: its text joins the conversation."""
    ids = job.answer_ids[:-1] if job.answer_ids[-1] in chat.eos_ids else job.answer_ids
    text = chat.tokenizer.decode(ids, skip_special_tokens=True)
    job.messages.append({"role": "assistant", "content": text})
    job.history.append((len(job.prompt_ids), job.answer_ids))
    job.turn += 1


def _row(job: _Job, chat: ChatFormat) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": job.id,
        "index": job.index,
        "domain": job.prompt.domain,
        "messages": job.messages,
        "prompt_ids": job.prompt_ids,
        "answer_ids": job.answer_ids,
        "finish_reason": "stop" if job.answer_ids[-1] in chat.eos_ids else "length",
        "temperature": job.temperature,
    }
    if job.logprobs is not None:
        row["answer_logprobs"] = job.logprobs
    if job.prompt.tools:
        row["tools"] = list(job.prompt.tools)
    if len(job.history) > 1:
        # The served prompt holds earlier answers as text, tokenised anew. Only where that gives back the generated ids
        # are they what the target said, and supervised.
        row["earlier_spans"] = [
            [start, start + len(ids)] for start, ids in job.history[:-1] if job.prompt_ids[start : start + len(ids)] == ids
        ]
    return row


class _Writer:
    """Appends finished rows to the answers file, and dropped ones to theirs, and moves the progress bar."""

    def __init__(self, path: Path, chat: ChatFormat, *, done: int, total: int, progress: bool) -> None:
        self.path, self.chat = path, chat
        self.bar, self.task = _progress(total, done, progress)
        self.rows: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self.failed: list[str] = []
        self.tokens, self.began = 0, time.perf_counter()
        self.synced = self.began

    def __enter__(self) -> _Writer:
        self.file = self.path.open("a", encoding="utf-8")
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        self._sync()
        self.file.close()

    def add(self, job: _Job) -> None:
        """Write the row of a finished job and flush it."""
        row = _row(job, self.chat)
        self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.flush()
        if time.perf_counter() - self.synced > SYNC_S:
            self._sync()
        self.rows.append(row)
        if self.bar is not None:
            self.bar.update(self.task, advance=1)

    def leave_out(self, job: _Job, completion: Any) -> None:
        """Note a job whose answer cannot be used (it is not asked again) or has failed (it is, by the next run)."""
        if completion.finish_reason == FAILED:
            self.failed.append(f"{job.id}: {completion.reason}")
            return
        self.dropped.append(job.id)
        with (self.path.parent / DROPPED_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": job.id, "reason": completion.reason}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.synced = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Count generated tokens for the speed shown."""
        self.tokens += tokens
        if self.bar is not None:
            speed = self.tokens / max(time.perf_counter() - self.began, 1e-9)
            self.bar.update(self.task, speed=f"{speed:.0f} tokens/s")


def _wave(jobs: Sequence[tuple[_Job, SamplingParams]], engine: Generator, chat: ChatFormat, writer: _Writer) -> list[_Job]:
    """Answer the current turn of every job. Conversations that end are written at once; the others are returned."""
    from ..runtime.engine import Request

    open_jobs = {job.id: (job, params) for job, params in jobs}
    going_on: list[_Job] = []

    def on_commit(request: Any, tokens: list[int], record: Any) -> None:
        job, params = open_jobs[request.id]
        job.answer_ids.extend(tokens)
        job.logprobs = getattr(record, "logprobs", None)
        writer.count(len(tokens))
        if job.answer_ids[-1] not in chat.eos_ids and len(job.answer_ids) < params.max_new_tokens:
            return
        _answered(job, chat)
        if job.turn < len(job.prompt.turns):
            going_on.append(job)
        else:
            writer.add(job)

    requests = [Request(job.id, job.prompt_ids, params) for job, params in jobs]
    for completion in engine.run(requests, on_commit):
        job = open_jobs[completion.id][0]
        if completion.finish_reason in (DROPPED, FAILED):
            writer.leave_out(job, completion)
            continue
        assert completion.token_ids == job.history[-1][1], f"{completion.id}: committed tokens are not the completion"
    return going_on


def _answer_section(jobs: Sequence[_Job], engine: Generator, chat: ChatFormat, config: DataConfig, writer: _Writer) -> None:
    """Answer conversations turn by turn, all of them at the same turn."""
    while jobs:
        asked = [(job, _ask(job, chat, config)) for job in jobs]
        for job, params in asked:
            if params is None:
                _end_early(job, chat)
                writer.add(job)
        ready = [(job, params) for job, params in asked if params is not None]
        jobs = _wave(ready, engine, chat, writer) if ready else []


def _end_early(job: _Job, chat: ChatFormat) -> None:
    """The window is full: the conversation ends with the turns that fit."""
    assert job.history, "first turns without room are sorted out before"
    job.messages.pop()
    start, job.answer_ids = job.history[-1]
    job.prompt_ids = chat.render(job.messages[:-1], generation_prompt=True, tools=job.prompt.tools)
    assert len(job.prompt_ids) == start


def _progress(total: int, done: int, show: bool) -> tuple[Any, Any]:
    if not show:
        return None, None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("answers", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    bar = Progress(*columns, speed_estimate_period=120.0)
    return bar, bar.add_task("answers", total=total, completed=done, speed="")


# ---- entry --------------------------------------------------------------------------------------------------------


def regenerate(
    prompts: Sequence[Prompt],
    config: DataConfig,
    target: Any,
    folder: Path,
    *,
    name: str,
    revision: str | None = None,
    engine: Generator | Callable[[], Generator] | None = None,
    answered_by: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> Answers:
    """Have the target answer every prompt, continuing what `folder` already holds.

    target: a loaded target (tokenizer, eos_token_ids, weights); `name` and `revision` are its TargetConfig's.
    engine: the runtime engine, a ServerGenerator, or a function that makes either, called only if something is left to answer.
    answered_by: who answers, for the manifest; another may not go on with a folder that is not finished. How a drafter speeds
    the runtime up is no part of it: the law of the answers is the same.

    Raises ValueError naming the fields when the folder was made under other settings, and for a broken row in it; RuntimeError
    when a server failed some requests for good, after all others are written.
    """
    if not prompts:
        raise ValueError("no prompts to answer")
    chat = ChatFormat(target.tokenizer, template_args=config.template_args, eos_ids=target.eos_token_ids)
    manifest = answers_manifest(prompts, config, target, chat, name=name, revision=revision, answered_by=answered_by)
    claim(folder, manifest, what="answers")
    path = folder / "answers.jsonl"
    done = read_answers(path, repair=True)
    dropped = {row["id"] for row in read_answers(folder / DROPPED_FILE, repair=True)}
    jobs = make_jobs(prompts, config.generation)
    finished = {row["id"] for row in done}
    if unknown := finished - {job.id for job in jobs}:
        raise ValueError(f"{path}: holds rows of no prompt ({', '.join(sorted(unknown)[:3])}): delete the folder")
    pending, skipped = _sort_out(jobs, finished | dropped, chat, config.max_length)
    left_out = f"; {sum(skipped.values())} prompts fill max_length={config.max_length}" if skipped else ""
    if dropped:
        skipped[DropReason.NOT_RETOKENISED] = len(dropped)
        left_out += f"; {len(dropped)} answers could not be used ({folder / DROPPED_FILE})"
    if not pending:
        say(f"answers: all {len(done)} reused from {folder}{left_out}")
        return Answers(folder, sorted(done, key=lambda row: row["index"]), len(done), 0, skipped)
    if done:
        say(f"answers: {len(done)} reused from {folder}, {len(pending)} to go")
    _check_answerer(folder, manifest)
    if engine is None:
        engine = build_engine(target, config)
    elif callable(engine):
        engine = engine()
    with _Writer(path, chat, done=len(done), total=len(done) + len(pending), progress=progress) as writer:
        for section in _sections(pending, config.generation.batch_size):
            _answer_section(section, engine, chat, config, writer)
    seconds = time.perf_counter() - writer.began
    if writer.dropped:
        skipped[DropReason.NOT_RETOKENISED] += len(writer.dropped)
        left_out += f"; {len(writer.dropped)} answers could not be used ({folder / DROPPED_FILE})"
    rows = sorted([*done, *writer.rows], key=lambda row: row["index"])
    speed = f"{writer.tokens} tokens in {seconds:.0f} s ({writer.tokens / max(seconds, 1e-9):.0f} tokens/s)"
    say(f"answers: {len(writer.rows)} generated, {speed}{left_out}{_server_notes(engine)}")
    if writer.failed:
        raise RuntimeError(
            f"{len(writer.failed)} answers failed, the others are written; run again to ask for them ({writer.failed[0]})"
        )
    return Answers(folder, rows, len(done), len(writer.rows), skipped, writer.tokens, seconds)


def _check_answerer(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Whether who began the folder goes on with it. Rows that are there are used whoever made them."""
    began, now = read(folder).get("answered_by", RUNTIME), manifest["answered_by"]
    if began != now:
        raise ValueError(
            f"{folder}: begun by {json.dumps(began)}, to be continued by {json.dumps(now)}: go on as it was begun, or delete it"
        )


def _server_notes(engine: Any) -> str:
    """What a server's answers cost and how their ids came about; nothing for the runtime."""
    if not isinstance(engine, ServerGenerator):
        return ""
    notes = [f"{engine.retokenised} answers came as text and were tokenised again"] if engine.retokenised else []
    if engine.retries:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in engine.retries.most_common())
        notes.append(f"{sum(engine.retries.values())} repetitions ({reasons})")
    return "".join(f"; {note}" for note in notes)


def _sort_out(
    jobs: Sequence[_Job], finished: Container[str], chat: ChatFormat, max_length: int
) -> tuple[list[_Job], Counter[DropReason]]:
    """Jobs that are left to do, and the count of those whose first prompt leaves no room for two tokens."""
    pending: list[_Job] = []
    skipped: Counter[DropReason] = Counter()
    for job in jobs:
        if job.id in finished:
            continue
        opening = [*job.messages, {"role": "user", "content": job.prompt.turns[0]}]
        if max_length - len(chat.render(opening, generation_prompt=True, tools=job.prompt.tools)) < 2:
            skipped[DropReason.PROMPT_FILLS_WINDOW] += 1
        else:
            pending.append(job)
    return pending, skipped


def _sections(jobs: Sequence[_Job], batch_size: int) -> list[list[_Job]]:
    """All conversations of one turn together (each is written when it ends); longer ones in sections, so that a kill
    loses no more than the unfinished turns of one section."""
    single = [job for job in jobs if len(job.prompt.turns) == 1]
    longer = [job for job in jobs if len(job.prompt.turns) > 1]
    size = SECTION * batch_size
    return [part for part in [single, *(longer[i : i + size] for i in range(0, len(longer), size))] if part]
