"""The console script `draftsmith`: one thin function a subcommand. Heavy imports happen inside, so --help stays quick."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="draftsmith",
    help="Train drafters for speculative decoding and measure what they buy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # mistakes of the user are one line (main), all others a plain traceback
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="change values of the recipe")]
Device = Annotated[str, typer.Option(help="where target and drafter run: auto, cpu, cuda, cuda:1 ...")]


@app.command()
def run(recipe: RecipeName, overrides: Overrides = None, device: Device = "auto") -> None:
    """The whole pipeline: answers, training, export, measurement, report. Reuses what is valid and says so."""
    from . import pipeline

    pipeline.run(recipe, overrides or [], device)


@app.command()
def data(recipe: RecipeName, overrides: Overrides = None, device: Device = "auto") -> None:
    """Let the target answer the training prompts."""
    from . import pipeline

    pipeline.data(recipe, overrides or [], device)


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, device: Device = "auto") -> None:
    """Train the drafter and export it (several processes: accelerate launch -m draftsmith.train RECIPE)."""
    from . import pipeline

    pipeline.train(recipe, overrides or [], device)


@app.command()
def export(
    recipe: RecipeName,
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="folder to write; default: OUTPUT/export-DTYPE")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
) -> None:
    """Write the trained drafter in the native layout, for the runtime and for serving engines."""
    from . import pipeline

    pipeline.export(recipe, overrides or [], to, dtype)


@app.command()
def bench(recipe: RecipeName, overrides: Overrides = None, device: Device = "auto") -> None:
    """Compare plain and speculative decoding on held-out prompts and write the report."""
    from . import pipeline

    pipeline.bench(recipe, overrides or [], device)


@app.command()
def report(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the table of the last measurement and write report.html again from report.json."""
    from . import pipeline

    pipeline.report(recipe, overrides or [])


@app.command()
def generate(
    drafter: Annotated[Path, typer.Argument(help="an exported drafter, or the output folder of a run")],
    prompt: Annotated[str | None, typer.Option(help="what to ask; without it, read from standard input")] = None,
    target: Annotated[str | None, typer.Option(help="target.name; default: the one the drafter was trained for")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="keep the k likeliest tokens; 0 keeps all")] = 0,
    top_p: Annotated[float, typer.Option(help="keep the smallest set of this mass")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="longest answer")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="end the answer at this text; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    colour: Annotated[
        bool, typer.Option("--colour/--no-colour", "--color/--no-color", help="show which tokens were drafted")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="without the drafter")] = False,
    device: Device = "auto",
) -> None:
    """Answer a prompt in the terminal, as it is decoded."""
    from . import generate as command

    settings = command.settings(
        temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens, stop=tuple(stop or ()), seed=seed
    )
    text = prompt if prompt is not None else sys.stdin.read()
    command.run(
        drafter, text, settings, target=target, dtype=dtype, device=device, colour=colour, plain=plain
    )  # fmt: skip


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        from .. import __version__

        print(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Entry point; `arguments` replaces the command line.

    A mistake of the user is one line on stderr and exit code 2; DRAFTSMITH_DEBUG=1 shows the traceback.
    """
    for name, value in {
        "TOKENIZERS_PARALLELISM": "false",  # the tokenizer warns about forks otherwise
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    # transformers imports DeepSpeed where it is installed, and DeepSpeed warns of every machine without a GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    try:
        app(args=arguments)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("DRAFTSMITH_DEBUG"):
            raise
        for line in getattr(error, "lines", None) or [" ".join(str(error).split())]:
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
