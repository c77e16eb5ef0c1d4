"""Tiny random targets built in memory: seconds-long tests of everything that needs a Hugging Face causal LM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TINY = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def tiny_model(family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Random causal LM of a family ("llama", "qwen2", "qwen3", "mistral", "gemma2", ...), frozen, in eval mode.

    Weights are drawn wider than usual so that logits differ clearly between tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(TINY | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval().requires_grad_(False)
