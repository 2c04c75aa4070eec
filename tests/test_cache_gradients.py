# Licensed under the Apache License 2.0, see the LICENSE file.

"""Backward through several chunks with a cache in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from litgpt.kvcache import KVCache
from litgpt.model import GPT
from tests.tiny import random_ids
from tests.tiny_cached import TOLERANCE, VOCABULARY, cache_of, close, model_of

LENGTH = 24
CHUNKS = {"in place": [3] * 8, "long chunks": [14, 10], "mixed": [11, 2, 1, 7, 3]}


def gradients(model: GPT, logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: GPT, cache: KVCache, ids: Tensor, chunks: list[int]) -> Tensor:
    outs = [model(part, cache=cache, step=cache.plan(part.size(1))) for part in ids.split(chunks, dim=1)]
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", ["dense", "window:5", "h2o:64", "tova:64"])
@pytest.mark.parametrize("feature", ["grouped", "mixed_softcap", "latent"])
def test_gradients_through_chunks_equal_those_of_the_full_forward(feature: str, kind: str, chunks: str) -> None:
    """Exact kinds, and evicting ones that have room for everything."""
    model = copy.deepcopy(model_of(feature))
    if kind.startswith("window"):
        for block in model.transformer.h:
            block.attn.window = block.attn.window or 5
    ids = random_ids((2, LENGTH), 0, VOCABULARY)
    expected = gradients(model, model(ids), ids)
    actual = gradients(model, run(model, cache_of(model_of(feature), kind, batch_size=2), ids, CHUNKS[chunks]), ids)
    assert actual.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, grad in expected.items():
        close(actual[name], grad, TOLERANCE)


@pytest.mark.parametrize("chunks", ["mixed"])
@pytest.mark.parametrize("kind", ["dense", "window:7", "sinks:2+5", "h2o:7", "snap:7", "tova:7"])
def test_a_cache_serves_one_sequence_after_the_other(kind: str, chunks: str) -> None:
    """Gradients flow through what is kept; after a reset nothing of the last backward pass is left."""
    model = copy.deepcopy(model_of("grouped"))
    cache = cache_of(model, kind, batch_size=2)
    for seed in range(2):
        ids = random_ids((2, LENGTH), seed, VOCABULARY)
        actual = gradients(model, run(model, cache, ids, CHUNKS[chunks]), ids)
        fresh = gradients(model, run(model, cache_of(model, kind, batch_size=2), ids, CHUNKS[chunks]), ids)
        for name, grad in fresh.items():
            assert torch.isfinite(grad).all()
            close(actual[name], grad)
        cache.reset()
    with torch.no_grad():  # and then without gradients
        run(model, cache, ids, CHUNKS[chunks])
