"""Anchors, labels, validity, order and sharding. Cases 3 and 4 of the design's list."""

import pytest
import torch

from draftsmith.data.batch import Batches, anchor_positions, collate, epoch_order, sample_anchors
from draftsmith.data.chat import TokenRow


def row(name, mask, first=100):
    flags = [char == "1" for char in mask]
    return TokenRow(name, "chat", [first + i for i in range(len(flags))], flags)


def test_case_3_answer_shorter_than_the_block():
    short = row("r", "000011")  # yes </s>
    batch = collate([short], 8, 7)
    assert batch.anchors[batch.anchor_mask].tolist() == [4]  # `yes`; never `</s>`
    assert batch.valid[0, 0].tolist() == [True] + [False] * 6
    assert batch.labels[0, 0].tolist() == [105, 0, 0, 0, 0, 0, 0]  # no index error at the end of the row
    assert batch.num_labels == 1


def test_case_4_turn_edge():
    text = row("r", "0" * 8 + "1" * 32 + "0" * 10)
    batch = collate([text], None, 4, anchors=[torch.tensor([37])])
    assert batch.labels[0, 0].tolist() == [138, 139, 140, 141]
    assert batch.valid[0, 0].tolist() == [True, True, False, False]


def test_a_block_never_reaches_the_next_turn():
    batch = collate([row("r", "0111001111")], None, 6, anchors=[torch.tensor([1, 2])])
    assert batch.valid[0].tolist() == [[True, True] + [False] * 4, [True] + [False] * 5]


def test_anchor_and_the_next_token_are_supervised():
    assert anchor_positions([c == "1" for c in "0110110010"]).tolist() == [1, 4]
    assert anchor_positions([True]).tolist() == []


def test_sampling_is_uniform_without_replacement_and_seeded():
    mask = [False] + [True] * 11  # anchors 1..10
    generator = torch.Generator().manual_seed(3)
    draws = [sample_anchors(mask, 4, generator) for _ in range(4000)]
    assert all(len(set(found.tolist())) == 4 and found.tolist() == sorted(found.tolist()) for found in draws)
    counts = torch.bincount(torch.cat(draws), minlength=12)[1:11]
    # 4000 draws of 4 of 10: each is hit 1600 times, standard deviation 31
    assert counts.min() > 1450 and counts.max() < 1750 and counts.sum() == 16000
    again = torch.Generator().manual_seed(3)
    assert torch.equal(draws[0], sample_anchors(mask, 4, again))
    assert sample_anchors(mask, 99).tolist() == list(range(1, 11))


def test_padding_is_by_length_and_slots_are_masked():
    batch = collate([row("a", "0111"), row("b", "0011111", first=0)], 2, 3, torch.Generator().manual_seed(0))
    assert batch.lengths.tolist() == [4, 7]
    assert batch.input_ids.shape == (2, 7)
    assert batch.attention_mask.sum(1).tolist() == [4, 7]
    assert batch.anchors.shape == batch.anchor_mask.shape == (2, 2)
    assert batch.labels.shape == batch.valid.shape == (2, 2, 3)
    mixed = collate([row("a", "011"), row("b", "0011111")], 9, 3)
    assert mixed.anchor_mask.tolist() == [[True, False, False, False], [True] * 4]
    assert not mixed.valid[0, 1:].any() and not mixed.labels[0, 1:].any()


def test_valid_agrees_with_a_plain_loop():
    generator = torch.Generator().manual_seed(1)
    rows = [row(str(i), "".join(str(int(b)) for b in torch.rand(20 + i, generator=generator) < 0.8)) for i in range(6)]
    batch = collate(rows, 5, 4, generator)
    for r, text in enumerate(rows):
        for a in range(batch.anchors.shape[1]):
            alive = bool(batch.anchor_mask[r, a])
            for k in range(4):
                place = int(batch.anchors[r, a]) + k + 1
                alive = alive and place < len(text.input_ids) and text.loss_mask[place]
                assert bool(batch.valid[r, a, k]) == alive
                if alive:
                    assert int(batch.labels[r, a, k]) == text.input_ids[place]
    assert bool(batch.valid[..., 0][batch.anchor_mask].all())  # every anchor has its first label


def test_a_share_gives_long_answers_more_anchors():
    rows = [row("a", "0" + "1" * 10), row("b", "0" + "1" * 40)]
    batch = collate(rows, None, 3, anchor_share=0.25)
    assert batch.anchor_mask.sum(1).tolist() == [3, 10]
    assert collate(rows, 4, 3, anchor_share=0.25).anchor_mask.sum(1).tolist() == [3, 4]
    with pytest.raises(ValueError, match="anchors_per_row and anchor_share"):
        collate(rows, None, 3)


@pytest.mark.parametrize("rows", [[], [row("a", "0000")]])
def test_nothing_to_supervise_gives_an_all_masked_batch(rows):
    batch = collate(rows, 4, 3)
    assert batch.num_anchors == batch.num_labels == 0
    assert batch.anchors.shape[1] == 1 and batch.labels.shape[1:] == (1, 3)
    assert int(batch.anchors.max()) < batch.input_ids.shape[1]


def many(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(6, 60, (count,), generator=generator).tolist()
    return [row(f"r{i}", "00" + "1" * (size - 2), first=1000 * i) for i, size in enumerate(sizes)]


def test_order_visits_every_row_once_and_depends_on_seed_and_epoch():
    lengths = [len(item.input_ids) for item in many(203)]
    first = epoch_order(lengths, 4, seed=1, epoch=0)
    assert sorted(i for batch in first for i in batch) == list(range(203))
    assert first == epoch_order(lengths, 4, seed=1, epoch=0)
    assert first != epoch_order(lengths, 4, seed=1, epoch=1) != epoch_order(lengths, 4, seed=2, epoch=1)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in first)
    assert padded < 1.1 * sum(lengths)  # similar lengths share a batch


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_rows_and_have_equal_numbers_of_batches(world):
    rows = many(205)
    options = {"rows_per_batch": 4, "block_size": 5, "anchors_per_row": 3, "seed": 7}
    ranks = [Batches(rows, **options, rank=r, world_size=world) for r in range(world)]
    assert len({len(part) for part in ranks}) == 1
    assert len(ranks[0]) == len(epoch_order(ranks[0].lengths, 4 * world, seed=7, epoch=2))
    seen = sorted(i for part in ranks for index in range(len(part)) for i in part.indices(2, index))
    assert seen == list(range(205))
    for part in ranks:
        assert len(list(part.epoch(0))) == len(part)


def test_a_rank_without_rows_gets_an_all_masked_batch():
    parts = [Batches(many(5), rows_per_batch=1, block_size=3, anchors_per_row=3, rank=r, world_size=4) for r in range(4)]
    assert [len(part) for part in parts] == [2] * 4
    empty = [part.batch(0, i) for part in parts for i in range(2) if not part.indices(0, i)]
    assert len(empty) == 3 and all(batch.num_anchors == 0 for batch in empty)


def test_anchors_do_not_depend_on_the_split_over_ranks():
    def anchors(world, size):
        found = {}
        for rank in range(world):
            part = Batches(many(40), rows_per_batch=size, block_size=3, anchors_per_row=2, seed=5, rank=rank, world_size=world)
            for index in range(len(part)):
                batch = part.batch(3, index)
                for number, place, used in zip(part.indices(3, index), batch.anchors, batch.anchor_mask, strict=True):
                    found[number] = place[used].tolist()
        return found

    assert anchors(1, 4) == anchors(2, 2) == anchors(4, 1)


def test_resume_by_index_and_coverage():
    part = Batches(many(60), rows_per_batch=4, block_size=3, anchor_share=0.5, seed=5)
    whole = list(part.epoch(1))
    rest = list(Batches(many(60), rows_per_batch=4, block_size=3, anchor_share=0.5, seed=5).epoch(1, start=9))
    assert len(rest) == len(whole) - 9
    for a, b in zip(whole[9:], rest, strict=True):
        assert torch.equal(a.anchors, b.anchors) and torch.equal(a.input_ids, b.input_ids)
    assert 0.5 <= part.coverage() < 0.6
    assert Batches(many(60), rows_per_batch=4, block_size=3, anchors_per_row=1000).coverage() == 1.0
