"""The runs of objectives_on_target.py: data made once, one training run, and what is measured on its drafter.

Everything that decides a run goes through draftsmith's own loop, feature cache and engine. Written here apart from losses/ is
only `replay_row`, the acceptance of a drafter along a given text, so that it also checks the metrics of the trainer.
Shapes: T text length, A anchors, G block slots, Vd draft vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _objectives_stats import expected_cycles, paired_means, product_of_means
from accelerate import Accelerator

from draftsmith.data.batch import TrainBatch, anchor_positions, collate
from draftsmith.data.chat import ChatFormat, TokenRow, tokenise_all
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.features import rows_hash
from draftsmith.data.manifest import read, target_identity, write_atomic
from draftsmith.data.regenerate import read_answers
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.prompts import EvalPrompt, load_eval_prompts
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.losses.phases import Phases
from draftsmith.losses.reduce import denominators
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.init import init_from_target
from draftsmith.models.target import load_target
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Completion, Engine, Request
from draftsmith.train import loop, stage
from draftsmith.train.config import TrainConfig
from draftsmith.train.feature_cache import make_source
from draftsmith.train.features import Features, FeatureSource, OnlineFeatures
from draftsmith.train.metrics import Clock
from draftsmith.train.optim import build_optimizer
from draftsmith.train.prompts import heldout_prompts
from draftsmith.train.rollouts import served_copy
from draftsmith.train.step import Setup, StepContext

CPU = torch.device("cpu")
Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large the whole benchmark is. rows: answers asked for, validation included; prompts: held-out ones, over all domains;
    texts: of them, those that the target answers once for the replay; tokens: longest held-out answer."""

    rows: int = 1400
    answer: int = 96
    max_length: int = 256
    validation: float = 0.06
    steps: int = 400
    batch: int = 4
    anchor_share: float = 0.25
    lr: float = 2e-3
    block: int = 7
    layers: int = 2
    rank: int = 64
    vocab: int = 8192
    prompts: int = 96
    texts: int = 96
    tokens: int = 64
    slots: int = 32
    rounds: int = 16
    on_policy_every: int = 25
    on_policy_prompts: int = 48
    on_policy_tokens: int = 64


QUICK = Sizes(
    rows=48, answer=32, max_length=160, validation=0.2, steps=6, batch=2, layers=1, rank=16, vocab=2048, block=4, prompts=8,
    texts=8, tokens=16, slots=8, rounds=3, on_policy_every=2, on_policy_prompts=4, on_policy_tokens=16,
)  # fmt: skip


class TopLabels:
    """A feature source under which the text token of every slot is replaced by the target's arg-max.

    speculators' `ce` is the cross-entropy of that token; losses/ has no such term, and `ce` reads nothing else of the label.
    Metrics that use the label (tau_expected) mean nothing under it. Slots whose arg-max the draft vocabulary lacks count 0.
    """

    def __init__(self, source: FeatureSource) -> None:
        self.source = source
        self.background = bool(getattr(source, "background", False))

    def features(self, batch: TrainBatch, rows: Sequence[TokenRow]) -> Features:
        """As the source's; sets the labels of the batch in place."""
        found = self.source.features(batch, rows)
        assert found.top is not None, "needs a reduced draft vocabulary with cached features"
        slots = torch.arange(batch.labels.shape[-1], device=batch.labels.device)
        where = (batch.anchors[..., None] + slots).clamp_max(batch.input_ids.shape[1] - 1)
        batch.labels.copy_(found.top.gather(1, where.flatten(1)).view_as(where))
        return found


class Lab:
    """The target, the data and the held-out texts, loaded or made once under `folder`; then runs.

    data: folder of a recipe's run whose sampled answers are used in place of new ones. Raises ValueError for answers of another
    target.
    """

    def __init__(self, folder: Path, sizes: Sizes, target: str, data: Path | None, say: Callable[[str], None]) -> None:
        self.folder, self.sizes, self.say = folder, sizes, say
        self.target_cfg = TargetConfig(name=target, dtype="bfloat16")
        folder.mkdir(parents=True, exist_ok=True)
        self.target = load_target(self.target_cfg, "cpu")
        rows = self._rows(data)
        parts = self.parts(ObjectiveConfig(), sizes.steps, 0)
        self.rows_hash = rows_hash(rows)
        self.setup = stage.build_setup(parts, self.target, rows, folder, say=say)
        self.validation = [row for row in self.setup.validation if one_answer(row)]
        if not self.validation:
            raise ValueError(f"rows: {len(rows)} leave none to choose the winner on")
        taps = self.setup.drafter.tap_layers
        self.decoder = Decoder.from_target(self.target.model, dtype=torch.bfloat16, tap_layers=taps)
        self.prompts = self._prompts()
        self.texts = self._texts()
        self.text_source = make_source(parts, self.target, taps, self.texts, self.texts, folder / "heldout", say)
        say(
            f"{len(self.setup.rows)} rows to train on, {len(self.validation)} to choose on, {len(self.prompts)} held-out "
            f"prompts, {len(self.texts)} held-out texts"
        )

    # ---- data -------------------------------------------------------------------------------------------------------

    def parts(self, objective: ObjectiveConfig, steps: int, seed: int) -> stage.Parts:
        """The sections of the recipe that a run amounts to."""
        s = self.sizes
        generation = GenerationConfig(temperature=1.0, max_new_tokens=s.answer, batch_size=s.slots)
        return stage.Parts(
            target=self.target_cfg,
            data=DataConfig(limit=s.rows, max_length=s.max_length, features="cached", generation=generation),
            drafter=DSparkConfig(num_layers=s.layers, block_size=s.block, rank=s.rank, draft_vocab_size=s.vocab, init="target"),
            objective=objective,
            train=TrainConfig(
                steps=steps, rows=s.batch, lr=s.lr, anchor_share=s.anchor_share, precision="bf16", log_every=25, eval_every=0,
                validation_share=s.validation, checkpoint_every=1_000_000, keep_last=1, on_policy_every=s.on_policy_every,
                on_policy_prompts=s.on_policy_prompts, on_policy_tokens=s.on_policy_tokens,
            ),
            seed=seed,
        )  # fmt: skip

    def _rows(self, data: Path | None) -> list[TokenRow]:
        """Training and validation rows, every one drawn at temperature 1 without truncation."""
        if data is None:
            parts = self.parts(ObjectiveConfig(), self.sizes.steps, 0)
            heldout = heldout_prompts("builtin")
            return list(stage.prepare_rows(parts, self.target, self.folder, heldout=heldout, say=self.say).rows)
        made, mine = read(data / "answers"), target_identity(self.target, name=self.target_cfg.name, revision=None)
        if made["target"] != mine:
            raise ValueError(f"--data: {data}: answers of another target ({made['target']} in place of {mine})")
        chat, rows = ChatFormat(self.target.tokenizer, eos_ids=self.target.eos_token_ids), []
        for row in sorted(read_answers(data / "answers" / "answers.jsonl"), key=lambda row: row["index"]):
            if row["temperature"] == 1.0 and len(rows) < self.sizes.rows:
                rows.append({**row, "answer_ids": row["answer_ids"][: self.sizes.answer]})
        return tokenise_all(rows, chat, self.sizes.max_length, say=self.say).rows

    def _prompts(self) -> list[EvalPrompt]:
        s = self.sizes
        found = load_eval_prompts(EvalConfig(), self.target.tokenizer, max_prompt=s.max_length - s.tokens)
        return [prompt for group in zip(*found.values(), strict=False) for prompt in group][: s.prompts]

    def _texts(self) -> list[TokenRow]:
        """Answers of the target to held-out prompts at temperature 1, drawn once; kept as a file."""
        path, wanted = self.folder / "heldout.json", [prompt.id for prompt in self.prompts[: self.sizes.texts]]
        stored = json.loads(path.read_text()) if path.is_file() else {}
        if stored.get("prompts") != wanted or stored.get("tokens") != self.sizes.tokens:
            completions = self._serve(None, 1.0, seed=97, count=len(wanted))
            stored = {"prompts": wanted, "tokens": self.sizes.tokens, "answers": [c.token_ids for c in completions]}
            write_atomic(path, json.dumps(stored))
        rows = []
        for prompt, answer in zip(self.prompts, stored["answers"], strict=False):
            mask = [False] * len(prompt.prompt_ids) + [True] * len(answer)
            rows.append(TokenRow(prompt.id, prompt.domain, prompt.prompt_ids + answer, mask, 1.0))
        return rows

    def _serve(self, drafter: DSpark | None, temperature: float, *, seed: int, count: int | None = None) -> list[Completion]:
        """Answers to the held-out prompts; token-wise verification, whole blocks."""
        s, prompts = self.sizes, self.prompts[:count]
        room = max(len(prompt.prompt_ids) for prompt in prompts) + s.tokens + 1
        proposer = None
        if drafter is not None:
            served = served_copy(drafter.config, drafter.state_dict(), CPU, torch.bfloat16)
            proposer = DSparkProposer(served, self.setup.heads, slots=s.slots, max_context=room)
        engine = Engine(
            self.decoder, proposer=proposer, slots=s.slots, max_context=room, rule="token", eos_ids=self.target.eos_token_ids
        )  # fmt: skip
        sampling = SamplingParams(temperature=temperature, max_new_tokens=s.tokens)
        requests = [
            Request(p.id, p.prompt_ids, dataclasses.replace(sampling, seed=100_003 * seed + i)) for i, p in enumerate(prompts)
        ]
        found = engine.run(requests)
        if engine.stats.proposer_failures:
            raise RuntimeError(f"the drafter failed {engine.stats.proposer_failures} times in the runtime")
        return found

    # ---- training ---------------------------------------------------------------------------------------------------

    def fresh(self, seed: int, *, top_labels: bool = False) -> Setup:
        """The setup with a drafter in its initial state; the same for every objective of a seed."""
        torch.manual_seed(seed)
        drafter = DSpark(self.setup.drafter.config)
        init_from_target(drafter, self.target.layers, self.target.final_norm, self.target.embedding_weight)
        source = TopLabels(self.setup.source) if top_labels else self.setup.source
        return dataclasses.replace(self.setup, drafter=drafter, source=source, validation=[])

    def costs(self, objectives: dict[str, tuple[ObjectiveConfig, bool]]) -> dict[str, list[float]]:
        """Seconds of a training step of every objective (config, top_labels), in turn on one middling batch, by round.

        On a CPU these are processor seconds of one thread, which hardly depend on what else the machine does.
        """
        threads, spent = torch.get_num_threads(), {name: [] for name in objectives}
        torch.set_num_threads(1)
        try:
            parts = self.parts(ObjectiveConfig(), self.sizes.steps, 0)
            heads = self.setup.heads.to(torch.bfloat16)
            steppers = {}
            for name, (objective, top) in objectives.items():
                setup = self.fresh(0, top_labels=top)
                drafter = setup.drafter.float().train()
                optimizer = build_optimizer(drafter, parts.train)
                steppers[name] = (drafter, optimizer, StepContext(parts.train, objective, setup, heads, CPU))
            order = sorted(self.setup.rows, key=lambda row: row.num_supervised)
            rows = order[len(order) // 2 :][: self.sizes.batch]
            for number in range(self.sizes.rounds + 2):
                names = list(objectives)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    seconds = one_step(*steppers[name], rows, self.sizes)
                    if number >= 2:  # the first ones allocate
                        spent[name].append(seconds)
        finally:
            torch.set_num_threads(threads)
        return spent

    def train(self, objective: ObjectiveConfig, steps: int, seed: int, folder: Path, *, top_labels: bool) -> Setup:
        """One run of the loop under `folder` (it goes on where it was interrupted); the setup holds the trained drafter."""
        setup, parts = self.fresh(seed, top_labels=top_labels), self.parts(objective, steps, seed)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
            loop.run(
                cfg=parts.train, objective_cfg=objective, setup=setup, accelerator=Accelerator(cpu=True), output=folder,
                seed=seed, run_config=parts.plain(), provenance={},
            )  # fmt: skip
        setup.drafter.eval()
        return setup

    def run(
        self, objective: ObjectiveConfig, steps: int, seed: int, folder: Path, *, top_labels: bool, check: bool, choose: bool
    ) -> Record:
        """Train and measure: a run's result. check: compare at real cycle starts; choose: measure on validation texts."""
        began, processor = time.perf_counter(), time.process_time()
        setup = self.train(objective, steps, seed, folder, top_labels=top_labels)
        trained = time.perf_counter()
        result: Record = {"steps": steps, "seed": seed, "training": read_log(folder / "train.jsonl")}
        drafter, heads = setup.drafter, self.setup.heads.to(torch.bfloat16)
        for temperature in (1.0, 0.0):
            completions = self._serve(drafter, temperature, seed=seed)
            result[f"rollouts_t{temperature:g}"] = {
                "committed": [sum(c.committed for c in done.cycles) for done in completions],
                "cycles": [len(done.cycles) for done in completions],
            }
            if temperature == 1.0 and check:
                result["at_cycle_starts"] = self.at_cycle_starts(drafter, heads, completions)
        result["replay_heldout"] = replay(drafter, heads, self.text_source, self.texts)
        if choose:
            result["replay_validation"] = replay(drafter, heads, self.setup.source, self.validation)
        result["seconds"] = {"train": trained - began, "measure": time.perf_counter() - trained}
        result["seconds"]["processor"] = time.process_time() - processor
        shutil.rmtree(folder, ignore_errors=True)
        return result

    # ---- the estimator where cycles began ---------------------------------------------------------------------------

    def at_cycle_starts(self, drafter: DSpark, heads: FrozenHeads, completions: Sequence[Completion]) -> Record:
        """tau of real cycles against the trainer's tau_expected on blocks that start exactly where these cycles began.

        Only cycles that drafted a whole block; a cycle counts 1 + its accepted drafts up to the end of the text, as the
        estimator does. Differences have intervals over prompts.
        """
        rows, starts, real = [], [], []
        for prompt, done in zip(self.prompts, completions, strict=True):
            place, end, mine, total = len(prompt.prompt_ids), len(prompt.prompt_ids) + len(done.token_ids) - 1, [], 0
            for cycle in done.cycles:
                if cycle.proposed == drafter.block_size and place < end:
                    mine.append(place)
                    total += 1 + min(cycle.accepted, end - place)
                place += cycle.committed
            if mine:
                mask = [False] * len(prompt.prompt_ids) + [True] * len(done.token_ids)
                rows.append(TokenRow(prompt.id, prompt.domain, prompt.prompt_ids + done.token_ids, mask, 1.0))
                starts.append(torch.tensor(mine))
                real.append(total)
        online = OnlineFeatures(self.target, drafter.tap_layers)
        setup = dataclasses.replace(self.setup, drafter=drafter, source=online)
        context = StepContext(self.parts(ObjectiveConfig(), 1, 0).train, ObjectiveConfig(), setup, heads, CPU)
        sums = []
        with torch.no_grad():
            for row, own in zip(rows, starts, strict=True):
                batch = collate([row], None, drafter.block_size, anchors=[own])
                found = context.loss(drafter, batch, [row], None, Clock())[1]
                sums.append({name: (found.sums[name].numpy(), found.counts[name].numpy()) for name in METRICS})
        return compare(np.array(real, dtype=float), sums)


METRICS = ("tau_expected", "tau_product", "alpha")


def compare(real: np.ndarray, sums: Sequence[dict[str, tuple[np.ndarray, np.ndarray]]]) -> Record:
    """tau of real cycles beside the estimators on the same blocks. real float [P]; sums: (sum, count) of METRICS a prompt."""
    cycles = np.array([float(item["tau_expected"][1]) for item in sums])
    own = {name: np.array([float(item[name][0]) for item in sums]) for name in ("tau_expected", "tau_product")}
    alpha = sum(item["alpha"][0] for item in sums) / np.maximum(sum(item["alpha"][1] for item in sums), 1.0)
    result: Record = {"cycles": float(cycles.sum()), "tau_rollouts": float(real.sum() / cycles.sum())}
    for name, values in own.items():
        result[name] = float(values.sum() / cycles.sum())
        result[f"rollouts_minus_{name}"] = paired_means(np.stack([real, values, cycles], axis=1))
    result["product_minus_expected"] = paired_means(np.stack([own["tau_product"], own["tau_expected"], cycles], axis=1))
    result["product_of_means"] = product_of_means(alpha)
    return result


# ---- steps ------------------------------------------------------------------------------------------------------------


def one_step(
    drafter: DSpark, optimizer: torch.optim.Optimizer, context: StepContext, rows: Sequence[TokenRow], sizes: Sizes
) -> float:
    """Processor seconds of one optimiser step on `rows`."""
    generator = torch.Generator().manual_seed(len(rows))
    batch = collate(list(rows), None, sizes.block, generator, anchor_share=sizes.anchor_share)
    began = time.process_time()
    loss, _ = context.loss(drafter, batch, rows, denominators(context.objective_cfg, batch.valid.flatten(0, 1)), Clock())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.process_time() - began


def one_answer(row: TokenRow) -> bool:
    """Whether the supervised tokens of a row are one run."""
    mask = row.loss_mask
    return sum(own and not before for before, own in zip([False, *mask], mask, strict=False)) == 1


def plain_objectives(objective: ObjectiveConfig, steps: int) -> list[tuple[float, ObjectiveConfig]]:
    """(share of the steps, objective) of the phases that are trained on the data."""
    return [((p.end - p.first) / steps, p.objective) for p in Phases(objective, steps).phases if not p.on_policy]


def read_log(path: Path) -> Record:
    """Seconds by part of a run and the metrics of its last log line."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    parts: dict[str, float] = {}
    steps: list[tuple[int, float]] = []
    before = 0
    for line in lines:
        perf = {k: v for k, v in line.items() if k.startswith("perf/") and k.endswith("_s") and k != "perf/tokens_per_s"}
        count = line["step"] - before
        for key, value in perf.items():
            parts[key] = parts.get(key, 0.0) + value * count
        steps.append((count, sum(perf.values())))
        before = line["step"]
    last = {k: v for k, v in lines[-1].items() if k.startswith(("loss/", "accept/", "survival/", "on_policy/"))}
    return {"parts": parts, "seconds_per_step": steps, "last": last}


# ---- replay -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def replay_row(drafter: DSpark, heads: FrozenHeads, source: FeatureSource, row: TokenRow, dtype: torch.dtype) -> Record:
    """Acceptance of a drafter along one text, blocks at every position of the answer (one answer a row).

    committed, cycles: tokens after the first and `expected_cycles` to serve them; starts: blocks; tau_expected and tau_product:
    sums over the blocks of 1 + sum_k W_{k-1} alpha_k and of 1 + sum_k prod alpha; alpha, valid [G]: sums by slot.
    """
    anchors, slots = anchor_positions(row.loss_mask), drafter.block_size
    if not len(anchors):
        return {"committed": 0, "cycles": 0.0, "starts": 0, "tau_expected": 0.0, "tau_product": 0.0,
                "alpha": np.zeros(slots), "valid": np.zeros(slots)}  # fmt: skip
    batch = collate([row], None, slots, anchors=[anchors])
    features = source.features(batch, [row])
    last = len(row.input_ids) - 1
    where = (anchors[:, None] + torch.arange(slots)).clamp_max(last)  # [A, G], position of a slot's predecessor
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = drafter(
            taps=features.taps.to(dtype), anchors=anchors[None], previous_tokens=batch.input_ids[0][where][None],
            embedding=heads.embedding,
        )  # fmt: skip
    assert out.correction is not None and out.w2 is not None and features.lse is not None and heads.draft_ids is not None
    head = heads.draft_head.to(dtype)
    q = torch.log_softmax(
        (out.hidden[0].to(dtype) @ head.T).float() + (out.correction[0].to(dtype) @ out.w2.to(dtype).T).float(), -1
    )
    p = (features.last_hidden[0].to(dtype) @ head.T).float() - features.lse[0][:, None]
    p, valid, labels = p[where], batch.valid[0], batch.labels[0]
    alpha = torch.minimum(p, q).exp().sum(-1) * valid
    column = torch.searchsorted(heads.draft_ids, labels).clamp_max(len(heads.draft_ids) - 1)
    known = (heads.draft_ids[column] == labels) & valid
    ratio = (q.gather(-1, column[..., None]) - p.gather(-1, column[..., None])).squeeze(-1)
    reach = (ratio.clamp(max=0.0).exp() * known).cumprod(-1)  # W_k
    before = torch.cat([torch.ones(len(anchors), 1), reach[:, :-1]], dim=-1)
    return {
        "committed": len(anchors), "cycles": expected_cycles(reach.double().numpy()), "starts": len(anchors),
        "tau_expected": float((1.0 + (before * alpha).sum(-1)).sum()),
        "tau_product": float((1.0 + alpha.cumprod(-1).sum(-1)).sum()),
        "alpha": alpha.sum(0).numpy(), "valid": valid.sum(0).numpy(),
    }  # fmt: skip


def replay(drafter: DSpark, heads: FrozenHeads, source: FeatureSource, rows: Sequence[TokenRow]) -> Record:
    """`replay_row` over texts: lists by text, and the acceptance by slot."""
    drafter.eval()
    found = [replay_row(drafter, heads, source, row, torch.bfloat16) for row in rows]
    names = ("committed", "cycles", "starts", "tau_expected", "tau_product")
    alpha = sum(item["alpha"] for item in found) / np.maximum(sum(item["valid"] for item in found), 1)
    return {**{name: [item[name] for item in found] for name in names}, "alpha": alpha.tolist()}
