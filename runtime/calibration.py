"""Calibrated survival: from the survival head's raw logits to the probability that a whole prefix of the draft is accepted.

The survival head is trained on free target paths at temperature 1 and used on accepted prefixes under the serving temperature,
truncation and verification rule, so its raw numbers are off; the scheduler needs them right. `eval/calibrate.py` fits the
corrections (sequential temperature scaling, DSpark 3.2.1; per-slot Platt scaling; isotonic regression) and this file applies
them. All kinds share one form, so rows of different settings stand in one batch without a branch:

    c_k = sigmoid(slope_k * z_k + offset_k),    s_k = map_k(c_1 * ... * c_k),    then the running minimum over k

    none: slope 1, offset 0, no map     sts: slope 1/T_k     platt: slope and offset     isotonic: map_k, piecewise linear

Every decision derived from s_k is as legal as one from z_k: z_k depends on x_{k-1} and earlier, never on x_k (design rule 1.4).
B rows, G slots (at most the block size), E fitted settings, K knots.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .config import SamplingParams
from .kernels.sampling import SurvivalMap

FILE = "calibration.json"
SCHEMA = 1
Kind = Literal["none", "sts", "platt", "isotonic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Knots = tuple[tuple[float, float], ...]
_IDENTITY: Knots = ((0.0, 0.0), (1.0, 1.0))
_CLOSE = 1e-6


@dataclass(frozen=True)
class Setting:
    """What a calibration was fitted under. Truncation of a greedy row is dropped, as the sampler drops it."""

    temperature: float
    top_k: int
    top_p: float
    rule: str

    @classmethod
    def of(cls, sampling: SamplingParams, rule: str) -> Setting:
        """The setting of a request under verification rule `rule`."""
        hot = sampling.temperature > 0
        return cls(float(sampling.temperature), sampling.top_k if hot else 0, float(sampling.top_p) if hot else 1.0, rule)

    def same(self, other: Setting) -> bool:
        """Whether survivals fitted under one hold under the other. Greedy rows accept by equality under every rule."""
        if abs(self.temperature - other.temperature) > _CLOSE:
            return False
        cut = self.top_k == other.top_k and abs(self.top_p - other.top_p) <= _CLOSE
        return self.temperature == 0 or (cut and self.rule == other.rule)

    def __str__(self) -> str:
        if self.temperature == 0:
            return "T=0"
        parts = [f"T={self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] if self.top_k else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([*parts, f"{self.rule} rule"])


@dataclass(frozen=True)
class Entry:
    """One fitted setting: slope and offset per slot, and for isotonic the knots (x ascending, y non-decreasing) per slot."""

    setting: Setting
    kind: Kind
    slope: tuple[float, ...]
    offset: tuple[float, ...]
    knots: tuple[Knots, ...] | None = None

    @classmethod
    def identity(cls, setting: Setting, slots: int) -> Entry:
        """Kind none: the head's own numbers."""
        return cls(setting, "none", (1.0,) * slots, (0.0,) * slots)


class Calibration:
    """Fitted settings of one drafter. block_size: its slots; provenance: what it was fitted on, for people.

    Raises ValueError for an empty or inconsistent set of entries (wrong lengths, unknown kind, a temperature twice).
    """

    def __init__(self, block_size: int, entries: Sequence[Entry], provenance: Mapping[str, Any] | None = None) -> None:
        self.block_size, self.entries, self.provenance = block_size, tuple(entries), dict(provenance or {})
        if not self.entries:
            raise ValueError("entries: got none, allowed: at least one fitted setting")
        for entry in self.entries:
            _check(entry, block_size)
        temperatures = [entry.setting.temperature for entry in self.entries]
        if len(set(temperatures)) != len(temperatures):
            raise ValueError(f"entries: got temperatures {temperatures}, allowed: each once")
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]] = {}
        self._rows: dict[float, list[tuple[float, float, Any]]] = {}  # by temperature: slope, offset, (x, y) of each slot
        self._maps: dict[float, SurvivalMap] = {}
        self._warned: set[str] = set()

    @torch.inference_mode()
    def apply(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Calibrated survival of every prefix: logits [B, G] raw (G <= block_size), temperature [B] -> float32 [B, G].

        Each row uses the entry of the nearest temperature. The result is in [0, 1] and non-increasing over the slots. Nothing
        is synchronised: the tables are moved to a device once.
        """
        slots = logits.shape[1]
        assert slots <= self.block_size, (slots, self.block_size)
        if logits.device.type == "cpu":
            rows = zip(logits.tolist(), temperature.tolist(), strict=True)
            return torch.tensor([self._row(row, heat) for row, heat in rows], dtype=torch.float32).reshape(logits.shape)
        temperatures, slope, offset, knots = self._on(logits.device)
        entry = (temperature.float()[:, None] - temperatures).abs().argmin(dim=1)
        survival = torch.sigmoid(logits.float() * slope[entry, :slots] + offset[entry, :slots]).cumprod(dim=1)
        if knots is None:
            return survival
        x, y = (table[entry, :slots] for table in knots)
        return _interpolate(survival, x, y).cummin(dim=1).values

    def _row(self, logits: Sequence[float], temperature: float) -> list[float]:
        """`apply` for one row on the host: a dozen numbers, for which plain Python is quicker than calls into torch."""
        table = self._rows.get(temperature)
        if table is None:
            entry = self._nearest(temperature)
            maps: list[Any] = [None] * len(entry.slope)
            if entry.knots is not None:
                maps = [tuple(zip(*slot, strict=True)) for slot in entry.knots]
            table = self._rows[temperature] = list(zip(entry.slope, entry.offset, maps, strict=True))
        product, least, found = 1.0, 1.0, []
        for z, (slope, offset, knots) in zip(logits, table, strict=False):
            product *= 1.0 / (1.0 + math.exp(-max(z * slope + offset, -700.0)))
            value = product if knots is None else _between(product, *knots)
            least = least if value >= least else value  # NaN goes on
            found.append(least)
        return found

    def maps(self, temperature: Tensor) -> list[SurvivalMap]:
        """The map of each row, temperature [B] on the CPU, for the native code that does what `apply` does."""
        found = []
        for heat in temperature.tolist():
            if heat not in self._maps:
                entry = self._nearest(heat)
                knots = None if entry.knots is None else [([x for x, _ in slot], [y for _, y in slot]) for slot in entry.knots]
                self._maps[heat] = SurvivalMap(entry.slope, entry.offset, knots)
            found.append(self._maps[heat])
        return found

    def _nearest(self, temperature: float) -> Entry:
        return min(self.entries, key=lambda e: abs(e.setting.temperature - temperature))

    def check(self, sampling: SamplingParams, rule: str) -> str | None:
        """Warning text when a request runs under a setting that was not fitted; None when all is well."""
        asked = Setting.of(sampling, rule)
        if any(asked.same(entry.setting) for entry in self.entries):
            return None
        fitted = "; ".join(str(entry.setting) for entry in self.entries)
        return (
            f"survival was calibrated for {fitted}, and is used at {asked}: draft lengths may be badly chosen (the output "
            "stays exact); run `draftsmith calibrate` with these settings"
        )

    def warn(self, sampling: SamplingParams, rule: str) -> None:
        """Issue the text of `check` as a Python warning, each text once per object."""
        text = self.check(sampling, rule)
        if text is not None and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            "schema": SCHEMA,
            "block_size": self.block_size,
            "entries": [
                {
                    "temperature": entry.setting.temperature,
                    "top_k": entry.setting.top_k,
                    "top_p": entry.setting.top_p,
                    "rule": entry.setting.rule,
                    "kind": entry.kind,
                    "slope": list(entry.slope),
                    "offset": list(entry.offset),
                    "knots": None if entry.knots is None else [[list(point) for point in slot] for slot in entry.knots],
                }
                for entry in self.entries
            ],
            "provenance": self.provenance,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The object that `to_json` wrote. Raises ValueError for anything else."""
        if value.get("schema") != SCHEMA:
            raise ValueError(f"schema: got {value.get('schema')!r}, allowed: {SCHEMA}")
        try:
            entries = [
                Entry(
                    Setting(float(e["temperature"]), int(e["top_k"]), float(e["top_p"]), str(e["rule"])),
                    e["kind"],
                    tuple(map(float, e["slope"])),
                    tuple(map(float, e["offset"])),
                    None if e["knots"] is None else tuple(tuple((float(x), float(y)) for x, y in slot) for slot in e["knots"]),
                )
                for e in value["entries"]
            ]
            return cls(int(value["block_size"]), entries, value.get("provenance"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"broken calibration: {error!r}") from error

    def save(self, folder: Path) -> Path:
        """Write `calibration.json` into a drafter's folder, atomically; returns its path."""
        path = folder / FILE
        temporary = folder / f".{FILE}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    @classmethod
    def load(cls, folder: Path) -> Calibration | None:
        """The calibration beside a drafter; None when it has none.

        Raises ValueError for a broken file and for one of another block size than the folder's config.json states.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        try:
            found = cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; remove it and run `draftsmith calibrate` again") from error
        config = Path(folder) / "config.json"
        block_size = json.loads(config.read_text(encoding="utf-8")).get("block_size") if config.is_file() else found.block_size
        if block_size != found.block_size:
            raise ValueError(
                f"{path}: block_size: {found.block_size} is not this drafter's {block_size}; run `draftsmith calibrate` again"
            )
        return found

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """(temperatures [E], slope [E, G], offset [E, G], knots x and y [E, G, K] or None) on a device, built once for each."""
        if device not in self._tables:
            make = lambda rows: torch.tensor(rows, dtype=torch.float32, device=device)  # noqa: E731
            knots = None
            if any(entry.knots is not None for entry in self.entries):
                maps = [entry.knots or (_IDENTITY,) * self.block_size for entry in self.entries]
                most = max(len(slot) for entry in maps for slot in entry)
                padded = [[[*slot, *[slot[-1]] * (most - len(slot))] for slot in entry] for entry in maps]
                points = make(padded)
                knots = points[..., 0].contiguous(), points[..., 1].contiguous()
            self._tables[device] = (
                make([entry.setting.temperature for entry in self.entries]),
                make([entry.slope for entry in self.entries]),
                make([entry.offset for entry in self.entries]),
                knots,
            )
        return self._tables[device]


def _check(entry: Entry, slots: int) -> None:
    if entry.kind not in KINDS:
        raise ValueError(f"kind: got {entry.kind!r}, allowed: {', '.join(KINDS)}")
    maps = (_IDENTITY,) * slots if entry.knots is None else entry.knots
    if not len(entry.slope) == len(entry.offset) == len(maps) == slots:
        raise ValueError(f"entry {entry.setting}: needs slope, offset and knots of {slots} slots")
    if min(entry.slope) <= 0:
        raise ValueError(f"entry {entry.setting}: slope {min(entry.slope)}, allowed: above 0 (the order must be kept)")
    for knots in maps:
        x, y = zip(*knots, strict=True)
        if list(x) != sorted(x) or list(y) != sorted(y) or min(y) < 0 or max(y) > 1:
            raise ValueError(f"entry {entry.setting}: knots must ascend within [0, 1]")


def _between(value: float, x: Sequence[float], y: Sequence[float]) -> float:
    """`_interpolate` of one number."""
    if len(x) == 1:
        return y[0]
    right = min(max(bisect_left(x, value), 1), len(x) - 1)
    weight = (value - x[right - 1]) / max(x[right] - x[right - 1], 1e-12)
    return y[right - 1] + min(max(weight, 0.0), 1.0) * (y[right] - y[right - 1])


def _interpolate(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear maps: values [B, G] under knots x, y [B, G, K]; constant outside the outermost knots."""
    if x.shape[-1] == 1:
        return y[..., 0]
    right = torch.searchsorted(x, values[..., None]).clamp(1, x.shape[-1] - 1)
    x0, x1 = x.gather(-1, right - 1)[..., 0], x.gather(-1, right)[..., 0]
    y0, y1 = y.gather(-1, right - 1)[..., 0], y.gather(-1, right)[..., 0]
    # Equal knots (padding, or a jump): the floor makes the weight 0 or 1 instead of NaN.
    weight = ((values - x0) / (x1 - x0).clamp_min(1e-12)).clamp(0.0, 1.0)
    return y0 + weight * (y1 - y0)
