"""Attention over anchors: both ways compute the same, and neither grows with the square of the number of blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from drafters import tiny_drafter
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models.masks import CHUNK, FlexAttention, _spans, block_attention, context_mask, context_tiles
from draftsmith.train.config import TrainConfig
from draftsmith.train.speed import speed_up

SLOTS, HEADS, KV, SIZE = 3, 4, 2, 16


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int, context: int, blocks: int, device: str = "cpu"):
    """query, context and block keys and values; ascending anchors, some unused (0), two chats in each row."""
    generator = torch.Generator().manual_seed(blocks)
    anchors = torch.randint(0, context, (rows, blocks), generator=generator).sort(-1).values
    anchors[:, -1] = 0
    starts = torch.where(anchors >= context // 2, context // 2, 0)
    query = noise(rows, blocks, SLOTS, HEADS, SIZE, seed=1)
    pairs = [tuple(noise(rows, *size, KV, SIZE, seed=s) for s in (2, 3)) for size in ((context,), (blocks, SLOTS))]
    return tuple(
        x.to(device) if isinstance(x, torch.Tensor) else tuple(t.to(device) for t in x)
        for x in (query, *pairs, anchors, starts)
    )


def dense(query, context, block, visible):
    """One softmax over the context and the block's own keys, block by block, in float64."""
    rows, blocks = visible.shape[:2]
    out = torch.zeros_like(query, dtype=torch.float64)
    for row in range(rows):
        for b in range(blocks):
            key, value = (
                torch.cat((c[row][visible[row, b]], own[row, b])).double().transpose(0, 1).repeat_interleave(HEADS // KV, 0)
                for c, own in zip(context, block, strict=True)
            )
            q = query[row, b].double().transpose(0, 1)
            out[row, b] = F.scaled_dot_product_attention(q, key, value).transpose(0, 1)
    return out


def test_a_block_sees_its_chat_before_its_anchor():
    mask = context_mask(torch.tensor([[0, 3, 5]]), 6, torch.tensor([[0, 1, 5]]))
    assert mask.int().tolist() == [[[0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]]
    assert context_mask(torch.tensor([[2]]), 3).tolist() == [[[True, True, False]]]


@pytest.mark.parametrize("blocks", [2, CHUNK, 2 * CHUNK + 5])
def test_batched_products_are_one_softmax_over_context_and_block(blocks: int):
    query, context, block, anchors, starts = inputs(2, 50, blocks)
    visible = context_mask(anchors, 50, starts)
    tensors = [query, *context, *block]
    for t in tensors:
        t.requires_grad_()
    found = block_attention(query, context, block, visible)
    want = dense(query, context, block, visible)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-6)
    weight = noise(*query.shape, seed=9)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), tensors) for o in (found, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_chunks_keep_what_their_blocks_see():
    visible = torch.zeros(2, 2 * CHUNK + 3, 40, dtype=torch.bool)
    visible[0, CHUNK - 1, 7:11] = True
    visible[1, CHUNK, 30:40] = True
    assert _spans(visible) == [(0, CHUNK, 7, 11), (CHUNK, 2 * CHUNK, 30, 40), (2 * CHUNK, 2 * CHUNK + 3, 0, 0)]
    assert _spans(visible[:, :CHUNK]) == [(0, CHUNK, 0, 40)]


@pytest.fixture
def plain_flex(monkeypatch):
    """flex_attention in plain operations; without this it is traced first, for seconds."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("plain_flex")
@pytest.mark.parametrize(("context", "blocks"), [(300, 96), (40, 3), (128, 43)])
def test_flex_attention_equals_batched_products(context: int, blocks: int):
    query, seen, block, anchors, starts = inputs(2, context, blocks)
    for begins in (None, starts):
        want = block_attention(query, seen, block, context_mask(anchors, context, begins))
        found = FlexAttention(anchors, context, begins, slots=SLOTS)(query, seen, block)
        torch.testing.assert_close(found, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tile", [8, 16])
def test_tiles_are_exactly_what_some_query_sees(tile: int):
    _, _, _, anchors, starts = inputs(2, 70, 21)
    anchors[0, :12], starts[0, :12] = 64, 0
    mask = context_tiles(starts, anchors, 70, SLOTS, tile=tile)
    seen = context_mask(anchors, 70, starts).repeat_interleave(SLOTS, 1)
    queries, keys = -(-21 * SLOTS // tile), -(-70 // tile)
    partly, fully = (torch.zeros(2, queries, keys, dtype=torch.bool) for _ in range(2))
    for row in range(2):
        for i in range(queries):
            for j in range(keys):
                part = seen[row, i * tile : (i + 1) * tile, j * tile : (j + 1) * tile]
                fully[row, i, j] = part.all() and part.shape == (tile, tile)
                partly[row, i, j] = part.any() and not fully[row, i, j]
    for want, count, index in (
        (partly, mask.kv_num_blocks, mask.kv_indices),
        (fully, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        found = torch.zeros_like(want)
        for row in range(2):
            for i in range(queries):
                found[row, i, index[row, 0, i, : count[row, 0, i]].long()] = True
        assert torch.equal(found, want) and want.any()
    rows = torch.arange(2)[:, None, None], torch.arange(21 * SLOTS)[None, :, None], torch.arange(70)[None, None]
    assert torch.equal(mask.mask_mod(rows[0], torch.tensor(0), rows[1], rows[2]), seen)


@pytest.mark.usefixtures("plain_flex")
def test_the_drafter_is_the_same_with_either():
    drafter, heads = tiny_drafter()
    words = torch.randint(3, 90, (2, 5, drafter.block_size), generator=torch.Generator().manual_seed(0))
    arguments = dict(
        taps=noise(2, 24, 128, seed=4), anchors=torch.tensor([[3, 7, 9, 14, 20], [1, 2, 12, 0, 0]]), previous_tokens=words,
        embedding=heads.embedding,
    )  # fmt: skip
    found = []
    for backend in ("batched", "flex"):
        drafter.attention_backend = backend
        with torch.no_grad():
            found.append(drafter.unroll(**arguments).hidden)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert not FlexAttention.fits(torch.device("cpu"), 64) and FlexAttention.fits(torch.device("cuda"), 64)
    assert not FlexAttention.fits(torch.device("cuda"), 8) and not FlexAttention.fits(torch.device("cuda"), 64, "batched")


def test_flex_attention_is_refused_for_training_on_a_cpu():
    drafter, _ = tiny_drafter()
    with pytest.raises(ValueError, match="train.attention: flex is not allowed on a CPU"):
        speed_up(drafter, TrainConfig(attention="flex"), torch.device("cpu"))
    speed_up(drafter, TrainConfig(attention="batched"), torch.device("cpu"))
    assert drafter.attention_backend == "batched"


class Written(TorchDispatchMode):
    """Counts the numbers that operations write; for flex_attention the scores, queries times keys."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.higher_order.flex_attention:
            self.count += args[0].shape[:-1].numel() * args[1].shape[-2]
        self.count += sum(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.usefixtures("plain_flex")
@pytest.mark.parametrize("flex", [False, True])
def test_cost_is_linear_in_anchors(flex: bool):
    costs = []
    for times in (1, 2, 4):
        query, context, block, anchors, _ = inputs(1, 256, 128)
        query, anchors = (t.repeat_interleave(times, 1) for t in (query, anchors.sort(-1).values))
        block = tuple(t.repeat_interleave(times, 1) for t in block)
        with Written() as written:
            if flex:
                FlexAttention(anchors, 256, slots=SLOTS)(query, context, block)
            else:
                for t in (query, *context, *block):
                    t.requires_grad_()
                with FlopCounterMode(display=False) as flops:
                    block_attention(query, context, block, context_mask(anchors, 256)).sum().backward()
        costs.append((0 if flex else flops.get_total_flops(), written.count))
    for (flops, numbers), (more_flops, more_numbers) in pairwise(costs):
        assert more_flops <= 2.01 * flops and numbers < more_numbers <= 2.01 * numbers
    assert flex or costs[0][0] > 0


@pytest.mark.slow
def test_a_compiled_kernel_computes_the_tiles_that_are_named():
    # On a CPU the kernel gives no log-sum-exp, so that the context part is compared alone.
    query, (key, value), _, anchors, starts = inputs(1, 300, 96)
    q, k, v = (t.transpose(1, 2) for t in (query.flatten(1, 2), key, value))
    mask = context_tiles(starts, anchors, 300, SLOTS)
    seen = context_mask(anchors, 300, starts).repeat_interleave(SLOTS, 1)[:, None]
    with torch.no_grad():
        found = torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    some = seen.any(-1)[0, 0]
    torch.testing.assert_close(found[:, :, some], want[:, :, some], rtol=0, atol=2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has a backward pass on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_and_its_gradient_on_a_gpu(dtype: torch.dtype):
    query, context, block, anchors, starts = inputs(2, 300, 96, "cuda")
    tensors = [t.to(dtype).requires_grad_() for t in (query, *context, *block)]
    query, context, block = tensors[0], tuple(tensors[1:3]), tuple(tensors[3:])
    want = block_attention(query, context, block, context_mask(anchors, 300, starts))
    found = FlexAttention(anchors, 300, starts, slots=SLOTS)(query, context, block)
    tolerance = dict(rtol=0, atol=1e-3 if dtype is torch.float32 else 3e-2)
    torch.testing.assert_close(found, want, **tolerance)
    weight = noise(*query.shape, seed=9).to("cuda", dtype)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), tensors) for o in (found, want)), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance["atol"] * float(b.abs().max().clamp_min(1)))
