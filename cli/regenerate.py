"""`draftsmith data regenerate`: the target answers a recipe's prompts, in our runtime or behind a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .allocator import keep_freed_memory
from .pipeline import Run, open_run, parts_of, pick_device

KEY = "DRAFTSMITH_API_KEY"


def run(
    name: str,
    overrides: list[str],
    *,
    server: str | None = None,
    model: str | None = None,
    concurrency: int | None = None,
    timeout: float = 120.0,
    logprobs: bool = False,
    with_drafter: Path | None = None,
    device: str = "auto",
) -> None:
    """Answer what is not answered yet, then examine the rows as training would.

    server: URL of an OpenAI-compatible server; model: the one to ask there; concurrency: requests in flight. with_drafter: an
    exported drafter, or a run's folder, that speeds our runtime up. Raises ValueError before a model loads for options that do
    not go together.
    """
    for option, value in (("--model", model), ("--concurrency", concurrency), ("--logprobs", logprobs or None)):
        if value is not None and server is None:
            raise ValueError(f"{option}: needs --server")
    if server is not None and with_drafter is not None:
        raise ValueError("--with-drafter: is for our own runtime; with --server start the server with the drafter")
    client = None
    if server is not None:
        from ..data.openai_client import OpenAIClient

        client = OpenAIClient(
            server, model=model, concurrency=32 if concurrency is None else concurrency, timeout=timeout,
            api_key=os.environ.get(KEY),
        )  # fmt: skip
        client.choose_model()
    if with_drafter is not None:
        from .generate import drafter_folder

        with_drafter = drafter_folder(with_drafter)
    found = open_run(name, overrides, prompts=True)
    place = pick_device(device)
    keep_freed_memory()
    if client is not None:
        client.choose_model(needs=found.recipe.data.max_length)
    from ..models.target import load_target
    from ..train import stage
    from ..train.prompts import heldout_prompts

    target = load_target(found.recipe.target, place)
    answering: dict[str, Any] = {}
    if client is not None:
        from ..data.chat import ChatFormat
        from ..data.server_answers import ServerGenerator

        chat = ChatFormat(target.tokenizer, template_args=found.recipe.data.template_args, eos_ids=target.eos_token_ids)
        answering = {
            "engine": ServerGenerator(client, chat, logprobs), "answered_by": {"by": "server", "model": client.model},
        }  # fmt: skip
    elif with_drafter is not None:
        drafter = with_drafter
        answering = {"engine": lambda: speculative(found, target, drafter, place)}
    stage.prepare_rows(
        parts_of(found.recipe), target, found.folder, heldout=heldout_prompts(found.recipe.eval.prompts), **answering
    )


def speculative(found: Run, target: Any, drafter: Path, device: str) -> Any:
    """The runtime's engine with a drafter, scheduled by the cost table of this machine; the table is measured where it is
    missing (OUTPUT/costs.regenerate.json).

    Raises ValueError when the drafter is another target's or does not fit data.max_length.
    """
    import dataclasses

    import torch

    from ..eval.profile import load_or_profile
    from ..eval.stage import Serving
    from ..models.export.native import read_config
    from ..runtime.config import ProposerConfig
    from ..runtime.decoder import Decoder
    from ..runtime.engine import Engine
    from ..runtime.proposers import ProposerSource
    from ..runtime.schedule import LoadAware

    recipe = found.recipe
    settings, config = recipe.data.generation, read_config(drafter)
    made_for = config.get("target_model_name_or_path")
    if made_for not in (None, "", recipe.target.name):
        raise ValueError(f"--with-drafter: {drafter} is for {made_for!r}, the recipe's target is {recipe.target.name!r}")
    dtype_name: Any = str(target.dtype).removeprefix("torch.") if settings.dtype == "target" else settings.dtype
    dtype = getattr(torch, dtype_name)
    decoder = Decoder.from_target(target.model, dtype=dtype, tap_layers=tuple(config["target_layer_ids"]))
    longest = decoder.max_positions - config["block_size"] - 1
    if recipe.data.max_length > longest:
        raise ValueError(f"data.max_length: {recipe.data.max_length} is not allowed with this drafter (4 to {longest})")
    rows = sorted({1, 2, 4, 8, 16, 32, 64, settings.batch_size} & set(range(1, settings.batch_size + 1)))
    cfg = dataclasses.replace(recipe.eval, dtype=dtype_name, proposer=ProposerConfig())
    serving = Serving(target, decoder, drafter, dtype, cfg.rule, None, longest)
    costs = load_or_profile(
        recipe.target, drafter, cfg, found.folder / "costs.regenerate.json", device=device,
        serving=serving, rows=rows, contexts=[min(256, recipe.data.max_length // 2)],
        say=lambda line: print(f"costs: {line}", flush=True),
    )  # fmt: skip
    source = ProposerSource(ProposerConfig(), target=target, dtype=dtype, drafter_folder=drafter)
    proposer = source(slots=settings.batch_size, max_context=recipe.data.max_length)
    return Engine(
        decoder, proposer=proposer, scheduler=LoadAware(costs), slots=settings.batch_size, max_context=recipe.data.max_length,
        eos_ids=target.eos_token_ids,
    )  # fmt: skip
