"""What can be known of a target from its config alone, before any weight loads: sizes, and whether it can be used.

Importing this module loads neither torch nor transformers; for an embedded target target_facts() loads neither too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TargetConfig
from .embedded import EMBEDDED, embedded_folder

# Model types whose layers keep a running state (recurrence, linear attention, short convolution), alone or beside
# attention. Rejected draft tokens cannot be taken out of such a state by shortening the cache. Models that declare
# themselves stateful in transformers are found as well when they are not listed here.
RECURRENT_TYPES = frozenset(
    [
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "glm5_next",
        "granitemoehybrid",
        "inkling",
        "inkling2",
        "inkling2_loop",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen4_exp",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    ]
)
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# is_decoder is False by default in these and means nothing there; elsewhere False marks an encoder (BERT and its kin)
DECODERS_WITH_FALSE_FLAG = frozenset({"gpt_neox", "gpt_neox_japanese"})


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes and special tokens that checks of a recipe need."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def resolve_target(cfg: TargetConfig) -> str:
    """The folder or Hub id that transformers loads for `cfg`; an embedded target is converted on the first call.

    Raises:
        ValueError: the package of an embedded target is missing, or a revision is asked of it.
    """
    _check_revision(cfg)
    return str(embedded_folder(cfg.name)) if cfg.name in EMBEDDED else cfg.name


def target_facts(cfg: TargetConfig) -> TargetFacts:
    """Facts of the target of `cfg`, from constants (embedded) or from its config.json; nothing is converted or loaded.

    Raises:
        ValueError: the config cannot be read, or the target cannot be speculated on.
    """
    _check_revision(cfg)
    if cfg.name in EMBEDDED:
        known = EMBEDDED[cfg.name]
        return TargetFacts(
            name=cfg.name,
            model_type=known.model_type,
            num_layers=known.num_layers,
            hidden_size=known.hidden_size,
            vocab_size=known.vocab_size,
            max_positions=known.max_positions,
            eos_token_ids=known.eos_token_ids,
        )
    hf_config = read_config(cfg)
    check_target(hf_config)
    text = text_config(hf_config)
    return TargetFacts(
        name=cfg.name,
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", 0) or 0,
        eos_token_ids=_ids(getattr(text, "eos_token_id", None)),
    )


def read_config(cfg: TargetConfig) -> Any:
    """The transformers config of `cfg`. Raises ValueError when it cannot be read."""
    from transformers import AutoConfig

    source = resolve_target(cfg)
    try:
        options = {} if cfg.gguf_file is None else {"gguf_file": cfg.gguf_file}
        return AutoConfig.from_pretrained(source, revision=cfg.revision, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.name: {cfg.name!r} cannot be read: {first_line(error)}") from error


def text_config(hf_config: Any) -> Any:
    """The part of a (possibly multimodal) config that describes the language model."""
    return hf_config.get_text_config(decoder=True)


def check_target(hf_config: Any) -> None:
    """Refuses a model that cannot be speculated on, with the reason.

    Speculation needs a causal decoder whose cache can be cut back to any earlier token.

    Raises:
        ValueError: encoder-decoder, encoder only, no language model, recurrent or linear-attention state, hybrid cache.
    """
    if hf_config.is_encoder_decoder:
        raise _refusal(hf_config, "it is an encoder-decoder; a decoder-only language model is needed")
    text = text_config(hf_config)
    kinds = {hf_config.model_type, text.model_type}
    if getattr(text, "is_decoder", None) is False and not kinds & DECODERS_WITH_FALSE_FLAG:
        raise _refusal(hf_config, "it is an encoder; a decoder-only language model is needed")
    if kinds & RECURRENT_TYPES:
        raise _refusal(hf_config, "it keeps a recurrent, convolution or linear-attention state, which cannot be rolled back")
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted(set(layer_types) - ATTENTION_LAYERS - {"attention"})
    if others:
        raise _refusal(
            hf_config, f"it has layers of type {', '.join(others)}; only {' and '.join(sorted(ATTENTION_LAYERS))} roll back"
        )
    _check_class(hf_config)
    for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, field, None), int):
            raise _refusal(hf_config, f"its config names no {field}")


def _check_class(hf_config: Any) -> None:
    """Refuses configs without a causal language model in transformers, and those that declare a running state."""
    from transformers import AutoModelForCausalLM

    try:
        model_class = AutoModelForCausalLM._model_mapping[type(hf_config)]
    except KeyError:
        raise _refusal(hf_config, "transformers has no decoder-only language model of this type") from None
    classes = model_class if isinstance(model_class, (tuple, list)) else (model_class,)
    if any(getattr(entry, "_is_stateful", False) for entry in classes):
        raise _refusal(hf_config, "it keeps a recurrent or linear-attention state, which cannot be rolled back")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages that must fit on one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refusal(hf_config: Any, reason: str) -> ValueError:
    return ValueError(f"target.name: model type {hf_config.model_type!r} cannot be the target: {reason}")


def _check_revision(cfg: TargetConfig) -> None:
    if cfg.revision is not None and (cfg.name in EMBEDDED or Path(cfg.name).is_dir()):
        raise ValueError(f"target.revision: {cfg.revision!r}, but {cfg.name!r} is no Hub id; it must be null")


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
