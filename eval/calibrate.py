"""The calibration of the survival head as one restartable stage, behind `draftsmith calibrate`: rollouts, fits, report.

Which prompts. The drafter's own training and validation prompts are not used: it saw the first, the second are few, and both
are of the training set's families, where it accepts more than in new text. The held-out prompts are split instead, domain by
domain, by a hash (`prompts.calibration_ids`): the *calibration part* is fitted on and chooses the kind of calibration
(cross-validated by prompt), the *evaluation part* alone gives the metrics of the report. Prompts about the same passage stay on
one side. The benchmarks take evaluation prompts first, so a scheduler that uses the fit is not measured on prompts of the fit
unless it asks for more prompts than the evaluation part has.

Rollouts. The engine as it serves, drafter at full block length, every draft verified: no scheduler and no threshold cuts (a cut
would hide outcomes, and hide them by the very number to be calibrated). One pass per setting (temperature x truncation x rule).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..data.source import overlap
from ..models.config import TargetConfig
from ..models.export.native import load as load_drafter
from ..models.export.native import read_config
from ..runtime.calibration import Calibration, Entry, Setting
from ..runtime.config import SamplingParams
from ..runtime.dspark import DSparkProposer
from ..runtime.engine import Completion, Engine, Request
from ..runtime.propose import Proposal
from .calibration_fit import FITS, Observations, choose, cross_validate, judge, predict, reliability
from .calibration_report import print_summary, write_report
from .config import EvalConfig
from .environment import describe
from .prompts import EvalPrompt, calibration_ids, load_eval_prompts, read_heldout
from .stage import DtypeName, Record, Serving, sampling_of

FOLDER = "calibration"
GOAL = 0.03  # cumulative ECE at every slot, pooled over the fitted domains, on the evaluation part
PARTS = ("fit", "evaluation")
SEED_STEP = 1_000_003  # seeds of the two parts never meet
ARRAYS = ("logits", "accepted", "observed", "domain", "prompt")


class Recorder:
    """A proposer that hands everything through and keeps the raw survival logits and tokens of every proposal.

    A row of a cycle is told by (seed of its request, position of its anchor): both are in every proposal and can be derived
    from a completion, so nothing is assumed about how the engine batches. Requests recorded together need seeds of their own.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: dict[tuple[int, int], tuple[np.ndarray, list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, rows: list[int], anchors: Any, sampling: Any, max_slots: int) -> Proposal:
        """The inner proposer's proposal, unchanged; it must bring survival logits."""
        proposal: Proposal = self.inner.propose(rows, anchors, sampling, max_slots)
        assert proposal.survival_logits is not None, "the proposer gives no survival logits"
        logits, tokens = proposal.survival_logits.float().cpu().numpy(), proposal.tokens.tolist()
        for i, key in enumerate(zip(sampling.seeds.tolist(), sampling.positions.tolist(), strict=True)):
            self.seen[key] = logits[i].copy(), tokens[i]
        return proposal

    def observations(self, request: Request, completion: Completion, ends: frozenset[int]) -> list[tuple[np.ndarray, int, int]]:
        """(logits [proposed], accepted, observed) of each drafted cycle of one finished request; forgets them."""
        found = []
        position = len(request.prompt_ids)
        for record in completion.cycles:
            kept = self.seen.pop((request.sampling.seed, position), None)
            position += record.committed
            if record.proposed and kept is not None:
                logits, tokens = kept
                # slots behind the room of the row are drafted when another row of the batch has more: not this row's business
                found.append((logits[: record.proposed], *observe(tokens, record.proposed, record.accepted, ends)))
        return found


def observe(tokens: Sequence[int], proposed: int, accepted: int, ends: frozenset[int]) -> tuple[int, int]:
    """(accepted, observed) of one row's cycle: slots 1..observed have an outcome that means something in serving.

    Slots behind `proposed` were not verified. Slots behind the first drafted end token would be cut off with it if it were
    accepted; whether they are counted must not depend on that (see `calibration_fit`).
    """
    first_end = next((k for k, token in enumerate(tokens[:proposed], start=1) if token in ends), proposed)
    return min(accepted, first_end), first_end


@dataclass(frozen=True)
class Split:
    """Prompts by part and domain; the same domains in both."""

    parts: dict[str, dict[str, list[EvalPrompt]]]

    @property
    def domains(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(self.parts["fit"])

    def counts(self) -> Record:
        """Prompts per part and domain."""
        return {part: {domain: len(own) for domain, own in domains.items()} for part, domains in self.parts.items()}


def split_prompts(prompts: Mapping[str, Sequence[EvalPrompt]], cfg: EvalConfig) -> Split:
    """The rendered prompts as calibration and evaluation part, each capped so that together they keep to the domain's limit.

    Raises ValueError when a domain has too few prompts for two parts of two, or when a prompt is in both parts.
    """
    heldout, limit, share = read_heldout(cfg), cfg.calibration.prompts_per_domain, cfg.calibration.share
    parts: dict[str, dict[str, list[EvalPrompt]]] = {part: {} for part in PARTS}
    for domain, own in prompts.items():
        fitted = calibration_ids(heldout[domain], share)
        sides = {"fit": [p for p in own if p.id in fitted], "evaluation": [p for p in own if p.id not in fitted]}
        caps = {"fit": max(2, round(share * limit))}
        caps["evaluation"] = max(2, limit - caps["fit"])
        for part, side in sides.items():
            if len(side) < 2:
                raise ValueError(
                    f"eval.calibration.share: {share} leaves {len(side)} of {len(own)} prompts of domain {domain!r} for the "
                    f"{part} part, allowed: 2 or more"
                )
            # `load_eval_prompts` puts the calibration part last: its end is the farthest from what a benchmark takes.
            parts[part][domain] = side[-caps[part] :] if part == "fit" else side[: caps[part]]
    ids = {part: {p.id for own in domains.values() for p in own} for part, domains in parts.items()}
    everything = [p for own in heldout.values() for p in own]
    twice = overlap(*([p for p in everything if p.id in ids[part]] for part in PARTS))
    if twice:
        raise ValueError(f"eval.prompts: {twice[0][0]!r} and {twice[0][1]!r} are the same prompt; keep one of them")
    return Split(parts)


def roll_out(engine: Engine, prompts: Mapping[str, Sequence[EvalPrompt]], sampling: SamplingParams, seed: int) -> Observations:
    """Serve every prompt once under `sampling` (seeds seed, seed + 1, ..) and return what each drafted row-cycle showed.

    engine's proposer is a Recorder. Domains alternate in the queue, so that the batch is mixed as in serving. Raises
    RuntimeError when the proposer failed (the engine then goes on without it), ValueError when nothing was drafted.
    """
    recorder = engine.proposer
    assert isinstance(recorder, Recorder)
    domains = tuple(prompts)
    order = [(i, domain) for domain in domains for i in range(len(prompts[domain]))]
    queue = [(domains.index(domain), prompts[domain][i]) for i, domain in sorted(order, key=lambda pair: pair[0])]
    requests = [
        Request(prompt.id, prompt.prompt_ids, dataclasses.replace(sampling, seed=seed + i))
        for i, (_, prompt) in enumerate(queue)
    ]
    ends = frozenset(engine.eos_ids)
    slots = recorder.num_slots
    rows: list[tuple[np.ndarray, int, int, int, int]] = []
    for i, (request, completion) in enumerate(zip(requests, engine.run(requests), strict=True)):
        for logits, accepted, observed in recorder.observations(request, completion, ends):
            padded = np.zeros(slots, dtype=np.float32)
            padded[: len(logits)] = logits[:slots]
            rows.append((padded, accepted, observed, queue[i][0], i))
    recorder.seen.clear()
    if engine.stats.proposer_failures:
        raise RuntimeError("calibration: the drafter failed during the rollouts (see the warning above)")
    if not rows:
        raise ValueError("eval.calibration.max_new_tokens: no cycle was drafted; allow longer answers")
    logits, *counts = zip(*rows, strict=True)
    return Observations.of([np.stack(logits), *(np.array(column, dtype=np.int64) for column in counts)], domains)


# ---- stage ----------------------------------------------------------------------------------------------------------


def calibrate(
    target_cfg: TargetConfig,
    drafter_folder: Path | str,
    cfg: EvalConfig,
    output: Path | str,
    *,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    device: str = "cpu",
    console: Console | None = None,
) -> Path:
    """Fit the drafter's survival calibration, store it in the drafter's folder, and write report.json, report.html and
    reliability.png into `output`/calibration; returns the HTML's path.

    Finished rollouts lie beside the report and are reused as long as target, drafter, prompts and setting are the same.
    Raises ValueError before any model loads for a drafter without a survival head and for prompts that cannot be split.
    """
    console = console or Console()
    folder, drafter_folder = Path(output) / FOLDER, Path(drafter_folder)
    config = read_config(drafter_folder)
    if not config["enable_confidence_head"]:
        raise ValueError("drafter.survival_head: False leaves nothing to calibrate; train a drafter with survival_head true")
    read_heldout(cfg)
    began = time.perf_counter()
    dtype: DtypeName = cfg.dtype or target_cfg.dtype
    serving = Serving.open(target_cfg, drafter_folder, cfg, dtype, device)
    room = cfg.calibration.max_new_tokens + 1
    prompts = load_eval_prompts(
        cfg, serving.target.tokenizer, max_prompt=serving.longest - room, template_args=template_args, system=system
    )
    split = split_prompts(prompts, cfg)
    rollouts = Rollouts(serving, cfg, split, folder, _identity(target_cfg, drafter_folder, cfg, dtype), console)
    settings = [rollouts.setting(temperature) for temperature in cfg.calibration.temperatures or cfg.temperatures]
    fitted = [fit_setting(setting, *rollouts.both(setting), cfg) for setting in settings]
    report: Record = {
        "schema": 1,
        "environment": describe(dtype, device)
        | {"seconds": round(time.perf_counter() - began, 1), "reused_parts": rollouts.reused},
        "target": {"name": target_cfg.name, "revision": target_cfg.revision, "dtype": dtype},
        "drafter": config | {"folder": drafter_folder.name},
        "settings": dataclasses.asdict(cfg.calibration) | {"seed": cfg.seed, "prompts": cfg.prompts},
        "prompts": split.counts(),
        "goal": GOAL,
        "entries": [part for _, part in fitted],
    }
    report["goal_met"] = all(part["after"]["worst_ece"] <= GOAL for _, part in fitted)
    provenance = {
        "target": target_cfg.name, "dtype": dtype, "prompts": split.counts()["fit"],
        "versions": report["environment"]["versions"],
        "evaluation_ece": {str(setting): part["after"]["ece"] for setting, (_, part) in zip(settings, fitted, strict=True)},
    }  # fmt: skip
    path = Calibration(config["block_size"], [entry for entry, _ in fitted], provenance).save(drafter_folder)
    html = write_report(report, folder)
    print_summary(report, html, path, console)
    return html


def fit_setting(setting: Setting, fit: Observations, held: Observations, cfg: EvalConfig) -> tuple[Entry, Record]:
    """Choose and fit the calibration of one setting on `fit`, and judge it on `held`: (entry, part of the report)."""
    settings = cfg.calibration
    kinds = settings.kinds
    errors = cross_validate(fit, setting, kinds, folds=settings.folds, bins=settings.bins, seed=cfg.seed)
    winner = choose(errors)
    entries = {kind: FITS[kind](fit, setting, settings.bins) for kind in dict.fromkeys(("none", *kinds))}
    sides: dict[str, Record] = {}
    for kind, entry in entries.items():
        survival = predict(entry, held.logits)
        rows = judge(held, survival, bins=settings.bins, seed=cfg.seed)
        pooled = [row["ece"] or 0.0 for row in rows if row["domain"] == "all"]
        curves = []
        for slot in range(1, held.slots + 1):
            mask = held.known(slot)
            curves.append(reliability(survival[mask, slot - 1].astype(np.float64), held.label(slot)[mask], settings.bins))
        sides[kind] = {"ece": pooled, "worst_ece": max(pooled), "mean_ece": sum(pooled) / len(pooled), "metrics": rows,
                       "reliability": curves}  # fmt: skip
    part: Record = {
        **dataclasses.asdict(setting), "label": str(setting), "kind": winner,
        "slope": list(entries[winner].slope), "offset": list(entries[winner].offset),
        "cross_validation": errors,
        "fit": _sizes(fit), "evaluation": _sizes(held),
        "before": sides["none"], "after": sides[winner],
        "all_kinds": {kind: {key: side[key] for key in ("ece", "worst_ece", "mean_ece")} for kind, side in sides.items()},
    }  # fmt: skip
    return entries[winner], part


def _sizes(obs: Observations) -> Record:
    reached = [int(obs.reached(slot).sum()) for slot in range(1, obs.slots + 1)]
    names = Counter(obs.domains[i] for i in obs.domain.tolist())
    return {
        "row_cycles": len(obs),
        "prompts": len(np.unique(obs.prompt)),
        "per_domain": dict(names),
        "known_per_slot": [int(obs.known(slot).sum()) for slot in range(1, obs.slots + 1)],
        "reached_per_slot": reached,
    }


class Rollouts:
    """Recorded observations per setting and part, as .npz files with the fingerprint of what they were made of."""

    def __init__(self, serving: Serving, cfg: EvalConfig, split: Split, folder: Path, identity: str, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.serving, self.cfg, self.split, self.folder, self.identity, self.console = (
            serving, cfg, split, folder, identity, console,
        )  # fmt: skip
        self.reused = 0
        self._engine: Engine | None = None

    def setting(self, temperature: float) -> Setting:
        """The serving setting of a temperature: the truncation and the rule are those of eval."""
        return Setting.of(sampling_of(self.cfg, temperature), self.cfg.rule)

    def both(self, setting: Setting) -> tuple[Observations, Observations]:
        """Observations of the calibration part and of the evaluation part."""
        fit, held = (self._part(setting, part) for part in PARTS)
        return fit, held

    def _part(self, setting: Setting, part: str) -> Observations:
        name, prompts = f"rollouts-t{setting.temperature:g}-{part}", self.split.parts[part]
        path = self.folder / f"{name}.npz"
        ids = [[p.id, p.prompt_ids] for own in prompts.values() for p in own]
        key = hashlib.sha256(json.dumps([self.identity, dataclasses.asdict(setting), part, ids]).encode()).hexdigest()[:16]
        stored = read_rollouts(path, key, tuple(prompts))
        if stored is not None:
            self.reused += 1
            self.console.print(f"  {name}: rolled out before, reused", style="dim")
            return stored
        self.console.print(f"  {name}: {len(ids)} prompts at {setting}", style="dim")
        sampling = dataclasses.replace(
            sampling_of(self.cfg, setting.temperature), max_new_tokens=self.cfg.calibration.max_new_tokens
        )
        began = time.perf_counter()
        seed = self.cfg.seed + SEED_STEP * (1 + PARTS.index(part))
        found = roll_out(self._serve(), prompts, sampling, seed)
        seconds = time.perf_counter() - began
        self.console.print(f"    {len(found)} row-cycles in {seconds:.0f} s", style="dim")
        write_rollouts(path, key, found)
        return found

    def _serve(self) -> Engine:
        """One engine for all rollouts: full block, nothing cut. Made when the first rollout is needed."""
        if self._engine is None:
            serving, cfg = self.serving, self.cfg.calibration
            drafter, heads = load_drafter(
                serving.drafter_folder, embedding=serving.target.embedding_weight, lm_head=serving.target.lm_head_weight,
                dtype=serving.dtype,
            )  # fmt: skip
            longest = max(len(p.prompt_ids) for part in self.split.parts.values() for own in part.values() for p in own)
            context = min(longest + cfg.max_new_tokens + 1, serving.longest)
            proposer = DSparkProposer(drafter, heads, slots=cfg.slots, max_context=context, with_survival=True)
            self._engine = Engine(
                serving.decoder, proposer=Recorder(proposer), slots=cfg.slots, max_context=context, rule=self.cfg.rule,
                eos_ids=serving.target.eos_token_ids,
            )  # fmt: skip
        return self._engine


def write_rollouts(path: Path, key: str, obs: Observations) -> None:
    """Store observations with their fingerprint, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, fingerprint=np.array(key), **{name: getattr(obs, name) for name in ARRAYS})
    temporary.replace(path)


def read_rollouts(path: Path, key: str, domains: tuple[str, ...]) -> Observations | None:
    """What `write_rollouts` stored; None when there is nothing, a torn file, or another fingerprint."""
    try:
        with np.load(path) as stored:
            if str(stored["fingerprint"]) != key:
                return None
            return Observations.of([stored[name] for name in ARRAYS], domains)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _identity(target_cfg: TargetConfig, drafter_folder: Path, cfg: EvalConfig, dtype: str) -> str:
    """Hash of target, drafter and the settings that decide a rollout beside prompts, setting and part."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (drafter_folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    state = [target_cfg.identity, dtype, cfg.calibration.max_new_tokens, cfg.seed]
    digest.update(json.dumps(state, sort_keys=True).encode())
    return digest.hexdigest()
