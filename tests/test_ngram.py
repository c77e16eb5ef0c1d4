"""Prompt lookup and suffix-automaton drafting."""

from __future__ import annotations

import random
import time

import pytest
import torch

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.ngram import NgramProposer
from draftsmith.runtime.sampling import SamplingBatch
from draftsmith.runtime.suffix import SuffixAutomaton, SuffixProposer


def drafts(proposer, rows, anchors, max_slots=16):
    sampling = SamplingBatch.build([SamplingParams()] * len(rows), [0] * len(rows))
    proposal = proposer.propose(rows, torch.tensor(anchors), sampling, max_slots)
    width = min(proposer.num_slots, max_slots)
    assert proposal.probs is None and proposal.draft_ids is None
    assert proposal.tokens.shape == (len(rows), width) and proposal.tokens.dtype == torch.int64
    assert proposal.lengths.dtype == torch.int64 and bool((proposal.tokens >= 0).all())
    return [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)]


def commit(proposer, row, tokens):
    proposer.commit([row], torch.tensor([0]), [tokens], None)


def brute_force(text, count, high, low):
    """Longest, then most recent earlier occurrence of the last n tokens; the copy may read what it writes."""
    for size in range(high, low - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if size <= len(text) and text[end - size : end] == text[-size:]:
                out = list(text)
                for index in range(count):
                    out.append(out[end + index])
                return out[len(text) :]
    return []


def test_longest_then_most_recent_match():
    proposer = NgramProposer(num_slots=3)
    proposer.begin(0, [1, 2, 3, 9, 9, 2, 3, 5, 6, 7, 8, 3, 4, 1, 2])
    # (1, 2, 3) is followed by 9, 9, 2; the more recent (2, 3) by 5 and (3) by 4.
    assert drafts(proposer, [0], [3]) == [[9, 9, 2]]
    commit(proposer, 0, [9, 2, 3])  # now (9, 2, 3) -> 5, 6, 7
    assert drafts(proposer, [0], [3]) == [[5, 6, 7]]
    assert drafts(proposer, [0], [3], max_slots=1) == [[5]]


def test_no_match_drafts_nothing_and_a_loop_goes_on():
    proposer = NgramProposer(num_slots=5)
    proposer.begin(0, [1, 2, 3])
    proposer.begin(1, [7, 8, 7])
    assert drafts(proposer, [1, 0], [8, 4]) == [[7, 8, 7, 8, 7], []]
    commit(proposer, 0, [4])
    assert drafts(proposer, [0], [4]) == [[4] * 5]


@pytest.mark.parametrize("high,low", [(3, 1), (4, 2), (1, 1)])
def test_incremental_index_equals_a_search(high, low):
    generator = random.Random(0)
    proposer = NgramProposer(num_slots=4, max_ngram=high, min_ngram=low)
    text = [generator.randrange(4) for _ in range(10)]
    proposer.begin(3, text[:-1])
    found = 0
    for _ in range(120):
        expected = brute_force(text, 4, high, low)
        assert drafts(proposer, [3], [text[-1]]) == [expected]
        found += bool(expected)
        new = [generator.randrange(4) for _ in range(generator.randrange(1, 4))]
        commit(proposer, 3, new)
        text += new
    assert found > 60


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_rows_are_separate_and_forgotten(make):
    proposer = make(num_slots=2)
    proposer.begin(0, [1, 2, 3, 1])
    proposer.begin(1, [1, 9, 8, 1])
    assert drafts(proposer, [0, 1], [2, 9]) == [[3, 1], [8, 1]]
    proposer.release(0)
    proposer.begin(0, [4, 5])
    assert drafts(proposer, [0, 1], [6, 9]) == [[], [8, 1]]
    proposer.release(7)  # a row that never was


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_first_anchor_never_shown_is_never_drafted(make):
    """Drafting was off in the first cycle: the first token is unknown, and nothing copies across it."""
    proposer = make(num_slots=4)
    proposer.begin(0, [1, 2, 3])
    commit(proposer, 0, [5, 2, 3])
    assert drafts(proposer, [0], [3]) == [[]]
    commit(proposer, 0, [5])
    (draft,) = drafts(proposer, [0], [5])
    assert draft[:2] == [2, 3]


@pytest.mark.parametrize("values", [{"num_slots": 0}, {"max_ngram": 2, "min_ngram": 3}, {"min_ngram": 0}])
def test_bad_ngram_settings(values):
    with pytest.raises(ValueError):
        NgramProposer(**values)


@pytest.mark.parametrize("values", [{"num_slots": 0}, {"min_match": 0}, {"min_survival": 1.5}, {"corpus_tokens": -1}])
def test_bad_suffix_settings(values):
    with pytest.raises(ValueError):
        SuffixProposer(**values)


# Suffix automaton.


def occurrences(text, piece):
    return sum(text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1))


def test_automaton_counts_and_longest_suffix_equal_a_search():
    generator = random.Random(1)
    for _ in range(20):
        automaton, text = SuffixAutomaton(), []
        for _ in range(60):
            token = generator.randrange(3)
            automaton.append(token)
            text.append(token)
            longest = next((n for n in range(len(text) - 1, 0, -1) if occurrences(text, text[-n:]) > 1), 0)
            assert automaton.repeated_suffix()[1] == longest
        for start in range(0, 60, 7):
            piece = text[start : start + 4]
            state = matched = 0
            for token in piece:
                state, matched = automaton.step(state, matched, token)
            assert matched == len(piece)
            assert automaton._count[state] == occurrences(text, piece)
        assert len(automaton) <= 2 * len(text)


def test_most_frequent_continuation_and_its_survival():
    proposer = SuffixProposer(num_slots=3)
    # After (1, 2): 5 twice, 6 once and most recently.
    proposer.begin(0, [1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1])
    sampling = SamplingBatch.build([SamplingParams()], [0])
    proposal = proposer.propose([0], torch.tensor([2]), sampling, 7)
    assert proposal.tokens.tolist() == [[5, 8, 1]]  # 7 and 8 once each: the later
    assert proposal.survival is not None
    assert proposal.survival[0].tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    careful = SuffixProposer(num_slots=3, min_survival=0.5)
    careful.begin(0, [1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1])
    assert drafts(careful, [0], [2]) == [[5]]


def test_min_match_and_loops():
    proposer = SuffixProposer(num_slots=4, min_match=2)
    proposer.begin(0, [1, 2, 3, 4, 5])
    assert drafts(proposer, [0], [3]) == [[]]  # one token of match
    commit(proposer, 0, [4])
    assert drafts(proposer, [0], [4]) == [[5, 3, 4, 5]]  # the text itself as continued by the draft


def test_shared_corpus_serves_the_next_request():
    proposer = SuffixProposer(num_slots=4, corpus_tokens=1000)
    proposer.begin(0, [50, 51])
    assert drafts(proposer, [0], [10]) == [[]]
    commit(proposer, 0, [11, 12, 13, 14])
    proposer.begin(1, [60, 10])
    assert drafts(proposer, [1], [11]) == [[]]
    proposer.release(0)  # output 10 11 12 13 14 joins the corpus while row 1 runs
    assert drafts(proposer, [1], [11]) == [[12, 13, 14]]  # and the draft ends with that output
    commit(proposer, 1, [12, 13])
    assert drafts(proposer, [1], [13]) == [[14]]
    commit(proposer, 1, [77])
    assert drafts(proposer, [1], [77]) == [[]]
    private = SuffixProposer(num_slots=4)
    private.begin(0, [50, 51])
    private.release(0)
    private.begin(1, [60, 10])
    assert drafts(private, [1], [11]) == [[]]


def test_corpus_stays_bounded():
    proposer = SuffixProposer(corpus_tokens=200)
    generator = random.Random(0)
    for _ in range(100):
        proposer.add_output([generator.randrange(50) for _ in range(30)])
        assert len(proposer._corpus) <= 2 * (200 + 30)
        assert proposer._corpus_size <= 200
    proposer.add_output(list(range(1000, 1500)))
    assert proposer._corpus_size <= 200


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_cost_per_token_does_not_grow_with_the_text(make):
    """A text of one repeated token is the worst case of both: time per token stays within a wide factor."""
    proposer = make()
    proposer.begin(0, [5] * 500)
    drafts(proposer, [0], [5])

    def timed():
        start = time.perf_counter()
        for _ in range(300):
            commit(proposer, 0, [5])
            drafts(proposer, [0], [5])
        return time.perf_counter() - start

    early = min(timed(), timed())
    commit(proposer, 0, [5] * 20_000)
    assert min(timed(), timed()) < 4 * early
