"""Exported drafters in the speculators package itself: `make interop`. Kept out of `make test`: it needs a venv of its own.

Run in our environment: `python benchmarks/interop.py --python .interop/venv/bin/python [--drafter outputs/quickstart/drafter]`.
It exports a drafter of every head kind, with the full and a reduced vocabulary, for a tiny random target (and the trained one
named), computes logits and survival logits of all blocks of a text, and lets benchmarks/interop_speculators.py do the same in
the other environment, from the exported folder alone. Prints the largest differences; exit code 1 when one is beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native, speculators
from draftsmith.models.facts import resolve_target
from draftsmith.models.target import Target, load_target

READER = Path(__file__).with_name("interop_speculators.py")
HEADS = ("vanilla", "gated", "rnn", "none")
LIMIT = 2e-5  # of float32 values, relative to the largest: two programs that order their sums differently


def tiny_target(folder: Path) -> Target:
    """A random Llama with untied heads, saved so that the other environment finds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return Target(model, None, str(folder))


def tiny_drafter(target: Target, head: str, reduced: bool) -> tuple[DSpark, FrozenHeads]:
    """A random drafter with every part awake."""
    ids = torch.arange(3, 96, 3) if reduced else None
    cfg = DSparkConfig(
        num_layers=2, block_size=5, tap_layers=(0, 2, 4), rank=0 if head == "none" else 8, head=head, init="random",
        draft_vocab_size=None if ids is None else len(ids),
    )  # fmt: skip
    torch.manual_seed(1)
    drafter = DSpark(native.build_config(target.config, cfg, mask_token_id=95, target_name=target.folder))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter.eval(), FrozenHeads.build(target.embedding_weight, target.lm_head_weight, ids)


@torch.no_grad()
def values(
    target: Target, drafter: DSpark, heads: FrozenHeads, ids: torch.Tensor, anchors: list[int]
) -> dict[str, torch.Tensor]:
    """Inputs and results of all blocks of one text, float32."""
    features = target.features(ids[None], None, drafter.tap_layers)
    at = torch.tensor([anchors])
    text = torch.stack([ids[p : p + drafter.block_size] for p in anchors])[None]
    out = drafter.unroll(taps=features.taps.float(), anchors=at, previous_tokens=text, embedding=heads.embedding.float())
    logits = out.hidden @ heads.draft_head.float().T
    if out.correction is not None and drafter.markov_head is not None:
        logits = logits + drafter.markov_head.markov_w2(out.correction)
    found = {"ids": ids, "anchors": at[0], "taps": features.taps[0].float(), "last": features.last_hidden[0].float()}
    found["logits"] = logits[0]
    if out.survival_logits is not None:
        found["survival"] = out.survival_logits[0]
    return {name: value.contiguous() for name, value in found.items()}


def compare(python: Path, place: Path, target: Target, drafter: DSpark, heads: FrozenHeads) -> dict[str, Any]:
    """Export, compute here, compute there: the differences that the other environment reports."""
    folder = place / "drafter"
    folder.mkdir(parents=True)
    speculators.write(
        folder, drafter, heads, verifier=str(Path(target.folder).resolve()),
        verifier_architectures=target.config.architectures or [type(target.model).__name__], dtype=torch.float32,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, min(target.vocab_size, 4000), (48,), generator=generator)
    save_file(values(target, drafter, heads, ids, [1, 9, 20, 33]), place / "values.safetensors")
    # its losses and masks are compiled, which takes longer than the comparison and changes no value
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, READER, folder, place / "values.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{READER.name}: {done.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Every case, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has speculators")
    parser.add_argument("--drafter", type=Path, help="a trained drafter of ours")
    asked = parser.parse_args()
    worst = 0.0
    print(f"{'case':34}{'logits':>12}{'survival':>12}{'largest logit':>15}")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        target = tiny_target(place / "target")
        cases: list[tuple[str, Target, DSpark, FrozenHeads]] = [
            (f"{head}, {'reduced' if reduced else 'full'} vocabulary", target, *tiny_drafter(target, head, reduced))
            for head in HEADS for reduced in (False, True)
        ]  # fmt: skip
        if asked.drafter is not None:
            trained = native.read_config(asked.drafter)["target_model_name_or_path"]
            real = load_target(TargetConfig(name=trained, dtype="float32"))
            real.folder = resolve_target(TargetConfig(name=trained))
            loaded = native.load(asked.drafter, embedding=real.embedding_weight, lm_head=real.lm_head_weight)
            cases.append(("trained drafter, real target", real, *loaded))
        for i, (title, model, drafter, heads) in enumerate(cases):
            found = compare(asked.python, place / str(i), model, drafter, heads)
            survival = found.get("survival")
            relative = max(found["logits"], survival or 0.0) / max(1.0, found["largest"])
            worst = max(worst, relative)
            shown = "-" if survival is None else f"{survival:.1e}"
            print(f"{title:34}{found['logits']:>12.1e}{shown:>12}{found['largest']:>15.1f}", flush=True)
    print(f"speculators {found['speculators']}: {'equal' if worst <= LIMIT else 'DIFFERENT'} (limit {LIMIT:g} of the largest)")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
