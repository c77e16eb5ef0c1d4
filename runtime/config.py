"""Configuration of the runtime. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

_MAX_SEED = 2**63 - 1

ProposerKind = Literal["dspark", "eagle3", "ngram", "suffix", "small", "layerskip", "int8"]
PROPOSERS: tuple[ProposerKind, ...] = get_args(ProposerKind)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples and when it ends.

    temperature     0 is greedy; above 0 the logits are divided by it
    top_k           keep the k largest logits (ties with the k-th stay); 0 keeps all
    top_p           then keep the smallest set of largest probabilities whose mass reaches top_p; 1 keeps all
    max_new_tokens  budget of the answer in tokens, the ending token included
    stop            the answer ends where one of these strings appears
    stop_token_ids  the answer ends with one of these tokens, beside the EOS ids of the engine
    ignore_eos      run through EOS up to the budget (timing); stop and stop_token_ids still end the answer
    seed            two requests with equal seed, prompt and settings get equal answers in any batch

    Raises ValueError: one line with the key, the value and the allowed range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "0 or more and finite")
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p!r} is not allowed (a number above 0 and at most 1)")
        _check_int("max_new_tokens", self.max_new_tokens, 1)
        _check_int("seed", self.seed, 0)
        if isinstance(self.stop, str):
            raise ValueError(f"stop: {self.stop!r} is not allowed (a tuple or list of strings)")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: {text!r} is not allowed (strings of at least one character)")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: {self.ignore_eos!r} is not allowed (true or false)")

    @property
    def greedy(self) -> bool:
        """True where the answer does not depend on the seed."""
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class ProposerConfig:
    """What drafts. Keys of other kinds than `kind` have no effect.

    Raises ValueError: one line with the key, the value and the allowed range.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: ProposerKind = field(
        default="dspark",
        metadata={
            "help": "dspark = the trained drafter; eagle3 = an EAGLE-3 drafter; ngram = copy what followed the last tokens; "
            "suffix = the same with a suffix automaton; small = another model; layerskip = some of the target's layers; int8 = "
            "the target in int8"
        },
    )
    num_slots: int | None = field(
        default=None,
        metadata={
            "help": "most tokens drafted; None = the drafter's block, 5 for eagle3, 7 for ngram and suffix, 4 for the models",
            "ge": 1,
            "le": 64,
        },
    )
    model: str | None = field(
        default=None,
        metadata={
            "help": "small: an embedded target's name, Hub id or folder; the target's tokenizer is needed. eagle3: the "
            "drafter's folder"
        },
    )
    layers: tuple[int, ...] | None = field(
        default=None,
        metadata={
            "help": "layerskip: layers of the target that draft, ascending; None = without the quarter that changes least",
            "ge": 0,
        },
    )
    min_ngram: int = field(default=1, metadata={"help": "ngram: shortest match", "ge": 1, "le": 64})
    max_ngram: int = field(default=3, metadata={"help": "ngram: longest match", "ge": 1, "le": 64})
    min_match: int = field(default=1, metadata={"help": "suffix: shortest match", "ge": 1, "le": 10_000})
    min_survival: float = field(
        default=0.0, metadata={"help": "suffix: a draft ends below this product of relative frequencies", "ge": 0.0, "le": 1.0}
    )
    corpus_tokens: int = field(
        default=0,
        metadata={"help": "suffix: finished outputs kept for later requests, in tokens; 0 = none", "ge": 0, "le": 2**31},
    )

    def __post_init__(self) -> None:
        if self.kind not in PROPOSERS:
            raise ValueError(f"proposer.kind: {self.kind!r} is not allowed (one of {', '.join(PROPOSERS)})")
        for item in fields(self):
            value, low, high = getattr(self, item.name), item.metadata.get("ge"), item.metadata.get("le")
            for entry in value if isinstance(value, tuple) else (value,):
                if low is not None and entry is not None and (entry < low or (high is not None and entry > high)):
                    allowed = f"{low} or more" if high is None else f"{low} to {high}"
                    raise ValueError(f"proposer.{item.name}: {value!r} is not allowed ({allowed})")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"proposer.min_ngram: {self.min_ngram} is not allowed (1 to max_ngram = {self.max_ngram})")
        if self.kind in ("small", "eagle3") and not (self.model or "").strip():
            raise ValueError(f"proposer.model: {self.model!r} is not allowed (a model's name or folder, for kind {self.kind})")
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"proposer.layers: {list(self.layers)} is not allowed (ascending layer ids, at least one)")

    @classmethod
    def parse(cls, text: str) -> ProposerConfig:
        """`ngram`, or with settings `small:model=FOLDER,num_slots=3`; the entries of a list stand between plus signs.

        Raises ValueError for an unknown kind or key, a value of the wrong type, or one out of range.
        """
        kind, _, rest = text.partition(":")
        known = {item.name: item for item in fields(cls) if item.name != "kind"}
        values: dict[str, Any] = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if key not in known or not equals:
                raise ValueError(f"proposer: {pair!r} is not allowed (KEY=VALUE with the keys {', '.join(known)})")
            try:
                values[key] = _read(str(known[key].type), value)
            except ValueError:
                raise ValueError(f"proposer.{key}: {value!r} is not allowed (it must be {known[key].type})") from None
        return cls(kind=kind, **values)  # type: ignore[arg-type]


def _read(kind: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return tuple(int(entry) for entry in text.split("+"))
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind == "float" else text


def _check_int(key: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_SEED:
        raise ValueError(f"{key}: {value!r} is not allowed (an integer, {low} or more, below 2**63)")


def _check_number(key: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key}: {value!r} is not allowed (a number {allowed})")
