"""What a target pass costs from sizes alone: the roofline, and c from weight bytes. Nothing here is timed.

A dense layer does 2 operations per weight and token, so T tokens in one pass give 2 * T / bytes_per_weight FLOP per byte of
weights. Below the ridge point, peak / bandwidth, the weights' traffic is the cost and more tokens are free; beyond it the
arithmetic is. Pure Python, no torch. Users' mistakes raise ValueError.
"""

from __future__ import annotations

import dataclasses
import math

from .equation import ridge_point


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One dense model on one device, serving `concurrency` requests with `context` cached tokens each.

    params: weights read in one pass (layers and head; an embedding table that is only looked up does not count).
    bandwidth in bytes/s, peak in FLOP/s, kv_bytes_per_token: key and value bytes of one token over all layers. Assumptions:
    traffic and arithmetic overlap fully, weights are read once a pass, the KV cache once per request and pass, and the
    arithmetic of attention is left out (with grouped queries it stays far below the ridge).
    """

    params: float
    bytes_per_weight: float
    bandwidth: float
    peak: float
    concurrency: int = 1
    context: int = 0
    kv_bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("params", "bytes_per_weight", "bandwidth", "peak", "concurrency"):
            value = getattr(self, name)
            if not (value > 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}: got {value}, allowed: above 0 and finite")
        for name in ("context", "kv_bytes_per_token"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}: got {value}, allowed: at least 0 and finite")

    @property
    def ridge(self) -> float:
        """Peak over bandwidth in FLOP/byte."""
        return ridge_point(self.peak, self.bandwidth)

    @property
    def bytes_per_pass(self) -> float:
        """Weights once, and every request's KV cache once."""
        return self.params * self.bytes_per_weight + self.concurrency * self.context * self.kv_bytes_per_token

    @property
    def memory_seconds(self) -> float:
        """Traffic of one pass, whatever its width."""
        return self.bytes_per_pass / self.bandwidth

    def compute_seconds(self, width: int) -> float:
        """Arithmetic of one pass over `width` tokens of every request."""
        return 2.0 * self.params * self.concurrency * width / self.peak

    def seconds(self, width: int = 1) -> float:
        """A pass over `width` tokens of every request: the longer of traffic and arithmetic."""
        return max(self.memory_seconds, self.compute_seconds(width))

    def v(self, gamma: int) -> float:
        """Cost of a pass over gamma + 1 tokens of every request over one of 1: 1 left of the ridge, towards gamma + 1 right."""
        return self.seconds(gamma + 1) / self.seconds(1)

    @property
    def tokens_at_ridge(self) -> float:
        """Tokens of one pass (requests x width) at which arithmetic takes as long as traffic."""
        return self.ridge * self.bytes_per_pass / (2.0 * self.params)

    @property
    def free_positions(self) -> int:
        """Speculative positions per request that fit beside its one certain token before v leaves 1."""
        # the tiny factor keeps an exact quotient, e.g. 8 / 1, from being floored to 7
        return max(math.floor(self.tokens_at_ridge / self.concurrency * (1 + 1e-12)) - 1, 0)

    def to_dict(self) -> dict[str, float]:
        """Inputs and results as plain numbers; times in milliseconds."""
        return {
            **dataclasses.asdict(self), "ridge": self.ridge, "bytes_per_pass": self.bytes_per_pass,
            "memory_ms": 1e3 * self.memory_seconds, "compute_ms": 1e3 * self.compute_seconds(1),
            "tokens_at_ridge": self.tokens_at_ridge, "free_positions": self.free_positions,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama- or Qwen-type target: gated MLP, grouped queries, biases and norms left out."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def attention(self) -> int:
        """Weights of q, k, v and o of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.attention + 3 * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        """Weights of the LM head, which a pass reads whether or not it is tied to the embedding."""
        return self.hidden * self.vocab

    @property
    def pass_weights(self) -> int:
        """Weights that one pass reads: layers and head."""
        return self.layers * self.layer + self.head


def c_from_sizes(
    target: Shape, *, layers: int = 5, taps: int = 5, rank: int = 256, draft_vocab: int | None = None
) -> tuple[float, float]:
    """(c_block, c_step) of a DSpark drafter from weight bytes.

    Assumes batch 1, one dtype on both sides, memory-bound passes, KV reads ignored, every weight read once a pass. The drafter
    has `layers` target-shaped layers, a projection of `taps` tapped states (taps * hidden x hidden) and an LM head over
    draft_vocab (default: the whole vocabulary); the correction head reads its output matrix, rank * draft_vocab weights, at
    every slot. Kernel launches come on top.
    """
    for name, value in (("layers", layers), ("taps", taps), ("rank", rank)):
        if value < 0:
            raise ValueError(f"{name}: got {value}, allowed: at least 0")
    vocab = _draft_vocab(target, draft_vocab)
    block = layers * target.layer + taps * target.hidden**2 + vocab * target.hidden
    return block / target.pass_weights, rank * vocab / target.pass_weights


def c_eagle3_from_sizes(target: Shape, *, draft_vocab: int | None = None) -> float:
    """c of a one-layer EAGLE-3 drafter, per step, from weight bytes; assumptions as in c_from_sizes.

    Its layer reads embedding and state side by side (q, k, v of doubled width), then come fc over three taps and the LM head.
    """
    vocab = _draft_vocab(target, draft_vocab)
    wide = target.hidden * target.head_dim * (target.heads + 2 * target.kv_heads)  # the second half of q, k and v
    step = target.layer + wide + 3 * target.hidden**2 + vocab * target.hidden
    return step / target.pass_weights


def _draft_vocab(target: Shape, draft_vocab: int | None) -> int:
    vocab = target.vocab if draft_vocab is None else draft_vocab
    if not 1 <= vocab <= target.vocab:
        raise ValueError(f"draft_vocab: got {vocab}, allowed: 1 to {target.vocab}")
    return vocab
