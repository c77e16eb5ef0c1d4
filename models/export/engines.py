"""What each serving engine asks of a checkpoint, as one table of rules; an export that breaks one is refused.

Every fault listed here is silent in the engine (text stays right, acceptance falls) or a crash at load time. Sources: the code
of vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.3.0rc, llama.cpp (PR #25173), DeepSpec afdfa7c and speculators 0.9.0; what was run
and what was only read is in docs/interop.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORMATS = ("native", "speculators")


@dataclass(frozen=True)
class Engine:
    """formats: what it loads, its default first. heads: the target's embedding and LM head in the file ("required" or left to
    `with_heads`). exact_slots: it drafts block_size tokens a cycle, no fewer."""

    title: str
    formats: tuple[str, ...]
    heads: str
    with_heads: bool
    exact_slots: bool
    command: Callable[[str, str, int], str]  # (folder, target, tokens a cycle) -> how to start it


def _vllm(folder: str, target: str, slots: int) -> str:
    speculative = json.dumps({"method": "dspark", "model": folder, "num_speculative_tokens": slots})
    return f"vllm serve {target} --speculative-config '{speculative}'"


ENGINES: dict[str, Engine] = {
    "vllm": Engine("vLLM", ("native", "speculators"), "optional", True, False, _vllm),
    "sglang": Engine(
        "SGLang", ("native",), "ignored", False, True,
        lambda folder, target, slots: (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {slots + 1}"
        ),
    ),
    "trtllm": Engine(
        "TensorRT-LLM", ("native", "speculators"), "ignored", False, True,
        lambda folder, target, slots: (
            f"LLM({target!r}, speculative_config=DSparkDecodingConfig(max_draft_len={slots}, speculative_model={folder!r}, "
            "...)); mask_token_id, target_layer_ids, block_size, markov_rank and markov_head_type as in config.json"
        ),
    ),
    "deepspec": Engine(
        "DeepSpec's evaluator", ("native",), "required", True, False,
        lambda folder, target, slots: f"python eval.py --target_name_or_path {target} --draft_name_or_path {folder}",
    ),
    "llamacpp": Engine(
        "llama.cpp", ("native",), "optional", True, False,
        lambda folder, target, slots: (
            f"python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile draft.gguf; "
            f"llama-server -m target.gguf -md draft.gguf --spec-type draft-dspark --spec-draft-n-max {slots}"
        ),
    ),
    "speculators": Engine(
        "speculators", ("speculators",), "optional", False, False,
        lambda folder, target, slots: f"SpeculatorModel.from_pretrained({folder!r})",
    ),
}  # fmt: skip
EVERY = tuple(ENGINES)


@dataclass(frozen=True)
class Subject:
    """What is about to be written. config: native; file: the config.json of the chosen layout; tensors: names in the file."""

    config: dict[str, Any]
    file: dict[str, Any]
    tensors: frozenset[str]
    layout: str
    slots: int  # tokens drafted a cycle

    @property
    def vanilla(self) -> bool:
        """Whether the correction head, where there is one, is of the vanilla kind."""
        return not self.config["markov_rank"] or self.config.get("markov_head_type") == "vanilla"

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.config.get("draft_vocab_size") not in (None, self.config["vocab_size"])

    @property
    def predictions(self) -> int:
        """Tokens that one block predicts."""
        return self.config["block_size"] - (not self.config["sample_from_anchor"])


@dataclass(frozen=True)
class Rule:
    """name: what is judged; value: what it is here; ok: whether it may be; why and way_out end the message."""

    name: str
    engines: tuple[str, ...]
    value: Callable[[Subject], Any]
    ok: Callable[[Subject], bool]
    why: str
    way_out: str


def check(engine: str, subject: Subject) -> None:
    """Raises ValueError with the first rule of `engine` that the subject breaks: the rule, the value, the way out."""
    for rule in RULES:
        if engine in rule.engines and not rule.ok(subject):
            raise ValueError(
                f"--for {engine}: {rule.name}: {rule.value(subject)!r} is not allowed; {ENGINES[engine].title} {rule.why}; "
                f"{rule.way_out}"
            )
    _check_slots(engine, subject)


def pick_format(engine: str | None, asked: str | None) -> str:
    """The layout to write. Raises ValueError for an engine or layout that does not exist, or do not go together."""
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"--for: {engine!r} is not allowed; it must be one of {', '.join(ENGINES)}")
    if asked is not None and asked not in FORMATS:
        raise ValueError(f"--format: {asked!r} is not allowed; it must be one of {', '.join(FORMATS)}")
    if engine is None:
        return asked or "native"
    allowed = ENGINES[engine].formats
    if asked is not None and asked not in allowed:
        raise ValueError(
            f"--for {engine}: --format {asked} is not allowed; {ENGINES[engine].title} loads {' or '.join(allowed)}: "
            f"leave --format out"
        )
    return asked or allowed[0]


def pick_heads(engine: str | None, asked: bool | None, layout: str) -> bool:
    """Whether the target's embedding and LM head go into the file. Raises ValueError where the engine needs them."""
    if engine is None:
        return layout == "native" if asked is None else asked
    entry = ENGINES[engine]
    if asked is False and entry.heads == "required":
        raise ValueError(
            f"--for {engine}: --no-target-heads is not allowed; {entry.title} uses the file's own embed_tokens and lm_head: "
            "leave it out"
        )
    default = entry.with_heads and layout == "native"
    return default if asked is None else asked


def _check_slots(engine: str, subject: Subject) -> None:
    most = subject.predictions
    entry = ENGINES[engine]
    wanted = subject.slots == most if entry.exact_slots else 1 <= subject.slots <= most
    if not wanted:
        allowed = f"exactly {most}" if entry.exact_slots else f"1 to {most}"
        raise ValueError(
            f"--for {engine}: --num-speculative-tokens: {subject.slots} is not allowed; {entry.title} drafts {allowed} tokens "
            f"with this block of {subject.config['block_size']}: leave it out, or train with another drafter.block_size"
        )


NATIVE_KEYS = (
    "architectures", "model_type", "sample_from_anchor", "block_size", "mask_token_id", "target_layer_ids",
    "num_target_layers", "markov_rank", "enable_confidence_head", "confidence_head_with_markov", "tie_word_embeddings",
    "layer_types", "rope_parameters", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "vocab_size", "draft_vocab_size", "rms_norm_eps", "attention_bias",
    "hidden_act", "max_position_embeddings", "use_sliding_window", "dtype",
)  # fmt: skip
SPECULATORS_KEYS = (
    "architectures", "speculators_model_type", "speculators_version", "transformer_layer_config", "draft_vocab_size",
    "block_size", "aux_hidden_state_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "sample_from_anchor",
    "enable_confidence_head", "confidence_head_with_markov", "tie_word_embeddings", "sliding_window_non_causal",
    "speculators_config", "dtype",
)  # fmt: skip
LAYER_KEYS = (  # of the nested config
    "model_type", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "rms_norm_eps", "attention_bias", "hidden_act", "max_position_embeddings",
    "layer_types", "rope_parameters", "use_sliding_window",
)  # fmt: skip
ARCHITECTURES = {"native": ("Qwen3DSparkModel",), "speculators": ("DSparkSpeculator", "DSparkDraftModel")}


def unstated(subject: Subject) -> list[str]:
    """Keys that some reader defaults differently, and that the config.json to be written does not state."""
    file = subject.file
    if subject.layout == "speculators":
        nested = file.get("transformer_layer_config", {})
        inner = [f"transformer_layer_config.{key}" for key in LAYER_KEYS if nested and key not in nested]
        return [key for key in SPECULATORS_KEYS if key not in file] + inner
    keys = [*NATIVE_KEYS, *(["markov_head_type"] if subject.config["markov_rank"] else [])]
    return [key for key in keys if key not in file]


def _layers(subject: Subject) -> dict[str, Any]:
    return subject.file.get("transformer_layer_config", subject.file)


def _taps_ok(subject: Subject) -> bool:
    taps, last = subject.config["target_layer_ids"], subject.config["num_target_layers"] - 2
    return bool(taps) and list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= last


def _aux_ok(subject: Subject) -> bool:
    shifted = [layer + 1 for layer in subject.config["target_layer_ids"]]
    return subject.layout != "speculators" or subject.file["aux_hidden_state_layer_ids"] == shifted


def _type_ok(subject: Subject) -> bool:
    found = subject.file.get("model_type")
    return found is None if subject.layout == "speculators" else found == "qwen3"


def _architecture_ok(subject: Subject) -> bool:
    found = subject.file.get("architectures") or []
    return len(found) == 1 and found[0] in ARCHITECTURES[subject.layout]


def _rope(subject: Subject) -> Any:
    return (_layers(subject).get("rope_parameters") or {}).get("rope_theta")


def _bad_names(subject: Subject) -> list[str]:
    return sorted(name for name in subject.tensors if name.startswith(("model.", "module.")) or "_orig_mod." in name)


def _lacking(subject: Subject) -> list[str]:
    needed = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    if subject.config["markov_rank"]:
        needed += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    if subject.reduced:
        needed += ["d2t", "lm_head.weight"]
    return [name for name in needed if name not in subject.tensors]


RETRAIN = "train with"
RULES: tuple[Rule, ...] = (
    Rule(
        "drafter.head", ("vllm", "trtllm", "llamacpp"),
        lambda s: s.config.get("markov_head_type"), lambda s: s.vanilla,
        "loads the vanilla correction head only",
        f"{RETRAIN} drafter.head=vanilla, or serve with SGLang, DeepSpec or speculators",
    ),
    Rule(
        "drafter.rank", ("vllm", "sglang", "trtllm", "llamacpp"),
        lambda s: s.config["markov_rank"], lambda s: s.config["markov_rank"] > 0,
        "loads a DSpark drafter only with a correction head",
        f"add --zero-head (a head that changes no logit), or {RETRAIN} drafter.rank",
    ),
    Rule(
        "drafter.draft_vocab_size", ("sglang", "trtllm", "deepspec"),
        lambda s: s.config["draft_vocab_size"], lambda s: not s.reduced,
        "knows no reduced draft vocabulary",
        f"{RETRAIN} drafter.draft_vocab_size=null, or serve with vLLM or llama.cpp",
    ),
    Rule(
        "sample_from_anchor", ("sglang", "trtllm", "deepspec", "llamacpp"),
        lambda s: s.config["sample_from_anchor"], lambda s: s.config["sample_from_anchor"] is True,
        "is written to as anchor-first only",
        "a fill-in drafter goes to vLLM or speculators (--for vllm, --for speculators)",
    ),
    Rule(
        "drafter.tap_layers", EVERY,
        lambda s: s.config["target_layer_ids"], _taps_ok,
        "needs ascending, distinct layers from 0 to L-2 (the last layer is read before or after the final norm by reader)",
        f"{RETRAIN} other drafter.tap_layers",
    ),
    Rule(
        "aux_hidden_state_layer_ids", EVERY,
        lambda s: s.file.get("aux_hidden_state_layer_ids"), _aux_ok,
        "reads layer ids plus one here",
        "a fault of the exporter: report it",
    ),
    Rule(
        "drafter.mask_token_id", EVERY,
        lambda s: s.config["mask_token_id"], lambda s: 0 <= s.config["mask_token_id"] < s.config["vocab_size"],
        "looks it up in the target's embedding",
        f"{RETRAIN} drafter.mask_token_id inside the vocabulary",
    ),
    Rule(
        "layer_types", EVERY,
        lambda s: _layers(s).get("layer_types"),
        lambda s: _layers(s).get("layer_types") == ["full_attention"] * s.config["num_hidden_layers"],
        "attends causally in sliding layers, and blocks are drafted without an order",
        f"{RETRAIN} full attention (the only kind this trainer makes)",
    ),
    Rule(
        "rope_parameters.rope_theta", EVERY,
        _rope, lambda s: isinstance(_rope(s), (int, float)),
        "falls back to a theta of its own",
        "write the target's theta into the drafter's config.json",
    ),
    Rule(
        "dtype", EVERY,
        lambda s: s.file.get("dtype"), lambda s: s.file.get("dtype") in ("float32", "bfloat16"),
        "is only verified in two precisions",
        "choose --dtype float32 or bfloat16",
    ),
    Rule(
        "model_type", EVERY,
        lambda s: s.file.get("model_type"), _type_ok,
        "tells the layouts apart by it (qwen3 in the native one, absent in speculators')",
        "a fault of the exporter: report it",
    ),
    Rule(
        "architectures", EVERY,
        lambda s: s.file.get("architectures"), _architecture_ok,
        "picks the model's class by it, and takes every other name for another model",
        "write Qwen3DSparkModel in the native layout, DSparkSpeculator in speculators'",
    ),
    Rule(
        "tie_word_embeddings", EVERY,
        lambda s: s.file.get("tie_word_embeddings"), lambda s: s.file.get("tie_word_embeddings") is False,
        "would take the embedding for the head, or the other way round",
        "write false: both are the target's, tied there or not",
    ),
    Rule(
        "num_anchors", ("deepspec",),
        lambda s: s.file.get("num_anchors"), lambda s: isinstance(s.file.get("num_anchors"), int),
        "asserts that it is there",
        "write any integer into the drafter's config.json",
    ),
    Rule(
        "drafter.survival_with_head", ("llamacpp",),
        lambda s: s.config["confidence_head_with_markov"],
        lambda s: not s.config["enable_confidence_head"] or s.config["confidence_head_with_markov"],
        "knows the survival head only with the previous token's head embedding",
        f"{RETRAIN} drafter.survival_with_head=true, or drafter.survival_head=false",
    ),
    Rule(
        "tensor names", EVERY,
        _bad_names, lambda s: not _bad_names(s),
        "puts a prefix of its own before every name",
        "strip model., module. and _orig_mod. from the names",
    ),
    Rule(
        "tensors", EVERY,
        lambda s: f"without {', '.join(_lacking(s))}", lambda s: not _lacking(s),
        "leaves what is missing at random and says nothing",
        "export again from the trained drafter",
    ),
    Rule(
        "embed_tokens.weight, lm_head.weight", ("deepspec",),
        lambda s: sorted(s.tensors & {"embed_tokens.weight", "lm_head.weight"}),
        lambda s: {"embed_tokens.weight", "lm_head.weight"} <= s.tensors,
        "uses the file's own",
        "leave --no-target-heads out",
    ),
    Rule(
        "explicit keys", EVERY,
        lambda s: f"without {', '.join(unstated(s))}", lambda s: not unstated(s),
        "and other readers default them differently",
        "write them into config.json",
    ),
)  # fmt: skip
