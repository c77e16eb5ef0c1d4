"""Start a drafter from its target: last layers, norms, and the embedding's own geometry for the correction head.

Which start is better is measured, not assumed: see docs/decisions.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import DSparkConfig
from .dspark import DSpark
from .export import importers, native

COPIED = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@torch.no_grad()
def init_from_target(drafter: DSpark, layers: nn.ModuleList, final_norm: nn.Module, embedding: torch.Tensor) -> None:
    """Copy what has the same shape from the target's last layers; layers/final_norm are the target's modules.

    fc passes the deepest tap through, so that H_ctx starts as the (normed) state the copied layers were trained on. W1 starts
    as a fixed random projection of the target's embedding (unit RMS): tokens with similar embeddings start with similar
    biases, which matters for the many tokens a short run never sees as a predecessor.
    """
    first = len(layers) - len(drafter.layers)
    for i, layer in enumerate(drafter.layers):
        for name in COPIED:
            _copy(layer.get_submodule(name), layers[max(first + i, 0)], name)
    _copy(drafter.norm, final_norm, "")
    hidden = drafter.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden, dtype=drafter.fc.weight.dtype)
    if drafter.markov_head is not None:
        w1 = drafter.markov_head.markov_w1.weight
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(hidden, w1.shape[1], generator=generator).to(w1)
        table = embedding.to(w1) @ projection
        w1.copy_(table / table.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6))


def _copy(ours: nn.Module, theirs: nn.Module, name: str) -> None:
    """Copy one weight where the target has a module of that name and shape; other families keep the random start."""
    try:
        source: Any = theirs.get_submodule(name) if name else theirs
    except AttributeError:
        return
    weight = getattr(source, "weight", None)
    if weight is not None and weight.shape == ours.weight.shape:
        ours.weight.copy_(weight)


# What the weights of a drafter mean: another value makes them weights of something else.
SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "target_layer_ids", "mask_token_id", "rope_parameters", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size", "sample_from_anchor",
)  # fmt: skip
# Of these the recipe has no say: a checkpoint brings them.
BROUGHT = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
HEADS = ("markov_head.", "confidence_head.")


def read_start(folder: str, num_target_layers: int, layout: str | None = None) -> importers.Imported:
    """The drafter that training starts from, in any layout that says its frame, or whose frame is told by `layout`.

    A fill-in drafter is a start only where `layout` says so: training is anchor-first, and each slot learns another position.
    Raises ValueError as importers.read, for a fill-in drafter that the recipe does not name as one, and for one of a target
    with another number of layers.
    """
    try:
        found = importers.read(Path(folder), layout=layout, num_target_layers=num_target_layers)
    except ValueError as error:  # a recipe has a key where the command line has an option
        text = str(error).replace(
            "name it with --layout anchor-first or --layout fill-in", "name it as checkpoint_layout anchor-first or fill-in"
        )
        raise ValueError(f"drafter.checkpoint: {text}") from None
    if layout is None and not found.config["sample_from_anchor"]:
        raise ValueError(
            f"drafter.checkpoint: {folder} is a fill-in drafter and training is anchor-first: every slot would learn the "
            "position behind its own; name drafter.checkpoint_layout fill-in to start from its weights all the same"
        )
    if not found.config["sample_from_anchor"]:
        note = "its blocks are fill-in and training is anchor-first: every slot learns the position behind its own"
        found = dataclasses.replace(found, notes=(*found.notes, note))
    if found.config["num_target_layers"] != num_target_layers:
        raise ValueError(
            f"drafter.checkpoint: {folder} taps a target of {found.config['num_target_layers']} layers, "
            f"this one has {num_target_layers}"
        )
    return found


def adopt(cfg: DSparkConfig, found: importers.Imported) -> DSparkConfig:
    """The recipe's drafter with what it leaves open (taps, mask, draft vocabulary) as the checkpoint has it."""
    theirs = found.config
    taps, mask, size = cfg.tap_layers, cfg.mask_token_id, cfg.draft_vocab_size
    return dataclasses.replace(
        cfg,
        tap_layers=tuple(theirs["target_layer_ids"]) if taps is None else taps,
        mask_token_id=theirs["mask_token_id"] if mask is None else mask,
        draft_vocab_size=theirs.get("draft_vocab_size") if size is None and "d2t" in found.tensors else size,
    )


def start_config(config: dict[str, Any], found: importers.Imported) -> dict[str, Any]:
    """The config to build: the recipe's, with the sizes of the layers that only the checkpoint knows."""
    brought = {key: found.config[key] for key in BROUGHT}
    if found.config["enable_confidence_head"] and not found.config["markov_rank"]:
        brought["confidence_head_with_markov"] = False  # its survival head has no input for a correction head that is added
    return {**config, **brought}


def start_ids(found: importers.Imported) -> Tensor | None:
    """The draft vocabulary of a checkpoint, int64 [Vd]; None for the full one."""
    d2t = found.tensors.get("d2t")
    return None if d2t is None else d2t + torch.arange(len(d2t))


def init_from_checkpoint(drafter: DSpark, found: importers.Imported, folder: str) -> None:
    """Load the checkpoint's weights. ValueError naming the first key in which it differs from the recipe's drafter.

    A correction or survival head that the checkpoint lacks keeps its fresh start, which changes no logit.
    """
    added = {
        prefix
        for prefix, absent in zip(
            HEADS, (not found.config["markov_rank"], not found.config["enable_confidence_head"]), strict=True
        )
        if absent
    }
    free = {"markov_rank", "markov_head_type"} if HEADS[0] in added else set()
    free |= set() if found.config["sample_from_anchor"] else {"sample_from_anchor"}  # read_start has said so
    free |= {"enable_confidence_head", "confidence_head_with_markov"} if HEADS[1] in added else set()
    for key in SAME:
        ours, theirs = drafter.config.get(key), found.config.get(key)
        if key == "draft_vocab_size":
            ours, theirs = ours or drafter.config["vocab_size"], theirs or found.config["vocab_size"]
        if ours != theirs and key not in free:
            raise ValueError(f"drafter.checkpoint: {folder} has {key} {theirs!r}, the recipe's drafter {ours!r}")
    left_out = {*native.FROZEN, "d2t", "t2d"}
    tensors = {name: value for name, value in found.tensors.items() if name not in left_out}
    fresh = {name: value for name, value in drafter.state_dict().items() if name.startswith(tuple(added))} if added else {}
    native.fill(drafter, {**fresh, **tensors}, folder)
