"""Reads EAGLE-3 checkpoints for the runtime: the speculators layout, and the flat one of SGLang and vLLM.

What a file must say and does not is refused: a wrong guess loads and is merely slow. Tap ids come in two conventions. Ours and
SGLang's `eagle_config` name the layer whose output is tapped; speculators and a top-level `eagle_aux_hidden_state_layer_ids` as
vLLM reads it count one more (0 is the embedding).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..blocks import BlockShape, Rope
from ..eagle3 import Eagle3, Eagle3Config
from .importers import read_tensors

_BACKBONES = {"llama": (LlamaConfig, LlamaRotaryEmbedding), "qwen3": (Qwen3Config, Qwen3RotaryEmbedding)}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Of speculators files: the target's head and norm, which only training uses; the ids are rebuilt from d2t.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t", "rotary_emb.inv_freq")


def is_eagle3(found: dict[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 drafter."""
    names = " ".join(found.get("architectures") or [])
    return "eagle3" in (names + str(found.get("speculators_model_type"))).lower()


def read_eagle3_config(folder: Path, *, num_target_layers: int | None = None) -> tuple[Eagle3Config, dict[str, Any]]:
    """(our config, the layer config as found) of an EAGLE-3 folder; no weight is read.

    num_target_layers: L of the target, for files that leave the taps to the default of vLLM and SGLang (2, L//2, L-3 counted
    from the embedding). Raises ValueError naming the key for what is missing or unsupported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; not an exported drafter")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON ({error})") from None
    if not is_eagle3(found):
        raise ValueError(f"{path}: architectures: {found.get('architectures')} is not an EAGLE-3 drafter")
    nested = "speculators_model_type" in found
    layer = found.get("transformer_layer_config") if nested else found
    if not isinstance(layer, dict):
        raise ValueError(f"{path}: transformer_layer_config is missing")
    kind = layer.get("model_type", "llama")
    if kind not in _BACKBONES:
        raise ValueError(f"{path}: model_type: {kind!r} is not supported; allowed: {', '.join(_BACKBONES)}")
    if nested and "norm_before_residual" not in found:
        raise ValueError(
            f"{path}: norm_before_residual is missing, and readers disagree on its default (vLLM true, speculators false): "
            "write the value it was trained with into the file"
        )
    text = _BACKBONES[kind][0](**{key: value for key, value in layer.items() if key != "model_type"})
    vocab = text.vocab_size
    return Eagle3Config(
        shape=BlockShape(
            hidden_size=text.hidden_size, num_heads=text.num_attention_heads, num_kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            intermediate_size=text.intermediate_size, rms_norm_eps=text.rms_norm_eps,
        ),
        num_layers=text.num_hidden_layers, vocab_size=vocab, draft_vocab_size=found.get("draft_vocab_size") or vocab,
        target_hidden_size=found.get("target_hidden_size") or text.hidden_size,
        tap_layers=_taps(found, nested, num_target_layers, str(path)),
        attention_bias=bool(layer.get("attention_bias", False)), qk_norm=kind == "qwen3",
        **{flag: bool(found.get(flag, False)) for flag in _FLAGS},
    ), layer  # fmt: skip


def _taps(found: dict[str, Any], nested: bool, num_layers: int | None, where: str) -> tuple[int, ...]:
    own = (found.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if own is not None and not nested:
        ids = list(own)
    elif (counted := found.get("eagle_aux_hidden_state_layer_ids")) is not None:
        ids = [layer - 1 for layer in counted]
    elif num_layers is not None:
        ids = [1, num_layers // 2 - 1, num_layers - 4]
    else:
        raise ValueError(f"{where}: eagle_aux_hidden_state_layer_ids is missing; its default follows from the target's layers")
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or (num_layers is not None and ids[-1] >= num_layers):
        raise ValueError(
            f"{where}: eagle_aux_hidden_state_layer_ids: layers {ids} are not allowed (ascending, from 0"
            f"{'' if num_layers is None else f' to {num_layers - 1}'})"
        )
    return tuple(ids)


def load_eagle3(
    folder: Path,
    *,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype = torch.float32,
    num_target_layers: int | None = None,
) -> tuple[Eagle3, Rope]:
    """A drafter on the device of `embedding` [V, H], with the target's embedding and LM head where the file brings none.

    Raises ValueError for a missing, surplus or misshapen tensor, and for a vocabulary that is not the target's.
    """
    cfg, layer = read_eagle3_config(folder, num_target_layers=num_target_layers)
    where = str(folder)
    if cfg.vocab_size != embedding.shape[0]:
        raise ValueError(f"{where}: vocab_size: {cfg.vocab_size}, the target has {embedding.shape[0]}")
    tensors = {_own_name(name): value for name, value in read_tensors(folder).items()}
    draft_ids = _draft_ids(tensors.get("d2t"), cfg, where)
    for name in _IGNORED:
        tensors.pop(name, None)
    size = cfg.shape.hidden_size
    for name, shared in (("embed_tokens.weight", embedding), ("lm_head.weight", lm_head)):
        if name not in tensors:
            if shared.shape[1] != size:
                raise ValueError(f"{where}: {name} is missing, and the target's has width {shared.shape[1]} instead of {size}")
            own = name.startswith("lm_head") and draft_ids is not None
            tensors[name] = shared[draft_ids.to(shared.device)] if own and draft_ids is not None else shared
    with torch.device("meta"):
        drafter = Eagle3(cfg)
    wanted = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    wrong = sorted({name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)})
    if wrong:
        listed = "; ".join(f"{name}: {found.get(name, 'missing')}, wanted {wanted.get(name, 'nothing')}" for name in wrong[:4])
        raise ValueError(f"{where}: {len(wrong)} tensors do not fit: {listed}")
    moved = {name: value.detach().to(device=embedding.device, dtype=dtype) for name, value in tensors.items()}
    drafter.load_state_dict(moved, assign=True)
    drafter.draft_ids = None if draft_ids is None else draft_ids.to(embedding.device)
    return drafter.eval().requires_grad_(False), _rope(layer, cfg, embedding.device)


def _rope(layer: dict[str, Any], cfg: Eagle3Config, device: torch.device) -> Rope:
    config_class, rotary_class = _BACKBONES[layer.get("model_type", "llama")]
    text = config_class(**{**{k: v for k, v in layer.items() if k != "model_type"}, "head_dim": cfg.shape.head_dim})
    rotary = rotary_class(text)
    return Rope(rotary.inv_freq.to(device), rotary.attention_scaling)


def _draft_ids(d2t: Tensor | None, cfg: Eagle3Config, where: str) -> Tensor | None:
    """Target ids of the draft vocabulary from the file's offsets (target id - draft id)."""
    if d2t is None:
        if cfg.draft_vocab_size != cfg.vocab_size:
            raise ValueError(f"{where}: draft_vocab_size: {cfg.draft_vocab_size} of {cfg.vocab_size}, but there is no d2t")
        return None
    if tuple(d2t.shape) != (cfg.draft_vocab_size,):
        raise ValueError(f"{where}: d2t has {tuple(d2t.shape)} entries, draft_vocab_size is {cfg.draft_vocab_size}")
    ids = torch.arange(cfg.draft_vocab_size) + d2t.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= cfg.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(f"{where}: d2t must hold offsets to distinct ids from 0 to {cfg.vocab_size - 1}")
    return None if torch.equal(ids, torch.arange(cfg.vocab_size)) else ids


def _own_name(name: str) -> str:
    for prefix in ("_orig_mod.", "module.", "draft_model.", "model."):
        name = name.removeprefix(prefix)
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
