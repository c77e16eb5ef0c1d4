"""The parity gate: an exported drafter, read back in a fresh process by code of its own, drafts what the trained one drafts.

`gate` writes a fixture (states of the real target on fixed prompts, captured by hooks; what the trained drafter computes from
them), and starts `python -m draftsmith.eval.parity FOLDER FIXTURE RESULT`, which reads the folder twice, with eval/reference.py
and with the runtime, and compares. Every fault it looks for is silent in an engine: text stays right, acceptance falls. The
self-test breaks copies of the folder on purpose and demands that each is caught with its cause named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.export import importers
from ..models.target import Target
from ..runtime.config import SamplingParams
from ..runtime.dspark import DSparkProposer
from ..runtime.sampling import SamplingBatch
from .parity_fixture import FULL, Check, Record, Spot, digest, per_slot, write_fixture
from .perturb import FAULTS, perturb
from .reference import Blocks, Reference, Unreadable

TOLERANCE = 1e-5  # of float32 logits, relative to the largest where that is above 1
NATIVE = 10 * TOLERANCE  # of the runtime's survival logits: its kernels order their sums otherwise
TIE = 1e-4  # two arg-maxima this close (relative to the largest logit) may change places between two float32 programs
FROZEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class Outcome:
    """All comparisons of one folder, and for a failed one the causes in words."""

    checks: list[Check] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every comparison held."""
        return all(check.passed for check in self.checks) and not self.causes

    def to_json(self) -> Record:
        """Plain values for draftsmith.json."""
        return {
            "gate": "passed" if self.passed else "failed",
            "checks": [asdict(check) for check in self.checks],
            "causes": self.causes,
        }


def gate(
    folder: Path,
    target: Target,
    drafter: DSpark,
    heads: FrozenHeads,
    *,
    dtype: torch.dtype,
    template_args: Mapping[str, Any] | None = None,
    with_heads: bool = True,
    system: str | None = None,
    self_test: bool = False,
) -> Record:
    """Compare the exported `folder` with the drafter it was made from. Returns the record for its draftsmith.json.

    dtype: of the file. with_heads: it brings the target's embedding and LM head. template_args, system: of the chat the
    drafter serves. self_test: also break copies of the folder.
    Raises RuntimeError naming the causes when the folder drafts anything else, or a broken copy is not caught.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-parity-") as name:
        fixture = Path(name)
        made = write_fixture(
            fixture, target, drafter, heads, dtype=dtype, with_heads=with_heads, template_args=template_args, system=system
        )  # fmt: skip
        found = fresh_process(folder, fixture, self_test=self_test)
    found["checks"] = made["checks"] + found["checks"]
    failed = [check["name"] for check in found["checks"] if not check["passed"]]
    if failed or found["causes"]:
        why = "; ".join(found["causes"]) or "unknown"
        raise RuntimeError(
            f"parity gate: {folder.name} does not draft what was trained. Cause: {why}. Failed: {', '.join(failed) or 'all'}"
        )
    missed = [fault for fault, seen in found.get("self_test", {}).items() if not seen["caught"]]
    if missed:
        raise RuntimeError(f"parity gate: self-test: broken copies were not caught: {', '.join(missed)}")
    return {**found, "dtype": made["dtype"], "blocks": made["blocks"], "acceptance_per_slot": made["acceptance"]}


def fresh_process(folder: Path, fixture: Path, *, self_test: bool = False) -> Record:
    """The comparison in a Python of its own. Raises RuntimeError when that ends without a result."""
    result = fixture / "result.json"
    command = [sys.executable, "-m", "draftsmith.eval.parity", str(folder.resolve()), str(fixture), str(result)]
    done = subprocess.run([*command, *(["--self-test"] if self_test else [])], capture_output=True, text=True, check=False)
    if not result.is_file():
        raise RuntimeError(f"parity gate: the fresh process ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    found: Record = json.loads(result.read_text(encoding="utf-8"))
    return found


# ---- the fresh process ------------------------------------------------------------------------------------------------


def examine(folder: Path, fixture: Path) -> Outcome:
    """Read the exported folder twice and compare both with the fixture."""
    made = json.loads((fixture / "fixture.json").read_text(encoding="utf-8"))
    kept = load_file(fixture / "fixture.safetensors")
    embedding = kept["target.embedding"]
    lm_head = kept.get("target.lm_head", embedding)
    where: list[Spot] = [(row, anchor) for row, anchor in made["where"]]
    rows = [kept[f"ids.{i}"] for i in range(made["rows"])]
    states: list[dict[int, Tensor]] = [{} for _ in rows]
    for name, value in kept.items():
        if name.startswith("states."):
            _, row, layer = name.split(".")
            states[int(row)][int(layer)] = value
    outcome = Outcome()
    try:
        reference = Reference(folder, embedding=embedding, lm_head=lm_head)
    except Unreadable as error:
        return Outcome([Check("reading", False, str(error))], [str(error)])
    differs = _frame_causes(reference, made) + _tensor_causes(reference.stored, made["hashes"])
    unseen = [layer for layer in reference.frame.taps if layer not in states[0]]
    if unseen:
        return Outcome([Check("reading", False, f"layers {unseen} are nowhere near those tapped in training")], differs)
    blocks = reference.blocks(rows, states, where, FULL)
    checks = outcome.checks
    checks += _compare(blocks, kept)
    checks += _runtime(folder, made, kept, rows, states, where, *_heads(reference, embedding, lm_head))
    if not all(check.passed for check in checks) or differs:
        outcome.causes = differs or ["the frame and every tensor are those of training, but they are computed otherwise"]
    return outcome


def _compare(blocks: Blocks, kept: Mapping[str, Tensor]) -> list[Check]:
    """The reference against the training side."""
    checks = [_close("draft logits", blocks.logits, kept["logits"], TOLERANCE)]
    if "survival" in kept or blocks.survival is not None:
        found = torch.zeros(0) if blocks.survival is None else blocks.survival
        checks.append(_close("survival logits", found, kept.get("survival", torch.zeros(1)), TOLERANCE))
    checks += _chains("greedy chains", blocks.chain, kept)
    return checks


def _chains(name: str, chain: Tensor, kept: Mapping[str, Tensor]) -> list[Check]:
    """Greedy chains token for token, and what follows from them: the acceptance of every slot on the target's own text."""
    wanted, gaps, text = kept["chain"], kept["gaps"], kept["text"]
    if chain.shape != wanted.shape:
        return [Check(name, False, f"{chain.shape[1]} tokens a block", wanted.shape[1])]
    # Behind a difference at a tie the rest of the block is another chain; it is judged by nothing.
    before = ((chain == wanted).long().cumprod(1)).sum(1)
    tied = [k < chain.shape[1] and float(gaps[i, k]) <= TIE for i, k in enumerate(before.tolist())]
    wrong = sum(k < chain.shape[1] and not tie for k, tie in zip(before.tolist(), tied, strict=True))
    rows = torch.tensor([not tie for tie in tied])
    ours, theirs = per_slot(chain[rows], text[rows]), per_slot(wanted[rows], text[rows])
    return [
        Check(name, wrong == 0, f"{wrong} of {len(chain)} blocks differ, {sum(tied)} at a tie", "0 differ"),
        Check(f"acceptance per slot, {name}", ours == theirs, [round(v, 4) for v in ours], [round(v, 4) for v in theirs]),
    ]


def _heads(reference: Reference, embedding: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """The embedding and LM head [V, H] that the file was judged with, float32: its own rows where it brings them."""
    if "lm_head.weight" in reference.stored:
        ids = slice(None) if reference.draft_ids is None else reference.draft_ids
        lm_head = lm_head.float().index_put((torch.arange(len(lm_head))[ids],), reference.w["lm_head.weight"])
    return reference.w.get("embed_tokens.weight", embedding).float(), lm_head.float()


@torch.inference_mode()
def _runtime(
    folder: Path, made: Record, kept: Mapping[str, Tensor], rows: list[Tensor], states: list[dict[int, Tensor]],
    where: list[Spot], embedding: Tensor, lm_head: Tensor,
) -> list[Check]:  # fmt: skip
    """The folder as the runtime serves it, in float32."""
    try:
        drafter, heads = importers.load_any(folder, embedding=embedding, lm_head=lm_head, num_target_layers=made["layers"])
    except ValueError as error:
        return [Check("the runtime loads it", False, str(error))]
    longest = max(anchor for _, anchor in where)
    proposer = DSparkProposer(
        drafter, heads, slots=len(where), max_context=longest + 1, with_survival=True, whole_block=True
    )  # fmt: skip
    for slot, (row, anchor) in enumerate(where):
        taps = torch.cat([states[row][layer][:anchor] for layer in drafter.tap_layers], dim=-1)
        proposer.begin(slot, rows[row][:anchor].tolist(), taps)
    sampling = SamplingBatch.build([SamplingParams(temperature=0.0)] * len(where), [anchor for _, anchor in where])
    anchors = torch.stack([rows[row][anchor] for row, anchor in where])
    proposal = proposer.propose(list(range(len(where))), anchors, sampling, drafter.num_predictions)
    checks = _chains("greedy chains in the runtime", proposal.tokens, kept)
    if "survival" in kept and proposal.survival_logits is not None:
        # of slot 0 alone: behind it the runtime follows its own chain, the fixture the text
        checks.append(_close("survival logits in the runtime", proposal.survival_logits[:, 0], kept["survival"][:, 0], NATIVE))
    return checks


def _close(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> Check:
    limit = tolerance * max(1.0, float(wanted.abs().max()))
    if found.shape != wanted.shape:
        return Check(name, False, f"shape {list(found.shape)}", f"shape {list(wanted.shape)}")
    worst = float((found - wanted).abs().max())
    return Check(name, worst <= limit, worst, limit)  # NaN is not within any limit


def _frame_causes(reference: Reference, made: Record) -> list[str]:
    """Where the file states another frame than the drafter was trained in."""
    frame, trained = reference.frame, made["frame"]
    said = {
        "target_layer_ids": list(frame.taps), "mask_token_id": frame.mask_token_id, "block_size": frame.slots,
        "sample_from_anchor": frame.anchor_first, "markov_rank": frame.rank,
        "markov_head_type": frame.head if frame.rank else trained["markov_head_type"],
    }  # fmt: skip
    causes = [f"{key}: the file says {said[key]}, trained with {value}" for key, value in trained.items() if said[key] != value]
    shifted = [layer + 1 for layer in trained["target_layer_ids"]]
    if list(frame.taps) == shifted:
        causes = [cause + " (each one higher)" if cause.startswith("target_layer_ids") else cause for cause in causes]
    return causes


def _tensor_causes(stored: Mapping[str, Tensor], hashes: Mapping[str, str]) -> list[str]:
    """Which tensors are not those of training, and whose values they hold instead."""
    found = {name: digest(value) for name, value in stored.items()}
    causes = []
    for name, wanted in hashes.items():
        if name not in found:
            if name not in FROZEN:
                causes.append(f"{name} is missing")
        elif found[name] != wanted:
            other = next((whose for whose, value in hashes.items() if value == found[name]), None)
            causes.append(f"{name} holds {f'the values of {other}' if other else 'other values than the trained one'}")
    return causes + [f"{name} is unknown" for name in found if name not in hashes]


def self_test(folder: Path, fixture: Path) -> Record:
    """Every fault of eval/perturb.py on a copy of the folder: {fault: {caught, failed, causes}} for those that apply."""
    found: Record = {}
    for fault, (_, words) in FAULTS.items():
        broken = fixture / "broken"
        if not perturb(folder, broken, fault):
            continue
        outcome = examine(broken, fixture)
        named = any(words in cause for cause in outcome.causes)
        failed = [check.name for check in outcome.checks if not check.passed]
        found[fault] = {"caught": not outcome.passed and named, "failed": failed, "causes": outcome.causes}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the fresh process; 0 when the folder passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "fixture", "result"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--self-test", action="store_true")
    asked = parser.parse_args(arguments)
    outcome = examine(asked.folder, asked.fixture)
    found = outcome.to_json()
    if asked.self_test:
        found["self_test"] = self_test(asked.folder, asked.fixture)
    asked.result.write_text(json.dumps(found), encoding="utf-8")
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
