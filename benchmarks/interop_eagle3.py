"""EAGLE-3 drafters as we read them against speculators' own forward.

`python interop_eagle3.py write FOLDER`, then, where speculators is installed, `python interop_eagle3.py compare FOLDER`, which
prints the largest difference of each variant as one line of JSON. The variants are small random drafters: Llama and Qwen3
layers, full and reduced vocabulary, and every norm flag.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYER = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80,
    "rms_norm_eps": 1e-5, "vocab_size": 97, "max_position_embeddings": 512, "rope_theta": 10000.0, "num_hidden_layers": 1,
    "attention_bias": False,
}  # fmt: skip
TOKENS, REDUCED = 24, 48
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {}, "norm_before_residual": {"norm_before_residual": True}, "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True},
}  # fmt: skip


def write(folder: Path) -> None:
    """Random drafters with the logits that our code gives for fixed states: FOLDER/VARIANT."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.models.blocks import BlockShape
    from draftsmith.models.eagle3 import Eagle3, Eagle3Config
    from draftsmith.models.export.eagle3 import load_eagle3

    verifier = folder / "verifier"  # speculators reads the target's configuration and head
    LlamaForCausalLM(LlamaConfig(**{**LAYER, "num_hidden_layers": 4})).save_pretrained(verifier)
    shape = BlockShape(
        hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=80, rms_norm_eps=LAYER["rms_norm_eps"]
    )
    for kind in ("llama", "qwen3"):
        for name, flags in FLAGS.items():
            size = REDUCED if name == "plain" else LAYER["vocab_size"]
            place = folder / f"{kind}-{name}"
            place.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(0)
            drafter = Eagle3(Eagle3Config(
                shape=shape, num_layers=1, vocab_size=97, draft_vocab_size=size, target_hidden_size=64, tap_layers=(0, 1, 2),
                qk_norm=kind == "qwen3", **flags,
            ))  # fmt: skip
            for parameter in drafter.parameters():
                torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else torch.nn.init.normal_(parameter, 1.0, 0.2)
            tensors = {key: value.detach().clone() for key, value in drafter.state_dict().items()}
            if size < 97:
                ids = torch.randperm(97)[:size].sort().values
                tensors |= {"d2t": ids - torch.arange(size), "t2d": torch.zeros(97, dtype=torch.bool).index_fill_(0, ids, True)}
            save_file(tensors, place / "model.safetensors")
            config = {
                "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": size,
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **{flag: False for flag in FLAGS if flag != "plain"}, **flags,
                "transformer_layer_config": {"model_type": kind, **LAYER},
                "speculators_config": {
                    "algorithm": "eagle3", "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": {"name_or_path": str(verifier.resolve()), "architectures": ["LlamaForCausalLM"]},
                },
            }  # fmt: skip
            (place / "config.json").write_text(json.dumps(config))
            heads = {"embedding": drafter.embed_tokens.weight, "lm_head": torch.zeros(97, 64)}
            loaded, rope = load_eagle3(place, **heads)
            taps, tokens = torch.randn(TOKENS, 3 * 64), torch.randint(0, 97, (TOKENS,))
            save_file(
                {"taps": taps, "tokens": tokens, "logits": forward(loaded, rope, taps, tokens)}, place / "values.safetensors"
            )


@torch.no_grad()
def forward(drafter: Any, rope: Any, taps: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Draft logits [T, Vd] of the entries (token t + 1, state t): tokens int64 [T], taps [T, n*H]; causal attention."""
    layer, places = drafter.layers[0], torch.arange(len(tokens))
    inputs, residual = layer.inputs(drafter.embed_tokens(tokens), drafter.fuse(taps))
    query, key, value = (x.transpose(0, 1)[None] for x in layer.self_attn.project(inputs, rope(places)))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return drafter.outputs(layer.finish(out[0].transpose(0, 1), residual))[1]


@torch.no_grad()
def compare(folder: Path) -> None:
    """speculators' forward on the same states, one training-time step."""
    from speculators.model import SpeculatorModel
    from speculators.models.attention import create_float_mask

    found = {}
    for place in sorted(path.parent for path in folder.glob("*/values.safetensors")):
        kept = load_file(place / "values.safetensors")
        model = SpeculatorModel.from_pretrained(str(place)).float().eval()
        model._attn_impl = model.config.transformer_layer_config._attn_implementation = "eager"
        for layer in model.layers:
            layer.self_attn.config._attn_implementation = "eager"
        model._create_mask_fn = create_float_mask
        seen: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        model(
            hidden_states=kept["taps"][None], input_ids=kept["tokens"][None], ttt_steps=1,
            document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        )  # fmt: skip
        difference, largest = float((seen[0][0] - kept["logits"]).abs().max()), float(kept["logits"].abs().max())
        found[place.name] = difference
        if not difference <= 1e-5 * (1.0 + largest):
            sys.exit(f"{place.name}: draft logits differ by {difference:.1e} (largest {largest:.1f})")
    print(json.dumps(found))


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
