"""Packing: the same losses and gradients as one chat a row (cases 6 and 7), full rows, the same steps for every split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from training import log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.data.batch import Batches, collate
from draftsmith.data.chat import TokenRow
from draftsmith.data.pack import Pad, chat_view, fill_rows, group_chats, pack_order, round_up
from draftsmith.losses.reduce import denominators
from draftsmith.train.metrics import Clock
from draftsmith.train.packed import packed_states
from draftsmith.train.step import StepContext, make_batches

# ---- which chats share a row ----------------------------------------------------------------------------------------


def test_rows_are_filled_longest_chat_first():
    assert fill_rows([5, 3, 8, 2, 7], range(5), 10) == [[2, 3], [4, 1], [0]]
    assert fill_rows([5], [], 10) == []


def test_an_epoch_has_every_chat_once_and_full_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(3000, generator=generator).mul(0.9).add(5).exp().clamp(16, 1024)).long().tolist()
    packs = pack_order(lengths, 2048, generator=torch.Generator().manual_seed(1))
    assert sorted(i for pack in packs for i in pack) == list(range(3000))
    sizes = [sum(lengths[i] for i in pack) for pack in packs]
    assert max(sizes) <= 2048 and sum(sizes) / (2048 * len(sizes)) > 0.97
    assert packs == pack_order(lengths, 2048, generator=torch.Generator().manual_seed(1))
    assert packs != pack_order(lengths, 2048, generator=torch.Generator().manual_seed(2))


def test_groups_waste_little_and_hold_every_chat():
    lengths = [900, 880, 300, 290, 310, 40, 41, 42, 43, 44]
    groups = group_chats(lengths)
    assert sorted(i for group in groups for i in group) == list(range(10)) and len(groups) <= 4
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert padded <= 1.05 * sum(lengths)
    assert group_chats([7]) == [[0]]
    assert len(group_chats([50] * 200)) == 1


def test_sizes_are_rounded_to_few_values():
    assert [round_up(n, 8) for n in (1, 8, 9, 64, 65, 81, 129)] == [8, 8, 16, 64, 80, 96, 160]
    assert round_up(7, 1) == 7
    assert all(n <= round_up(n, 16) <= max(16, 1.25 * n + 16) for n in range(1, 4000))
    assert len({round_up(n, 64) for n in range(1, 4097)}) < 25


# ---- the batch ------------------------------------------------------------------------------------------------------


def test_labels_stay_in_the_chat_and_positions_restart():
    # The second chat starts supervised: without the border, the first one's last block would reach into it.
    rows = [TokenRow("a", "chat", [10, 11, 12], [False, True, True]), TokenRow("b", "chat", [20, 21, 22, 23], [True] * 4)]
    batch = collate(rows, None, 3, anchors=[torch.tensor([1]), torch.tensor([0, 2])], packed=True)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 22, 23]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.anchors.tolist() == [[1, 3, 5]] and batch.starts.tolist() == [[0, 3, 3]]
    assert batch.valid.tolist() == [[[True, False, False], [True, True, True], [True, False, False]]]
    assert batch.labels.tolist() == [[[12, 0, 0], [21, 22, 23], [23, 0, 0]]]
    padded = collate(
        rows, None, 3, anchors=[torch.tensor([1]), torch.tensor([0, 2])], packed=True, pad=Pad(tokens=5, anchors=4)
    )
    assert padded.input_ids.shape == (1, 10) and padded.anchors.shape == (1, 4)
    assert padded.positions[0, 7:].tolist() == [0, 1, 2] and padded.segments[0, 7:].tolist() == [-1] * 3
    assert padded.num_anchors == 3 and torch.equal(padded.valid[:, :3], batch.valid)


def test_the_view_finds_every_token_and_block_again():
    rows = rows_of(9, seed=2)
    batch = collate(rows, None, 4, anchor_share=0.5, packed=True, generator=torch.Generator().manual_seed(0))
    seen, blocks = [], []
    for group in batch.chats.groups:
        for tokens, length in zip(group.tokens, group.lengths, strict=True):
            span = tokens[:length]
            seen += span.tolist()
            assert len(set(batch.segments.flatten()[span].tolist())) == 1
            assert batch.positions.flatten()[span].tolist() == list(range(int(length)))
        blocks += group.blocks.flatten().tolist()
    assert sorted(seen) == list(range(batch.input_ids.numel()))
    used = batch.anchor_mask.flatten().nonzero().flatten().tolist()
    assert [blocks[int(batch.chats.order[slot])] for slot in used] == used
    assert chat_view([(0, 1)], [torch.zeros(0, dtype=torch.int64)], [0], 1).order.tolist() == [0]


# ---- case 6 ---------------------------------------------------------------------------------------------------------


def context_of(tmp_path: Path, rows, **changes):
    parts = parts_of(**changes)
    setup = setup_of(parts, rows, tmp_path)
    torch.nn.init.normal_(setup.drafter.markov_head.markov_w2.weight)
    if setup.drafter.confidence_head is not None:
        torch.nn.init.normal_(setup.drafter.confidence_head.proj.weight)
    return StepContext(parts.train, parts.objective, setup, setup.heads, torch.device("cpu"))


TERMS = dict(tv=1.0, kl=0.5, ce=0.3, survival=0.5, lk=0.2, e2e=0.1, exact=0.1)


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("view", [True, False], ids=["by-chat", "mask"])
def test_case_6_packed_chats_equal_chats_alone(tmp_path: Path, head: str, view: bool):
    rows = rows_of(6, seed=3)
    context = context_of(tmp_path, rows, objective=TERMS, drafter=dict(head=head, num_layers=2))
    drafter = context.setup.drafter
    if not view:  # the compiled drafter's way: one mask over the whole row
        object.__setattr__(context.cfg, "compile", True)
    anchors = [torch.nonzero(torch.tensor(r.loss_mask[:-1]) & torch.tensor(r.loss_mask[1:])).flatten()[::2] for r in rows]
    packed = collate(rows, None, 4, anchors=anchors, packed=True)
    alone = [collate([row], None, 4, anchors=[found]) for row, found in zip(rows, anchors, strict=True)]
    totals = denominators(context.objective_cfg, packed.valid.flatten(0, 1))
    assert torch.equal(torch.cat([b.labels[0] for b in alone]), packed.labels[0])
    assert torch.equal(torch.cat([b.valid[0] for b in alone]), packed.valid[0])

    valid = packed.valid[0]

    def run(batches):
        drafter.zero_grad(set_to_none=True)
        hidden, stats = [], None
        handle = drafter.register_forward_hook(lambda m, a, out: hidden.append(out))
        for batch, part in batches:
            loss, found = context.loss(drafter, batch, part, totals, Clock())
            loss.backward()
            stats = found if stats is None else stats + found
        handle.remove()
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters()])
        survival = torch.cat([out.survival_logits[0] for out in hidden])
        bias = torch.cat([out.correction[0] for out in hidden])
        # beyond a chat's end the previous token is another one, but nothing there is supervised
        return torch.cat([out.hidden[0] for out in hidden]), survival[valid], bias[valid], stats.flat(), gradient

    one = run([(packed, rows)])
    many = run([(batch, [row]) for batch, row in zip(alone, rows, strict=True)])
    for found, want in zip(one[:4], many[:4], strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert float((one[4] - many[4]).norm() / many[4].norm()) < 1e-5 and many[4].norm() > 1e-2


def test_each_chats_loss_is_its_own(tmp_path: Path):
    # Of a packed row only one chat's blocks are kept: the loss is that of the chat alone, with its own denominators.
    rows = rows_of(4, seed=4)
    context = context_of(tmp_path, rows)
    packed = collate(rows, None, 4, anchor_share=1.0, packed=True)
    for number, row in enumerate(rows):
        mine = packed.segments[0, packed.anchors[0]] == number
        one = dataclasses.replace(packed, valid=packed.valid & mine[None, :, None])
        loss, _ = context.loss(context.setup.drafter, one, rows, None, Clock())
        want, _ = context.loss(context.setup.drafter, collate([row], None, 4, anchor_share=1.0), [row], None, Clock())
        assert loss.item() == pytest.approx(want.item(), abs=1e-5)


def test_the_target_reads_no_other_chat():
    target, rows = tiny_target(), rows_of(7, seed=5)
    batch = collate(rows, None, 4, anchor_share=0.5, packed=True, pad=Pad(tokens=8))
    for label in ("sdpa", "flash"):  # "flash": the path for variable lengths; transformers masks it for sdpa just the same
        if label == "flash":
            target.model.set_attn_implementation("sdpa")
            found = target.features(batch.input_ids, None, (0, 1), position_ids=batch.positions)
        else:
            found = packed_states(target, (0, 1), batch)
        start = 0
        for row in rows:
            want = target.features(torch.tensor([row.input_ids]), None, (0, 1))
            span = slice(start, start + len(row.input_ids))
            torch.testing.assert_close(found.taps[0, span], want.taps[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.last_hidden[0, span], want.last_hidden[0], rtol=1e-5, atol=1e-5)
            start = span.stop


def test_the_host_waits_for_no_state_of_a_packed_row():
    # On a GPU, an index of unknown length or a number that is read stops the host until the target's forward is through.
    from torch.utils._python_dispatch import TorchDispatchMode

    from draftsmith.models.target import TargetFeatures

    used = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            masks = args[1] if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") else ()
            used.append(f"{func.overloadpacket.__name__}{' by mask' * any(t.dtype == torch.bool for t in masks)}")
            return func(*args, **(kwargs or {}))

    def states(ids, mask, taps, position_ids=None):
        return TargetFeatures(ids[..., None].float(), ids[..., None].float())

    target = SimpleNamespace(config=None, collective=False, features=states)
    batch = collate(rows_of(9), None, 4, anchor_share=0.5, packed=True, pad=Pad(tokens=8))
    with Noting():
        found = packed_states(target, (0,), batch)
    assert torch.equal(found.taps[..., 0].long(), batch.input_ids) and torch.equal(found.taps, found.last_hidden)
    waits = [name for name in used if name in ("nonzero", "_local_scalar_dense", "masked_select") or "by mask" in name]
    assert used and not waits


def test_a_sharded_target_is_called_equally_often():
    target, calls = tiny_target(), []
    target.collective = True
    plain = target.features
    target.features = lambda *args, **options: calls.append(args[0].shape) or plain(*args, **options)
    for rows in (rows_of(2), rows_of(20), []):
        calls.clear()
        packed_states(target, (0, 1), collate(rows, None, 4, anchor_share=0.5, packed=True))
        assert len(calls) == 4


# ---- case 7, steps and ranks ----------------------------------------------------------------------------------------


def of_split(rows, world: int, accumulation: int, tokens: int | None = None):
    split = dict(world_size=world, accumulation=accumulation, tokens_per_batch=tokens)
    return [
        Batches(rows, rows_per_batch=2, block_size=4, anchor_share=0.5, seed=3, rank=rank, **split) for rank in range(world)
    ]


@pytest.mark.parametrize("tokens", [None, 64])
def test_a_step_is_the_same_for_every_split_over_ranks_and_accumulation(tokens):
    rows = rows_of(53, seed=1)

    def anchors_of(batch, number):
        if tokens is None:
            return batch.anchors[number][batch.anchor_mask[number]].tolist()
        own = (batch.segments[0, batch.anchors[0]] == number) & batch.anchor_mask[0]
        return (batch.anchors[0] - batch.starts[0])[own].tolist()

    def steps(world, accumulation):
        parts = of_split(rows, world, accumulation, tokens=tokens)
        assert len({len(part) for part in parts}) == 1
        found = []
        for start in range(0, len(parts[0]), accumulation):
            places = {}
            for part in parts:
                for index in range(start, start + accumulation):
                    epoch, inside = part.locate(len(part) + index)
                    batch = part.batch(epoch, inside)
                    places |= {row: anchors_of(batch, i) for i, row in enumerate(part.indices(epoch, inside))}
            found.append(places)
        return found

    assert steps(1, 4) == steps(2, 2) == steps(4, 1)


def test_case_7_packed_splits_have_the_same_gradient(tmp_path: Path):
    rows = rows_of(8, seed=6)
    context = context_of(tmp_path, rows)
    drafter = context.setup.drafter

    def gradient(world, accumulation):
        parts = of_split(rows, world, accumulation, tokens=40)
        micro = [(p.batch(0, i), [rows[j] for j in p.indices(0, i)]) for p in parts for i in range(accumulation)]
        totals = torch.stack([denominators(context.objective_cfg, b.valid.flatten(0, 1)) for b, _ in micro]).sum(0)
        drafter.zero_grad(set_to_none=True)
        for batch, part in micro:
            context.loss(drafter, batch, part, totals, Clock())[0].backward()
        return torch.cat([p.grad.flatten() for p in drafter.parameters()])

    want = gradient(1, 4)
    assert want.norm() > 1e-2
    for split in ((2, 2), (4, 1)):
        assert float((gradient(*split) - want).norm() / want.norm()) < 1e-5


def test_a_rank_without_a_pack_still_has_a_batch():
    rows = rows_of(5)
    parts = of_split(rows, 4, 1, tokens=1000)
    assert [len(part) for part in parts] == [1] * 4
    batches = [part.batch(0, 0) for part in parts]
    assert sum(batch.num_anchors == 0 for batch in batches) == 3
    assert all(batch.segments is not None and batch.anchors.shape[1] >= 1 for batch in batches)


def test_epochs_follow_each_other_and_a_long_chat_is_refused():
    rows = rows_of(30)
    part = of_split(rows, 1, 1, tokens=64)[0]
    counts = [len(list(part.epoch(epoch))) for epoch in range(3)]
    assert part.locate(0) == (0, 0) and part.locate(counts[0]) == (1, 0)
    assert part.locate(counts[0] + counts[1] + 1) == (2, 1)
    fresh = of_split(rows, 1, 1, tokens=64)[0]
    assert fresh.locate(counts[0] + counts[1] + 1) == (2, 1)
    assert torch.equal(fresh.batch(2, 1).input_ids, part.batch(2, 1).input_ids)
    cfg = parts_of(train=dict(packing="packed", tokens_per_batch=16)).train
    with pytest.raises(ValueError, match=r"train\.tokens_per_batch=16: allowed >= \d+, the longest chat"):
        make_batches(cfg, rows, Accelerator(cpu=True), block_size=4, seed=0)


# ---- a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["online", "cached"])
def test_a_packed_run_trains(tmp_path: Path, features: str):
    parts = parts_of(
        train=dict(packing="packed", tokens_per_batch=64, steps=3, validation_share=0.2), data=dict(features=features)
    )
    train(parts, setup_of(parts, rows_of(30), tmp_path), tmp_path)
    lines = [line for line in log_of(tmp_path) if "loss/total" in line]
    assert len(lines) == 3 and all(0.0 <= line["data/padding"] < 0.5 for line in lines)
    assert all(0.4 < line["data/anchor_share"] < 0.7 and line["data/coverage"] > line["data/anchor_share"] for line in lines)
