"""`draftsmith serve`: the runtime behind the OpenAI API, plain or with a drafter."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.config import ProposerConfig
from .generate import chat_warning, drafter_folder, trained_with


@dataclass(frozen=True)
class Settings:
    """Options of the command. drafter: a drafter's or a run's folder, None to decode plainly."""

    drafter: Path | None
    target: str | None
    plain: bool
    proposer: str
    dtype: str
    host: str
    port: int
    slots: int
    max_context: int | None
    max_waiting: int
    model_name: str | None
    costs: Path | None
    reuse_prefix: bool
    device: str


def run(settings: Settings) -> None:
    """Load, serve until SIGINT or SIGTERM, then let running answers finish for a few seconds.

    Raises ValueError before a model loads for a bad option.
    """
    _check(settings)
    from .. import __version__
    from ..runtime.server import Server

    engine, target, chat = open_engine(settings)
    server = Server(
        engine, _served(settings, engine, target, chat), host=settings.host, port=settings.port,
        max_waiting=settings.max_waiting, version=__version__,
    )  # fmt: skip
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server.start()
    print(f"serving {server.served.model} at {server.url}/v1 ({_how(engine)}, {settings.slots} slots)", flush=True)
    while not stop.wait(0.5):
        if server.loop.error:
            break
    print("stopping", flush=True)
    server.stop(grace=10.0)
    if server.loop.error:
        raise RuntimeError(server.loop.error)


def _check(settings: Settings) -> None:
    if settings.drafter is None and settings.target is None:
        raise ValueError("give an exported drafter, or --target to serve a target alone")
    if settings.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype: {settings.dtype!r} is not allowed; it must be float32 or bfloat16")
    for name, value, low, high in (
        ("--port", settings.port, 0, 65535), ("--slots", settings.slots, 1, 1024),
        ("--max-waiting", settings.max_waiting, 0, 2**31),
        ("--max-context", 2 if settings.max_context is None else settings.max_context, 2, 2**31),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ValueError(f"{name}: {value} is not allowed ({low} to {high})")
    ProposerConfig.parse(settings.proposer)


def open_engine(settings: Settings) -> tuple[Any, Any, Any]:
    """(engine, target, chat format). Warns on stderr where the drafter does not fit how it is served."""
    folder = drafter_folder(settings.drafter) if settings.drafter is not None else None
    made = trained_with(folder) if folder is not None else {}
    name = settings.target or _target_of(folder)
    kind = ProposerConfig.parse(settings.proposer)
    drafting = None if settings.plain or (folder is None and kind.kind == "dspark") else kind
    import torch

    from ..data.chat import ChatFormat
    from ..models.config import TargetConfig
    from ..models.target import load_target
    from ..runtime.decoder import Decoder
    from ..runtime.engine import Engine
    from ..runtime.proposers import ProposerSource, draft_slots, tap_layers
    from .allocator import keep_freed_memory
    from .pipeline import pick_device

    keep_freed_memory()
    slots = draft_slots(drafting, folder) if drafting else 0
    place = pick_device(settings.device)
    revision = (made.get("target") or {}).get("revision")
    dtype_name: Any = settings.dtype
    target = load_target(TargetConfig(name=name, revision=revision, dtype=dtype_name), place)
    dtype = getattr(torch, settings.dtype)
    decoder = Decoder.from_target(target.model, dtype=dtype, tap_layers=tap_layers(drafting, folder) if drafting else ())
    longest = decoder.max_positions - (slots + 1 if drafting else 0)
    context = min(settings.max_context or 4096, longest)
    if settings.max_context is not None and context < settings.max_context:
        raise ValueError(f"--max-context: {settings.max_context} is not allowed (2 to {longest})")
    proposer = scheduler = None
    if drafting:
        scheduler = load_scheduler(settings, folder, name, place) if drafting.kind == "dspark" else None
        source = ProposerSource(drafting, target=target, dtype=dtype, drafter_folder=folder)
        proposer = source(slots=settings.slots, max_context=context, with_survival=scheduler is not None)
    engine = Engine(
        decoder, proposer=proposer, scheduler=scheduler, slots=settings.slots, max_context=context,
        eos_ids=target.eos_token_ids, tokenizer=target.tokenizer, reuse_prefix=settings.reuse_prefix,
    )  # fmt: skip
    chat = ChatFormat(
        target.tokenizer, template_args=(made.get("data") or {}).get("template_args"), eos_ids=target.eos_token_ids
    )
    if drafting and folder is not None and (warning := chat_warning(folder, chat.template_hash)):
        print(warning, file=sys.stderr)
    return engine, target, chat


def load_scheduler(settings: Settings, folder: Path | None, target: str, device: str) -> Any:
    """LoadAware over the cost table that was measured here for this drafter, None with a warning where there is none."""
    import torch

    from ..eval.profile import drafter_hash, hardware_name
    from ..runtime.costs import CostTable
    from ..runtime.schedule import LoadAware

    assert folder is not None
    path = settings.costs or next((p for p in (folder / "costs.json", folder.parent / "costs.json") if p.is_file()), None)
    if path is None:
        print("no costs.json: every row is drafted in full, at any load; `draftsmith profile` measures one", file=sys.stderr)
        return None
    table = CostTable.load(
        path, hardware=hardware_name(device), dtype=settings.dtype, target=target, threads=torch.get_num_threads(),
        drafter=drafter_hash(folder),
    )  # fmt: skip
    return LoadAware(table, clock=time.perf_counter)


def _target_of(folder: Path | None) -> str:
    assert folder is not None
    name = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("target_model_name_or_path")
    if not name:
        raise ValueError(f"{folder}: the drafter does not name its target; give --target")
    return str(name)


def _served(settings: Settings, engine: Any, target: Any, chat: Any) -> Any:
    from ..data.chat import ChatFormat
    from ..runtime.openai_api import Served

    def render(messages: Any, arguments: Any) -> list[int]:
        if not arguments:
            found: list[int] = chat.render(messages, generation_prompt=True)
            return found
        own = ChatFormat(target.tokenizer, template_args={**chat.template_args, **arguments}, eos_ids=target.eos_token_ids)
        return own.render(messages, generation_prompt=True)

    return Served(
        model=settings.model_name or settings.target or _target_of(drafter_folder(settings.drafter or Path())),
        tokenizer=target.tokenizer, render=render, max_context=engine.max_context, vocab_size=engine.decoder.vocab_size,
        eos_ids=frozenset(target.eos_token_ids),
    )  # fmt: skip


def _how(engine: Any) -> str:
    if engine.proposer is None:
        return "plain"
    return f"drafts of up to {engine.num_slots}" + (", scheduled" if engine.scheduler is not None else "")
