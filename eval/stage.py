"""The measurement as one restartable stage: load, costs, cells, losslessness, report. Used by `draftsmith bench` and `run`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ..models.config import TargetConfig
from ..models.export.native import read_config
from ..models.target import Target, load_target
from ..runtime.config import ProposerConfig, SamplingParams
from ..runtime.decoder import Decoder
from ..runtime.engine import Engine
from ..runtime.proposers import ProposerSource, draft_slots
from . import bench as cells
from .config import EvalConfig
from .cost import measure_costs, nearest_cost, verify_curve
from .environment import describe
from .lossless import GreedyVerdict, Verdict, check_greedy, check_sampling, greedy_from_records
from .prompts import EvalPrompt, load_eval_prompts, take
from .report import build_report, read_history, write_report
from .table import print_summary

SAMPLING_SLOTS = 8  # rows decoded together by the sampling test; results do not depend on it
Record = dict[str, Any]
DtypeName = Literal["float32", "bfloat16"]
PromptSets = dict[int, dict[str, list[EvalPrompt]]]  # context -> domain -> prompts


@dataclass
class Serving:
    """Target and drafter of one precision, ready to make engines of any number of slots that share the weights."""

    target: Target
    decoder: Decoder
    drafter_folder: Path
    dtype: torch.dtype
    rule: str
    num_slots: int | None
    longest: int
    proposer: ProposerConfig = field(default_factory=ProposerConfig)
    _source: ProposerSource | None = None
    _engines: dict[int, tuple[Engine, Engine]] = field(default_factory=dict)

    @classmethod
    def open(
        cls, target_cfg: TargetConfig, drafter_folder: Path, cfg: EvalConfig, dtype_name: DtypeName, device: str
    ) -> Serving:
        """Load the target in a precision and build its decoder with the drafter's taps. ValueError as the loaders say."""
        config = read_config(drafter_folder)
        dtype = getattr(torch, dtype_name)
        target = load_target(dataclasses.replace(target_cfg, dtype=dtype_name), device)
        decoder = Decoder.from_target(target.model, dtype=dtype, tap_layers=tuple(config["target_layer_ids"]))
        longest = decoder.max_positions - max(config["block_size"], draft_slots(cfg.proposer, drafter_folder)) - 1
        return cls(target, decoder, drafter_folder, dtype, cfg.rule, cfg.num_slots, longest, cfg.proposer)

    def engines(self, slots: int, max_context: int) -> tuple[Engine, Engine]:
        """(plain, speculative), cached by their number of slots; grown when a longer context is asked for."""
        found = self._engines.get(slots)
        if found is None or found[0].max_context < max_context:
            if self._source is None:
                self._source = ProposerSource(
                    self.proposer,
                    target=self.target,
                    dtype=self.dtype,
                    drafter_folder=self.drafter_folder,
                    decoder=self.decoder,
                )
            proposer = self._source(slots=slots, max_context=max_context, with_survival=False)
            common: dict[str, Any] = {
                "slots": slots,
                "max_context": max_context,
                "rule": self.rule,
                "eos_ids": self.target.eos_token_ids,
            }
            speculative = Engine(self.decoder, proposer=proposer, num_slots=self.num_slots, **common)
            self._engines[slots] = found = (Engine(self.decoder, **common), speculative)
        return found


def bench(
    target_cfg: TargetConfig,
    drafter_folder: Path | str,
    cfg: EvalConfig,
    output: Path | str,
    *,
    recipe: Record | None = None,
    train_log: Path | str | None = None,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    device: str = "cpu",
    console: Console | None = None,
) -> Path:
    """Measure a drafter against its target and write `report.json` and `report.html` into `output`; returns the HTML's path.

    Finished parts lie in `output/measurements` and are reused as long as target, drafter, settings, machine and dtype are the
    same; delete the folder to measure anew. recipe: the resolved recipe for the report; train_log: the training JSONL for its
    curves; template_args and system: of the chat, as in training. Raises ValueError before any model loads for settings or
    a drafter folder that cannot be measured.
    """
    console = console or Console()
    output, drafter_folder = Path(output), Path(drafter_folder)
    drafter_config = read_config(drafter_folder)
    dtype: DtypeName = cfg.dtype or target_cfg.dtype
    environment = describe(dtype, device)
    store = Store(
        output / "measurements",
        fingerprint(target_cfg, drafter_folder, cfg, environment, {**(template_args or {}), "": system}),
        console,
    )
    began = time.perf_counter()
    serving = Serving.open(target_cfg, drafter_folder, cfg, dtype, device)
    prompts = {
        context: load_eval_prompts(
            cfg,
            serving.target.tokenizer,
            max_prompt=serving.longest - answer_room(cfg),
            context=context,
            template_args=template_args,
            system=system,
        )
        for context in cfg.contexts
    }
    costs = measure_all_costs(serving, cfg, prompts, store)
    measured = measure_all_cells(serving, cfg, prompts, costs["points"], store)
    verdict = check_lossless(serving, target_cfg, cfg, prompts, measured, store, device)
    report = build_report(
        environment=environment | {"measurement_seconds": round(time.perf_counter() - began, 1), "reused_parts": store.reused},
        target={
            "name": target_cfg.name,
            "revision": target_cfg.revision,
            "quantization": target_cfg.quantized_as,
            "dtype": dtype,
            "vocab_size": serving.target.vocab_size,
        },
        drafter=drafter_config | {"folder": drafter_folder.name, "rule": cfg.rule},
        recipe=recipe,
        cells=[part["summary"] for part in measured],
        cost=costs,
        lossless=verdict,
        training=read_history(Path(train_log)) if train_log else None,
        settings=dataclasses.asdict(cfg),
    )
    html = write_report(report, output)
    print_summary(report, html, console)
    return html


# ---- parts ----------------------------------------------------------------------------------------------------------


def measure_all_costs(serving: Serving, cfg: EvalConfig, prompts: PromptSets, store: Store) -> Record:
    """Costs at every concurrency x context x {greedy, sampled} that the cells use, and the curve of v."""
    points = []
    kinds = [t for t in cfg.temperatures if t == 0.0][:1] + [t for t in cfg.temperatures if t > 0.0][:1]
    for concurrency in cfg.concurrency:
        for context, domains in prompts.items():
            mixed = [p for group in zip(*domains.values(), strict=False) for p in group]
            groups = take(mixed, max(cfg.cost_prompts, 2), concurrency)[: max(1, cfg.cost_prompts // concurrency)]
            for temperature in kinds:
                engines = serving.engines(concurrency, context_limit(prompts, cfg))
                sampling = sampling_of(cfg, temperature)
                measure = partial(_costs, engines, groups, sampling, cfg)
                points.append(store.part(f"cost-t{temperature:g}-c{concurrency}-x{context}", measure))
    gamma = serving.engines(cfg.concurrency[0], context_limit(prompts, cfg))[1].num_slots
    widths = sorted({1, 2, 4, 8, gamma + 1})
    curve = store.part(
        f"verify-curve-c{cfg.concurrency[0]}",
        lambda: verify_curve(serving.decoder, batch=cfg.concurrency[0], context=points[0]["context"], widths=widths),
    )
    main = {key: points[0][key] for key in ("c_block", "c_step", "v", "overhead", "plain_overhead", "gamma", "target_pass_ms")}
    return main | {"points": points, "verify_curve": curve}


def measure_all_cells(
    serving: Serving, cfg: EvalConfig, prompts: PromptSets, costs: list[Record], store: Store
) -> list[Record]:
    """Every cell: {"summary": for the report, "records": raw}. Cells already measured are read back."""
    found = []
    for concurrency in cfg.concurrency:
        engines = serving.engines(concurrency, context_limit(prompts, cfg))
        for context, domains in prompts.items():
            for temperature in cfg.temperatures:
                for domain, own in domains.items():
                    point = cells.OperatingPoint(domain, temperature, concurrency, context)
                    groups = take(own, cfg.prompts_per_domain, concurrency)
                    measure = partial(_records, engines, groups, sampling_of(cfg, temperature), cfg, store)
                    part = store.part(f"cell-{point.key}", measure)
                    # summarised again when read back: a prediction always uses the costs of this report
                    lengths = [n for record in part["records"] for n in record["prompt_tokens"]]
                    cost = nearest_cost(
                        costs, concurrency=concurrency, context=sorted(lengths)[len(lengths) // 2], temperature=temperature
                    )
                    gamma = engines[1].num_slots
                    summary = cells.summarise_cell(point, part["records"], gamma=gamma, cost=cost, seed=cfg.seed)
                    store.console.print(cell_line(summary))
                    found.append({"summary": summary, "records": part["records"]})
    return found


def _costs(engines: tuple[Engine, Engine], groups: list[list[EvalPrompt]], sampling: SamplingParams, cfg: EvalConfig) -> Record:
    cells.warm_up(engines, groups[0], sampling)
    plain, speculative = engines
    return measure_costs(plain, speculative, groups, sampling, tokens=cfg.cost_tokens, repeats=cfg.cost_repeats)


def _records(
    engines: tuple[Engine, Engine], groups: list[list[EvalPrompt]], sampling: SamplingParams, cfg: EvalConfig, store: Store
) -> Record:
    cells.warm_up(engines, groups[0], sampling)
    return {"records": cells.measure_cell(*engines, groups, sampling, repeats=cfg.repeats, on_unit=store.progress)}


def check_lossless(
    serving: Serving,
    target_cfg: TargetConfig,
    cfg: EvalConfig,
    prompts: PromptSets,
    measured: list[Record],
    store: Store,
    device: str,
) -> Record:
    """The verdict over what the greedy cells produced, a float32 pass when serving in another precision, and sampling."""
    first = prompts[cfg.contexts[0]]  # one id means other tokens in a filled-up context: compare within the first
    ids = {p.id: p.prompt_ids for own in first.values() for p in own}
    records = [
        record
        for part in measured
        if part["summary"]["temperature"] == 0.0 and part["summary"]["context_setting"] == cfg.contexts[0]
        for record in part["records"]
    ]
    served = greedy_from_records(serving.decoder, records, ids) if records else None
    sampling = store.part("lossless-sampling", lambda: _sampling(serving, cfg, first)) if cfg.sampling_prompts else None
    exact = served if serving.dtype == torch.float32 else None
    if exact is None and cfg.greedy_float32:
        stored = store.part("lossless-float32", lambda: _float32(serving, target_cfg, cfg, first, store, device))
        exact = GreedyVerdict.from_json(stored)
    return Verdict(greedy=exact, served=served, sampling=sampling).to_json()


def _sampling(serving: Serving, cfg: EvalConfig, natural: dict[str, list[EvalPrompt]]) -> Record:
    mixed = [p for group in zip(*natural.values(), strict=False) for p in group][: cfg.sampling_prompts]
    engines = serving.engines(SAMPLING_SLOTS, max(len(p.prompt_ids) for p in mixed) + 64)
    return check_sampling(*engines, mixed, sampling_of(cfg, 1.0), seeds=cfg.sampling_seeds, positions=cfg.sampling_positions)


def _float32(
    serving: Serving, target_cfg: TargetConfig, cfg: EvalConfig, natural: dict[str, list[EvalPrompt]], store: Store, device: str
) -> Record:
    exact = Serving.open(target_cfg, serving.drafter_folder, cfg, "float32", device)
    groups = [[p] for own in natural.values() for p in own[: cfg.greedy_prompts_per_domain]]
    longest = max(len(group[0].prompt_ids) for group in groups) + cfg.max_new_tokens + 1
    engines = exact.engines(1, min(longest, exact.longest))
    verdict = check_greedy(*engines, groups, max_new_tokens=cfg.max_new_tokens, on_unit=store.progress)
    return dataclasses.asdict(verdict)


def sampling_of(cfg: EvalConfig, temperature: float) -> SamplingParams:
    """Sampling settings of a cell; truncation only where something is sampled."""
    hot = temperature > 0.0
    return SamplingParams(
        temperature=temperature, top_k=cfg.top_k if hot else 0, top_p=cfg.top_p if hot else 1.0,
        max_new_tokens=cfg.max_new_tokens, seed=cfg.seed,
    )  # fmt: skip


def context_limit(prompts: PromptSets, cfg: EvalConfig) -> int:
    """Positions an engine needs for the longest prompt and its answer."""
    longest = max(len(p.prompt_ids) for domains in prompts.values() for own in domains.values() for p in own)
    return longest + answer_room(cfg)


def answer_room(cfg: EvalConfig) -> int:
    """Positions kept free behind a prompt."""
    return max(cfg.max_new_tokens, cfg.cost_tokens) + 1


def cell_line(cell: Record) -> str:
    """One line of progress for a finished cell."""
    low, high = cell["speedup_interval"]
    tau = "-" if cell["tau"] is None else f"{cell['tau']:.2f}"
    return (
        f"  {cell['domain']:<10} T={cell['temperature']:g} concurrency {cell['concurrency']} context {cell['context']}: "
        f"{cell['speedup']:.2f}x [{low:.2f}, {high:.2f}], tau {tau}"
    )


# ---- restart --------------------------------------------------------------------------------------------------------


def fingerprint(
    target_cfg: TargetConfig,
    drafter_folder: Path,
    cfg: EvalConfig,
    environment: Record,
    template_args: Mapping[str, Any] | None,
) -> str:
    """Hash of all that decides a measurement; a part measured under another one is not reused."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (drafter_folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    # Sizes of the losslessness test change no cell, but one key for all parts is easier to trust than three.
    machine = {key: environment[key] for key in ("hardware", "threads", "dtype", "versions")}
    settings = {key: value for key, value in dataclasses.asdict(cfg).items() if key != "grid"}  # measured apart, see grid.py
    settings["calibration"] = cfg.calibration.share  # decides which prompts come first; the rest of it measures nothing here
    state = [target_cfg.identity, settings, machine, dict(template_args or {})]
    digest.update(json.dumps(state, sort_keys=True, default=str).encode())
    if cfg.prompts != "builtin" and Path(cfg.prompts).is_file():
        digest.update(Path(cfg.prompts).read_bytes())
    return digest.hexdigest()[:16]


class Store:
    """Finished parts as JSON files, each with the fingerprint it was measured under."""

    def __init__(self, folder: Path, key: str, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.key, self.console, self.reused = folder, key, console, 0

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """The stored value of a part, or measure it now and store it (atomically: a killed run leaves no half file)."""
        path = self.folder / f"{name}.json"
        try:
            stored = json.loads(path.read_text())
        except (OSError, ValueError):
            stored = {}
        if stored.get("fingerprint") == self.key:
            self.reused += 1
            self.console.print(f"  {name}: measured before, reused", style="dim")
            return stored["value"]
        self.console.print(f"  {name}: measuring", style="dim")
        value = measure()
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"fingerprint": self.key, "value": value}))
        temporary.replace(path)
        return value

    def progress(self, done: int, total: int) -> None:
        """Called after each unit; prints a count on a terminal only, where it can be overwritten."""
        if self.console.is_terminal:
            self.console.print(f"    {done}/{total}", end="\r", style="dim")
