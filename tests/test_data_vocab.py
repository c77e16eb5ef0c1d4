"""Reduced draft vocabulary: chosen by the target's answers, filled by merge rank, weights and coverage by cross-validation."""

import json
import math

import pytest
import torch
from tiny_chat import TAGGED, chat_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data import vocab_report
from draftsmith.data.chat import TokenRow
from draftsmith.data.vocab import (
    Sample,
    Weights,
    choose,
    coverage,
    coverage_by_domain,
    essential_ids,
    load,
    merge_ranks,
    rank_prior,
    required_ids,
    save,
    token_counts,
)


def row(prompt, answer, domain="chat", name="r"):
    return TokenRow(name, domain, prompt + answer, [False] * len(prompt) + [True] * len(answer))


ROWS = [row([50, 51, 52], [90, 90, 90, 80, 80, 70]), row([53], [90, 60, 1], "math")]
COUNTED = Weights(rank=1e-6)


def test_only_supervised_tokens_count():
    counts = token_counts(ROWS, 100)
    assert counts.sum() == 9
    assert (counts[90], counts[80], counts[50]) == (4, 2, 0)
    with pytest.raises(ValueError, match="token id 90 is outside the vocabulary of 64"):
        token_counts(ROWS, 64)


def test_most_frequent_first_then_low_ranks_and_always_the_required():
    assert choose(ROWS, 3, vocab_size=100, required=[2], weights=COUNTED).tolist() == [2, 80, 90]
    ids = choose(ROWS, 9, vocab_size=100, required=[2], weights=COUNTED)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 2, 3, 4, 60, 70, 80, 90]  # all five seen ids, EOS 2, the lowest unseen ids
    assert choose(ROWS, 100, vocab_size=100).tolist() == list(range(100))
    ranks = torch.arange(100).flip(0)
    assert choose(ROWS, 9, vocab_size=100, required=[2], ranks=ranks, weights=COUNTED).tolist() == [
        1,
        2,
        60,
        70,
        80,
        90,
        97,
        98,
        99,
    ]


def test_ties_at_equal_counts_go_to_the_lower_merge_rank():
    assert choose([row([], [70, 60, 80])], 2, vocab_size=100, weights=COUNTED).tolist() == [60, 70]


def test_prompts_speak_for_their_words_as_often_as_rows_hold_them():
    rows = [row([40, 40, 41], [5], name="a"), row([41], [5], name="b")]
    score = Weights(rank=1e-6, prompts=1.0)
    assert choose(rows, 2, vocab_size=100, weights=score).tolist() == [5, 41]
    assert choose(rows, 3, vocab_size=100, weights=score).tolist() == [5, 40, 41]
    assert choose(rows, 3, vocab_size=100, weights=COUNTED).tolist() == [0, 1, 5]


def test_rank_prior_recovers_a_power_law_and_keeps_the_total():
    ranks = torch.arange(20000)
    law = 500.0 * ((ranks + 100.0) / 100.0) ** -1.3
    counts = torch.poisson(law, generator=torch.Generator().manual_seed(0)).long()
    prior = rank_prior(counts, ranks)
    assert float(prior.sum()) == pytest.approx(int(counts.sum()), rel=1e-9)
    slope = math.log(float(prior[1900] / prior[100])) / math.log(2000 / 200)
    assert slope == pytest.approx(-1.3, abs=0.02)
    rising = rank_prior(torch.arange(50), torch.arange(50))
    assert rising.tolist() == pytest.approx([24.5] * 50), "rare tokens are never expected more often than frequent ones"
    assert not rank_prior(torch.zeros(9, dtype=torch.long), torch.arange(9)).any()


def test_strong_prior_prefers_low_unseen_ids_to_rare_high_ones():
    rows = [row([], [9999, *range(0, 400, 2)] * 3)]
    seen, strong = (choose(rows, 260, vocab_size=10000, weights=Weights(rank=r)) for r in (1e-6, 30.0))
    assert 9999 in seen.tolist() and 9999 not in strong.tolist()


def zipf_rows(count, copies):
    """Answers drawn from a power law over ranks; `copies` tokens of each prompt come back in its answer."""
    generator = torch.Generator().manual_seed(count)
    law = (torch.arange(4000) + 20.0) ** -1.2
    rows = []
    for n in range(count):
        prompt = torch.randint(3000, 4000, (10,), generator=generator).tolist()
        answer = torch.multinomial(law, 40, replacement=True, generator=generator).tolist()
        rows.append(row(prompt, answer + prompt[:copies], name=f"p{n}"))
    return rows


def test_cross_validation_picks_weights_that_cover_unseen_answers():
    rows = zipf_rows(60, 0)
    sample, plain = Sample(rows, 4000), Weights(rank=0.01)
    weights = sample.tune(1500)
    held, without = sample.held_out(1500, weights=weights)[""], sample.held_out(1500, weights=plain)[""]
    assert held >= without
    unseen = zipf_rows(61, 0)
    assert coverage(sample.choose(1500), unseen) == pytest.approx(held, abs=0.03)
    assert coverage(sample.choose(1500), unseen) >= coverage(sample.choose(1500, weights=plain), unseen) - 0.005
    assert Sample(zipf_rows(60, 8), 4000).tune(1000).prompts > 0, "answers that repeat their prompts"


def test_held_out_is_of_other_prompts_and_counted_by_hand():
    rows = [row([], [5, 5, 7], "a", "p"), row([], [5, 9], "b", "q"), row([], [9, 9, 9], "b", "s#0"), row([], [9], "b", "s#1")]
    sample = Sample(rows, 12)
    assert sample.parts == 3
    # without p: 9 is most frequent; without q: 9; without s: 5
    assert sample.held_out(1, weights=COUNTED) == {"": pytest.approx(1 / 9), "a": 0.0, "b": pytest.approx(1 / 6)}
    assert sample.ceiling(1) == pytest.approx(5 / 9)
    assert Sample(rows[2:], 12).held_out(1) == {}, "samples of one prompt are not unseen"
    assert sample.padded(20).held_out(1, weights=COUNTED) == sample.held_out(1, weights=COUNTED)
    grouped = Sample(rows, 12, groups=lambda r: ("all", r.id[0]))
    assert set(grouped.held_out(2)) == {"", "all", "p", "q", "s"}


@pytest.mark.parametrize(("size", "required"), [(0, ()), (101, ()), (1, (2, 3))])
def test_impossible_sizes(size, required):
    with pytest.raises(ValueError, match=f"draft_vocab_size={size}: allowed"):
        choose(ROWS, size, vocab_size=100, required=required)


def test_coverage_is_a_share_of_supervised_tokens():
    assert coverage(torch.tensor([80, 90]), ROWS) == pytest.approx(6 / 9)
    by_domain = coverage_by_domain(torch.tensor([80, 90]), ROWS, vocab_size=100)
    assert by_domain == {"chat": pytest.approx(5 / 6), "math": pytest.approx(1 / 3)}
    assert coverage(choose(ROWS, 5, vocab_size=100, weights=COUNTED), ROWS) == 1.0


# ---- tokenizers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<turn>", "<spare>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(["the the the then that thing"] * 4, trainer)
    template = "{{ '<turn>' + messages[0]['content'] }}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=template)


def test_merge_ranks_follow_the_merges_not_the_ids(bpe):
    ranks, size = merge_ranks(bpe, 310), len(bpe)
    state = json.loads(bpe.backend_tokenizer.to_str())["model"]
    first, last = ("".join(state["merges"][n]) for n in (0, -1))
    assert ranks[state["vocab"][first]] == 1 and ranks[state["vocab"][last]] == len(state["merges"])
    assert ranks[state["vocab"]["t"]] == 0
    assert ranks[0] == ranks[305] == len(state["merges"]) + 1 and size < 305, "added tokens and empty rows come last"
    assert merge_ranks(chat_tokenizer(), 5).tolist() == [0, 1, 2, 3, 4], "no byte pairs: the ids"


def test_bytes_end_tokens_and_template_tokens_are_essential(bpe):
    found = essential_ids(bpe, [0])
    vocabulary = bpe.get_vocab()
    assert len(found) == 256 + 2
    assert {vocabulary["<end>"], vocabulary["<turn>"], vocabulary["t"]} <= set(found) and vocabulary["<spare>"] not in found
    assert required_ids(bpe, [0], 600) == found and required_ids(bpe, [0], 300) == [0], "they may not fill the vocabulary"
    assert essential_ids(chat_tokenizer(TAGGED), [1]) == [1]


# ---- file and report ----------------------------------------------------------------------------------------------


def test_file_gives_back_the_ids_and_is_written_once(tmp_path):
    ids = choose(ROWS, 5, vocab_size=100, required=[2])
    path = save(tmp_path, ids, vocab_size=100, facts={"rows": 2})
    assert torch.equal(load(path), ids)
    before = path.stat().st_mtime_ns
    save(tmp_path, ids, vocab_size=100, facts={"rows": 2})
    assert path.stat().st_mtime_ns == before
    path.write_text(path.read_text().replace("90]", "91]"))
    for broken in (path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match="no readable draft vocabulary"):
            load(broken)


def test_table_and_advice():
    rows = zipf_rows(40, 0)
    entries = vocab_report.table(Sample(rows, 4000), tokenizer=chat_tokenizer(), eos_ids=[1], recipe=500)
    assert [entry["size"] for entry in entries] == [500, 1024, 2048]
    for entry in entries:
        assert entry["unseen"] < entry["own"] <= entry["ceiling"] <= 1.0 and set(entry["groups"]) == {"chat"}
    shares = [entry["unseen"] for entry in entries]
    assert shares == sorted(shares)
    said = vocab_report.advice(entries, width=4000, recipe=500)
    assert "No 500 ids cover more than" in said and "No size here covers 99%" in said
    full = vocab_report.table(
        Sample([row([], [3] * 9, name=str(n)) for n in range(9)], 4000), tokenizer=chat_tokenizer(), eos_ids=[1]
    )
    assert "1024 is the smallest size here that covers 99%" in vocab_report.advice(full, width=4000, recipe=None)
    one = vocab_report.table(Sample(rows[:1], 4000), tokenizer=chat_tokenizer(), eos_ids=[1])
    assert "nothing can be said" in vocab_report.advice(one, width=4000, recipe=None)


def test_training_writes_the_vocabulary_beside_the_answers(tmp_path):
    from training import parts_of, rows_of, setup_of

    parts, rows = parts_of(drafter=dict(draft_vocab_size=40)), rows_of(9)
    (tmp_path / "answers").mkdir()
    setup = setup_of(parts, rows, tmp_path)
    saved = load(tmp_path / "answers" / "draft_vocab.json")
    assert torch.equal(saved, setup.heads.draft_ids.cpu()) and len(saved) == 40
    content = json.loads((tmp_path / "answers" / "draft_vocab.json").read_text())
    assert content["rows"] == 9 and set(content["coverage_of_unseen"]) == {"", "chat"} and content["weights"]
    setup_of(parts, rows, tmp_path / "plain")  # no answers folder: the answers came with the prompts
    assert torch.equal(load(tmp_path / "plain" / "draft_vocab.json"), saved)
