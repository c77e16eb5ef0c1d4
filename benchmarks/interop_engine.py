"""Our runtime against a real vLLM on the same prompts: the second part of `make interop`, called by benchmarks/interop.py.

Both decode the same prompts greedily in float32, with the same exported drafter and full blocks, and end tokens ignored.
Tokens must be equal, and acceptance per slot must lie within the interval that our runtime's own prompts give (bootstrap over
prompts).
vLLM's part runs in its own environment (benchmarks/interop_vllm.py) with interpreted Triton, for correctness only.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.eval.config import EvalConfig
from draftsmith.eval.prompts import load_eval_prompts
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import engines, native, speculators
from draftsmith.models.target import Target
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request

READER = Path(__file__).with_name("interop_vllm.py")
LONGEST = 160  # tokens of a prompt: the interpreter is slow
RESAMPLES = 4000
Record = dict[str, Any]


@dataclass
class Ours:
    """What our runtime did: token ids by prompt, and by prompt the drafts accepted in each cycle."""

    tokens: list[list[int]]
    cycles: list[list[int]]
    slots: int

    def counts(self) -> np.ndarray:
        """[prompts, 1 + slots]: cycles, and of those how many accepted slot k."""
        return np.array(
            [[len(row), *(sum(accepted > k for accepted in row) for k in range(self.slots))] for row in self.cycles]
        )  # fmt: skip

    def acceptance(self) -> np.ndarray:
        """[slots]: share of the cycles that accepted slot k (with all before it)."""
        total = self.counts().sum(0)
        return total[1:] / total[0]

    def interval(self, level: float = 0.95) -> np.ndarray:
        """[2, slots]: bootstrap interval of `acceptance` over prompts."""
        counts = self.counts()
        index = np.random.default_rng(0).integers(0, len(counts), (RESAMPLES, len(counts)))
        drawn = counts[index].sum(1)
        edge = (1.0 - level) / 2.0
        return np.quantile(drawn[:, 1:] / drawn[:, :1], [edge, 1.0 - edge], axis=0)


def widen(drafter: DSpark, heads: FrozenHeads) -> tuple[DSpark, FrozenHeads]:
    """A drafter of a reduced vocabulary as one of the full: the correction head adds nothing to tokens it was not trained on.

    It is no better for it (those tokens were never among its choices), but it needs no training of its own.
    """
    if heads.draft_ids is None:
        return drafter, heads
    config = {key: value for key, value in drafter.config.items() if key != "draft_vocab_size"}
    made, state = DSpark(config), drafter.state_dict()
    rows = state["markov_head.markov_w2.weight"]
    state["markov_head.markov_w2.weight"] = rows.new_zeros(config["vocab_size"], rows.shape[1]).index_copy(
        0, heads.draft_ids, rows
    )
    made.load_state_dict(state)
    return made.eval(), FrozenHeads.build(heads.embedding, heads.lm_head, None)


def prompts_of(target: Target, count: int) -> list[list[int]]:
    """Held-out prompts of all domains in turn, short ones."""
    sets = load_eval_prompts(EvalConfig(), target.tokenizer, max_prompt=LONGEST)
    mixed = [prompt.prompt_ids for group in zip(*sets.values(), strict=False) for prompt in group]
    if len(mixed) < count:
        raise ValueError(f"--prompts: got {count}, allowed: at most {len(mixed)}")
    return mixed[:count]


@torch.inference_mode()
def run_ours(target: Target, folder: Path, prompts: list[list[int]], tokens: int) -> Ours:
    """The runtime on the exported folder. Answers go on behind `tokens`, so that the cycles before it draft in full."""
    drafter, heads = native.load(folder, embedding=target.embedding_weight, lm_head=target.lm_head_weight)
    block = drafter.num_predictions
    longest = max(map(len, prompts)) + tokens + 3 * (block + 1)
    decoder = Decoder.from_target(target.model, dtype=torch.float32, tap_layers=drafter.tap_layers)
    proposer = DSparkProposer(drafter, heads, slots=1, max_context=longest)
    engine = Engine(decoder, proposer=proposer, slots=1, max_context=longest)
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens + 2 * (block + 1), ignore_eos=True)
    found = engine.run([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
    cycles = []
    for completion in found:
        done, kept = 1, []  # the first token comes out of the prompt's own pass
        for record in completion.cycles:
            if done >= tokens:
                break
            assert record.proposed == block, "a draft was cut short"
            kept.append(record.accepted)
            done += record.committed
        cycles.append(kept)
    return Ours([completion.token_ids[:tokens] for completion in found], cycles, block)


def environment(python: Path) -> dict[str, str]:
    """Variables under which vLLM's CPU build runs Model Runner V2 with the stand-in Triton backend."""
    root = python.absolute().parent.parent
    shim, openmp = root / "shim", next(root.rglob("libiomp5.so"), None)
    found = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": str(shim),
        "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
    }  # fmt: skip
    found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    if openmp is not None:
        found["LD_PRELOAD"] = str(openmp)
    return found


def run_vllm(python: Path, job: Record, place: Path, *, timeout: float = 3600.0) -> Record:
    """One run of interop_vllm.py. RuntimeError with the last lines where it fails."""
    asked, result = place / "job.json", place / "result.json"
    asked.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
    began = time.perf_counter()
    env = environment(python)
    if job["drafter"] is None:  # plain decoding needs neither: it is the engine as it ships
        for name in ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "PYTHONPATH"):
            env.pop(name, None)
    done = subprocess.run(
        [python, READER, asked], capture_output=True, text=True, check=False, timeout=timeout, env=env
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{READER.name}: {done.stderr.strip()[-2000:]}")
    found: Record = json.loads(result.read_text(encoding="utf-8"))
    return found | {"wall_seconds": time.perf_counter() - began}


def export(folder: Path, target: Target, drafter: DSpark, heads: FrozenHeads, layout: str) -> None:
    """Write the drafter for vLLM in float32, and check vLLM's rules on what was written."""
    folder.mkdir(parents=True)
    if layout == "native":
        native.write(folder, drafter, heads, dtype=torch.float32)
    else:
        speculators.write(
            folder, drafter, heads, verifier=str(Path(target.folder).resolve()),
            verifier_architectures=target.config.architectures or [], dtype=torch.float32,
        )  # fmt: skip
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = frozenset(file.keys())
    config = native.file_config(drafter, torch.float32)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engines.check("vllm", engines.Subject(config, written, names, layout, drafter.num_predictions))


def judge(ours: Ours, theirs: Record) -> Record:
    """Tokens and acceptance side by side. ok: all tokens equal, every slot inside our interval, tau too."""
    counted = theirs["counters"]
    drafts = counted["num_drafts"]
    accepted = np.array(counted["num_accepted_tokens_per_pos"]) / drafts
    own, (low, high) = ours.acceptance(), ours.interval()
    equal = [a == b for a, b in zip(ours.tokens, theirs["tokens"], strict=True)]
    mine = ours.counts().sum(0)
    return {
        "prompts": len(equal), "equal": sum(equal), "tokens": sum(map(len, ours.tokens)),
        "drafts": {"ours": int(mine[0]), "vllm": int(drafts)},
        "accepted_per_slot": {"ours": mine[1:].tolist(), "vllm": [int(n) for n in counted["num_accepted_tokens_per_pos"]]},
        "acceptance": {"ours": own.tolist(), "low": low.tolist(), "high": high.tolist(), "vllm": accepted.tolist()},
        "tau": {"ours": 1.0 + float(own.sum()), "vllm": 1.0 + counted["num_accepted_tokens"] / drafts},
        "inside": bool(np.all((accepted >= low - 1e-9) & (accepted <= high + 1e-9))),
        "ok": all(equal) and bool(np.all((accepted >= low - 1e-9) & (accepted <= high + 1e-9))),
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One served drafter. prompts, tokens: how much of the whole set; the interpreter is slow, so only one case takes all."""

    title: str
    drafter: DSpark
    heads: FrozenHeads
    layout: str
    prompts: int
    tokens: int


def cases_of(drafter: DSpark, heads: FrozenHeads, prompts: int, tokens: int) -> list[Case]:
    """The full vocabulary in both layouts, and the drafter as it is where its vocabulary is reduced."""
    full = widen(drafter, heads)
    few, short = min(4, prompts), min(16, tokens)
    found = [
        Case("full vocabulary, native", *full, "native", prompts, tokens),
        Case("full vocabulary, speculators", *full, "speculators", few, short),
    ]
    if heads.draft_ids is not None:
        title = f"{len(heads.draft_ids):,} of {drafter.config['vocab_size']:,} tokens, native"
        found.append(Case(title, drafter, heads, "native", few, short))
    return found


def serve_cases(
    python: Path, place: Path, target: Target, drafter: DSpark, heads: FrozenHeads, *, prompts: int, tokens: int
) -> tuple[bool, list[Record]]:
    """Every case in vLLM and here; prints as it goes. (all ok, records)."""
    asked = prompts_of(target, prompts)
    room = LONGEST + tokens + 2 * (drafter.num_predictions + 1)
    common: Record = {"target": str(Path(target.folder).resolve()), "max_model_len": room, "slots": drafter.num_predictions}
    plain = run_vllm(python, {**common, "drafter": None, "prompts": asked, "tokens": tokens}, place)
    print(
        f"\nvllm-cpu {plain['vllm']}, float32, greedy; with a drafter: method dspark, interpreted Triton, for correctness only"
    )
    print(f"plain: {len(asked)} prompts of {tokens} tokens in {plain['seconds']:.1f} s", flush=True)
    records: list[Record] = []
    for i, case in enumerate(cases_of(drafter, heads, prompts, tokens)):
        folder = place / f"served-{i}"
        export(folder, target, case.drafter, case.heads, case.layout)
        own = folder
        if case.layout != "native":  # the runtime reads the native layout; the weights are the same
            own = place / f"served-{i}-native"
            export(own, target, case.drafter, case.heads, "native")
        ours = run_ours(target, own, asked[: case.prompts], case.tokens)
        job = {**common, "drafter": str(folder), "prompts": asked[: case.prompts], "tokens": case.tokens}
        theirs = run_vllm(python, job, place)
        verdict = judge(ours, theirs)
        same = [ids == whole[: case.tokens] for ids, whole in zip(theirs["tokens"], plain["tokens"], strict=False)]
        verdict |= {"case": case.title, "equal_to_plain": sum(same), "vllm_seconds": theirs["seconds"], "vllm": theirs["vllm"]}
        verdict["ok"] = verdict["ok"] and all(same)
        records.append(verdict)
        print_case(verdict)
    return all(record["ok"] for record in records), records


def print_case(found: Record) -> None:
    """One case: the verdict, then acceptance by slot, ours with its interval over vLLM's."""
    print(
        f"\n{found['case']}: {found['equal']} of {found['prompts']} prompts equal to our runtime's tokens, "
        f"{found['equal_to_plain']} to plain vLLM's; tau {found['tau']['ours']:.3f} here, {found['tau']['vllm']:.3f} in vLLM; "
        f"{found['vllm_seconds']:.0f} s"
    )
    share = found["acceptance"]
    print(f"  {'slot':10}" + "".join(f"{k + 1:>8}" for k in range(len(share["ours"]))) + f"{'cycles':>10}")
    for name, label in (("ours", "runtime"), ("low", "  from"), ("high", "  to"), ("vllm", "vLLM")):
        cycles = f"{found['drafts'][name]:>10}" if name in found["drafts"] else ""
        print(f"  {label:10}" + "".join(f"{value:>8.3f}" for value in share[name]) + cycles)
    print(f"  {'accepted':10}{found['accepted_per_slot']['ours']} here, {found['accepted_per_slot']['vllm']} in vLLM")
    print(f"  {'as it should be' if found['ok'] else 'DIFFERENT'}", flush=True)
