"""Other producers' checkpoints as ours: DeepSpec, speculators, z-lab DFlash, SpecForge.

Everything becomes a native config and the file's own tensors; the same bytes go out again on export. Two block layouts share
names and shapes (anchor-first: slot k predicts anchor+k+1; fill-in: slot j predicts anchor+j), so a checkpoint that does not
state its layout is refused until the caller names it. EAGLE-3 drafters are read by eagle3.py, for serving only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..draft import FrozenHeads
from ..dspark import DSpark
from . import native, speculators

LAYOUTS = ("anchor-first", "fill-in")
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
NESTED = ("block_size", "target_layer_ids", "mask_token_id", "sample_from_anchor", *HEAD_KEYS)
# Names that producers put before every tensor (compiled or wrapped modules), and SpecForge's old name of its heads.
PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.", "logit_head.")
PRODUCERS = {
    "native": "the native layout",
    "deepspec": "DeepSpec (its files never say; they are anchor-first)",
    "speculators": "speculators",
    "dflash": "z-lab DFlash (its files never say; they are fill-in)",
    "specforge": "SpecForge (its DSpark is anchor-first, its DFlash fill-in)",
}


@dataclass(frozen=True)
class Imported:
    """A checkpoint in our terms. config: native, complete; tensors: the file's, under our names; kind: see PRODUCERS."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    kind: str
    notes: tuple[str, ...] = ()


def kind_of(found: dict[str, Any]) -> str:
    """Which producer's config.json this is. Raises ValueError for one that is not read here."""
    names = " ".join(found.get("architectures") or [])
    if "eagle" in (names + str(found.get("speculators_model_type"))).lower():
        raise ValueError(
            f"architectures: {names or found['speculators_model_type']}: is an EAGLE-3 drafter, which is served as it is "
            "(--proposer eagle3:model=FOLDER) and neither imported nor trained"
        )
    if "speculators_model_type" in found:
        return "speculators"
    nested = found.get("dflash_config") or found.get("dspark_config")
    if nested is not None:
        kind = nested.get("projector_type") or ("dspark" if "DSpark" in names else None)
        if kind is None and set(nested) <= {"target_layer_ids", "mask_token_id"}:
            return "dflash"
        if kind in (None, "dflash", "dspark"):
            return "specforge"
        raise ValueError(f"dflash_config.projector_type: {kind!r} is not supported; allowed: dflash, dspark")
    if "target_layer_ids" in found:
        return "native" if "sample_from_anchor" in found else "deepspec"
    raise ValueError("config.json names no target_layer_ids, dflash_config or speculators_model_type; not a known drafter")


def _config(
    folder: Path, *, layout: str | None = None, num_target_layers: int | None = None
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """(native config, kind, notes) of an exported drafter of any known layout; no weight is read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; not an exported drafter")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON ({error})") from None
    try:
        kind = kind_of(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    notes: list[str] = []
    if kind == "speculators":
        config = speculators.from_config(found, str(path), num_target_layers=num_target_layers)
    else:
        config = _flat(found, str(path), kind, num_target_layers)
    config["sample_from_anchor"] = _layout(config, kind, layout, str(path), notes)
    _backbone(config, str(path))
    return config, kind, tuple(notes)


def read(folder: Path, *, layout: str | None = None, num_target_layers: int | None = None) -> Imported:
    """Config and tensors of a drafter of any known layout, checked as far as it can be without its target.

    layout: what the file does not say ("anchor-first", "fill-in"); a note is made where it contradicts the file.
    num_target_layers: L of the target, for files that do not state it.
    Raises ValueError naming the key for everything unknown, missing or unsupported.
    """
    config, kind, notes = _config(folder, layout=layout, num_target_layers=num_target_layers)
    tensors = {_own_name(name): value for name, value in read_tensors(folder).items()}
    weight = tensors.get("confidence_head.proj.weight")
    config = _heads_by_shape(config, weight)
    config["draft_vocab_size"] = config.get("draft_vocab_size") or len(tensors.get("d2t", ())) or config["vocab_size"]
    native.check_config(config, str(folder / "config.json"))
    return Imported(config, tensors, kind, notes)


def load_any(
    folder: Path,
    *,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype = torch.float32,
    layout: str | None = None,
    num_target_layers: int | None = None,
) -> tuple[DSpark, FrozenHeads]:
    """Strict load of a drafter of any known layout beside its target's embedding [V,H] and LM head [V,H]; see `native.load`."""
    found = read(folder, layout=layout, num_target_layers=num_target_layers)
    return native.assemble(found.config, found.tensors, str(folder), embedding=embedding, lm_head=lm_head, dtype=dtype)


def _flat(found: dict[str, Any], where: str, kind: str, num_target_layers: int | None) -> dict[str, Any]:
    """A native config out of a flat one whose drafter keys may stand in a nested dictionary."""
    nested = {**(found.get("dflash_config") or {}), **(found.get("dspark_config") or {})}
    for theirs, ours in (("shift_label", "sample_from_anchor"), ("use_confidence_head", "enable_confidence_head")):
        if theirs in nested:
            nested.setdefault(ours, nested[theirs])
    config = {key: value for key, value in found.items() if key not in ("dflash_config", "dspark_config", "auto_map")}
    for key in NESTED:
        if key not in nested:
            continue
        if config.get(key) not in (None, nested[key]):
            raise ValueError(f"{where}: {key}: {config[key]!r} at the top contradicts {nested[key]!r} in dflash_config")
        config[key] = nested[key]
    missing = [key for key in ("block_size", "target_layer_ids", "mask_token_id") if config.get(key) is None]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; without them a drafter is silently slow")
    if kind != "native":
        plain = kind == "dflash" or nested.get("projector_type") == "dflash"
        if "markov_rank" not in config and not plain:
            raise ValueError(f"{where}: missing markov_rank; 0 would mean no correction head")
        config["architectures"] = ["Qwen3DSparkModel"]
        config.setdefault("markov_rank", 0)
        config.setdefault("num_anchors", 512)
        config["tie_word_embeddings"] = False
        config.setdefault("dtype", config.pop("torch_dtype", None) or "bfloat16")
    config.setdefault("num_target_layers", num_target_layers or max(config["target_layer_ids"]) + 2)
    return config


def _layout(config: dict[str, Any], kind: str, asked: str | None, where: str, notes: list[str]) -> bool:
    """Whether the checkpoint is anchor-first: what it says, or what the caller says aloud."""
    if asked is not None and asked not in LAYOUTS:
        raise ValueError(f"--layout: {asked!r} is not allowed; it must be anchor-first or fill-in")
    said = config.get("sample_from_anchor")
    if asked is None:
        if said is None:
            raise ValueError(
                f"{where}: sample_from_anchor is missing, so the block layout is unknown: {PRODUCERS[kind]}; "
                "name it with --layout anchor-first or --layout fill-in"
            )
        return said  # native.check_config refuses what is no bool
    chosen = asked == "anchor-first"
    if said is None:
        notes.append(f"block layout {asked} as told by --layout (the file does not say)")
    elif said is not chosen:
        notes.append(f"block layout {asked} as told by --layout AGAINST the file's sample_from_anchor: {json.dumps(said)}")
    return chosen


def _backbone(config: dict[str, Any], where: str) -> None:
    """Fills in what transformers' Qwen3 config would; native.check_config refuses layers that ours cannot compute."""
    if config.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"{where}: model_type: {config['model_type']!r} is not supported; only qwen3 draft layers are")
    config["model_type"] = "qwen3"
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    config["layer_types"] = list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    config.setdefault("use_sliding_window", False)
    heads = config["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "target_model_name_or_path": None,
    }  # fmt: skip
    for key, value in defaults.items():
        if config.get(key) is None:
            config[key] = value
    rope = dict(config.pop("rope_scaling", None) or {}) | dict(config.get("rope_parameters") or {})
    theta = rope.get("rope_theta", config.pop("rope_theta", None))
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    config["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": theta}


def _heads_by_shape(config: dict[str, Any], weight: Tensor | None) -> dict[str, Any]:
    """Keys of the survival head that the file leaves out, and readers default differently: its tensor tells."""
    rank = config["markov_rank"]
    config = {"enable_confidence_head": weight is not None, **config}
    if not config["enable_confidence_head"]:
        return {**config, "confidence_head_with_markov": False}
    if "confidence_head_with_markov" in config or weight is None:
        return {"confidence_head_with_markov": False, **config}
    return {**config, "confidence_head_with_markov": rank > 0 and weight.shape[-1] == config["hidden_size"] + rank}


def _own_name(name: str) -> str:
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return name


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict(load_file(single))
    if not index.is_file():
        raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
        with safe_open(folder / name, framework="pt") as shard:
            tensors |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 (not a dict)
    return tensors
