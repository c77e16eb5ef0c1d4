"""`draftsmith generate`: one answer, streamed as the engine commits it, optionally coloured by where each token came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.config import ProposerConfig, SamplingParams

if TYPE_CHECKING:
    from ..runtime.engine import CycleRecord

DRAFTED, CORRECTED, BONUS, PLAIN = "drafted and accepted", "corrected", "bonus", "target"
STYLES = {DRAFTED: "green", CORRECTED: "bold red", BONUS: "cyan", PLAIN: ""}


def settings(**values: Any) -> SamplingParams:
    """Sampling settings out of the command line; a mistake is named as its option."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        key, _, rest = str(error).partition(":")
        raise ValueError(f"--{key.replace('_', '-')}:{rest}") from error


def origins(tokens: list[int], record: CycleRecord | None) -> list[str]:
    """Where each of the committed tokens of one cycle came from.

    The drafts accepted come first; then one token of the target: a correction where a draft was rejected, a bonus where
    all of them passed. An end token among the drafts cuts the rest. Without a record the token is the prefill's.
    """
    if record is None or record.proposed == 0:
        return [PLAIN] * len(tokens)
    last = CORRECTED if record.accepted < record.proposed else BONUS
    return [DRAFTED if i < record.accepted else last for i in range(len(tokens))]


class TextStream:
    """Turns committed tokens into pieces of text; an incomplete UTF-8 character waits for its remaining tokens."""

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str, str], None]) -> None:
        self.decode, self.write = decode, write
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, token: int, origin: str) -> None:
        """Append one token and write what it adds."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        if text.endswith("\ufffd"):
            return
        self.write(text[len(self.shown) :], origin)
        self.shown = text

    def finish(self) -> None:
        """Write what still waits."""
        text = self.decode(self.tokens)
        self.write(text[len(self.shown) :], PLAIN)
        self.shown = text


def drafter_folder(path: Path) -> Path:
    """The exported drafter at `path`, which may also be a run's output folder. Raises ValueError when there is none."""
    for folder in (path, path / "drafter"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"{path}: no exported drafter here (no config.json, no drafter/config.json)")


def trained_with(folder: Path) -> dict[str, Any]:
    """The recipe in the drafter's draftsmith.json, empty for a folder that brings none."""
    path = folder / "draftsmith.json"
    if not path.is_file():
        return {}
    recipe = json.loads(path.read_text(encoding="utf-8")).get("recipe")
    return recipe if isinstance(recipe, dict) else {}


def chat_warning(folder: Path, template_hash: str) -> str | None:
    """What to say when the drafter was trained under another chat template than it is served with now."""
    path = folder / "draftsmith.json"
    made = json.loads(path.read_text(encoding="utf-8")).get("chat", {}) if path.is_file() else {}
    if made.get("template") in (None, template_hash):
        return None
    args = json.dumps(made.get("template_args") or {})
    return (
        f"warning: the drafter was trained under chat template {made['template'][:8]} with the arguments {args}, "
        f"the target now renders {template_hash[:8]}: expect lower acceptance"
    )


def run(
    path: Path,
    prompt: str,
    sampling: SamplingParams,
    *,
    target: str | None,
    dtype: str,
    device: str,
    colour: bool,
    plain: bool,
    proposer: str = "dspark",
) -> None:
    """Load target and drafter, answer `prompt` in a chat turn, print the answer and one line of figures.

    proposer: see ProposerConfig.parse. Raises ValueError before a model loads for a bad folder, an empty prompt, a bad dtype or
    proposer, or a missing device.
    """
    from rich.console import Console
    from rich.text import Text

    folder = drafter_folder(path)
    name = target or json.loads((folder / "config.json").read_text(encoding="utf-8")).get("target_model_name_or_path")
    if not name:
        raise ValueError(f"{folder}: the drafter does not name its target; give --target")
    if not prompt.strip():
        raise ValueError("--prompt: the prompt is empty")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype: {dtype!r} is not allowed; it must be float32 or bfloat16")
    try:
        drafting = None if plain else ProposerConfig.parse(proposer)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    console = Console(highlight=False, soft_wrap=True)
    engine, tokenizer, eos_ids = _engine(folder, name, dtype, device, drafting, sampling)
    from ..data.chat import ChatFormat
    from ..runtime.engine import Request

    made = trained_with(folder).get("data", {})

    # the chat as the drafter was trained on: in another frame it would only be slow, and nothing would say why
    system = made.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    chat = ChatFormat(tokenizer, template_args=made.get("template_args"), eos_ids=eos_ids)
    if not plain and (warning := chat_warning(folder, chat.template_hash)):
        print(warning, file=sys.stderr)
    ids = chat.render([*messages, {"role": "user", "content": prompt}], generation_prompt=True)
    stream = TextStream(
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        lambda text, origin: console.print(Text(text, style=STYLES[origin] if colour else ""), end=""),
    )

    def show(request: Request, tokens: list[int], record: CycleRecord | None) -> None:
        for token, origin in zip(tokens, origins(tokens, record), strict=True):
            if token not in eos_ids:
                stream.add(token, origin)

    [completion] = engine.run([Request("prompt", ids, sampling)], on_commit=show)
    stream.finish()
    console.print()
    stats = engine.stats
    seconds = stats.draft_s + stats.head_s + stats.verify_s + stats.rest_s
    rate = f", {stats.committed / seconds:.1f} tokens/s" if seconds else ""
    tau = f", {stats.tau:.2f} tokens per verification" if stats.cycles and not plain else ""
    console.print(f"[{len(completion.token_ids)} tokens, {completion.finish_reason}{rate}{tau}]", style="dim", markup=False)
    if colour and not plain:
        legend = [Text(kind, style=STYLES[kind]) for kind in (DRAFTED, CORRECTED, BONUS)]
        console.print(Text("  ").join(legend))


def _engine(
    folder: Path, name: str, dtype: str, device: str, drafting: ProposerConfig | None, sampling: SamplingParams
) -> tuple[Any, Any, tuple[int, ...]]:
    """(engine of one slot, tokenizer, end tokens)."""
    import torch

    from ..models.config import TargetConfig
    from ..models.export import native
    from ..models.target import load_target
    from ..runtime.decoder import Decoder
    from ..runtime.engine import Engine
    from ..runtime.proposers import ProposerSource, draft_slots, tap_layers
    from .pipeline import pick_device

    native.read_config(folder)
    slots = draft_slots(drafting, folder) if drafting else 0
    place = pick_device(device)
    revision = trained_with(folder).get("target", {}).get("revision")
    target = load_target(
        TargetConfig(name=name, revision=revision, dtype="float32" if dtype == "float32" else "bfloat16"), place
    )
    precision = getattr(torch, dtype)
    taps = tap_layers(drafting, folder) if drafting else ()
    decoder = Decoder.from_target(target.model, dtype=precision, tap_layers=taps)
    context = min(decoder.max_positions, 4096 + sampling.max_new_tokens)
    proposer = None
    if drafting:
        context = min(context, decoder.max_positions - slots - 1)
        source = ProposerSource(drafting, target=target, dtype=precision, drafter_folder=folder, decoder=decoder)
        proposer = source(slots=1, max_context=context, with_survival=False)
    engine = Engine(
        decoder, proposer=proposer, slots=1, max_context=context, eos_ids=target.eos_token_ids, tokenizer=target.tokenizer
    )
    return engine, target.tokenizer, target.eos_token_ids
