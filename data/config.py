"""Settings of the data part. Imports no torch: recipes read this file before anything heavy loads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

TemplateValue = bool | int | float | str


def check_ranges(config: Any) -> None:
    """Check numbers against the `ge`/`le` metadata of their fields.

    Raises ValueError with the key, the value and the allowed range.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        low, high = item.metadata.get("ge"), item.metadata.get("le")
        if (low is not None and value < low) or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"<= {high}" if low is None else f"{low} to {high}"
            raise ValueError(f"{item.name}={value}: allowed {allowed}")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How the target answers the prompts.

    The default (temperature 1, no truncation) makes the text a sample of the law p that the loss uses; every other
    setting trains on paths that the target would not take at temperature 1.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    temperature: float = field(default=1.0, metadata={"help": "sampling temperature of the answers", "ge": 0.0})
    top_k: int = field(default=0, metadata={"help": "keep the k likeliest tokens, 0 keeps all", "ge": 0})
    top_p: float = field(default=1.0, metadata={"help": "keep the smallest set with this mass", "ge": 0.0, "le": 1.0})
    greedy_share: float = field(
        default=0.0, metadata={"help": "share of prompts answered at temperature 0 (recorded per row)", "ge": 0.0, "le": 1.0}
    )
    samples_per_prompt: int = field(default=1, metadata={"help": "answers per prompt", "ge": 1})
    max_new_tokens: int = field(default=192, metadata={"help": "longest answer in tokens, per turn", "ge": 1})
    batch_size: int = field(default=32, metadata={"help": "slots that the target answers at once", "ge": 1})
    seed: int = field(default=0, metadata={"help": "seed of the answers", "ge": 0})
    dtype: Literal["target", "float32", "bfloat16"] = field(
        default="target", metadata={"help": "number format while answering; target = as the target is loaded"}
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_p <= 0.0:
            raise ValueError(f"top_p={self.top_p}: allowed above 0, up to 1")

    def off_law(self) -> list[str]:
        """Settings by which no answer is a draw from the target's law at temperature 1, untruncated; empty where some are.

        Greedy answers of a mixture (`greedy_share`) can be told apart row by row; a share of 1 leaves no others.
        """
        wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        values = {key: getattr(self, key) for key in wanted}
        found = [f"{key} is {value} (must be {wanted[key]})" for key, value in values.items() if value != wanted[key]]
        return [*found, *(["greedy_share is 1.0 (must be below 1)"] if self.greedy_share == 1.0 else [])]


SourceValues = dict[str, str | int | float | None]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of prompts: an entry of `data.prompts`, given as a text or as a mapping with these keys."""

    source: str = field(metadata={"help": "builtin, builtin:heldout, a file or folder, or a Hub id (owner/name[@revision])"})
    weight: float | None = field(
        default=None, metadata={"help": "share of the prompts, relative to the other sources; none or all have one"}
    )
    cap: int | None = field(default=None, metadata={"help": "keep at most this many of its prompts", "ge": 1})
    domain: str | None = field(default=None, metadata={"help": "domain of its rows that name none"})
    split: str | None = field(default=None, metadata={"help": "instead of data.split"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub data set"})
    revision: str | None = field(default=None, metadata={"help": "commit, tag or branch of a Hub data set"})

    @classmethod
    def of(cls, entry: str | SourceValues, where: str) -> SourceConfig:
        """An entry of data.prompts. Raises ValueError naming the key, the value and what is allowed."""
        values: dict[str, Any] = {"source": entry} if isinstance(entry, str) else dict(entry)
        known = [item.name for item in fields(cls)]
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{where}.{key}: unknown key; an entry has the keys {', '.join(known)}")
            number = {"weight": "a number above 0", "cap": "an integer, at least 1"}.get(key)
            kinds = (int, float) if key == "weight" else (int,) if number else (str,)
            words = number or "a text that is not empty"
            good = isinstance(value, kinds) and not isinstance(value, bool)
            if value is not None and not (good and (value.strip() if isinstance(value, str) else value > 0)):
                raise ValueError(f"{where}.{key}: {value!r} is not allowed; it must be {words}")
        if not values.get("source"):
            raise ValueError(f"{where}.source: missing; it must be {cls.__dataclass_fields__['source'].metadata['help']}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """When `draftsmith data doctor` and the trainer refuse the rows. No part of a run's identity: a limit may be changed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    max_overlap: float | None = field(
        default=0.6,
        metadata={
            "help": "refuse prompts this similar to an evaluation prompt (Jaccard); null: equal ones only",
            "ge": 0.3,
            "le": 1.0,
        },
    )
    min_supervised_share: float = field(
        default=0.02, metadata={"help": "refuse rows of which a smaller share of tokens is supervised", "ge": 0.0, "le": 1.0}
    )
    max_dropped_share: float = field(
        default=0.5, metadata={"help": "refuse when more of the conversations give no row", "ge": 0.0, "le": 1.0}
    )
    min_anchor_coverage: float = field(
        default=0.05,
        metadata={"help": "refuse when an epoch starts blocks at a smaller share of the places", "ge": 0.0, "le": 1.0},
    )
    min_vocab_coverage: float = field(
        default=0.4,
        metadata={"help": "refuse a draft vocabulary that covers less of answers it was not made from", "ge": 0.0, "le": 1.0},
    )
    min_eos_share: float = field(
        default=0.0, metadata={"help": "refuse when fewer answers end with an end token", "ge": 0.0, "le": 1.0}
    )
    max_loop_share: float = field(
        default=0.4, metadata={"help": "refuse when more answers repeat themselves", "ge": 0.0, "le": 1.0}
    )
    loop_repeats: int = field(default=3, metadata={"help": "a loop repeats its period at least so often", "ge": 2})
    loop_tokens: int = field(default=16, metadata={"help": "a loop is at least so many tokens long", "ge": 2})
    probe_rows: int = field(
        default=8,
        metadata={"help": "rows that the target reads before training to see whether it wrote them; 0 = none", "ge": 0},
    )
    max_probe_distance: float = field(
        default=0.1,
        metadata={"help": "refuse sampled answers whose ranks under the target are further from uniform", "ge": 0.0, "le": 1.0},
    )
    max_probe_excess: float = field(
        default=0.2,
        metadata={"help": "refuse sampled answers that are less likely than the target's own by more nats a token", "ge": 0.0},
    )
    min_greedy_agreement: float = field(
        default=0.9,
        metadata={"help": "refuse greedy answers of which the target would choose a smaller share", "ge": 0.0, "le": 1.0},
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which prompts, how they are answered, and how rows are cut and supervised."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    prompts: str | SourceValues | tuple[str | SourceValues, ...] = field(
        default="builtin",
        metadata={
            "help": "builtin, builtin:heldout, a file or folder, or a Hub id (owner/name[@revision]); several allowed, each "
            "also as {source, weight, cap, domain, split, subset, revision}"
        },
    )
    split: str = field(default="train", metadata={"help": "split of a Hub data set, slices like train[:500] allowed"})
    streaming: int | None = field(
        default=None, metadata={"help": "read so many rows of each source, Hub data sets as a stream; null reads all", "ge": 1}
    )
    shuffle: int | None = field(
        default=None, metadata={"help": "seed that orders the prompts of each source; null keeps their order", "ge": 0}
    )
    near_duplicates: float | None = field(
        default=0.95,
        metadata={
            "help": "leave out prompts this similar to an earlier one (Jaccard); null: equal ones only",
            "ge": 0.3,
            "le": 1.0,
        },
    )
    text_words: int = field(default=48, metadata={"help": "words of a plain text row that are its prompt", "ge": 1})
    limit: int | None = field(default=None, metadata={"help": "keep at most this many prompts (spread over domains)", "ge": 1})
    per_domain: dict[str, int] = field(
        default_factory=dict, metadata={"help": "cap per domain, e.g. {code: 200}; '*' is the cap of domains not named"}
    )
    answers: Literal["target", "given"] = field(
        default="target",
        metadata={"help": "target = regenerated by the target; given = the answers in the prompt files (another model's text)"},
    )
    max_length: int = field(default=512, metadata={"help": "longest row in tokens, prompt and answer together", "ge": 4})
    supervise: Literal["all", "last"] = field(default="all", metadata={"help": "train on all assistant turns or the last"})
    system: str | None = field(default=None, metadata={"help": "system prompt for prompts that bring none"})
    template_args: dict[str, TemplateValue] = field(
        default_factory=dict, metadata={"help": "arguments of the chat template, e.g. {enable_thinking: false}"}
    )
    features: Literal["online", "hybrid", "cached"] = field(
        default="online",
        metadata={"help": "target features: computed in each step, kept on disk as the epochs go, or computed ahead onto disk"},
    )
    cache_gib: float | None = field(
        default=None,
        metadata={"help": "most GiB of features on disk, of all ranks; null = no limit (docs/features.md)", "gt": 0.0},
    )
    cache_storage: Literal["target", "fp8", "int8"] = field(
        default="target", metadata={"help": "taps on disk in the target's number format, or in 8 bits with scales"}
    )
    generation: GenerationConfig = field(
        default_factory=GenerationConfig, metadata={"help": "how the target answers the prompts"}
    )
    doctor: DoctorConfig = field(
        default_factory=DoctorConfig, metadata={"help": "limits of the checks on the rows, also before training"}
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.cache_gib is not None and self.cache_gib <= 0:
            raise ValueError(f"cache_gib={self.cache_gib}: allowed above 0")
        if not self.prompts:
            raise ValueError(f"prompts={self.prompts!r}: needs at least one source, none of them empty")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            missing = weighted.index(False)
            raise ValueError(f"prompts[{missing}].weight: missing; either every source has a weight or none")
        for domain, cap in self.per_domain.items():
            if cap < 0:
                raise ValueError(f"per_domain.{domain}={cap}: allowed >= 0")

    def off_law(self) -> list[str]:
        """Keys and values by which no answer is a draw from the target's law at temperature 1 without truncation."""
        if self.answers == "given":
            return ["data.answers is given (must be target)"]
        return [f"data.generation.{line}" for line in self.generation.off_law()]

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The entries of `prompts`, also when one was given. Raises ValueError for an entry that is none."""
        if isinstance(self.prompts, (str, dict)):
            return (SourceConfig.of(self.prompts, "prompts"),)
        return tuple(SourceConfig.of(entry, f"prompts[{n}]") for n, entry in enumerate(self.prompts))
