"""draftsmith.json and the model card of an exported drafter: what it is, what was measured, how to serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .engines import ENGINES

Record = dict[str, Any]
HUB_IDS = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # embedded targets, where the Hub has them
CELL = (
    "domain", "temperature", "concurrency", "context", "gamma", "tau", "speedup", "speedup_interval", "acceptance_per_slot",
    "plain_tokens_per_second", "speculative_tokens_per_second",
)  # fmt: skip
SIDE = ("tokens_per_second", "speedup", "speedup_interval", "tau", "length_mean")
MACHINE = ("hardware", "device", "threads", "dtype", "versions", "git_commit")


def hub_id(target: str) -> str:
    """Where others find the target: an embedded target's Hub id, else the name itself."""
    return HUB_IDS.get(target, target)


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub id (owner/name), and no folder of this machine."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def measured(output: Path) -> tuple[Record, list[str]]:
    """(what report.json and grid.json of a run say about its drafter, what was left out and why)."""
    found: Record = {}
    notes = []
    weights = output / "drafter" / "model.safetensors"
    for name in ("report", "grid"):
        path = output / f"{name}.json"
        if not path.is_file():
            continue
        if weights.is_file() and path.stat().st_mtime < weights.stat().st_mtime:
            notes.append(f"{path.name} is older than the drafter and is left out; measure again")
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        part: Record = {"environment": {key: content["environment"].get(key) for key in MACHINE}}
        if name == "report":
            part["lossless"] = {
                key: content["lossless"].get(key)
                for key in ("verdict", "greedy_prompts", "greedy_mismatches", "sampling_p_value")
            }
            part["cells"] = [{key: cell.get(key) for key in CELL} for cell in content["cells"]]
        else:
            part["cells"] = [
                {key: cell.get(key) for key in ("domain", "temperature", "concurrency", "context")}
                | {"sides": {side: {key: value.get(key) for key in SIDE} for side, value in cell["sides"].items()}}
                for cell in content["cells"]
            ]
        found[name] = part
    return found, notes


def model_card(config: Record, made: Record, *, title: str, target: str) -> str:
    """README.md: front matter of the Hub, then tables. config: native; made: the content of draftsmith.json."""
    export = made.get("export", {})
    parts = [
        _front_matter(made, title=title, target=target),
        f"# {title}\n\nA draft model for speculative decoding of `{target}`: a DSpark block drafter "
        f"{'written' if 'imported' in made else 'trained'} with draftsmith. "
        "It changes the speed of the target, never its output law.",
        "## Drafter\n\n" + _table(["", ""], _facts(config, made)),
    ]
    report = made.get("measured", {}).get("report")
    if report:
        parts.append(_acceptance(report))
    if grid := made.get("measured", {}).get("grid"):
        parts.append(_operating_points(grid))
    parts.append(_parity(made))
    commands = [f"{ENGINES[name].title}:\n\n```\n{command}\n```" for name, command in (export.get("commands") or {}).items()]
    if commands:
        parts.append("## Serving\n\n" + "\n\n".join(commands))
    return "\n\n".join(parts) + "\n"


def _front_matter(made: Record, *, title: str, target: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    cells = made.get("measured", {}).get("report", {}).get("cells", [])
    results = [
        EvalResult(
            task_type="text-generation", dataset_type="held-out-prompts",
            dataset_name=f"held-out {cell['domain']} prompts",
            dataset_config=f"temperature {cell['temperature']:g}, concurrency {cell['concurrency']}, context {cell['context']}",
            metric_type="tokens-per-verification", metric_name="tau", metric_value=round(cell["tau"], 4),
        )
        for cell in cells
    ]  # fmt: skip
    data = ModelCardData(
        base_model=target if is_hub_id(target) else None, library_name="draftsmith", pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "dspark"], model_name=title, eval_results=results or None,
    )  # fmt: skip
    return f"---\n{data.to_yaml().strip()}\n---"


def _facts(config: Record, made: Record) -> list[list[str]]:
    export = made.get("export", {})
    frame = "anchor-first (slot k predicts the k-th token behind the anchor)"
    if not config["sample_from_anchor"]:
        frame = "fill-in (slot j predicts its own position)"
    reduced = config.get("draft_vocab_size") not in (None, config["vocab_size"])
    rows = [
        ["block size", f"{config['block_size']}"],
        ["block layout", frame],
        ["layers", f"{config['num_hidden_layers']} of width {config['hidden_size']}"],
        ["tapped target layers", ", ".join(map(str, config["target_layer_ids"])) + f" of {config['num_target_layers']}"],
        ["mask token", f"{config['mask_token_id']}"],
        ["correction head", f"{config['markov_head_type']}, rank {config['markov_rank']}" if config["markov_rank"] else "none"],
        ["survival head", "yes" if config["enable_confidence_head"] else "no"],
        ["draft vocabulary", f"{config['draft_vocab_size']} of {config['vocab_size']}" if reduced else "the target's"],
        ["format", f"{export.get('format', 'native')}, {export.get('dtype', config.get('dtype'))}"],
    ]
    trained = made.get("recipe", {})
    if trained:
        rows.append(["training", f"{made.get('steps')} steps, prompts {trained.get('data', {}).get('prompts')!r}"])
    chat = made.get("chat") or {}
    arguments = chat.get("template_args", trained.get("data", {}).get("template_args"))
    unknown = "imported" in made and arguments is None
    rows.append(["chat template arguments", "not known" if unknown else f"`{json.dumps(arguments or {})}`"])
    if chat.get("tokenizer"):
        rows.append(["tokeniser", f"the target's, sha256 {chat['tokenizer'][:16]}"])
    if made.get("imported"):
        rows.append(["imported from", made["imported"]["producer"]])
    if made.get("calibration"):
        rows.append(["survival calibrated for", "; ".join(made["calibration"]["fitted_for"])])
    if made.get("costs"):
        rows.append(["cost table", f"of {made['costs'].get('hardware')}, {made['costs'].get('threads')} threads"])
    return rows


def _acceptance(report: Record) -> str:
    machine = report["environment"]
    slots = max(len(cell["acceptance_per_slot"]) for cell in report["cells"])
    head = ["domain", "T", "concurrency", "tau", "speed-up", *(f"slot {k + 1}" for k in range(slots))]
    rows = []
    for cell in report["cells"]:
        low, high = cell["speedup_interval"]
        accepted = ["-" if value is None else f"{value:.2f}" for value in cell["acceptance_per_slot"]]  # never reached
        rows.append([
            cell["domain"], f"{cell['temperature']:g}", str(cell["concurrency"]), f"{cell['tau']:.2f}",
            f"{cell['speedup']:.2f} ({low:.2f} to {high:.2f})", *accepted, *[""] * (slots - len(accepted)),
        ])  # fmt: skip
    verdict = {True: "no difference found", False: "DIFFERENCES FOUND", None: "not tested"}[report["lossless"]["verdict"]]
    return (
        "## Measured\n\n"
        f"In draftsmith's runtime on {machine['hardware']}, {machine['dtype']}, {machine['threads']} threads; acceptance of "
        f"slot k is given that slots 1..k-1 were accepted. Output against plain decoding: {verdict}.\n\n" + _table(head, rows)
    )


def _operating_points(grid: Record) -> str:
    head = ["domain", "T", "concurrency", "context", "side", "tokens/s", "speed-up", "tau", "draft length"]
    rows = []
    for cell in grid["cells"]:
        best = max(cell["sides"], key=lambda side: cell["sides"][side]["tokens_per_second"])
        for side in dict.fromkeys([best, *cell["sides"]]):
            value = cell["sides"][side]
            rows.append([
                cell["domain"], f"{cell['temperature']:g}", str(cell["concurrency"]), str(cell["context"]),
                f"**{side}**" if side == best else side, f"{value['tokens_per_second']:.1f}", f"{value['speedup']:.2f}",
                f"{value['tau']:.2f}", f"{value['length_mean']:.1f}",
            ])  # fmt: skip
    return f"## Operating points\n\nOn {grid['environment']['hardware']}, the best side first.\n\n" + _table(head, rows)


def _parity(made: Record) -> str:
    parity = made.get("parity") or {}
    if made.get("gate") != "passed":
        return "## Parity\n\nThe parity gate was **skipped**: nothing shows that this file drafts what was trained."
    rows = [[check["name"], _value(check["value"]), _value(check["limit"])] for check in parity["checks"]]
    return (
        "## Parity\n\nRead back in a fresh process by an independent reader and by the runtime, on "
        f"{parity['blocks']} blocks of the target's own text.\n\n" + _table(["check", "value", "limit"], rows)
    )


def _value(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
