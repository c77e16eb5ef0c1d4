"""The data stage: prompts -> answers of the target -> token rows. Idempotent: says what it reuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat import ChatFormat, Tokenised, TokenRow, tokenise_all
from .config import DataConfig
from .regenerate import Answers, Generator, regenerate
from .source import Prompt, check_overlap, load_prompts


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of the stage. `answers` is None where the answers came with the prompts."""

    prompts: list[Prompt]
    answers: Answers | None
    tokenised: Tokenised
    template_hash: str

    @property
    def rows(self) -> list[TokenRow]:
        """The training rows."""
        return self.tokenised.rows

    @property
    def num_supervised(self) -> int:
        """Supervised tokens over all rows."""
        return sum(row.num_supervised for row in self.rows)


def given_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Rows with the answers that came with the prompts. Raises ValueError for a prompt without any."""
    rows = []
    for prompt in prompts:
        if not (prompt.replies or prompt.messages):
            raise ValueError(f"answers='given': prompt {prompt.id!r} brings no answer (use answers: target)")
        messages: list[Any] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn, reply in zip(prompt.turns, prompt.replies, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        if prompt.messages:  # with tool calls, which turns and replies cannot tell
            own = [message for message in prompt.messages if message["role"] != "system"]
            messages = [*messages[: prompt.system is not None], *own]
        tools = {"tools": list(prompt.tools)} if prompt.tools else {}
        rows.append({"id": prompt.id, "domain": prompt.domain, "messages": messages, **tools})
    return rows


def check_chat(prompts: Sequence[Prompt], chat: ChatFormat, say: Callable[[str], None]) -> None:
    """Whether the target's template can show these prompts; says when it leaves their tools out.

    Raises ValueError for plain text, whose opening is no question, where the target has a chat template.
    """
    if chat.template is not None and (texts := [prompt.id for prompt in prompts if prompt.schema == "text"]):
        raise ValueError(
            f"prompts: {len(texts)} rows are plain text ({texts[0]}), which is for targets without a chat template; this "
            "target has one: use rows with messages, turns or prompt"
        )
    tools = sum(bool(prompt.tools) for prompt in prompts)
    if tools and not chat.takes_tools:
        say(f"tools: {tools} prompts offer some, but the target's chat template does not show them")


def prepare(
    config: DataConfig,
    target: Any,
    folder: Path,
    *,
    name: str,
    revision: str | None = None,
    heldout: Sequence[Prompt] = (),
    engine: Generator | Callable[[], Generator] | None = None,
    answered_by: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> Prepared:
    """Rows to train on, made or reused under `folder`/answers.

    target: a loaded target; `name` and `revision` are its TargetConfig's. heldout: prompts kept for evaluation.
    engine: replaces the runtime engine built from the target (an engine, or a function that makes one); answered_by: what it
    is, see `regenerate`.

    Raises ValueError for unreadable or empty prompts, training prompts that are held out, answers made under other
    settings, and when no row is left.
    """
    prompts = load_prompts(config, say=say)
    if heldout:
        check_overlap(prompts, heldout, near=config.doctor.max_overlap)
    chat = ChatFormat(target.tokenizer, template_args=config.template_args, eos_ids=target.eos_token_ids)
    check_chat(prompts, chat, say)
    answers = None
    if config.answers == "given":
        say("answers: those in the prompt files, not the target's own (expect lower acceptance)")
        source = given_rows(prompts)
    else:
        answers = regenerate(
            prompts, config, target, folder / "answers",
            name=name, revision=revision, engine=engine, answered_by=answered_by, say=say, progress=progress,
        )  # fmt: skip
        source = answers.rows
        if not source:
            raise ValueError(f"max_length={config.max_length}: the prompt fills the window in all {len(prompts)} rows")
    tokenised = tokenise_all(source, chat, config.max_length, supervise=config.supervise, say=say)
    out = Prepared(prompts, answers, tokenised, chat.template_hash)
    tokens = sum(len(row.input_ids) for row in out.rows)
    say(f"rows: {len(out.rows)} with {tokens} tokens, {out.num_supervised} supervised ({out.num_supervised / tokens:.0%})")
    return out
