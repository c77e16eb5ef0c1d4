"""Proposers by name: weights are loaded once, and every engine gets a proposer of its own over them.

make = ProposerSource("layerskip", target=target, dtype=torch.bfloat16, decoder=decoder)
engine = Engine(decoder, proposer=make(slots=4, max_context=2048), slots=4, max_context=2048)
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from ..models.blocks import Rope
from ..models.config import TargetConfig
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.eagle3 import Eagle3
from ..models.export import native
from ..models.export.eagle3 import load_eagle3, read_eagle3_config
from ..models.target import Target, load_target
from .calibration import Calibration
from .config import ProposerConfig
from .decoder import Decoder
from .dspark import DSparkProposer
from .eagle3 import Eagle3Proposer
from .model_proposer import DecoderProposer
from .ngram import NgramProposer
from .propose import Proposer
from .suffix import SuffixProposer
from .variants import Int8Decoder, default_layers, layerskip_decoder

_COPIED, _MODELLED, _EAGLE = 7, 4, 5  # slots of the proposers that copy text, of those that run a model for each, of EAGLE-3

_TEXT = (
    "The committee published its report in 1998; it listed twelve rivers, and three of them were clean.\n"
    "def add(a, b):\n    return a + b\n\nIf a train covers 120 km in 2 hours, its mean speed is 60 km/h."
)


def configured(spec: str | ProposerConfig) -> ProposerConfig:
    """A spec as a config: `ProposerConfig.parse` of a string."""
    return ProposerConfig.parse(spec) if isinstance(spec, str) else spec


def tap_layers(spec: str | ProposerConfig, drafter_folder: Path | None) -> tuple[int, ...]:
    """Target layers that the decoder must tap for this proposer; reads the drafter's config.json only.

    An EAGLE-3 file that leaves its taps to the default is refused here: the default depends on the target.
    """
    cfg = configured(spec)
    if cfg.kind == "eagle3":
        return read_eagle3_config(Path(str(cfg.model)))[0].tap_layers
    if cfg.kind != "dspark":
        return ()
    return tuple(native.read_config(_folder(drafter_folder))["target_layer_ids"])


def draft_slots(spec: str | ProposerConfig, drafter_folder: Path | None) -> int:
    """num_slots of the proposer that the spec makes, before anything loads. ValueError for more than the drafter's block."""
    cfg = configured(spec)
    if cfg.kind == "dspark":
        drafter = native.read_config(_folder(drafter_folder))
        block = int(drafter["block_size"]) - (not drafter["sample_from_anchor"])
        if cfg.num_slots is not None and cfg.num_slots > block:
            raise ValueError(f"proposer.num_slots: {cfg.num_slots} is not allowed (1 to {block}, the drafter's block)")
        return cfg.num_slots or block
    return cfg.num_slots or (_EAGLE if cfg.kind == "eagle3" else _COPIED if cfg.kind in ("ngram", "suffix") else _MODELLED)


class ProposerSource:
    """One kind of proposer for one target, called for each engine. Proposers it makes share weights, not state.

    target: the model that is served, in `dtype`. drafter_folder: an exported drafter (kind dspark). drafter: the same already
    loaded, with the heads (models/export/native.py). decoder: the one that serves the target, whose weights layerskip then
    shares (None: it packs its own). calibrated: use the calibration.json beside the drafter.
    Raises ValueError for a setting that does not fit the target, before the first proposer is made.
    """

    def __init__(
        self,
        spec: str | ProposerConfig,
        *,
        target: Target,
        dtype: torch.dtype,
        drafter_folder: Path | None = None,
        drafter: tuple[DSpark, FrozenHeads] | None = None,
        decoder: Decoder | None = None,
        calibrated: bool = True,
    ) -> None:
        self.cfg, self.target, self.dtype, self._served = configured(spec), target, dtype, decoder
        self._drafter, self.calibration = drafter, None
        self._decoder: Decoder | None = None
        self._eagle3: tuple[Eagle3, Rope] | None = None
        if self.cfg.kind == "dspark":
            if drafter is None:
                folder = _folder(drafter_folder)
                draft_slots(self.cfg, folder)
                self._drafter = native.load(
                    folder, embedding=target.embedding_weight, lm_head=target.lm_head_weight, dtype=dtype
                )  # fmt: skip
                self.calibration = Calibration.load(folder) if calibrated else None
            assert self._drafter is not None
            self.tap_layers, self.num_slots = (
                self._drafter[0].tap_layers,
                self.cfg.num_slots or self._drafter[0].num_predictions,
            )
        else:
            self.tap_layers, self.num_slots = (), draft_slots(self.cfg, None)
            if self.cfg.kind == "eagle3":
                self._eagle3 = load_eagle3(
                    Path(str(self.cfg.model)), embedding=target.embedding_weight, lm_head=target.lm_head_weight, dtype=dtype,
                    num_target_layers=target.num_layers,
                )  # fmt: skip
                self.tap_layers = self._eagle3[0].tap_layers
            if self.cfg.kind in ("small", "layerskip", "int8"):
                self._decoder = self._model_decoder()

    def __call__(self, *, slots: int, max_context: int, with_survival: bool = True) -> Proposer:
        """A proposer for an engine of so many slots and positions. with_survival: see DSparkProposer."""
        cfg = self.cfg
        if cfg.kind == "ngram":
            return NgramProposer(self.num_slots, cfg.max_ngram, cfg.min_ngram)
        if cfg.kind == "suffix":
            return SuffixProposer(self.num_slots, cfg.min_match, cfg.min_survival, cfg.corpus_tokens)
        if self._eagle3 is not None:
            return Eagle3Proposer(*self._eagle3, slots=slots, max_context=max_context, num_slots=self.num_slots)
        if self._decoder is not None:
            vocab = self.target.lm_head_weight.shape[0]
            return DecoderProposer(
                self._decoder, slots=slots, max_context=max_context, num_slots=self.num_slots, vocab_size=vocab
            )  # fmt: skip
        assert self._drafter is not None
        proposer = DSparkProposer(
            *self._drafter, slots=slots, max_context=max_context, with_survival=with_survival, calibration=self.calibration
        )
        proposer.num_slots = self.num_slots
        return proposer

    def _model_decoder(self) -> Decoder:
        model = self.target.model
        if self.cfg.kind == "int8":
            return Int8Decoder(model, dtype=self.dtype)
        if self.cfg.kind == "layerskip":
            layers = self.cfg.layers or default_layers(model, self._probe_text())
            return layerskip_decoder(model, layers, dtype=self.dtype, decoder=self._served)
        return self._small()

    def _probe_text(self) -> torch.Tensor:
        """A few tokens of ordinary text, int64 [1,T], from which the layers to skip are chosen."""
        tokenizer, vocab = self.target.tokenizer, self.target.vocab_size
        ids = [i % vocab for i in range(1, 65)] if tokenizer is None else tokenizer(_TEXT)["input_ids"]
        return torch.tensor([ids], device=self.target.device)

    def _small(self) -> Decoder:
        assert self.cfg.model is not None
        name: Literal["float32", "bfloat16"] = "float32" if self.dtype == torch.float32 else "bfloat16"
        try:
            small = load_target(TargetConfig(name=self.cfg.model, dtype=name), self.target.device)
        except ValueError as error:
            raise ValueError(f"proposer.model: {error}") from error
        check_vocabulary(small, self.target, self.cfg.model)
        return Decoder.from_target(small.model, dtype=self.dtype)


def make_proposer(
    spec: str | ProposerConfig,
    *,
    target: Target,
    slots: int,
    max_context: int,
    dtype: torch.dtype,
    drafter_folder: Path | None = None,
    drafter: tuple[DSpark, FrozenHeads] | None = None,
    decoder: Decoder | None = None,
    with_survival: bool = True,
) -> Proposer:
    """One proposer, for a single engine; see ProposerSource."""
    source = ProposerSource(
        spec, target=target, dtype=dtype, drafter_folder=drafter_folder, drafter=drafter, decoder=decoder
    )  # fmt: skip
    return source(slots=slots, max_context=max_context, with_survival=with_survival)


def check_vocabulary(small: Target, target: Target, name: str) -> None:
    """ValueError unless both models give every token the same id.

    The rows of their heads may differ in number: families pad them differently beyond the tokenizer's last id.
    """
    sizes = small.vocab_size, target.vocab_size
    ours, theirs = ({} if model.tokenizer is None else model.tokenizer.get_vocab() for model in (small, target))
    if ours != theirs:
        differ = sum(theirs.get(token) != place for token, place in ours.items()) + len(theirs.keys() - ours.keys())
        raise ValueError(f"proposer.model: {name!r} has another tokenizer than the target ({differ} tokens differ)")
    if sizes[0] != sizes[1] and (not ours or max(ours.values()) >= min(sizes)):
        raise ValueError(f"proposer.model: {name!r} has a vocabulary of {sizes[0]}, the target one of {sizes[1]}")


def _folder(folder: Path | None) -> Path:
    if folder is None:
        raise ValueError("proposer: dspark needs an exported drafter")
    return folder
