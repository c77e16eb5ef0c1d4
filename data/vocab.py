"""Reduced draft vocabulary (FR-Spec, Zhao et al. 2025): the ids that the target's own answers use most.

Score of an id: how often the answers hold it, plus a share of what its merge rank makes one expect, plus a share of the prompts
that hold it. A byte-pair tokenizer merges frequent pairs first, so a low rank is a frequent token of the text that the
tokenizer was made from: of an id that was never seen it says more than its absence from few answers does. The expectation is a
power law of the rank, fitted to the answers themselves. Prompts speak for words that answers repeat. Both shares are chosen by
cross-validation over prompts inside the rows, so neither can be worse there than counting alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .chat import TokenRow
from .manifest import write_atomic

FILE = "draft_vocab.json"
FOLDS = 3
KNEE = 100.0  # ranks up to about here are equally frequent: single characters, the first merges


@dataclass(frozen=True, slots=True)
class Weights:
    """Shares of merge rank and prompts in the score of an id."""

    rank: float = 1.0
    prompts: float = 0.0


GRID = tuple(Weights(rank, prompts) for rank, prompts in product((0.01, 0.3, 1.0, 3.0), (0.0, 0.1, 0.3, 1.0)))


# ---- the tokenizer's word -----------------------------------------------------------------------------------------


def merge_ranks(tokenizer: Any, vocab_size: int) -> Tensor:
    """Order in which a byte-pair tokenizer made its tokens, int64 [V]: characters 0, then by merge; tokens that no merge makes
    (added ones) come last. The ids themselves for tokenizers of other kinds, which number by frequency as well.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    if model.get("type") != "BPE":
        return torch.arange(vocab_size)
    made: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"], start=1):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made.setdefault(left + right, rank)
    ranks = torch.full((vocab_size,), len(made) + 1)
    for token, index in model["vocab"].items():
        if index < vocab_size and (token in made or len(token) == 1):
            ranks[index] = made.get(token, 0)
    return ranks


def essential_ids(tokenizer: Any, eos_ids: Collection[int]) -> list[int]:
    """Ids that a draft vocabulary never lacks: end tokens, single bytes, and added tokens that the chat template writes."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {*eos_ids, *(index for index, token in added.items() if len(str(token)) > 1 and str(token) in template)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    model = state.get("model", {})
    if model.get("type") == "BPE":
        vocab = model["vocab"]
        if model.get("byte_fallback"):
            found |= {vocab[f"<0x{byte:02X}>"] for byte in range(256) if f"<0x{byte:02X}>" in vocab}
        elif "ByteLevel" in json.dumps([state.get("pre_tokenizer"), state.get("decoder")]):
            found |= {index for token, index in vocab.items() if len(token) == 1}
    return sorted(found)


def required_ids(tokenizer: Any, eos_ids: Collection[int], size: int) -> list[int]:
    """`essential_ids` where they leave at least half of `size` to the answers, else the end tokens alone."""
    found = essential_ids(tokenizer, eos_ids)
    return found if 2 * len(found) <= size else sorted(set(eos_ids))


# ---- counting -----------------------------------------------------------------------------------------------------


def _ids(row: TokenRow, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Supervised ids of a row, and the distinct others."""
    ids, mask = torch.tensor(row.input_ids, dtype=torch.long), torch.tensor(row.loss_mask, dtype=torch.bool)
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(f"row {row.id!r}: token id {int(ids.max())} is outside the vocabulary of {vocab_size}")
    return ids[mask], ids[~mask].unique()


def token_counts(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """int64 [V]: how often each id is supervised, which is how often a drafter is asked for it.

    Raises ValueError for an id outside the vocabulary.
    """
    found = [_ids(row, vocab_size)[0] for row in rows]
    return torch.bincount(torch.cat(found) if found else torch.zeros(0, dtype=torch.long), minlength=vocab_size)


def rank_prior(counts: Tensor, ranks: Tensor) -> Tensor:
    """Expected count of each id by its merge rank, float64 [V]: exp(a) (rank + KNEE)^-b, Poisson likelihood, b >= 0.

    counts: [V]; ranks: [V]. All zero where nothing was counted. Newton's method on the two parameters.
    """
    total = float(counts.sum())
    if not total:
        return torch.zeros(len(counts), dtype=torch.float64)
    x = torch.log(ranks.double() + KNEE)
    x = x - x.mean()
    inputs, slope = torch.stack([torch.ones_like(x), x]), torch.tensor([0.0, -1.0], dtype=torch.float64)
    for _ in range(50):
        slope[0] += torch.log(total / torch.exp(slope @ inputs).sum())  # the best level for this slope
        expected = torch.exp(slope @ inputs)
        hessian = (inputs * expected) @ inputs.T + 1e-9 * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(hessian, inputs @ (counts.double() - expected))
        slope += step * min(1.0, 1.0 / float(step.abs().max().clamp_min(1e-12)))
        if float(step.abs().max()) < 1e-9:
            break
    slope[1] = slope[1].clamp(max=0.0)
    slope[0] += torch.log(total / torch.exp(slope @ inputs).sum())
    return torch.exp(slope @ inputs)


class Sample:
    """Token counts of rows, in FOLDS parts that share no prompt.

    counts, prompts: int64 [parts, V], supervised tokens and rows whose prompt holds an id; a single part for rows of one
    prompt. groups: names of a row under which coverage is reported (default: its domain).
    """

    def __init__(
        self,
        rows: Sequence[TokenRow],
        vocab_size: int | None = None,
        *,
        ranks: Tensor | None = None,
        groups: Callable[[TokenRow], Iterable[str]] = lambda row: (row.domain,),
    ) -> None:
        width = vocab_size or 1 + max((max(row.input_ids, default=0) for row in rows), default=0)
        prompts = {name: n for n, name in enumerate(dict.fromkeys(row.id.split("#")[0] for row in rows))}
        self.parts = max(1, min(FOLDS, len(prompts)))
        self.ranks = torch.arange(width) if ranks is None else ranks
        self.counts = torch.zeros(self.parts, width, dtype=torch.long)
        self.prompts = torch.zeros(self.parts, width, dtype=torch.long)
        self.groups: dict[str, Tensor] = {}
        for row in rows:
            part = prompts[row.id.split("#")[0]] % self.parts
            supervised, others = _ids(row, width)
            seen = torch.bincount(supervised, minlength=width) if len(supervised) > width // 64 else None
            for name in ("", *groups(row)):
                to = self.counts if not name else self.groups.setdefault(name, torch.zeros_like(self.counts))
                if seen is not None:
                    to[part] += seen
                else:
                    to[part].index_add_(0, supervised, torch.ones_like(supervised))
            self.prompts[part, others] += 1

    def padded(self, vocab_size: int) -> Sample:
        """The same counts over a vocabulary that is at least as wide."""
        more = vocab_size - self.counts.shape[1]
        if more <= 0:
            return self
        wide = object.__new__(Sample)
        wide.parts, wide.ranks = self.parts, torch.cat([self.ranks, torch.arange(len(self.ranks), vocab_size)])
        wide.counts, wide.prompts = pad(self.counts, (0, more)), pad(self.prompts, (0, more))
        wide.groups = {name: pad(counts, (0, more)) for name, counts in self.groups.items()}
        return wide

    def _score(self, parts: Sequence[int], weights: Weights) -> Tensor:
        """float64 [V]; a positive share of the prior also orders what was never seen."""
        counts = self.counts[list(parts)].sum(0).double()
        prior, total = rank_prior(counts, self.ranks), max(1.0, float(counts.sum()))
        if not bool(prior.any()):
            prior = 1.0 / (1.0 + self.ranks.double())
        # beyond the fit, ties go to the lower rank
        return counts + weights.rank * prior + weights.prompts * self.prompts[list(parts)].sum(0) - 1e-9 * self.ranks / total

    def _take(self, parts: Sequence[int], size: int, required: Sequence[int], weights: Weights) -> Tensor:
        score = self._score(parts, weights)
        score[list(required)] = torch.inf
        return torch.argsort(score, descending=True, stable=True)[:size]

    def tune(self, size: int, required: Sequence[int] = ()) -> Weights:
        """The weights of GRID that cover most of the parts left out, the first of equal ones; the default with one part."""
        if self.parts == 1:
            return Weights()
        return max(GRID, key=lambda weights: self._held(size, required, weights)[0])

    def _held(self, size: int, required: Sequence[int], weights: Weights) -> tuple[int, list[Tensor]]:
        taken = [self._take([p for p in range(self.parts) if p != n], size, required, weights) for n in range(self.parts)]
        return sum(int(self.counts[n, ids].sum()) for n, ids in enumerate(taken)), taken

    def choose(self, size: int, required: Sequence[int] = (), weights: Weights | None = None) -> Tensor:
        """Target ids of the draft vocabulary, int64 [size] ascending; as the function `choose`."""
        width = self.counts.shape[1]
        needed = sorted(set(required))
        if not max(1, len(needed)) <= size <= width:
            raise ValueError(f"draft_vocab_size={size}: allowed {max(1, len(needed))} to {width}")
        weights = weights or self.tune(size, needed)
        return self._take(range(self.parts), size, needed, weights).sort().values

    def held_out(self, size: int, required: Sequence[int] = (), weights: Weights | None = None) -> dict[str, float]:
        """Coverage of answers that the vocabulary was not made from, by group and in all (""); empty with one part."""
        if self.parts == 1:
            return {}
        _, taken = self._held(size, required, weights or self.tune(size, required))
        found = {}
        for name, counts in (("", self.counts), *sorted(self.groups.items())):
            if total := int(counts.sum()):
                found[name] = sum(int(counts[n, ids].sum()) for n, ids in enumerate(taken)) / total
        return found

    def ceiling(self, size: int) -> float:
        """Coverage of all rows by the ids that they use most: no vocabulary of this size covers more of these answers."""
        best = self.counts.sum(0).sort(descending=True).values[:size].sum()
        return float(best) / max(1, int(self.counts.sum()))


def choose(
    rows: Iterable[TokenRow],
    size: int,
    *,
    vocab_size: int,
    required: Sequence[int] = (),
    ranks: Tensor | None = None,
    weights: Weights | None = None,
) -> Tensor:
    """Target ids of the draft vocabulary, int64 [size] ascending: column i of a draft logit is target id ids[i].

    The `size` ids of highest score (see the module), ties to the lower merge rank; `required` ids are always among them.
    ranks: `merge_ranks` of the tokenizer, default the ids. weights: default by cross-validation.

    Raises ValueError for a size that is impossible.
    """
    return Sample(list(rows), vocab_size, ranks=ranks).choose(size, required, weights)


def coverage(ids: Tensor, rows: Iterable[TokenRow], *, vocab_size: int | None = None) -> float:
    """Share of the supervised tokens of `rows` that are among `ids` (int64 [Vd]); nan without any.

    What is not covered is never accepted: the mean acceptance cannot exceed this share.
    """
    rows = list(rows)
    width = vocab_size or 1 + max([int(ids.max()), *(max(row.input_ids) for row in rows)])
    counts = token_counts(rows, width)
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else float("nan")


def coverage_by_domain(ids: Tensor, rows: Iterable[TokenRow], *, vocab_size: int) -> dict[str, float]:
    """Coverage of each domain, by name."""
    by_domain: dict[str, list[TokenRow]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, []).append(row)
    return {name: coverage(ids, part, vocab_size=vocab_size) for name, part in sorted(by_domain.items())}


# ---- file ---------------------------------------------------------------------------------------------------------


def save(folder: Path, ids: Tensor, *, vocab_size: int, facts: dict[str, Any]) -> Path:
    """Write the draft vocabulary beside the data it was made from: `d2t[i]` is the target id of draft id i.

    facts: recorded with it. Nothing is written where the file says the same already (every rank of a launch calls this).
    """
    content = {"format": 1, "size": len(ids), "vocab_size": vocab_size, **facts, "d2t": ids.tolist()}
    content["sha256"] = hashlib.sha256(json.dumps(content["d2t"]).encode()).hexdigest()
    path, text = folder / FILE, json.dumps(content) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text)
    return path


def load(path: Path) -> Tensor:
    """The ids that `save` wrote, int64 [size]. Raises ValueError for a file that is broken or was changed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = content["d2t"]
        if content["sha256"] != hashlib.sha256(json.dumps(ids).encode()).hexdigest():
            raise ValueError("its ids were changed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no readable draft vocabulary ({error})") from None
    return torch.tensor(ids, dtype=torch.long)
