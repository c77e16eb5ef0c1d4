"""Tiny EAGLE-3 checkpoints in every layout that is read, with no weight at a neutral value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from draftsmith.models.blocks import BlockShape, Rope
from draftsmith.models.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.export.eagle3 import load_eagle3
from tiny import tiny_model

TAPS = (0, 1, 2)
IDS = torch.tensor(sorted({1, 2, *range(3, 97, 2)}))  # of the reduced vocabulary
SHAPE = BlockShape(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=80, rms_norm_eps=1e-5)
LAYER = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=80, rms_norm_eps=1e-5,
    vocab_size=97, max_position_embeddings=512, rope_theta=10000.0, num_hidden_layers=1,
)  # fmt: skip


def tensors(*, reduced: bool = True, seed: int = 0, **flags: Any) -> dict[str, torch.Tensor]:
    """The drafter's own tensors under speculators' names, without an embedding."""
    size = len(IDS) if reduced else 97
    cfg = Eagle3Config(
        shape=SHAPE, num_layers=flags.pop("num_layers", 1), vocab_size=97, draft_vocab_size=size, target_hidden_size=64,
        tap_layers=TAPS, **flags,
    )  # fmt: skip
    torch.manual_seed(seed)
    drafter = Eagle3(cfg)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) if parameter.dim() > 1 else 1 + 0.2 * torch.randn_like(parameter))
    found = {name: value.clone() for name, value in drafter.state_dict().items() if not name.startswith("embed")}
    if reduced:
        found["d2t"] = IDS - torch.arange(len(IDS))
        found["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill_(0, IDS, True)
    return found


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def speculators_config(*, kind: str = "llama", reduced: bool = True, **changes: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(IDS) if reduced else 97,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS], "norm_before_residual": False,
        "transformer_layer_config": {"model_type": kind, **LAYER}, **changes,
    }  # fmt: skip


def flat_config(*, reduced: bool = True, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **LAYER,
        "draft_vocab_size": len(IDS) if reduced else 97,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)}, **changes,
    }  # fmt: skip


def heads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {"embedding": model.get_input_embeddings().weight, "lm_head": model.get_output_embeddings().weight}


def tiny_eagle3(model: nn.Module | None = None, folder: Path | None = None) -> tuple[Eagle3, Rope]:
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        place = write(folder or Path(made), speculators_config(), tensors())
        return load_eagle3(place, **heads(model or tiny_model()))
