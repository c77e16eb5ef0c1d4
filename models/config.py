"""Configuration of the target and of the drafter (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model whose output law speculation keeps."""

    name: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "embedded target's name, Hub id, or local folder of a decoder-only model"},
    )
    revision: str | None = field(default=None, metadata={"help": "Hub revision; None = the default branch"})
    dtype: Literal["float32", "bfloat16"] = field(
        default="bfloat16", metadata={"help": "precision of the target's weights and activations"}
    )
    placement: Literal["replicated", "sharded", "remote"] = field(
        default="replicated",
        metadata={"help": "training only: whole on every rank, split over the ranks (FSDP2), or behind `server`"},
    )
    quantization: Literal["none", "bnb8", "bnb4", "gguf"] = field(
        default="none",
        metadata={"help": "how the weights are stored: bitsandbytes int8 or nf4 (CUDA), or rounded as `gguf_file` has them"},
    )
    gguf_file: str | None = field(default=None, metadata={"help": "file in the target's folder (quantization: gguf)"})
    server: str | None = field(
        default=None, metadata={"help": "URL of the server that gives hidden states (placement: remote), see docs/features.md"}
    )
    server_kind: Literal["vllm", "sglang"] = field(default="vllm", metadata={"help": "how `server` gives them"})
    extraction: Literal["transformers", "runtime"] = field(
        default="transformers",
        metadata={"help": "training only: which code runs a replicated target; runtime = our CPU kernels, where they serve it"},
    )

    def __post_init__(self) -> None:
        if (self.quantization == "gguf") != (self.gguf_file is not None):
            raise ValueError(
                f"gguf_file: {self.gguf_file!r} is not allowed with quantization {self.quantization}; it must be a file with "
                "gguf, and null otherwise"
            )
        if (self.placement == "remote") != (self.server is not None):
            raise ValueError(
                f"server: {self.server!r} is not allowed with placement {self.placement}; it must be a URL with remote, and "
                "null otherwise"
            )
        if self.quantization.startswith("bnb") and self.placement != "replicated":
            raise ValueError(f"quantization: {self.quantization} is not allowed with placement {self.placement}; allowed: none")
        if self.extraction == "runtime" and (self.placement != "replicated" or self.quantization.startswith("bnb")):
            raise ValueError(
                f"extraction: runtime is not allowed with placement {self.placement}, quantization {self.quantization}; it "
                "needs a replicated target that is not quantised by bitsandbytes"
            )

    @property
    def quantized_as(self) -> str | None:
        """The form of the weights in words, None where they are as `dtype` says."""
        words = {"bnb8": "int8 weights (bitsandbytes)", "bnb4": "nf4 weights (bitsandbytes)"}
        return words.get(self.quantization, f"weights of {self.gguf_file} (GGUF)" if self.gguf_file else None)

    @property
    def identity(self) -> dict[str, str | None]:
        """What decides the target's law: name, revision, dtype and, where it is quantised, how. Not where it is placed."""
        known = {"name": self.name, "revision": self.revision, "dtype": self.dtype}
        return known if self.quantized_as is None else {**known, "quantization": self.quantized_as}

    @property
    def label(self) -> str:
        """How the target is held: number format, quantisation and placement. Printed by the trainer."""
        where = f"{self.placement} at {self.server} ({self.server_kind})" if self.server else self.placement
        return ", ".join(part for part in (self.quantized_as, self.dtype, where) if part)


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Parallel block drafter with a sequential correction head and a survival head (DSpark, arXiv 2607.05147)."""

    kind: Literal["dspark"] = "dspark"
    num_layers: int = field(default=2, metadata={"help": "draft decoder layers", "ge": 1, "le": 64})
    block_size: int = field(default=7, metadata={"help": "query slots = predictions per block (gamma)", "ge": 1, "le": 64})
    tap_layers: tuple[int, ...] | None = field(
        default=None,
        metadata={"help": "target layers whose output feeds the drafter, ascending, in [0, L-2]; None = num_taps spread"},
    )
    num_taps: int = field(default=5, metadata={"help": "how many taps when tap_layers is not given", "ge": 1, "le": 16})
    mask_token_id: int | None = field(
        default=None,
        metadata={"help": "target token fed to slots 1..; None = a reserved special token of the target", "ge": 0},
    )
    head: Literal["vanilla", "gated", "rnn", "none"] = field(default="vanilla", metadata={"help": "sequential correction head"})
    rank: int = field(default=64, metadata={"help": "rank of the correction head; 0 = no head", "ge": 0, "le": 4096})
    survival_head: bool = field(default=True, metadata={"help": "predict each slot's acceptance"})
    survival_with_head: bool = field(
        default=True, metadata={"help": "feed the previous token's head embedding to the survival head (needs rank > 0)"}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "reduced draft vocabulary (FR-Spec); None = the target's", "ge": 2}
    )
    init: Literal["random", "target", "checkpoint"] = field(
        default="target", metadata={"help": "start from the target's last layers and norms, at random, or from `checkpoint`"}
    )
    checkpoint: str | None = field(
        default=None, metadata={"help": "folder of a drafter to start from (init: checkpoint); its draft vocabulary is kept"}
    )
    checkpoint_layout: Literal["anchor-first", "fill-in"] | None = field(
        default=None,
        metadata={"help": "block layout of `checkpoint` where its file does not say (DeepSpec anchor-first, z-lab fill-in)"},
    )
    lora_rank: int = field(
        default=0, metadata={"help": "rank of adapters on the checkpoint's layers; 0 = train in full", "ge": 0, "le": 4096}
    )
    lora_alpha: float = field(default=16.0, metadata={"help": "an update is scaled by lora_alpha / lora_rank", "gt": 0.0})
    lora_targets: tuple[str, ...] = field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"),
        metadata={"help": "linear layers that get adapters, by the last part of their names"},
    )
    lora_full: tuple[Literal["markov_head", "confidence_head", "norm", "hidden_norm"], ...] = field(
        default=("markov_head", "confidence_head"), metadata={"help": "parts that train in full beside the adapters"}
    )

    @property
    def effective_head(self) -> str:
        """The head actually built: `rank` 0 and `head: none` both mean no head."""
        return "none" if self.rank == 0 else self.head


def default_tap_layers(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps spread evenly over [1, L-3], the DSpark setting ({1,9,17,25,33} for 36 layers); shorter targets get fewer."""
    low, high = min(1, num_layers - 2), max(num_layers - 3, 0)
    if num_taps == 1 or high <= low:
        return (max(high, 0),)
    taps = {round(low + i * (high - low) / (num_taps - 1)) for i in range(num_taps)}
    return tuple(sorted(taps))
