"""The operating-point grid: plain, fixed draft lengths and the scheduler over concurrency x context x temperature x domain.

One engine with one proposer serves every side; a side is a scheduler. The engine has a slot for each prompt of a cell and keeps
what it has prefilled, so a prompt is prefilled once per context and a run only decodes (grid_run.py). Every raw record is kept,
and a cell once measured is not measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from ..models.config import TargetConfig
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.export.native import load as load_drafter
from ..models.export.native import read_config
from ..models.facts import target_facts
from ..runtime.calibration import Calibration
from ..runtime.config import SamplingParams
from ..runtime.costs import CostTable
from ..runtime.dspark import DSparkProposer
from ..runtime.engine import Engine
from ..runtime.schedule import FixedLength, LoadAware, Scheduler
from .config import EvalConfig
from .environment import describe
from .grid_cells import PLAIN, SCHEDULED, Arithmetic, arithmetic_json, fixed, summarise_cell
from .grid_plan import MIXED, CellPlan, answer_room, check_grid, resolve_gammas
from .grid_report import build_grid, cell_line, print_grid, write_grid
from .grid_run import Rig, Watched, timed_window
from .profile import CONTEXTS, ROWS, load_or_profile
from .prompts import EvalPrompt, load_eval_prompts
from .stage import DtypeName, Serving, Store, fingerprint

COSTS = "costs.json"
CHECK_WINDOWS = 2  # of each engine in the check of the plain side
Record = dict[str, Any]


def run_grid(
    target_cfg: TargetConfig,
    drafter_folder: Path | str,
    cfg: EvalConfig,
    output: Path | str,
    *,
    recipe: Record | None = None,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    device: str = "cpu",
    console: Console | None = None,
    costs: CostTable | None = None,
) -> Path:
    """Measure the grid and write `grid.json` and `grid.html` into `output`; returns the HTML's path.

    costs: None takes `output/costs.json`, measured first where it is missing or from another machine, target or drafter.
    Finished cells lie in `output/measurements/grid` and are reused while all that decides them is the same; axes may grow.
    Raises ValueError before any model loads for settings or a drafter folder that cannot be measured.
    """
    console = console or Console()
    output, folder = Path(output), Path(drafter_folder)
    block = int(read_config(folder)["block_size"])
    check_grid(cfg, block, target_facts(target_cfg).max_positions)
    dtype: DtypeName = cfg.dtype or target_cfg.dtype
    environment = describe(dtype, device)
    began = time.perf_counter()
    costs = costs or cost_table(target_cfg, folder, cfg, output, device, console)
    serving = Serving.open(target_cfg, folder, cfg, dtype, device)
    chat = {"template_args": template_args, "system": system}
    key = grid_key(target_cfg, folder, cfg, environment, {**(template_args or {}), "": system}, costs)
    store = Store(output / "measurements" / "grid", key, console)
    grid = _Grid(serving, folder, cfg, costs, store, chat)
    cells = grid.cells()
    report = build_grid(
        environment=environment | {"measurement_seconds": round(time.perf_counter() - began, 1), "reused_parts": store.reused},
        target={"name": target_cfg.name, "revision": target_cfg.revision, "dtype": dtype},
        drafter=read_config(folder) | {"folder": folder.name, "rule": cfg.rule},
        cells=cells,
        plain_check=store.part("plain-check", grid.plain_check),
        arithmetic=arithmetic_json(grid.arithmetic),
        costs={key: getattr(costs, key) for key in ("hardware", "threads", "ragged", "rows", "slots", "contexts", "notes")},
        recipe=recipe,
        settings=dataclasses.asdict(cfg),
    )
    html = write_grid(report, output)
    print_grid(report, html, console)
    return html


class _Grid:
    """The parts of a run. Engine and prompts are made when the first unmeasured cell asks for them."""

    def __init__(
        self, serving: Serving, folder: Path, cfg: EvalConfig, costs: CostTable, store: Store, chat: dict[str, Any]
    ) -> None:
        self.serving, self.folder, self.cfg, self.costs, self.store, self.chat = serving, folder, cfg, costs, store, chat
        self.block = int(read_config(folder)["block_size"])
        self.drafter, self.heads = load_drafter(
            folder, embedding=serving.target.embedding_weight, lm_head=serving.target.lm_head_weight, dtype=serving.dtype
        )
        self.arithmetic = arithmetic_of(serving.target.model, self.drafter, self.heads)
        self.plans = {c: CellPlan.build(cfg.grid, c) for c in cfg.grid.concurrency}
        self.reach = max(plan.reach for plan in self.plans.values())
        self._rig: Rig | None = None
        self._loaded: dict[int, dict[str, list[EvalPrompt]]] = {}

    def cells(self) -> list[Record]:
        """Every cell's figures, contexts outermost (their prompts stay resident), in the order of the axes."""
        grid, found = self.cfg.grid, []
        for context in grid.contexts:
            for domain in grid.domains:
                for concurrency, plan in self.plans.items():
                    for temperature in grid.temperatures:
                        point = {
                            "domain": domain, "temperature": temperature, "concurrency": concurrency,
                            "context_setting": context,
                        }  # fmt: skip
                        name = f"{domain}-t{temperature:g}-c{concurrency}-x{context}"
                        records = self.store.part(name, lambda: self._measure(context, domain, plan, temperature))  # noqa: B023
                        cell = summarise_cell(
                            point, records, costs=self.costs, arithmetic=self.arithmetic, seed=self.cfg.seed
                        )  # fmt: skip
                        self.store.console.print(cell_line(cell))
                        found.append(cell)
        return found

    def _measure(self, context: int, domain: str, plan: CellPlan, temperature: float) -> list[Record]:
        if self._rig is None:
            self._rig = self._make_rig()
        self._rig.settle(self._prompts(context, domain), self.reach)
        return self._rig.cell(plan, temperature, self.store.progress)

    def _make_rig(self) -> Rig:
        calibration = Calibration.load(self.folder)
        warning = None if calibration is None else _calibration_warning(calibration, self.cfg)
        if warning:
            self.store.console.print(f"  calibration: {warning}", style="yellow")
        longest = max(max(len(p.prompt_ids) for p in self._prompts(c, d)) for c in self.cfg.grid.contexts
                      for d in self.cfg.grid.domains)  # fmt: skip
        limits: dict[str, Any] = {
            "slots": max(plan.units * plan.concurrency for plan in self.plans.values()),
            "max_context": longest + answer_room(self.cfg.grid, self.block),
        }
        proposer = DSparkProposer(self.drafter, self.heads, with_survival=True, calibration=calibration, **limits)
        engine = Engine(
            self.serving.decoder, proposer=proposer, rule=self.cfg.rule, eos_ids=self.serving.target.eos_token_ids,
            num_slots=self.cfg.num_slots, reuse_prefix=True, **limits,
        )  # fmt: skip
        sides: dict[str, Scheduler] = {PLAIN: FixedLength(0)}
        sides |= {fixed(gamma): FixedLength(gamma) for gamma in resolve_gammas(self.cfg, self.block)}
        return Rig(engine, sides | {SCHEDULED: LoadAware(self.costs, clock=time.perf_counter)}, self.cfg)

    def _prompts(self, context: int, domain: str) -> list[EvalPrompt]:
        if context not in self._loaded:
            room = answer_room(self.cfg.grid, self.block)
            self._loaded[context] = load_eval_prompts(
                self.cfg, self.serving.target.tokenizer, max_prompt=self.serving.decoder.max_positions - room,
                context=context, **self.chat,
            )  # fmt: skip
        sets = self._loaded[context]
        chosen = [p for group in zip(*sets.values(), strict=False) for p in group] if domain == MIXED else sets[domain]
        return chosen[: max(plan.units * plan.concurrency for plan in self.plans.values())]

    def plain_check(self) -> Record:
        """Throughput of the plain side over that of an engine without a drafter, per concurrency, at the shortest context.

        Both decode the same windows in turn. Below 1: what keeping the drafter's context costs a row that is not drafted.
        """
        context, domain, found = min(self.cfg.grid.contexts), self.cfg.grid.domains[0], {}
        if self._rig is None:
            self._rig = self._make_rig()
        prompts, rig = self._prompts(context, domain), self._rig
        rig.settle(prompts, self.reach)
        for concurrency, plan in self.plans.items():
            bare = Engine(
                self.serving.decoder, slots=concurrency, rule=self.cfg.rule, eos_ids=self.serving.target.eos_token_ids,
                max_context=max(len(p.prompt_ids) for p in prompts) + answer_room(self.cfg.grid, self.block), reuse_prefix=True,
            )  # fmt: skip
            requests = rig.requests(plan, 0, 0, plan.tokens, 0.0, seed=0)
            rates: dict[str, list[Record]] = {"shared": [], "bare": []}
            timed_window(bare, Watched(FixedLength(0)), requests, 4)
            for window in range(CHECK_WINDOWS):
                order = ("shared", "bare") if window % 2 else ("bare", "shared")
                for name in order:
                    engine, side = (rig.engine, rig.sides[PLAIN]) if name == "shared" else (bare, Watched(FixedLength(0)))
                    rates[name].append(timed_window(engine, side, requests, plan.tokens))
            speed = {n: sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs) for n, runs in rates.items()}
            found[str(concurrency)] = speed["shared"] / speed["bare"]
        return found


def cost_table(
    target_cfg: TargetConfig, folder: Path, cfg: EvalConfig, output: Path, device: str, console: Console
) -> CostTable:  # fmt: skip
    """`output/costs.json` where it was measured here with these models, else a new one over at least the grid's points."""
    asked = {context or CONTEXTS[0] for context in cfg.grid.contexts}
    return load_or_profile(
        target_cfg, folder, cfg, output / COSTS, device=device, rows=sorted({*ROWS, *cfg.grid.concurrency}),
        contexts=sorted({*(c for c in CONTEXTS if c <= max(asked)), *asked}),
        say=lambda line: console.print(f"  costs: {line}", style="dim"),
    )  # fmt: skip


def grid_key(
    target_cfg: TargetConfig, folder: Path, cfg: EvalConfig, environment: Record, chat: Mapping[str, Any], costs: CostTable
) -> str:
    """Hash of all that decides a cell but its place on the axes: those are in its name, so that a grid may grow."""
    grid = {key: getattr(cfg.grid, key) for key in ("tokens", "sampled_tokens", "prompts", "repeats")}
    grid["gammas"] = resolve_gammas(cfg, int(read_config(folder)["block_size"]))
    calibration = folder / "calibration.json"
    extra = {
        "chat": dict(chat),
        "grid": grid,
        "costs": hashlib.sha256(repr(dataclasses.replace(costs, acceptance={}, notes={})).encode()).hexdigest(),
        "calibration": hashlib.sha256(calibration.read_bytes()).hexdigest() if calibration.is_file() else None,
    }
    names = ("prompts", "domains", "top_k", "top_p", "seed", "dtype", "num_slots", "rule", "calibration")
    view = dataclasses.replace(EvalConfig(), **{name: getattr(cfg, name) for name in names})
    return fingerprint(target_cfg, folder, view, environment, extra)


def arithmetic_of(model: nn.Module, drafter: DSpark, heads: FrozenHeads) -> Arithmetic:
    """Multiply-adds counted from the weights of a dense target and its drafter (every expert of a mixture would count)."""
    config: Any = model.config
    text = getattr(config, "get_text_config", lambda: config)()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape, layers, block = drafter.layers[0].self_attn.shape, len(drafter.layers), drafter.block_size
    markov = drafter.markov_head
    return Arithmetic(
        target=_weights(model),
        target_attention=2 * text.num_hidden_layers * text.num_attention_heads * head_dim,
        block=block * _weights(drafter.layers),
        block_attention=block * 2 * layers * shape.num_heads * shape.head_dim,
        slot=heads.draft_head.numel() + (0 if markov is None else _weights(markov)),
        context=drafter.fc.weight.numel()
        + sum(_weights(layer.self_attn.k_proj) + _weights(layer.self_attn.v_proj) for layer in drafter.layers),
    )


def _weights(module: nn.Module) -> int:
    """Weights of the linear layers in a module: multiply-adds per token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _calibration_warning(calibration: Calibration, cfg: EvalConfig) -> str | None:
    for temperature in cfg.grid.temperatures:
        hot = temperature > 0.0
        sampling = SamplingParams(
            temperature=temperature, top_k=cfg.top_k if hot else 0, top_p=cfg.top_p if hot else 1.0
        )  # fmt: skip
        warning = calibration.check(sampling, cfg.rule)
        if warning is not None:
            return warning
    return None
