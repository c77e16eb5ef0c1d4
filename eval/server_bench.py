"""`draftsmith bench --server URL`: a running engine over the same prompts and operating points as our own measurement.

One URL serves with speculation, a second one (--server-plain) the same target without; groups of prompts go to both in turn, in
alternating order. Times are what the client sees (HTTP and prefill included), acceptance is what the engine counts itself
(server_metrics.py). Prompts are sent as token ids of the recipe's target, so the engine's own chat template plays no part.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data.openai_client import OpenAIClient, Reply, ServerError
from ..models.config import TargetConfig
from ..models.facts import resolve_target
from . import server_metrics
from .config import EvalConfig
from .environment import describe
from .grid_plan import MIXED, CellPlan
from .prompts import EvalPrompt, load_eval_prompts, take
from .server_cells import Record, summarise_cell
from .server_report import build_server_report, cell_line, print_server, write_server_report

SETTLE = 2.0  # seconds that an engine may take to count what it has answered
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", None: "an engine without /metrics of vLLM's or SGLang's names"}


@dataclass(frozen=True)
class Work:
    """One cell's operating point and load. groups: prompts served together; tokens: longest answer; whole: ignore end tokens,
    so that the load stays the same; repeats: passes, with other seeds when sampled."""

    domain: str
    temperature: float
    concurrency: int
    context: int
    groups: list[list[EvalPrompt]]
    tokens: int
    whole: bool
    repeats: int

    def point(self) -> Record:
        """The cell's place, as report.json names it."""
        return {
            "domain": self.domain, "temperature": self.temperature, "concurrency": self.concurrency,
            "context_setting": self.context,
        }  # fmt: skip


class Remote:
    """One server: its model, its limits, and timed groups of requests. Raises as OpenAIClient does."""

    def __init__(self, url: str, *, model: str | None, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        client = OpenAIClient(url, model=model, timeout=timeout)
        self.model = client.choose_model()
        card = next(card for card in client.models() if card["id"] == self.model)
        longest = card.get("max_model_len")
        self.max_positions: int | None = longest if isinstance(longest, int) else None
        self.note: str | None = None
        try:
            self.engine = server_metrics.read(client.metrics()).engine
        except ServerError as error:
            self.engine, self.note = None, f"no metrics: {error}"
        client.close()

    def snapshot(self) -> server_metrics.Snapshot:
        """The engine's counters now."""
        if self.engine is None:
            return server_metrics.Snapshot(None)
        client = OpenAIClient(self.url, model=self.model, timeout=self.timeout)
        try:
            return server_metrics.read(client.metrics())
        finally:
            client.close()

    def run(self, group: Sequence[EvalPrompt], bodies: Sequence[Mapping[str, Any]]) -> Record:
        """The group at once: seconds until all have answered, per request tokens and times, and what the engine counted."""
        before = self.snapshot()
        client = OpenAIClient(self.url, model=self.model, concurrency=len(group), timeout=self.timeout)
        replies: list[Reply | None] = [None] * len(group)
        requests = [(prompt.id, prompt.prompt_ids, body) for prompt, body in zip(group, bodies, strict=True)]
        began = time.perf_counter()
        for index, reply in client.map(requests):
            if isinstance(reply, ServerError):
                raise reply
            replies[index] = reply
        seconds = time.perf_counter() - began
        done = [reply for reply in replies if reply is not None]
        tokens = [count_tokens(reply) for reply in done]
        counted = self._counted(before, sum(tokens))
        return {
            "seconds": seconds, "tokens": tokens, "first_s": [reply.first_s for reply in done],
            "request_s": [reply.seconds for reply in done], "token_ids": [reply.token_ids for reply in done],
            "texts": [reply.text for reply in done], "finish_reasons": [reply.finish_reason for reply in done],
            "retried": sum(reply.attempts - 1 for reply in done), "counted": counted,
            "foreign_tokens": None if counted["generation_tokens"] is None else counted["generation_tokens"] - sum(tokens),
        }  # fmt: skip

    def _counted(self, before: server_metrics.Snapshot, tokens: int) -> Record:
        """The difference, once the engine has counted as many tokens as were answered (it may count a little later)."""
        deadline = time.monotonic() + SETTLE
        while True:
            found = server_metrics.difference(self.snapshot(), before)
            counted = found["generation_tokens"]
            if counted is None or counted >= tokens or time.monotonic() > deadline:
                return found
            time.sleep(0.02)


def count_tokens(reply: Reply) -> int:
    """Tokens of an answer: its ids where the server gives them, else its own count. RuntimeError when it gives neither."""
    if reply.token_ids is not None:
        return len(reply.token_ids)
    if reply.completion_tokens is None:
        raise RuntimeError("the server names neither token ids nor a token count: nothing can be measured on it")
    return reply.completion_tokens


def run_server_bench(
    target_cfg: TargetConfig,
    cfg: EvalConfig,
    output: Path,
    *,
    server: str,
    server_plain: str | None = None,
    grid: bool = False,
    ours: Path | None = None,
    model: str | None = None,
    timeout: float = 120.0,
    recipe: Record | None = None,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    console: Console | None = None,
) -> Path:
    """Measure the server(s) and write report.json, report.html and records.json into `output`; returns the HTML's path.

    grid: the points of eval.grid instead of those of eval. ours: folder of our own report.json or grid.json, whose cells are
    shown beside. model: name to ask for, where a server has several. timeout: seconds of silence before a request is repeated.
    Raises ValueError for settings that the prompts or the server cannot serve, ServerError when a server fails.
    """
    console = console or Console()
    remotes = {"speculative": Remote(server, model=model, timeout=timeout)}
    if server_plain is not None:
        remotes = {"plain": Remote(server_plain, model=model, timeout=timeout), **remotes}
    for side, remote in remotes.items():
        console.print(f"{side}: {remote.model} at {remote.url}, {ENGINES[remote.engine]}", highlight=False)
        if remote.note:
            console.print(f"  {remote.note}", style="yellow", highlight=False)
    tokenizer = load_tokenizer(target_cfg)
    works = plan_cells(cfg, tokenizer, remotes, grid=grid, template_args=template_args, system=system)
    environment = describe(cfg.dtype or target_cfg.dtype)
    began, cells, kept = time.perf_counter(), [], []
    for work in works:
        records = measure(work, remotes, cfg)
        cell = summarise_cell(work.point(), records, seed=cfg.seed)
        console.print(cell_line(cell), highlight=False)
        cells.append(cell)
        kept.append(work.point() | {"records": records})
    report = build_server_report(
        cells, kept,
        environment=environment | {"measurement_seconds": round(time.perf_counter() - began, 1)},
        target={"name": target_cfg.name, "revision": target_cfg.revision, "dtype": target_cfg.dtype},
        servers={
            side: {"model": r.model, "engine": r.engine, "max_model_len": r.max_positions, "note": r.note}
            for side, r in remotes.items()
        },
        settings=dataclasses.asdict(cfg) | {"server_grid": grid}, recipe=recipe, ours=ours,
        mismatched=wrong_texts(tokenizer, kept),
    )  # fmt: skip
    html = write_server_report(report, kept, output)
    print_server(report, html, console)
    return html


def load_tokenizer(target_cfg: TargetConfig) -> Any:
    """The recipe's tokenizer; no weights are loaded."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_target(target_cfg), revision=target_cfg.revision)


# ---- what is measured -------------------------------------------------------------------------------------------------


def plan_cells(
    cfg: EvalConfig, tokenizer: Any, remotes: Mapping[str, Remote], *, grid: bool, template_args: Any, system: str | None
) -> list[Work]:
    """Every cell, in the order of `bench` or of `bench --grid`. ValueError where prompts or positions do not suffice."""
    limits = [remote.max_positions for remote in remotes.values() if remote.max_positions is not None]
    contexts = cfg.grid.contexts if grid else cfg.contexts
    longest = max(CellPlan.build(cfg.grid, c).tokens for c in cfg.grid.concurrency) if grid else cfg.max_new_tokens
    room = min(limits, default=1 << 20) - longest - 1
    if room < max(1, *contexts):
        raise ValueError(
            f"eval.{'grid.' if grid else ''}contexts: got {max(contexts)}, allowed: at most {max(room, 0)} "
            f"(the server has {min(limits)} positions, {longest + 1} of them for answers)"
        )
    sets = {
        context: load_eval_prompts(
            cfg, tokenizer, max_prompt=room, context=context, template_args=template_args, system=system
        )
        for context in contexts
    }  # fmt: skip
    return _grid_cells(cfg, sets) if grid else _plain_cells(cfg, sets)


def _plain_cells(cfg: EvalConfig, sets: Mapping[int, dict[str, list[EvalPrompt]]]) -> list[Work]:
    return [
        Work(
            domain, temperature, concurrency, context, take(own, cfg.prompts_per_domain, concurrency), cfg.max_new_tokens,
            whole=False, repeats=cfg.repeats,
        )
        for concurrency in cfg.concurrency for context, domains in sets.items()
        for temperature in cfg.temperatures for domain, own in domains.items()
    ]  # fmt: skip


def _grid_cells(cfg: EvalConfig, sets: Mapping[int, dict[str, list[EvalPrompt]]]) -> list[Work]:
    """As many tokens per side as the grid's windows decode, each window one request per prompt from its beginning."""
    works = []
    for context, domains in sets.items():
        for domain in cfg.grid.domains:
            if domain != MIXED and domain not in domains:
                raise ValueError(f"eval.grid.domains: got {domain!r}, allowed: {MIXED}, {', '.join(domains)}")
            mixed = [p for group in zip(*domains.values(), strict=False) for p in group]
            prompts = mixed if domain == MIXED else domains[domain]
            for concurrency in cfg.grid.concurrency:
                plan = CellPlan.build(cfg.grid, concurrency)
                need = plan.units * concurrency
                if len(prompts) < need:
                    raise ValueError(f"eval.grid.prompts: got {need}, allowed: at most {len(prompts)} for {domain!r}")
                groups = [prompts[i : i + concurrency] for i in range(0, need, concurrency)]
                works += [
                    Work(
                        domain, temperature, concurrency, context, groups, plan.tokens, whole=True,
                        repeats=plan.rounds + (plan.more if temperature > 0.0 else 0),
                    )
                    for temperature in cfg.grid.temperatures
                ]  # fmt: skip
    return works


def measure(work: Work, remotes: Mapping[str, Remote], cfg: EvalConfig) -> list[Record]:
    """Raw records of a cell, one per group and pass with every side in it; one short group per side goes before, untimed."""
    for remote in remotes.values():
        group = work.groups[0]
        remote.run(group, [body | {"max_tokens": min(8, work.tokens)} for body in bodies(work, cfg, group, 0)])
    records: list[Record] = []
    for repeat in range(work.repeats):
        for unit, group in enumerate(work.groups):
            order = list(remotes) if (unit + repeat) % 2 == 0 else list(remotes)[::-1]
            record: Record = {"unit": unit, "repeat": repeat, "first": order[0], "ids": [p.id for p in group]}
            record["prompt_tokens"] = [len(p.prompt_ids) for p in group]
            number = unit + repeat * len(work.groups)
            for side in order:
                record[side] = remotes[side].run(group, bodies(work, cfg, group, number))
            records.append(record)
    return records


def bodies(work: Work, cfg: EvalConfig, group: Sequence[EvalPrompt], number: int) -> list[Record]:
    """The requests' keys beside the prompt; the same on every side. number: of the group within the cell."""
    common: Record = {"temperature": work.temperature, "max_tokens": work.tokens}
    if work.whole:
        common["ignore_eos"] = True
    if work.temperature > 0.0:
        common |= {"top_k": cfg.top_k} if cfg.top_k else {}
        common |= {"top_p": cfg.top_p} if cfg.top_p < 1.0 else {}
    return [common | {"seed": cfg.seed + 100_003 * number + i} for i in range(len(group))]


def wrong_texts(tokenizer: Any, kept: Sequence[Record]) -> int:
    """Answers whose text is not what the recipe's tokenizer makes of their ids: the server then runs another model.

    Special tokens and an unfinished character at the end may differ.
    """
    wrong = 0
    for cell in kept[:1]:
        for record in cell["records"]:
            run = record["speculative"]
            for ids, text in zip(run["token_ids"], run["texts"], strict=True):
                if ids is not None:
                    own = tokenizer.decode(ids, skip_special_tokens=True)
                    wrong += own.strip().rstrip("�") not in (text.strip().rstrip("�"), "")
    return wrong
