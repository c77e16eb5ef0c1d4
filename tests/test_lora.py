"""Adapters: the start is the base drafter, only what is named moves, and every way out is an ordinary drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import DRAFT_IDS, tiny_drafter
from safetensors.torch import load_file
from test_export import logits_of, weights
from training import parts_of, rows_of, setup_of, train

from draftsmith.models.export import native
from draftsmith.models.lora import LoraLinear, add_lora, has_lora, merge_state, merged
from tiny import tiny_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


def awake(drafter, **settings):
    """The drafter with adapters that do something."""
    add_lora(drafter, rank=4, alpha=8.0, targets=settings.get("targets", TARGETS), full=settings.get("full", ("markov_head",)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return drafter


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found - want).norm() / want.norm())


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does():
    drafter, heads = tiny_drafter()
    before = logits_of(drafter, heads)
    add_lora(drafter, rank=4, alpha=8.0, targets=TARGETS)
    assert torch.equal(logits_of(drafter, heads), before)
    other, _ = tiny_drafter()
    assert (logits_of(awake(other), heads) - before).abs().max() > 0.05


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_merged_drafter_computes_the_same(tmp_path: Path, head: str, reduced: bool):
    model = tiny_model()
    drafter, heads = tiny_drafter(model, head=head, reduced=reduced)
    plain_names = set(drafter.state_dict())
    awake(drafter)
    want = logits_of(drafter, heads)
    one = merged(drafter)
    assert not has_lora(one) and set(one.state_dict()) == plain_names and has_lora(drafter)
    for name, layer in drafter.named_modules():  # each layer to 1e-6; rounding adds up through the whole of them
        if isinstance(layer, LoraLinear):
            x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(1))
            assert relative(one.get_submodule(name)(x), layer(x)) < 1e-6, name
    assert relative(logits_of(one, heads), want) < 3e-6
    # the file is that of an ordinary drafter, and its d2t that of the base
    folder = native.save(tmp_path / "d", drafter, heads, dtype=torch.float32)
    loaded, loaded_heads = native.load(folder, **weights(model))
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert relative(logits_of(loaded, loaded_heads), want) < 3e-6
    assert not reduced or torch.equal(loaded_heads.draft_ids, DRAFT_IDS)


def test_merging_is_the_formula_in_float32():
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 5), (2, 5), (6, 2)))
    state = {"x.weight": w, "x.lora_a": a, "x.lora_b": b, "x.lora_scale": torch.tensor(0.5), "y.bias": torch.ones(2)}
    found = merge_state(state)
    assert set(found) == {"x.weight", "y.bias"} and found["x.weight"].dtype == torch.bfloat16
    assert torch.equal(found["x.weight"], (w.float() + 0.5 * b.float() @ a.float()).bfloat16())


def test_adapters_draw_no_number_for_their_frozen_weight_and_share_its_storage():
    base = torch.nn.Linear(4, 3)
    torch.manual_seed(7)
    layer = LoraLinear(base, 2, 2.0)
    after = torch.rand(1)
    torch.manual_seed(7)
    torch.nn.init.kaiming_uniform_(torch.empty(2, 4), a=5**0.5)
    assert torch.equal(after, torch.rand(1)) and layer.weight is base.weight


def test_names_that_no_layer_has_are_refused():
    drafter, _ = tiny_drafter()
    with pytest.raises(ValueError, match="drafter.lora_targets: 'qkv' is not allowed; linear layers of the drafter: .*q_proj"):
        add_lora(drafter, rank=4, alpha=8.0, targets=("qkv",))
    with pytest.raises(ValueError, match="'proj' is not allowed"):
        add_lora(drafter, rank=4, alpha=8.0, targets=("proj",), full=("confidence_head",))
    with pytest.raises(ValueError, match="has adapters already"):
        add_lora(awake(drafter), rank=4, alpha=8.0, targets=("fc",))


def test_training_moves_the_adapters_and_the_parts_named_and_exports_a_plain_drafter(tmp_path: Path):
    rows = rows_of(6)
    first = parts_of(drafter=dict(draft_vocab_size=40), train=dict(steps=2))
    base = train(first, setup_of(first, rows, tmp_path / "a"), tmp_path / "a")
    lora = dict(draft_vocab_size=40, init="checkpoint", checkpoint=str(base), lora_rank=4, lora_full=("markov_head",))
    parts = parts_of(drafter=lora, objective=dict(survival=0.0), train=dict(steps=4, checkpoint_every=2))
    setup = setup_of(parts, rows, tmp_path / "b")
    before = {name: value.clone() for name, value in setup.drafter.state_dict().items()}
    tuned = train(parts, setup, tmp_path / "b")
    moved = {name for name, value in setup.drafter.state_dict().items() if not torch.equal(value, before[name])}
    allowed = ("lora_a", "lora_b", "markov_w1.weight", "markov_w2.weight")
    assert moved and all(name.endswith(allowed) for name in moved), moved
    assert {name.rpartition(".")[2] for name in moved} == {"lora_a", "lora_b", "weight"}
    ours, theirs = load_file(base / "model.safetensors"), load_file(tuned / "model.safetensors")
    assert ours.keys() == theirs.keys() and torch.equal(ours["d2t"], theirs["d2t"])
    assert not torch.equal(ours["layers.0.self_attn.q_proj.weight"], theirs["layers.0.self_attn.q_proj.weight"])
    assert torch.equal(ours["norm.weight"], theirs["norm.weight"])
    # a stop in the middle goes on to the same file
    again = setup_of(parts, rows, tmp_path / "b")
    (tmp_path / "b" / "checkpoints" / "step-0000004").rename(tmp_path / "last")
    resumed = load_file(train(parts, again, tmp_path / "b") / "model.safetensors")
    assert all(torch.equal(value, theirs[name]) for name, value in resumed.items())
