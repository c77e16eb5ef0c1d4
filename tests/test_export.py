"""Exported drafters: bit-equal round trips, and a refusal for everything that would be silently slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters import DRAFT_IDS, slot_logits, tiny_drafter
from safetensors.torch import load_file, save_file

from draftsmith.models.draft import FrozenHeads
from draftsmith.models.export import native
from tiny import tiny_model

MODELS = {
    "untied": dict(),
    "tied": dict(tie_word_embeddings=True),
}


def weights(model) -> dict[str, torch.Tensor]:
    return dict(embedding=model.get_input_embeddings().weight, lm_head=model.get_output_embeddings().weight)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    drafter, heads = tiny_drafter()
    return native.save(tmp_path / "drafter", drafter, heads, dtype=torch.float32, extra={"steps": 3})


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json; None deletes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the file (`__` stands for a dot); None deletes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def probe() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return dict(
        taps=torch.randn(2, 12, 128, generator=generator), anchors=torch.tensor([[4, 7], [0, 11]]),
        previous_tokens=torch.randint(3, 96, (2, 2, 5), generator=generator),
    )  # fmt: skip


@torch.no_grad()
def logits_of(drafter, heads: FrozenHeads) -> torch.Tensor:
    out = drafter.unroll(**probe(), embedding=heads.embedding)
    return torch.cat((slot_logits(drafter, heads, out), out.survival_logits[..., None]), dim=-1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_a_round_trip_is_bit_equal(tmp_path: Path, kind: str, reduced: bool, head: str):
    model = tiny_model(**MODELS[kind])
    drafter, heads = tiny_drafter(model, reduced=reduced, head=head)
    folder = native.save(tmp_path / "drafter", drafter, heads, dtype=torch.float32)
    loaded, loaded_heads = native.load(folder, **weights(model))
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert loaded.config == {**drafter.config, "dtype": "float32"} and not loaded.training
    assert torch.equal(logits_of(loaded, loaded_heads), logits_of(drafter, heads))
    assert (loaded_heads.lm_head.data_ptr() == loaded_heads.embedding.data_ptr()) == (kind == "tied")
    again = native.save(tmp_path / "again", loaded, loaded_heads, dtype=torch.float32)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_fresh_process_computes_the_same_logits(tmp_path: Path):
    model = tiny_model()
    drafter, heads = tiny_drafter(model, reduced=True)
    native.save(tmp_path / "drafter", drafter, heads, dtype=torch.float32)
    save_file({k: v.clone() for k, v in weights(model).items()}, tmp_path / "target.safetensors")
    program = (
        "import sys, torch; from pathlib import Path; from safetensors.torch import load_file, save_file\n"
        "sys.path.insert(0, sys.argv[2]); torch.set_num_threads(1)\n"
        "from draftsmith.models.export import native; from test_export import logits_of\n"
        "folder = Path(sys.argv[1]); found = native.load(folder / 'drafter', **load_file(folder / 'target.safetensors'))\n"
        "save_file({'logits': logits_of(*found)}, folder / 'logits.safetensors')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, Path(__file__).parent], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(found, logits_of(drafter, heads), rtol=0, atol=1e-6)


def test_bfloat16_rounds_once_and_stays_readable_beside_a_float32_target(tmp_path: Path):
    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    folder = native.save(tmp_path / "drafter", drafter, heads)
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    loaded, _ = native.load(folder, **weights(model))
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float())


def test_the_file_states_its_frame_in_every_key_a_reader_defaults(exported: Path):
    config = json.loads((exported / "config.json").read_text())
    stated = dict(
        architectures=["Qwen3DSparkModel"], sample_from_anchor=True, block_size=5, mask_token_id=96, target_layer_ids=[0, 1],
        num_target_layers=3, markov_rank=8, markov_head_type="vanilla", enable_confidence_head=True,
        confidence_head_with_markov=True, tie_word_embeddings=False, vocab_size=97, head_dim=16, num_hidden_layers=2,
        num_key_value_heads=2, hidden_act="silu", dtype="float32", draft_vocab_size=97, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    assert {k: config[k] for k in stated} == stated
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert json.loads((exported / "draftsmith.json").read_text()) == {"steps": 3}


def test_a_reduced_vocabulary_is_written_as_offsets(tmp_path: Path):
    model = tiny_model()
    drafter, heads = tiny_drafter(model, reduced=True)
    tensors = load_file(native.save(tmp_path / "drafter", drafter, heads) / "model.safetensors")
    columns = torch.arange(len(DRAFT_IDS))
    assert torch.equal(columns + tensors["d2t"], DRAFT_IDS) and tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["t2d"].nonzero().flatten(), DRAFT_IDS) and len(tensors["t2d"]) == 97
    assert tensors["lm_head.weight"].shape == (len(DRAFT_IDS), 64)
    assert tensors["markov_head.markov_w1.weight"].shape[0] == 97 and tensors["embed_tokens.weight"].shape[0] == 97
    _, loaded = native.load(tmp_path / "drafter", **weights(model))
    assert torch.equal(loaded.draft_ids, DRAFT_IDS) and torch.equal(loaded.draft_head, model.lm_head.weight[DRAFT_IDS])


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", native.REQUIRED)
def test_a_missing_key_of_the_frame_is_refused(exported: Path, key: str):
    edit(exported, **{key: None})
    with pytest.raises(ValueError, match=f"missing {key}"):
        native.load(exported, **weights(tiny_model()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            dict(sample_from_anchor=False, markov_head_type="rnn"),
            "sample_from_anchor: false needs block_size 2 or more and no rnn",
        ),
        (dict(sample_from_anchor=False, block_size=1), "sample_from_anchor: false needs block_size 2 or more"),
        (dict(sample_from_anchor="true"), "sample_from_anchor: 'true'"),
        (dict(mask_token_id=97), r"mask_token_id: 97 outside \[0, 96\]"),
        (dict(mask_token_id=-1), r"mask_token_id: -1"),
        (dict(target_layer_ids=[0, 2]), r"\[0, 2\] must be strictly ascending layer ids in \[0, 1\]"),
        (dict(target_layer_ids=[1, 0]), r"\[1, 0\]"),
        (dict(markov_head_type=None), "markov_head_type: None"),
        (dict(markov_head_type="gru"), "markov_head_type: 'gru'"),
        (dict(markov_rank=0), "confidence_head.proj.weight has shape"),
        (dict(markov_rank=0, enable_confidence_head=False), "unknown.*markov_head"),
        (dict(num_hidden_layers=3), "missing.*layers.2"),
        (dict(draft_vocab_size=50), "draft_vocab_size: 50 without a d2t"),
        (dict(rope_parameters=None), "missing rope_parameters.rope_theta"),
        (dict(rope_parameters={"rope_type": "default"}), "missing rope_parameters.rope_theta"),
        (dict(layer_types=["sliding_attention"] * 2), "layer_types: .*sliding_attention"),
        (dict(use_sliding_window=True), "layer_types: .* only full_attention is"),
        (dict(hidden_act="gelu"), "hidden_act: 'gelu' is not supported"),
        (dict(attention_bias=True), "attention_bias: true is not supported"),
        (dict(confidence_head_with_markov=None), "confidence_head_with_markov: None must be true or false"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(exported: Path, change: dict, words: str):
    edit(exported, **change)
    with pytest.raises(ValueError, match=words):
        native.load(exported, **weights(tiny_model()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(fc__weight=None), "missing.*fc.weight"),
        (dict(markov_head__markov_w2__weight=None), "missing.*markov_w2"),
        (dict(extra__weight=torch.zeros(2)), "unknown.*extra.weight"),
        (dict(embed_tokens__weight=torch.randn(97, 64)), "embed_tokens.weight is not this target's"),
        (dict(embed_tokens__weight=torch.zeros(97, 64)), "embed_tokens.weight is not this target's"),
        (dict(lm_head__weight=torch.randn(97, 64)), "lm_head.weight is not this target's"),
        (dict(embed_tokens__weight=torch.randn(50, 64)), "embed_tokens.weight is not this target's"),
    ],
)
def test_missing_unknown_and_random_tensors_are_refused(exported: Path, change: dict, words: str):
    edit_tensors(exported, **change)
    with pytest.raises(ValueError, match=words):
        native.load(exported, **weights(tiny_model()))


def test_the_drafter_of_another_target_is_refused(exported: Path):
    with pytest.raises(ValueError, match="not this target's; the drafter belongs to 'tiny'"):
        native.load(exported, **weights(tiny_model(seed=9)))
    with pytest.raises(ValueError, match="not this target's"):
        native.load(exported, **weights(tiny_model(vocab_size=90)))


def test_a_tensor_of_another_shape_is_refused_in_one_line(exported: Path):
    edit_tensors(exported, fc__weight=torch.zeros(64, 64))
    with pytest.raises(ValueError, match=r"fc.weight has shape \(64, 64\), config.json asks for \(64, 128\)") as error:
        native.load(exported, **weights(tiny_model()))
    assert "\n" not in str(error.value)


def test_a_shared_embedding_may_be_left_out(exported: Path):
    edit_tensors(exported, embed_tokens__weight=None, lm_head__weight=None)
    native.load(exported, **weights(tiny_model()))


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no config.json; not an exported drafter"):
        native.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{ broken")
    with pytest.raises(ValueError, match="config.json: broken JSON"):
        native.read_config(tmp_path)


# ---- half-written folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["save_file", "config", "replace"])
def test_a_save_that_fails_leaves_the_old_drafter_whole(exported: Path, monkeypatch, where: str):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    other, heads = tiny_drafter(seed=8)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    if where == "save_file":
        monkeypatch.setattr(native, "save_file", fail)
    elif where == "config":
        monkeypatch.setattr(native.json, "dumps", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        native.save(exported, other, heads, dtype=torch.float32, extra={})
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    monkeypatch.undo()
    native.save(exported, other, heads, dtype=torch.float32)  # leftovers are no obstacle
    loaded, _ = native.load(exported, **weights(tiny_model()))
    assert torch.equal(loaded.fc.weight, other.fc.weight)
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_a_first_save_that_fails_leaves_no_folder_of_the_final_name(tmp_path: Path, monkeypatch):
    drafter, heads = tiny_drafter()
    monkeypatch.setattr(native.json, "dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        native.save(tmp_path / "drafter", drafter, heads)
    assert not (tmp_path / "drafter").exists()
