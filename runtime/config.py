"""Configuration of the runtime. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples and when it ends.

    temperature     0 is greedy; above 0 the logits are divided by it
    top_k           keep the k largest logits (ties with the k-th stay); 0 keeps all
    top_p           then keep the smallest set of largest probabilities whose mass reaches top_p; 1 keeps all
    max_new_tokens  budget of the answer in tokens, the ending token included
    stop            the answer ends where one of these strings appears
    stop_token_ids  the answer ends with one of these tokens, beside the EOS ids of the engine
    ignore_eos      run through EOS up to the budget (timing); stop and stop_token_ids still end the answer
    seed            two requests with equal seed, prompt and settings get equal answers in any batch

    Raises ValueError: one line with the key, the value and the allowed range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "0 or more and finite")
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p!r} is not allowed (a number above 0 and at most 1)")
        _check_int("max_new_tokens", self.max_new_tokens, 1)
        _check_int("seed", self.seed, 0)
        if isinstance(self.stop, str):
            raise ValueError(f"stop: {self.stop!r} is not allowed (a tuple or list of strings)")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: {text!r} is not allowed (strings of at least one character)")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: {self.ignore_eos!r} is not allowed (true or false)")

    @property
    def greedy(self) -> bool:
        """True where the answer does not depend on the seed."""
        return self.temperature == 0.0


def _check_int(key: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_SEED:
        raise ValueError(f"{key}: {value!r} is not allowed (an integer, {low} or more, below 2**63)")


def _check_number(key: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key}: {value!r} is not allowed (a number {allowed})")
