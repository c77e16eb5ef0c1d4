"""What the engine counts and times: one record per verification of a row, and totals since the last reset."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CycleRecord:
    """One verification of one row: drafts verified (after the scheduler's cut), drafts accepted, tokens committed (after the
    EOS and budget cut)."""

    proposed: int
    accepted: int
    committed: int


@dataclass
class EngineStats:
    """Seconds by part and counts since the last reset. The seconds add up to the wall time spent in the engine's steps.

    draft_s: the drafter's parallel pass and its context update; head_s: the sequential head; schedule_s: choosing lengths;
    verify_s: the target's forward; rest_s: acceptance rule, sampling, bookkeeping; prefill_s apart.
    reached_per_slot[k]: drafts whose predecessors were all accepted; accepted_per_slot[k] of those passed: their ratio is the
    conditional acceptance of slot k+1. length_counts[n]: row cycles that verified n drafts.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    head_s: float = 0.0
    schedule_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    cycles: int = 0  # (row, verification) pairs
    steps: int = 0  # target passes of decoding, each over all running rows
    plain_steps: int = 0  # steps whose target pass held no draft
    committed: int = 0  # tokens committed by cycles (a request's first token comes out of its prefill)
    verified_tokens: int = 0  # tokens of decoding that the target ran: one anchor and the drafts, per row cycle
    draft_passes: int = 0  # calls of the proposer
    drafted_tokens: int = 0  # slots asked of the proposer: rows x slots, summed over calls
    proposer_failures: int = 0
    prefill_tokens: int = 0  # prompt tokens run through the target
    reused_tokens: int = 0  # prompt tokens whose keys and values were still in the slot
    reached_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)
    length_counts: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed per verification, the correction or bonus token included."""
        return self.committed / self.cycles if self.cycles else float("nan")

    def count(self, record: CycleRecord) -> None:
        """Add one row's cycle. Slots cut away by an end token were neither reached nor accepted."""
        self.cycles += 1
        self.committed += record.committed
        self.verified_tokens += 1 + record.proposed
        accepted = min(record.accepted, record.committed)
        cut = record.committed <= record.accepted
        reached = accepted if cut else min(accepted + 1, record.proposed)
        for counts, size in ((self.length_counts, record.proposed + 1), (self.reached_per_slot, record.proposed)):
            if len(counts) < size:
                counts.extend([0] * (size - len(counts)))
        self.accepted_per_slot.extend([0] * (len(self.reached_per_slot) - len(self.accepted_per_slot)))
        self.length_counts[record.proposed] += 1
        for k in range(reached):
            self.reached_per_slot[k] += 1
        for k in range(accepted):
            self.accepted_per_slot[k] += 1
