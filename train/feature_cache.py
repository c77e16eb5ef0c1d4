"""From a recipe to a feature source: which states are computed in the step and which are kept, and what keeping them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..data.chat import ChatFormat, TokenRow, tokenizer_hash
from ..data.feature_store import FeatureStore
from ..data.features import feature_manifest
from ..data.manifest import target_identity
from ..models.target import Target
from .config import TrainConfig
from .features import FeatureSource, OnlineFeatures, Schedule, StoredFeatures, fill
from .strategy import resolved

if TYPE_CHECKING:
    from .stage import Parts


def make_source(
    parts: Parts,
    target: Target,
    tap_layers: tuple[int, ...],
    rows: Sequence[TokenRow],
    training: Sequence[TokenRow],
    output: Path,
    say: Callable[[str], None] = print,
) -> FeatureSource:
    """The source that `data.features` asks for: online, hybrid (kept as the epochs go) or cached (computed ahead).

    rows: all rows; training: those that are trained on, the others are for validation. Collective in a launch of several
    processes. Raises ValueError when `output`/features was made otherwise, naming what differs; RuntimeError on a full disk.
    """
    if parts.data.features == "online":
        return OnlineFeatures(target, tap_layers)
    gib, (rank, world) = parts.data.cache_gib, ranks()
    law = parts.drafter.draft_vocab_size is not None
    store = FeatureStore(
        output / "features", rows, manifest_of(parts, target, tap_layers, rows, law=law), rank=rank, world=world,
        max_bytes=None if gib is None else int(gib * 2**30), attention=attention_share(target),
    )  # fmt: skip
    schedule = schedule_of(resolved(parts.train, world), training, world)
    source = StoredFeatures(store, target, tap_layers, with_law=law, schedule=schedule, training=training)
    if parts.data.features == "cached":
        fill(source, say=say)
    return source


def manifest_of(
    parts: Parts, target: Target, tap_layers: Sequence[int], rows: Sequence[TokenRow], *, law: bool
) -> dict[str, Any]:
    """Everything that the cached features depend on (data.features.feature_manifest)."""
    chat = ChatFormat(target.tokenizer, template_args=parts.data.template_args, eos_ids=target.eos_token_ids)
    cfg = parts.target
    identity = target_identity(target, name=cfg.name, revision=cfg.revision)
    return feature_manifest(
        rows, target=identity, template=chat.template_hash, tokenizer=tokenizer_hash(target.tokenizer),
        max_length=parts.data.max_length, tap_layers=tap_layers, hidden_size=target.hidden_size, dtype=cfg.dtype,
        storage=parts.data.cache_storage, lse=law,
    )  # fmt: skip


def ranks() -> tuple[int, int]:
    """(rank, world size) of this process."""
    here = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if here else (0, 1)


def attention_share(target: Target) -> float:
    """L H / P of the decoder layers: what attention over one earlier token costs beside the weights' own products."""
    weights = sum(p.numel() for p in target.layers.parameters())
    return target.num_layers * target.hidden_size / max(weights, 1)


def epochs_per_micro_batch(cfg: TrainConfig, training: Sequence[TokenRow], world: int) -> float:
    """Share of the training rows that one micro-batch on each of `world` ranks reads."""
    if cfg.packing == "packed":
        return min(1.0, cfg.tokens_per_batch * world / max(sum(len(row.input_ids) for row in training), 1))
    return min(1.0, cfg.rows * world / max(len(training), 1))


def schedule_of(cfg: TrainConfig, training: Sequence[TokenRow], world: int) -> Schedule:
    """How often the run reads its rows."""
    step = epochs_per_micro_batch(cfg, training, world)
    evaluations = cfg.steps // cfg.eval_every + 1 if cfg.eval_every else 1
    return Schedule(total=cfg.steps * cfg.accumulation * step, step=step, evaluations=evaluations)
