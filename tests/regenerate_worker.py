"""Runs that a test kills. Started once (imports are slow), it forks a child for every line on its standard input.

line: the arguments of `answer`; it says {"pid": of the child} at once, and {"status"} when the child is gone. The child answers
PROMPTS with the tiny target into the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tiny_chat import chat_target

from draftsmith.data.chat import ChatFormat
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.openai_client import OpenAIClient
from draftsmith.data.regenerate import regenerate
from draftsmith.data.server_answers import ServerGenerator
from draftsmith.data.source import Prompt
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine
from draftsmith.runtime.ngram import NgramProposer

PROMPTS = [Prompt(f"p{i}", "chat", tuple(f"w{(i * j) % 40} hi" for j in range(1, 2 + i % 3))) for i in range(120)]


def config(temperature: float) -> DataConfig:
    return DataConfig(
        max_length=128, generation=GenerationConfig(temperature=temperature, max_new_tokens=20, batch_size=4, seed=1)
    )


def answer(folder: str, temperature: float, drafter: bool = False, server: str | None = None):
    """One whole run; returns its rows."""
    torch.set_num_threads(1)
    target, settings = chat_target(), config(temperature)
    options = {}
    if server is not None:
        client = OpenAIClient(server, model="tiny", concurrency=4, timeout=20)
        chat = ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids)
        options = {"engine": ServerGenerator(client, chat), "answered_by": {"by": "server", "model": "tiny"}}
    elif drafter:
        decoder = Decoder.from_target(target.model, dtype=torch.float32, backend="torch")
        options = {
            "engine": Engine(
                decoder, proposer=NgramProposer(), slots=4, max_context=128, eos_ids=target.eos_token_ids
            )
        }  # fmt: skip
    return regenerate(
        PROMPTS, settings, target, Path(folder), name="tiny", progress=False, say=lambda line: None, **options
    ).rows


def say(**what: int) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                answer(**job)
                code = 0
            finally:
                os._exit(code)
        say(pid=child)
        _, status = os.waitpid(child, 0)
        say(status=status)


if __name__ == "__main__":
    main()
