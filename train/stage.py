"""Between a recipe's sections and the loop: rows, drafter, frozen heads and feature source, and whether a run is done."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..data import doctor, vocab
from ..data.chat import ChatFormat, TokenRow, tokenizer_hash
from ..data.checks import find_all, refuse
from ..data.config import DataConfig
from ..data.manifest import read, target_identity
from ..data.source import Prompt
from ..data.stage import Prepared, prepare
from ..losses.config import ObjectiveConfig
from ..models.config import DSparkConfig, TargetConfig
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark, attach_check
from ..models.export import native
from ..models.init import adopt, init_from_checkpoint, init_from_target, read_start, start_config, start_ids
from ..models.lora import add_lora
from ..models.target import Target, self_test
from .config import LAUNCH_KEYS, PLACED_KEYS, TrainConfig
from .feature_cache import make_source
from .law import refuse_other_law
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
    found = filled(made.get("recipe") or {})
    # another cut of the steps may be another number of rows in each: the checkpoint knows, so training is entered to see
    free = LAUNCH_KEYS - {"rows", "accumulation", "global_rows"}
    for recipe in (wanted, found):
        recipe["train"] = {key: value for key, value in recipe["train"].items() if key not in free}
        for section in ("target", "data"):
            recipe[section] = {k: v for k, v in recipe[section].items() if f"{section}.{k}" not in PLACED_KEYS}
    same_prompts = made.get("prompts_sha256") == prompts_sha256
    return same_prompts and found == wanted and made.get("steps") == parts.train.steps


def filled(recipe: dict[str, Any]) -> dict[str, Any]:
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
    if not target.whole:  # it has no weights here to decode with
        answering = {"engine": no_engine} | answering
    prepared = prepare(parts.data, target, output, name=name, revision=revision, heldout=heldout, say=say, **answering)
    chat = ChatFormat(target.tokenizer, template_args=parts.data.template_args, eos_ids=target.eos_token_ids)
    subject = doctor.of_prepared(  # no held-out prompts: prepare() has refused an overlap
        prepared, parts.data, chat, heldout=(), target=target_identity(target, name=name, revision=revision),
        vocab_size=target.vocab_size, anchor_share=parts.train.anchor_share, block_size=parts.drafter.block_size,
        draft_vocab_size=parts.drafter.draft_vocab_size,
    )  # fmt: skip
    # one rank is here at a time, so a target that is split over all of them cannot be asked
    probed = doctor.probe_rows(subject, target, 0 if target.collective else parts.data.doctor.probe_rows)
    findings = find_all(subject, probed)
    for finding in findings:
        if finding.level == "warning":
            say(f"data: {finding.line()}")
    refuse(findings, where="; `draftsmith data doctor` shows the rows")
    if prepared.answers is not None:
        refuse_other_law(parts.objective, parts.data, read(prepared.answers.folder))
    return prepared


def no_engine() -> Any:
    """Stands in for the engine of a target that cannot generate in this process. Raises ValueError."""
    raise ValueError(
        "target.placement: a target that is sharded or remote answers no prompts while training; have them answered first: "
        "draftsmith data regenerate RECIPE, with --server URL where the target is served"
    )


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
    refuse_other_law(parts.objective, parts.data)
    training, validation = split_validation(rows, parts.train.validation_share)
    if not training:
        raise ValueError(f"train.validation_share: {parts.train.validation_share} leaves none of {len(rows)} rows to train on")
    size, checkpoint = parts.drafter.draft_vocab_size, parts.drafter.checkpoint
    start = None if checkpoint is None else read_start(checkpoint, target.num_layers, parts.drafter.checkpoint_layout)
    draft_ids = None if start is None else start_ids(start)
    for note in () if start is None else start.notes:
        say(f"warning: drafter.checkpoint: {note}")
    if start is not None:
        parts = replace(parts, drafter=adopt(parts.drafter, start))
    elif size is not None:
        draft_ids = draft_vocabulary(training, size, target, output, say)
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, draft_ids)
    mask = parts.drafter.mask_token_id
    if mask is None:
        mask = pick_mask_token(target.tokenizer, target.vocab_size, target.eos_token_ids)
    if mask in target.eos_token_ids:
        ends = ", ".join(map(str, target.eos_token_ids))
        raise ValueError(f"drafter.mask_token_id: {mask} ends an answer of the target (its end tokens: {ends}); choose another")
    cfg = parts.drafter
    config = native.build_config(target.config, cfg, mask_token_id=mask, target_name=parts.target.name)
    torch.manual_seed(parts.seed)
    drafter = DSpark(config if start is None else start_config(config, start))
    if start is not None:
        init_from_checkpoint(drafter, start, str(checkpoint))
    attach_check(drafter, heads)
    if cfg.lora_rank:
        add_lora(drafter, rank=cfg.lora_rank, alpha=cfg.lora_alpha, targets=cfg.lora_targets, full=cfg.lora_full)
    if parts.drafter.init == "target" and target.final_norm is not None:
        with target.whole_layers(len(drafter.layers)):
            init_from_target(drafter, target.layers, target.final_norm, target.embedding_weight)
    worst = self_test(target, drafter.tap_layers)
    say(f"target: {target.label}; self-test against a plain forward passed, largest relative difference {worst:.1e}")
    source = make_source(parts, target, drafter.tap_layers, rows, training, output, say)
    return Setup(drafter, heads, source, training, validation, target.softcap, target if target.whole else None)


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
