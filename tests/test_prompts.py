"""The built-in prompt sets: sizes, variety, and no overlap between training and held-out."""

import json
import re
from collections import Counter

import pytest

from draftsmith.data.prompts import build, heldout_rewrite
from draftsmith.data.prompts.families import MAX_FAMILY
from draftsmith.data.prompts.passages import passages

DOMAINS = {"code", "math", "chat", "rewrite"}


def load(split: str) -> list[dict]:
    text = (build.FOLDER / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def grams(text: str, size: int = 8) -> set[tuple[str, ...]]:
    tokens = words(text)
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


@pytest.fixture(scope="module")
def train() -> list[dict]:
    return load("train")


@pytest.fixture(scope="module")
def heldout() -> list[dict]:
    return load("heldout")


def test_counts_per_domain(train, heldout):
    by_domain = Counter(row["domain"] for row in train)
    assert set(by_domain) == DOMAINS and len(train) >= 3200 and min(by_domain.values()) >= 750
    by_domain = Counter(row["domain"] for row in heldout)
    assert set(by_domain) == DOMAINS and min(by_domain.values()) >= 80


def test_rows_have_the_documented_form(train, heldout):
    for row in train + heldout:
        assert set(row) == {"id", "domain", "family", "turns"}
        assert row["family"].startswith(f"{row['domain']}_")
        assert len(row["turns"]) == 1 and len(row["turns"][0]) >= 15
        assert row["turns"][0] == row["turns"][0].strip()


def test_no_unfilled_slot_outside_code(train, heldout):
    for row in train + heldout:
        if row["domain"] != "code":
            assert not re.search(r"\{\w*\}|\|\|", row["turns"][0]), row


def test_ids_and_prompts_are_unique(train, heldout):
    rows = train + heldout
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({" ".join(words(row["turns"][0])) + re.sub(r"\w|\s", "", row["turns"][0]) for row in rows}) == len(rows)


def test_no_family_dominates_and_none_is_shared(train, heldout):
    sizes = Counter(row["family"] for row in train)
    assert max(sizes.values()) <= MAX_FAMILY and max(sizes.values()) <= 0.02 * len(train)
    assert not set(sizes) & {row["family"] for row in heldout}


def test_heldout_shares_no_prompt_and_no_eight_words_with_training(train, heldout):
    assert not {" ".join(words(r["turns"][0])) for r in train} & {" ".join(words(r["turns"][0])) for r in heldout}
    seen = {gram: row["id"] for row in train for gram in grams(row["turns"][0])}
    shared = {(row["id"], seen[g], " ".join(g)) for row in heldout for g in grams(row["turns"][0]) if g in seen}
    assert not shared


def test_no_heldout_prompt_is_nearly_a_training_prompt(train, heldout):
    bags = {domain: [set(words(r["turns"][0])) for r in train if r["domain"] == domain] for domain in DOMAINS}
    for row in heldout:
        bag = set(words(row["turns"][0]))
        # Sets whose sizes differ by more than the limit cannot reach it.
        near = [b for b in bags[row["domain"]] if 0.6 <= len(b) / len(bag) <= 1 / 0.6]
        assert max((len(bag & b) / len(bag | b) for b in near), default=0.0) < 0.6, row


def test_overlap_check_finds_a_planted_copy(train):
    planted = f"Please look: {train[3]['turns'][0]}"
    assert grams(planted) & grams(train[3]["turns"][0])


def test_passages_are_many_distinct_and_of_the_right_length():
    texts = [text for _, text in passages()]
    assert len(set(texts)) == len(texts) >= 150
    assert len(set(heldout_rewrite.PASSAGES)) >= 40
    for text in texts + heldout_rewrite.PASSAGES:
        assert 40 <= len(text.split()) <= 150, text
    assert not {g for t in texts for g in grams(t)} & {g for t in heldout_rewrite.PASSAGES for g in grams(t)}


def test_any_prefix_is_balanced(train):
    for size in (100, 400, 1200):
        domains = Counter(row["domain"] for row in train[:size])
        assert max(domains.values()) - min(domains.values()) <= 0.03 * size + 2
        assert max(Counter(row["family"] for row in train[:size]).values()) <= 0.02 * size + 2


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_files_are_what_the_generator_writes(split):
    assert (build.FOLDER / f"{split}.jsonl").read_bytes() == build.render(split).encode("utf-8")


def masked(text: str) -> list[str]:
    """Words of a prompt with quoted text, numbers and names masked: what is left of it is its template."""
    text = re.sub(r'"[^"\n]*"|`[^`\n]*`', " quoted ", text)
    text = re.sub(r"(?<=[a-z,;:] )[A-Z][a-z]+\b", "name", text)
    return re.findall(r"[a-z']+", re.sub(r"\d+(?:[.,:]\d+)*", " number ", text).lower())


def largest_share(rows: list[dict], cut) -> float:
    """Share of the rows that hold the most frequent of the word runs `cut(words)`."""
    held = Counter(run for row in rows for run in set(cut(masked(row["turns"][0]))))
    return max(held.values()) / len(rows)


def test_no_template_covers_more_than_two_percent_whatever_its_family_is_called(train):
    """Measured on the texts: the opening, any run of 8 masked words, and any run of 4 words as they stand, anywhere."""
    runs = Counter(
        run for row in train for run in {tuple(w[i : i + 4]) for w in [row["turns"][0].split()] for i in range(len(w) - 3)}
    )
    assert max(runs.values()) <= 0.02 * len(train)
    assert largest_share(train, lambda w: [tuple(w[:5])]) <= 0.02
    assert largest_share(train, lambda w: [tuple(w[i : i + 8]) for i in range(len(w) - 7)]) <= 0.02


def test_near_duplicate_check_separates_training_and_heldout(train):
    from draftsmith.data.config import DataConfig, DoctorConfig
    from draftsmith.data.source import load_prompts, overlap

    training = load_prompts(DataConfig())
    held = load_prompts(DataConfig(prompts="builtin:heldout", near_duplicates=None))
    assert len(training) == len(train) and not overlap(training, held, near=DoctorConfig().max_overlap / 2)
