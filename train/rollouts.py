"""Evaluation inside training: real rollouts of the runtime with the drafter as it stands, on prompts that it never trains on.

The prompts are those of the validation rows (train.validation_share of the training prompts, held back whole); the prompts of
the final measurement, eval.prompts, are never among them. What drafts is a copy of the live weights in the target's precision
with all its parts (correction head, survival head), in the same engine that `draftsmith bench` measures. Nothing of the
training moves: no random number is drawn that it would see, and its module keeps its mode, device and precision.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..data.chat import TokenRow
from ..eval.calibrate import Recorder
from ..models.dspark import DSpark
from ..models.lora import merge_state
from ..models.target import Target
from ..runtime.config import SamplingParams
from ..runtime.decoder import Decoder
from ..runtime.decoder_hf import ModuleDecoder
from ..runtime.dspark import DSparkProposer
from ..runtime.engine import Completion, Engine, Request
from ..runtime.stats import CycleRecord, EngineStats
from .config import TrainConfig
from .log import TrainLog
from .progress import Progress
from .step import Setup
from .strategy import engaged, whole_state

SLOTS = 16  # prompts answered at once
SHOWN = 4  # prompts of each temperature whose answers are shown


@dataclass(frozen=True)
class Rollout:
    """One answer. cycles: (proposed, accepted, committed) of every verification; survival: sum of (c_k - accepted_k)^2 over the
    slots that were reached, and their number, where the drafter predicts survival."""

    id: str
    domain: str
    temperature: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cycles: tuple[tuple[int, int, int], ...]
    survival: tuple[float, int] = (0.0, 0)

    @property
    def tau(self) -> float:
        """Tokens committed per verification; NaN where the first token ended the answer."""
        return sum(c for _, _, c in self.cycles) / len(self.cycles) if self.cycles else float("nan")

    def marked(self, decode: Any, start: str = "[", end: str = "]") -> str:
        """The answer as text, with the drafts that were accepted between `start` and `end`, cycle by cycle."""
        parts, place = [decode(list(self.answer[:1]))], 1  # the first token comes out of the prefill
        for _, accepted, committed in self.cycles:
            kept = min(accepted, committed)
            if kept:
                parts.append(start + decode(list(self.answer[place : place + kept])) + end)
            if committed > kept:
                parts.append(decode(list(self.answer[place + kept : place + committed])))
            place += committed
        return "".join(parts)


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found, the same on every rank. metrics: eval/...; acceptance: by slot, for each temperature."""

    step: int
    metrics: dict[str, float]
    acceptance: dict[float, list[float | None]]
    samples: list[Rollout]
    value: float


def prompts_of(rows: Sequence[TokenRow], count: int, longest: int) -> list[tuple[str, str, list[int]]]:
    """Up to `count` (id, domain, token ids) of the rows' prompts, domains in turn, in an order fixed by a hash of the id.

    A prompt ends where the first supervised token would come. Rows of one prompt count once; longer than `longest` is left out.
    """
    found: dict[str, tuple[str, str, list[int]]] = {}
    for row in rows:
        name = row.id.split("#")[0]
        ids = row.input_ids[: row.loss_mask.index(True)] if any(row.loss_mask) else []
        if ids and len(ids) <= longest:
            found.setdefault(name, (name, row.domain, list(ids)))
    by_domain: dict[str, list[tuple[str, str, list[int]]]] = defaultdict(list)
    for prompt in sorted(found.values(), key=lambda prompt: hashlib.blake2b(prompt[0].encode()).digest()):
        by_domain[prompt[1]].append(prompt)
    ranked = sorted((place, domain, prompt) for domain, own in by_domain.items() for place, prompt in enumerate(own))
    return [prompt for _, _, prompt in ranked[:count]]


class Rollouts:
    """The evaluations of a run. Raises ValueError, before step 1, where train.rollout_every asks for what cannot be done."""

    def __init__(self, cfg: TrainConfig, setup: Setup, accelerator: Accelerator, seed: int) -> None:
        self.cfg, self.setup, self.accelerator, self.seed = cfg, setup, accelerator, seed
        self.best = float("-inf")
        self.prompts: list[tuple[str, str, list[int]]] = []
        if not cfg.rollout_every:
            return
        if not cfg.rollout_temperatures:
            raise ValueError("train.rollout_temperatures: () is not allowed; it must hold at least one temperature")
        if setup.target is None:
            raise ValueError(
                f"train.rollout_every: {cfg.rollout_every} needs the whole target on every rank; it is sharded or remote "
                "here, so set 0 and measure with `draftsmith bench`"
            )
        block = setup.drafter.block_size
        if cfg.rollout_slots is not None and cfg.rollout_slots > setup.drafter.num_predictions:
            raise ValueError(
                f"train.rollout_slots: {cfg.rollout_slots} is not allowed (1 to {setup.drafter.num_predictions}, the block)"
            )
        limit = getattr(setup.target.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.prompts = prompts_of(setup.validation, cfg.rollout_prompts, limit - cfg.rollout_tokens - block - 1)
        if not self.prompts:
            raise ValueError(
                f"train.rollout_every: {cfg.rollout_every} needs held-back prompts that leave room for "
                f"{cfg.rollout_tokens} tokens; train.validation_share {cfg.validation_share} gives none"
            )

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` completed steps."""
        return bool(self.cfg.rollout_every) and (step % self.cfg.rollout_every == 0 or step == self.cfg.steps)

    @property
    def key(self) -> float:
        """The temperature that decides what is best: 1, or the highest asked for."""
        return 1.0 if 1.0 in self.cfg.rollout_temperatures else max(self.cfg.rollout_temperatures)

    def run(self, step: int) -> Evaluation:
        """Evaluate the live weights; all ranks call this, and all get the same."""
        accelerator = self.accelerator
        state = full_state(accelerator, self.setup.drafter, everywhere=self.cfg.rollout_ranks == "all")
        rank, world = accelerator.process_index, accelerator.num_processes
        if self.cfg.rollout_ranks == "main":
            rank, world = (0, 1) if accelerator.is_main_process else (1, 1)
        mine = list(enumerate(self.prompts))[rank::world] if rank < world else []
        found: list[Rollout] = []
        if mine:
            with unmoved_rng(accelerator.device):
                found = self._roll_out(state, mine)
        # this is also where the ranks that had less to do wait
        every: list[Rollout] = gather_object(found) if accelerator.num_processes > 1 else found
        order = {name: place for place, (name, _, _) in enumerate(self.prompts)}
        every.sort(key=lambda rollout: (rollout.temperature, order[rollout.id]))
        return evaluate(step, every, self.key)

    def measure(self, step: int, log: TrainLog, progress: Progress) -> float | None:
        """Evaluate, and write what was found to the logs. The value (real tau at `key`) where it is the best so far."""
        found = self.run(step)
        log.write(step, found.metrics)
        decode = _decode(self.setup.target)
        log.rollouts(step, [plain(sample, step, decode) for sample in found.samples], found.acceptance)
        progress.rollouts(step, found.metrics)
        if not found.value > self.best:  # also false where nothing was drafted and it is NaN
            return None
        self.best = found.value
        return found.value

    def resume(self, path: Path) -> None:
        """Take the best value so far from the train.jsonl of the run that goes on; all ranks call this."""
        if not self.cfg.rollout_every:
            return
        if self.accelerator.is_main_process and path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                self.best = max(self.best, json.loads(line or "{}").get(f"eval/tau_t{self.key:g}", self.best))
        if self.accelerator.num_processes > 1:  # one that differs would save where the others do not
            self.best = broadcast_object_list([self.best], from_process=0)[0]

    @torch.inference_mode()
    def _roll_out(self, state: Mapping[str, Tensor], mine: list[tuple[int, tuple[str, str, list[int]]]]) -> list[Rollout]:
        target, cfg = self.setup.target, self.cfg
        assert target is not None
        drafter = served_copy(self.setup.drafter.config, state, target.device, target.dtype)
        longest = max(len(ids) for _, (_, _, ids) in mine)
        context, slots = longest + cfg.rollout_tokens + 1, min(SLOTS, len(mine))
        with_survival = drafter.confidence_head is not None
        proposer: Any = DSparkProposer(drafter, self.setup.heads, slots=slots, max_context=context, with_survival=with_survival)
        if with_survival:
            proposer = Recorder(proposer)
        engine = Engine(
            target_decoder(target, drafter.tap_layers), proposer=proposer, slots=slots, max_context=context,
            eos_ids=target.eos_token_ids, num_slots=cfg.rollout_slots,
        )  # fmt: skip
        found = []
        for temperature in cfg.rollout_temperatures:
            requests = [
                Request(name, ids, SamplingParams(
                    temperature=temperature, max_new_tokens=cfg.rollout_tokens, seed=self.seed + 100_003 * place
                ))
                for place, (name, _, ids) in mine
            ]  # fmt: skip
            engine.reset_stats()
            completions = engine.run(requests)
            if engine.stats.proposer_failures:
                raise RuntimeError(f"rollouts: the drafter failed {engine.stats.proposer_failures} times in the runtime")
            for (_, (name, domain, ids)), request, completion in zip(mine, requests, completions, strict=True):
                error = _survival(proposer, request, completion, frozenset(target.eos_token_ids)) if with_survival else (0.0, 0)
                cycles = tuple((c.proposed, c.accepted, c.committed) for c in completion.cycles)
                found.append(Rollout(name, domain, temperature, tuple(ids), tuple(completion.token_ids), cycles, error))
        return found


def evaluate(step: int, rollouts: Sequence[Rollout], key: float) -> Evaluation:
    """Metrics of all rollouts: eval/tau_t<temperature>; and at temperature `key` eval/accept_<slot>, eval/tau_<domain> and
    eval/survival_brier, the mean squared error of the predicted survival of a slot that was reached."""
    metrics: dict[str, float] = {}
    acceptance: dict[float, list[float | None]] = {}
    samples: list[Rollout] = []
    for temperature in sorted({rollout.temperature for rollout in rollouts}):
        own = [rollout for rollout in rollouts if rollout.temperature == temperature]
        stats = _stats(own)
        metrics[f"eval/tau_t{temperature:g}"] = stats.tau
        rates = zip(stats.accepted_per_slot, stats.reached_per_slot, strict=True)
        acceptance[temperature] = [accepted / reached if reached else None for accepted, reached in rates]
        samples += own[:SHOWN]
    own = [rollout for rollout in rollouts if rollout.temperature == key]
    metrics |= {f"eval/accept_{k + 1}": rate for k, rate in enumerate(acceptance[key]) if rate is not None}
    domains = sorted({rollout.domain for rollout in own})
    metrics |= {f"eval/tau_{name}": _stats([r for r in own if r.domain == name]).tau for name in domains}
    error, count = (sum(part) for part in zip(*(rollout.survival for rollout in own), strict=True))
    if count:
        metrics["eval/survival_brier"] = error / count
    value = metrics[f"eval/tau_t{key:g}"]
    return Evaluation(step, {name: v for name, v in metrics.items() if v == v}, acceptance, samples, value)


def _stats(rollouts: Sequence[Rollout]) -> EngineStats:
    stats = EngineStats()
    for rollout in rollouts:
        for cycle in rollout.cycles:
            stats.count(CycleRecord(*cycle))
    return stats


def _survival(recorder: Recorder, request: Request, completion: Completion, ends: frozenset[int]) -> tuple[float, int]:
    """Sum of squared errors of the survival head over reached slots, and their number."""
    total, count = 0.0, 0
    for logits, accepted, observed in recorder.observations(request, completion, ends):
        reached = min(accepted + 1, observed)
        predicted = 1.0 / (1.0 + np.exp(-np.asarray(logits[:reached], dtype=np.float64)))
        total += float(((predicted - (np.arange(reached) < accepted)) ** 2).sum())
        count += reached
    return total, count


# ---- the copy that drafts --------------------------------------------------------------------------------------------


def full_state(accelerator: Accelerator, drafter: DSpark, *, everywhere: bool) -> dict[str, Tensor]:
    """The drafter's whole state dict, adapters merged, names without wrappers; collective where the weights are sharded.

    everywhere: on every rank; otherwise the others may get an empty one.
    """
    state: dict[str, Tensor] = dict(drafter.state_dict())
    if engaged(accelerator) in ("fsdp2", "zero3"):
        state = whole_state(accelerator, drafter)
        if everywhere:
            state = broadcast_object_list([state], from_process=0)[0]
    return merge_state({name.replace("_orig_mod.", ""): value for name, value in state.items()})


def served_copy(config: dict[str, Any], state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> DSpark:
    """A drafter of its own with these weights, in another precision."""
    with unmoved_rng(device):  # building a drafter draws its start
        drafter = DSpark(config)
    drafter.load_state_dict(dict(state))
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def target_decoder(target: Target, taps: tuple[int, ...]) -> Decoder:
    """The fast decoder, which holds the target's weights a second time while it lives; the modules themselves where a GPU has
    no room for that."""
    model = target.model
    if target.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(target.device)
        if 1.2 * sum(p.numel() * p.element_size() for p in model.parameters()) > free:
            return ModuleDecoder(model, dtype=target.dtype, tap_layers=taps)
    return Decoder.from_target(model, dtype=target.dtype, tap_layers=taps)


@contextmanager
def unmoved_rng(device: torch.device) -> Iterator[None]:
    """Every generator that training draws from stands afterwards where it stood: PyTorch's, NumPy's and Python's."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _decode(target: Target | None) -> Any:
    assert target is not None
    return lambda ids: target.tokenizer.decode(ids, skip_special_tokens=False)


def plain(rollout: Rollout, step: int, decode: Any) -> dict[str, Any]:
    """A rollout for tables and rollouts.jsonl: accepted drafts stand in brackets."""
    return {
        "step": step, "domain": rollout.domain, "temperature": rollout.temperature, "id": rollout.id,
        "prompt": decode(list(rollout.prompt)), "output": rollout.marked(decode), "tau": round(rollout.tau, 3),
        "tokens": len(rollout.answer),
    }  # fmt: skip
