"""What an engine says about its own speculation: /metrics in Prometheus' text format, read as differences between two moments.

vLLM and draftsmith serve   counters vllm:spec_decode_num_drafts_total, .._num_draft_tokens_total, .._num_accepted_tokens_total,
                            .._num_accepted_tokens_per_pos_total{position}, vllm:generation_tokens_total
SGLang                      counters sglang:spec_verify_calls_total, sglang:generation_tokens_total; where the first is missing
                            (older releases) the gauge sglang:spec_accept_length, which is the last logging interval's mean.
                            It counts no acceptance by position. Needs --enable-metrics

Counters of several engines or models behind one address are added up. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
VLLM, SGLANG = "vllm:", "sglang:"
DRAFTS = "vllm:spec_decode_num_drafts"
VERIFIED = "sglang:spec_verify_calls"


@dataclass(frozen=True)
class Sample:
    """One line: name without `_total`, labels, value."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """Every sample of a Prometheus text; lines that are none are left out."""
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None or line.startswith("#"):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        yield Sample(found[1].removesuffix("_total"), dict(LABEL.findall(found[2] or "")), value)


@dataclass(frozen=True)
class Snapshot:
    """An engine's counters at one moment. engine: vllm, sglang, or None where neither's names are there.

    accepted_per_position[k]: drafts of which tokens 0..k were all accepted. requests: finished ones. gauge: SGLang's mean
    accepted length. None: the engine does not say.
    """

    engine: str | None
    generation_tokens: float | None = None
    requests: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_per_position: tuple[float, ...] | None = None
    gauge: float | None = None


def read(text: str) -> Snapshot:
    """The counters in the text of /metrics."""
    totals: dict[str, float] = {}
    places: dict[int, float] = {}
    for sample in parse(text):
        if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos" and sample.labels.get("position", "").isdecimal():
            place = int(sample.labels["position"])
            places[place] = places.get(place, 0.0) + sample.value
        elif sample.name.startswith((VLLM, SGLANG)):
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    if any(name.startswith(VLLM) for name in totals):
        return Snapshot(
            "vllm", totals.get("vllm:generation_tokens"), totals.get("vllm:request_success"), totals.get(DRAFTS),
            totals.get("vllm:spec_decode_num_draft_tokens"), totals.get("vllm:spec_decode_num_accepted_tokens"),
            tuple(places.get(k, 0.0) for k in range(max(places) + 1)) if places else None,
        )  # fmt: skip
    if any(name.startswith(SGLANG) for name in totals):
        return Snapshot(
            "sglang", totals.get("sglang:generation_tokens"), totals.get("sglang:num_requests"), totals.get(VERIFIED),
            gauge=totals.get("sglang:spec_accept_length"),
        )  # fmt: skip
    return Snapshot(None)


def difference(after: Snapshot, before: Snapshot) -> dict[str, Any]:
    """What an engine counted in between: the fields of Snapshot. A counter that is missing on one side is None.

    Raises RuntimeError when a counter went back: the server was started anew meanwhile.
    """
    found: dict[str, Any] = {"engine": after.engine, "gauge": after.gauge}
    for name in ("generation_tokens", "requests", "drafts", "draft_tokens", "accepted_tokens"):
        late, early = getattr(after, name), getattr(before, name)
        if late is None:
            found[name] = None
            continue
        found[name] = _growth(name, late, early or 0.0)  # a counter may first appear with its first event
    late, early = after.accepted_per_position, before.accepted_per_position or ()
    found["accepted_per_position"] = None
    if late is not None:
        padded = [*early, *[0.0] * (len(late) - len(early))]
        found["accepted_per_position"] = [
            _growth("accepted_per_position", a, b) for a, b in zip(late, padded, strict=True)
        ]  # fmt: skip
    return found


def _growth(name: str, late: float, early: float) -> float:
    if late < early:
        raise RuntimeError(f"the engine's counter {name} went from {early:g} to {late:g}: it was started anew meanwhile")
    return late - early


def add(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of several stretches as one."""
    found: dict[str, Any] = {"engine": parts[-1]["engine"], "gauge": parts[-1]["gauge"]}
    for name in ("generation_tokens", "requests", "drafts", "draft_tokens", "accepted_tokens"):
        values = [part[name] for part in parts]
        found[name] = None if None in values else sum(values)
    lists = [part["accepted_per_position"] for part in parts if part["accepted_per_position"] is not None]
    width = max(map(len, lists), default=0)
    summed = [sum(values[k] for values in lists if k < len(values)) for k in range(width)]
    found["accepted_per_position"] = summed if lists else None
    return found


def figures(counted: dict[str, Any]) -> dict[str, Any]:
    """tau and acceptance out of a difference, under the names of a report's cell; None where the engine does not say.

    tau: tokens per step of a request, the bonus or correction token included. vLLM: 1 + accepted / steps, where steps that held
    no draft are those that the other counters leave for them (generated tokens less each request's first, less the accepted; a
    few tokens of a last draft that nobody asked for make them come out a little low). SGLang: generated tokens less each
    request's first / verifications. tau_drafted: the same over steps that held a draft, as vLLM's own log has it.
    cycles, draft_length_mean: of all steps. acceptance_per_slot: accepted among those whose predecessors all were; where
    an engine drafts fewer tokens than it could, slots that were not drafted count as not accepted.
    """
    drafts, accepted, places = counted["drafts"], counted["accepted_tokens"], counted["accepted_per_position"]
    tau, source, steps = None, None, drafts or None
    decoded = (counted["generation_tokens"] or 0.0) - (counted["requests"] or 0.0)
    if drafts and accepted is not None:
        steps = max(drafts, decoded - accepted)
        tau, source = 1.0 + accepted / steps, "counters"
    elif drafts and counted["engine"] == "sglang" and decoded > 0:
        tau, source = decoded / drafts, "counters"
    elif drafts is None and counted["gauge"]:
        tau, source = counted["gauge"], "gauge"
    length = counted["draft_tokens"] / steps if steps and counted["draft_tokens"] is not None else None
    acceptance: list[float | None] = []
    reached: list[int] = []
    if drafts and places is not None:
        reached = [round(n) for n in (drafts, *places[:-1])]
        acceptance = [a / r if r else None for a, r in zip(places, reached, strict=True)]
    return {
        "tau": tau, "tau_source": source, "cycles": None if steps is None else round(steps), "draft_length_mean": length,
        "tau_drafted": 1.0 + accepted / drafts if drafts and accepted is not None else None,
        "acceptance_per_slot": acceptance, "reached_per_slot": reached,
    }  # fmt: skip
