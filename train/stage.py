"""Between a recipe's sections and the loop: rows, drafter, frozen heads and feature source, and whether a run is done."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..data import doctor, vocab
from ..data.chat import ChatFormat, TokenRow, tokenizer_hash
from ..data.checks import find_all, refuse
from ..data.config import DataConfig
from ..data.features import build, feature_manifest
from ..data.manifest import target_identity
from ..data.source import Prompt
from ..data.stage import Prepared, prepare
from ..losses.config import ObjectiveConfig
from ..models.config import DSparkConfig, TargetConfig
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark, attach_check
from ..models.export import native
from ..models.init import init_from_checkpoint, init_from_target, read_start, start_ids
from ..models.target import Target
from .config import TrainConfig
from .features import CachedFeatures, FeatureSource, OnlineFeatures, compute_features
from .step import Setup


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The sections of a recipe that training depends on."""

    target: TargetConfig
    data: DataConfig
    drafter: DSparkConfig
    objective: ObjectiveConfig
    train: TrainConfig
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        """As nested dictionaries: the identity of a run, kept in its checkpoints and beside its drafter."""
        names = ("target", "data", "drafter", "objective", "train", "seed")
        plain = run_config_dict(**{name: getattr(self, name) for name in names})
        del plain["data"]["doctor"]  # limits of checks: they change no row
        return plain


def is_trained(output: Path, parts: Parts, prompts_sha256: str) -> bool:
    """Whether `output`/drafter is the finished result of exactly these parts and prompts."""
    try:
        made = json.loads((output / "drafter" / "draftsmith.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = json.loads(json.dumps(parts.plain()))
    same_prompts = made.get("prompts_sha256") == prompts_sha256
    return same_prompts and _filled(made.get("recipe") or {}) == wanted and made.get("steps") == parts.train.steps


def _filled(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe of an older run with the settings that came since at their defaults."""
    defaults = Parts(
        target=TargetConfig(), data=DataConfig(), drafter=DSparkConfig(), objective=ObjectiveConfig(), train=TrainConfig()
    )

    def fill(value: Any, default: Any) -> Any:
        if not (isinstance(value, dict) and isinstance(default, dict)):
            return value
        return {key: fill(value[key], default.get(key)) if key in value else default[key] for key in [*default, *value]}

    filled: dict[str, Any] = fill(recipe, json.loads(json.dumps(defaults.plain())))
    return filled


def prepare_rows(
    parts: Parts,
    target: Target,
    output: Path,
    *,
    heldout: Sequence[Prompt],
    say: Callable[[str], None] = print,
    **answering: Any,
) -> Prepared:
    """The training rows: answers of the target, made or reused under `output`, and the doctor's checks passed.

    answering: engine and answered_by of data.stage.prepare.

    Raises ValueError as data.stage.prepare, and with the first finding that refuses the rows; says the warnings.
    """
    name, revision = parts.target.name, parts.target.revision
    prepared = prepare(parts.data, target, output, name=name, revision=revision, heldout=heldout, say=say, **answering)
    chat = ChatFormat(target.tokenizer, template_args=parts.data.template_args, eos_ids=target.eos_token_ids)
    subject = doctor.of_prepared(  # no held-out prompts: prepare() has refused an overlap
        prepared, parts.data, chat, heldout=(), target=target_identity(target, name=name, revision=revision),
        vocab_size=target.vocab_size, anchor_share=parts.train.anchor_share, block_size=parts.drafter.block_size,
        draft_vocab_size=parts.drafter.draft_vocab_size,
    )  # fmt: skip
    probed = doctor.probe_rows(subject, target, parts.data.doctor.probe_rows)
    findings = find_all(subject, probed)
    for finding in findings:
        if finding.level == "warning":
            say(f"data: {finding.line()}")
    refuse(findings, where="; `draftsmith data doctor` shows the rows")
    return prepared


def chat_record(parts: Parts, target: Target) -> dict[str, Any]:
    """The chat that the drafter is trained on, for its draftsmith.json: served in another frame it is silently slow."""
    chat = ChatFormat(target.tokenizer, template_args=parts.data.template_args, eos_ids=target.eos_token_ids)
    return {
        "template": chat.template_hash, "template_args": chat.template_args, "tokenizer": tokenizer_hash(target.tokenizer),
        "eos_ids": sorted(chat.eos_ids), "system": parts.data.system, "supervise": parts.data.supervise,
    }  # fmt: skip


def build_setup(
    parts: Parts, target: Target, rows: Sequence[TokenRow], output: Path, say: Callable[[str], None] = print
) -> Setup:
    """Drafter, frozen heads and rows for the loop. The same parts and rows give the same initial weights on every rank.

    Raises ValueError when the drafter does not fit the target, or a split leaves nothing to train on.
    """
    if target.logit_factor != 1.0:
        raise ValueError(
            f"target.name: {parts.target.name!r} scales its logits by {target.logit_factor}, which is not supported"
        )
    training, validation = split_validation(rows, parts.train.validation_share)
    if not training:
        raise ValueError(f"train.validation_share: {parts.train.validation_share} leaves none of {len(rows)} rows to train on")
    size, checkpoint = parts.drafter.draft_vocab_size, parts.drafter.checkpoint
    start = None if checkpoint is None else read_start(checkpoint, target.num_layers)
    draft_ids = None if start is None else start_ids(start)
    if size is not None and start is None:
        draft_ids = draft_vocabulary(training, size, target, output, say)
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, draft_ids)
    mask = parts.drafter.mask_token_id
    if mask is None:
        mask = pick_mask_token(target.tokenizer, target.vocab_size, target.eos_token_ids)
    if mask in target.eos_token_ids:
        ends = ", ".join(map(str, target.eos_token_ids))
        raise ValueError(f"drafter.mask_token_id: {mask} ends an answer of the target (its end tokens: {ends}); choose another")
    config = native.build_config(target.config, parts.drafter, mask_token_id=mask, target_name=parts.target.name)
    torch.manual_seed(parts.seed)
    drafter = DSpark(config)
    if start is not None:
        init_from_checkpoint(drafter, start, str(checkpoint))
    attach_check(drafter, heads)
    if parts.drafter.init == "target" and target.final_norm is not None:
        init_from_target(drafter, target.layers, target.final_norm, target.embedding_weight)
    source: FeatureSource = OnlineFeatures(target, drafter.tap_layers)
    if parts.data.features == "cached":
        source = cached_features(parts, target, drafter.tap_layers, rows, output, say)
    return Setup(drafter, heads, source, training, validation, target.softcap)


def draft_vocabulary(
    rows: Sequence[TokenRow], size: int, target: Target, output: Path, say: Callable[[str], None]
) -> torch.Tensor:
    """Ids of the reduced draft vocabulary, int64 [size], also written beside the answers. The same on every rank.

    Raises ValueError for a size that is impossible.
    """
    required = vocab.required_ids(target.tokenizer, target.eos_token_ids, size)
    sample = vocab.Sample(rows, target.vocab_size, ranks=vocab.merge_ranks(target.tokenizer, target.vocab_size))
    weights = sample.tune(size, required)
    ids = sample.choose(size, required, weights)
    held = sample.held_out(size, required, weights)
    if held:
        domains = ", ".join(f"{name} {share:.1%}" for name, share in held.items() if name)
        say(f"draft vocabulary: {size} of {target.vocab_size} ids cover {held['']:.1%} of unseen answers ({domains})")
    folder = output / "answers" if (output / "answers").is_dir() else output
    folder.mkdir(parents=True, exist_ok=True)
    vocab.save(folder, ids, vocab_size=target.vocab_size, facts={
        "rows": len(rows), "weights": asdict(weights), "coverage_of_unseen": held,
        "tokenizer": tokenizer_hash(target.tokenizer),
    })  # fmt: skip
    return ids


def cached_features(
    parts: Parts,
    target: Target,
    tap_layers: tuple[int, ...],
    rows: Sequence[TokenRow],
    output: Path,
    say: Callable[[str], None],
) -> CachedFeatures:
    """The feature cache under `output`/features, built or continued or reused. Raises ValueError when it was made otherwise."""
    chat = ChatFormat(target.tokenizer, template_args=parts.data.template_args, eos_ids=target.eos_token_ids)
    law = parts.drafter.draft_vocab_size is not None
    rows = sorted(rows, key=lambda row: len(row.input_ids))  # rows of one call are padded to each other
    manifest = feature_manifest(
        rows,
        target=target_identity(target, name=parts.target.name, revision=parts.target.revision),
        template=chat.template_hash,
        max_length=parts.data.max_length,
        tap_layers=tap_layers,
        hidden_size=target.hidden_size,
        dtype=parts.target.dtype,
        lse=law,
    )
    cache = build(
        output / "features", rows, manifest, lambda part: compute_features(target, tap_layers, part, law=law), say=say
    )
    return CachedFeatures(cache, rows, with_law=law)


def pick_mask_token(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> int:
    """A token that never occurs in chat text, for the slots whose content is unknown.

    Special tokens that neither mark a turn nor pad come first, then rows of the embedding beyond the tokenizer's last id.
    Raises ValueError when the target has neither: the recipe must then name one.
    """
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *eos_token_ids}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    reserved = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in used and token_id < vocab_size and token.content not in template
    ]
    named = [
        i for i in reserved if any(word in str(tokenizer.added_tokens_decoder[i]).lower() for word in ("mask", "reserved"))
    ]
    if named or reserved:
        return max(named or reserved)
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    raise ValueError(
        "drafter.mask_token_id: the target has no reserved token; "
        f"name one from 0 to {vocab_size - 1} that never occurs in text"
    )


def split_validation(rows: Sequence[TokenRow], share: float) -> tuple[list[TokenRow], list[TokenRow]]:
    """Training and validation rows: whole prompts are held back, by a hash of the prompt's id, the same in every run."""

    def held(row: TokenRow) -> bool:
        digest = hashlib.blake2b(row.id.split("#")[0].encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") / 2**32 < share

    return [row for row in rows if not held(row)], [row for row in rows if held(row)]


def provenance(prompts_sha256: str) -> dict[str, Any]:
    """Versions, argv and git commit of this run, and the hash of the prompts it was made from."""
    names = ("torch", "transformers", "accelerate", "datasets", "safetensors")
    root = Path(__file__).parent.parent
    result = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "prompts_sha256": prompts_sha256,
        "versions": {name: version(name) for name in names},
        "argv": sys.argv,
        "git_commit": result.stdout.strip() or None,
    }


def run_config_dict(**parts: Any) -> dict[str, Any]:
    """The parts' config dataclasses as one plain dictionary."""
    return {name: asdict(part) if hasattr(part, "__dataclass_fields__") else part for name, part in parts.items()}
