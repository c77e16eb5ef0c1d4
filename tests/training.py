"""Seconds-long training runs on a tiny random target, through the same code as `draftsmith train`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny_chat import chat_tokenizer

from draftsmith.data.chat import TokenRow
from draftsmith.data.config import DataConfig
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.target import Target
from draftsmith.train import loop, stage
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import Features
from tiny import tiny_model

SECTIONS = dict(data=DataConfig, drafter=DSparkConfig, objective=ObjectiveConfig, train=TrainConfig)
DEFAULTS: dict[str, dict[str, Any]] = dict(
    data={},
    drafter=dict(num_layers=1, block_size=4, tap_layers=(0, 1), rank=8),
    objective={},
    train=dict(
        steps=4,
        rows=2,
        lr=2e-3,
        precision="fp32",
        log_every=1,
        eval_every=0,
        validation_share=0.0,
        anchor_share=0.5,
        checkpoint_every=100,
    ),  # fmt: skip
)


def tiny_target() -> Target:
    return Target(tiny_model(), chat_tokenizer(), "tiny")


def rows_of(count: int, *, seed: int = 0) -> list[TokenRow]:
    """Conversations of random tokens: prompt, answer, and for every third row a second turn."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for i in range(count):
        parts = [(3 + i % 5, False), (6 + 7 * i % 11, True)]
        if i % 3 == 2:
            parts += [(4, False), (5, True)]
        mask = [flag for length, flag in parts for _ in range(length)]
        ids = torch.randint(3, 96, (len(mask),), generator=generator).tolist()
        rows.append(TokenRow(f"p{i}", "chat", ids, mask))
    return rows


def parts_of(**changes: Any) -> stage.Parts:
    """Changes by section: parts_of(train=dict(steps=2))."""
    sections = {name: cls(**(DEFAULTS[name] | changes.get(name, {}))) for name, cls in SECTIONS.items()}
    return stage.Parts(target=TargetConfig(name="tiny", dtype="float32"), seed=changes.get("seed", 0), **sections)


def setup_of(parts: stage.Parts, rows: list[TokenRow], folder: Path, **replace: Any) -> loop.Setup:
    setup = stage.build_setup(parts, tiny_target(), rows, folder, say=lambda text: None)
    return dataclasses.replace(setup, **replace)


PROMPTS = "hash of the prompts"


def train(parts: stage.Parts, setup: loop.Setup, folder: Path, accelerator: Accelerator | None = None, **options: Any) -> Path:
    """One run of the loop on CPU; returns the drafter folder."""
    return loop.run(
        cfg=parts.train, objective_cfg=parts.objective, setup=setup, accelerator=accelerator or Accelerator(cpu=True),
        output=folder, seed=parts.seed, run_config=parts.plain(),
        provenance={"versions": {}, "prompts_sha256": PROMPTS}, **options,
    )  # fmt: skip


def log_of(folder: Path) -> list[dict[str, float]]:
    """Lines of train.jsonl without the times."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


class Interrupted(Exception):
    pass


class Breaking:
    """A feature source that fails, or turns to NaN, at its n-th call (from 1)."""

    def __init__(self, inner, call: int, how: str) -> None:
        self.inner, self.call, self.how, self.calls = inner, call, how, 0

    def features(self, batch, rows) -> Features:
        self.calls += 1
        found = self.inner.features(batch, rows)
        if self.calls == self.call:
            if self.how == "raise":
                raise Interrupted
            return Features(found.taps * float("nan"), found.last_hidden)
        return found
