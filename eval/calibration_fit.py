"""Fitting and judging survival calibrations, on recorded cycles. numpy only, no model in sight.

An observation is one row in one cycle: the raw survival logits z_1..z_G of its draft and how many drafts were accepted. Slot k
is *observed* when its outcome is known, and *reached* when moreover drafts 1..k-1 were accepted. The label of slot k is
"drafts 1..k were all accepted", the prediction is the survival s_k: the cumulative product, not the conditional c_k.

Cut observations (methods 1.3, "cut at EOS"): an accepted end token ends the answer, so nothing behind it is ever offered; a
slot behind the room of a request is not verified. Such slots are neither reached nor rejected and count nowhere. Whether a slot
lies behind a *drafted* end token is known from the draft alone, so slots behind it are left out whether it was accepted or not:
leaving them out only after acceptance would keep the rejections and drop the survivors.

N observations, G slots, D domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata

from ..runtime.calibration import KINDS, Calibration, Entry, Kind, Knots, Setting

BINS = 20
TEMPERATURES = np.exp(np.linspace(np.log(0.125), np.log(8.0), 121))  # grid of STS, holds 1.0; a step is 3.5 %
GROUP = 50  # neighbouring observations that isotonic regression sees as one
PRIOR = 2.0  # weight of Platt's prior; as much as a handful of observations
LEAST_SLOPE = 0.02
TIE = 1e-3  # a smaller difference in ECE is within its noise and does not pay for a more complicated kind
Record = dict[str, Any]


@dataclass(frozen=True)
class Observations:
    """logits float32 [N, G]; accepted int64 [N]; observed int64 [N] (slots 1..observed have a known outcome); domain and
    prompt int64 [N] (indices); domains: the names."""

    logits: np.ndarray
    accepted: np.ndarray
    observed: np.ndarray
    domain: np.ndarray
    prompt: np.ndarray
    domains: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], domains: tuple[str, ...]) -> Observations:
        """From the five arrays in the order of the fields."""
        logits, accepted, observed, domain, prompt = arrays
        return cls(logits, accepted, observed, domain, prompt, domains)

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def slots(self) -> int:
        """G."""
        return self.logits.shape[1]

    def take(self, mask: np.ndarray) -> Observations:
        """The observations where bool [N] `mask` holds."""
        parts = (self.logits, self.accepted, self.observed, self.domain, self.prompt)
        return Observations.of([part[mask] for part in parts], self.domains)

    def known(self, slot: int) -> np.ndarray:
        """bool [N]: the outcome of slot `slot` (counted from 1) is known."""
        return self.observed >= slot

    def reached(self, slot: int) -> np.ndarray:
        """bool [N]: known, and drafts 1..slot-1 were accepted."""
        return self.known(slot) & (self.accepted >= slot - 1)

    def label(self, slot: int) -> np.ndarray:
        """float64 [N]: 1 where drafts 1..slot were all accepted; meaningful where known."""
        return (self.accepted >= slot).astype(np.float64)


# ---- metrics --------------------------------------------------------------------------------------------------------


def bin_of(prediction: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Index of the equal-width bin of [0, 1] that holds each prediction."""
    return np.minimum((prediction * bins).astype(np.int64), bins - 1)


def ece(prediction: np.ndarray, label: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: mean over observations of |mean prediction - mean label| of their bin. NaN when empty."""
    if not len(label):
        return float("nan")
    # the counts cancel: sum_b n_b/N * |mean gap| = sum_b |sum gap| / N
    return float(np.abs(np.bincount(bin_of(prediction, bins), prediction - label, minlength=bins)).sum() / len(label))


def ece_floor(prediction: np.ndarray, *, bins: int = BINS, draws: int = 100, rng: np.random.Generator) -> tuple[float, float]:
    """ECE that a perfectly calibrated prediction of this size shows by chance: (mean, 95 % quantile) of a parametric
    bootstrap, labels drawn from the predictions. It leaves out that cycles of one answer are alike, so it is a lower bound."""
    if not len(prediction):
        return float("nan"), float("nan")
    where = bin_of(prediction, bins)
    drawn = [
        np.abs(np.bincount(where, prediction - (rng.random(len(prediction)) < prediction), minlength=bins)).sum()
        for _ in range(draws)
    ]
    return float(np.mean(drawn) / len(prediction)), float(np.quantile(drawn, 0.95) / len(prediction))


def auroc(prediction: np.ndarray, label: np.ndarray) -> float:
    """Probability that an accepted observation has the higher prediction (ties count half). NaN with one class only."""
    positive = label > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    ranks = rankdata(prediction)
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def brier(prediction: np.ndarray, label: np.ndarray) -> float:
    """Mean squared difference. NaN when empty."""
    return float(np.mean((prediction - label) ** 2)) if len(label) else float("nan")


def reliability(prediction: np.ndarray, label: np.ndarray, bins: int = BINS) -> list[list[float]]:
    """Non-empty bins as [mean prediction, mean label, count], in ascending order."""
    where = bin_of(prediction, bins)
    counts = np.bincount(where, minlength=bins)
    sums = [np.bincount(where, part, minlength=bins) for part in (prediction, label)]
    return [[float(sums[0][b] / n), float(sums[1][b] / n), int(n)] for b, n in enumerate(counts) if n]


def judge(obs: Observations, survival: np.ndarray, *, bins: int = BINS, seed: int = 0, draws: int = 100) -> list[Record]:
    """Metrics of survival [N, G] per slot x domain, the pooled rows ("all") first."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, name in [(-1, "all"), *enumerate(obs.domains)]:
        for slot in range(1, obs.slots + 1):
            mask = obs.known(slot) & ((obs.domain == number) | (number < 0))
            prediction, label = survival[mask, slot - 1].astype(np.float64), obs.label(slot)[mask]
            floor, high = ece_floor(prediction, bins=bins, draws=draws, rng=rng)
            values = {
                "ece": ece(prediction, label, bins), "ece_floor": floor, "ece_floor_high": high,
                "auroc": auroc(prediction, label), "brier": brier(prediction, label),
                "mean_prediction": float(prediction.mean()) if len(label) else float("nan"),
                "mean_label": float(label.mean()) if len(label) else float("nan"),
            }  # fmt: skip
            count = {"slot": slot, "domain": name, "observations": int(mask.sum()), "accepted": int(label.sum())}
            rows.append(count | {key: value if np.isfinite(value) else None for key, value in values.items()})
    return rows


# ---- fits -----------------------------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def fit_none(obs: Observations, setting: Setting, bins: int = BINS) -> Entry:
    """The head's own numbers."""
    return Entry.identity(setting, obs.slots)


def fit_sts(obs: Observations, setting: Setting, bins: int = BINS) -> Entry:
    """Sequential temperature scaling (DSpark 3.2.1): slot by slot, the temperature of the grid that minimises the ECE of the
    cumulative product, earlier temperatures frozen."""
    product = np.ones(len(obs))
    slopes = []
    for slot in range(1, obs.slots + 1):
        mask, label = obs.known(slot), obs.label(slot)
        logits = obs.logits[:, slot - 1].astype(np.float64)
        errors = [ece(product[mask] * sigmoid(logits[mask] / t), label[mask], bins) for t in TEMPERATURES]
        # of equal errors the mildest temperature: an empty or useless slot stays as it is
        best = min(range(len(errors)), key=lambda i: (np.nan_to_num(errors[i]), abs(np.log(TEMPERATURES[i]))))
        slopes.append(float(1.0 / TEMPERATURES[best]))
        product = product * sigmoid(logits * slopes[-1])
    return Entry(setting, "sts", tuple(slopes), (0.0,) * obs.slots)


def fit_platt(obs: Observations, setting: Setting, bins: int = BINS) -> Entry:
    """Per-slot Platt scaling: slope and offset of the logit by maximum likelihood, over the reached observations.

    A weak Gaussian prior centres each slot on the previous one (the first on slope 1, offset 0): deep slots are reached by a
    handful of cycles. The slope stays positive, so the order is kept.
    """
    centre = np.array([1.0, 0.0])
    found = []
    for slot in range(1, obs.slots + 1):
        mask = obs.reached(slot)
        centre = _logistic(obs.logits[mask, slot - 1].astype(np.float64), obs.label(slot)[mask], centre)
        found.append(centre)
    return Entry(setting, "platt", tuple(float(a) for a, _ in found), tuple(float(b) for _, b in found))


def _logistic(z: np.ndarray, label: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """argmin over (slope, offset) of the NLL + PRIOR/2 * |. - centre|^2, by damped Newton steps: convex, so it converges."""

    def cost(theta: np.ndarray) -> float:
        x = theta[0] * z + theta[1]
        return float(np.logaddexp(0.0, x).sum() - (label * x).sum() + 0.5 * PRIOR * ((theta - centre) ** 2).sum())

    design = np.stack([z, np.ones_like(z)], axis=1)
    theta, value = centre.copy(), cost(centre)
    for _ in range(50):
        prediction = sigmoid(design @ theta)
        gradient = design.T @ (prediction - label) + PRIOR * (theta - centre)
        curvature = (design * (prediction * (1 - prediction))[:, None]).T @ design + PRIOR * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-6 and cost(theta - size * step) > value:
            size /= 2
        theta = theta - size * step
        value = cost(theta)
        if np.abs(size * step).max() < 1e-9:
            break
    if theta[0] < LEAST_SLOPE:  # a useless or inverted logit: (almost) ignore it, and let the offset carry the rate
        rate = (label.sum() + 0.5) / (len(label) + 1.0)
        theta = np.array([LEAST_SLOPE, np.log(rate / (1 - rate)) - LEAST_SLOPE * (z.mean() if len(z) else 0.0)])
    return theta


def fit_isotonic(obs: Observations, setting: Setting, bins: int = BINS) -> Entry:
    """Isotonic regression of the label on the raw cumulative product, slot by slot (least squares, pool adjacent violators).

    Neighbours are grouped by GROUP first, each group's rate drawn towards the slot's by one observation: levels of a handful
    of observations at both ends would else be exactly 0 or 1. Knots stand at both ends of every level; between levels the map
    is linear. `Calibration.apply` adds the running minimum over slots.
    """
    raw = sigmoid(obs.logits.astype(np.float64)).cumprod(axis=1)
    maps: list[Knots] = []
    for slot in range(1, obs.slots + 1):
        mask = obs.known(slot)
        if not mask.any():
            maps.append(((0.0, 0.0), (1.0, 1.0)))
            continue
        order = np.argsort(raw[mask, slot - 1], kind="stable")
        x, label = raw[mask, slot - 1][order], obs.label(slot)[mask][order]
        starts = np.arange(0, max(len(x) - len(x) % GROUP, 1), GROUP)  # the last group takes the remainder
        counts = np.diff(np.append(starts, len(x)))
        rates = (np.add.reduceat(label, starts) + label.mean()) / (counts + 1)
        fitted = isotonic_regression(rates, weights=counts)
        edges = np.append(starts, len(x))[fitted.blocks]
        levels = np.clip(fitted.x[fitted.blocks[:-1]], 0.0, 1.0)
        knots: list[tuple[float, float]] = []
        for first, after, level in zip(edges[:-1], edges[1:], levels, strict=True):
            knots += [(float(x[first]), float(level)), (float(x[after - 1]), float(level))]
        maps.append(tuple(dict.fromkeys(knots)))
    return Entry(setting, "isotonic", (1.0,) * obs.slots, (0.0,) * obs.slots, tuple(maps))


FITS: dict[Kind, Callable[..., Entry]] = {"none": fit_none, "sts": fit_sts, "platt": fit_platt, "isotonic": fit_isotonic}


def predict(entry: Entry, logits: np.ndarray) -> np.ndarray:
    """Survival float32 [N, G] of one entry, through the runtime's own code."""
    rows = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float32))
    return Calibration(len(entry.slope), [entry]).apply(rows, torch.zeros(len(rows))).numpy()


# ---- choice ---------------------------------------------------------------------------------------------------------


def slot_eces(obs: Observations, survival: np.ndarray, bins: int = BINS) -> list[float]:
    """Pooled ECE of each slot (0 for a slot nobody observed)."""
    errors = []
    for slot in range(1, obs.slots + 1):
        mask = obs.known(slot)
        errors.append(ece(survival[mask, slot - 1].astype(np.float64), obs.label(slot)[mask], bins) if mask.any() else 0.0)
    return errors


def cross_validate(
    obs: Observations, setting: Setting, kinds: Sequence[Kind], *, folds: int, bins: int = BINS, seed: int = 0
) -> dict[Kind, list[float]]:
    """ECE per slot of each kind on predictions made out of fold. Whole prompts share a fold: cycles of one answer are alike."""
    prompts = np.unique(obs.prompt)
    if len(prompts) < 2:
        raise ValueError(f"eval.calibration.folds: got {len(prompts)} fitted prompts, allowed: 2 or more")
    order = np.random.default_rng(seed).permutation(len(prompts))
    fold = (order % min(folds, len(prompts)))[np.searchsorted(prompts, obs.prompt)]
    errors: dict[Kind, list[float]] = {}
    for kind in kinds:
        survival = np.zeros_like(obs.logits)
        for number in np.unique(fold):
            inside = fold == number
            survival[inside] = predict(FITS[kind](obs.take(~inside), setting, bins), obs.logits[inside])
        errors[kind] = slot_eces(obs, survival, bins)
    return errors


def choose(errors: dict[Kind, list[float]]) -> Kind:
    """The kind of the lowest mean ECE over slots; of kinds within TIE of it the simplest (in the order of KINDS)."""
    means = {kind: float(np.mean(values)) for kind, values in errors.items()}
    least = min(means.values())
    return next(kind for kind in KINDS if kind in means and means[kind] <= least + TIE)
