"""Every serving decoder equals transformers' own forward, over ragged rows, chunks, rollback and sliding windows."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch

from draftsmith.runtime.cache import KVCache
from draftsmith.runtime.decoder import Decoder
from tiny import tiny_model

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    rope_theta=10000.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FUSED = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama-head32": ("llama", dict(head_dim=32, intermediate_size=80)),
    "llama-yarn": ("llama", dict(rope_parameters=YARN, head_dim=32)),
    "llama-llama3-rope": ("llama", dict(rope_parameters=LLAMA3, head_dim=32)),
    "llama-biased-head64": ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=64, num_key_value_heads=1)),
    "qwen2": ("qwen2", dict(head_dim=32, hidden_size=96)),
    "qwen2-sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1, head_dim=32)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "mistral-sliding": ("mistral", dict(sliding_window=5, head_dim=32)),
}
MODULES = {
    "gemma2": ("gemma2", dict(sliding_window=5, head_dim=16)),
    "gemma3": ("gemma3_text", dict(sliding_window=5, head_dim=16)),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {}),
    "olmo2": ("olmo2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "granite": ("granite", dict(logits_scaling=2.0)),
    "smollm3": ("smollm3", {}),
}
CASES = FUSED | MODULES


def tokens_of(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference(model, tokens: torch.Tensor, taps: tuple[int, ...]):
    kept = {}
    layers = next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList))
    hooks = [
        layers[i].register_forward_hook(lambda _m, _a, out, i=i: kept.__setitem__(i, out[0] if isinstance(out, tuple) else out))
        for i in taps
    ]
    logits = model(input_ids=tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([kept[i] for i in taps], dim=-1)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_in_chunks(case: str, backend: str):
    model = tiny_model(CASES[case][0], **CASES[case][1])
    if backend == "kernels" and case not in FUSED:
        with pytest.raises(ValueError, match="kernels"):
            Decoder.from_target(model, dtype=torch.float32, backend=backend)
        return
    try:
        decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=(0, 2), backend=backend)
    except ValueError as error:
        pytest.skip(str(error))  # this machine or this head size has no kernels
    assert decoder.backend == backend
    tokens = tokens_of(2, 40)
    want, want_taps = reference(model, tokens, (0, 2))
    cache = decoder.new_cache(4, 64)
    parts = [
        decoder.forward(tokens[:, a:b], cache, [2, 0], [a, a], taps=True) for a, b in ((0, 23), (23, 24), (24, 32), (32, 40))
    ]
    torch.testing.assert_close(torch.cat([p.logits for p in parts], 1), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat([p.taps for p in parts], 1), want_taps, atol=1e-4, rtol=1e-5)
    last = decoder.forward(tokens[:, 32:], cache, [2, 0], [32, 32], logits="last", last=torch.tensor([7, 2])).logits
    torch.testing.assert_close(last[:, 0], torch.stack((want[0, 39], want[1, 34])), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("case", ["llama-head32", "mistral-sliding", "gemma2"])
def test_ragged_rows_rollback_and_padding(case: str, backend: str):
    model = tiny_model(CASES[case][0], **CASES[case][1])
    if backend == "kernels" and case not in FUSED:
        pytest.skip("module decoder has no kernels")
    try:
        decoder = Decoder.from_target(model, dtype=torch.float32, backend=backend)
    except ValueError as error:
        pytest.skip(str(error))
    texts = [tokens_of(1, n, seed=n) for n in (5, 17, 30)]
    cache, rows = decoder.new_cache(3, 48), [1, 2, 0]
    padded = torch.full((3, 30), 5)
    for b, text in enumerate(texts):
        padded[b, : text.shape[1]] = text
    decoder.forward(padded, cache, rows, [0, 0, 0], logits="none")
    lengths = [t.shape[1] for t in texts]
    decoder.forward(tokens_of(3, 7, seed=9), cache, rows, lengths, logits="none")  # a block that is rejected whole
    block = tokens_of(3, 4, seed=11)
    got = decoder.forward(block, cache, rows, torch.tensor(lengths)).logits
    for b, text in enumerate(texts):
        want = model(input_ids=torch.cat((text, block[b : b + 1]), 1)).logits[0, -4:]
        torch.testing.assert_close(got[b], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_padding_past_the_context_limit_is_harmless(backend: str):
    model = tiny_model("llama", head_dim=32)
    try:
        decoder = Decoder.from_target(model, dtype=torch.float32, backend=backend)
    except ValueError as error:
        pytest.skip(str(error))
    text = tokens_of(1, 31)
    cache = decoder.new_cache(1, 31)
    decoder.forward(text[:, :29], cache, [0], [0], logits="none")
    wide = torch.cat((text[:, 29:], torch.full((1, 8), 7)), 1)  # two real tokens, then padding over the end
    got = decoder.forward(wide, cache, [0], [29]).logits[:, :2]
    torch.testing.assert_close(got, model(input_ids=text).logits[:, 29:], atol=1e-4, rtol=0)
    again = decoder.forward(text[:, 30:], cache, [0], [30]).logits
    torch.testing.assert_close(again, got[:, 1:], atol=1e-5, rtol=0)


def test_bad_arguments():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="backend"):
        Decoder.from_target(model, dtype=torch.float32, backend="cuda")
    with pytest.raises(ValueError, match="tap_layers: 3"):
        Decoder.from_target(model, dtype=torch.float32, tap_layers=(3,))
    with pytest.raises(ValueError, match="max_context: 513"):
        Decoder.from_target(model, dtype=torch.float32, backend="torch").new_cache(1, 513)
    with pytest.raises(ValueError, match="slots=0"):
        KVCache.allocate(layers=1, slots=0, kv_heads=1, head_dim=8, max_context=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="bloom"):
        Decoder.from_target(tiny_model("bloom"), dtype=torch.float32)


def test_fallback_without_kernels(monkeypatch: pytest.MonkeyPatch):
    from draftsmith.runtime.kernels import build

    model = tiny_model("llama", head_dim=32)
    monkeypatch.setenv("DRAFTSMITH_KERNELS", "0")
    build.library.cache_clear()
    build.features.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert Decoder.from_target(model, dtype=torch.float32).backend == "torch"
            assert Decoder.from_target(model, dtype=torch.float32).backend == "torch"
        assert sum("DRAFTSMITH_KERNELS=0" in str(w.message) for w in seen) == 1  # warned, and once
        with pytest.raises(ValueError, match="DRAFTSMITH_KERNELS=0"):
            Decoder.from_target(model, dtype=torch.float32, backend="kernels")
    finally:
        build.library.cache_clear()
        build.features.cache_clear()


@pytest.mark.target
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_smollm2(backend: str):
    from draftsmith.models.config import TargetConfig
    from draftsmith.models.target import load_target

    target = load_target(TargetConfig(dtype="float32"))
    try:
        decoder = Decoder.from_target(target.model, dtype=torch.float32, tap_layers=(1, 20), backend=backend)
    except ValueError as error:
        pytest.skip(str(error))
    ids = target.tokenizer("def fibonacci(n):\n    if n < 2:\n        return n\n", return_tensors="pt").input_ids
    want = target.model(input_ids=ids).logits
    cache = decoder.new_cache(2, 64)
    first = decoder.forward(ids[:, :6], cache, [1], [0]).logits
    rest = decoder.forward(ids[:, 6:], cache, [1], [6], taps=True)
    torch.testing.assert_close(torch.cat((first, rest.logits), 1), want, atol=3e-4, rtol=1e-5)
    features = target.features(ids, None, (1, 20)).taps[:, 6:]
    torch.testing.assert_close(rest.taps, features, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("case", ["llama-head32", "qwen3", "mistral-sliding"])
def test_subset_of_layers(case: str, backend: str):
    """All layers: the full decoder. Some: a model made of only those, with the taps under the target's own indices."""
    model = tiny_model(CASES[case][0], **(CASES[case][1] | dict(num_hidden_layers=5)))
    build = partial(Decoder.from_target, model, dtype=torch.float32, backend=backend)
    try:
        full = build(tap_layers=(3,))
    except ValueError as error:
        pytest.skip(str(error))
    tokens = tokens_of(2, 20)
    whole = full.forward(tokens, full.new_cache(2, 32), [0, 1], [0, 0]).logits
    for same in (build(layers=(0, 1, 2, 3, 4)), full.subset((0, 1, 2, 3, 4))):
        assert torch.equal(same.forward(tokens, same.new_cache(2, 32), [0, 1], [0, 0]).logits, whole)
    fewer = copy.deepcopy(model)
    fewer.model.layers = torch.nn.ModuleList(fewer.model.layers[i] for i in (0, 3, 4))
    fewer.config.num_hidden_layers = 3
    want, want_taps = reference(fewer, tokens, (1,))
    part = build(layers=(0, 3, 4), tap_layers=(3,))
    shared = full.subset((0, 2, 3, 4)).subset((0, 3, 4))
    for decoder in (part, shared):
        cache = decoder.new_cache(2, 32)
        assert decoder.layers == (0, 3, 4) and decoder.num_layers == cache.k.shape[0] == 3
        decoder.forward(tokens[:, :11], cache, [0, 1], [0, 0], logits="none")
        got = decoder.forward(tokens[:, 11:], cache, [0, 1], [11, 11], taps=True)
        torch.testing.assert_close(got.logits, want[:, 11:], atol=1e-4, rtol=0)
        if decoder is part:
            torch.testing.assert_close(got.taps, want_taps[:, 11:], atol=1e-4, rtol=1e-5)
    again = full.forward(tokens, full.new_cache(2, 32), [0, 1], [0, 0], taps=True)
    assert torch.equal(again.logits, whole) and again.taps is not None


def test_bad_subsets():
    model = tiny_model("llama", head_dim=32)
    for layers in ((), (3,), (1, 0), (0, 0), (-1,)):
        with pytest.raises(ValueError, match=r"layers: .* increasing indices in \[0, 2\]"):
            Decoder.from_target(model, dtype=torch.float32, layers=layers)
    with pytest.raises(ValueError, match=r"tap_layers: 1: must be one of \(0, 2\)"):
        Decoder.from_target(model, dtype=torch.float32, layers=(0, 2), tap_layers=(1,))
    with pytest.raises(ValueError, match="needs a fused family"):
        Decoder.from_target(tiny_model("phi3"), dtype=torch.float32, layers=(0,))
    with pytest.raises(ValueError, match="needs a fused family"):
        Decoder.from_target(tiny_model("phi3"), dtype=torch.float32).subset((0,))
