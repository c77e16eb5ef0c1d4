"""What 8-bit storage of cached features does to the loss: bytes a token, loss terms and gradient against full precision.

    python benchmarks/feature_storage.py RUN [--rows 8] [--dtype bfloat16]

RUN is the output folder of a finished run (its answers and its trained drafter are used); one to two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batch import collate
from draftsmith.data.chat import ChatFormat, tokenise_all
from draftsmith.data.features import RowFeatures, compress, expand, row_bytes
from draftsmith.data.regenerate import read_answers
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.losses.reduce import denominators
from draftsmith.models.config import TargetConfig
from draftsmith.models.export import native
from draftsmith.models.target import load_target
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import Features, compute_features, place
from draftsmith.train.metrics import Clock, named
from draftsmith.train.step import Setup, StepContext

SHOWN = ("loss/kl", "loss/tv", "loss/ce", "loss/survival", "accept/alpha_1", "accept/tau_expected")


class Given:
    """A source whose states were made before."""

    found: Features

    def features(self, batch: Any, rows: Any) -> Features:
        """See FeatureSource."""
        return self.found


def stored(item: RowFeatures, hidden: int, taps: str, last: str) -> RowFeatures:
    """A row as it comes back from storage."""

    def through(values: torch.Tensor, storage: str) -> torch.Tensor:
        return values if storage == "target" else expand(*compress(values, hidden, storage), values.dtype)

    return RowFeatures(through(item.taps, taps), through(item.last_hidden, last), item.lse, item.top)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    given = parser.parse_args()
    began = time.perf_counter()
    recipe = json.loads((given.run / "recipe.lock.json").read_text())
    target = load_target(TargetConfig(name=recipe["target"]["name"], dtype=given.dtype))
    drafter, heads = native.load(given.run / "drafter", embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    chat = ChatFormat(target.tokenizer, template_args=recipe["data"]["template_args"], eos_ids=target.eos_token_ids)
    answers = read_answers(given.run / "answers" / "answers.jsonl")[: given.rows]
    rows = tokenise_all(answers, chat, recipe["data"]["max_length"], say=lambda line: None).rows
    law = heads.draft_ids is not None
    made = compute_features(target, drafter.tap_layers, rows, law=law)
    source, cfg = Given(), TrainConfig(precision="fp32")
    setup = Setup(drafter.train(), heads, source, rows, [], target.softcap)
    objective = ObjectiveConfig(ce=0.1, kl=0.5, tv=1.0, survival=1.0)
    context = StepContext(cfg, objective, setup, heads.to(torch.float32), torch.device("cpu"))
    batch = collate(rows, None, drafter.block_size, torch.Generator().manual_seed(0), anchor_share=0.25)
    totals = denominators(objective, batch.valid.flatten(0, 1))
    manifest = {"hidden_size": target.hidden_size, "tap_layers": drafter.tap_layers, "dtype": given.dtype, "lse": law}
    reference: dict[str, float] = {}
    plain = torch.empty(0)
    print(f"{len(rows)} rows, {sum(len(row.input_ids) for row in rows)} tokens, {int(batch.valid.sum())} slots, {given.dtype}")
    print(
        f"{'taps':<8}{'last':<8}{'bytes/token':>12}{'total':>10}"
        + "".join(f"{n.split('/')[1]:>14}" for n in SHOWN)
        + "  gradient"
    )
    for taps, last in (("target", "target"), ("fp8", "target"), ("int8", "target"), ("fp8", "fp8")):
        kept = [stored(item, target.hidden_size, taps, last) for item in made]
        placed = place(kept, batch, target, len(drafter.tap_layers), law=law)
        source.found = Features(placed.taps, placed.last_hidden, placed.lse, placed.top)
        drafter.zero_grad(set_to_none=True)
        loss, stats = context.loss(drafter, batch, rows, totals, Clock())
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        values = {"total": float(loss.detach()), **named(stats)}
        if not reference:
            reference, plain = values, gradient
        size = row_bytes(1, manifest | {"storage": taps}) if last == "target" else float("nan")
        off = float((gradient - plain).norm() / plain.norm())
        cells = [values["total"] - (reference["total"] if taps != "target" else 0.0)]
        cells += [values.get(n, float("nan")) - (reference.get(n, 0.0) if taps != "target" else 0.0) for n in SHOWN]
        show = f"{cells[0]:>+10.5f}" + "".join(f"{c:>+14.5f}" for c in cells[1:])
        print(f"{taps:<8}{last:<8}{size:>12,.0f}{show}  off by {off:.2%}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s; below the first line: the change")


if __name__ == "__main__":
    main()
