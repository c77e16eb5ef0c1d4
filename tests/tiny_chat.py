"""A hand-made chat tokenizer of a few words and a tiny random target that speaks it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.target import Target

WORDS = ["<unk>", "</s>", "user", "assistant", "system", "hi", "yes", "ok", *(f"w{i}" for i in range(40))]
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'assistant ' }}"
    "{% generation %}{{ m['content'] + ' ' }}{% endgeneration %}{{ '</s> ' }}"
    "{% else %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def chat_tokenizer(template: str = PLAIN) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: one id a word, `</s>` ends every turn."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", chat_template=template, clean_up_tokenization_spaces=False
    )


def chat_target(seed: int = 0, template: str = PLAIN) -> Target:
    """Random 2-layer Llama in float32 with the vocabulary of `chat_tokenizer`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=1, bos_token_id=None, pad_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config), chat_tokenizer(template), "tiny")
