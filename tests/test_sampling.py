# Licensed under the Apache License 2.0, see the LICENSE file.

from __future__ import annotations

import math

import pytest
import torch

from litgpt.errors import UserError
from litgpt.generate.sampling import Sampler, draw, logprobs_of, penalize, pick_all
from litgpt.generate.types import SamplingParams

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def support(logits: torch.Tensor, n: int = 300, **kwargs: float) -> set[int]:
    generator = seeded()
    return {int(draw(logits, generator=generator, **kwargs)[0]) for _ in range(n)}


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {1}),
        ({"top_p": 0.0}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"temperature": 1e-30}, {1}),
    ],
)
def test_which_tokens_may_come(settings: dict, ids: set[int]) -> None:
    assert support(LOGITS, **settings) == ids


def test_frequencies_follow_the_probabilities() -> None:
    generator = seeded()
    counts = torch.zeros(4)
    for _ in range(20_000):
        counts[draw(LOGITS, generator=generator)[0]] += 1
    torch.testing.assert_close(counts / 20_000, LOGITS.exp(), atol=0.012, rtol=0)


@pytest.mark.parametrize("flat", [True, False])
def test_top_p_of_a_large_vocabulary(flat: bool) -> None:
    """The shortcut for the usual nucleus and the full sort agree with the definition."""
    n = 5000
    logits = torch.randn(n, generator=seeded()) * (0.01 if flat else 4.0)
    probs, order = logits.softmax(-1).sort(descending=True)
    allowed = set(order[(probs.cumsum(-1) - probs) < 0.7].tolist())
    assert (len(allowed) > 1024) == flat
    chosen = support(logits, n=200, top_p=0.7)
    assert chosen <= allowed
    assert len(chosen) > 1


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 2.0}]
)
def test_nan_logits_are_named(settings: dict) -> None:
    logits = torch.randn(2, 10)
    logits[1, 4] = math.nan
    samplers: list = [Sampler(SamplingParams(**settings), [1], 10, CPU) for _ in range(2)]
    with pytest.raises(ValueError, match=r"logits contain NaN \(row 1\)"):
        pick_all(logits, samplers)
    pick_all(logits, [samplers[0], None])  # an idle row may hold anything


def test_rows_do_not_influence_each_other() -> None:
    settings = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_k=4, repetition_penalty=1.5),
    ]
    logits = torch.randn(20, 3, 50, generator=seeded())
    together = [Sampler(p, [3], 50, CPU) for p in settings]
    picks = [pick_all(step, together)[1] for step in logits]
    for i, p in enumerate(settings):
        alone = Sampler(p, [3], 50, CPU)
        assert [pick_all(step[i : i + 1], [alone])[1][0] for step in logits] == [pick[i] for pick in picks]


def test_seed_none_follows_the_global_generator() -> None:
    def ids() -> list[int]:
        torch.manual_seed(5)
        sampler = Sampler(SamplingParams(), [], 50, CPU)
        return [pick_all(torch.zeros(1, 50), [sampler])[1][0] for _ in range(8)]

    assert ids() == ids()


def test_repetition_penalty() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    seen = torch.tensor([True, True, False])
    assert penalize(logits, seen, 4.0).tolist() == [0.5, -8.0, 1.0]
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=4.0), [1], 3, CPU)
    assert [int(sampler.pick(logits)[0]) for _ in range(2)] == [0, 2]


def test_logprobs() -> None:
    logprob = logprobs_of(LOGITS, 3, 2)
    assert logprob.token_id == 3
    assert math.exp(logprob.logprob) == pytest.approx(0.3)
    assert [i for i, _ in logprob.top] == [1, 3]
    assert logprobs_of(LOGITS, 3, 0).top == []


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": -1},
        {"logprobs": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop_sequences": ((),)},
    ],
)
def test_settings_outside_their_range(settings: dict) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(UserError, match=name) as error:
        SamplingParams(**settings)
    assert repr(value) in str(error.value)
