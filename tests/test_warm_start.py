"""Training that starts from a drafter of any layout we read: weights, frame, sizes and draft vocabulary are those it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import DRAFT_IDS, tiny_drafter
from safetensors.torch import load_file
from test_formats import deepspec, edit, specforge, write_speculators, zlab
from training import log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.models.export import importers, native
from draftsmith.train import stage

OURS = dict(num_layers=2, block_size=5, rank=8, init="checkpoint", tap_layers=None)


def start(folder: Path, **changes):
    return parts_of(train=dict(steps=2), drafter=OURS | dict(checkpoint=str(folder)) | changes)


def make_native(folder: Path) -> Path:
    return native.save(folder, *tiny_drafter(), dtype=torch.float32)


def make_speculators(folder: Path) -> Path:
    return write_speculators(folder, *tiny_drafter())


def make_dflash(folder: Path) -> Path:
    """speculators' "dflash": fill-in by its own word, no heads."""
    write_speculators(folder, *tiny_drafter(head="none", survival_head=False))

    def change(config: dict) -> None:
        config["speculators_model_type"], config["sample_from_anchor"] = "dflash", False

    edit(folder, change)
    return folder


@pytest.mark.parametrize("make", [zlab, make_dflash], ids=["z-lab", "speculators"])
def test_a_fill_in_drafter_is_a_start_that_is_said_aloud(tmp_path: Path, make):
    folder, said = make(tmp_path / "theirs"), []
    parts = start(folder, checkpoint_layout="fill-in")
    setup = stage.build_setup(parts, tiny_target(), rows_of(6), tmp_path, said.append)
    assert any(line.startswith("warning: drafter.checkpoint: its blocks are fill-in") for line in said), said
    found = importers.read(folder, layout="fill-in", num_target_layers=3)
    weights = setup.drafter.state_dict()
    assert all(torch.equal(weights[name], value.float()) for name, value in found.tensors.items())
    assert not setup.drafter.markov_head.markov_w2.weight.any(), "the heads that it lacks change no logit at the start"
    trained = native.read_config(train(parts, setup, tmp_path))
    assert trained["sample_from_anchor"] is True, "what is trained is anchor-first, and says so"


def test_a_told_layout_is_said_in_training_too(tmp_path: Path):
    said = []
    parts = start(deepspec(tmp_path / "theirs", head="none"), checkpoint_layout="anchor-first")
    setup = stage.build_setup(parts, tiny_target(), rows_of(6), tmp_path, said.append)
    assert any("warning: drafter.checkpoint: block layout anchor-first as told" in line for line in said), said
    assert setup.drafter.config["confidence_head_with_markov"] is False and setup.drafter.markov_head is not None
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")["confidence_head.proj.weight"]
    assert torch.equal(setup.drafter.confidence_head.proj.weight, theirs.float())
    train(parts, setup, tmp_path)


LAYOUTS = {
    "native": (make_native, {}),
    "speculators": (make_speculators, {}),
    "deepspec": (deepspec, dict(checkpoint_layout="anchor-first")),
    "specforge": (specforge, dict(checkpoint_layout="anchor-first")),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_every_layout_is_a_start(tmp_path: Path, kind: str, lora_rank: int):
    make, told = LAYOUTS[kind]
    folder = make(tmp_path / "theirs")
    parts = start(folder, lora_rank=lora_rank, **told)
    setup = setup_of(parts, rows_of(6), tmp_path)
    found = importers.read(folder, layout=told.get("checkpoint_layout"), num_target_layers=3)
    assert found.kind == kind
    weights = setup.drafter.state_dict()
    left_out = {*native.FROZEN, "d2t", "t2d"}
    assert {name for name in weights if "lora" not in name} == set(found.tensors) - left_out
    for name, value in found.tensors.items():
        assert name in left_out or torch.equal(weights[name], value.float()), name
    assert setup.drafter.tap_layers == (0, 1) and setup.drafter.mask_token_id == 96, "what the recipe leaves open is theirs"
    trained = train(parts, setup, tmp_path)
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2]
    assert native.read_config(trained)["target_layer_ids"] == [0, 1]
    assert set(load_file(trained / "model.safetensors")) == {*native.FROZEN, *(set(found.tensors) - left_out)}


def test_the_draft_vocabulary_is_kept_without_being_named(tmp_path: Path):
    folder = write_speculators(tmp_path / "d", *tiny_drafter(reduced=True))
    for number, lora in enumerate((0, 2)):
        parts = start(folder, lora_rank=lora)
        setup = setup_of(parts, rows_of(6), tmp_path / str(number))
        assert torch.equal(setup.heads.draft_ids, DRAFT_IDS) and setup.drafter.draft_vocab_size == len(DRAFT_IDS)
        trained = load_file(train(parts, setup, tmp_path / str(number)) / "model.safetensors")
        assert torch.equal(torch.arange(len(DRAFT_IDS)) + trained["d2t"], DRAFT_IDS)


def test_sizes_that_only_the_checkpoint_knows_are_its_own(tmp_path: Path):
    from draftsmith.models.dspark import DSpark

    drafter, heads = tiny_drafter()
    config = {**drafter.config, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    folder = native.save(tmp_path / "d", DSpark(config), heads)
    built = setup_of(start(folder), rows_of(6), tmp_path).drafter.config
    for key in ("intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps", "rope_parameters"):
        assert built[key] == config[key], key


def test_heads_that_the_checkpoint_lacks_are_added_and_change_no_logit(tmp_path: Path):
    bare, heads = tiny_drafter(head="none", survival_head=False)
    folder = native.save(tmp_path / "d", bare, heads, dtype=torch.float32)
    setup = setup_of(start(folder), rows_of(6), tmp_path)
    assert setup.drafter.markov_head is not None and not setup.drafter.markov_head.markov_w2.weight.any()
    assert setup.drafter.confidence_head is not None
    assert all(torch.equal(setup.drafter.state_dict()[name], value) for name, value in bare.state_dict().items())
    train(start(folder), setup, tmp_path)


def test_starts_that_mean_something_else_are_refused_in_one_line(tmp_path: Path):
    rows = rows_of(6)
    theirs = deepspec(tmp_path / "deepspec")
    with pytest.raises(
        ValueError, match="drafter.checkpoint: .*layout is unknown: DeepSpec.*name it as checkpoint_layout anchor-first or"
    ) as error:
        setup_of(start(theirs), rows, tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="drafter.checkpoint: .*sample_from_anchor is missing"):
        setup_of(start(zlab(tmp_path / "zlab"), rank=0), rows, tmp_path)
    fill_in = make_native(tmp_path / "fill")
    edit(fill_in, lambda config: config.update(sample_from_anchor=False))
    with pytest.raises(ValueError, match="fill-in drafter and training is anchor-first"):
        setup_of(start(fill_in), rows, tmp_path)
    other = make_native(tmp_path / "other")
    edit(other, lambda config: config.update(num_target_layers=9))
    with pytest.raises(ValueError, match="taps a target of 9 layers, this one has 3"):
        setup_of(start(other), rows, tmp_path)
    with pytest.raises(ValueError, match=r"target_layer_ids \[0, 1\], the recipe's drafter \[1\]"):
        setup_of(start(make_native(tmp_path / "taps"), tap_layers=(1,)), rows, tmp_path)
    with pytest.raises(ValueError, match="drafter.checkpoint: .*no config.json"):
        setup_of(start(tmp_path / "nothing"), rows, tmp_path)


def test_keys_that_need_a_checkpoint_are_refused_without_one(tmp_path: Path):
    from draftsmith.recipes.check import check_recipe
    from draftsmith.recipes.schema import ConfigError, load_recipe

    for change, words in (("lora_rank=4", "drafter.lora_rank: 4 needs drafter.init checkpoint, got target"),
                          ("checkpoint_layout=anchor-first", "drafter.checkpoint_layout: 'anchor-first' needs")):  # fmt: skip
        loaded = load_recipe("quickstart", [f"drafter.{change}", f"output={tmp_path}"])
        with pytest.raises(ConfigError, match=words):
            check_recipe(loaded.value, loaded.given)
