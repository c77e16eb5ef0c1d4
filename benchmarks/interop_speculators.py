"""The other half of benchmarks/interop.py: runs where speculators is installed and draftsmith is not.

`python interop_speculators.py FOLDER VALUES` loads the exported folder with SpeculatorModel.from_pretrained, runs its own
training forward on CPU (eager attention) with the anchors of VALUES, and prints the largest differences as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.models.attention import create_float_mask
from speculators.models.dspark import core


@torch.no_grad()
def main(folder: str, values: str) -> None:
    """Load, run, compare, print."""
    kept = load_file(values)
    model = SpeculatorModel.from_pretrained(folder).float().eval()
    model._attn_impl = "eager"
    model.config.transformer_layer_config._attn_implementation = "eager"
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    model._create_mask_fn = create_float_mask
    seen: dict[str, torch.Tensor | None] = {}

    def capture(logits: torch.Tensor, targets: torch.Tensor, confidence: torch.Tensor | None, *args, **kwargs) -> tuple:
        seen["logits"], seen["survival"] = logits, confidence
        return torch.zeros(()), {}

    core.compute_metrics = capture
    ids, anchors = kept["ids"], kept["anchors"]
    mask = torch.zeros(1, len(ids), dtype=torch.long)
    mask[0, anchors] = 1
    model(
        hidden_states=kept["taps"][None], input_ids=ids[None], loss_mask=mask, verifier_last_hidden_states=kept["last"][None],
        document_ids=torch.zeros(1, len(ids), dtype=torch.long), max_anchors=len(anchors),
    )  # fmt: skip
    logits = seen["logits"].view_as(kept["logits"])
    found = {"logits": float((logits - kept["logits"]).abs().max()), "largest": float(kept["logits"].abs().max())}
    if "survival" in kept:
        found["survival"] = float((seen["survival"].view_as(kept["survival"]) - kept["survival"]).abs().max())
    print(json.dumps({**found, "speculators": version("speculators")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
