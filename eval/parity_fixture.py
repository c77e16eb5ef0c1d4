"""The parity gate's fixture: what the trained drafter computes on fixed texts of the real target, written for another process.

Shapes: N blocks, P predictions a block, Vd draft vocabulary, H hidden size, n taps, T text length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data.chat import ChatFormat
from ..models.draft import FrozenHeads
from ..models.dspark import DSpark
from ..models.export import native
from ..models.target import Target
from ..runtime.config import SamplingParams
from ..runtime.decoder import Decoder
from ..runtime.engine import Engine, Request
from .reference import Blocks

PROMPTS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
    "Rewrite this sentence politely: send me the report now.",
    "List three differences between a virus and a bacterium.",
)
BLOCKS = 64
FULL = 8  # blocks whose whole logits are compared; the others by survival and by their greedy chain
ROUNDING = 0.1  # largest RMS change of the logits by rounding the weights, relative to their RMS: beyond, it is no rounding
FRAME = ("target_layer_ids", "mask_token_id", "block_size", "sample_from_anchor", "markov_head_type", "markov_rank")
Record = dict[str, Any]
Spot = tuple[int, int]  # (row, anchor position)


@dataclass(frozen=True)
class Check:
    """One comparison: `value` against `limit`."""

    name: str
    passed: bool
    value: Any = None
    limit: Any = None


def write_fixture(
    fixture: Path,
    target: Target,
    drafter: DSpark,
    heads: FrozenHeads,
    *,
    dtype: torch.dtype,
    with_heads: bool = True,
    template_args: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> Record:
    """What both sides must agree on, in `fixture`: texts, tapped states, results of the trained drafter, its frame and hashes.

    Returns what is kept beside the result (`checks` of the tap frame and of the rounding among it).
    """
    predictions, length = drafter.num_predictions, max(24, drafter.num_predictions + 16)
    rows, starts = texts(target, length, template_args, system)
    states, taps_differ = capture(target, rows, drafter.tap_layers)
    spots = [(i, p) for i, row in enumerate(rows) for p in range(max(starts[i] - 1, 1), len(row) - predictions)]
    where = [spots[round(k * (len(spots) - 1) / (BLOCKS - 1))] for k in range(BLOCKS)]
    where = where[:: BLOCKS // FULL] + [spot for k, spot in enumerate(where) if k % (BLOCKS // FULL)]  # the full ones: spread
    trained = _copy(drafter)
    rounded = _copy(drafter).to(dtype).to(torch.float32)
    at_home = FrozenHeads.build(
        heads.embedding.cpu().float(), heads.lm_head.cpu().float(), None if heads.draft_ids is None else heads.draft_ids.cpu()
    )
    cut = at_home.to(dtype).to(torch.float32)
    filed = FrozenHeads(
        cut.embedding if with_heads else at_home.embedding, at_home.lm_head,
        cut.draft_head if with_heads or at_home.draft_ids is not None else at_home.draft_head, at_home.draft_ids,
    )  # fmt: skip
    exact, gaps = training_side(rounded, filed, rows, states, where)
    plain = exact if dtype == torch.float32 else training_side(trained, at_home, rows, states, where)[0]
    change = float((exact.logits - plain.logits).pow(2).mean().sqrt() / plain.logits.pow(2).mean().sqrt())
    text = torch.stack([rows[i][p + 1 : p + 1 + predictions] for i, p in where])
    checks = [
        Check("tap frame (hooks on the target's layers)", taps_differ == 0.0, taps_differ, 0.0),
        Check("rounding of the weights (RMS of the logits)", change <= ROUNDING, round(change, 6), ROUNDING),
    ]
    tensors = {f"ids.{i}": row for i, row in enumerate(rows)}
    tensors |= {f"states.{i}.{layer}": value for i, found in enumerate(states) for layer, value in found.items()}
    tensors |= {"logits": exact.logits, "chain": exact.chain, "gaps": gaps, "text": text}
    if exact.survival is not None:
        tensors["survival"] = exact.survival
    tensors["target.embedding"] = heads.embedding.cpu().clone()
    if heads.lm_head.data_ptr() != heads.embedding.data_ptr():
        tensors["target.lm_head"] = heads.lm_head.cpu().clone()
    save_file({name: value.contiguous() for name, value in tensors.items()}, fixture / "fixture.safetensors")
    exported = native.file_tensors(drafter, heads, dtype)
    record: Record = {
        "dtype": str(dtype).removeprefix("torch."), "blocks": BLOCKS, "where": where, "rows": len(rows),
        "layers": drafter.config["num_target_layers"], "frame": {key: drafter.config.get(key) for key in FRAME},
        "hashes": {name: digest(value) for name, value in exported.items()},
        "acceptance": per_slot(exact.chain, text), "checks": [asdict(check) for check in checks],
    }  # fmt: skip
    (fixture / "fixture.json").write_text(json.dumps(record), encoding="utf-8")
    return record


def texts(
    target: Target, length: int, template_args: Mapping[str, Any] | None, system: str | None
) -> tuple[list[Tensor], list[int]]:
    """(prompts with `length` greedy tokens of the target behind each, int64 [T]; where each answer starts)."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for prompt in PROMPTS:
        messages = [{"role": "system", "content": system}] if system else []
        try:
            chat = ChatFormat(target.tokenizer, template_args=dict(template_args or {}), eos_ids=target.eos_token_ids)
            ids = chat.render([*messages, {"role": "user", "content": prompt}], generation_prompt=True)
        except (ValueError, TypeError, AttributeError):  # no chat template, or no tokenizer at all
            ids = list(target.tokenizer(prompt)["input_ids"]) if target.tokenizer is not None else []
        if len(set(ids)) < 8:  # a tokenizer that knows none of the words
            ids = torch.randint(0, target.vocab_size, (16,), generator=generator).tolist()
        prompts.append(ids)
    decoder = Decoder.from_target(target.model, dtype=target.dtype)
    longest = max(len(ids) for ids in prompts) + length + 1
    engine = Engine(decoder, slots=len(prompts), max_context=longest)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=length)
    answers = engine.run([Request(str(i), ids, greedy) for i, ids in enumerate(prompts)])
    rows = [torch.tensor(ids + list(done.token_ids)) for ids, done in zip(prompts, answers, strict=True)]
    return rows, [len(ids) for ids in prompts]


@torch.no_grad()
def capture(target: Target, rows: Sequence[Tensor], taps: Sequence[int]) -> tuple[list[dict[int, Tensor]], float]:
    """(states float32 [T, H] of the tapped layers and their neighbours per row; the tap frame's largest difference).

    Hooks of our own on the decoder layers are the measure: `Target.features`, from which the drafter was trained, and
    transformers' hidden_states[id + 1] must both be what layer `id` puts out.
    """
    layers = sorted({t + d for t in taps for d in (-1, 0, 1) if 0 <= t + d < target.num_layers})
    found, worst = [], 0.0
    for row in rows:
        seen: dict[int, Tensor] = {}
        ids = row[None].to(target.device)
        handles = [target.layers[layer].register_forward_hook(partial(_keep, seen, layer)) for layer in layers]
        try:
            output = target.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
        finally:
            for handle in handles:
                handle.remove()
        trained_on = target.features(ids, None, tuple(taps)).taps[0]
        worst = max(worst, _differ(trained_on, torch.cat([seen[t][0] for t in taps], dim=-1)))
        worst = max([worst, *(_differ(output.hidden_states[t + 1][0], seen[t][0]) for t in taps if t < target.num_layers - 1)])
        found.append({layer: seen[layer][0].float().cpu() for layer in layers})
    return found, worst


@torch.no_grad()
def training_side(
    drafter: DSpark, heads: FrozenHeads, rows: Sequence[Tensor], states: Sequence[dict[int, Tensor]], where: Sequence[Spot]
) -> tuple[Blocks, Tensor]:
    """What models/dspark.py computes of the blocks: logits of the first FULL, survival under the text, greedy chains.

    The second is the distance of the two largest logits at each link of a chain, relative to the largest: [N, P].
    """
    hidden, before = [], []
    for row, anchor in where:
        taps = torch.cat([states[row][layer] for layer in drafter.tap_layers], dim=-1)[None]
        text = rows[row][anchor : anchor + drafter.block_size][None, None]
        out = drafter.unroll(
            taps=taps, anchors=torch.tensor([[anchor]]), previous_tokens=_padded(text, drafter.block_size),
            embedding=heads.embedding,
        )  # fmt: skip
        hidden.append(out.hidden[0, 0, drafter.first_slot :])
        before.append(rows[row][anchor : anchor + drafter.num_predictions])
    h, previous = torch.stack(hidden), torch.stack(before)
    out = drafter.head_states(h, previous)
    logits = h[:FULL] @ heads.draft_head.T
    if out.correction is not None and drafter.markov_head is not None:
        logits = logits + out.correction[:FULL] @ drafter.markov_head.markov_w2.weight.T
    chain, gaps = _chain(drafter, heads, h, previous[:, 0])
    return Blocks(logits, out.survival_logits, chain), gaps


def _copy(drafter: DSpark) -> DSpark:
    """On the CPU in float32; not deepcopy, since Accelerate leaves wrappers on what it has prepared."""
    with torch.random.fork_rng(devices=[]):
        made = DSpark(drafter.config)
    made.load_state_dict({name: value.detach().cpu() for name, value in drafter.state_dict().items()})
    return made.float().eval()


def _keep(seen: dict[int, Tensor], layer: int, module: Any, args: Any, output: Any) -> None:
    seen[layer] = output[0] if isinstance(output, tuple) else output


def _chain(drafter: DSpark, heads: FrozenHeads, h: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """(greedy chain int64 [N, P], distance of the two largest logits relative to the largest, [N, P])."""
    head, tokens, out, gaps = drafter.markov_head, anchors, [], []
    state = None if head is None else head.initial_state(h[:, 0])
    for k in range(h.shape[1]):
        logits = h[:, k] @ heads.draft_head.T
        if head is not None:
            feature, state = head.step(h[:, k], head.markov_w1(tokens), state)
            logits = logits + head.markov_w2(feature)
        top = logits.topk(2).values
        gaps.append((top[:, 0] - top[:, 1]) / logits.abs().amax(-1).clamp_min(1.0))
        column = logits.argmax(-1)
        tokens = column if heads.draft_ids is None else heads.draft_ids[column]
        out.append(tokens)
    return torch.stack(out, 1), torch.stack(gaps, 1)


def _padded(text: Tensor, slots: int) -> Tensor:
    """text [1, 1, n <= slots] to [1, 1, slots]: what is beyond its end feeds nothing that is read."""
    return torch.nn.functional.pad(text, (0, slots - text.shape[-1]))


def per_slot(chain: Tensor, text: Tensor) -> list[float]:
    """Share of blocks whose first k+1 greedy drafts are the target's own text: chain, text int64 [N, P] -> P numbers."""
    return (chain == text).long().cumprod(1).float().mean(0).tolist()


def _differ(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max()) if a.shape == b.shape else float("inf")


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
