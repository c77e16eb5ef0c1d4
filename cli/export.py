"""`draftsmith export` and `draftsmith import`: a drafter's folder for an engine, and another producer's drafter as ours.

Nothing is written under the final name before the parity gate has passed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pipeline import open_run

if TYPE_CHECKING:
    from ..models.target import Target
    from ..recipes.schema import Recipe

DTYPES = ("float32", "bfloat16")
MADE = "draftsmith.json"
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command line. engine: whose rules are checked; None: the runtime's own, which are those of the loader.

    layout: native or speculators; target_heads: put the target's embedding and LM head into the file; both None: as the engine
    likes it. num_speculative_tokens: tokens a cycle that the file and the commands name; None: the whole block. zero_head: give
    a drafter without correction head one that adds nothing. base_model: where others find the target.
    """

    engine: str | None = None
    layout: str | None = None
    dtype: str = "bfloat16"
    to: Path | None = None
    target_heads: bool | None = None
    num_speculative_tokens: int | None = None
    zero_head: bool = False
    base_model: str | None = None
    gate: bool = True
    self_test: bool = False
    push_to_hub: str | None = None
    dry_run: bool = False
    wandb_artifact: str | None = None


@dataclass(frozen=True)
class _Source:
    """What is exported: the folder `drafter`, with the calibration beside its weights; `output`: the folder with its cost table
    and measurements; exports go to `beside`, a path to which their names are appended."""

    recipe: Recipe
    drafter: Path
    output: Path
    beside: str


@dataclass(frozen=True)
class _Plan:
    """What the options come to for one drafter, decided before anything heavy loads."""

    source: Path
    destination: Path
    layout: str
    with_heads: bool
    slots: int
    target: str
    config: Record


def run(name: str, overrides: list[str], options: ExportOptions) -> Path:
    """Export the trained drafter of recipe `name`, or of the folder `name` that `import` has made; returns the new folder.

    ValueError for what cannot be, before any model loads.
    """
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype: {options.dtype!r} is not allowed; it must be float32 or bfloat16")
    if options.self_test and not options.gate:
        raise ValueError("--self-test: tests the gate, so --no-gate is not allowed with it")
    from ..models.export import engines

    engines.pick_heads(options.engine, options.target_heads, engines.pick_format(options.engine, options.layout))
    found = _source(name, overrides)
    plan = _plan(found, options)
    if options.push_to_hub is not None:
        from .publish import check_repo

        check_repo(options.push_to_hub, dry_run=options.dry_run)
    _write(found, options, plan)
    where = f" for {engines.ENGINES[options.engine].title}" if options.engine else ""
    print(f"exported to {plan.destination} ({plan.layout}, {options.dtype}{where})")
    if options.push_to_hub is not None or options.wandb_artifact is not None:
        from . import publish

        if options.push_to_hub is not None:
            publish.push(plan.destination, options.push_to_hub, dry_run=options.dry_run)
        if options.wandb_artifact is not None:
            train = found.recipe.train
            publish.log_artifact(plan.destination, options.wandb_artifact, project=train.project, mode=train.wandb_mode)
    return plan.destination


def _source(name: str, overrides: list[str]) -> _Source:
    folder = Path(name)
    if not (folder / "config.json").is_file():
        run = open_run(name, overrides, claim=False)
        return _Source(run.recipe, run.folder / "drafter", run.folder, f"{run.folder}{os.sep}")
    from ..models.config import TargetConfig
    from ..models.export import native
    from ..recipes.schema import Recipe

    if overrides:
        raise ValueError(f"{overrides[0]}: is not allowed with a drafter's folder, which has no recipe to change")
    target = native.read_config(folder).get("target_model_name_or_path")
    path = folder / MADE
    made = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if target is None or "imported" not in made:
        raise ValueError(
            f"{folder}: was not made by `draftsmith import`; bring it in with that, or name the recipe that it was trained by"
        )
    dtype = made["imported"].get("target_dtype", "bfloat16")
    recipe = Recipe(output=str(folder.parent), target=TargetConfig(name=target, dtype=dtype))
    return _Source(recipe, folder, folder, f"{folder.resolve()}-")


def _plan(found: _Source, options: ExportOptions) -> _Plan:
    from ..models.export import card, engines, native, speculators

    source = found.drafter
    layout = engines.pick_format(options.engine, options.layout)
    destination = options.to or Path(found.beside + _folder_name(options, layout))
    check_destination(destination, source)
    config = native.read_config(source)
    if options.zero_head:
        if config["markov_rank"]:
            raise ValueError(f"--zero-head: the drafter has a correction head of rank {config['markov_rank']}; leave it out")
        config = {**config, "markov_rank": 8, "markov_head_type": "vanilla"}
    # drafters of older versions do not state their full vocabulary
    config = {**config, "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"], "dtype": options.dtype}
    with_heads = engines.pick_heads(options.engine, options.target_heads, layout)
    predictions = config["block_size"] - (not config["sample_from_anchor"])
    slots = predictions if options.num_speculative_tokens is None else options.num_speculative_tokens
    if not 1 <= slots <= predictions:
        raise ValueError(f"--num-speculative-tokens: {slots} is not allowed; it must be from 1 to {predictions}")
    target = options.base_model or card.hub_id(found.recipe.target.name)
    if options.engine is not None:
        file = config
        if layout == "speculators":
            file = speculators.to_config(config, verifier=target, verifier_architectures=[], num_speculative_tokens=slots)
        tensors = _tensor_names(source, with_heads, options.zero_head)
        engines.check(options.engine, engines.Subject(config, file, tensors, layout, slots))
    return _Plan(source, destination, layout, with_heads, slots, target, config)


def _folder_name(options: ExportOptions, layout: str) -> str:
    parts = [options.engine] if options.engine else []
    if layout != "native" and options.engine != layout:
        parts.append(layout)
    if options.dtype != "bfloat16" or not options.engine:
        parts.append(options.dtype)
    return "-".join(["export", *parts])


def check_destination(destination: Path, source: Path) -> None:
    """Refuses the drafter's own folder, and a folder that holds anything but an earlier export."""
    if destination.resolve() == source.resolve():
        raise ValueError(f"--to: {destination} is the trained drafter itself; choose another folder")
    if destination.exists() and any(destination.iterdir()) and not (destination / MADE).is_file():
        raise ValueError(f"--to: {destination} holds other files; choose another folder")


def _tensor_names(source: Path, with_heads: bool, zero_head: bool) -> frozenset[str]:
    """Names that the exported file will hold, from the header of the trained one."""
    from safetensors import safe_open

    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    frozen = {"embed_tokens.weight", "lm_head.weight"}
    if zero_head:
        names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    if with_heads:
        return frozenset(names | frozen)
    return frozenset(names - (frozen if "d2t" not in names else {"embed_tokens.weight"}))


def _write(found: _Source, options: ExportOptions, plan: _Plan) -> None:
    """Load, write, gate, describe; then the folder takes its name."""
    import torch

    from ..models.export import native, speculators
    from ..models.export.folder import staged
    from ..models.target import load_target

    target = load_target(found.recipe.target)
    drafter, heads = native.load(plan.source, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    if options.zero_head:
        drafter = native.add_zero_head(drafter)
    dtype = getattr(torch, options.dtype)
    made = json.loads((plan.source / MADE).read_text(encoding="utf-8"))
    with staged(plan.destination) as folder:
        if plan.layout == "native":
            native.write(folder, drafter, heads, dtype=dtype, with_heads=plan.with_heads)
        else:
            speculators.write(
                folder, drafter, heads, verifier=plan.target, verifier_architectures=target.config.architectures or [],
                dtype=dtype, with_heads=plan.with_heads, num_speculative_tokens=plan.slots,
            )  # fmt: skip
        if options.gate:
            from ..eval.parity import gate

            data = found.recipe.data
            made["parity"] = gate(
                folder, target, drafter, heads, dtype=dtype, with_heads=plan.with_heads, template_args=data.template_args,
                system=data.system, self_test=options.self_test,
            )  # fmt: skip
            print(gate_line(made["parity"]))
        else:
            print("warning: the parity gate is skipped; nothing shows that this file drafts what was trained", file=sys.stderr)
            made.pop("parity", None)
        made["gate"] = "passed" if options.gate else "skipped"
        if "chat" not in made and target.tokenizer is not None:  # of a drafter that an older version trained
            made["chat"] = _chat(found.recipe, target)
        _describe(folder, found, options, plan, made)


def _chat(recipe: Recipe, target: Target) -> Record:
    """Tokeniser and template arguments, as training records them."""
    from ..train.stage import Parts, chat_record

    parts = Parts(
        target=recipe.target, data=recipe.data, drafter=recipe.drafter, objective=recipe.objective, train=recipe.train
    )  # fmt: skip
    return chat_record(parts, target)


def _describe(folder: Path, found: _Source, options: ExportOptions, plan: _Plan, made: Record) -> None:
    """Calibration, cost table, draftsmith.json and README.md beside the weights."""
    from ..models.export import card, engines
    from ..runtime.calibration import Calibration
    from ..train.stage import provenance

    calibration = Calibration.load(plan.source)
    made["calibration"] = None
    if calibration is not None:
        calibration.save(folder)
        fitted = [f"{entry.setting} ({entry.kind})" for entry in calibration.entries]
        made["calibration"] = {"fitted_for": fitted, **calibration.to_json()}
    costs = found.output / "costs.json"
    made["costs"] = None
    if costs.is_file():
        (folder / costs.name).write_bytes(costs.read_bytes())
        made["costs"] = json.loads(costs.read_text(encoding="utf-8"))
    made["measured"], notes = card.measured(found.output)
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    served = [options.engine] if options.engine else []
    made["export"] = {
        "engine": options.engine, "format": plan.layout, "dtype": options.dtype, "target_heads": plan.with_heads,
        "num_speculative_tokens": plan.slots, "zero_head": options.zero_head, "target": plan.target,
        "commands": {name: engines.ENGINES[name].command("FOLDER", plan.target, plan.slots) for name in served},
        **{key: value for key, value in provenance("").items() if key != "prompts_sha256"},
    }  # fmt: skip
    write_made(folder, made)
    title = f"{plan.target.rsplit('/', 1)[-1]}-dspark"
    (folder / "README.md").write_text(card.model_card(plan.config, made, title=title, target=plan.target), encoding="utf-8")


def write_made(folder: Path, made: Record) -> None:
    """draftsmith.json, atomically."""
    temporary = folder / f".{MADE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / MADE)


def gate_line(record: Record) -> str:
    """One line of what the gate compared."""
    checks = {check["name"]: check for check in record["checks"]}
    logits = checks["draft logits"]
    line = (
        f"parity gate: passed; logits within {logits['value']:.1e} (limit {logits['limit']:.1e}), "
        f"{record['blocks']} blocks, first slot accepted {record['acceptance_per_slot'][0]:.0%}"
    )
    tested = record.get("self_test")
    return line + (f"; self-test: {', '.join(tested)} each caught" if tested else "")


def gate_trained(folder: Path, target: Target, setup: Any, recipe: Any) -> None:
    """The gate on what training has just written, against the weights still in memory; the result goes into draftsmith.json.

    Raises RuntimeError, and moves the folder to NAME.rejected, when they differ.
    """
    import torch

    from ..eval.parity import gate

    try:
        record = gate(
            folder, target, setup.drafter, setup.heads, dtype=torch.float32, template_args=recipe.data.template_args,
            system=recipe.data.system,
        )  # fmt: skip
    except RuntimeError:
        folder.rename(folder.with_name(f"{folder.name}.rejected"))
        raise
    made = json.loads((folder / MADE).read_text(encoding="utf-8"))
    write_made(folder, {**made, "gate": "passed", "parity": record})
    print(gate_line(record), flush=True)


def bring(path: Path, *, target: str, to: Path, layout: str | None, dtype: str) -> Path:
    """Another producer's drafter in the native layout, gated like an export; its weights keep their precision."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r} is not allowed; it must be float32 or bfloat16")
    from ..models.config import TargetConfig
    from ..models.export import importers
    from ..models.facts import target_facts

    cfg = TargetConfig(name=target, dtype="float32" if dtype == "float32" else "bfloat16")
    layers = target_facts(cfg).num_layers
    check_destination(to, path)
    found = importers.read(path, layout=layout, num_target_layers=layers)
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr)
    from ..data.chat import tokenizer_hash
    from ..eval.parity import gate
    from ..models.export import native
    from ..models.export.folder import staged
    from ..models.target import load_target

    loaded = load_target(cfg)
    config = {**found.config, "target_model_name_or_path": target, "num_target_layers": layers}
    drafter, heads = native.assemble(
        config, found.tensors, str(path), embedding=loaded.embedding_weight, lm_head=loaded.lm_head_weight
    )
    kept = found.tensors["fc.weight"].dtype
    with staged(to) as folder:
        native.write(folder, drafter, heads, dtype=kept)
        record = gate(folder, loaded, drafter, heads, dtype=kept)
        print(gate_line(record))
        imported = {"producer": found.kind, "notes": list(found.notes), "folder": path.name, "target_dtype": cfg.dtype}
        # what chats it was trained on is not known
        chat = {"template": None, "template_args": None, "tokenizer": tokenizer_hash(loaded.tokenizer)}
        write_made(folder, {"imported": imported, "chat": chat, "gate": "passed", "parity": record})
    print(f"imported from {found.kind} to {to} ({str(kept).removeprefix('torch.')})")
    return to
