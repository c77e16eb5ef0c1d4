"""A proposer that fails costs speed and nothing else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from drafters import tiny_drafter
from proposers import OracleProposer, RandomProposer
from serving import VOCAB, answers, decoder, drain, long_prompt, plain, prompts, requests

from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request

pytestmark = pytest.mark.filterwarnings("ignore:the proposer failed")


class Faulty:
    """Passes calls on to a proposer; fail(call, number of that call, arguments) may raise, spoil(proposal, number) edit."""

    def __init__(self, inner, fail=lambda call, number, *arguments: None, spoil=lambda proposal, number: proposal) -> None:
        self.inner, self.fail, self.spoil = inner, fail, spoil
        self.num_slots, self.tap_layers = inner.num_slots, inner.tap_layers
        self.calls: list[tuple[str, object]] = []

    def _pass(self, call: str, *arguments):
        number = sum(name == call for name, _ in self.calls)
        self.calls.append((call, arguments[0]))
        self.fail(call, number, *arguments)
        return getattr(self.inner, call)(*arguments)

    def begin(self, *arguments):
        return self._pass("begin", *arguments)

    def propose(self, *arguments):
        return self.spoil(self._pass("propose", *arguments), sum(name == "propose" for name, _ in self.calls) - 1)

    def commit(self, *arguments):
        return self._pass("commit", *arguments)

    def release(self, row):
        self.calls.append(("release", row))
        self.inner.release(row)
        self.fail("release", sum(name == "release" for name, _ in self.calls) - 1)


def at(call: str, *numbers: int):
    """Raise at the given calls (counted from 0)."""

    def fail(name: str, number: int, *arguments) -> None:
        if name == call and number in numbers:
            raise RuntimeError(f"{call} {number} fails on purpose")

    return fail


def serve(proposer, slots: int, wanted: list[Request], **settings) -> Engine:
    e = Engine(decoder(tuple(proposer.tap_layers)), proposer=proposer, slots=slots, max_context=64, **settings)
    e.found = {c.id: c for c in e.run(wanted)}  # type: ignore[attr-defined]
    return e


def check_texts(e: Engine, wanted: list[Request]) -> None:
    for request in wanted:
        budget = request.sampling.max_new_tokens
        assert e.found[request.id].token_ids == answers()[tuple(request.prompt_ids)][:budget], request.id


def drafted(e: Engine, id: str) -> int:
    return sum(cycle.proposed for cycle in e.found[id].cycles)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("call", "number"), [("begin", 1), ("propose", 1), ("commit", 1), ("release", 1), ("release", 0)])
def test_one_failure_loses_nothing_and_the_next_requests_are_drafted(call: str, number: int, slots: int):
    wanted = requests(prompts(6), max_new_tokens=20)
    proposer = Faulty(OracleProposer(answers()), at(call, number))
    with pytest.warns(RuntimeWarning, match=f"the proposer failed.*{call}: RuntimeError: {call} {number} fails on purpose"):
        e = serve(proposer, slots, wanted)
    check_texts(e, wanted)
    assert e.stats.proposer_failures == 1 and e.idle
    assert drafted(e, "r5") > 0
    hurt = [id for id in e.found if len(e.found[id].cycles) > 3]  # an oracle needs 3 cycles
    assert len(hurt) == (0 if call == "release" else 1 if call == "begin" or slots == 1 else 3)
    releases, begins = ([row for name, row in proposer.calls if name == c] for c in ("release", "begin"))
    assert len(releases) == len(begins) == 6


def test_a_failing_batch_hurts_the_rows_of_that_call_only():
    class Halves:
        """Drafts slots 0 and 1 in turn: a scheduler."""

        wants_survival = False
        clock = 0

        def begin(self, row): ...
        def release(self, row): ...
        def observe(self, view, lengths, accepted): ...

        def plan(self, view):
            from draftsmith.runtime.schedule import DraftPlan

            self.clock += 1
            return DraftPlan([i for i, slot in enumerate(view.slots) if slot == self.clock % 2], 4)

        def allocate(self, view, plan, proposal):
            return proposal.lengths

    wanted = requests(prompts(2), max_new_tokens=26)
    e = serve(Faulty(OracleProposer(answers()), at("propose", 2)), 2, wanted, scheduler=Halves())
    check_texts(e, wanted)
    lengths = {id: [c.proposed for c in e.found[id].cycles] for id in ("r0", "r1")}
    assert e.stats.proposer_failures == 1
    # slot 1 fails in its second turn (cycle 2); slot 0 goes on
    assert lengths["r1"] == [4, *[0] * (len(lengths["r1"]) - 1)] and lengths["r0"][:6] == [0, 4, 0, 4, 0, 4]


def spoiled(**changes):
    """Edits the second proposal: attribute -> function of (the attribute, rows)."""

    def spoil(proposal, number: int):
        if number == 1:
            for name, change in changes.items():
                setattr(proposal, name, change(getattr(proposal, name)))
        return proposal

    return spoil


def put(value, *place):
    def change(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("what", "changes", "one_row"),  # one_row: the others can be told to be sound
    [
        ("more tokens than asked", dict(tokens=lambda t: torch.cat((t, t), 1)), False),
        ("a row too few", dict(tokens=lambda t: t[:-1]), False),
        ("flat tokens", dict(tokens=lambda t: t.flatten()), False),
        ("int32 tokens", dict(tokens=lambda t: t.int()), False),
        ("lengths of another shape", dict(lengths=lambda t: t[:, None]), False),
        ("lengths in floats", dict(lengths=lambda t: t.float()), False),
        ("no lengths", dict(lengths=lambda t: None), False),
        ("a length above G", dict(lengths=put(9, 1)), True),
        ("a length below 0", dict(lengths=put(-1, 1)), True),
        ("a token beyond the vocabulary", dict(tokens=put(VOCAB, 1, 2)), True),
        ("a negative token", dict(tokens=put(-1, 1, 0)), True),
        ("laws of another width", dict(probs=lambda q: q[..., 1:]), False),
        ("laws in bfloat16", dict(probs=lambda q: q.bfloat16()), False),
        ("NaN in a law", dict(probs=put(float("nan"), 1, 2, 5)), True),
        ("a law that does not sum to 1", dict(probs=lambda q: torch.cat((q[:1], 2 * q[1:]))), True),
        ("survivals of another shape", dict(survival=lambda s: torch.zeros(3, 99)), False),
        ("a NaN survival", dict(survival=lambda s: put(float("nan"), 1, 0)(torch.ones(3, 7))), True),
    ],
)
def test_what_is_no_proposal_counts_as_a_failure(what: str, changes: dict, one_row: bool, temperature: float, on_host: bool):
    wanted = requests(prompts(3), max_new_tokens=20, temperature=temperature)
    e = Engine(decoder(), proposer=Faulty(RandomProposer(VOCAB), spoil=spoiled(**changes)), slots=3, max_context=64)
    e._on_host = e._drafting.on_host = on_host
    expected = 0 if temperature == 0 and "probs" in changes else 1  # a greedy row's law is not looked at
    with pytest.warns(RuntimeWarning, match="the proposer failed") if expected else contextlib.nullcontext():
        e.found = {c.id: c for c in e.run(wanted)}  # type: ignore[attr-defined]
    assert e.stats.proposer_failures == expected
    if temperature == 0:
        check_texts(e, wanted)
    assert all(len(c.token_ids) == 20 and c.finish_reason == "length" for c in e.found.values())
    lengths = [[c.proposed for c in e.found[f"r{i}"].cycles] for i in range(3)]
    if expected and one_row:
        assert lengths[0][2] > 0 and not any(lengths[1][1:]), "the sound rows are drafted on"
    elif expected:
        assert not any(n for row in lengths for n in row[1:])


def test_garbage_behind_a_rows_length_is_no_failure():
    def spoil(proposal, number: int):
        proposal.lengths = proposal.lengths.clamp(max=1)
        proposal.tokens[:, 1:] = -5
        proposal.probs[:, 1:] = float("nan")
        return proposal

    for temperature in (0.0, 1.0):
        wanted = requests(prompts(3), max_new_tokens=12, temperature=temperature)
        e = serve(Faulty(RandomProposer(VOCAB), spoil=spoil), 3, wanted)
        assert e.stats.proposer_failures == 0 and e.stats.length_counts[1] > 9
        assert temperature or [e.found[f"r{i}"].token_ids for i in range(3)] == [plain(t, 12) for t in prompts(3)]


@pytest.mark.parametrize("call", ["begin", "propose", "commit"])
def test_three_failures_in_a_row_switch_it_off(call: str):
    wanted = requests(prompts(6), max_new_tokens=15)
    proposer = Faulty(OracleProposer(answers()), at(call, *range(100)))
    with pytest.warns(RuntimeWarning) as seen:
        e = serve(proposer, 1, wanted)
    assert [str(w.message).split(":")[0] for w in seen] == [
        "the proposer failed, the rows it failed go on without drafts",
        "the proposer failed 3 times in a row and is switched off",
    ]
    check_texts(e, wanted)
    assert e.stats.proposer_failures == 3 and sum(name == "begin" for name, _ in proposer.calls) == 3
    calls = len(proposer.calls)
    e.found = {c.id: c for c in e.run(wanted)}
    check_texts(e, wanted)
    assert len(proposer.calls) == calls and e.stats.plain_steps > 80


def test_failures_between_good_cycles_do_not_switch_it_off():
    wanted = requests(prompts(6), max_new_tokens=25)
    for call, numbers in (("propose", range(1, 100, 2)), ("commit", range(1, 100, 2))):
        e = serve(Faulty(OracleProposer(answers()), at(call, *numbers)), 1, wanted)
        check_texts(e, wanted)
        assert e.stats.proposer_failures == 6 and drafted(e, "r5") > 0


def test_the_other_rows_of_a_batch_do_not_notice():
    # T = 1: bitwise the answers they have alone.
    wanted = [
        Request(f"r{i}", text, SamplingParams(max_new_tokens=14, temperature=1.0, seed=i)) for i, text in enumerate(prompts(4))
    ]
    alone = [serve(RandomProposer(VOCAB), 1, [r]).found[r.id] for r in wanted]
    together = serve(Faulty(RandomProposer(VOCAB), spoil=spoiled(tokens=put(VOCAB, 1, 0))), 4, wanted)
    assert together.stats.proposer_failures == 1
    assert [together.found[f"r{i}"] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]


def test_a_slot_whose_drafter_failed_is_not_reused_by_the_drafter():
    drafter, heads = tiny_drafter()
    text = long_prompt(30)
    fresh = Engine(decoder((0, 1)), proposer=DSparkProposer(drafter, heads, slots=1, max_context=64), max_context=64)
    [want] = fresh.run(requests([text], max_new_tokens=12))
    proposer = Faulty(DSparkProposer(drafter, heads, slots=1, max_context=64), at("commit", 1))
    e = Engine(decoder((0, 1)), proposer=proposer, max_context=64, reuse_prefix=True)
    first, second, third = (e.run(requests([text], max_new_tokens=12))[0] for _ in range(3))
    assert first.token_ids == second.token_ids == want.token_ids and e.stats.proposer_failures == 1
    assert sum(c.proposed for c in first.cycles) < sum(c.proposed for c in want.cycles) and second == third == want
    assert e.stats.reused_tokens == 29  # by the third


def test_an_error_of_the_target_is_not_swallowed():
    e = Engine(decoder(), proposer=OracleProposer(answers()), max_context=64)
    whole = e.decoder.forward
    try:
        e.decoder.forward = lambda *a, **k: (_ for _ in ()).throw(MemoryError("target"))  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            e.run(requests(prompts(1)))
    finally:
        e.decoder.forward = whole  # type: ignore[method-assign]
    assert e.idle and drain(e) == []
    assert e.run(requests(prompts(1), max_new_tokens=5))[0].token_ids == answers()[tuple(prompts(1)[0])][:5]
