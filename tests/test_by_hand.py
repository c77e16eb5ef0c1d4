"""Checkpoints made by hand from the published layouts, by none of our writers: they load, decode losslessly, go out again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import plain, prompts, requests
from tiny_chat import chat_tokenizer

from draftsmith.eval import parity, parity_fixture
from draftsmith.models.export import importers, native, speculators
from draftsmith.models.target import Target
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine
from tiny import tiny_model

V, H, INNER, HEADS, KV, SIZE, RANK, BLOCK, TAPS, MASK = 97, 64, 80, 4, 2, 16, 8, 5, [0, 1], 96
IDS = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 91, 94, 96])
LAYERS = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 512, "vocab_size": V,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip


def weights(model) -> dict[str, torch.Tensor]:
    return dict(embedding=model.get_input_embeddings().weight, lm_head=model.get_output_embeddings().weight)


def tensors_of(model, head: str | None, *, survival: bool = True, ids: torch.Tensor | None = None, frozen: bool = True):
    """Every tensor by the name and shape that the layouts publish, random, bf16."""
    rows = V if ids is None else len(ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, len(TAPS) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (H,), f"layers.{i}.post_attention_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * SIZE, H), f"layers.{i}.self_attn.k_proj.weight": (KV * SIZE, H),
            f"layers.{i}.self_attn.v_proj.weight": (KV * SIZE, H), f"layers.{i}.self_attn.o_proj.weight": (H, HEADS * SIZE),
            f"layers.{i}.self_attn.q_norm.weight": (SIZE,), f"layers.{i}.self_attn.k_norm.weight": (SIZE,),
            f"layers.{i}.mlp.gate_proj.weight": (INNER, H), f"layers.{i}.mlp.up_proj.weight": (INNER, H),
            f"layers.{i}.mlp.down_proj.weight": (H, INNER),
        }  # fmt: skip
    if head is not None:
        shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (rows, RANK)}
    if head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if head == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H), "markov_head.joint_proj.bias": (3 * RANK,)}
    if survival:
        width = H + (RANK if head is not None else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(11)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.2)
        found[name] = (value + 1 if "norm" in name else value).bfloat16()
    head_rows = weights(model)["lm_head"] if ids is None else weights(model)["lm_head"][ids]
    if frozen:
        found["embed_tokens.weight"] = weights(model)["embedding"].bfloat16()
    if frozen or ids is not None:
        found["lm_head.weight"] = head_rows.bfloat16()
    if ids is not None:
        marked = torch.zeros(V, dtype=torch.bool)
        marked[ids] = True
        found |= {"d2t": ids - torch.arange(rows), "t2d": marked}
    return {name: value.clone().contiguous() for name, value in found.items()}


def put(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def deepspec(folder: Path, model, head: str | None = "vanilla") -> Path:
    """DeepSpec's flat layout, as its trainer saves it: the target's config, the drafter's keys over it, no layout flag."""
    config = LAYERS | {
        "architectures": ["Qwen3DSparkModel"], "num_target_layers": 3, "block_size": BLOCK, "target_layer_ids": TAPS,
        "mask_token_id": MASK, "num_anchors": 256, "enable_confidence_head": True,
        "confidence_head_with_markov": head is not None, "markov_rank": RANK if head else 0, "dtype": "bfloat16",
        **({"markov_head_type": head} if head else {}), "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.0.0",
    }  # fmt: skip
    return put(folder, config, tensors_of(model, head))


def speculators_folder(
    folder: Path, model, head: str | None = "vanilla", *, reduced: bool = False, frozen: bool = False
) -> Path:
    """The speculators layout; without a head it is its "dflash", which is fill-in and says so."""
    dspark = {
        "markov_rank": RANK, "markov_head_type": head, "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    predictions = BLOCK if head else BLOCK - 1
    proposal = {"proposal_type": "greedy", "speculative_tokens": predictions, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["DSparkSpeculator" if head else "DFlashDraftModel"],
        "speculators_model_type": "dspark" if head else "dflash", "speculators_version": "0.9.0",
        "transformer_layer_config": LAYERS, "draft_vocab_size": len(IDS) if reduced else V, "block_size": BLOCK,
        "target_hidden_size": H, "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS], "mask_token_id": MASK,
        **(dspark if head else {}), "sample_from_anchor": head is not None, "sliding_window_non_causal": False,
        "tie_word_embeddings": False, "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dspark" if head else "dflash", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    ids = IDS if reduced else None
    return put(folder, config, tensors_of(model, head, survival=head is not None, ids=ids, frozen=frozen))


def zlab(folder: Path, model) -> Path:
    """z-lab's DFlash: backbone tensors alone, two keys nested, no layout flag, which there means fill-in."""
    config = LAYERS | {
        "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 3, "dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK},
    }  # fmt: skip
    return put(folder, config, tensors_of(model, None, survival=False, frozen=False))


def decodes_losslessly(model, drafter, heads) -> None:
    decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=drafter.tap_layers, backend="torch")
    proposer = DSparkProposer(drafter, heads, slots=2, max_context=128)
    served = Engine(decoder, proposer=proposer, slots=2, max_context=128)
    texts = prompts(3)
    for done, text in zip(served.run(requests(texts, max_new_tokens=10)), texts, strict=True):
        assert list(done.token_ids) == plain(text, 10, model)
    assert served.stats.cycles > 0


def same_bytes(one: Path, two: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_deepspec_by_hand(tmp_path: Path, head: str | None):
    model = tiny_model()
    folder = deepspec(tmp_path / "theirs", model, head)
    with pytest.raises(ValueError, match="sample_from_anchor is missing.*DeepSpec.*--layout anchor-first"):
        importers.load_any(folder, **weights(model))
    drafter, heads = importers.load_any(folder, **weights(model), layout="anchor-first")
    assert drafter.num_predictions == BLOCK, "its DFlash (no correction head) is anchor-first too"
    decodes_losslessly(model, drafter, heads)
    again = native.save(tmp_path / "ours", drafter, heads, dtype=torch.bfloat16)
    assert same_bytes(again, folder)
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in (folder, again))
    assert {key: ours[key] for key in theirs} == theirs, "no key of theirs is lost or changed"
    added = {"sample_from_anchor": True, "draft_vocab_size": V, "target_model_name_or_path": None}
    assert {key: value for key, value in ours.items() if key not in theirs} == added


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_speculators_by_hand(tmp_path: Path, head: str, reduced: bool, frozen: bool):
    model = tiny_model()
    folder = speculators_folder(tmp_path / "theirs", model, head, reduced=reduced, frozen=frozen)
    drafter, heads = importers.load_any(folder, **weights(model), num_target_layers=3)
    assert drafter.tap_layers == tuple(TAPS) and drafter.num_predictions == BLOCK
    if not frozen:
        decodes_losslessly(model, drafter, heads)
    again = tmp_path / "ours"
    again.mkdir()
    named = dict(verifier="org/tiny", verifier_architectures=["LlamaForCausalLM"])
    speculators.write(again, drafter, heads, **named, dtype=torch.bfloat16, with_heads=frozen)
    assert same_bytes(again, folder)
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def dflash(folder: Path, model) -> Path:
    return speculators_folder(folder, model, None)


@pytest.mark.parametrize("make", [zlab, dflash], ids=["z-lab", "speculators"])
def test_dflash_by_hand(tmp_path: Path, make):
    model = tiny_model()
    folder = make(tmp_path / "theirs", model)
    drafter, heads = importers.load_any(folder, **weights(model), layout="fill-in", num_target_layers=3)
    assert (drafter.first_slot, drafter.num_predictions) == (1, BLOCK - 1)
    decodes_losslessly(model, drafter, heads)
    again = tmp_path / "ours"
    again.mkdir()
    native.write(again, drafter, heads, dtype=torch.bfloat16, with_heads=False)
    assert same_bytes(again, folder)
    loaded, _ = native.load(again, **weights(model))
    assert loaded.num_predictions == BLOCK - 1


# ---- case 17: what may not be lost on the way -------------------------------------------------------------------------


def exported(place: Path, layout: str, *, tied: bool) -> tuple[Path, Path, torch.nn.Module]:
    """(a hand-made checkpoint imported and written in `layout` with the target's matrices, the gate's fixture, the model)."""
    model = tiny_model(tie_word_embeddings=tied)
    source = deepspec(place / "theirs", model)
    drafter, heads = importers.load_any(source, **weights(model), layout="anchor-first")
    folder, fixture = place / "drafter", place / "fixture"
    folder.mkdir()
    fixture.mkdir()
    if layout == "native":
        native.write(folder, drafter, heads, dtype=torch.float32)
    else:
        named = dict(verifier="tiny", verifier_architectures=["LlamaForCausalLM"])
        speculators.write(folder, drafter, heads, **named, dtype=torch.float32, with_heads=True)
    parity_fixture.write_fixture(fixture, Target(model, chat_tokenizer(), "tiny"), drafter, heads, dtype=torch.float32)
    return folder, fixture, model


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("tied", [False, True])
def test_case_17_a_saved_drafter_drafts_the_same_in_a_fresh_process_and_in_the_runtime(tmp_path: Path, layout: str, tied: bool):
    folder, fixture, model = exported(tmp_path, layout, tied=tied)
    if layout == "native":
        found = parity.fresh_process(folder, fixture)
    else:
        found = parity.examine(folder, fixture).to_json()
    assert found["gate"] == "passed" and all(check["passed"] for check in found["checks"])
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["draft logits"]["value"] <= by_name["draft logits"]["limit"]
    assert by_name["greedy chains in the runtime"]["passed"]
    decodes_losslessly(model, *importers.load_any(folder, **weights(model), num_target_layers=3))


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize(
    ("key", "words"),
    [("sample_from_anchor", "sample_from_anchor is missing"), ("mask_token_id", "missing mask_token_id"),
     ("embed_tokens.weight", "embed_tokens.weight is not this target's")],
)  # fmt: skip
def test_case_17_a_lost_flag_or_mask_or_a_random_embedding_is_refused(tmp_path: Path, layout: str, key: str, words: str):
    folder, fixture, model = exported(tmp_path, layout, tied=key == "embed_tokens.weight")
    if key.endswith(".weight"):
        tensors = load_file(folder / "model.safetensors")
        random = torch.randn(V, H, generator=torch.Generator().manual_seed(1)) * tensors[key].std()
        save_file({**tensors, key: random}, folder / "model.safetensors")
    else:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        importers.load_any(folder, **weights(model), num_target_layers=3)
    if layout == "native":
        with pytest.raises(ValueError, match="embed_tokens" if key.endswith(".weight") else f"missing {key}"):
            native.load(folder, **weights(model))
    outcome = parity.examine(folder, fixture)
    assert not outcome.passed and any(key in cause for cause in outcome.causes), outcome


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [zlab, dflash], ids=["z-lab", "speculators"])
def test_the_gate_judges_fill_in_drafters_in_their_own_frame(tmp_path: Path, make, tied: bool):
    model = tiny_model(tie_word_embeddings=tied)
    drafter, heads = importers.load_any(make(tmp_path / "d", model), **weights(model), layout="fill-in", num_target_layers=3)
    folder, fixture = tmp_path / "ours", tmp_path / "fixture"
    folder.mkdir()
    fixture.mkdir()
    native.write(folder, drafter, heads, dtype=torch.bfloat16)
    parity_fixture.write_fixture(fixture, Target(model, chat_tokenizer(), "tiny"), drafter, heads, dtype=torch.bfloat16)
    assert parity.examine(folder, fixture).passed
    broken = parity.self_test(folder, fixture)
    assert set(broken) == {"tap ids + 1", "missing fc", "wrong mask id", "flipped layout flag"}, "it has no W1 and W2"
    assert all(seen["caught"] for seen in broken.values()), broken
