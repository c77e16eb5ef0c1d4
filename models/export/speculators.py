"""The speculators layout (speculators, vLLM, TensorRT-LLM): the same tensors as the native one under a nested config.

Differences that matter: aux_hidden_state_layer_ids = target_layer_ids + 1 (0 is the embedding), no top-level model_type (its
absence is how vLLM knows the layout), and defaults that differ between readers, so every key is written. Keys read from
speculators 0.9.0 (models/dspark/config.py, models/dflash/config.py, config.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..draft import FrozenHeads
from ..dspark import DSpark
from . import native

VERSION = "0.9.0"  # of the layout that is written, not of an installed package
# Native keys that describe the draft layers: the nested Qwen3 config.
LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "initializer_range", "attention_bias", "attention_dropout",
    "max_position_embeddings", "rope_parameters", "vocab_size", "layer_types", "use_sliding_window", "tie_word_embeddings",
)  # fmt: skip
OWN = (
    "sample_from_anchor", "mask_token_id", "block_size", "aux_hidden_state_layer_ids", "transformer_layer_config",
)  # fmt: skip


def to_config(
    config: dict[str, Any], *, verifier: str, verifier_architectures: list[str], num_speculative_tokens: int | None = None
) -> dict[str, Any]:
    """The config.json of this layout out of a native one. verifier: Hub id or folder where readers find the target."""
    anchor_first = config["sample_from_anchor"]
    predictions = config["block_size"] if anchor_first else config["block_size"] - 1
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": VERSION,
        "transformer_layer_config": {key: config[key] for key in LAYER_KEYS},
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "block_size": config["block_size"],
        "target_hidden_size": config["hidden_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "mask_token_id": config["mask_token_id"],
        "markov_rank": config["markov_rank"],
        "markov_head_type": config.get("markov_head_type", "vanilla"),
        "enable_confidence_head": config["enable_confidence_head"],
        "confidence_head_with_markov": config["confidence_head_with_markov"],
        "sample_from_anchor": anchor_first,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens or predictions,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }


def from_config(found: dict[str, Any], where: str, *, num_target_layers: int | None = None) -> dict[str, Any]:
    """A native config out of one of this layout ("dspark" or "dflash"), without sample_from_anchor where it says none.

    num_target_layers: L of the target, which this layout does not state. Raises ValueError for a missing key.
    """
    missing = [key for key in OWN if key not in found and key != "sample_from_anchor"]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    kind = found["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        raise ValueError(f"{where}: speculators_model_type: {kind!r} is not supported; allowed: dspark, dflash")
    aux = found["aux_hidden_state_layer_ids"]
    if min(aux) < 1:
        raise ValueError(f"{where}: aux_hidden_state_layer_ids: {aux} taps the embedding (0), which is not supported")
    if found.get("sliding_window_non_causal"):
        raise ValueError(f"{where}: sliding_window_non_causal: true is not supported; only full attention inside the block")
    layers = dict(found["transformer_layer_config"])
    width = found.get("target_hidden_size")
    if width not in (None, layers.get("hidden_size")):
        raise ValueError(
            f"{where}: target_hidden_size: {width} is not supported; the drafter's own width is {layers.get('hidden_size')}"
        )
    verifier = (found.get("speculators_config") or {}).get("verifier") or {}
    dspark = kind == "dspark"
    rank = found.get("markov_rank", 256) if dspark else 0
    config = {
        **layers,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": layers.get("model_type", "qwen3"),
        "num_target_layers": num_target_layers or max(aux) + 1,
        "block_size": found["block_size"],
        "target_layer_ids": [layer - 1 for layer in aux],
        "mask_token_id": found["mask_token_id"],
        "num_anchors": 512,
        "markov_rank": rank,
        "enable_confidence_head": bool(dspark and found.get("enable_confidence_head", True)),
        "confidence_head_with_markov": bool(dspark and rank and found.get("confidence_head_with_markov", True)),
        "tie_word_embeddings": False,
        "target_model_name_or_path": verifier.get("name_or_path"),
        "dtype": found.get("dtype", "bfloat16"),
    }
    config["confidence_head_with_markov"] &= config["enable_confidence_head"]
    if rank:
        config["markov_head_type"] = found.get("markov_head_type", "vanilla")
    if "sample_from_anchor" in found:
        config["sample_from_anchor"] = found["sample_from_anchor"]
    draft_vocab = found.get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != layers.get("vocab_size"):
        config["draft_vocab_size"] = draft_vocab
    return config


def write(
    folder: Path,
    drafter: DSpark,
    heads: FrozenHeads,
    *,
    verifier: str,
    verifier_architectures: list[str],
    dtype: torch.dtype = torch.bfloat16,
    with_heads: bool = False,
    num_speculative_tokens: int | None = None,
) -> None:
    """Write config.json and model.safetensors into an existing folder.

    with_heads: the target's embedding and LM head go along; readers take the target's without. A reduced vocabulary always
    brings its rows of the head.
    """
    config = to_config(
        native.file_config(drafter, dtype), verifier=verifier, verifier_architectures=verifier_architectures,
        num_speculative_tokens=num_speculative_tokens,
    )  # fmt: skip
    tensors = native.file_tensors(drafter, heads, dtype, embedding=with_heads, head=with_heads or heads.draft_ids is not None)
    native.save_tensors(tensors, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
