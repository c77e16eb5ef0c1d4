"""One interface to the target: whole, by our kernels, behind a server, quantised; the self-test; split over two ranks."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_chat import chat_tokenizer

from draftsmith.models.config import TargetConfig
from draftsmith.models.target import Target, load_target, probe_texts, self_test
from draftsmith.runtime import kernels
from draftsmith.runtime.state_server import StateServer
from draftsmith.train.target import open_target
from tiny import tiny_model

TAPS = (0, 1)
TEXTS = {f"row-{n}": [(7 * n + 3 * i) % 90 + 3 for i in range(3 + 4 * n)] for n in range(5)}


def on_disk(folder: Path, **changes) -> str:
    tiny_model(**changes).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return on_disk(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def whole(folder) -> Target:
    return load_target(TargetConfig(name=folder, dtype="float32"))


def assert_equal(found, want, atol=1e-5):
    assert list(found) == list(want)
    for key in want:
        torch.testing.assert_close(found[key].taps, want[key].taps, rtol=0, atol=atol * float(want[key].taps.abs().max()))
        torch.testing.assert_close(found[key].last_hidden, want[key].last_hidden, rtol=0, atol=atol * 10)


# ---- the interface --------------------------------------------------------------------------------------------------


def test_states_are_keyed_by_request(whole):
    found = whole.states(TEXTS, TAPS)
    assert list(found) == list(TEXTS) and whole.states({}, TAPS) == {}
    for key, tokens in TEXTS.items():  # each as if it were alone
        plain = whole.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(found[key].taps, torch.cat([plain[1][0], plain[2][0]], -1), rtol=0, atol=1e-4)
        torch.testing.assert_close(found[key].last_hidden, plain[-1][0], rtol=0, atol=1e-4)
    mixed = whole.states(dict(reversed(TEXTS.items())), TAPS)
    assert_equal({key: mixed[key] for key in TEXTS}, found)


def test_a_packed_row_is_its_texts(whole):
    tokens = [token for text in TEXTS.values() for token in text]
    places = [place for text in TEXTS.values() for place in range(len(text))]
    packed = whole.features(torch.tensor([tokens]), None, TAPS, position_ids=torch.tensor([places]))
    alone = whole.states(TEXTS, TAPS)
    want = torch.cat([alone[key].last_hidden for key in TEXTS])
    torch.testing.assert_close(packed.last_hidden[0], want, rtol=0, atol=1e-4)


class Wrong(Target):
    """A target that answers as a broken backend would."""

    def __init__(self, inner: Target, how: str) -> None:
        super().__init__(inner.model, inner.tokenizer, "")
        self.label, self.how = "broken", how

    def states(self, requests, tap_layers):
        if self.how == "swapped":
            return dict(zip(requests, super().states(dict(reversed(requests.items())), tap_layers).values(), strict=True))
        if self.how == "next layer":
            return super().states(requests, tuple(layer + 1 for layer in tap_layers))
        found = super().states(requests, tap_layers)
        last = found["long"].last_hidden.clone()
        last[-1] += 0.1 * last[-1].norm() if self.how == "one position" else 0
        return found | {"long": type(found["long"])(found["long"].taps, last)}


def test_self_test_passes_and_names_what_differs(whole):
    short, long = probe_texts(whole.vocab_size).values()
    assert len(short) != len(long) and len(set(long)) == len(long) and max(long) < whole.vocab_size
    assert self_test(whole, TAPS) < 1e-5
    assert self_test(Wrong(whole, "no"), TAPS) < 1e-5
    for how, said in (("next layer", "the short row of 5 tokens: tap of layer 0"),
                      ("one position", "the long row of 11 tokens: last hidden state")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"target \(broken\): self-test failed at {said} differs .* by [0-9.e-]+"):
            self_test(Wrong(whole, how), TAPS)
    with pytest.raises(AssertionError, match="short"):
        self_test(Wrong(whole, "swapped"), TAPS)


def test_every_run_tests_itself(tmp_path):
    from training import parts_of, rows_of, setup_of

    said = []
    setup_of(parts_of(), rows_of(3), tmp_path)
    from training import stage, tiny_target

    stage.build_setup(parts_of(), tiny_target(), rows_of(3), tmp_path / "b", say=said.append)
    assert any("self-test against a plain forward passed" in line for line in said)
    with pytest.raises(ValueError, match="self-test failed"):
        stage.build_setup(parts_of(), Wrong(tiny_target(), "next layer"), rows_of(3), tmp_path / "c", say=said.append)


# ---- recipe keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(placement="remote"), "server: None is not allowed with placement remote"),
        (dict(server="http://x:1"), "server: 'http://x:1' is not allowed with placement replicated"),
        (dict(quantization="gguf"), "gguf_file: None is not allowed with quantization gguf"),
        (dict(gguf_file="a.gguf"), "gguf_file: 'a.gguf' is not allowed with quantization none"),
        (dict(quantization="bnb4", placement="sharded"), "quantization: bnb4 is not allowed with placement sharded"),
        (dict(extraction="runtime", placement="sharded"), "extraction: runtime is not allowed with placement sharded"),
    ],
)
def test_keys_that_do_not_go_together(keys, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        TargetConfig(**keys)


def test_quantised_without_its_package_is_refused(folder, monkeypatch):
    from draftsmith.models import target

    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"target.quantization: 'bnb4' needs the package bitsandbytes \(pip install"):
        load_target(TargetConfig(name=folder, quantization="bnb4"))
    with pytest.raises(ValueError, match="target.quantization: 'gguf' needs the package gguf"):
        target.load_model(TargetConfig(name=folder, quantization="gguf", gguf_file="x.gguf"))


def test_labels_say_how_it_is_held():
    assert TargetConfig().label == "bfloat16, replicated"
    assert TargetConfig(quantization="bnb4").label == "nf4 weights (bitsandbytes), bfloat16, replicated"
    served = TargetConfig(placement="remote", server="http://h:1", server_kind="sglang")
    assert served.label == "bfloat16, remote at http://h:1 (sglang)"


def test_sharded_needs_a_launch(folder):
    with pytest.raises(ValueError, match="target.placement: 'sharded' needs a launch of several processes"):
        open_target(TargetConfig(name=folder, placement="sharded"))


@pytest.mark.slow
@pytest.mark.target
def test_a_gguf_file_is_a_target(smollm2):
    from draftsmith.models.embedded import find_gguf

    path, _ = find_gguf("smollm2-135m-instruct")
    cfg = TargetConfig(name=str(path.parent), quantization="gguf", gguf_file=path.name, dtype="float32")
    target = load_target(cfg)
    assert target.label == f"weights of {path.name} (GGUF), float32, replicated" and target.quantization == path.name
    assert torch.equal(target.embedding_weight, smollm2.embedding_weight)
    assert self_test(target, (1, 20)) < 1e-5
    assert not getattr(target.model, "is_quantized", False), "plain layers: the runtime's decoders take them"


# ---- by our kernels -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not kernels.available(torch.float32), reason="no AVX-512 kernels here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_kernels_give_the_same_states(tmp_path, dtype):
    folder = on_disk(tmp_path, head_dim=32)
    cfg = TargetConfig(name=folder, dtype=dtype)
    target = open_target(TargetConfig(name=folder, dtype=dtype, extraction="runtime"))
    assert "CPU kernels" in target.label
    assert self_test(target, TAPS) < (1e-5 if dtype == "float32" else 0.03)
    if dtype == "float32":
        assert_equal(target.states(TEXTS, TAPS), load_target(cfg).states(TEXTS, TAPS))
    first = target.states(TEXTS, (1,))  # other taps, and a larger batch after a smaller one
    again = target.states(dict(list(TEXTS.items())[:2]), (1,))
    assert all(torch.equal(first[key].taps, again[key].taps) for key in again)


def test_kernels_that_cannot_serve_are_refused(tmp_path):
    name = on_disk(tmp_path, family="gemma2", head_dim=16, query_pre_attn_scalar=16)
    with pytest.raises(ValueError, match=r"target.extraction: 'runtime' is not possible .*; allowed: transformers"):
        open_target(TargetConfig(name=name, dtype="float32", extraction="runtime"))


# ---- behind a server ------------------------------------------------------------------------------------------------


def remote(folder: str, server: StateServer, kind: str) -> Target:
    return open_target(TargetConfig(name=folder, dtype="float32", placement="remote", server=server.url, server_kind=kind))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_gives_the_same_states(folder, whole, tmp_path, kind):
    with StateServer(whole, TAPS, tmp_path / "states", late=0.05) as server:
        target = remote(folder, server, kind)
        assert target.by_request and not target.whole and target.label.endswith(f"remote at {server.url} ({kind})")
        assert self_test(target, TAPS) < 1e-5
        assert_equal(target.states(TEXTS, TAPS), whole.states(TEXTS, TAPS))
        ids, mask = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
        found, want = target.features(ids, mask, TAPS), whole.features(ids, mask, TAPS)
        torch.testing.assert_close(found.last_hidden[mask], want.last_hidden[mask], rtol=0, atol=1e-4)
        assert not list((tmp_path / "states").glob("*")), "files are removed once they are read"
        with ThreadPoolExecutor(4) as pool:  # several askers at once get their own
            parts = list(pool.map(lambda n: target.states({str(n): [n + 3] * 6}, TAPS), range(12)))
        for part in parts:  # the server is idle by now: it computes with this very model
            key = next(iter(part))
            alone = whole.states({key: [int(key) + 3] * 6}, TAPS)[key]
            torch.testing.assert_close(part[key].last_hidden, alone.last_hidden, rtol=0, atol=1e-4)
        layers = list(target.layers.parameters())
        assert all(p.is_meta for p in layers), "the layers stay on disk"
        with target.whole_layers(1):
            assert torch.equal(target.layers[-1].mlp.up_proj.weight, whole.layers[-1].mlp.up_proj.weight)
        assert torch.equal(target.logits(whole.states(TEXTS, ())["row-1"].last_hidden),
                           whole.logits(whole.states(TEXTS, ())["row-1"].last_hidden))  # fmt: skip


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_of_other_layers_or_weights_is_noticed(folder, whole, tmp_path, kind):
    with StateServer(whole, (1, 2), tmp_path / "states") as server, pytest.raises(ValueError, match="tap of layer 0"):
        self_test(remote(folder, server, kind), TAPS)
    with StateServer(whole, (1,), tmp_path / "states") as server:
        with pytest.raises(RuntimeError, match=r"no hidden states for row 'short': it sent states of shape \(5, "):
            self_test(remote(folder, server, kind), TAPS)
        with pytest.raises(RuntimeError, match="row 'bad'"):
            remote(folder, server, kind).states({"bad": [10_000]}, (1,))
    other = Target(tiny_model(seed=3), chat_tokenizer(), "")
    with StateServer(other, TAPS, tmp_path / "states") as server, pytest.raises(ValueError, match="self-test failed"):
        self_test(remote(folder, server, kind), TAPS)


@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_of_a_served_target_are_copied_to_the_device_once(tied):
    from draftsmith.data.openai_client import OpenAIClient
    from draftsmith.train.target_remote import RemoteTarget

    cfg = TargetConfig(placement="remote", server="http://h:1")
    model = tiny_model(tie_word_embeddings=tied)
    target = RemoteTarget(model, None, "", cfg, OpenAIClient("http://h:1", concurrency=1), "meta")
    assert target.dtype == torch.float32 and not target._heads, "asked for with every request: no copy"
    first = target.embedding_weight
    assert first.is_meta and target.embedding_weight is first
    assert (target.lm_head_weight is first) == tied and target.lm_head_weight is target.lm_head_weight


def test_states_of_other_tokens_are_refused(folder, whole, tmp_path):
    class Mixed(StateServer):
        def write(self, tokens):
            return super().write([*tokens[1:], tokens[0]])

    with StateServer(whole, TAPS, tmp_path) as good, Mixed(whole, TAPS, tmp_path) as server:
        target = remote(folder, good, "vllm")
        target.client = remote(folder, server, "vllm").client
        with pytest.raises(RuntimeError, match="the states of row 'a' are those of other tokens"):
            target.states({"a": [5, 6, 7]}, TAPS)


def test_no_server(folder):
    with pytest.raises(ValueError, match="target.server: http://127.0.0.1:9"):
        open_target(TargetConfig(name=folder, placement="remote", server="http://127.0.0.1:9"))


# ---- split over two ranks -------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_target_split_over_two_ranks(tmp_path):
    for name, tied in (("untied", False), ("tied", True)):
        on_disk(tmp_path / name, tie_word_embeddings=tied)
    worker = str(Path(__file__).with_name("sharded_worker.py"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker, str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for rank in (0, 1):
        marker = tmp_path / f"done-{rank}"
        assert marker.exists(), done.stdout[-3000:] + done.stderr[-6000:]
