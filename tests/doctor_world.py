"""A sound output folder of answered prompts for the tests of the doctor, and how a finding is looked up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_chat import PLAIN, WORDS, chat_tokenizer

from draftsmith.data import doctor
from draftsmith.data.chat import ChatFormat, tokenizer_hash
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.findings import Finding, Subject
from draftsmith.data.source import Prompt, prompts_hash

TARGET = {"name": "tiny", "revision": None, "dtype": "float32", "weights": "abc"}
END = WORDS.index("</s>")


@dataclass
class World:
    """A sound output folder of 12 answered prompts, to be broken before it is examined."""

    folder: Path
    template: str = PLAIN
    config: dict[str, Any] = field(default_factory=dict)
    heldout: list[Prompt] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=lambda: [Prompt(f"p{i}", "chat", (f"w{i} hi",)) for i in range(12)])
    answers: list[str] = field(default_factory=lambda: [f"yes w{i} ok w{(7 * i) % 40} w{(3 * i) % 40}" for i in range(12)])
    rows: list[dict[str, Any]] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    tail: str = ""

    def __post_init__(self) -> None:
        self.chat = ChatFormat(chat_tokenizer(self.template), template_args=self.config.get("template_args"))
        self.data = DataConfig(**{"max_length": 48, "generation": GenerationConfig(max_new_tokens=20), **self.config})
        for index, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            asked = [{"role": "user", "content": prompt.turns[0]}]
            self.rows.append({
                "id": prompt.id, "index": index, "domain": prompt.domain,
                "messages": [*asked, {"role": "assistant", "content": answer}],
                "prompt_ids": self.chat.render(asked, generation_prompt=True),
                "answer_ids": [*self.chat.tokenizer(answer)["input_ids"], END], "finish_reason": "stop", "temperature": 1.0,
            })  # fmt: skip
        self.manifest = {
            "kind": "answers", "target": TARGET, "template": self.chat.template_hash,
            "template_args": self.chat.template_args, "tokenizer": tokenizer_hash(self.chat.tokenizer), "eos_ids": [END],
            "generation": {"temperature": 1.0, "max_new_tokens": 20, "dtype": "float32"}, "max_length": 48,
            "prompts": {"count": 12, "sha256": prompts_hash(self.prompts)},
        }  # fmt: skip

    def subject(self, **changes: Any) -> Subject:
        """What the doctor gathers."""
        answers = self.folder / "answers"
        if self.data.answers == "target":
            answers.mkdir()
            (answers / "manifest.json").write_text(json.dumps(self.manifest))
            (answers / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows) + self.tail)
        found = doctor.gather(
            self.data, self.chat, self.folder, prompts=self.prompts, heldout=self.heldout, target=TARGET,
            vocab_size=len(WORDS), anchor_share=0.25, block_size=4, draft_vocab_size=None,
        )  # fmt: skip
        for name, value in changes.items():
            object.__setattr__(found, name, value)
        return found

    def given(self) -> None:
        """Let the answers come with the prompts."""
        self.data = DataConfig(**{"max_length": 48, "answers": "given", **self.config})
        self.prompts = [
            Prompt(prompt.id, prompt.domain, prompt.turns, replies=(answer,))
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]


def the(findings: list[Finding], check: str, level: str = "error") -> Finding:
    """The one finding of a check and level."""
    [found] = [item for item in findings if item.check == check and item.level == level]
    return found
