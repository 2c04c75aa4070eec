# Licensed under the Apache License 2.0, see the LICENSE file.

"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from litgpt.generate.types import SamplingParams, TokenLogprob

# On the CPU a full sort of the vocabulary costs as much as a small model's forward; the nucleus is mostly within this.
_NUCLEUS_GUESS = 1024


class Sampler:
    """One row's way of choosing tokens, with a generator of its own.

    Args:
        params: the settings.
        prompt: token ids that a repetition penalty counts as seen.
        vocab_size: number of logits.
        device: where the logits are.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.generator: torch.Generator | None = None
        if not params.greedy:
            seed = params.seed if params.seed is not None else int(torch.randint(2**62, ()))
            self.generator = torch.Generator(device).manual_seed(seed)
        self.seen: torch.Tensor | None = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(prompt, device=device)] = True

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the unmodified logits."""
        return self.generator is None and self.seen is None

    def pick(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose from `(V,)` logits: the token id and a number that is NaN when the logits are, both 0-dim."""
        p = self.params
        token, evidence = draw(
            self._penalized(logits),
            temperature=0.0 if p.greedy else p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            generator=self.generator,
        )
        self.saw(token)
        return token, evidence

    def saw(self, token: int | torch.Tensor) -> None:
        """Count a token as seen, for the repetition penalty."""
        if self.seen is not None:
            self.seen[token] = True

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """With what probability `pick` would choose each token, see `probabilities`."""
        return probabilities(self._penalized(logits), self.params)

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.seen is None else penalize(logits, self.seen, self.params.repetition_penalty)


def pick_all(logits: torch.Tensor, samplers: Sequence[Sampler | None]) -> tuple[torch.Tensor, list[int]]:
    """Choose one token a row; a row whose sampler is None is idle and gets some valid id.

    Args:
        logits: `(B, V)`.
        samplers: one a row.

    Returns:
        The ids as an int64 tensor `(B,)` on the logits' device, and as a list.

    Raises:
        ValueError: the logits of an active row contain NaN.
    """
    if all(s is None or s.plain_greedy for s in samplers):
        evidence, tokens = logits.max(dim=-1)
    else:
        idle = torch.zeros((), dtype=torch.int64, device=logits.device)
        picks = [s.pick(row) if s is not None else (idle, idle) for s, row in zip(samplers, logits, strict=True)]
        tokens = torch.stack([token for token, _ in picks])
        evidence = torch.stack([number.float() for _, number in picks])
    # One transfer from the device a step. Ids are exact in float32 up to 2**24.
    ids, numbers = torch.stack((tokens.float(), evidence.float())).tolist()
    for row, (sampler, number) in enumerate(zip(samplers, numbers, strict=True)):
        if sampler is not None and number != number:
            raise nan_error(row)
    return tokens, [int(i) for i in ids]


def nan_error(row: int) -> ValueError:
    """What to raise for logits that contain NaN."""
    return ValueError(f"logits contain NaN (row {row}): the weights or the precision are at fault")


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose from `(V,)` logits; see `SamplingParams` for the settings.

    Returns:
        The token id and a number that is NaN when the logits contain NaN, both 0-dim and still on the device.
    """
    if temperature == 0 or top_p == 0:
        evidence, token = logits.max(dim=-1)
        return token, evidence
    weights, ids = _weigh(logits, temperature, top_k, top_p, min_p)
    winner = draw_index(weights, generator)
    return (winner if ids is None else ids[winner]), weights[winner]


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """With what probability each token is drawn from `(V,)` logits; the repetition penalty is not applied.

    Returns:
        `(V,)`, of sum 1, in the finest type that the device has.
    """
    dtype = _finest(logits.device)
    if params.greedy:
        return torch.zeros(logits.shape, dtype=dtype, device=logits.device).index_fill_(0, logits.argmax(), 1.0)
    weights, ids = _weigh(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    weights = weights.to(dtype)
    weights = weights / weights.sum()
    return weights if ids is None else weights.new_zeros(logits.shape).scatter_(0, ids, weights)


def _weigh(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of the tokens, which need not sum to 1, and the ids they belong to; None: all ids in order."""
    logits = logits.float()
    values, ids = logits.topk(top_k) if top_k and top_k < logits.shape[-1] else (logits, None)
    # Relative to the largest, so that a tiny temperature cannot overflow
    probs = ((values - values.amax()) / temperature).softmax(-1)
    floor = min_p * probs.amax() if min_p else None
    if top_p < 1:
        if ids is None:
            probs, ids = _nucleus(probs, top_p)
        # Sorted: a token stays while those before it do not yet make up top_p
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    if floor is not None:
        probs = probs.masked_fill(probs < floor, 0.0)
    return probs, ids


def draw_index(probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """An index drawn by `probs`, which need not sum to 1.

    One random number and a running sum cost far less than a random number a token; unlike torch.multinomial, this does
    not wait for the device, and NaN passes through, for the caller to report by name.
    """
    heap = probs.cumsum(-1, dtype=_finest(probs.device))
    mark = uniform(probs.device, generator) * heap[-1]
    # "right": a token without probability has no room between two sums, so it is never found
    return torch.searchsorted(heap, mark, right=True).clamp_max_(probs.shape[-1] - 1)


def uniform(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """A random number in [0, 1), 0-dim."""
    return torch.rand((), dtype=_finest(device), device=device, generator=generator)


def _finest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest probabilities in falling order, at least as many as make up `top_p`, and their ids."""
    if probs.device.type == "cpu" and probs.shape[-1] > 2 * _NUCLEUS_GUESS:
        largest, ids = probs.topk(_NUCLEUS_GUESS)
        if largest.sum() >= top_p:
            return largest, ids
    return probs.sort(descending=True)


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits of the `seen` tokens (bool, `(V,)`) by `penalty`."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def logprobs_of(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of a chosen token and of the `top` likeliest ones, from `(V,)` logits."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    return TokenLogprob(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))
