"""Tokens per second of whole training steps: padded batches in random order, padded by length, and packed rows.

    python benchmarks/packing.py [--json outputs/packing.json] [--quick] [--target NAME|random] [--rows 8] [--chats 96]

The same chats, anchors, drafter and objective for all three; a step is collation, target states, drafter, objective,
backward, clipping and AdamW. Steps of the contenders are interleaved, and a ratio is the median over rounds of the tokens
per second of one round.

random    the usual way: batches of `rows` chats in random order, each padded to its longest chat
bucketed  our `train.packing: none`: batches of `rows` chats of similar length, padded
packed    our `train.packing: packed`: one row of `rows` times the mean length in tokens, filled with chats

Both with cached target states (held in memory, copied into the batch) and with online ones (the target's forward in the
step; of packed rows chat by chat). Padding costs a step the target's forward, the context's projections and unused blocks;
it never reaches the objective, which takes the blocks in use only, in all three: a trainer whose loss also runs over padding
loses more than `random` does here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _chats import chat_rows

from draftsmith.data.batch import TrainBatch, anchor_budget, collate, epoch_order, sample_anchors
from draftsmith.data.chat import TokenRow
from draftsmith.data.pack import pack_order
from draftsmith.eval.environment import describe
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.losses.reduce import denominators
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export.native import build_config
from draftsmith.models.target import Target, load_target
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import Features, OnlineFeatures, compute_features, place
from draftsmith.train.metrics import Clock
from draftsmith.train.step import Setup, StepContext

KINDS = ("random", "bucketed", "packed")
Timer = Callable[[], float]


class Held:
    """Cached target states, held in memory: what a step pays is putting them into the batch."""

    def __init__(self, target: Target, taps: tuple[int, ...], rows: Sequence[TokenRow]) -> None:
        self.target, self.taps, self.held = target, taps, {}
        for start in range(0, len(rows), 8):
            part = rows[start : start + 8]
            found = compute_features(target, taps, part, law=False)
            self.held |= {row.id: item for row, item in zip(part, found, strict=True)}

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """See FeatureSource."""
        placed = place([self.held[row.id] for row in rows], batch, self.target, len(self.taps))
        return Features(placed.taps, placed.last_hidden)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a small random target, 32 chats, 2 rounds")
    parser.add_argument("--target", default=TargetConfig().name, help="embedded target, Hub id or folder; random: a small one")
    parser.add_argument("--rows", type=int, default=8, help="chats of a padded batch")
    parser.add_argument("--chats", type=int, default=96)
    parser.add_argument("--longest", type=int, default=1024, help="window: longer chats are cut")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", default="cached,online", help="which of cached, online")
    parser.add_argument(
        "--busy", action="store_true", help="CPU seconds of this process instead of wall time (a shared machine)"
    )
    args = parser.parse_args()
    if args.quick:
        args.target, args.chats, args.rounds = "random", 32, 2
    return args


def small_target() -> Target:
    """A random Llama of 8 layers whose vocabulary is small beside its layers, as in larger models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).float(), None, "random")


def build(target: Target, rows: list[TokenRow], device: torch.device) -> StepContext:
    """The step of a default drafter on `target`, with online states."""
    config = build_config(target.config, DSparkConfig(), mask_token_id=target.vocab_size - 1, target_name="benchmark")
    torch.manual_seed(0)
    drafter = DSpark(config).to(device).train()
    heads = FrozenHeads.build(target.embedding_weight.float(), target.lm_head_weight.float(), None)
    source = OnlineFeatures(target, drafter.tap_layers)
    setup = Setup(drafter, heads, source, rows, [], target.softcap)
    return StepContext(TrainConfig(precision="fp32"), ObjectiveConfig(), setup, heads, device)


def plan(kind: str, rows: list[TokenRow], size: int, longest: int) -> list[list[int]]:
    """Chats of every step of one pass."""
    lengths = [len(row.input_ids) for row in rows]
    generator = torch.Generator().manual_seed(1)
    if kind == "bucketed":
        return epoch_order(lengths, size, seed=1, epoch=0)
    if kind == "packed":
        return pack_order(lengths, max(longest, size * sum(lengths) // len(lengths)), generator=generator)
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def batch_of(kind: str, rows: list[TokenRow], chosen: list[int]) -> TrainBatch:
    """The batch of a step; the anchors of a chat are the same for all kinds."""
    anchors = []
    for number in chosen:
        mask = rows[number].loss_mask
        budget = anchor_budget(mask, anchors_per_row=None, anchor_share=TrainConfig().anchor_share)
        anchors.append(sample_anchors(mask, budget, torch.Generator().manual_seed(number)))
    return collate([rows[i] for i in chosen], None, 7, anchors=anchors, packed=kind == "packed")


@torch.no_grad()
def total_loss(context: StepContext, kind: str, rows: list[TokenRow], steps: list[list[int]]) -> float:
    """The loss of all chats together, before any update: the same for every kind."""
    batches = [batch_of(kind, rows, chosen) for chosen in steps]
    totals = torch.stack([denominators(context.objective_cfg, batch.valid.flatten(0, 1)) for batch in batches]).sum(0)
    model, clock = context.setup.drafter, Clock()
    return sum(
        float(context.loss(model, batch, [rows[i] for i in chosen], totals, clock)[0])
        for batch, chosen in zip(batches, steps, strict=True)
    )


def one_step(
    context: StepContext, optimizer: torch.optim.Optimizer, kind: str, rows: list[TokenRow], chosen: list[int], clock: Timer
) -> float:
    """Seconds of a whole step."""
    sync(context.device)
    start = clock()
    batch = batch_of(kind, rows, chosen)
    loss, _ = context.loss(context.setup.drafter, batch, [rows[i] for i in chosen], None, Clock())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(context.setup.drafter.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    sync(context.device)
    return clock() - start


def sync(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    context: StepContext, rows: list[TokenRow], plans: dict[str, list[list[int]]], rounds: int, clock: Timer
) -> dict[str, list[float]]:
    """Tokens per second of every kind, one number a round; the kinds' steps take turns."""
    optimizer = torch.optim.AdamW(context.setup.drafter.parameters(), lr=1e-5)
    for kind in KINDS:  # warm up
        one_step(context, optimizer, kind, rows, plans[kind][0], clock)
    tokens, rates = sum(len(row.input_ids) for row in rows), {kind: [] for kind in KINDS}
    for _ in range(rounds):
        seconds = dict.fromkeys(KINDS, 0.0)
        for number in range(max(map(len, plans.values()))):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                if number < len(plans[kind]):
                    seconds[kind] += one_step(context, optimizer, kind, rows, plans[kind][number], clock)
        for kind in KINDS:
            rates[kind].append(tokens / seconds[kind])
    return rates


def padding(kind: str, rows: list[TokenRow], steps: list[list[int]]) -> float:
    """Share of the batches' places that hold no token."""
    places = sum(batch_of(kind, rows, chosen).input_ids.numel() for chosen in steps)
    return 1 - sum(len(row.input_ids) for row in rows) / places


def main() -> None:
    """Measure, print, write."""
    args = parse()
    clock = time.process_time if args.busy else time.perf_counter
    device = torch.device(args.device)
    target = small_target() if args.target == "random" else load_target(TargetConfig(name=args.target, dtype="float32"))
    target.model.to(device)
    rows = chat_rows(args.chats, vocab_size=target.vocab_size, longest=args.longest)
    context = build(target, rows, device)
    plans = {kind: plan(kind, rows, args.rows, args.longest) for kind in KINDS}
    lengths = sorted(len(row.input_ids) for row in rows)
    print(
        f"{len(rows)} chats of {lengths[0]} to {lengths[-1]} tokens, mean {sum(lengths) / len(lengths):.0f}, "
        f"median {lengths[len(lengths) // 2]}; {torch.get_num_threads()} thread(s), {args.target}"
        + (", CPU seconds" if args.busy else "")
    )
    wasted = {kind: padding(kind, rows, plans[kind]) for kind in KINDS}
    result: dict[str, Any] = {"padding": wasted, "steps": {k: len(v) for k, v in plans.items()}, "lengths": lengths}
    for name in args.features.split(","):
        source = context.setup.source if name == "online" else Held(target, context.setup.drafter.tap_layers, rows)
        context.feed.source = source
        losses = [total_loss(context, kind, rows, plans[kind]) for kind in KINDS]
        apart = max(losses) - min(losses)
        assert apart <= 1e-5 * max(1.0, abs(losses[0])), losses
        rates = measure(context, rows, plans, args.rounds, clock)
        ratios = {
            base: statistics.median(a / b for a, b in zip(rates["packed"], rates[base], strict=True)) for base in KINDS[:2]
        }
        result[name] = {"tokens_per_s": rates, "packed_over": ratios, "losses_apart": apart}
        print(f"{name} features, total losses apart by {apart:.1e}")
        for kind in KINDS:
            speed = statistics.median(rates[kind])
            print(f"  {kind:<9} {speed:8.0f} tokens/s, {wasted[kind]:5.1%} padding, {len(plans[kind])} steps")
        print(f"  packed over random {ratios['random']:.2f}x, over bucketed {ratios['bucketed']:.2f}x")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**result, "environment": describe(), "threads": os.environ.get("OMP_NUM_THREADS")}))


if __name__ == "__main__":
    main()
