"""Near-duplicate texts: word shingles, MinHash with banding to find candidates, the exact Jaccard index to judge them.

MinHash: Broder 1997; banding (locality-sensitive hashing): Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

SHINGLE = 3  # words
HASHES = 128
MISS = 1e-3  # a pair at the threshold is overlooked with at most this probability
WHOLE = 8  # an evaluation text of at least so many shingles also counts where it lies inside a longer training text
CHUNK = 1 << 18  # shingles hashed at once: HASHES times as many 8-byte numbers
_EASTERN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: every character is a word
# Signs that change the meaning of a sum or an expression are words, those that only structure a sentence are not.
_WORD = re.compile(rf"[{_EASTERN}]|[^\W_{_EASTERN}]+|[-+*/=<>^%&|~]")


def words(text: str) -> list[str]:
    """Words of a text for comparison: NFKC, lower case, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    data = word.encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data, 0x9E3779B9)


def shingles(text: str) -> np.ndarray:
    """Hashes of the distinct word triples of a text, uint64 ascending; a shorter text is one shingle, an empty one has none."""
    hashed = np.fromiter((_word_hash(word) for word in words(text)), dtype=np.uint64)
    if not len(hashed):
        return hashed
    size = min(SHINGLE, len(hashed))
    mixed = np.zeros(len(hashed) - size + 1, dtype=np.uint64)
    for offset in range(size):
        mixed = _mix(mixed * np.uint64(0x9E3779B97F4A7C15) + hashed[offset : offset + len(mixed)])
    return np.unique(mixed)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Shared part of two shingle sets."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared) if len(a) + len(b) else 0.0


def bands(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band): the longest bands, hence the fewest false candidates, that keep the promise of MISS.

    Two texts of similarity s agree in some band with probability 1 - (1 - s^rows)^bands.
    """
    for rows in range(HASHES, 1, -1):
        count = HASHES // rows
        if (1.0 - threshold**rows) ** count <= MISS:
            return count, rows
    return HASHES, 1


def signatures(sets: Sequence[np.ndarray]) -> np.ndarray:
    """MinHash signatures, uint64 [N, HASHES]; the row of an empty set means nothing."""
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 2**63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    out = np.zeros((len(sets), HASHES), dtype=np.uint64)
    start = 0
    while start < len(sets):
        end, total = start, 0
        while end < len(sets) and (end == start or total + len(sets[end]) <= CHUNK):
            total += len(sets[end])
            end += 1
        filled = [n for n in range(start, end) if len(sets[n])]
        if filled:
            joined = np.concatenate([sets[n] for n in filled])
            edges = np.cumsum([0, *(len(sets[n]) for n in filled[:-1])])
            for column, factor in enumerate(factors):
                out[filled, column] = np.minimum.reduceat(_mix(joined * factor), edges)
        start = end
    return out


@dataclass(frozen=True, slots=True)
class Pair:
    """Text `index` is nearly text `other` (of the same list, or of the other one)."""

    index: int
    other: int
    similarity: float


def near_duplicates(texts: Sequence[str], threshold: float, groups: Sequence[Hashable] | None = None) -> list[Pair]:
    """Texts of which an earlier, kept text of the same group is at least `threshold` similar, with the first such one.

    Judged by the exact Jaccard index of the shingles; a pair at the threshold is overlooked with probability MISS at most.
    """
    sets = [shingles(text) for text in texts]
    found = signatures(sets)
    count, rows = bands(threshold)
    buckets: list[dict[Hashable, list[int]]] = [defaultdict(list) for _ in range(count)]
    pairs: list[Pair] = []
    for index, own in enumerate(sets):
        if not len(own):
            continue
        group = groups[index] if groups is not None else None
        keys = [(group, found[index, band * rows : (band + 1) * rows].tobytes()) for band in range(count)]
        candidates = sorted({other for bucket, key in zip(buckets, keys, strict=True) for other in bucket.get(key, ())})
        for other in candidates:
            if (similarity := jaccard(own, sets[other])) >= threshold:
                pairs.append(Pair(index, other, similarity))
                break
        else:
            for bucket, key in zip(buckets, keys, strict=True):
                bucket[key].append(index)
    return pairs


def near_overlap(training: Iterable[str], heldout: Sequence[str], threshold: float) -> list[Pair]:
    """Training texts that are nearly a held-out text, each with the most similar one. Exact: no candidate is overlooked.

    The similarity is the Jaccard index or, for a held-out text of at least WHOLE shingles, the part of it that the training
    text contains.
    """
    sets = [shingles(text) for text in heldout]
    filled = [n for n, own in enumerate(sets) if len(own)]
    if not filled:
        return []
    owner = np.repeat(np.array(filled), [len(sets[n]) for n in filled])
    hashes = np.concatenate([sets[n] for n in filled])
    order = np.argsort(hashes, kind="stable")
    hashes, owner = hashes[order], owner[order]
    sizes = np.array([len(own) for own in sets])
    pairs = []
    for index, text in enumerate(training):
        own = shingles(text)
        low, high = np.searchsorted(hashes, own, "left"), np.searchsorted(hashes, own, "right")
        hit = high > low
        if not hit.any():
            continue
        owners = np.concatenate([owner[a:b] for a, b in zip(low[hit], high[hit], strict=True)])
        others, shared = np.unique(owners, return_counts=True)
        similar = shared / (len(own) + sizes[others] - shared)
        similar = np.where(sizes[others] >= WHOLE, np.maximum(similar, shared / sizes[others]), similar)
        best = int(np.argmax(similar))
        if similar[best] >= threshold:
            pairs.append(Pair(index, int(others[best]), float(similar[best])))
    return pairs
