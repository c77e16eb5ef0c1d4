"""Answers for the on-policy phase: the runtime drafts them with the drafter as it is, and its cycles say where blocks begin.

Verification is lossless, so at temperature 1 the text is drawn from the target's own law, whatever is drafted. What changes is
where blocks begin: at serving time a cycle begins after a rejected or a bonus token, which is not uniform over positions
(places that are hard to draft are over-represented). Anchors are drawn among those places instead of all.

Every train.on_policy_every steps the next prompts of the training rows are answered anew. The answers are a function of the
weights at that step and the seed, and are stored with the run: it resumes between two draws, also on another number of
processes. No random number is drawn that training would see.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..data.chat import TokenRow
from ..data.manifest import write_atomic
from ..losses.phases import Phase
from ..runtime.config import SamplingParams
from ..runtime.dspark import DSparkProposer
from ..runtime.engine import Completion, Engine, Request
from . import checkpoint
from .config import TrainConfig
from .features import FeatureSource, OnlineFeatures
from .rollouts import full_state, served_copy, target_decoder, unmoved_rng
from .step import Setup

SLOTS = 32  # prompts answered at once
FOLDER = "on_policy"


@dataclass(frozen=True)
class Answer:
    """One answer: prompt and answer ids, and the positions in both together at which cycles began, ascending."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    starts: list[int]

    @classmethod
    def of(cls, row: TokenRow, prompt: list[int], completion: Completion) -> Answer:
        """The anchor of a cycle is the last token committed before it; the first comes out of the prefill."""
        starts, place = [], len(prompt)
        for cycle in completion.cycles:
            starts.append(place)
            place += cycle.committed
        return cls(row.id, row.domain, prompt, completion.token_ids, starts)

    def row(self, step: int) -> TokenRow:
        """As a training row; its id names the step of the draw."""
        mask = [False] * len(self.prompt_ids) + [True] * len(self.answer_ids)
        return TokenRow(f"{self.id}@{step}", self.domain, self.prompt_ids + self.answer_ids, mask, 1.0)


@dataclass(frozen=True)
class Answers:
    """The answers drawn after `step` steps, trained on until `end`: rows, and for each the anchors int64 that it offers."""

    step: int
    end: int
    rows: list[TokenRow]
    starts: list[Tensor]
    tau: float
    seconds: float | None

    def line(self) -> str:
        """For the terminal."""
        tokens = sum(row.num_supervised for row in self.rows)
        made = "stored" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{len(self.rows)} answers with {tokens} tokens drafted after step {self.step} ({made}), tau {self.tau:.2f}"


class OnPolicy:
    """Draws the answers of a run's on-policy phases, or reads them back."""

    def __init__(self, cfg: TrainConfig, setup: Setup, accelerator: Accelerator, output: Path, seed: int) -> None:
        self.cfg, self.setup, self.accelerator, self.seed = cfg, setup, accelerator, seed
        self.folder, self.checkpoints = output / FOLDER, output / "checkpoints"
        self.prompts: list[tuple[TokenRow, int]] = []  # a row, and where its prompt ends
        self.drawn: Answers | None = None

    @property
    def source(self) -> FeatureSource:
        """Target states of answers that no cache knows: the target runs in the step."""
        own = self.setup.source
        assert self.setup.target is not None
        return own if isinstance(own, OnlineFeatures) else OnlineFeatures(self.setup.target, self.setup.drafter.tap_layers)

    def check(self, phase: Phase) -> None:
        """Raises ValueError where the phase cannot be: no target to draft for, or no prompt with room for an answer."""
        target, cfg = self.setup.target, self.cfg
        if target is None:
            raise ValueError(
                f"{phase.key}.on_policy: true needs the whole target on every rank; it is sharded or remote here, so leave "
                "the phase out"
            )
        limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        if cfg.packing == "packed":
            limit = min(limit, cfg.tokens_per_batch)
        room = limit - cfg.on_policy_tokens - self.setup.drafter.block_size - 1
        self.prompts = [(row, end) for row in self.setup.rows for end in prompt_ends(row.loss_mask) if 0 < end <= room]
        if not self.prompts:
            raise ValueError(
                f"train.on_policy_tokens: {cfg.on_policy_tokens} leaves no room for the prompt of any row within {limit} tokens"
            )

    def values(self) -> dict[str, float]:
        """For the log: tau of the answers that are trained on, as the runtime counted it."""
        return {} if self.drawn is None or self.drawn.tau != self.drawn.tau else {"on_policy/tau": self.drawn.tau}

    def answers(self, step: int, phase: Phase) -> Answers:
        """The answers for `step`: drawn where that is the step of a draw, else read back. All ranks call this."""
        number, inside = divmod(step - phase.first, self.cfg.on_policy_every)
        drawn_at, seconds = step - inside, None
        found = self._read(drawn_at) if inside else None
        if found is None:
            if inside:
                self.accelerator.print(
                    f"on-policy: the answers of step {drawn_at} are gone; drawn anew with the present weights"
                )
            began = time.perf_counter()
            found = self._draw(drawn_at, number)
            seconds = time.perf_counter() - began
            self._store(drawn_at, found)
        usable = [answer for answer in found if len(answer.answer_ids) > 1]
        if not usable:
            raise ValueError(
                f"{phase.key}.on_policy: all of {len(found)} answers end with their first token: nothing to train on"
            )
        cycles = sum(len(answer.starts) for answer in usable)
        tau = sum(len(answer.answer_ids) - 1 for answer in usable) / cycles
        end = min(phase.end, drawn_at + self.cfg.on_policy_every)
        starts = [torch.tensor(answer.starts, dtype=torch.int64) for answer in usable]
        self.drawn = Answers(drawn_at, end, [answer.row(drawn_at) for answer in usable], starts, tau, seconds)
        return self.drawn

    # ---- drawing ------------------------------------------------------------------------------------------------------

    def _draw(self, step: int, number: int) -> list[Answer]:
        """The same on every rank: each answers its share of the prompts."""
        accelerator = self.accelerator
        state = full_state(accelerator, self.setup.drafter, everywhere=True)
        count = min(self.cfg.on_policy_prompts, len(self.prompts))
        chosen = in_turn(len(self.prompts), number * count, count, self.seed)
        mine = list(enumerate(chosen))[accelerator.process_index :: accelerator.num_processes]
        found: list[tuple[int, Answer]] = []
        if mine:
            with unmoved_rng(accelerator.device):
                found = self._answer(step, state, mine)
        if accelerator.num_processes > 1:
            found = gather_object(found)
        return [answer for _, answer in sorted(found, key=lambda item: item[0])]

    @torch.inference_mode()
    def _answer(self, step: int, state: dict[str, Tensor], mine: Sequence[tuple[int, int]]) -> list[tuple[int, Answer]]:
        target = self.setup.target
        assert target is not None
        drafter = served_copy(self.setup.drafter.config, state, target.device, target.dtype)
        jobs = [(place, self.prompts[index][0], self.prompts[index][1]) for place, index in mine]
        context = max(end for _, _, end in jobs) + self.cfg.on_policy_tokens + 1
        slots = min(SLOTS, len(jobs))
        engine = Engine(
            target_decoder(target, drafter.tap_layers), slots=slots, max_context=context, eos_ids=target.eos_token_ids,
            proposer=DSparkProposer(drafter, self.setup.heads, slots=slots, max_context=context),
        )  # fmt: skip
        requests = [
            Request(str(place), list(row.input_ids[:end]), SamplingParams(
                temperature=1.0, max_new_tokens=self.cfg.on_policy_tokens, seed=_number(self.seed, step, row.id, end)
            ))
            for place, row, end in jobs
        ]  # fmt: skip
        completions = engine.run(requests)
        if engine.stats.proposer_failures:
            raise RuntimeError(f"on-policy: the drafter failed {engine.stats.proposer_failures} times in the runtime")
        return [
            (place, Answer.of(row, list(row.input_ids[:end]), completion))
            for (place, row, end), completion in zip(jobs, completions, strict=True)
        ]

    # ---- storing ------------------------------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:07d}.json"

    def _store(self, step: int, answers: Sequence[Answer]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain: dict[str, Any] = {"step": step, "seed": self.seed, "answers": [asdict(answer) for answer in answers]}
            write_atomic(self._path(step), json.dumps(plain) + "\n")
            self._prune()

    def _prune(self) -> None:
        """Delete what no checkpoint that is there would need to go on."""
        saved = [int(path.name.removeprefix("step-")) for path in checkpoint.list_checkpoints(self.checkpoints)]
        files = sorted(self.folder.glob("step-*.json"))
        needed = [path for path in files if int(path.stem.removeprefix("step-")) <= min(saved, default=0)]
        for path in needed[:-1] if saved else []:
            path.unlink()

    def _read(self, step: int) -> list[Answer] | None:
        """What was stored, on every rank; None where there is nothing of this seed."""
        found: list[dict[str, Any]] | None = None
        if self.accelerator.is_main_process and self._path(step).is_file():
            plain = json.loads(self._path(step).read_text(encoding="utf-8"))
            found = plain["answers"] if plain["seed"] == self.seed else None
        if self.accelerator.num_processes > 1:
            found = broadcast_object_list([found], from_process=0)[0]
        return None if found is None else [Answer(**answer) for answer in found]


def prompt_ends(loss_mask: Sequence[bool]) -> list[int]:
    """Where each supervised turn of a row begins: what stands before it is a prompt."""
    return [i for i, flag in enumerate(loss_mask) if flag and (i == 0 or not loss_mask[i - 1])]


def in_turn(count: int, first: int, size: int, seed: int) -> list[int]:
    """Entries first .. first + size - 1 of an endless row of shuffles of range(count): a function of the arguments."""
    found: list[int] = []
    order: tuple[int, list[int]] | None = None
    for place in range(first, first + size):
        turn, inside = divmod(place, count)
        if order is None or order[0] != turn:
            generator = torch.Generator().manual_seed(_number(seed, "turn", turn))
            order = (turn, torch.randperm(count, generator=generator).tolist())
        found.append(order[1][inside])
    return found


def _number(*parts: Any) -> int:
    """A stable 62-bit number of the arguments."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big") >> 2
