"""Near duplicates: the shingles, the promise of the bands, and agreement with comparing every pair."""

import random

import numpy as np
import pytest

from draftsmith.data.dedup import (
    HASHES,
    MISS,
    Pair,
    bands,
    jaccard,
    near_duplicates,
    near_overlap,
    shingles,
    signatures,
    words,
)


def test_words_ignore_case_and_punctuation_but_not_operators():
    assert words("Hello,  WORLD! (ﬁne)") == ["hello", "world", "fine"]
    assert words("3 + 4?") != words("3 - 4?")
    assert words("東京tower") == ["東", "京", "tower"]


def test_shingles_are_distinct_triples():
    assert len(shingles("a b c d a b c")) == 4  # abc bcd cda dab (abc again)
    assert len(shingles("a b")) == len(shingles("a")) == 1 and len(shingles("?!")) == 0
    assert jaccard(shingles("a b c d"), shingles("b c d e")) == pytest.approx(1 / 3)
    assert set(shingles("b c d")) < set(shingles("a b c d"))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_bands_keep_the_promise_with_the_longest_rows(threshold):
    count, rows = bands(threshold)
    assert count * rows <= HASHES
    assert (1 - threshold**rows) ** count <= MISS
    longer = rows + 1
    assert longer > HASHES or (1 - threshold**longer) ** (HASHES // longer) > MISS


def test_signatures_estimate_the_jaccard_index():
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(40)}" for _ in range(200)) for _ in range(4)]
    sets = [shingles(text) for text in texts]
    sets.append(np.unique(np.concatenate([sets[0][:100], sets[1][:50]])))
    found = signatures(sets)
    for a, b in ((0, 4), (1, 4), (0, 1)):
        estimate = float((found[a] == found[b]).mean())
        assert estimate == pytest.approx(jaccard(sets[a], sets[b]), abs=4 * 0.5 / HASHES**0.5)


def changed(words_, count, rng):
    out = list(words_)
    for place in rng.sample(range(len(out)), count):
        out[place] = f"new{rng.randrange(10**6)}"
    return out


def test_finds_what_comparing_every_pair_finds():
    rng = random.Random(1)
    texts = []
    for _ in range(40):
        base = [f"w{rng.randrange(3000)}" for _ in range(60)]
        texts += [" ".join(changed(base, count, rng)) for count in (0, 1, 2, 5, 12)]
    rng.shuffle(texts)
    sets = [shingles(text) for text in texts]
    for threshold in (0.5, 0.8):
        kept, want = [], []
        for n, own in enumerate(sets):
            near = [k for k in kept if jaccard(own, sets[k]) >= threshold]
            if near:
                want.append(Pair(n, near[0], jaccard(own, sets[near[0]])))
            else:
                kept.append(n)
        assert near_duplicates(texts, threshold) == want and 30 < len(want) < 170


def test_groups_are_not_compared_and_empty_texts_are_no_duplicates():
    assert near_duplicates(["a b c d", "a b c d", "?", "!"], 0.9, ["x", "y", "x", "x"]) == []
    assert near_duplicates(["a b c d", "A, b c d"], 0.9) == [Pair(1, 0, 1.0)]
    assert near_duplicates([], 0.9) == [] and near_overlap(["a"], [], 0.5) == near_overlap(["a"], ["?"], 0.5) == []


def test_overlap_takes_the_best_match_and_what_is_contained():
    held = "one two three four five six seven eight nine ten eleven"  # 9 shingles
    found = near_overlap(["zero", f"first {held}", f"{held} " + "a b c d e f g h i j k l"], ["x y z", held], 0.6)
    assert [(pair.index, pair.other) for pair in found] == [(1, 1), (2, 1)]
    assert found[0].similarity == found[1].similarity == 1.0
    short = "one two three four"  # 2 shingles: found by the Jaccard index alone
    assert near_overlap([f"{short} five six seven eight"], [short], 0.6) == []
