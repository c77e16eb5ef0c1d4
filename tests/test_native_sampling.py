"""The native laws, draws and rules against the PyTorch code, which float64 tensors always go through."""

from __future__ import annotations

import pytest
import torch

from draftsmith.runtime import kernels, verify
from draftsmith.runtime import random as counter
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.kernels import sampling as native
from draftsmith.runtime.sampling import SamplingBatch, argmax, draw, probabilities

pytestmark = pytest.mark.skipif(not kernels.available(torch.float32), reason=str(kernels.problem(torch.float32)))
NAN = float("nan")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).clamp(2**-24, 1 - 2**-24)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def settings(*rows):
    temperature, top_k, top_p = zip(*rows, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p)


# Laws.

MIXED = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (0.0, 0, 1.0),
    (1e-31, 0, 1.0),
    (1.0, 5, 1.0),
    (1.3, 0, 0.8),
    (0.8, 40, 0.9),
    (3.0, 1, 1.0),
]


@pytest.mark.parametrize("vocab", [1, 3, 16, 97, 256, 1000, 8192, 50_257, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laws_equal_the_pytorch_ones(vocab, dtype):
    logits = (randn(len(MIXED), 2, vocab) * 3).to(dtype)
    logits[0, 0, vocab // 2 :] = float("-inf") if vocab > 1 else 0.0
    logits[1] = (logits[1].double() * 1e-40).to(dtype)  # subnormal
    probs = probabilities(logits, *settings(*MIXED))
    # truncation looks at the values: it must see the same ones
    expected = probabilities(logits.double(), *settings(*MIXED))
    assert probs.dtype == torch.float32
    assert torch.equal(probs > 0, expected > 1e-46)
    torch.testing.assert_close(probs.double(), expected, atol=1e-7, rtol=2e-5)
    assert float((probs.double().sum(-1) - 1).abs().max()) < 1e-6


def test_extremes_stay_finite_and_weights_below_2_to_the_minus_100_are_zero():
    logits = torch.tensor([[[0.0, -60.0, -69.0, -70.0, -100.0]], [[-1e4, 0.0, 1e4, float("-inf"), 1e4 - 1]]])
    probs = probabilities(logits, torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    expected = logits.double().softmax(-1)
    assert (probs[0, 0] > 0).tolist() == [True, True, True, False, False]
    torch.testing.assert_close(probs[0, 0, :3].double(), expected[0, 0, :3], atol=0, rtol=1e-5)
    torch.testing.assert_close(probs[1].double(), expected[1], atol=1e-7, rtol=0)


def test_a_live_nan_is_not_hidden():
    logits = randn(1, 1, 500)
    logits[0, 0, 123] = NAN
    assert bool(probabilities(logits, *settings((1.0, 0, 1.0))).isnan().all())


def test_top_k_is_decided_by_the_logits_where_their_exponentials_are_equal():
    logits = torch.tensor([[[1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0]]]) * 1e-3
    assert (probabilities(logits, *settings((1.0, 1, 1.0)))[0, 0] > 0).tolist() == [False, True, False, False]
    zeros = torch.tensor([[[-0.0, 0.0, -1.0, 0.0]]])
    assert (probabilities(zeros, *settings((1.0, 1, 1.0)))[0, 0] > 0).tolist() == [True, True, False, True]


@pytest.mark.parametrize("vocab", [300, 40_000])
def test_top_k_keeps_exactly_k_and_top_p_the_least_mass(vocab):
    logits = randn(3, 4, vocab, seed=1) * 2
    for k in (1, 2, 50, 299, vocab, vocab + 5):
        probs = probabilities(logits, *settings(*[(1.0, k, 1.0)] * 3))
        assert bool(((probs > 0).sum(-1) == min(k, vocab)).all())
    full = logits.double().softmax(-1)
    for top_p in (0.1, 0.5, 0.95):
        kept = probabilities(logits, *settings(*[(1.0, 0, top_p)] * 3)) > 0
        mass = (full * kept).sum(-1)
        smallest = full.masked_fill(~kept, 1.0).amin(-1)
        assert bool((mass > top_p - 1e-6).all()) and bool((mass - smallest < top_p + 1e-6).all())


def test_dead_positions_are_skipped_and_rows_do_not_depend_on_the_batch(threads):
    vocab = 33_000
    logits, widths = randn(4, 3, vocab) * 2, [3, 1, 2, 1]
    rows = settings((1.0, 0, 1.0), (0.0, 0, 1.0), (0.5, 20, 0.9), (2.0, 0, 1.0))
    batch = SamplingBatch(*rows, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), False)
    whole, best = batch.probabilities(logits), argmax(logits)
    dirty = logits.clone()
    for b, width in enumerate(widths):
        dirty[b, width:] = NAN
    probs, top = batch.probabilities(dirty, widths), argmax(dirty, widths)
    for b, width in enumerate(widths):
        assert torch.equal(probs[b, :width], whole[b, :width]) and torch.equal(top[b, :width], best[b, :width])
        assert bool((top[b] < vocab).all()) and bool((top[b] >= 0).all())
        alone = probabilities(logits[b : b + 1, :1], *(setting[b : b + 1] for setting in rows))
        assert torch.equal(alone[0, 0], whole[b, 0])  # one row is shared by all threads, twelve are not
    u = rand(4)
    tokens, law = batch.sample(logits[:, 1], u)
    assert torch.equal(law, whole[:, 1]) and torch.equal(tokens, draw(whole[:, 1], u))
    for b in range(4):
        assert int(draw(whole[b, 1], u[b])) == int(tokens[b])


def test_sample_writes_into_a_strided_place_and_takes_strided_logits():
    batch = SamplingBatch.build([SamplingParams(temperature=0.9, seed=i) for i in range(3)], [5, 6, 7])
    logits, u = randn(3, 4, 700), rand(3)
    place = torch.zeros(3, 4, 700)
    tokens, law = batch.sample(logits[:, 2], u, out=place[:, 1])
    assert law.data_ptr() == place[:, 1].data_ptr() and bool((place[:, [0, 2, 3]] == 0).all())
    assert torch.equal(place[:, 1], batch.probabilities(logits[:, 2:3].contiguous())[:, 0])
    assert torch.equal(tokens, draw(place[:, 1], u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab,rank", [(97, 16), (700, 40), (20_000, 64)])
@pytest.mark.parametrize("sampled", [True, False])
def test_the_chain_in_one_call_equals_slot_after_slot(dtype, vocab, rank, sampled, threads):
    if not kernels.available(dtype):
        pytest.skip(str(kernels.problem(dtype)))
    params = [SamplingParams(temperature=t, top_k=k, seed=i) for i, (t, k) in enumerate([(1.0, 0), (0.0, 0), (0.6, 9)])]
    batch = SamplingBatch.build(params, [5, 6, 7])
    w1, w2 = randn(2 * vocab + 1, rank, seed=1).to(dtype), randn(vocab, rank).to(dtype)
    ids, packed = torch.arange(vocab) * 2 + 1, kernels.PackedLinear(w2)
    weight, table, hidden = randn(40, seed=4), randn(len(w1), seed=5), randn(3, 5, 40, seed=6).to(dtype)[:, 1:]
    anchors, base, u = torch.tensor([0, 2 * vocab, 5]), randn(3, 5, vocab, seed=3)[:, :4], rand(3, 4)
    chain = native.Chain(w1, w2, ids, (weight, table))
    tokens, laws, z, survival = chain(anchors, base, batch.native_settings(), u if sampled else None, hidden)
    previous = anchors
    for k in range(4):
        want = hidden[:, k].double() @ weight.double() + table[previous].double()
        torch.testing.assert_close(z[:, k].double(), want, atol=1e-5, rtol=0)
        logits = packed(w1[previous], as_float=True) + base[:, k]
        if sampled:
            token, law = batch.sample(logits, u[:, k])
            assert torch.equal(laws[:, k], law)
        else:
            assert laws is None
            token = argmax(logits)
        assert torch.equal(tokens[:, k], ids[token])
        previous = ids[token]
    torch.testing.assert_close(survival, torch.sigmoid(z).cumprod(dim=1), atol=1e-6, rtol=0)
    for b in range(3):  # the bits of a row are its own
        one = batch.select([b]).native_settings()
        alone = chain(anchors[b : b + 1], base[b : b + 1], one, u[b : b + 1] if sampled else None, hidden[b : b + 1])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, (tokens, laws, z, survival), strict=True) if x is not None)
    plain = chain(anchors, base, batch.native_settings(), u if sampled else None)
    assert torch.equal(plain[0], tokens) and plain[2] is None and plain[3] is None


def test_a_chain_without_ids_and_with_a_bias_for_a_table():
    w1, w2, weight = randn(97, 8), randn(97, 8, seed=1), randn(64, seed=2)
    settings = SamplingBatch.build([SamplingParams()], [3]).native_settings()
    base, hidden, bias = randn(1, 3, 97, seed=3), randn(1, 3, 64, seed=4), torch.tensor([0.5])
    tokens, _, z, _ = native.Chain(w1, w2, None, (weight, bias))(torch.tensor([7]), base, settings, None, hidden)
    torch.testing.assert_close(z[0], hidden[0] @ weight + 0.5, atol=1e-5, rtol=0)
    assert int(tokens[0, 0]) == int((w2 @ w1[7] + base[0, 0]).argmax())
    with pytest.raises(IndexError, match="below the vocabulary of 97"):
        native.Chain(w1, w2)(torch.tensor([97]), base, settings, None)


@pytest.mark.parametrize("vocab", [1, 5, 64, 97, 257, 49_152, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_largest(vocab, dtype, threads):
    logits = randn(3, 2, vocab).to(dtype)
    logits[0, 0] = float("-inf")
    logits[1, 1] = logits[1, 1].abs().neg()
    best = logits.amax(-1, keepdim=True)
    first = torch.where(logits == best, torch.arange(vocab), vocab).amin(-1)
    assert torch.equal(argmax(logits), first)
    assert torch.equal(argmax(logits[:, 1]), first[:, 1])
    assert int(argmax(logits[2, 1])) == int(first[2, 1])


# Draws.


def near_a_border(probs, u, token):
    """Whether u is within rounding of an end of the interval of `token`."""
    cdf = probs.double().cumsum(-1)
    cdf = cdf / cdf[..., -1:]
    high = cdf.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    low = high - (probs.double() / probs.double().sum(-1, keepdim=True)).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return ((u - high).abs() < 2e-6) | ((u - low).abs() < 2e-6)


@pytest.mark.parametrize("vocab", [1, 97, 256, 1000, 49_152, 50_257])
def test_draws_equal_the_pytorch_ones(vocab, threads):
    probs, u = rand(40, vocab, seed=1) ** 8, rand(40, seed=2)
    probs[::2] *= rand(20, vocab, seed=3) < 0.3
    probs[:, vocab // 3] += 1e-3
    token, expected = draw(probs, u), draw(probs.double(), u.double())
    assert bool(((token == expected) | near_a_border(probs, u, token)).all())
    assert float((token == expected).double().mean()) > 0.9
    assert bool((probs.gather(1, token[:, None]) > 0).all())
    assert torch.equal(draw(probs[7], u[7]), token[7])
    scaled = draw(probs * 2**20, u)
    assert torch.equal(scaled, token)


def test_draw_at_the_ends_and_next_to_zeros():
    probs = torch.zeros(4, 1000)
    probs[:, 300], probs[:, 301], probs[:, 800] = 0.25, 0.25, 0.5
    u = torch.tensor([2.0**-24, 0.25, 0.5 - 2**-24, 1 - 2.0**-24])
    assert draw(probs, u).tolist() == [300, 301, 301, 800]
    tiny = torch.zeros(1, 600)
    tiny[0, 511] = 1e-44
    assert int(draw(tiny, torch.tensor([0.999]))) == 511
    for empty in (0.0, NAN):  # no law at all: some token, but one that exists
        assert 0 <= int(draw(torch.full((600,), empty), torch.tensor(0.5))) < 600


# Rules.


def laws(kind, batch, slots, vocab, seed=0, heat=2.0):
    """p [B,G+1,V], q [B,G,Vd] or None, tokens drawn from q, draft_ids."""
    logits = randn(batch, slots + 1, vocab, seed=seed) * heat
    p = logits.softmax(-1)
    if kind == "onehot":
        return p, None, (logits[:, :-1] + randn(batch, slots, vocab, seed=seed + 1)).argmax(-1), None
    ids = None
    draft = logits[:, :-1]
    if kind in ("reduced", "unordered"):
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[: max(1, vocab // 3)]
        ids = ids.sort().values if kind == "reduced" else ids
        draft = draft[..., ids]
    q = (draft + randn(*draft.shape, seed=seed + 2)).softmax(-1)
    tokens = draw(q, rand(batch, slots, seed=seed + 3))
    return p, q, tokens if ids is None else ids[tokens], ids


def thresholds_of(name, p, q, tokens, lengths, ids):
    if name == "token":
        return verify.token_wise_thresholds(p, q, tokens, lengths, ids)
    return verify.block_thresholds(p, q, tokens, lengths, ids)[0]


def double(x):
    return None if x is None else x.double()


KINDS = ["full", "reduced", "unordered", "onehot"]


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [3, 97, 1000])
def test_rules_equal_the_pytorch_ones(name, kind, vocab):
    batch, slots = 200, 5
    p, q, tokens, ids = laws(kind, batch, slots, vocab)
    lengths = torch.randint(0, slots + 1, (batch,), generator=torch.Generator().manual_seed(9))
    p[::7, 1] = torch.nn.functional.one_hot(tokens[::7, 1], vocab).float()  # one-hot laws among the others
    p[3::7, 0] = torch.nn.functional.one_hot((tokens[3::7, 0] + 1) % vocab, vocab).float()
    u, e = rand(batch, slots, seed=5), rand(batch, seed=6)
    h = thresholds_of(name, p, q, tokens, lengths, ids)
    expected = thresholds_of(name, p.double(), double(q), tokens, lengths, ids)
    assert h.dtype == torch.float32
    torch.testing.assert_close(h.double(), expected, atol=3e-6, rtol=1e-5)
    if name == "block":
        reach = verify.block_thresholds(p, q, tokens, lengths, ids)[1]
        torch.testing.assert_close(
            reach.double(), verify.block_thresholds(p.double(), double(q), tokens, lengths, ids)[1], atol=1e-6, rtol=1e-5
        )
    verdict = verify.RULES[name](p, q, tokens, lengths, u, ids)
    # The native decision is the one its own thresholds give, exactly.
    passed = (u <= h) & (h > 0)
    slot = torch.arange(1, slots + 1)
    own = verify.prefix_length(passed) if name == "token" else torch.where(passed, slot, 0).amax(-1)
    assert torch.equal(verdict.accepted, own)
    reference = verify.RULES[name](p.double(), double(q), tokens, lengths, u.double(), ids)
    same = verdict.accepted == reference.accepted
    assert bool((same | ((u - expected).abs() < 1e-5).any(-1)).all()) and float(same.double().mean()) > 0.99
    torch.testing.assert_close(verdict.residual[same].double(), reference.residual[same], atol=1e-5, rtol=1e-4)
    accepted, following = verify.verify_and_draw(name, p, q, tokens, lengths, u, e, ids)
    assert torch.equal(accepted, verdict.accepted)
    expected_next = draw(verdict.residual, e)
    assert bool(((following == expected_next) | near_a_border(verdict.residual, e, following)).all())
    assert bool((verdict.residual.gather(1, following[:, None]) > 0).all())


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_slots_may_hold_anything(name, kind):
    batch, slots, vocab = 60, 4, 130
    p, q, tokens, ids = laws(kind, batch, slots, vocab)
    lengths = torch.randint(0, slots + 1, (batch,), generator=torch.Generator().manual_seed(1))
    u, e = rand(batch, slots, seed=5), rand(batch, seed=6)
    clean = verify.RULES[name](p, q, tokens, lengths, u, ids)
    drawn = verify.verify_and_draw(name, p, q, tokens, lengths, u, e, ids)
    h = thresholds_of(name, p, q, tokens, lengths, ids)
    dead = torch.arange(slots) >= lengths[:, None]
    dirty_p = p.masked_fill(torch.arange(slots + 1)[None, :, None] > lengths[:, None, None], NAN)
    dirty_q = None if q is None else q.masked_fill(dead[..., None], NAN)
    for padding in (-1, 0, vocab, 2**40):
        dirty = tokens.masked_fill(dead, padding)
        verdict = verify.RULES[name](dirty_p, dirty_q, dirty, lengths, u.masked_fill(dead, NAN), ids)
        assert torch.equal(verdict.accepted, clean.accepted) and torch.equal(verdict.residual, clean.residual)
        again = verify.verify_and_draw(name, dirty_p, dirty_q, dirty, lengths, u, e, ids)
        assert torch.equal(torch.stack(again), torch.stack(drawn))
        assert torch.equal(thresholds_of(name, dirty_p, dirty_q, dirty, lengths, ids), h)
    padded = verify.RULES[name](dirty_p, dirty_q, tokens.masked_fill(dead, -1), torch.full_like(lengths, slots), u, ids)
    assert torch.equal(padded.accepted, clean.accepted) and torch.equal(padded.residual, clean.residual)


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "reduced", "onehot"])
def test_rows_do_not_depend_on_batch_or_threads_and_a_part_needs_no_copy(name, kind, threads):
    batch, slots, vocab = 3, 3, 33_000
    p, q, tokens, ids = laws(kind, batch, slots, vocab, heat=1.0)
    lengths = torch.tensor([3, 2, 3])
    u, e = torch.full((batch, slots), 0.6), rand(batch, seed=6)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    verdict = verify.RULES[name](p, q, tokens, lengths, u, ids)
    drawn = torch.stack(verify.verify_and_draw(name, p, q, tokens, lengths, u, e, ids))
    torch.set_num_threads(before)
    together = torch.stack(verify.verify_and_draw(name, p, q, tokens, lengths, u, e, ids))
    assert torch.equal(together, drawn)
    assert torch.equal(verify.RULES[name](p, q, tokens, lengths, u, ids).residual, verdict.residual)
    for b in range(batch):
        at = slice(b, b + 1)
        alone = verify.RULES[name](p[at], None if q is None else q[at], tokens[at], lengths[at], u[at], ids)
        assert torch.equal(alone.residual[0], verdict.residual[b]) and int(alone.accepted) == int(verdict.accepted[b])
    index = torch.tensor([2, 0])
    part = verify.verify_and_draw(
        name, p, None if q is None else q[index], tokens[index], lengths[index], u[index], e[index], ids, rows=index
    )
    assert torch.equal(torch.stack(part), drawn[:, index])


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_draft_of_probability_zero_is_rejected_and_a_wrong_id_is_refused(name):
    p, q, tokens, ids = laws("reduced", 2, 2, 60)
    outside = next(v for v in range(60) if v not in ids.tolist())
    tokens[0, 0] = outside
    q[1, 0, int((ids == tokens[1, 0]).nonzero())] = 0
    u = torch.full((2, 2), 1e-6)
    u[:, 1] = 1.0  # the second slot fails in any case
    lengths = torch.tensor([2, 2])
    assert thresholds_of(name, p, q, tokens, lengths, ids)[:, 0].tolist() == [0, 0] or name == "block"
    verdict = verify.RULES[name](p, q, tokens, lengths, u, ids)
    reference = verify.RULES[name](p.double(), q.double(), tokens, lengths, u.double(), ids)
    assert verdict.accepted.tolist() == reference.accepted.tolist() == [0, 0]
    torch.testing.assert_close(verdict.residual.double(), reference.residual, atol=1e-6, rtol=1e-5)
    tokens[1, 1] = 60
    with pytest.raises(IndexError, match="60"):
        verify.RULES[name](p, q, tokens, lengths, u, ids)


def test_equal_laws_leave_no_noise_residual():
    p, _, _, _ = laws("full", 4, 3, 1000)
    tokens = torch.randint(0, 1000, (4, 3), generator=torch.Generator().manual_seed(0))
    lengths, q = torch.full((4,), 3), p[:, :3].clone()
    for name in verify.RULES:
        assert verify.RULES[name](p, q, tokens, lengths, torch.full((4, 3), 0.999)).accepted.tolist() == [3] * 4
        # u above 1 forces a failure, which equal laws never have: the law is p, not 0/0
        verdict = verify.RULES[name](p, q, tokens, lengths, torch.full((4, 3), 1.5))
        assert torch.equal(verdict.residual, p[:, 0]) and verdict.accepted.tolist() == [0] * 4


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "reduced", "onehot"])
def test_frequencies_of_the_fused_call(name, kind):
    """Two drafted slots and the bonus: the first token follows p_0, and the mean accepted length is what h says."""
    draws, vocab = 200_000, 7
    p, q, _, ids = laws(kind, 1, 2, vocab, seed=4, heat=1.0)
    seeds, positions = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)
    if q is None:
        tokens = p[:, :2].argmax(-1).expand(draws, 2)
        q_rows = None
    else:
        q_rows = q.expand(draws, -1, -1)
        tokens = draw(q_rows, counter.uniforms(seeds, positions, 2, counter.DRAFT))
        tokens = tokens if ids is None else ids[tokens]
    accepted, following = verify.verify_and_draw(
        name, p.expand(draws, -1, -1), q_rows, tokens, torch.full((draws,), 2),
        counter.uniforms(seeds, positions, 2, counter.VERIFY), counter.uniforms(seeds, positions, 1, counter.EMIT)[:, 0], ids,
    )  # fmt: skip
    first = torch.where(accepted > 0, tokens[:, 0], following)
    expected = p[0, 0].double() * draws
    statistic = float(((torch.bincount(first, minlength=vocab) - expected) ** 2 / expected).sum())
    assert statistic < 6 + 5 * 12**0.5, statistic
    second = torch.where(accepted > 1, tokens[:, 1], following)[accepted > 0]
    expected = p[0, 1].double() * len(second)
    statistic = float(((torch.bincount(second, minlength=vocab) - expected) ** 2 / expected).sum())
    # tables without memory: given that a first draft stood, the next token still follows its law
    assert statistic < 6 + 5 * 12**0.5, statistic


# Uniforms, greedy rule, parts of a batch.


def test_uniforms_have_the_bits_of_the_pytorch_code():
    seeds = torch.tensor([0, 1, 2**62, 2**63 - 1, 12345])
    positions = torch.tensor([0, 5, 9, 2**40, 77])
    for stream in (counter.DRAFT, counter.VERIFY, counter.EMIT, 9):
        high = (counter.hash_int64(seeds, positions, 17, stream) >> 41) & (2**23 - 1)
        assert torch.equal(counter.uniforms(seeds, positions, 17, stream), (high.float() + 0.5) * 2.0**-23)
    assert counter.uniforms(seeds[:0], positions[:0], 3, 0).shape == (0, 3)


def test_greedy_rule_on_ragged_rows():
    best = torch.randint(0, 2, (300, 6), generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(-1, 2, (300, 5), generator=torch.Generator().manual_seed(1))
    lengths = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(2))
    accepted, following = verify.greedy(best, tokens, lengths)
    for b in range(300):
        n = 0
        while n < int(lengths[b]) and tokens[b, n] == best[b, n]:
            n += 1
        assert (int(accepted[b]), int(following[b])) == (n, int(best[b, n]))


def test_select_keeps_what_the_host_knows():
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=4, seed=7),
        SamplingParams(temperature=1.0, top_p=0.5, seed=8),
        SamplingParams(),
    ]
    batch = SamplingBatch.build(params, [3, 4, 5, 6])
    assert batch.select([0, 1, 2, 3]) is batch
    part = batch.select([2, 1])
    assert part.temperature.tolist() == pytest.approx([1.0, 0.8]) and part.seeds.tolist() == [8, 7]
    assert part.positions.tolist() == [5, 4] and part.max_position is not None and part.max_position >= 5
    assert (part.all_greedy, part.any_greedy, part.max_top_k, part.any_top_p) == (False, False, 4, True)
    cold = batch.select([3, 0])
    assert (cold.all_greedy, cold.any_greedy, cold.max_top_k, cold.any_top_p) == (True, True, 0, False)
    assert cold.at([9, 9]).params == (params[3], params[0])
    assert batch.select([]).temperature.shape == (0,)
    logits = randn(4, 2, 60)
    assert torch.equal(part.probabilities(logits[[2, 1]]), batch.probabilities(logits)[[2, 1]])
