"""The CPU kernels: right values, and the same bits whatever the batch, width, padding, chunking and thread count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftsmith.runtime import kernels
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.kernels import PackedLinear, build
from draftsmith.runtime.weights import stack_weights
from tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not kernels.available(torch.float32), reason=str(kernels.problem(torch.float32)))


def need(dtype: torch.dtype) -> None:
    if not kernels.available(dtype):
        pytest.skip(str(kernels.problem(dtype)))


@pytest.fixture(params=["tiles", "dots"])
def bf16_path(request):
    """Both bf16 code paths: AMX tiles, and the dot products used where there are none."""
    wanted = build.Features.BF16_TILES if request.param == "tiles" else build.Features.BF16_DOT
    if not build.features() & wanted:
        pytest.skip(f"no {request.param} on this CPU")
    build.library().ds_init(int(request.param == "tiles"))
    yield request.param
    build.library().ds_init(1)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("n,k", [(32, 32), (97, 64), (160, 100), (31, 33), (64, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_float32(n: int, k: int, bias: bool):
    weight, b = randn(n, k, seed=1), randn(n, seed=2) if bias else None
    x = randn(3, 25, k, seed=3)
    want = F.linear(x.double(), weight.double(), None if b is None else b.double())
    torch.testing.assert_close(PackedLinear(weight, b)(x).double(), want, atol=1e-5 * k**0.5, rtol=0)


@pytest.mark.parametrize("n,k", [(32, 32), (97, 64), (160, 100), (31, 34), (64, 1536)])
def test_linear_bf16(n: int, k: int, bf16_path: str):
    weight, b, x = randn(n, k, seed=1, dtype=torch.bfloat16), randn(n, seed=2), randn(37, k, seed=3, dtype=torch.bfloat16)
    want = F.linear(x.double(), weight.double(), b.double())
    layer = PackedLinear(weight, b)
    torch.testing.assert_close(layer(x, as_float=True).double(), want, atol=1e-5 * k**0.5, rtol=0)
    assert torch.equal(layer(x), layer(x, as_float=True).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_do_not_depend_on_each_other(dtype: torch.dtype):
    need(dtype)
    layer, x = PackedLinear(randn(80, 224, seed=1, dtype=dtype)), randn(70, 224, seed=3, dtype=dtype)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(70)])
    for rows in (2, 3, 8, 12, 13, 16, 17, 31, 32, 33, 48, 49, 70):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


CASES = {
    "llama": ("llama", dict(hidden_size=96, head_dim=64, num_attention_heads=6, intermediate_size=112)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "mistral": ("mistral", dict(sliding_window=37, head_dim=32, num_key_value_heads=1)),
}


def decoders(case: str, dtype: torch.dtype):
    need(dtype)
    model = tiny_model(CASES[case][0], **CASES[case][1])
    return Decoder.from_target(model, dtype=dtype, tap_layers=(0, 2), backend="kernels"), model


def text(batch: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def same(a, b) -> bool:
    return torch.equal(a.logits, b.logits) and torch.equal(a.taps, b.taps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_block_equals_token_by_token_bitwise(case: str, dtype: torch.dtype):
    decoder, _ = decoders(case, dtype)
    tokens, cache = text(1, 150), decoder.new_cache(2, 200)
    decoder.forward(tokens[:, :124], cache, [0], [0], logits="none")
    decoder.forward(tokens[:, :124], cache, [1], [0], logits="none")
    block = decoder.forward(tokens[:, 124:140], cache, [0], [124], taps=True)  # crosses an attention chunk (128)
    for j in range(16):
        one = decoder.forward(tokens[:, 124 + j : 125 + j], cache, [1], [124 + j], taps=True)
        assert torch.equal(one.logits[:, 0], block.logits[:, j]) and torch.equal(one.taps[:, 0], block.taps[:, j]), j
    assert torch.equal(cache.k[:, 0, :, :140], cache.k[:, 1, :, :140])
    assert torch.equal(cache.values()[:, 0, :, :140], cache.values()[:, 1, :, :140])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_rows_do_not_depend_on_the_batch_bitwise(case: str, dtype: torch.dtype):
    decoder, _ = decoders(case, dtype)
    lengths = [130, 3, 61, 400, 257]
    tokens, block = text(5, 400), text(5, 8, seed=6)
    cache, alone = decoder.new_cache(7, 500), decoder.new_cache(1, 450)
    rows = torch.tensor([4, 0, 6, 2, 1])
    for b, n in enumerate(lengths):
        decoder.forward(tokens[b : b + 1, :n], cache, rows[b : b + 1], [0], logits="none")
    together = decoder.forward(block, cache, rows, torch.tensor(lengths), taps=True)
    for b, n in enumerate(lengths):
        decoder.forward(tokens[b : b + 1, :n], alone, [0], [0], logits="none")
        one = decoder.forward(block[b : b + 1], alone, [0], [n], taps=True)
        assert torch.equal(one.logits[0], together.logits[b]) and torch.equal(one.taps[0], together.taps[b]), b
        narrow = decoder.forward(block[b : b + 1, :3], alone, [0], [n], taps=True)
        assert torch.equal(narrow.logits[0], together.logits[b, :3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_chunked_prefill_equals_one_pass_bitwise(case: str, dtype: torch.dtype):
    decoder, _ = decoders(case, dtype)
    tokens, cache = text(1, 300), decoder.new_cache(3, 300)
    whole = decoder.forward(tokens, cache, [0], [0], taps=True)
    for slot, cuts in ((1, [0, 128, 256, 300]), (2, [0, 7, 100, 131, 132, 300])):
        parts = [decoder.forward(tokens[:, a:b], cache, [slot], [a], taps=True) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat([p.logits for p in parts], 1), whole.logits)
        assert torch.equal(torch.cat([p.taps for p in parts], 1), whole.taps)
    last = decoder.forward(tokens, cache, [0], [0], logits="last", last=torch.tensor([77]))
    assert torch.equal(last.logits[:, 0], whole.logits[:, 77])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_the_bits(dtype: torch.dtype):
    decoder, _ = decoders("llama", dtype)
    tokens, before, results = text(2, 290), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = decoder.new_cache(2, 320)
            decoder.forward(tokens[:, :280], cache, [0, 1], [0, 0], logits="none")
            results.append(decoder.forward(tokens[:, 280:], cache, [1, 0], [280, 280], taps=True))
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_at_least_as_exact_as_transformers(case: str, bf16_path: str):
    """Against float32 with the same bf16-rounded weights, the mean logit error is below that of transformers in bf16."""
    model = tiny_model(CASES[case][0], **CASES[case][1]).bfloat16()
    tokens = text(2, 200)
    plain = model(input_ids=tokens).logits.float()
    decoder = Decoder.from_target(model, dtype=torch.bfloat16, backend="kernels")
    got = decoder.forward(tokens, decoder.new_cache(2, 256), [0, 1], [0, 0]).logits
    want = model.float()(input_ids=tokens).logits
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < (plain - want).abs().mean()


def draft_reference(weights, features, block, start):
    """One row: block states [W,H] attend to all features before `start` and to each other; plain float32 torch."""
    half = weights.head_dim // 2

    def norm(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weights.eps) * w

    def rotate(x, positions):
        angle = positions[:, None].float() * weights.inv_freq
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def key_value(layer, x, positions):
        split = [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads]
        q, k, v = F.linear(x, layer.qkv).view(len(x), -1, weights.head_dim).split(split, 1)
        return rotate(norm(q, layer.q_norm), positions), rotate(norm(k, layer.k_norm), positions), v

    before, here = torch.arange(start), torch.arange(start, start + len(block))
    for layer in weights.layers:
        q, k, v = key_value(layer, norm(block, layer.input_norm), here)
        _, ck, cv = key_value(layer, features, before)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            torch.cat((ck, k)).transpose(0, 1),
            torch.cat((cv, v)).transpose(0, 1),
            scale=weights.attention_scale,
            enable_gqa=True,
        )
        block = block + F.linear(out.transpose(0, 1).flatten(1), layer.out)
        gate, up = F.linear(norm(block, layer.post_norm), layer.gate_up).chunk(2, -1)
        block = block + F.linear(F.silu(gate) * up, layer.down)
    return norm(block, weights.final_norm)


def test_draft_block_over_injected_context():
    from draftsmith.runtime.kernels.stack import FusedStack

    weights = stack_weights(tiny_model("qwen3", head_dim=32), torch.float32)
    stack = FusedStack(
        weights.layers,
        weights.final_norm,
        embedding=None,
        head=None,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        attention_scale=weights.attention_scale,
        eps=weights.eps,
        inv_freq=weights.inv_freq,
    )
    cache, features, block = stack.new_cache(3, 256), randn(2, 140, 64, seed=1), randn(2, 7, 64, seed=2)
    rows = torch.tensor([2, 0])
    stack.write_context(features[:, :90], cache, rows, torch.tensor([0, 0]))
    stack.write_context(features[:, 90:], cache, rows, torch.tensor([90, 90]))
    for starts in ([140, 90], [131, 7]):  # the second: rolled back
        _, _, got = stack.forward(block, cache, rows, torch.tensor(starts), hidden=True, causal=False)
        assert got is not None
        for b, start in enumerate(starts):
            stack.write_context(features, cache, rows, torch.tensor([0, 0]))  # the block's own entries are overwritten
            torch.testing.assert_close(
                got[b], draft_reference(weights, features[b, :start], block[b], start), atol=1e-4, rtol=1e-4
            )


@pytest.mark.target
def test_smollm2_bf16_text_and_bits():
    """Real target: greedy text in blocks of 8 equals one token at a time in bf16, and errors stay below transformers'."""
    need(torch.bfloat16)
    from draftsmith.models.config import TargetConfig
    from draftsmith.models.target import load_target

    target = load_target(TargetConfig(dtype="bfloat16"))
    decoder = Decoder.from_target(target.model, dtype=torch.bfloat16, backend="kernels")
    ids = target.tokenizer("The capital of France is", return_tensors="pt").input_ids
    cache = decoder.new_cache(2, 128)
    logits, length, out, rows = decoder.forward(ids, cache, [0], [0]).logits[:, -1], ids.shape[1], [], []
    for _ in range(24):
        out.append(int(logits.argmax()))
        rows.append(logits)
        logits = decoder.forward(torch.tensor([[out[-1]]]), cache, [0], [length]).logits[:, -1]
        length += 1
    decoder.forward(ids, cache, [1], [0], logits="none")
    block = [decoder.forward(torch.tensor([out[i : i + 8]]), cache, [1], [ids.shape[1] + i]).logits[0] for i in (0, 8, 16)]
    assert torch.equal(torch.cat(block)[:-1], torch.cat(rows)[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_stack_equals_the_drafter(dtype: torch.dtype):
    need(dtype)
    from draftsmith.models.dspark import DSpark
    from draftsmith.runtime.kernels.draft import draft_stack

    config = dict(
        hidden_size=64, vocab_size=97, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96,
        num_hidden_layers=2, rms_norm_eps=1e-6, block_size=5, sample_from_anchor=True, mask_token_id=0, target_layer_ids=[0, 2],
        markov_rank=0, markov_head_type="vanilla", enable_confidence_head=False, confidence_head_with_markov=False,
        rope_theta=10000.0, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = DSpark(config).eval().requires_grad_(False)
    taps, embedding, previous = randn(2, 160, 128, seed=1), randn(97, 64, seed=2), text(2, 15).view(2, 3, 5)
    anchors = torch.tensor([[1, 128, 150], [40, 90, 155]])
    want = drafter.unroll(taps=taps, anchors=anchors, previous_tokens=previous, embedding=embedding).hidden
    drafter = drafter.to(dtype)
    stack = draft_stack(drafter)
    cache = stack.new_cache(3, 200)
    rows, context = torch.tensor([2, 0]), drafter.context_features(taps.to(dtype))
    tolerance = 2e-4 if dtype == torch.float32 else 0.15
    for a in range(3):
        stack.write_context(context, cache, rows, torch.tensor([0, 0]))
        block = drafter.block_inputs(previous[:, a, 0], embedding.to(dtype))
        _, _, got = stack.forward(block, cache, rows, anchors[:, a], hidden=True, causal=False)
        torch.testing.assert_close(got.float(), want[:, a], atol=tolerance, rtol=0)


def wide_drafter(dtype: torch.dtype, **changes):
    """A drafter and heads of sizes the kernels take."""
    from drafters import tiny_drafter

    drafter, heads = tiny_drafter(tiny_model(head_dim=32), reduced=True, **changes)
    return drafter.to(dtype), heads.to(dtype)


def backbones(dtype: torch.dtype, slots: int = 4, length: int = 200):
    from draftsmith.runtime.backbone import KernelBackbone, TorchBackbone

    drafter, heads = wide_drafter(dtype)
    return drafter, [kind(drafter, heads, slots, length) for kind in (KernelBackbone, TorchBackbone)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_backbone_equals_pytorch(dtype: torch.dtype):
    need(dtype)
    from draftsmith.runtime.backbone import Part

    drafter, both = backbones(dtype)
    taps, first = randn(2, 9, 128, seed=1).to(dtype), randn(1, 130, 128, seed=2).to(dtype)
    anchors, positions = torch.tensor([7, 9]), torch.tensor([137, 4])
    found = []
    for backbone in both:
        backbone.write_context([Part(3, 0, 130, first, 0)])
        backbone.write_context([Part(3, 130, 3, taps, 0), Part(0, 0, 4, taps, 1), Part(3, 133, 4, taps, 1)])
        found.append(
            [[t.clone() for t in backbone.block([3, 0], anchors, positions, 137, n, skip)] for n, skip in ((5, 0), (3, 1))]
        )
    for (hidden, base), (want_hidden, want_base) in zip(*found, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(hidden.float(), want_hidden.float(), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(base, want_base, atol=tolerance * 4, rtol=tolerance)
    assert [t.shape[1] for t in found[0][1]] == [2, 2]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_projection_rounds_as_the_unfused_one(dtype: torch.dtype):
    need(dtype)
    from draftsmith.runtime.backbone import Part

    drafter, (fused, _) = backbones(dtype)
    taps, stack = randn(1, 40, 128, seed=1).to(dtype), fused.stack
    fused.write_context([Part(1, 0, 40, taps, 0)])
    features = drafter.hidden_norm(PackedLinear(drafter.fc.weight)(taps))
    stack.write_context(features, fused.cache, torch.tensor([2]), torch.tensor([0]))
    for cache in (fused.cache.k, fused.cache.v):
        assert cache[:, 1].abs().amax() > 0.1
        if dtype == torch.float32:
            torch.testing.assert_close(cache[:, 1], cache[:, 2], atol=1e-5, rtol=0)
        else:  # all but the last bit: the norm's sum is taken in another order
            torch.testing.assert_close(cache[:, 1].float(), cache[:, 2].float(), atol=0.02, rtol=2**-7)
            assert (cache[:, 1] == cache[:, 2]).float().mean() > 0.95


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_backbone_does_not_depend_on_the_batch_bitwise(dtype: torch.dtype):
    need(dtype)
    from draftsmith.runtime.backbone import Part

    _, (together, _) = backbones(dtype)
    _, (alone, _) = backbones(dtype)
    taps, lengths, slots = randn(3, 40, 128, seed=1).to(dtype), [40, 1, 17], [3, 0, 2]
    together.write_context([Part(slots[b], 0, lengths[b], taps, b) for b in range(3)])
    anchors, positions = torch.tensor([7, 9, 11]), torch.tensor(lengths)
    hidden, base = (t.clone() for t in together.block(slots, anchors, positions, 40, 5))
    for b in range(3):
        for j in range(lengths[b]):  # one position at a time
            alone.write_context([Part(1, j, 1, taps[b : b + 1, j:], 0)])
        one, logits = alone.block([1], anchors[b : b + 1], positions[b : b + 1], 40, 5)
        assert torch.equal(one[0], hidden[b]) and torch.equal(logits[0], base[b])


@torch.no_grad()
def test_a_wrong_slot_token_or_position_is_refused():
    from draftsmith.runtime.backbone import Part

    _, (backbone, _) = backbones(torch.float32)
    with pytest.raises(AssertionError, match="rows out of range"):
        backbone.write_context([Part(4, 0, 2, randn(1, 2, 128), 0)])
    for rows, token, position, name in (
        ([4], 1, 0, "rows"),
        ([0], 97, 0, "tokens"),
        ([0], -1, 0, "tokens"),
        ([0], 1, -1, "starts"),
    ):
        with pytest.raises(AssertionError, match=f"{name} out of range"):
            backbone.block(rows, torch.tensor([token]), torch.tensor([position]), None, 5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_native_proposer_equals_the_pytorch_one(temperature: float, monkeypatch):
    from draftsmith.runtime import backbone as parts
    from draftsmith.runtime import dspark
    from draftsmith.runtime.calibration import Calibration, Entry, Setting
    from draftsmith.runtime.config import SamplingParams
    from draftsmith.runtime.sampling import SamplingBatch

    knots = tuple(((0.0, 0.0), (0.4, 0.3), (0.4, 0.5), (1.0, 0.9)) for _ in range(5))
    slope = (1.0, 0.5, 2.0, 1.0, 1.5)
    entries = [
        Entry(Setting(0.0, 0, 1.0, "block"), "isotonic", slope, (0.1,) * 5, knots),
        Entry(Setting(1.0, 0, 1.0, "block"), "platt", slope, (-0.2,) * 5),
    ]
    drafter, heads = wide_drafter(torch.float32)
    batch = SamplingBatch.build([SamplingParams(temperature=t, seed=3) for t in (temperature, 0.0)], [12, 5])

    def draft(calibration: Calibration | None):
        proposer = dspark.DSparkProposer(
            drafter, heads, slots=2, max_context=64, with_survival=True, calibration=calibration
        )  # fmt: skip
        for row, length in enumerate((12, 5)):
            proposer.begin(row, [5] * length, randn(length, 128, seed=row))
        return proposer, proposer.propose([0, 1], torch.tensor([7, 9]), batch, 4)

    for calibration in (None, Calibration(5, entries)):
        monkeypatch.undo()
        native, got = draft(calibration)
        assert isinstance(native.backbone, parts.KernelBackbone) and native._chain is not None
        monkeypatch.setattr(dspark, "available", lambda dtype: False)
        monkeypatch.setattr(parts.kernels, "available", lambda dtype: False)
        monkeypatch.setattr(parts, "KernelBackbone", parts.TorchBackbone)
        plain, want = draft(calibration)
        assert plain._chain is None
        assert torch.equal(got.tokens, want.tokens) and got.lengths.tolist() == want.lengths.tolist() == [4, 4]
        torch.testing.assert_close(got.survival_logits, want.survival_logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(got.survival, want.survival, atol=1e-4, rtol=0)
        assert (got.probs is None) == (want.probs is None) == (temperature == 0)
        if got.probs is not None:
            torch.testing.assert_close(got.probs, want.probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        Calibration(5, entries).apply(got.survival_logits, batch.temperature), got.survival, atol=1e-6, rtol=0
    )
