"""Floating-point operations of a step, counted by formula, and the peak of the device: their ratio is the MFU.

Only what the result needs is counted (model FLOPs): the tokens of chats, not padding; the anchors in use; no recomputation.
A multiply-add is 2. With n tokens, b blocks of G slots, v supervised slots, u text positions that teach one, and W(x) the
entries of x's matrices:

    target    2 n W(its decoder) + sum over chats of 2 L heads head_dim length^2   (causal; 0 with cached features)
    drafter   4 n W(fc)                           forward and weight gradient: the target's states need none
            + 6 n W(k_proj, v_proj)               the context's keys and values, all layers; forward 2, backward 4
            + 6 b G W(all of a layer)             the block's slots, all layers
            + 12 L heads head_dim sum over blocks of G (tokens it sees + G)         attention
    loss      4 v H Vd                            draft logits and the gradient of the hidden states: the head is frozen
            + 6 v r Vd                            correction head's output matrix
            + 2 u H V                             target logits

Norms, rotations, softmax and the optimiser are not counted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import TrainBatch
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark

# Dense peak in 1e12 FLOP/s by part of the device's name: bfloat16 with float32 accumulation, and float32 without TF32
# (vendors' data sheets). The first match counts, so the longer names come first.
PEAKS = {
    "GB200": (2500.0, 80.0), "B200": (2250.0, 75.0), "H200": (989.0, 67.0), "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0), "H100": (989.0, 67.0), "GH200": (989.0, 67.0), "H20": (148.0, 44.0), "A100": (312.0, 19.5),
    "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3), "A40": (149.7, 37.4),
    "A10": (125.0, 31.2), "RTX 5090": (209.5, 104.8), "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4), "MI250X": (383.0, 47.9),
}  # fmt: skip


@dataclass
class Flops:
    """Model FLOPs of one or several micro-batches."""

    target: float = 0.0
    drafter: float = 0.0
    loss: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.target + other.target, self.drafter + other.drafter, self.loss + other.loss)

    @property
    def total(self) -> float:
        """All parts."""
        return self.target + self.drafter + self.loss


class FlopCounter:
    """Counts the FLOPs of batches by the formula above. decoder: the target's, None with cached or remote features."""

    def __init__(self, drafter: DSpark, heads: FrozenHeads, decoder: nn.Module | None = None) -> None:
        config = drafter.config
        self.slots, self.layers = drafter.block_size, config["num_hidden_layers"]
        self.width = config["num_attention_heads"] * config["head_dim"]
        # sizes by formula, not from the parameters: adapters and sharding change those
        self.fc = len(drafter.tap_layers) * drafter.hidden_size**2
        kv = 2 * drafter.hidden_size * config["num_key_value_heads"] * config["head_dim"]
        mlp = 3 * drafter.hidden_size * config["intermediate_size"]
        self.context, self.block = self.layers * kv, self.layers * (2 * drafter.hidden_size * self.width + kv + mlp)
        rank = config["markov_rank"] if drafter.markov_head is not None else 0
        self.draft_slot = (4 * drafter.hidden_size + 6 * rank) * heads.draft_head.shape[0]
        self.teacher = 2 * heads.lm_head.shape[0] * drafter.hidden_size
        self.target, self.target_attention = (0, 0) if decoder is None else _decoder_size(decoder)

    def count(self, batch: TrainBatch, chats: list[int]) -> Flops:
        """FLOPs of a batch (on the CPU); chats: their lengths. An all-masked batch counts as nothing."""
        used, tokens = batch.anchor_mask, sum(chats)
        starts = 0 if batch.starts is None else batch.starts
        blocks, seen = int(used.sum()), int(((batch.anchors - starts) * used).sum())
        valid, teachers = int(batch.valid.sum()), teacher_positions(batch)
        pairs = self.slots * (seen + blocks * self.slots)
        return Flops(
            target=2.0 * tokens * self.target + 2.0 * self.target_attention * sum(n * n for n in chats),
            drafter=4.0 * tokens * self.fc + 6.0 * tokens * self.context + 6.0 * blocks * self.slots * self.block
            + 12.0 * self.layers * self.width * pairs,
            loss=float(valid) * self.draft_slot + float(teachers) * self.teacher,
        )  # fmt: skip


def _decoder_size(decoder: nn.Module) -> tuple[int, int]:
    """Matrix entries of the decoder without its embedding, and layers * heads * head size."""
    embeddings = {id(m.weight) for m in decoder.modules() if isinstance(m, nn.Embedding)}
    entries = sum(p.numel() for p in decoder.parameters() if p.dim() > 1 and id(p) not in embeddings)
    config: Any = decoder.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return entries, config.num_hidden_layers * heads * size


def teacher_positions(batch: TrainBatch) -> int:
    """Text positions whose target law at least one slot learns from."""
    return marked(batch, offset=0)


def covered_positions(batch: TrainBatch) -> int:
    """Text positions that at least one slot predicts."""
    return marked(batch, offset=1)


def marked(batch: TrainBatch, *, offset: int) -> int:
    """Distinct positions anchor + k + offset over the valid slots k."""
    rows, length = batch.input_ids.shape
    slots = torch.arange(batch.valid.shape[-1], device=batch.valid.device)
    where = batch.anchors[..., None] + slots + offset
    flat = torch.arange(rows, device=where.device)[:, None, None] * (length + 1) + where.clamp_max(length)
    seen = torch.zeros(rows * (length + 1), dtype=torch.bool, device=where.device)
    seen[flat[batch.valid]] = True
    return int(seen.sum())


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Peak FLOP/s of one device, and where the number is from: a table of GPUs by name, or measured on a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, (bf16, fp32) in PEAKS.items():
            if part.lower() in name.lower():
                return 1e12 * (bf16 if dtype == torch.bfloat16 else fp32), f"data sheet of {part}"
        return None, f"unknown for {name}: set train.peak_tflops"
    return _measured(dtype), f"measured matrix product, {torch.get_num_threads()} thread(s)"


def _measured(dtype: torch.dtype, size: int = 768) -> float:
    """FLOP/s of a square matrix product on this CPU: the best of a few, which takes some 0.1 s."""
    left: Tensor = torch.ones(size, size, dtype=dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(sorted(times)[:3])
