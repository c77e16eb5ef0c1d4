"""Layouts: speculators round trips, other producers' checkpoints, warm starts, the card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafters import DRAFT_IDS, tiny_drafter
from safetensors.torch import load_file, save_file
from serving import plain, prompts, requests

from draftsmith.models.export import card, importers, native, speculators
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine
from tiny import tiny_model

HEADS = ["vanilla", "gated", "rnn", "none"]


def weights(model) -> dict[str, torch.Tensor]:
    return dict(embedding=model.get_input_embeddings().weight, lm_head=model.get_output_embeddings().weight)


def write_speculators(folder: Path, drafter, heads, **changes) -> Path:
    folder.mkdir()
    settings = dict(verifier="org/tiny", verifier_architectures=["LlamaForCausalLM"], dtype=torch.float32)
    speculators.write(folder, drafter, heads, **settings | changes)
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, change) -> None:
    """Let `change` work on config.json as a dictionary."""
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# ---- speculators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_speculators_round_trip_is_bit_equal(tmp_path: Path, head: str, reduced: bool, dtype: torch.dtype):
    model = tiny_model()
    drafter, heads = tiny_drafter(model, reduced=reduced, head=head)
    folder = write_speculators(tmp_path / "one", drafter, heads, dtype=dtype)
    loaded, loaded_heads = importers.load_any(folder, **weights(model), num_target_layers=3)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype).float()), name
    assert loaded.config["target_layer_ids"] == [0, 1] and loaded.config["num_target_layers"] == 3
    assert reduced == (loaded_heads.draft_ids is not None)
    again = write_speculators(tmp_path / "two", loaded, loaded_heads, dtype=dtype)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert config_of(again) == config_of(folder)


def test_speculators_config_states_what_its_readers_default_differently(tmp_path: Path):
    drafter, heads = tiny_drafter(reduced=True)
    folder = write_speculators(tmp_path / "drafter", drafter, heads, num_speculative_tokens=3)
    found = config_of(folder)
    assert "model_type" not in found and found["transformer_layer_config"]["model_type"] == "qwen3"
    assert found["aux_hidden_state_layer_ids"] == [1, 2], "layer ids plus one"
    assert found["draft_vocab_size"] == len(DRAFT_IDS) and found["sample_from_anchor"] is True and found["block_size"] == 5
    assert found["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert found["speculators_config"]["verifier"] == {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]}
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    tensors = load_file(folder / "model.safetensors")
    assert "embed_tokens.weight" not in tensors and tensors["lm_head.weight"].shape == (len(DRAFT_IDS), 64)
    assert torch.equal(torch.arange(len(DRAFT_IDS)) + tensors["d2t"], DRAFT_IDS) and tensors["t2d"].sum() == len(DRAFT_IDS)
    full = write_speculators(tmp_path / "full", *tiny_drafter())
    assert config_of(full)["draft_vocab_size"] == 97, "the default of 32000 would be taken otherwise"
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t"} & set(load_file(full / "model.safetensors"))
    everything = write_speculators(tmp_path / "heads", *tiny_drafter(), with_heads=True)
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(load_file(everything / "model.safetensors"))


def test_the_native_loader_points_to_the_import_command(tmp_path: Path):
    folder = write_speculators(tmp_path / "drafter", *tiny_drafter())
    with pytest.raises(ValueError, match="not the native layout; bring it there with `draftsmith import"):
        native.read_config(folder)


# ---- engines that want a head -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_zero_head_changes_no_token():
    drafter, heads = tiny_drafter(head="none")
    made = native.add_zero_head(drafter)
    assert made.config["markov_rank"] == 8 and made.config["markov_head_type"] == "vanilla"
    one, two = (DSparkProposer(d, heads, slots=1, max_context=64, with_survival=True) for d in (drafter, made))
    from draftsmith.runtime.config import SamplingParams
    from draftsmith.runtime.sampling import SamplingBatch

    taps = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    found = []
    for proposer in (one, two):
        proposer.begin(0, list(range(3, 12)), taps)
        batch = SamplingBatch.build([SamplingParams(temperature=1.0, seed=3)], [9])
        found.append(proposer.propose([0], torch.tensor([5]), batch, 5))
    assert torch.equal(found[0].tokens, found[1].tokens)
    torch.testing.assert_close(found[0].survival, found[1].survival)


# ---- other producers --------------------------------------------------------------------------------------------------


def deepspec(folder: Path, **changes) -> Path:
    """A DeepSpec checkpoint by hand: flat, transformers-4 rotary keys, no layout flag, bf16, embedding and head inside."""
    drafter, heads = tiny_drafter(**changes)
    folder.mkdir()
    native.write(folder, drafter, heads, dtype=torch.bfloat16)

    def change(config: dict) -> None:
        del config["sample_from_anchor"], config["target_model_name_or_path"]
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = config.pop("dtype")
        config.pop("confidence_head_with_markov")  # DeepSpec writes it with the head only, and readers default it differently

    edit(folder, change)
    return folder


@pytest.mark.parametrize("head", HEADS)
def test_deepspec_is_refused_until_the_layout_is_named_and_then_round_trips(tmp_path: Path, head: str):
    model = tiny_model()
    folder = deepspec(tmp_path / "theirs", head=head)
    with pytest.raises(ValueError, match="sample_from_anchor is missing.*DeepSpec.*--layout anchor-first"):
        importers.read(folder)
    found = importers.read(folder, layout="anchor-first")
    assert found.kind == "deepspec" and "told by --layout" in found.notes[0]
    assert found.config["sample_from_anchor"] is True and found.config["confidence_head_with_markov"] is (head != "none")
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    drafter, heads = importers.load_any(folder, **weights(model), layout="anchor-first")
    again = native.save(tmp_path / "ours", drafter, heads, dtype=torch.bfloat16)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert native.read_config(again)["markov_rank"] == (0 if head == "none" else 8)


def test_an_imported_drafter_decodes_losslessly(tmp_path: Path):
    model = tiny_model()
    drafter, heads = importers.load_any(deepspec(tmp_path / "theirs"), **weights(model), layout="anchor-first")
    check_lossless(model, drafter, heads)


def check_lossless(model, drafter, heads) -> None:
    decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=drafter.tap_layers, backend="torch")
    proposer = DSparkProposer(drafter, heads, slots=2, max_context=128)
    served = Engine(decoder, proposer=proposer, slots=2, max_context=128)
    texts = prompts(3)
    for done, text in zip(served.run(requests(texts, max_new_tokens=12)), texts, strict=True):
        assert list(done.token_ids) == plain(text, 12, model)
    assert served.stats.cycles > 0


def zlab(folder: Path) -> Path:
    """A z-lab DFlash checkpoint by hand: nested keys, backbone tensors alone."""
    drafter, heads = tiny_drafter(head="none", survival_head=False)
    folder.mkdir()
    native.write(folder, drafter, heads, dtype=torch.float32, with_heads=False)

    def change(config: dict) -> None:
        config["dflash_config"] = {key: config.pop(key) for key in ("target_layer_ids", "mask_token_id")}
        config["architectures"] = ["DFlashDraftModel"]
        for key in (
            "sample_from_anchor",
            "markov_rank",
            "enable_confidence_head",
            "confidence_head_with_markov",
            "num_anchors",
        ):
            del config[key]

    edit(folder, change)
    return folder


def test_zlab_dflash_serves_in_its_own_frame(tmp_path: Path):
    model = tiny_model()
    folder = zlab(tmp_path / "theirs")
    with pytest.raises(ValueError, match="z-lab DFlash.*fill-in"):
        importers.read(folder)
    drafter, heads = importers.load_any(folder, **weights(model), layout="fill-in")
    assert (drafter.first_slot, drafter.num_predictions) == (1, 4), "block 5: the anchor's slot predicts nothing"
    check_lossless(model, drafter, heads)
    ours = native.save(tmp_path / "ours", drafter, heads, dtype=torch.float32)
    assert native.read_config(ours)["sample_from_anchor"] is False
    again, _ = native.load(ours, **weights(model))
    assert again.num_predictions == 4


@torch.no_grad()
def test_fill_in_slots_are_those_of_the_block_behind_the_anchor(tmp_path: Path):
    """Slot j predicts position anchor+j: its draft is the arg-max of the block's j-th state, under the token before it."""
    from draftsmith.runtime.config import SamplingParams
    from draftsmith.runtime.sampling import SamplingBatch

    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    folder = native.save(tmp_path / "d", drafter, heads, dtype=torch.float32)
    edit(folder, lambda config: config.update(sample_from_anchor=False))
    loaded, _ = native.load(folder, **weights(model))
    taps = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    proposer = DSparkProposer(loaded, heads, slots=1, max_context=64, whole_block=True)
    assert proposer.num_slots == 4
    proposer.begin(0, list(range(3, 10)), taps)
    batch = SamplingBatch.build([SamplingParams(temperature=0.0)], [7])
    drafted = proposer.propose([0], torch.tensor([11]), batch, 4).tokens[0].tolist()
    out = drafter.unroll(
        taps=taps[None], anchors=torch.tensor([[7]]), previous_tokens=torch.tensor([[[11, 0, 0, 0, 0]]]),
        embedding=heads.embedding,
    )  # fmt: skip
    token, wanted = 11, []
    for j in range(1, 5):
        state = out.hidden[0, 0, j]
        logits = state @ heads.lm_head.T + drafter.markov_head.markov_w2(drafter.markov_head.markov_w1.weight[token])
        token = int(logits.argmax())
        wanted.append(token)
    assert drafted == wanted


def test_speculators_dflash_is_fill_in_by_its_own_word(tmp_path: Path):
    model = tiny_model()
    folder = write_speculators(tmp_path / "d", *tiny_drafter(head="none", survival_head=False))

    def change(config: dict) -> None:
        config["speculators_model_type"], config["sample_from_anchor"] = "dflash", False
        for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
            del config[key]

    edit(folder, change)
    drafter, heads = importers.load_any(folder, **weights(model), num_target_layers=3)
    assert drafter.num_predictions == 4 and drafter.markov_head is None and drafter.confidence_head is None
    check_lossless(model, drafter, heads)
    edit(folder, lambda config: config.pop("sample_from_anchor"))
    with pytest.raises(ValueError, match="sample_from_anchor is missing"):
        importers.read(folder)


def specforge(folder: Path) -> Path:
    """A SpecForge DSpark checkpoint by hand: nested keys, wrapped and older names, no layout flag."""
    drafter, heads = tiny_drafter()
    folder.mkdir()
    native.write(folder, drafter, heads, dtype=torch.float32, with_heads=False)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"logit_head.{k}" if k.startswith(("markov", "conf")) else f"_orig_mod.{k}": v for k, v in tensors.items()}
    save_file(renamed, folder / "model.safetensors")

    def change(config: dict) -> None:
        nested = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
        config["dflash_config"] = {key: config.pop(key) for key in nested} | {"projector_type": "dspark"}
        config["architectures"] = ["DSparkDraftModel"]
        del config["sample_from_anchor"], config["confidence_head_with_markov"]

    edit(folder, change)
    return folder


def test_specforge_nesting_and_names(tmp_path: Path):
    model = tiny_model()
    drafter, _ = tiny_drafter(model)
    folder = specforge(tmp_path / "theirs")
    with pytest.raises(ValueError, match="sample_from_anchor is missing.*SpecForge"):
        importers.read(folder)
    loaded, _ = importers.load_any(folder, **weights(model), layout="anchor-first")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in drafter.state_dict().items())
    edit(folder, lambda config: config["dflash_config"].update(shift_label=True))
    assert importers.read(folder).config["sample_from_anchor"] is True, "shift_label says that it is anchor-first"
    edit(folder, lambda config: config.update(mask_token_id=5))
    with pytest.raises(ValueError, match="mask_token_id: 5 at the top contradicts 96 in dflash_config"):
        importers.read(folder)


def test_a_layout_override_against_the_file_is_said_aloud(tmp_path: Path):
    folder = native.save(tmp_path / "d", *tiny_drafter())
    assert importers.read(folder).notes == ()
    found = importers.read(folder, layout="fill-in")
    assert "AGAINST the file's sample_from_anchor: true" in found.notes[0] and found.config["sample_from_anchor"] is False
    with pytest.raises(ValueError, match="--layout: 'both' is not allowed"):
        importers.read(folder, layout="both")


def test_sharded_files_are_read(tmp_path: Path):
    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    folder = native.save(tmp_path / "d", drafter, heads, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    parts = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        importers.read(folder)
    index = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded, _ = importers.load_any(folder, **weights(model))
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(architectures=["Eagle3DraftModel"]), "is an EAGLE-3 drafter, which is served as it is"),
        (lambda c: c.update(speculators_model_type="eagle3"), "is an EAGLE-3 drafter, which is served as it is"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 2), "layer_types: .*sliding_attention"),
        (lambda c: c.update(attention_bias=True), "attention_bias: true"),
        (lambda c: c.update(model_type="gemma4_text"), "model_type: 'gemma4_text'"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (lambda c: c.pop("rope_parameters"), "missing rope_parameters.rope_theta"),
        (lambda c: c.pop("mask_token_id"), "missing mask_token_id"),
        (lambda c: c.pop("hidden_size"), "missing hidden_size"),
        (lambda c: c.update(target_layer_ids=[-1, 1]), r"\[-1, 1\] must be strictly ascending"),
        (lambda c: c.update(dflash_config={"projector_type": "domino"}), "projector_type: 'domino'"),
        (lambda c: c.pop("target_layer_ids"), "not a known drafter"),
    ],
)
def test_checkpoints_that_we_cannot_compute_are_refused(tmp_path: Path, change, words: str):
    folder = native.save(tmp_path / "d", *tiny_drafter())
    edit(folder, change)
    with pytest.raises(ValueError, match=words):
        importers.read(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), "taps the embedding"),
        (lambda c: c.pop("aux_hidden_state_layer_ids"), "missing aux_hidden_state_layer_ids"),
        (lambda c: c.update(sliding_window_non_causal=True), "sliding_window_non_causal"),
        (lambda c: c.update(speculators_model_type="mtp"), "speculators_model_type: 'mtp'"),
        (lambda c: c.update(target_hidden_size=128), "target_hidden_size: 128 is not supported; the drafter's own width is 64"),
    ],
)
def test_speculators_checkpoints_that_we_cannot_compute(tmp_path: Path, change, words: str):
    folder = write_speculators(tmp_path / "d", *tiny_drafter())
    edit(folder, change)
    with pytest.raises(ValueError, match=words):
        importers.read(folder)


def test_absolute_ids_in_d2t_are_refused(tmp_path: Path):
    model = tiny_model()
    folder = native.save(tmp_path / "d", *tiny_drafter(model, reduced=True), dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "d2t": DRAFT_IDS}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="d2t leads to ids outside"):
        native.load(folder, **weights(model))
    shifted = DRAFT_IDS - torch.arange(len(DRAFT_IDS))
    for wrong in (shifted.roll(1), torch.cat((shifted[:1], shifted[:1] - 1, shifted[2:]))):  # inside the vocabulary, but wrong
        save_file({**tensors, "d2t": wrong}, folder / "model.safetensors")
        with pytest.raises(ValueError, match="d2t leads to the same id twice, or to others than t2d marks"):
            native.load(folder, **weights(model))


# ---- warm starts ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_start_when_it_means_the_same(tmp_path: Path):
    from draftsmith.models.init import init_from_checkpoint, read_start, start_ids

    trained, heads = tiny_drafter(reduced=True)
    folder = str(write_speculators(tmp_path / "d", trained, heads))
    start = read_start(folder, 3)
    assert torch.equal(start_ids(start), DRAFT_IDS), "the draft vocabulary is kept"
    fresh, _ = tiny_drafter(reduced=True, seed=5)
    init_from_checkpoint(fresh, start, folder)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in trained.state_dict().items())
    for changes, words in [
        (dict(reduced=True, rank=4), "markov_rank 8, the recipe's drafter 4"),
        (dict(), "draft_vocab_size 49, the recipe's drafter 97"),
        (dict(reduced=True, tap_layers=(0,)), r"target_layer_ids \[0, 1\], the recipe's drafter \[0\]"),
        (dict(reduced=True, num_layers=1), "num_hidden_layers 2, the recipe's drafter 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            init_from_checkpoint(tiny_drafter(**changes)[0], start, folder)


def test_a_fill_in_drafter_is_a_start_only_when_the_recipe_says_so(tmp_path: Path):
    from draftsmith.models.init import read_start

    folder = native.save(tmp_path / "d", *tiny_drafter())
    edit(folder, lambda config: config.update(sample_from_anchor=False))
    with pytest.raises(ValueError, match="is a fill-in drafter and training is anchor-first: .*checkpoint_layout fill-in"):
        read_start(str(folder), 3)
    found = read_start(str(folder), 3, "fill-in")
    assert found.notes == (
        "its blocks are fill-in and training is anchor-first: every slot learns the position behind its own",
    )
    against = read_start(str(folder), 3, "anchor-first")
    assert "AGAINST the file's sample_from_anchor: false" in against.notes[0] and against.config["sample_from_anchor"] is True


# ---- the model card ---------------------------------------------------------------------------------------------------


def test_the_card_has_front_matter_and_the_measured_tables():
    drafter, _ = tiny_drafter()
    cell = {
        "domain": "code", "temperature": 0.0, "concurrency": 1, "context": 40, "tau": 2.5, "speedup": 1.4,
        "speedup_interval": [1.3, 1.5], "acceptance_per_slot": [0.8, 0.7, None],
    }  # fmt: skip
    side = {"tokens_per_second": 10.0, "speedup": 1.0, "tau": 1.0, "length_mean": 0.0}
    machine = {"hardware": "a CPU", "dtype": "bfloat16", "threads": 2}
    grid = {**{k: cell[k] for k in ("domain", "temperature", "concurrency", "context")}}
    made = {
        "gate": "passed", "parity": {"blocks": 64, "checks": [{"name": "draft logits", "value": 1e-6, "limit": 1e-5}]},
        "measured": {
            "report": {"environment": machine, "lossless": {"verdict": True}, "cells": [cell]},
            "grid": {"environment": machine, "cells": [
                {**grid, "sides": {"plain": side, "load": {**side, "tokens_per_second": 15.0}}}]},
        },
        "export": {"format": "native", "dtype": "bfloat16", "commands": {"vllm": "vllm serve x"}},
    }  # fmt: skip
    text = card.model_card(drafter.config, made, title="tiny-dspark", target="org/tiny")
    matter = text.split("---")[1]
    assert "base_model: org/tiny" in matter and "- speculative-decoding" in matter and "value: 2.5" in matter
    assert "| code | 0 | 1 | 2.50 | 1.40 (1.30 to 1.50) | 0.80 | 0.70 | - |" in text
    assert "| code | 0 | 1 | 40 | **load** | 15.0 |" in text and "vllm serve x" in text
    assert "| draft logits | 1.0e-06 | 1.0e-05 |" in text
    skipped = card.model_card(drafter.config, {"gate": "skipped"}, title="t", target="./folder")
    assert "**skipped**" in skipped and "base_model" not in skipped


def test_measurements_older_than_the_drafter_are_left_out(tmp_path: Path):
    import os

    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"")
    report = {"environment": {}, "lossless": {"verdict": True}, "cells": [{"domain": "code", "tau": 2.0}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    found, notes = card.measured(tmp_path)
    assert found["report"]["cells"][0]["tau"] == 2.0 and not notes
    os.utime(tmp_path / "report.json", (1, 1))
    found, notes = card.measured(tmp_path)
    assert not found and "older than the drafter" in notes[0]
