"""What each engine asks of an export: every rule refused with rule, value and way out, for every engine and layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from drafters import tiny_drafter

from draftsmith.models.export import engines, native, speculators
from draftsmith.models.export.engines import ENGINES, RULES, Subject


def subject(engine_name: str, layout: str | None = None, **changes) -> Subject:
    """What `--for engine` would write for a tiny drafter, in the engine's first layout or in `layout`."""
    drafter, heads = tiny_drafter(**changes)
    config = native.file_config(drafter, torch.bfloat16)
    layout = layout or ENGINES[engine_name].formats[0]
    file = dict(config)
    if layout == "speculators":
        file = speculators.to_config(config, verifier="org/tiny", verifier_architectures=[])
    names = native.file_tensors(drafter, heads, torch.bfloat16)
    return Subject(dict(config), file, frozenset(names), layout, 5)


def with_config(found: Subject, **changes) -> Subject:
    """The subject with other config values, in the file too where they stand at its top."""
    file = {**found.file, **{key: value for key, value in changes.items() if key in found.file}}
    return replace(found, config={**found.config, **changes}, file=file)


def with_file(found: Subject, **changes) -> Subject:
    """Other values in the file alone; those of the layers go where the layout keeps them."""
    file = json.loads(json.dumps(found.file))
    for key, value in changes.items():
        place = file["transformer_layer_config"] if key in file.get("transformer_layer_config", {}) else file
        place[key] = value
    return replace(found, file=file)


BREAK = {
    "drafter.head": lambda s: with_config(s, markov_head_type="gated"),
    "drafter.rank": lambda s: with_config(s, markov_rank=0),
    "drafter.draft_vocab_size": lambda s: with_config(s, draft_vocab_size=50),
    "sample_from_anchor": lambda s: with_config(s, sample_from_anchor=False),
    "drafter.tap_layers": lambda s: with_config(s, target_layer_ids=[0, 2]),
    "aux_hidden_state_layer_ids": lambda s: replace(s, file={**s.file, "aux_hidden_state_layer_ids": [0, 1]}),
    "drafter.mask_token_id": lambda s: with_config(s, mask_token_id=97),
    "layer_types": lambda s: with_file(s, layer_types=["sliding_attention", "full_attention"]),
    "rope_parameters.rope_theta": lambda s: with_file(s, rope_parameters={"rope_type": "default"}),
    "dtype": lambda s: with_file(s, dtype="float16"),
    "model_type": lambda s: replace(s, file={**s.file, "model_type": "llama"}),
    "architectures": lambda s: replace(s, file={**s.file, "architectures": ["DeepseekV4DSparkModel"]}),
    "tie_word_embeddings": lambda s: replace(s, file={**s.file, "tie_word_embeddings": True}),
    "num_anchors": lambda s: replace(s, file={key: value for key, value in s.file.items() if key != "num_anchors"}),
    "drafter.survival_with_head": lambda s: with_config(s, confidence_head_with_markov=False),
    "tensor names": lambda s: replace(s, tensors=s.tensors | {"model.norm.weight"}),
    "tensors": lambda s: replace(s, tensors=s.tensors - {"fc.weight"}),
    "embed_tokens.weight, lm_head.weight": lambda s: replace(s, tensors=s.tensors - {"embed_tokens.weight"}),
    "explicit keys": lambda s: replace(s, file={key: value for key, value in s.file.items() if key != "block_size"}),
}


WRITTEN = [(name, layout) for name, engine in ENGINES.items() for layout in engine.formats]


@pytest.mark.parametrize(("name", "layout"), WRITTEN)
def test_every_engine_takes_what_we_emit_by_default(name: str, layout: str):
    engines.check(name, subject(name, layout))


@pytest.mark.parametrize(
    ("name", "layout", "rule"),
    [
        (name, layout, rule) for rule in RULES for name, layout in WRITTEN
        if name in rule.engines and (layout == "speculators" or rule.name != "aux_hidden_state_layer_ids")
    ],
    ids=lambda v: v if isinstance(v, str) else v.name,
)  # fmt: skip
def test_every_rule_of_every_engine_refuses_in_one_line(name: str, layout: str, rule: engines.Rule):
    whole = subject(name, layout)
    broken = BREAK[rule.name](whole)
    assert not rule.ok(broken) and rule.ok(whole)
    with pytest.raises(ValueError) as error:
        engines.check(name, broken)
    value = rule.value(broken)
    assert str(error.value) == (
        f"--for {name}: {rule.name}: {value!r} is not allowed; {ENGINES[name].title} {rule.why}; {rule.way_out}"
    )
    assert "\n" not in str(error.value)


def test_every_rule_is_broken_by_a_test():
    assert set(BREAK) == {rule.name for rule in RULES}
    assert all(set(rule.engines) <= set(ENGINES) and rule.engines for rule in RULES)


# The engine table of the contract: what each reader cannot load, beside what every reader refuses.
CANNOT = {
    "deepspec": {"drafter.draft_vocab_size", "sample_from_anchor", "num_anchors", "embed_tokens.weight, lm_head.weight"},
    "speculators": set(),
    "vllm": {"drafter.head", "drafter.rank"},
    "sglang": {"drafter.rank", "drafter.draft_vocab_size", "sample_from_anchor"},
    "trtllm": {"drafter.head", "drafter.rank", "drafter.draft_vocab_size", "sample_from_anchor"},
    "llamacpp": {"drafter.head", "drafter.rank", "sample_from_anchor", "drafter.survival_with_head"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_rules_are_those_of_the_engine_table(name: str):
    assert {rule.name for rule in RULES if name in rule.engines and rule.engines != engines.EVERY} == CANNOT[name]


@pytest.mark.parametrize("taps", [[-1, 0], [0, 2], [1, 0], [0, 0], []])
@pytest.mark.parametrize(("name", "layout"), WRITTEN)
def test_taps_of_the_embedding_the_last_layer_or_out_of_order_go_to_no_engine(name: str, layout: str, taps: list[int]):
    broken = with_config(subject(name, layout), target_layer_ids=taps)  # of 3 layers: L-1 is 2
    with pytest.raises(ValueError, match=f"--for {name}: drafter.tap_layers: .*from 0 to L-2"):
        engines.check(name, broken)


@pytest.mark.parametrize(("name", "layout"), WRITTEN)
def test_every_key_that_readers_default_must_be_written(name: str, layout: str):
    found = subject(name, layout)
    keys = engines.SPECULATORS_KEYS if layout == "speculators" else (*engines.NATIVE_KEYS, "markov_head_type")
    for key in keys:
        file = {k: v for k, v in found.file.items() if k != key}
        assert engines.unstated(replace(found, file=file)) == [key]
    for key in engines.LAYER_KEYS if layout == "speculators" else ():
        nested = {k: v for k, v in found.file["transformer_layer_config"].items() if k != key}
        file = {**found.file, "transformer_layer_config": nested}
        assert engines.unstated(replace(found, file=file)) == [f"transformer_layer_config.{key}"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vllm", dict(head="rnn"), "drafter.head: 'rnn' is not allowed; vLLM loads the vanilla correction head only"),
        ("trtllm", dict(head="gated"), "drafter.head: 'gated'"),
        ("llamacpp", dict(head="rnn"), "drafter.head: 'rnn'"),
        ("sglang", dict(head="none"), "drafter.rank: 0 .* add --zero-head"),
        ("sglang", dict(reduced=True), "draft_vocab_size: 49"),
        ("trtllm", dict(reduced=True), "draft_vocab_size: 49"),
        ("deepspec", dict(reduced=True), "draft_vocab_size: 49"),
    ],
)
def test_drafters_that_an_engine_cannot_serve(name: str, changes: dict, words: str):
    with pytest.raises(ValueError, match=words):
        engines.check(name, subject(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sglang", dict(head="gated")), ("sglang", dict(head="rnn")), ("vllm", dict(reduced=True)),
        ("speculators", dict(head="rnn", reduced=True)), ("speculators", dict(head="none")), ("deepspec", dict(head="none")),
        ("llamacpp", dict(reduced=True)), ("llamacpp", dict(survival_head=False, survival_with_head=False)),
    ],
)  # fmt: skip
def test_drafters_that_an_engine_can_serve(name: str, changes: dict):
    engines.check(name, subject(name, **changes))


@pytest.mark.parametrize(
    ("name", "slots", "allowed"),
    [("vllm", 6, "1 to 5"), ("vllm", 0, "1 to 5"), ("llamacpp", 9, "1 to 5"), ("speculators", 6, "1 to 5"),
     ("deepspec", 6, "1 to 5"), ("sglang", 4, "exactly 5"), ("trtllm", 3, "exactly 5")],
)  # fmt: skip
def test_tokens_a_cycle_are_checked(name: str, slots: int, allowed: str):
    with pytest.raises(ValueError, match=f"--for {name}: --num-speculative-tokens: {slots} .*{allowed}"):
        engines.check(name, replace(subject(name), slots=slots))
    engines.check(name, replace(subject(name), slots=5))


def test_formats_and_heads_of_an_engine():
    assert [engines.pick_format(name, None) for name in ENGINES] == ["native"] * 5 + ["speculators"]
    assert engines.pick_format(None, "speculators") == engines.pick_format("vllm", "speculators") == "speculators"
    for name in ("sglang", "deepspec", "llamacpp"):
        with pytest.raises(ValueError, match=f"--for {name}: --format speculators is not allowed; .* loads native"):
            engines.pick_format(name, "speculators")
    with pytest.raises(ValueError, match="--for speculators: --format native"):
        engines.pick_format("speculators", "native")
    with pytest.raises(ValueError, match="--for: 'tgi' is not allowed"):
        engines.pick_format("tgi", None)
    with pytest.raises(ValueError, match="--format: 'gguf' is not allowed"):
        engines.pick_format(None, "gguf")
    assert [engines.pick_heads(name, None, engines.pick_format(name, None)) for name in ENGINES] == [
        True, False, False, True, True, False,
    ]  # fmt: skip
    assert engines.pick_heads("vllm", False, "native") is False and engines.pick_heads("sglang", True, "native") is True
    with pytest.raises(ValueError, match="--for deepspec: --no-target-heads is not allowed"):
        engines.pick_heads("deepspec", False, "native")
