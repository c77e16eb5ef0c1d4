"""Ragged widths: the live entries of each row are what the padded call gives, and the dead ones cost and touch nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.runtime import kernels
from draftsmith.runtime.cache import KVCache
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.kernels.stack import FusedStack
from draftsmith.runtime.weights import stack_weights
from tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
CASES = {
    "llama": ("llama", dict(hidden_size=96, head_dim=64, num_attention_heads=6, intermediate_size=112)),
    "windows": ("mistral", dict(sliding_window=37, head_dim=32, num_key_value_heads=1)),
}
WIDTHS = [1, 8, 3, 1, 8, 2, 5, 1, 1, 7, 8, 4, 1, 6, 2, 8]
LENGTHS = [130, 3, 61, 200, 127, 128, 1, 30, 7, 199, 64, 90, 126, 33, 150, 2]


def build(case: str, dtype: torch.dtype, backend: str = "kernels") -> Decoder:
    model = tiny_model(CASES[case][0], **CASES[case][1])
    try:
        return Decoder.from_target(model, dtype=dtype, tap_layers=(0, 2), backend=backend)
    except ValueError as error:
        pytest.skip(str(error))


def text(batch: int, length: int, seed: int = 5) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def live(x: Tensor | None, widths: list[int]) -> Tensor:
    """The live entries of x [B,W,N] as [sum(widths), N]."""
    assert x is not None
    return torch.cat([x[b, :n] for b, n in enumerate(widths)])


def filled(decoder: Decoder, batch: int) -> tuple[KVCache, list[int]]:
    """A cache with LENGTHS[b] tokens in row b, written in one ragged prefill; slots in reverse order."""
    lengths, cache = LENGTHS[:batch], decoder.new_cache(batch + 1, 220)
    slots = list(range(batch, 0, -1))
    decoder.forward(text(batch, max(lengths)), cache, slots, [0] * batch, logits="none", widths=lengths)
    return cache, slots


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_ragged_equals_padded(batch: int, case: str, dtype: torch.dtype, backend: str):
    decoder = build(case, dtype, backend)
    widths, lengths, block = WIDTHS[:batch], LENGTHS[:batch], text(batch, 8, seed=6)
    results = []
    for given in (None, widths):
        cache, slots = filled(decoder, batch)
        results.append(decoder.forward(block, cache, slots, lengths, taps=True, widths=given))
    padded, ragged = results
    assert ragged.logits is not None and ragged.logits.shape == (batch, 8, 97)
    assert torch.equal(live(ragged.logits, widths), live(padded.logits, widths))
    assert torch.equal(live(ragged.taps, widths), live(padded.taps, widths))
    last = decoder.forward(block, cache, slots, lengths, logits="last", widths=widths).logits
    assert last is not None and last.shape == (batch, 1, 97)
    ends = torch.stack([padded.logits[b, n - 1] for b, n in enumerate(widths)])
    firsts = decoder.forward(block, cache, slots, lengths, logits="last", last=torch.zeros(batch).long(), widths=widths).logits
    if backend == "kernels":
        assert torch.equal(last[:, 0], ends) and torch.equal(firsts[:, 0], padded.logits[:, 0])
    torch.testing.assert_close(last[:, 0], ends, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)
    torch.testing.assert_close(firsts[:, 0], padded.logits[:, 0], atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ragged_prefill_equals_each_row_alone(dtype: torch.dtype):
    decoder = build("llama", dtype)
    cache, slots = filled(decoder, 16)
    alone = decoder.new_cache(1, 220)
    for b, length in enumerate(LENGTHS):
        decoder.forward(text(16, 200)[b : b + 1, :length], alone, [0], [0], logits="none")
        assert torch.equal(alone.k[:, 0, :, :length], cache.k[:, slots[b], :, :length])
        assert torch.equal(alone.values()[:, 0, :, :length], cache.values()[:, slots[b], :, :length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_dead_entries_touch_nothing(case: str, dtype: torch.dtype):
    """Not the keys and values after the live entries, and not another slot's."""
    decoder = build(case, dtype)
    cache = decoder.new_cache(4, 60)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    widths, starts = [1, 8, 3], [5, 0, 55]
    decoder.forward(text(3, 8), cache, [3, 0, 1], starts, widths=widths)
    values = cache.values()
    assert (cache.k[:, 2] == 7).all() and (values[:, 2] == 7).all()
    for slot, start, width in zip([3, 0, 1], starts, widths, strict=True):
        for kept in (cache.k[:, slot], values[:, slot]):
            changed = (kept != 7).any(-1).any(0).any(0)
            assert changed.nonzero().flatten().tolist() == list(range(start, start + width))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_ragged_bits(threads: int):
    decoder, before = build("llama", torch.bfloat16), torch.get_num_threads()
    cache, slots = filled(decoder, 3)
    want = decoder.forward(text(3, 8, seed=6), cache, slots, LENGTHS[:3], widths=[1, 8, 3]).logits
    try:
        torch.set_num_threads(threads)
        got = decoder.forward(text(3, 8, seed=6), cache, slots, LENGTHS[:3], widths=[1, 8, 3]).logits
    finally:
        torch.set_num_threads(before)
    assert torch.equal(live(got, [1, 8, 3]), live(want, [1, 8, 3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_blocks_of_several_widths(dtype: torch.dtype):
    """Not causal: a row of width n is the block of its first n entries alone; write_context takes widths too."""
    if not kernels.available(dtype):
        pytest.skip(str(kernels.problem(dtype)))
    w = stack_weights(tiny_model("qwen3", head_dim=32), dtype)
    stack = FusedStack(
        w.layers, w.final_norm, embedding=None, head=None, num_heads=w.num_heads, num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim, attention_scale=w.attention_scale, eps=w.eps, inv_freq=w.inv_freq,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    features, block = (torch.randn(4, n, 64, generator=generator).to(dtype) for n in (140, 7))
    lengths, widths, rows = [140, 3, 128, 61], [7, 1, 4, 2], torch.tensor([2, 0, 3, 4])
    zero, starts, cache, alone = torch.zeros(4).long(), torch.tensor(lengths), stack.new_cache(5, 200), stack.new_cache(1, 200)
    stack.write_context(features, cache, rows, zero, widths=lengths)
    assert (cache.k[:, 0, :, 3:] == 0).all() and (cache.k[:, 0, :, :3] != 0).any()
    _, _, got = stack.forward(block, cache, rows, starts, hidden=True, causal=False, widths=widths)
    assert got is not None and got.shape == block.shape
    for b, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        stack.write_context(features[b : b + 1, :length], alone, zero[:1], zero[:1])
        one = stack.forward(block[b : b + 1, :width], alone, zero[:1], starts[b : b + 1], hidden=True, causal=False)[2]
        assert torch.equal(one[0], got[b, :width])


def test_widths_out_of_range_are_refused():
    decoder = build("llama", torch.float32, "torch")
    cache = decoder.new_cache(2, 20)
    for widths in ([1], [0, 2], [1, 3]):
        with pytest.raises(AssertionError):
            decoder.forward(text(2, 2), cache, [0, 1], [0, 0], widths=widths)
