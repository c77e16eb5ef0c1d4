"""The cost table of runtime/costs.py, measured where it will be used: the serving engine itself runs the cycles.

Every cycle is an ordinary engine step with all its parts (Python included) in the order they have in serving, so the caches
are as warm or cold as they will be, and EngineStats books the time. Only prompts are short-circuited: the cache is filled with
noise once and a prefill returns at once, since what the keys are does not change what a pass costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..models.config import TargetConfig
from ..runtime.cache import KVCache
from ..runtime.config import SamplingParams
from ..runtime.costs import GREEDY, SAMPLED, CostTable, monotone
from ..runtime.decoder import Decoder, DecoderOutput
from ..runtime.engine import Engine, Request
from ..runtime.propose import Proposer
from ..runtime.proposers import ProposerSource
from ..runtime.schedule import FixedLength
from .config import EvalConfig
from .environment import hardware_name, versions
from .stage import Serving

ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 1024, 4096)
_DRIFT = 96  # positions a row may move away from its context before it starts again
QUIET = 0.15  # spread of repeated cycles above which the machine was too busy to be profiled
_UPKEEP_STEPS = 33  # of plain cycles: the drafter writes what they left behind every 32
MakeProposer = Callable[[int, int], Proposer]  # (slots, max_context)
Parts = tuple[float, float, float]  # draft, verify, rest in milliseconds


def measure_costs(
    decoder: Decoder,
    make_proposer: MakeProposer,
    *,
    target: str,
    dtype: str,
    drafter: str,
    rule: str = "block",
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    slots: Sequence[int] | None = None,
    passes: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> CostTable:
    """Measure draft, verify and rest over rows x slots x context, greedy and (at the first context) sampled.

    make_proposer(slots, max_context) is called once. slots: draft lengths on the grid, without 0; None: 1, 2, 3, 5, ... up to
    the proposer's. Contexts that the target cannot hold are left out. Medians over `passes` sweeps up and down the rows; cheap
    points get more steps than dear ones. Raises ValueError for an empty grid.
    """
    began = time.perf_counter()
    room = decoder.max_positions - 1
    bench = _Bench(
        decoder, make_proposer, rows=rows, contexts=[c for c in contexts if c + _room(64) <= room], rule=rule, seed=seed
    )
    lengths = sorted({0, *(_lengths(bench.engine.num_slots) if slots is None else slots)})
    if not bench.contexts or lengths[-1] > bench.engine.num_slots or len(lengths) < 2:
        raise ValueError(f"profile: contexts {list(contexts)} or slots {lengths} do not fit the target or the drafter")
    found: dict[tuple[int, int, int, bool], list[Parts]] = {}
    upkeep = {}
    for context in bench.contexts[::-1]:  # longest first: shorter prompts are prefixes of it and stay resident
        for sweep in range(passes):
            for count in bench.rows[::-1] if sweep % 2 == 0 else bench.rows:
                kinds = (False, True) if context == bench.contexts[0] else (False,)
                for hot in kinds:
                    for length, parts in bench.sweep(count, context, lengths[:: 1 if sweep % 2 else -1], hot=hot):
                        found.setdefault((context, count, length, hot), []).extend(parts)
        say(f"context {context}: measured")
    for count in bench.rows:
        upkeep[count] = bench.upkeep(count, bench.contexts[0])
    table = _table(found, upkeep, bench.contexts, bench.rows, lengths)
    return CostTable(
        hardware=hardware_name(decoder.device), threads=torch.get_num_threads(), dtype=dtype, target=target, drafter=drafter,
        ragged=decoder.backend == "kernels", rows=bench.rows, slots=lengths, contexts=bench.contexts,
        notes={
            "rule": rule, "seconds": round(time.perf_counter() - began, 1), "backend": decoder.backend, "versions": versions(),
            "samples": {"least": min(map(len, found.values())), "most": max(map(len, found.values()))},
            "spread": round(_spread(list(found.values())), 3),
        },
        **table,
    )  # fmt: skip


def drafter_hash(folder: Path) -> str:
    """What tells exported drafters apart: a hash of their configuration and weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def profile(
    target_cfg: TargetConfig,
    drafter_folder: Path,
    cfg: EvalConfig,
    to: Path,
    *,
    device: str = "cpu",
    serving: Serving | None = None,
    say: Callable[[str], None] = lambda line: None,
    **grid: Any,
) -> CostTable:
    """Load target and drafter, measure the table and save it at `to`. grid: rows, contexts, slots, passes of `measure_costs`.

    serving: the target where it is loaded already. An earlier table of the same drafter hands its acceptance on. Raises
    ValueError as the loaders do.
    """
    dtype = cfg.dtype or target_cfg.dtype
    hashed = drafter_hash(drafter_folder)
    serving = serving or Serving.open(target_cfg, drafter_folder, cfg, dtype, device)
    source = ProposerSource("dspark", target=serving.target, dtype=serving.dtype, drafter_folder=drafter_folder)
    table = measure_costs(
        serving.decoder, lambda slots, limit: source(slots=slots, max_context=limit), target=target_cfg.name, dtype=dtype,
        drafter=hashed, rule=cfg.rule, seed=cfg.seed, say=say, **grid,
    )  # fmt: skip
    try:
        before = CostTable.load(to, hardware=table.hardware, dtype=dtype, target=target_cfg.name, drafter=hashed)
        table = table.with_acceptance(before.acceptance)
    except ValueError:
        pass  # none, or of another drafter
    if table.notes["spread"] > QUIET:
        say(
            f"warning: repeated cycles differ by {table.notes['spread']:.0%} (quartiles): the machine is busy, and a scheduler "
            "that trusts this table may choose badly; profile again when it is quiet"
        )
    table.save(to)
    return table


def load_or_profile(
    target_cfg: TargetConfig, drafter_folder: Path, cfg: EvalConfig, path: Path, *, device: str = "cpu", **options: Any
) -> CostTable:
    """The table at `path` where it was measured on this machine with these models, else a new one, saved there."""
    try:
        return CostTable.load(
            path, hardware=hardware_name(device), dtype=cfg.dtype or target_cfg.dtype, target=target_cfg.name,
            threads=torch.get_num_threads(), drafter=drafter_hash(drafter_folder),
        )  # fmt: skip
    except ValueError:
        return profile(target_cfg, drafter_folder, cfg, path, device=device, **options)


def _lengths(most: int) -> list[int]:
    """Dense where draft lengths matter most, always with the longest."""
    return [k for k in (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63) if k < most] + [most]


def _room(slots: int) -> int:
    return _DRIFT + 4 * (slots + 1)


class _Bench:
    """One engine with all its rows resident at the longest context, whose cycles are timed at any smaller load."""

    def __init__(
        self,
        decoder: Decoder,
        make_proposer: MakeProposer,
        *,
        rows: Sequence[int],
        contexts: Sequence[int],
        rule: str,
        seed: int,
    ) -> None:
        if not rows or not contexts:
            raise ValueError(
                f"profile: rows {list(rows)}, contexts {list(contexts)}: both need a value that the target can hold"
            )
        self.rows, self.contexts = sorted(set(rows)), sorted(set(contexts))
        limit = self.contexts[-1] + _room(64)
        self.length = _Pinned()
        self.engine = Engine(
            cast(Decoder, _Resident(decoder)), proposer=make_proposer(self.rows[-1], limit), scheduler=self.length,
            slots=self.rows[-1], max_context=limit, rule=rule, prefill_tokens=self.rows[-1] * limit, reuse_prefix=True,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        _fill(self.engine.cache, generator)
        shape = (self.rows[-1], self.contexts[-1])
        self.prompts = torch.randint(0, decoder.vocab_size, shape, generator=generator).tolist()
        self._device = decoder.device
        self._live: list[str] = []
        self._serial = 0
        self._moved = 0

    def sweep(self, rows: int, context: int, lengths: Sequence[int], *, hot: bool) -> list[tuple[int, list[Parts]]]:
        """The parts of some cycles at every length, in order."""
        self._start(rows, context, hot)
        found = []
        for length in lengths:
            if self._moved + 6 * (length + 1) > _DRIFT:
                self._start(rows, context, hot)
            self.length.gamma = length
            began = time.perf_counter()
            self._step()  # pays for what the cycles before left behind
            seconds = time.perf_counter() - began
            count = 6 if seconds < 0.03 else 3 if seconds < 0.1 else 2
            found.append((length, [self._step() for _ in range(count)]))
        return found

    def upkeep(self, rows: int, context: int) -> float:
        """Mean milliseconds of the proposer in a plain cycle: most keep the states, a few write them."""
        self._start(rows, context, False)
        self.length.gamma = 0
        self._step()
        return statistics.fmean(self._step()[0] for _ in range(_UPKEEP_STEPS))

    def _start(self, rows: int, context: int, hot: bool) -> None:
        for name in self._live:
            self.engine.cancel(name)
        while not self.engine.idle:
            self.engine.step()
        budget = self.engine.max_context
        params = SamplingParams(temperature=float(hot), max_new_tokens=budget, ignore_eos=True, seed=1)
        self._serial += 1
        self._live = [f"{self._serial}-{i}" for i in range(rows)]
        self.length.gamma, self._moved = 0, 0
        for i, name in enumerate(self._live):
            self.engine.submit(Request(name, self.prompts[i][:context], dataclasses.replace(params, seed=i)))
        self._step()

    def _step(self) -> Parts:
        engine = self.engine
        engine.reset_stats()
        engine.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        stats = engine.stats
        if stats.proposer_failures:
            raise RuntimeError("profile: the proposer failed, its costs cannot be measured")
        assert stats.steps == 1 and stats.cycles == len(self._live), "a row ended while it was measured"
        self._moved += max(k for k, n in enumerate(stats.length_counts) if n) + 1
        return 1e3 * (stats.draft_s + stats.head_s), 1e3 * stats.verify_s, 1e3 * (stats.rest_s + stats.schedule_s)


def _spread(points: Sequence[Sequence[Parts]]) -> float:
    """Median over the points of (upper - lower quartile) / median of a cycle's time: how quiet the machine was."""
    quartiles = [np.percentile([sum(parts) for parts in samples], (25, 50, 75)) for samples in points]
    return float(np.median([(high - low) / middle for low, middle, high in quartiles]))


class _Pinned(FixedLength):
    """A fixed length that may be changed between steps; the proposer predicts survival as it does under a scheduler."""

    wants_survival = True

    def __init__(self) -> None:
        super().__init__(0)


class _Resident:
    """A decoder whose prompts cost nothing: prefill passes return zeros, all others are the real ones."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, tokens: Tensor, cache: KVCache, rows: list[int], starts: Tensor, **options: Any) -> DecoderOutput:
        """See Decoder."""
        if options.get("logits", "all") == "all":
            return self._decoder.forward(tokens, cache, rows, starts, **options)
        decoder, batch = self._decoder, tokens.shape[0]
        taps = None
        if options.get("taps"):
            size = len(decoder.tap_layers) * decoder.hidden_size
            taps = torch.zeros(*tokens.shape, size, dtype=decoder.dtype, device=decoder.device)
        logits = torch.zeros(batch, 1, decoder.vocab_size, device=decoder.device) if options["logits"] == "last" else None
        return DecoderOutput(logits, taps)


def _fill(cache: KVCache, generator: torch.Generator) -> None:
    """Finite noise in every entry: what is never written would be zeros in pages the machine need not even fetch."""
    for part in (cache.k, cache.v):
        noise = torch.randn(part.shape[2:], generator=generator)
        for layer in part:
            layer.copy_(noise.to(part.dtype))


def _table(
    found: dict[tuple[int, int, int, bool], list[Parts]],
    upkeep: dict[int, float],
    contexts: Sequence[int],
    rows: Sequence[int],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Medians of the samples as the tables of a CostTable, each monotone along all axes."""

    def grid(part: int, hot: bool, places: Sequence[int]) -> np.ndarray:
        return np.array(
            [[[statistics.median(s[part] for s in found[c, r, k, hot]) for k in lengths] for r in rows] for c in places]
        )

    first = contexts[:1]
    draft = grid(0, False, contexts)
    draft[:, :, 0] = [upkeep[r] for r in rows]
    # Sampling concerns the drafter's head and the rule, neither of which sees the context.
    sampled = draft + np.maximum(grid(0, True, first) - grid(0, False, first), 0.0) * (np.array(lengths) > 0)
    return {
        "verify": monotone(grid(1, False, contexts)).tolist(),
        "draft": {GREEDY: monotone(draft).tolist(), SAMPLED: monotone(sampled).tolist()},
        "rest": {GREEDY: monotone(grid(2, False, first)[0]).tolist(), SAMPLED: monotone(grid(2, True, first)[0]).tolist()},
    }
