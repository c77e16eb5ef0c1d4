"""Faults of exported drafters, made on purpose: the parity gate's self-test. Each is silent in a serving engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def _taps(config: Config, tensors: Tensors) -> bool:
    key = "aux_hidden_state_layer_ids" if "aux_hidden_state_layer_ids" in config else "target_layer_ids"
    config[key] = [layer + 1 for layer in config[key]]
    return True


def _no_fc(config: Config, tensors: Tensors) -> bool:
    del tensors["fc.weight"]
    return True


def _swapped(config: Config, tensors: Tensors) -> bool:
    one, two = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    if one not in tensors:
        return False
    tensors[one], tensors[two] = tensors[two], tensors[one]
    return True


def _mask(config: Config, tensors: Tensors) -> bool:
    vocab = config.get("transformer_layer_config", config)["vocab_size"]
    config["mask_token_id"] = (config["mask_token_id"] + 1) % vocab
    return config["block_size"] > 1  # a block of one slot has no mask


def _layout(config: Config, tensors: Tensors) -> bool:
    config["sample_from_anchor"] = not config["sample_from_anchor"]
    return config["block_size"] > 1  # a fill-in block of one slot predicts nothing


# name -> (what is broken, False where the drafter has no such part; what the named cause must contain)
FAULTS: dict[str, tuple[Callable[[Config, Tensors], bool], str]] = {
    "tap ids + 1": (_taps, "target_layer_ids"),
    "missing fc": (_no_fc, "fc.weight is missing"),
    "swapped W1/W2": (_swapped, "markov_head.markov_w1.weight"),
    "wrong mask id": (_mask, "mask_token_id"),
    "flipped layout flag": (_layout, "sample_from_anchor"),
}


def perturb(folder: Path, broken: Path, fault: str) -> bool:
    """Write a copy of the exported `folder` with one fault to `broken`; False, and no copy, where it does not apply."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    if not FAULTS[fault][0](config, tensors):
        return False
    shutil.rmtree(broken, ignore_errors=True)
    broken.mkdir(parents=True)
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: value.contiguous() for name, value in tensors.items()}, broken / "model.safetensors")
    return True
