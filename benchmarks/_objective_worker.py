"""One contender of benchmarks/objective.py: `python _objective_worker.py CONTENDER SHAPE(json)`.

Runs in our environment (products, fused, plain) or where speculators is installed (speculators); inputs are the same numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from _worker import serve
from torch import Tensor

Run = Callable[[], float]


def make(shape: dict[str, Any]) -> dict[str, Any]:
    """Inputs of `losses.fused.objective`: a text of `tokens`, `anchors` blocks of `slots` on it."""
    g = torch.Generator().manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape["precision"]]
    vocab, hidden, rank, tokens = (shape[name] for name in ("vocab", "hidden", "rank", "tokens"))
    slots, anchors = shape["slots"], shape["anchors"]

    def numbers(*size: int, scale: float) -> Tensor:  # row by row: a float32 copy of a large table would set the peak
        out = torch.empty(*size, dtype=dtype)
        for part in out.split(4096):
            part.copy_(torch.randn(part.shape, generator=g) * scale)
        return out

    head = numbers(vocab, hidden, scale=2.0 * hidden**-0.5)
    starts = torch.randperm(tokens - slots, generator=g)[:anchors].sort().values
    return {
        "hidden": numbers(anchors, slots, hidden, scale=1.0), "correction": numbers(anchors, slots, rank, scale=1.0),
        "lm_head": head, "target_head": head, "w2": numbers(vocab, rank, scale=rank**-0.5),
        "target_hidden": numbers(tokens, hidden, scale=1.0), "target_index": starts[:, None] + torch.arange(slots),
        "labels": torch.randint(0, vocab, (anchors, slots), generator=g),
        "valid": torch.ones(anchors, slots, dtype=torch.bool), "survival_logits": torch.randn(anchors, slots, generator=g),
    }  # fmt: skip


def products(batch: dict[str, Any], shape: dict[str, Any]) -> Run:
    """The floor: the target's head once a text position, the draft's head, and what carries a gradient of the logits back to
    the hidden states and both factors of the correction. Nothing else; memory made beforehand, all rows at once if it fits."""
    hidden, u, head, w2 = batch["hidden"].flatten(0, 1), batch["correction"].flatten(0, 1), batch["lm_head"], batch["w2"]
    states = batch["target_hidden"][batch["target_index"].unique()]
    size = max(1, min(len(hidden), (2 << 30) // (head.shape[0] * head.element_size())))
    table = torch.zeros(size, head.shape[0], dtype=head.dtype)
    d_hidden, d_u, d_w2 = torch.zeros_like(hidden), torch.zeros_like(u), torch.zeros_like(w2.T)

    def run() -> float:
        for part in states.split(size):
            torch.mm(part, head.T, out=table[: len(part)])
        for start in range(0, len(hidden), size):
            span = slice(start, start + size)
            z = torch.mm(hidden[span], head.T, out=table[: len(hidden[span])])
            z.addmm_(u[span], w2.T)
            d_w2.addmm_(u[span].T, z, beta=float(start > 0))
            torch.mm(z, w2, out=d_u[span])
            torch.mm(z, head, out=d_hidden[span])
        return 0.0

    return run


def ours(batch: dict[str, Any], shape: dict[str, Any]) -> Run:
    """Value, metrics and gradients by `losses/fused.py` or `losses/objective.py`."""
    from draftsmith.losses import fused, objective
    from draftsmith.losses.config import ObjectiveConfig

    leaves = [batch[name].requires_grad_() for name in ("hidden", "correction", "w2", "survival_logits")]
    fast, more = shape["contender"] == "fused", {"chunk_bytes": shape["chunk_mib"] << 20}
    path = fused.objective if fast else objective.objective
    cfg = ObjectiveConfig(**shape["objective"])

    def run() -> float:
        loss, _ = path(cfg=cfg, **batch, **more)
        torch.autograd.grad(loss, leaves)
        return loss.item()

    if fast:  # compile the passes and load the products' library: no part of a step
        few = {k: v[:1] if k in ("hidden", "correction", "target_index", "labels", "valid", "survival_logits") else v
               for k, v in batch.items()}  # fmt: skip
        few |= {k: batch[k][:256] for k in ("lm_head", "target_head", "w2")} | {"labels": few["labels"] % 256}
        torch.autograd.grad(path(cfg=cfg, **few, **more)[0], leaves, allow_unused=True)
    return run


def peer(batch: dict[str, Any], shape: dict[str, Any]) -> Run:
    """The same part of speculators' DSpark step: both heads over every slot, its eager losses and metrics, backward."""
    from speculators.losses import resolve_loss_config
    from speculators.losses.eager import tv_loss
    from speculators.models.dspark.metrics import compute_metrics

    anchors, slots = batch["valid"].shape
    leaves = [batch[name].requires_grad_() for name in ("hidden", "correction", "w2", "survival_logits")]
    losses = resolve_loss_config(json.dumps({"kl_div": 0.1, "tv": 1.8}), "eager")

    def run() -> float:
        hidden, u = batch["hidden"].flatten(0, 1), batch["correction"].flatten(0, 1)
        with torch.no_grad():  # as in its core.py: over the text if the slots outnumber it, then spread to the slots
            index, states = batch["target_index"].flatten(), batch["target_hidden"]
            targets = (
                (states @ batch["target_head"].T)[index]
                if len(index) >= len(states)
                else states[index] @ batch["target_head"].T
            )
        logits = hidden @ batch["lm_head"].T + u @ batch["w2"].T
        loss, _ = compute_metrics(
            logits[None], targets[None], batch["survival_logits"].view(1, -1), torch.ones(1, anchors * slots), slots,
            loss_config=losses, tv_loss_fn=tv_loss, gamma=4.0,
        )  # fmt: skip
        torch.autograd.grad(loss, leaves)
        return loss.item()

    return run


def main(contender: str, described: str) -> None:
    """Prepare, then serve."""
    shape = {**json.loads(described), "contender": contender}
    batch = make(shape)
    build = {"products": products, "fused": ours, "plain": ours, "speculators": peer}[contender]
    inputs = sum(x.nbytes for name, x in batch.items() if name != "target_head")
    serve(build(batch, shape), contender=contender, threads=torch.get_num_threads(), inputs=inputs, torch=torch.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
