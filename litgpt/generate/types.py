# Licensed under the Apache License 2.0, see the LICENSE file.

"""What goes into the decoding engine and what comes out of it; free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from litgpt.errors import UserError

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class SamplingParams:
    """How one row of a batch is continued.

    The order is repetition penalty, `top_k`, `temperature`, `top_p`, `min_p`.

    Args:
        max_new_tokens: budget of new tokens; None means up to the model's context.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: keep only this many of the likeliest tokens; None and 0 keep all.
        top_p: keep the smallest set of likeliest tokens with at least this probability; 0 keeps one, 1 keeps all.
        min_p: keep tokens with at least this fraction of the likeliest one's probability.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (https://arxiv.org/abs/1909.05858).
        seed: seed of the row's own generator; None takes one from torch's global generator.
        stop_ids: token ids that end the row; None means the tokenizer's.
        stop_sequences: sequences of token ids that end the row.
        stop: strings that end the row, wherever the borders of the tokens lie.
        include_stop: keep in the output what ended the row; otherwise it is hidden.
        logprobs: None for no log-probabilities, n for the chosen token's and those of the n likeliest.

    Raises:
        UserError: a value outside its range.
    """

    max_new_tokens: int | None = 50
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_new_tokens is None or self.max_new_tokens >= 0, "max_new_tokens", self, "at least 0")
        _require(0 <= self.temperature < math.inf, "temperature", self, "a finite number of at least 0")
        _require(self.top_k is None or self.top_k >= 0, "top_k", self, "at least 0 (0 or None: off)")
        _require(0 <= self.top_p <= 1, "top_p", self, "in [0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self, "in [0, 1]")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self, "a finite number above 0")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self, "a number of 64 bits")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self, "at least 0")
        _require(all(self.stop), "stop", self, "without empty strings")
        _require(all(self.stop_sequences), "stop_sequences", self, "without empty sequences")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1


def _require(holds: bool, name: str, params: SamplingParams, must_be: str) -> None:
    if not holds:
        raise UserError(f"{name} must be {must_be}, got {getattr(params, name)!r}")


class TokenLogprob(NamedTuple):
    """Natural log-probabilities at one position, from the model's unmodified logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, best first


@dataclass
class Timing:
    """Wall time of the batch a row was part of. The first new token is prefill's, the others are decode's."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0  # tokens computed, hidden stop tokens included
    steps: int = 0  # forward passes of decode that the row took part in
    drafted: int = 0  # tokens proposed to speculative decoding, and those of them that the model agreed with
    accepted: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, without the first."""
        return max(self.new_tokens - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per forward pass of decode: 1, and more with speculative decoding."""
        return max(self.new_tokens - 1, 0) / self.steps if self.steps else 0.0


@dataclass
class Result:
    """What one row gave.

    `finish_reason` is "stop" (a stop id, sequence or string came), "length" (the budget is used up) or "context" (the
    model's longest sequence is reached). When a stop string begins inside a token, that token is the last of
    `token_ids` and `text` holds only its beginning.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    timing: Timing = field(default_factory=Timing)


class Event(NamedTuple):
    """One piece of a stream: a token, some text that has become certain, or both."""

    row: int
    text: str
    token_id: int | None


def as_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Normalise what people pass as `stop`: one string, several, or None."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
