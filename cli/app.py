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
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="the same as an option")]
Device = Annotated[str, typer.Option(help="where target and drafter run: auto, cpu, cuda, cuda:1 ...")]


@app.command()
def run(recipe: RecipeName, overrides: Overrides = None, sets: Sets = None, device: Device = "auto") -> None:
    """The whole pipeline: answers, training, export, measurement, report. Reuses what is valid and says so."""
    from . import pipeline

    pipeline.run(recipe, [*(overrides or []), *(sets or [])], device)


data_app = typer.Typer(help="Training rows: have them answered, look at them.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("regenerate")
def data_regenerate(
    recipe: RecipeName,
    overrides: Overrides = None,
    server: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible server that answers instead")] = None,
    model: Annotated[str | None, typer.Option(help="model to ask there; default: the only one it serves")] = None,
    concurrency: Annotated[int | None, typer.Option(help="requests in flight there; default 32")] = None,
    timeout: Annotated[float, typer.Option(help="seconds of silence after which a request there is repeated")] = 120.0,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="keep log-probabilities where the server gives them")] = False,
    with_drafter: Annotated[Path | None, typer.Option(help="an exported drafter that speeds our runtime up")] = None,
    device: Device = "auto",
) -> None:
    """Let the target answer the training prompts, in our runtime or behind a server. Goes on where it was stopped."""
    from . import regenerate as command

    command.run(
        recipe, overrides or [], server=server, model=model, concurrency=concurrency, timeout=timeout, logprobs=logprobs,
        with_drafter=with_drafter, device=device,
    )  # fmt: skip


@data_app.command("doctor")
def data_doctor(
    recipe: RecipeName,
    overrides: Overrides = None,
    probe: Annotated[int, typer.Option(help="let the target read so many rows: did it write them? (loads it)")] = 0,
    to: Annotated[Path | None, typer.Option(help="folder of doctor.html and doctor.json; default: OUTPUT")] = None,
    device: Device = "auto",
) -> None:
    """Examine the rows before anything is trained on them, and show what will be supervised. Exit code 2 on a refusal."""
    from . import doctor as command

    command.run(recipe, overrides or [], probe=probe, to=to, device=device)


@data_app.command("sources")
def data_sources(recipe: RecipeName, overrides: Overrides = None) -> None:
    """List what was recognised in the prompt sources: files, schemas, turns, duplicates, overlap with the evaluation."""
    from . import sources as command

    command.sources(recipe, overrides or [])


@data_app.command("vocab")
def data_vocab(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Show what a reduced draft vocabulary covers of the answers, by size, with advice."""
    from . import sources as command

    command.vocab(recipe, overrides or [])


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(help="auto = go on from the newest checkpoint; none = start anew; or the folder of a checkpoint")
    ] = "auto",
    sets: Sets = None,
    device: Device = "auto",
) -> None:
    """Train the drafter and export it (several processes: accelerate launch -m draftsmith.train RECIPE)."""
    from . import pipeline

    pipeline.train(recipe, [*(overrides or []), *(sets or [])], device, resume=resume)


@app.command()
def path(name: Annotated[str | None, typer.Argument(help="such as accelerate/ddp; without it, all names")] = None) -> None:
    """Print where a shipped recipe or launch config lies: accelerate launch --config_file $(draftsmith path accelerate/ddp)."""
    from ..recipes.schema import shipped_files

    files = shipped_files()
    if name is None:
        print("\n".join(sorted(files)))
    elif name not in files:
        raise ValueError(f"{name}: not shipped; there are {', '.join(sorted(files))}")
    else:
        print(files[name])


@app.command()
def export(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="a recipe file, a shipped recipe, or a folder that `import` has made")
    ],
    overrides: Overrides = None,
    engine: Annotated[
        str | None,
        typer.Option("--for", help="engine: vllm, sglang, trtllm, deepspec, llamacpp or speculators"),
    ] = None,
    layout: Annotated[str | None, typer.Option("--format", help="native or speculators; default: the engine's first")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    to: Annotated[Path | None, typer.Option(help="folder to write; default: OUTPUT/export-...")] = None,
    target_heads: Annotated[
        bool | None, typer.Option(help="the target's embedding and LM head in the file; default: as the engine needs it")
    ] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="tokens drafted a cycle; default: the whole block")] = None,
    zero_head: Annotated[
        bool, typer.Option("--zero-head", help="give a drafter without correction head one that adds nothing")
    ] = False,
    base_model: Annotated[str | None, typer.Option(help="where others find the target; default: its Hub id")] = None,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="compare the written file with what was trained")] = True,
    self_test: Annotated[bool, typer.Option("--self-test", help="the gate must also catch five broken copies")] = False,
    push_to_hub: Annotated[str | None, typer.Option(help="upload to this repository, OWNER/NAME")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="with --push-to-hub: show what would go; needs no token")] = False,
    wandb_artifact: Annotated[str | None, typer.Option(help="log the folder as a W&B artifact of this name")] = None,
) -> None:
    """Write the trained drafter for the runtime or a serving engine, and prove that the file drafts what was trained."""
    from . import export as command

    options = command.ExportOptions(
        engine=engine, layout=layout, dtype=dtype, to=to, target_heads=target_heads,
        num_speculative_tokens=num_speculative_tokens, zero_head=zero_head, base_model=base_model, gate=gate,
        self_test=self_test, push_to_hub=push_to_hub, dry_run=dry_run, wandb_artifact=wandb_artifact,
    )  # fmt: skip
    command.run(recipe, overrides or [], options)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="a drafter of DeepSpec, speculators, z-lab or SpecForge")],
    target: Annotated[str, typer.Option(help="target.name of the model it drafts for")],
    to: Annotated[Path, typer.Option(help="folder to write")],
    layout: Annotated[str | None, typer.Option(help="anchor-first or fill-in, where the file does not say")] = None,
    dtype: Annotated[str, typer.Option(help="precision of the target: float32 or bfloat16")] = "bfloat16",
) -> None:
    """Bring another producer's drafter into the native layout, for the runtime and as a warm start."""
    from . import export as command

    command.bring(folder, target=target, to=to, layout=layout, dtype=dtype)


@app.command()
def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    grid: Annotated[bool, typer.Option("--grid", help="plain, fixed lengths, scheduler over eval.grid")] = False,
    server: Annotated[str | None, typer.Option(help="URL of a running vLLM, SGLang or `serve`: measure that instead")] = None,
    server_plain: Annotated[str | None, typer.Option(help="URL of the same target served without speculation")] = None,
    model: Annotated[str | None, typer.Option(help="with --server: model to ask there; default: the only one")] = None,
    timeout: Annotated[float, typer.Option(help="with --server: seconds of silence before a request is repeated")] = 120.0,
    to: Annotated[Path | None, typer.Option(help="with --server: folder to write; default: OUTPUT/server")] = None,
    device: Device = "auto",
) -> None:
    """Compare plain and speculative decoding on held-out prompts and write the report."""
    if server is not None or server_plain is not None:
        from . import server_bench

        options = server_bench.Options(
            server=server, server_plain=server_plain, grid=grid, model=model, timeout=timeout, to=to
        )  # fmt: skip
        server_bench.run(recipe, overrides or [], options)
        return
    from . import pipeline

    pipeline.bench(recipe, overrides or [], device, grid=grid)


@app.command()
def calibrate(recipe: RecipeName, overrides: Overrides = None, device: Device = "auto") -> None:
    """Fit the survival head's calibration on held-out rollouts and store it beside the drafter."""
    from . import calibrate as command

    command.run(recipe, overrides or [], device)


@app.command()
def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="file to write; default: OUTPUT/costs.json")] = None,
    device: Device = "auto",
) -> None:
    """Measure what drafting and verifying cost on this machine, for the scheduler."""
    from . import profile as command

    command.run(recipe, overrides or [], to, device)


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
    proposer: Annotated[
        str, typer.Option(help="what drafts: dspark, ngram, suffix, layerskip, int8 or small:model=NAME; KIND:KEY=VALUE,...")
    ] = "dspark",
    device: Device = "auto",
) -> None:
    """Answer a prompt in the terminal, as it is decoded."""
    from . import generate as command

    settings = command.settings(
        temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens, stop=tuple(stop or ()), seed=seed
    )
    text = prompt if prompt is not None else sys.stdin.read()
    command.run(
        drafter, text, settings, target=target, dtype=dtype, device=device, colour=colour, plain=plain, proposer=proposer
    )  # fmt: skip


@app.command()
def serve(
    drafter: Annotated[Path | None, typer.Argument(help="an exported drafter, or the output folder of a run")] = None,
    target: Annotated[str | None, typer.Option(help="target.name; default: the one the drafter was trained for")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="without the drafter")] = False,
    proposer: Annotated[
        str, typer.Option(help="what drafts: dspark, ngram, suffix, layerskip, int8 or small:model=NAME; KIND:KEY=VALUE,...")
    ] = "dspark",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    host: Annotated[str, typer.Option(help="address to listen at; there is no authentication")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    slots: Annotated[int, typer.Option(help="requests answered at once")] = 16,
    max_context: Annotated[
        int | None, typer.Option(help="positions of a request; default 4096, or what the target has")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="requests that may wait for a slot; more get status 429")] = 1024,
    model_name: Annotated[str | None, typer.Option(help="name under which it is served; default: the target's")] = None,
    costs: Annotated[Path | None, typer.Option(help="cost table of the scheduler; default: costs.json of the run")] = None,
    reuse_prefix: Annotated[
        bool, typer.Option("--reuse-prefix/--no-reuse-prefix", help="keep what a slot holds of the last prompt")
    ] = True,
    device: Device = "auto",
) -> None:
    """Serve a target, plain or with its drafter, under the OpenAI API until it is interrupted."""
    from . import serve as command

    command.run(
        command.Settings(
            drafter=drafter, target=target, plain=plain, proposer=proposer, dtype=dtype, host=host, port=port, slots=slots,
            max_context=max_context, max_waiting=max_waiting, model_name=model_name, costs=costs, reuse_prefix=reuse_prefix,
            device=device,
        )
    )  # fmt: skip


plan_app = typer.Typer(no_args_is_help=False)
app.add_typer(plan_app, name="plan")


@plan_app.command("data")
def plan_data(
    recipe: RecipeName,
    overrides: Overrides = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="speed of the target's pass, measured on one device")] = None,
    answers_per_second: Annotated[float | None, typer.Option(help="tokens a second of the target's answers")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
) -> None:
    """Bytes, hours and time of a recipe's answers and features, before anything is written; loads no weights."""
    from . import plan_data as command

    command.run(recipe, overrides or [], speed=tokens_per_second, answer_speed=answers_per_second, to=json_file)


@plan_app.callback(invoke_without_command=True)
def plan(
    called: typer.Context,
    alpha: Annotated[float | None, typer.Option(help="acceptance, equal in every slot")] = None,
    acceptance: Annotated[str | None, typer.Option(help="acceptance per slot: 0.8,0.75,0.7")] = None,
    c: Annotated[float | None, typer.Option(help="sequential drafter: one draft step / one target step")] = None,
    c_block: Annotated[float | None, typer.Option(help="parallel drafter: its pass / one target step")] = None,
    c_step: Annotated[float | None, typer.Option(help="parallel drafter: one slot of its serial head")] = None,
    v: Annotated[str | None, typer.Option(help="verify cost by gamma: 4:1.06,7:1.11; default 1, or from sizes")] = None,
    overhead: Annotated[float, typer.Option(help="the engine's own cost per cycle, in target steps")] = 0.0,
    plain_overhead: Annotated[float, typer.Option(help="the same per plain step")] = 0.0,
    c_hat: Annotated[float | None, typer.Option(help="operations per token, drafter / target")] = None,
    target_params: Annotated[str | None, typer.Option(help="weights of the target: 70B, 135M, 7e9")] = None,
    drafter_params: Annotated[str | None, typer.Option(help="weights of one drafter pass")] = None,
    head_params: Annotated[str | None, typer.Option(help="weights of one serial head step; makes it parallel")] = None,
    bytes_per_weight: Annotated[float, typer.Option(help="2 for 16 bit")] = 2.0,
    bandwidth: Annotated[float | None, typer.Option(help="of the device, GB/s")] = None,
    peak: Annotated[float | None, typer.Option(help="of the device, TFLOP/s")] = None,
    concurrency: Annotated[int, typer.Option(help="requests in one pass (sizes only)")] = 1,
    context: Annotated[int, typer.Option(help="cached tokens per request (sizes only)")] = 0,
    kv_bytes_per_token: Annotated[float, typer.Option(help="of all layers (sizes only)")] = 0.0,
    max_gamma: Annotated[int | None, typer.Option(help="longest draft to look at")] = None,
    within: Annotated[float, typer.Option(help="lengths this close to the best are as good")] = 0.03,
    report: Annotated[Path | None, typer.Option(help="a report.json, a grid.json, or their folder")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw S over gamma: .png, .svg or .pdf")] = None,
    figures: Annotated[Path | None, typer.Option(help="folder for four pictures of the equation")] = None,
) -> None:
    """The equation as a tool: S over gamma, the best draft length, ceilings, break-even, roofline; loads no model.

    `plan data RECIPE` instead says what a recipe's data takes.
    """
    if called.invoked_subcommand is not None:
        return
    from . import plan as command

    inputs = command.Inputs(
        alpha=alpha, acceptance=acceptance, c=c, c_block=c_block, c_step=c_step, v=v, overhead=overhead,
        plain_overhead=plain_overhead, c_hat=c_hat, target_params=target_params, drafter_params=drafter_params,
        head_params=head_params, bytes_per_weight=bytes_per_weight, bandwidth=bandwidth, peak=peak, concurrency=concurrency,
        context=context, kv_bytes_per_token=kv_bytes_per_token, max_gamma=max_gamma, within=within,
    )  # fmt: skip
    command.run(inputs, report=report, json_file=json_file, plot=plot, figures=figures)


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
