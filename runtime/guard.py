"""A proposer that may fail: its errors cost speed, never an answer.

A proposer that raises, or hands over something that is no proposal, loses its rows: they are released and decode plainly to
their end. The next requests use it again. After LIMIT failures with no whole drafted cycle between them it is switched off.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .propose import Proposal, Proposer
from .sampling import SamplingBatch
from .stats import EngineStats

LIMIT = 3
_MASS_ERROR = 1e-3  # how far the sum of a float32 law may be from 1


class Drafting:
    """The engine's proposer behind its failure rules. rows: slots in which the proposer holds a request's state."""

    def __init__(self, proposer: Proposer | None, vocab_size: int, *, on_host: bool) -> None:
        self.proposer, self.vocab_size, self.on_host = proposer, vocab_size, on_host
        self.rows: set[int] = set()
        self.stats = EngineStats()  # the engine puts its own in place
        self._may_skip = hasattr(proposer, "ask_survival")
        self._in_a_row, self._warned = 0, False
        self._failed = False  # since the last propose

    @property
    def on(self) -> bool:
        """There is a proposer and it is not switched off."""
        return self.proposer is not None

    def begin(self, slot: int, prompt: list[int], taps: Tensor | None, start: int, first: int) -> None:
        """Hand a prefilled prompt and the first token of the answer to the proposer."""
        assert self.proposer is not None
        self.rows.add(slot)
        # A proposer that is never asked to reuse a prefix need not know the argument.
        extra = (start,) if start else ()
        done, _ = self._call([slot], "begin", self.proposer.begin, slot, prompt, taps, *extra)
        tell = getattr(self.proposer, "first_token", None)
        if done and tell is not None:
            self._call([slot], "first_token", tell, slot, first)

    def propose(
        self, slots: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int, *, survival: bool = True
    ) -> tuple[Proposal | None, Any]:
        """Ask for drafts; survival: somebody will look at the survivals.

        Returns the proposal, None where the call failed or drafted nothing at all, and which rows' drafts are sound, see
        `check`. The tokens of the proposal are valid ids in every slot.
        """
        assert self.proposer is not None
        self._failed = False
        if self._may_skip:
            self.proposer.ask_survival = survival  # type: ignore[attr-defined]
        self.stats.draft_passes += 1
        self.stats.drafted_tokens += len(slots) * max_slots
        done, answer = self._call(slots, "propose", self._ask, slots, anchors, sampling, max_slots)
        return answer if done else (None, None)

    def _ask(self, slots: list[int], anchors: Tensor, sampling: SamplingBatch, max_slots: int) -> tuple[Proposal | None, Any]:
        assert self.proposer is not None
        proposal = self.proposer.propose(slots, anchors, sampling, max_slots)
        proposal.lengths = proposal.lengths.to(anchors.device)
        hot = not sampling.all_greedy
        sound = check(proposal, max_slots, self.vocab_size, len(slots), hot=hot, on_host=self.on_host)
        proposal.tokens = proposal.tokens.clamp(0, self.vocab_size - 1)
        return (proposal if proposal.tokens.shape[1] else None), sound

    def commit(self, slots: list[int], starts: Tensor, tokens: list[list[int]], taps: Tensor | None, *, drafted: bool) -> None:
        """Tell the proposer what was committed; drafted: its drafts were verified in this cycle."""
        assert self.proposer is not None
        self._call(slots, "commit", self.proposer.commit, slots, starts, tokens, taps)
        if drafted and not self._failed:
            self._in_a_row = 0

    def release(self, slot: int) -> None:
        """The request in this slot ended."""
        if slot in self.rows:
            self.rows.discard(slot)
            assert self.proposer is not None
            self._call([], "release", self.proposer.release, slot)

    def fail(self, slots: Sequence[int], what: str) -> None:
        """The proposer failed these rows: give up their state, warn, and switch it off if this keeps happening."""
        assert self.proposer is not None
        self.stats.proposer_failures += 1
        self._in_a_row += 1
        self._failed = True
        if not self._warned:
            self._warned = True
            _warn(f"the proposer failed, the rows it failed go on without drafts: {what}")
        off = self._in_a_row >= LIMIT
        for slot in list(self.rows) if off else slots:
            self.rows.discard(slot)
            with contextlib.suppress(Exception):  # it has failed already, and nothing of this row is used again
                self.proposer.release(slot)
        if off:
            self.proposer = None
            _warn(f"the proposer failed {LIMIT} times in a row and is switched off: {what}")

    def _call(self, slots: Sequence[int], what: str, function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        try:
            return True, function(*arguments)
        except Exception as error:
            self.fail(slots, f"{what}: {type(error).__name__}: {error}")
            return False, None


def check(proposal: Proposal, max_slots: int, vocab_size: int, rows: int, *, hot: bool, on_host: bool) -> list[bool] | Tensor:
    """Which rows' drafts can be verified: numbers with on_host (a CPU), else bool [B], so that nothing waits for the device.

    A length in 0..G; live tokens in [0, vocab_size); a law that sums to 1 (NaN does not) in every live slot, looked at only
    when some row samples (hot); survivals in [0, 1]. Raises ValueError for wrong shapes and dtypes: there no row is sound.
    """
    tokens, lengths, probs, survival = proposal.tokens, proposal.lengths, proposal.probs, proposal.survival
    if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != rows or tokens.shape[1] > max_slots:
        raise ValueError(f"tokens {tokens.dtype} {list(tokens.shape)}: must be int64 [{rows}, at most {max_slots}]")
    size = tokens.shape[1]
    if lengths.dtype != torch.int64 or lengths.shape != (rows,):
        raise ValueError(f"lengths {lengths.dtype} {list(lengths.shape)}: must be int64 [{rows}]")
    columns = vocab_size if proposal.draft_ids is None else len(proposal.draft_ids)
    if hot and probs is not None and (probs.dtype != torch.float32 or probs.shape != (rows, size, columns)):
        raise ValueError(f"probs {probs.dtype} {list(probs.shape)}: must be float32 [{rows}, {size}, {columns}]")
    if survival is not None and survival.shape != (rows, size):
        raise ValueError(f"survival {list(survival.shape)}: must be [{rows}, {size}]")

    laws: list[Tensor] = []  # bool [B, G]: what must hold in live slots beside the token ids
    if hot and probs is not None:
        laws.append((probs.sum(-1) - 1).abs() < _MASS_ERROR)
    if survival is not None:
        laws.append((survival >= 0) & (survival <= 1 + _MASS_ERROR))
    if on_host:  # a few numbers: quicker than a dozen calls on them
        live = lengths.tolist()
        sound = [
            0 <= n <= size and all(0 <= token < vocab_size for token in draft[:n])
            for n, draft in zip(live, tokens.tolist(), strict=True)
        ]
        for law in laws:
            sound = [fine and all(flags[:n]) for fine, n, flags in zip(sound, live, law.tolist(), strict=True)]
        return sound
    dead = torch.arange(size, device=tokens.device) >= lengths[:, None]
    fine = (tokens >= 0) & (tokens < vocab_size)
    for law in laws:
        fine &= law
    return (lengths >= 0) & (lengths <= size) & (fine | dead).all(-1)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
