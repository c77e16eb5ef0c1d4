"""Reduced draft vocabulary: chosen by the target's answers, filled by merge rank, coverage counted."""

import pytest
import torch

from draftsmith.data.chat import TokenRow
from draftsmith.data.vocab import choose, coverage, coverage_by_domain, token_counts


def row(prompt, answer, domain="chat"):
    return TokenRow("r", domain, prompt + answer, [False] * len(prompt) + [True] * len(answer))


ROWS = [row([50, 51, 52], [90, 90, 90, 80, 80, 70]), row([53], [90, 60, 1], "math")]


def test_only_supervised_tokens_count():
    counts = token_counts(ROWS, 100)
    assert counts.sum() == 9
    assert (counts[90], counts[80], counts[50]) == (4, 2, 0)
    with pytest.raises(ValueError, match="token id 90 is outside the vocabulary of 64"):
        token_counts(ROWS, 64)


def test_most_frequent_first_then_low_ids_and_always_the_required():
    assert choose(ROWS, 3, vocab_size=100, required=[2], smoothing=1.0).tolist() == [2, 80, 90]
    ids = choose(ROWS, 9, vocab_size=100, required=[2], smoothing=1.0)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 2, 3, 4, 60, 70, 80, 90]  # all five seen ids, EOS 2, the lowest unseen ids
    assert choose(ROWS, 100, vocab_size=100).tolist() == list(range(100))


def test_ties_at_equal_counts_go_to_the_lower_merge_rank():
    assert choose([row([], [70, 60, 80])], 2, vocab_size=100, smoothing=1.0).tolist() == [60, 70]


def test_strong_smoothing_prefers_low_unseen_ids_to_rare_high_ones():
    assert choose([row([], [99, 5, 5, 5])], 2, vocab_size=100, smoothing=4.0).tolist() == [0, 5]
    assert choose([row([], [99, 5, 5, 5])], 2, vocab_size=100, smoothing=1.0).tolist() == [5, 99]


@pytest.mark.parametrize(("size", "required"), [(0, ()), (101, ()), (1, (2, 3))])
def test_impossible_sizes(size, required):
    with pytest.raises(ValueError, match=f"draft_vocab_size={size}: allowed"):
        choose(ROWS, size, vocab_size=100, required=required)


def test_coverage_is_a_share_of_supervised_tokens():
    assert coverage(torch.tensor([80, 90]), ROWS) == pytest.approx(6 / 9)
    by_domain = coverage_by_domain(torch.tensor([80, 90]), ROWS, vocab_size=100)
    assert by_domain == {"chat": pytest.approx(5 / 6), "math": pytest.approx(1 / 3)}
    assert coverage(choose(ROWS, 5, vocab_size=100, smoothing=1.0), ROWS) == 1.0
