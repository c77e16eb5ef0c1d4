"""From logits to laws, from laws to tokens, and the uniforms behind both."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.runtime import random as counter
from draftsmith.runtime import verify
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.sampling import SamplingBatch, argmax, draw, probabilities


def law(logits, temperature=1.0, top_k=0, top_p=1.0, **hints):
    rows = torch.as_tensor(logits)
    rows = rows.reshape(1, -1, rows.shape[-1])
    args = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    return probabilities(rows, *args, **hints)[0]


# Laws.


def reference(logits, temperature, top_k, top_p):
    """The same in plain Python, one row, for logits without ties."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    if temperature == 0:
        return [float(v == order[0]) for v in range(len(logits))]
    order = order[: top_k or len(order)]
    weights = {v: math.exp((logits[v] - logits[order[0]]) / temperature) for v in order}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for v in order:
        if mass < top_p or top_p == 1:
            kept[v] = weights[v] / total
        mass += weights[v] / total
    return [kept.get(v, 0.0) / sum(kept.values()) for v in range(len(logits))]


@pytest.mark.parametrize("vocab", [12, 2000])
def test_mixed_batch_equals_the_reference_row_by_row(vocab):
    generator = torch.Generator().manual_seed(0)
    settings = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 7, 0.6), (5.0, 0, 0.999), (0.0, 3, 0.5)]
    logits = torch.randn(len(settings), 3, vocab, generator=generator) * 2
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    probs = probabilities(logits, temperature, top_k, top_p)
    for row, setting in enumerate(settings):
        for k in range(3):
            expected = torch.tensor(reference(logits[row, k].tolist(), *setting))
            assert torch.allclose(probs[row, k], expected, atol=5e-6), setting
        alone = probabilities(logits[row : row + 1], temperature[row, None], top_k[row, None], top_p[row, None])
        assert torch.equal(alone[0], probs[row])  # nothing depends on the batch
    general = probabilities(logits, temperature, top_k, top_p, any_greedy=True, max_top_k=vocab, any_top_p=True)
    assert torch.allclose(general, probs, atol=1e-7)


def test_known_truncations_and_their_order():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert law(logits, top_p=0.5)[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert law(logits, top_p=0.6)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    # top-k first: .5/.8 = .625 already reaches .6, which it would not without the cut to two.
    assert law(logits, top_k=2, top_p=0.6)[0].tolist() == pytest.approx([1, 0, 0, 0])
    # temperature first: at 1/2 the laws are squared, .25/.365 = .685.
    assert law(logits, temperature=0.5, top_p=0.6)[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert law(logits, top_p=1e-9)[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_ties_stay_together_and_arg_max_takes_the_first():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])
    assert (law(logits, top_k=1)[0] > 0).tolist() == [False, True, False, True, False]
    assert (law(logits, top_p=0.85)[0] > 0).tolist() == [False, True, True, True, True]
    assert law(logits, temperature=0.0)[0].tolist() == [0, 1, 0, 0, 0]


def test_extreme_logits_and_low_precision():
    hot = torch.tensor([-1e4, 0.0, 1e4, float("-inf")])
    for temperature in (1e-6, 1.0, 10.0):
        assert law(hot, temperature=temperature)[0].tolist() == [0, 0, 1, 0]
    half = law(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert half.dtype == torch.float32
    assert torch.allclose(half.sum(-1), torch.ones(3), atol=1e-6)


def test_batch_built_from_requests():
    params = [SamplingParams(), SamplingParams(temperature=0.8, top_k=4, top_p=0.9, seed=7), SamplingParams(top_k=1, top_p=0.1)]
    batch = SamplingBatch.build(params, [3, 4, 5])
    assert (batch.all_greedy, batch.any_greedy, batch.max_top_k, batch.any_top_p) == (False, True, 4, True)
    assert batch.seeds.tolist() == [0, 7, 0]
    assert batch.at(torch.tensor([9, 9, 9])).positions.tolist() == [9, 9, 9]
    logits = torch.randn(3, 2, 30, generator=torch.Generator().manual_seed(0))
    probs = batch.probabilities(logits)
    assert torch.equal(probs[0].amax(-1), torch.ones(2)) and torch.equal(probs[2].amax(-1), torch.ones(2))
    assert int((probs[1] > 0).sum(-1).max()) <= 4
    assert SamplingBatch.build(params[::2], [0, 0]).all_greedy


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": ("",)},
        {"stop": "end"},
        {"stop_token_ids": (-1,)},
        {"ignore_eos": 1},
    ],
)
def test_bad_settings_name_key_and_value(values):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)
    ((key, value),) = values.items()
    assert str(caught.value).startswith(f"{key}: ") and "\n" not in str(caught.value)
    assert repr(value if not isinstance(value, tuple) else value[0]) in str(caught.value)


# Draws.


def test_draw_is_the_inverse_cdf():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(5, 6)
    u = torch.tensor([1e-9, 0.2499, 0.2501, 0.7499, 1 - 2**-24])
    assert draw(probs, u).tolist() == [1, 1, 3, 3, 4]
    assert draw(probs * 3.7, u).tolist() == [1, 1, 3, 3, 4]


def test_draw_never_returns_an_impossible_token():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2000, 300, generator=generator) * (torch.rand(2000, 300, generator=generator) < 0.05)
    probs[:, 150] += 1e-30  # some mass in every row
    edges = torch.tensor([2.0**-24, 1 - 2.0**-24]).repeat(1000)
    for u in (edges, torch.rand(2000, generator=generator).clamp(2**-24, 1 - 2**-24)):
        token = draw(probs, u)
        assert bool((probs.gather(1, token[:, None]) > 0).all())


# Uniforms.


def test_uniforms_are_stateless_and_pinned():
    seeds, positions = torch.tensor([0, 1, 2**62, 0]), torch.tensor([0, 5, 9, 1])
    together = counter.uniforms(seeds, positions, 6, counter.VERIFY)
    assert together.dtype == torch.float32 and together.shape == (4, 6)
    alone = counter.uniforms(seeds[2:3], positions[2:3], 3, counter.VERIFY)
    assert torch.equal(alone[0], together[2, :3])
    assert not torch.equal(together, counter.uniforms(seeds, positions, 6, counter.EMIT))
    # The 64-bit words in plain Python: wrap-around and logical shifts are what they should be.
    assert counter.hash_int64(seeds, positions, 6, counter.VERIFY).tolist() == [
        [_python_hash(s, p, j, counter.VERIFY) for j in range(6)]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]


def _python_hash(seed, position, index, stream):
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((mix((seed + golden) & mask) + (stream + 1) * 0x632BE5AB) & mask)
    state = mix(state ^ ((position * golden) & mask))
    word = mix((state + (index + 1) * golden) & mask)
    return word - 2**64 if word >= 2**63 else word


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniforms_are_uniform_and_independent():
    grid = torch.arange(2000)
    seeds, positions = grid.repeat_interleave(100), torch.arange(100).repeat(2000)
    u = counter.uniforms(seeds, positions, 4, counter.DRAFT)
    assert float(u.min()) > 0 and float(u.max()) < 1
    v = counter.uniforms(seeds, positions, 4, counter.VERIFY)
    cells = (u * 64).long()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; five of them on each side.
    assert 20 < chi_square(torch.bincount(cells.flatten(), minlength=64).double()) < 120
    u3 = u.reshape(2000, 100, 4)
    neighbours = {
        "index": (u[:, 0], u[:, 1]),
        "stream": (u[:, 0], v[:, 0]),
        "position": (u3[:, :-1, 0], u3[:, 1:, 0]),
        "seed": (u3[:-1, :, 0], u3[1:, :, 0]),
        "seed + 1, position - 1": (u3[:-1, 1:, 0], u3[1:, :-1, 0]),
        "index + 1, position - 1": (u3[:, 1:, 0], u3[:, :-1, 1]),
    }
    for name, (a, b) in neighbours.items():
        pairs = (a.flatten() * 8).long() * 8 + (b.flatten() * 8).long()
        assert 20 < chi_square(torch.bincount(pairs, minlength=64).double()) < 120, name
        correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
        assert abs(correlation) < 0.012, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniforms_and_draws_have_the_same_bits_on_cuda():
    seeds, positions = torch.arange(1000) * 2**50, torch.arange(1000)
    here = counter.uniforms(seeds, positions, 8, 1)
    there = counter.uniforms(seeds.cuda(), positions.cuda(), 8, 1)
    assert torch.equal(here, there.cpu())
    probs = torch.rand(1000, 50_000, device="cuda") * (torch.rand(1000, 50_000, device="cuda") < 0.01)
    token = draw(probs, there[:, 0])
    assert bool((probs.gather(1, token[:, None]) > 0).all())


# The sampler and the rules together.

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.2, 0.5, 0.1, 0.2])
DRAWS = 400_000


def one_step(rule, p, q, draws=DRAWS, seed=0):
    """Draft, verify and emit one token `draws` times: (acceptance, output frequencies, drafts)."""
    seeds, positions = torch.full((draws,), seed), torch.arange(draws)
    drafts = draw(q.expand(draws, -1), counter.uniforms(seeds, positions, 1, counter.DRAFT)[:, 0])
    verdict = verify.RULES[rule](
        p.expand(draws, 2, -1),
        q.expand(draws, 1, -1),
        drafts[:, None],
        torch.ones(draws, dtype=torch.int64),
        counter.uniforms(seeds, positions, 1, counter.VERIFY),
    )
    emitted = draw(verdict.residual, counter.uniforms(seeds, positions, 1, counter.EMIT)[:, 0])
    first = torch.where(verdict.accepted > 0, drafts, emitted)
    return float(verdict.accepted.double().mean()), torch.bincount(first, minlength=len(p)) / draws, drafts


def close(frequencies, expected):
    return bool(((frequencies - expected).abs() < 5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9).all())


@pytest.mark.parametrize("rule", ["token", "block"])
def test_acceptance_and_output_law(rule):
    """Case 15: acceptance 1 - TV = 0.65 and the output law p."""
    acceptance, frequencies, _ = one_step(rule, P, Q)
    assert acceptance == pytest.approx(0.65, abs=0.004)
    assert close(frequencies, P)
    assert not close(frequencies, Q)


def test_arg_max_draft_with_an_equality_test_accepts_less():
    drafts = torch.full((DRAWS,), int(Q.argmax()))
    u = counter.uniforms(torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS), 1, counter.EMIT)[:, 0]
    drawn = draw(P.expand(DRAWS, -1), u)
    assert float((drawn == drafts).double().mean()) == pytest.approx(0.30, abs=0.004)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_same_after_temperature_and_top_k(rule):
    args = torch.tensor([0.7]), torch.tensor([3]), torch.tensor([1.0])
    p, q = (probabilities(x.log()[None, None], *args)[0, 0] for x in (P, Q))
    acceptance, frequencies, drafts = one_step(rule, p, q)
    assert acceptance == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.004)
    assert close(frequencies, p) and float(p[3]) == 0.0
    assert bool((q[drafts] > 0).all())


def test_temperature_zero_makes_the_draft_the_arg_max():
    args = torch.tensor([0.0]), torch.tensor([0]), torch.tensor([1.0])
    p, q = (probabilities(x.log()[None, None], *args)[0, 0] for x in (P, Q))
    acceptance, frequencies, drafts = one_step("token", p, q, draws=1000)
    assert acceptance == 0.0 and set(drafts.tolist()) == {1}
    assert frequencies.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chain_frequencies_in_float32(rule):
    """Two slots and the bonus, ragged lengths, reduced draft vocabulary: three tokens follow the target's joint law."""
    draws = 200_000
    generator = torch.Generator().manual_seed(3)
    p_table = torch.softmax(torch.randn(4, 4, 4, generator=generator), -1)  # law of slot k given the token before it
    ids = torch.tensor([3, 0, 1])
    q_table = torch.softmax(p_table[..., ids].log() + torch.randn(4, 4, 3, generator=generator), -1)
    seeds, positions = torch.ones(draws, dtype=torch.int64), torch.arange(draws)
    u = counter.uniforms(seeds, positions, 2, counter.DRAFT)
    before, tokens = torch.zeros(draws, dtype=torch.int64), []
    for k in range(2):
        tokens.append(ids[draw(q_table[k, before], u[:, k])])
        before = tokens[-1]
    chain = torch.stack(tokens, 1)
    previous = torch.cat([torch.zeros(draws, 1, dtype=torch.int64), chain], 1)
    p = torch.stack([p_table[k, previous[:, k]] for k in range(3)], 1)
    q = torch.stack([q_table[k, previous[:, k]] for k in range(2)], 1)
    lengths = torch.where(chain[:, 0] == 1, 1, 2)  # slot 2 is dropped by what slot 1 holds
    verdict = verify.RULES[rule](p, q, chain, lengths, counter.uniforms(seeds, positions, 2, counter.VERIFY), ids)
    e = counter.uniforms(seeds, positions, 3, counter.EMIT)
    out = torch.cat([chain, torch.zeros(draws, 1, dtype=torch.int64)], 1)
    out.scatter_(1, verdict.accepted[:, None], draw(verdict.residual, e[:, 0])[:, None])
    for k in (1, 2):  # go on with the target alone
        late = verdict.accepted < k
        out[:, k] = torch.where(late, draw(p_table[k, out[:, k - 1]], e[:, k]), out[:, k])
    counts = torch.bincount((out * torch.tensor([16, 4, 1])).sum(1), minlength=64).double()
    expected = (p_table[0, 0][:, None, None] * p_table[1][:, :, None] * p_table[2][None]).flatten().double() * draws
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 63 + 5 * 11.2, statistic


@pytest.mark.parametrize("vocab", [64, 97, 128, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_largest(vocab, dtype):
    logits = torch.randn(3, 2, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)  # bf16: ties are common
    best = logits.amax(-1, keepdim=True)
    first = torch.where(logits == best, torch.arange(vocab), vocab).amin(-1)
    assert torch.equal(argmax(logits), first)
