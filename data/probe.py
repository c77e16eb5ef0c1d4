"""Did this target write these answers? Asked of the target itself, on a few rows.

Sampled answers: let x be a token and p the law it is said to come from (the target's, at the recorded temperature and
truncation). The randomised probability integral transform

    u = P_p(y likelier than x) + v * P_p(y as likely as x),    v uniform

is uniform on [0, 1] and independent over tokens when the tokens are drawn from p. Its Kolmogorov-Smirnov distance D from
uniform is at most the total variation between p and the law that really wrote the text, so rounding (another kernel, another
number format) cannot move it by more than it moves p. It finds another temperature, truncation or a sharper model. A model
that is calibrated gives foreign text a nearly uniform u as well; there the mean speaks: sum(-log p(x) - H(p)) is a martingale
with the variance sum(Var log p(x)) that each p tells, so its ratio z to the root of it is close to standard normal, and
foreign text is less likely than the target thinks its own to be. Either refuses, when it is both significant and large.
Measured on SmolLM2-135M, 8 rows of 90 to 140 tokens: own answers D .026, z 0.8 (greedy agreement 1.00); prose written by others
D .13, z 9.8 (agreement .51); greedy answers read as sampled D .23; samples of temperature 1 read as of 0.7 D .25.
Greedy answers: the share of tokens that are the target's own choice, up to TIE nats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .chat import TokenRow

TIE = 0.125  # nats: one unit in the last place of a bfloat16 logit near 20
CHANCE = 1e-6  # probability that D is significant on answers of the target itself
MIN_Z = 5.0  # |z| from which the excess is significant: the same probability
CHUNK = 256


@dataclass(frozen=True, slots=True)
class RowProbe:
    """One row: supervised tokens read, mean negative log-probability and mean entropy in nats under the law that it is said
    to come from; for greedy rows (temperature 0) those of the law at temperature 1, and the share of own choices."""

    id: str
    temperature: float
    tokens: int
    nll: float
    entropy: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Result over all rows, nan where there was nothing to read.

    distance: D over the sampled tokens, significant above `critical`. excess: mean of -log p(x) - H(p) in nats over the
    sampled tokens, significant from |z| = MIN_Z on; nan under a truncated law, where a token just outside has no logarithm.
    agreement: share of own choices among the greedy tokens. tokens_per_second: of the
    target's passes alone.
    """

    rows: list[RowProbe]
    sampled_tokens: int
    distance: float
    critical: float
    excess: float
    z: float
    greedy_tokens: int
    agreement: float
    tokens_per_second: float

    def plain(self) -> dict[str, Any]:
        """As dictionaries and lists, nan as None."""
        found: dict[str, Any] = {k: None if v != v else v for k, v in asdict(self).items() if k != "rows"}
        return {**found, "rows": [asdict(row) for row in self.rows]}


def spread(rows: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """At most `count` rows, evenly spaced."""
    count = min(count, len(rows))
    return [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]


def target_logits(target: Any, row: TokenRow) -> Tensor:
    """Logits float32 [S, V] of a loaded target at the places that predict the S supervised tokens of a row (not its first)."""
    ids = torch.tensor([row.input_ids], device=target.device)
    hidden = target.features(ids, None, ()).last_hidden[0]
    places = torch.tensor(row.loss_mask[1:], device=hidden.device).nonzero().flatten()
    return torch.cat([target.logits(part).float() for part in hidden[places].split(CHUNK)])


def truncated(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The law [S, V] that is sampled: softmax(logits / temperature), its k likeliest, of these the fewest of mass top_p."""
    law = torch.softmax(logits / temperature, dim=-1)
    if top_k:
        law = torch.where(law >= law.topk(min(top_k, law.shape[-1])).values[..., -1:], law, 0.0)
        law = law / law.sum(-1, keepdim=True)
    if top_p < 1.0:
        ordered, where = law.sort(dim=-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        law = torch.zeros_like(law).scatter_(-1, where, ordered)
        law = law / law.sum(-1, keepdim=True)
    return law


def excess(law: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Sum over tokens [S] of -log p(x) - H(p) under laws [S, V], and the sum of the variances of log p(x); nats."""
    law = law.double()
    log = law.clamp_min(1e-30).log()
    entropy = -(law * log).sum(-1)
    own = -log.gather(-1, tokens[:, None])[:, 0]
    return float((own - entropy).sum()), float(((law * log.square()).sum(-1) - entropy.square()).clamp_min(0.0).sum())


def transform(law: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """The randomised integral transform float64 [S] of tokens [S] under laws [S, V]. A token of probability 0 gives 1."""
    own = law.gather(-1, tokens[:, None])
    above = torch.where(law > own, law, 0.0).sum(-1).double()
    tied = torch.where(law == own, law, 0.0).sum(-1).double()
    return (above + torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(law.device) * tied).clamp(0.0, 1.0)


def distance(values: Tensor) -> float:
    """Kolmogorov-Smirnov distance of values [N] in [0, 1] from the uniform law; nan without any."""
    if not len(values):
        return math.nan
    ordered, steps = values.double().sort().values, torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return float(torch.maximum(ordered.cpu() - steps[:-1], steps[1:] - ordered.cpu()).max())


def critical(count: int) -> float:
    """Distance that `count` uniform values exceed with a probability of about CHANCE."""
    return math.sqrt(math.log(2.0 / CHANCE) / (2 * count)) if count else math.nan


@torch.no_grad()
def probe(
    rows: Sequence[TokenRow],
    logits_of: Callable[[TokenRow], Tensor],
    temperatures: Sequence[float],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Probe:
    """Read `rows` with the target.

    logits_of: float32 [S, V] at the places that predict the supervised tokens (`target_logits`). temperatures: of each row, as
    recorded; 0 is greedy. top_k and top_p: of the rows at a temperature above 0.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[RowProbe] = []
    values: list[Tensor] = []
    chosen = greedy = read = 0
    total = variance = seconds = 0.0
    for row, temperature in zip(rows, temperatures, strict=True):
        began = time.perf_counter()
        logits = logits_of(row)
        seconds, read = seconds + time.perf_counter() - began, read + len(row.input_ids)
        kept = [token for token, flag in zip(row.input_ids[1:], row.loss_mask[1:], strict=True) if flag]
        if not kept:
            continue
        tokens = torch.tensor(kept, device=logits.device)
        law = truncated(logits, temperature, top_k, top_p) if temperature else torch.softmax(logits, dim=-1)
        own = law.gather(-1, tokens[:, None])[:, 0]
        entropy = -torch.special.xlogy(law, law).sum(-1)
        best = logits.max(-1).values - logits.gather(-1, tokens[:, None])[:, 0] <= TIE
        if temperature:
            full = not top_k and top_p >= 1.0
            values.append(transform(law, tokens, generator).cpu())
            parts = range(0, len(tokens), CHUNK) if full else ()
            more = [excess(law[i : i + CHUNK], tokens[i : i + CHUNK]) for i in parts]
            total, variance = total + sum(pair[0] for pair in more), variance + sum(pair[1] for pair in more)
        else:
            chosen, greedy = chosen + int(best.sum()), greedy + len(tokens)
        nll = float(-own.clamp_min(1e-30).log().mean())
        found.append(RowProbe(row.id, temperature, len(tokens), nll, float(entropy.mean()), float(best.float().mean())))
    joined = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
    agreement = chosen / greedy if greedy else math.nan
    return Probe(
        rows=found, sampled_tokens=len(joined), distance=distance(joined), critical=critical(len(joined)),
        excess=total / len(joined) if variance else math.nan, z=total / math.sqrt(variance) if variance else math.nan,
        greedy_tokens=greedy, agreement=agreement, tokens_per_second=read / max(seconds, 1e-9),
    )  # fmt: skip
