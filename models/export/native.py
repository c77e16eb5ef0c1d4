"""Native flat checkpoint layout (DeepSpec, vLLM, SGLang): config.json + model.safetensors.

Every key a reader defaults differently is written explicitly. `load` refuses a folder that does not say its block layout,
its mask id or its taps: those faults are silent in every engine and only show as low acceptance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import DSparkConfig, default_tap_layers
from ..draft import FrozenHeads
from ..dspark import DSpark
from ..lora import merge_state
from .folder import staged

REQUIRED = (
    "sample_from_anchor", "mask_token_id", "target_layer_ids", "num_target_layers", "block_size", "markov_rank",
    "enable_confidence_head", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size",
)  # fmt: skip
FROZEN = ("embed_tokens.weight", "lm_head.weight")


def build_config(target_config: Any, cfg: DSparkConfig, *, mask_token_id: int, target_name: str) -> dict[str, Any]:
    """Resolve a recipe's drafter against a target's Hugging Face config into the exported config dict."""
    text = getattr(target_config, "get_text_config", lambda: target_config)()
    layers = text.num_hidden_layers
    taps = cfg.tap_layers if cfg.tap_layers is not None else default_tap_layers(layers, cfg.num_taps)
    check_taps(taps, layers)
    head = cfg.effective_head
    rank = 0 if head == "none" else cfg.rank
    heads = text.num_attention_heads
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_target_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "initializer_range": getattr(text, "initializer_range", 0.02),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": rope_parameters(text),
        "vocab_size": text.vocab_size,
        "layer_types": ["full_attention"] * cfg.num_layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "block_size": cfg.block_size,
        "sample_from_anchor": True,
        "target_layer_ids": list(taps),
        "mask_token_id": mask_token_id,
        "num_anchors": 512,
        "markov_rank": rank,
        "enable_confidence_head": cfg.survival_head,
        "confidence_head_with_markov": bool(cfg.survival_head and cfg.survival_with_head and rank > 0),
        "target_model_name_or_path": target_name,
    }
    if rank > 0:
        config["markov_head_type"] = head
    config["draft_vocab_size"] = text.vocab_size if cfg.draft_vocab_size is None else cfg.draft_vocab_size
    return config


def check_taps(taps: tuple[int, ...] | list[int], num_layers: int) -> None:
    """Taps must be ascending, unique and in [0, L-2]: readers disagree on whether the last layer's state is normed."""
    if not taps or any(not 0 <= t <= num_layers - 2 for t in taps) or list(taps) != sorted(set(taps)):
        raise ValueError(
            f"drafter.tap_layers: {list(taps)} must be strictly ascending layer ids in [0, {num_layers - 2}] "
            f"(the target has {num_layers} layers; its last layer cannot be tapped)"
        )


def rope_parameters(text: Any) -> dict[str, Any]:
    """The target's rotary parameters in the transformers-5 form, theta always explicit."""
    found = getattr(text, "rope_parameters", None) or {"rope_type": "default"}
    if "rope_theta" not in found:
        # Per-layer-type ropes (Gemma-3 style): the full-attention entry serves full-attention draft layers.
        found = found.get("full_attention", found)
    theta = found.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    return {"rope_type": "default", **found, "rope_theta": theta}


def save(
    folder: Path,
    drafter: DSpark,
    heads: FrozenHeads,
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
) -> Path:
    """Write the folder atomically (a half-written one never bears the final name). Returns the folder.

    `extra` is written as draftsmith.json. See `write` for the rest.
    """
    with staged(folder) as temporary:
        write(temporary, drafter, heads, dtype=dtype, state=state)
        if extra is not None:
            (temporary / "draftsmith.json").write_text(json.dumps(extra, indent=2) + "\n")
    return folder


def write(
    folder: Path,
    drafter: DSpark,
    heads: FrozenHeads,
    *,
    dtype: torch.dtype = torch.bfloat16,
    with_heads: bool = True,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors into an existing folder, which is not done atomically: see `staged`.

    with_heads: the target's embedding and LM head go along (DeepSpec needs them). A reduced vocabulary always brings its head.
    state: the drafter's whole state dict, where its own is sharded over processes.
    """
    config = file_config(drafter, dtype)
    head = with_heads or heads.draft_ids is not None
    tensors = file_tensors(drafter, heads, dtype, embedding=with_heads, head=head, state=state)
    save_tensors(tensors, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """model.safetensors, readable for everyone: the library leaves it to its owner alone, and an engine may run as another."""
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def file_config(drafter: DSpark, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a drafter in the native layout, every key explicit."""
    return {**drafter.config, "draft_vocab_size": drafter.draft_vocab_size, "dtype": str(dtype).removeprefix("torch.")}


def file_tensors(
    drafter: DSpark,
    heads: FrozenHeads,
    dtype: torch.dtype,
    *,
    embedding: bool = True,
    head: bool = True,
    state: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors of both layouts: the drafter's, the frozen ones asked for, and the vocabulary map.

    d2t int64 [Vd] holds offsets: target id = i + d2t[i]. t2d bool [V].
    """
    tensors = {
        name.replace("_orig_mod.", ""): value.detach().to("cpu", dtype).contiguous()
        for name, value in merge_state(drafter.state_dict() if state is None else state).items()
    }
    if embedding:
        tensors["embed_tokens.weight"] = heads.embedding.to("cpu", dtype).clone().contiguous()
    if head:
        tensors["lm_head.weight"] = heads.draft_head.to("cpu", dtype).clone().contiguous()
    if heads.draft_ids is not None:
        ids = heads.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(drafter.config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported drafter, refused with the missing key when it does not say its own frame."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; not an exported drafter")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON ({error})") from None
    if "speculators_model_type" in config or "dflash_config" in config:
        raise ValueError(f"{path}: not the native layout; bring it there with `draftsmith import {folder} --to FOLDER`")
    check_config(config, str(path))
    return config


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuses a native config that does not say its own frame, or contradicts itself; `where` begins the message."""
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise ValueError(
            f"{where}: missing {', '.join(missing)}; a drafter that does not state them is silently slow, export it again"
        )
    if not isinstance(config["sample_from_anchor"], bool):
        raise ValueError(
            f"{where}: sample_from_anchor: {config['sample_from_anchor']!r} is not allowed; it must be true (anchor-first: "
            "slot k predicts the token after it) or false (fill-in: slot k predicts its own position)"
        )
    if not config["sample_from_anchor"] and (config["block_size"] < 2 or config.get("markov_head_type") == "rnn"):
        raise ValueError(
            f"{where}: sample_from_anchor: false needs block_size 2 or more and no rnn head (whose state would start "
            "at the anchor's own slot)"
        )
    check_taps(config["target_layer_ids"], config["num_target_layers"])
    _check_layers(config, where)
    if not 0 <= config["mask_token_id"] < config["vocab_size"]:
        raise ValueError(f"{where}: mask_token_id: {config['mask_token_id']} outside [0, {config['vocab_size'] - 1}]")
    if config["markov_rank"] > 0 and config.get("markov_head_type") not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"{where}: markov_head_type: {config.get('markov_head_type')!r} must be vanilla, gated or rnn")
    if config["enable_confidence_head"] and not isinstance(config.get("confidence_head_with_markov"), bool):
        raise ValueError(
            f"{where}: confidence_head_with_markov: {config.get('confidence_head_with_markov')!r} must be true or false; "
            "readers default it differently"
        )


def _check_layers(config: dict[str, Any], where: str) -> None:
    """Refuses layers that ours would compute otherwise than the file means, without a word from any tensor's shape."""
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise ValueError(f"{where}: missing rope_parameters.rope_theta; readers default it differently")
    kinds = config.get("layer_types") or ["full_attention"]
    if set(kinds) != {"full_attention"} or config.get("use_sliding_window"):
        raise ValueError(f"{where}: layer_types: {sorted(set(kinds))} are not supported; only full_attention is")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act: {config['hidden_act']!r} is not supported; only silu is")
    if config.get("attention_bias"):
        raise ValueError(f"{where}: attention_bias: true is not supported")


def load(folder: Path, *, embedding: Tensor, lm_head: Tensor, dtype: torch.dtype = torch.float32) -> tuple[DSpark, FrozenHeads]:
    """Strict load of an exported drafter beside its target's embedding [V,H] and LM head [V,H].

    Raises ValueError when a tensor is missing or unknown, or when the file's embedding or head differs from the target's
    (a random embedding after a non-strict load is a known silent fault).
    """
    config = read_config(folder)
    tensors = load_file(folder / "model.safetensors")
    return assemble(config, tensors, str(folder), embedding=embedding, lm_head=lm_head, dtype=dtype)


def assemble(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    where: str,
    *,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[DSpark, FrozenHeads]:
    """Drafter and heads out of a checked native config and a file's tensors; see `load`. `where` begins every message."""
    tensors = dict(tensors)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_ids = None if d2t is None else d2t + torch.arange(len(d2t))
    if draft_ids is None and config.get("draft_vocab_size") not in (None, config["vocab_size"]):
        raise ValueError(f"{where}: draft_vocab_size: {config['draft_vocab_size']} without a d2t tensor")
    if draft_ids is not None and not 0 <= int(draft_ids.min()) <= int(draft_ids.max()) < config["vocab_size"]:
        raise ValueError(f"{where}: d2t leads to ids outside [0, {config['vocab_size'] - 1}]; it must hold offsets: id - row")
    if draft_ids is not None and not _one_to_one(draft_ids, t2d):
        raise ValueError(
            f"{where}: d2t leads to the same id twice, or to others than t2d marks; it must hold offsets: id - row"
        )
    frozen = {name: tensors.pop(name, None) for name in FROZEN}
    drafter = DSpark(config)
    fill(drafter, tensors, where)
    heads = FrozenHeads.build(embedding, lm_head, draft_ids)
    for name, ours in zip(FROZEN, (heads.embedding, heads.draft_head), strict=True):
        theirs = frozen[name]
        if theirs is None:
            continue
        if theirs.shape != ours.shape or not torch.allclose(
            theirs.float(), ours.to("cpu", theirs.dtype).float(), rtol=2**-7, atol=1e-5
        ):
            raise ValueError(
                f"{where}: {name} is not this target's; the drafter belongs to {config.get('target_model_name_or_path')!r}"
            )
    drafter = drafter.to(device=embedding.device, dtype=dtype).eval()
    return drafter, heads


def _one_to_one(draft_ids: Tensor, t2d: Tensor | None) -> bool:
    """Whether the ids [Vd] are distinct, and those that t2d bool [V] marks where the file brings it."""
    ids = draft_ids.sort().values
    return bool((ids[1:] > ids[:-1]).all()) and (t2d is None or torch.equal(t2d.nonzero().flatten(), ids))


def fill(drafter: DSpark, tensors: dict[str, Tensor], where: str) -> None:
    """Strict load of the drafter's own tensors. Raises ValueError naming what is missing, unknown or of another shape."""
    for name, parameter in drafter.state_dict().items():
        if name in tensors and tensors[name].shape != parameter.shape:
            found, wanted = tuple(tensors[name].shape), tuple(parameter.shape)
            raise ValueError(f"{where}/model.safetensors: {name} has shape {found}, config.json asks for {wanted}")
    result = drafter.load_state_dict(tensors, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(f"{where}/model.safetensors: missing {result.missing_keys}, unknown {result.unexpected_keys}")


def add_zero_head(drafter: DSpark, rank: int = 8) -> DSpark:
    """The same drafter with a correction head that adds 0 to every logit, for engines that load none without one."""
    assert drafter.markov_head is None
    made = DSpark({**drafter.config, "markov_rank": rank, "markov_head_type": "vanilla"})
    made.load_state_dict(drafter.state_dict(), strict=False)
    assert made.markov_head is not None
    torch.nn.init.zeros_(made.markov_head.markov_w1.weight)
    torch.nn.init.zeros_(made.markov_head.markov_w2.weight)
    return made.to(drafter.fc.weight.device, drafter.fc.weight.dtype).eval()
