"""One contender of benchmarks/train_step.py: `python _train_step_worker.py CONTENDER SHAPE(json)`.

Contenders: draftsmith (our environment), speculators (its own). Features are given; a run is one optimiser step of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from _worker import serve
from torch import Tensor

TAPS = (1, 9, 17)
LAYER = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49_152, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
Run = Callable[[], float]


def features(shape: dict[str, Any]) -> dict[str, Tensor]:
    """A text, the target's states on it, and the frozen tied head: the same numbers for both."""
    g = torch.Generator().manual_seed(0)
    tokens, hidden, vocab = shape["tokens"], LAYER["hidden_size"], LAYER["vocab_size"]
    head = torch.randn(vocab, hidden, generator=g) * 2.0 * hidden**-0.5
    return {
        "ids": torch.randint(0, vocab, (1, tokens), generator=g), "head": head,
        "taps": torch.randn(1, tokens, len(TAPS) * hidden, generator=g), "last": torch.randn(1, tokens, hidden, generator=g),
        "anchors": torch.randperm(tokens - shape["block"], generator=g)[: shape["anchors"]].sort().values,
    }  # fmt: skip


def autocast(shape: dict[str, Any]) -> AbstractContextManager[None]:
    """bf16 products over float32 weights, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=shape["precision"] == "bf16")


def ours(given: dict[str, Tensor], shape: dict[str, Any]) -> Run:
    """The drafter, the fused objective, clipping and AdamW, as train/step.py and train/loop.py join them."""
    from draftsmith.losses.config import ObjectiveConfig
    from draftsmith.losses.fused import objective
    from draftsmith.models.dspark import DSpark
    from draftsmith.train.config import TrainConfig
    from draftsmith.train.optim import build_optimizer

    config = {
        **LAYER, "num_hidden_layers": shape["layers"], "block_size": shape["block"], "markov_rank": shape["rank"],
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        "mask_token_id": 0, "draft_vocab_size": LAYER["vocab_size"], "target_layer_ids": list(TAPS), "rope_theta": 1e5,
        "sample_from_anchor": True, "initializer_range": 0.02,
    }  # fmt: skip
    drafter, cfg, train = DSpark(config), ObjectiveConfig(**shape["objective"]), TrainConfig()
    optimizer = build_optimizer(drafter, train)
    dtype = torch.bfloat16 if shape["precision"] == "bf16" else torch.float32
    head, taps, last = given["head"].to(dtype), given["taps"].to(dtype), given["last"][0].to(dtype)
    ids, anchors, slots = given["ids"], given["anchors"][None], torch.arange(shape["block"])
    where = anchors[..., None] + slots
    previous, labels = ids[0][where], ids[0][where + 1]

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        with autocast(shape):
            out = drafter(taps=taps, anchors=anchors, previous_tokens=previous, embedding=head)
        assert out.correction is not None and drafter.markov_head is not None
        loss, stats = objective(
            cfg=cfg, hidden=out.hidden[0].to(dtype), correction=out.correction[0].to(dtype),
            w2=drafter.markov_head.markov_w2.weight.to(dtype), lm_head=head, target_head=head, target_hidden=last,
            target_index=where[0], labels=labels[0], valid=torch.ones_like(labels[0], dtype=torch.bool),
            survival_logits=out.survival_logits[0], chunk_bytes=shape["chunk_mib"] << 20,
        )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), train.clip)
        optimizer.step()
        stats.means()
        return loss.item()

    return run


def peer(given: dict[str, Tensor], shape: dict[str, Any]) -> Run:
    """speculators' DSpark model and its trainer's step (train/trainer.py), with eager attention and losses, as a CPU needs."""
    from speculators.losses import resolve_loss_config
    from speculators.losses.eager import tv_loss
    from speculators.models.attention import create_float_mask
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.train.optimizers import build_optimizers
    from transformers import Qwen3Config

    layer = Qwen3Config(**LAYER, num_hidden_layers=shape["layers"], tie_word_embeddings=False, attention_bias=False)
    layer._attn_implementation = "eager"
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=LAYER["vocab_size"], block_size=shape["block"],
        aux_hidden_state_layer_ids=list(TAPS), mask_token_id=0, markov_rank=shape["rank"],
    )  # fmt: skip
    model = DSparkDraftModel(config=config).float()
    model._create_mask_fn = create_float_mask
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
            getattr(model, name).weight = torch.nn.Parameter(given["head"], requires_grad=False)
        model.verifier_norm.weight.fill_(1.0)
    mask = torch.ones(1, shape["tokens"], dtype=torch.long)  # it draws the anchors itself, as many as asked for
    losses = resolve_loss_config(json.dumps({"kl_div": 0.1, "tv": 1.8}), "eager")
    (optimizer,) = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=6e-4, weight_decay=0.0))
    ids, documents = given["ids"], torch.zeros_like(given["ids"])

    def run() -> float:
        with autocast(shape):
            _, loss, metrics = model(
                hidden_states=given["taps"], input_ids=ids, loss_mask=mask, verifier_last_hidden_states=given["last"],
                document_ids=documents, max_anchors=shape["anchors"], loss_config=losses, tv_loss_fn=tv_loss,
            )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return sum(value.item() for value in metrics.values()) * 0.0 + loss.item()

    return run


def main(contender: str, described: str) -> None:
    """Prepare, then serve."""
    shape = json.loads(described)
    build = {"draftsmith": ours, "speculators": peer}[contender]
    serve(build(features(shape), shape), contender=contender, threads=torch.get_num_threads(), torch=torch.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
