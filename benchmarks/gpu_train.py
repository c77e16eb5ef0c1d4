"""The program of gpu_train.sh: runs of the training loop on a random target, and one batch on the GPU against the CPU.

Without a launcher it runs in one process without DDP. Variants are trained one after the other, each for `--steps` steps; the
first half is warm-up (compilation) and not reported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _chats import chat_rows
from accelerate import Accelerator

from draftsmith.data.batch import collate
from draftsmith.data.chat import TokenRow
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.models.config import DSparkConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export.native import build_config
from draftsmith.models.fp8 import fp8_refusal
from draftsmith.models.target import Target
from draftsmith.train import loop
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import OnlineFeatures
from draftsmith.train.metrics import Clock
from draftsmith.train.step import Setup, StepContext

# The sizes of Qwen3-0.6B, weights at random: throughput does not depend on their values.
LARGE = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
SMALL = dict(
    vocab_size=509, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=2048,
)  # fmt: skip
TOLERANCE = 1e-4  # relative, float32 without TF32: other kernels add in another order


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, help="steps of a variant (default 40; 4 on a CPU)")
    parser.add_argument("--tokens", type=int, help="tokens of a packed row (default 16384; 256 on a CPU)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def random_target(sizes: dict[str, Any], dtype: torch.dtype, device: str) -> Target:
    """A Qwen3 model with random weights; the same on every device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Target(Qwen3ForCausalLM(Qwen3Config(**sizes)).to(dtype).to(device), None, "random")


def setup_of(target: Target, rows: list[TokenRow], layers: int) -> Setup:
    """Drafter, heads and online states, as a recipe would build them."""
    shape = DSparkConfig(num_layers=layers, num_taps=min(5, target.num_layers - 1))
    config = build_config(target.config, shape, mask_token_id=target.vocab_size - 1, target_name="random")
    torch.manual_seed(1)
    drafter = DSpark(config)
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, None)
    return Setup(drafter, heads, OnlineFeatures(target, drafter.tap_layers), rows, [])


def first_losses(device: str, cfg: TrainConfig, rows: list[TokenRow]) -> dict[str, float]:
    """Loss terms and gradient norm of one packed batch in float32, before any update."""
    target = random_target(SMALL, torch.float32, device)
    setup = setup_of(target, rows, layers=2)
    setup.drafter.to(device)
    context = StepContext(cfg, ObjectiveConfig(), setup, setup.heads, torch.device(device))
    batch = collate(rows, None, setup.drafter.block_size, torch.Generator().manual_seed(0), anchor_share=0.25, packed=True)
    loss, stats = context.loss(setup.drafter, batch, rows, None, Clock())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in setup.drafter.parameters() if p.grad is not None]).norm()
    terms = {k: v for k, v in stats.means().items() if isinstance(v, float) and v == v}
    return {"loss": float(loss.detach()), "gradient norm": float(norm), **terms}


def equality(device: str) -> dict[str, float]:
    """Relative differences of losses and gradient norm between CPU and `device`, float32; exits when one is too large."""
    cfg = TrainConfig(precision="fp32")
    rows = chat_rows(12, vocab_size=int(SMALL["vocab_size"]), longest=256)
    ours, theirs = first_losses(device, cfg, rows), first_losses("cpu", cfg, rows)
    apart = {key: abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-3) for key in theirs}
    worst = max(apart, key=lambda key: apart[key])
    print(
        f"float32, one packed batch, {device} against cpu: loss {ours['loss']:.7f} and {theirs['loss']:.7f}; largest relative "
        f"difference of {len(apart)} numbers {apart[worst]:.1e} ({worst}), allowed {TOLERANCE:.0e}",
        flush=True,
    )
    if not apart[worst] <= TOLERANCE:
        raise SystemExit("the losses differ by more than rounding")
    return apart


def train(name: str, cfg: TrainConfig, setup: Setup, accelerator: Any) -> dict[str, float]:
    """One run of the loop; returns its last log line and the peak memory."""
    cuda = accelerator.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    folder = Path(tempfile.mkdtemp(prefix="gpu-train-"))
    try:
        loop.run(
            cfg=cfg, objective_cfg=ObjectiveConfig(), setup=setup, accelerator=accelerator, output=folder, seed=0,
            run_config={"benchmark": name, "train": asdict(cfg)}, provenance={},
        )  # fmt: skip
        line = json.loads((folder / "train.jsonl").read_text().splitlines()[-1])
    finally:
        shutil.rmtree(folder)
    line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    split = "  ".join(
        f"{key[5:-2]} {1e3 * value:.1f}" for key, value in line.items() if key.startswith("perf/") and key.endswith("_s")
        and "tokens" not in key
    )  # fmt: skip
    print(
        f"{name:<28} {line['perf/tokens_per_s']:9.0f} tokens/s  {line.get('perf/tflops', 0):7.2f} TFLOP/s  "
        f"MFU {line.get('perf/mfu', float('nan')):6.1%}  peak {line['peak_gib']:.2f} GiB  loss {line['loss/total']:.4f}\n"
        f"{'':<28} ms per step: {split}",
        flush=True,
    )
    return line


def variants(base: TrainConfig, device: torch.device) -> dict[str, TrainConfig]:
    """What is compared: all at once first, then one thing changed at a time."""
    found = {
        "compile, flex, overlapped": base,
        "  without compile": replace(base, compile=False),
        "  batched attention": replace(base, attention="batched"),
        "  in turn": replace(base, prefetch=False),
        "  activation checkpointing": replace(base, activation_checkpointing=True),
        "  padded": replace(base, packing="none"),
    }
    if fp8_refusal(device) is None:
        found["  float8"] = replace(base, fp8=True)
    return found


def main() -> None:
    """Equality, then throughput."""
    args = parse()
    cpu = args.device == "cpu"
    if not cpu and not torch.cuda.is_available():
        raise SystemExit("--device: cuda is not available; cpu runs a smoke test")
    steps, tokens = args.steps or (4 if cpu else 40), args.tokens or (256 if cpu else 16384)
    base = TrainConfig(
        steps=steps, rows=max(2, tokens // 300), packing="packed", tokens_per_batch=tokens, log_every=max(1, steps // 2),
        eval_every=0, checkpoint_every=steps, compile=True, compile_backend="aot_eager" if cpu else "inductor",
        precision="bf16", attention="auto",
    )  # fmt: skip
    accelerator = Accelerator(cpu=cpu)
    print(
        f"{torch.cuda.get_device_name() if not cpu else 'cpu'}, torch {torch.__version__}, {accelerator.distributed_type}, "
        f"{accelerator.num_processes} process(es)"
    )
    result: dict[str, Any] = {"equality": equality(args.device), "runs": {}}
    target = random_target(SMALL if cpu else LARGE, torch.bfloat16, args.device)
    rows = chat_rows(64 if cpu else 4000, vocab_size=target.vocab_size, longest=min(1024, tokens))
    for name, cfg in variants(base, accelerator.device).items():
        torch._dynamo.reset()
        result["runs"][name.strip()] = train(name, cfg, setup_of(target, rows, 2 if cpu else 5), accelerator)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
