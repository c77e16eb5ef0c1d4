"""Requests while they live in the engine: where each row's answer stands and ends, and which cache slot it borrows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .config import SamplingParams
from .stats import CycleRecord

if TYPE_CHECKING:
    from .schedule import Scheduler

_serials = count()


@dataclass(frozen=True)
class Request:
    """One generation: prompt token ids (at least one) and how to sample."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Completion:
    """token_ids include the end token that stopped the row. finish_reason: stop, length (budget), context (limit) or
    cancelled."""

    id: str
    token_ids: list[int]
    finish_reason: str
    cycles: list[CycleRecord]
    prompt_tokens: int


class Row:
    """One live request. The anchor is its last committed token: at absolute position `position`, not yet in the cache.

    filled: prompt tokens whose keys and values are in the slot. taps: the target's states of the prompt part run so far.
    """

    __slots__ = (
        "_max_context", "_tokenizer", "begun", "cycles", "drafter_start", "ends", "filled", "finish_reason", "hot", "position",
        "prompt", "request", "scheduler", "serial", "slot", "tail", "taps", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, eos_ids: frozenset[int], max_context: int, tokenizer: Any) -> None:
        params = request.sampling
        self.request, self.prompt = request, list(request.prompt_ids)
        self.serial = next(_serials)
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        # A stop string can span tokens and each token has at least one byte: this many tokens are sure to hold any of them.
        self.tail = max((len(text.encode()) for text in params.stop), default=0) + 4
        self.hot = params.temperature > 0
        self.slot = -1  # none yet
        self.filled = self.drafter_start = 0
        self.position = len(self.prompt)
        self.tokens: list[int] = []
        self.taps: list[Tensor] = []
        self.cycles: list[CycleRecord] = []
        self.finish_reason: str | None = None
        self.begun = False  # the proposer was given the prompt
        self.scheduler: Scheduler | None = None  # the one that was told of this row
        self._max_context, self._tokenizer = max_context, tokenizer

    @property
    def budget(self) -> int:
        """Tokens the answer may still have."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def room(self) -> int:
        """Drafts that could still be committed before the token after them: the budget and the context limit bound it."""
        return max(0, min(self.budget - 1, self._max_context - self.position - 2))

    def keep(self, tokens: list[int]) -> list[int]:
        """Commit tokens: cut at the first end token or stop string, then at the budget, then at the context limit."""
        kept, reason = tokens, None
        stop = self.request.sampling.stop
        if stop or not self.ends.isdisjoint(tokens):
            for i, token in enumerate(tokens):
                if token in self.ends or (stop and self._hits_stop(tokens[: i + 1], stop)):
                    kept, reason = tokens[: i + 1], "stop"
                    break
        if len(kept) > self.budget or (reason is None and len(kept) == self.budget):
            kept, reason = kept[: self.budget], "length"
        self.tokens.extend(kept)
        if reason is None and len(self.prompt) + len(self.tokens) >= self._max_context:
            reason = "context"
        self.finish_reason = reason
        return kept

    def record(self, proposed: int, accepted: int, committed: int) -> CycleRecord:
        """Note one verification and move the anchor."""
        self.position += committed
        record = CycleRecord(proposed, accepted, committed)
        self.cycles.append(record)
        return record

    def resident(self) -> list[int]:
        """Tokens whose keys and values are in the slot: part of the prompt, or all of it and the answer up to the anchor."""
        return self.prompt[: self.filled] if not self.tokens else self.prompt + self.tokens[:-1]

    def completion(self) -> Completion:
        """What the caller gets."""
        assert self.finish_reason is not None
        return Completion(self.request.id, self.tokens, self.finish_reason, self.cycles, len(self.prompt))

    def _hits_stop(self, fresh: list[int], stop: tuple[str, ...]) -> bool:
        text = self._tokenizer.decode((self.tokens[-self.tail :] + fresh)[-self.tail :], skip_special_tokens=True)
        return any(s in text for s in stop)


class Slots:
    """The free cache slots, and with `reuse` the tokens that each slot still holds.

    target[slot]: tokens whose keys and values the target's cache holds. drafter[slot]: those that the proposer has seen, in its
    `begin` and `commit`.
    """

    def __init__(self, count: int, *, reuse: bool) -> None:
        self.reuse = reuse
        self._free: dict[int, None] = dict.fromkeys(range(count))  # in the order they were given back
        self.target: list[list[int]] = [[] for _ in range(count)]
        self.drafter: list[list[int]] = [[] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, prompt: list[int], *, drafting: bool, tapped: bool) -> tuple[int, int, int]:
        """(slot, start, drafter_start): a free slot, and how many leading prompt tokens target and proposer hold there.

        Without reuse the lowest slot: neighbours in the cache are read without a copy. With it the longest start, and among
        equals the slot that has been free for longest. drafting: there is a proposer; tapped: it needs the target's states of
        all it does not hold, so the target can skip no more than the proposer.
        """
        slot, start, drafter_start = min(self._free), 0, 0
        if self.reuse:
            found = [(slot, *self._starts(slot, prompt, drafting, tapped)) for slot in self._free]
            slot, start, drafter_start = max(found, key=lambda item: item[1])  # the first of equals
        del self._free[slot]
        return slot, start, drafter_start

    def give(self, row: Row, *, drafted: bool | None) -> None:
        """Back to the free ones after `row`. drafted: the proposer followed the row to its end (False: it failed on the way and
        what it holds is unknown; None: it has not seen the row, and holds what it held before)."""
        self._free[row.slot] = None
        if self.reuse:
            self.target[row.slot] = row.resident()
            if drafted is not None:
                self.drafter[row.slot] = self.target[row.slot] if drafted else []

    def _starts(self, slot: int, prompt: list[int], drafting: bool, tapped: bool) -> tuple[int, int]:
        # The last prompt token always runs: its logits give the first token of the answer.
        most = len(prompt) - 1
        start = min(common_prefix(self.target[slot], prompt), most)
        if not drafting:
            return start, 0
        drafter_start = min(common_prefix(self.drafter[slot], prompt), most)
        return (min(start, drafter_start),) * 2 if tapped else (start, drafter_start)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])
