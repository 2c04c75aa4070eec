# Licensed under the Apache License 2.0, see the LICENSE file.

"""Backward through several chunks with a cache in place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

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


# What comes between a step with gradients and its backward pass must not change what the backward pass needs


def go_on(model: GPT, cache: KVCache) -> None:
    """In place, over the end of a ring, and as a long chunk."""
    for n in (1, 3, 9):
        model(random_ids((2, n), 5, VOCABULARY), cache=cache)


def rewind(model: GPT, cache: KVCache) -> None:
    cache.rewind(min(cache.max_rewind(row) for row in range(2)))
    go_on(model, cache)


def reset_row(model: GPT, cache: KVCache) -> None:
    cache.reset_row(1)
    model(random_ids((2, 2), 5, VOCABULARY), cache=cache, step=cache.plan([0, 2]))


def reset(model: GPT, cache: KVCache) -> None:
    cache.reset()
    go_on(model, cache)


def fork(model: GPT, cache: KVCache) -> None:
    cache.import_row(1, cache.export_row(0))
    go_on(model, cache)


def fail(model: GPT, cache: KVCache) -> None:
    handle = model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(random_ids((2, 2), 5, VOCABULARY), cache=cache)
    handle.remove()


BETWEEN = [go_on, rewind, reset_row, reset, fork, fail]
PENDING = [
    *itertools.product(["dense", "h2o:6"], BETWEEN, [torch.no_grad, torch.inference_mode]),
    *itertools.product(["window:5", "dense"], BETWEEN, [torch.enable_grad]),
    ("window:5", go_on, torch.no_grad),
    ("offload", go_on, torch.no_grad),
]


@pytest.mark.parametrize(("kind", "between", "mode"), PENDING)
def test_a_pending_backward_pass_gets_what_it_saw(
    kind: str, between: Callable[[GPT, KVCache], None], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, ids = copy.deepcopy(model_of("grouped")), random_ids((2, 10), 0, VOCABULARY)
    expected = gradients(model, run(model, cache_of(model, kind, batch_size=2), ids, [7, 2, 1]), ids)
    cache = cache_of(model, kind, batch_size=2)
    logits = run(model, cache, ids, [7, 2, 1])
    with mode():
        between(model, cache)
    actual = gradients(model, logits, ids)
    for name, grad in expected.items():
        close(actual[name], grad)
    cache.reset()  # and serves the next sequence
    actual = gradients(model, run(model, cache, ids, [7, 2, 1]), ids)
    for name, grad in expected.items():
        close(actual[name], grad)


@pytest.mark.parametrize("trained", ["q_b_proj", "sinks", "wte"])
def test_keys_without_a_gradient_may_be_needed_by_others(trained: str) -> None:
    """A trained query saves the keys for its backward pass, though the keys are constants."""
    model = copy.deepcopy(model_of("mixed_sinks" if trained == "sinks" else "latent"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids = random_ids((2, LENGTH), 0, VOCABULARY)
    expected = gradients(model, model(ids), ids)
    assert expected
    cache = cache_of(model, "dense", batch_size=2)
    actual = gradients(model, run(model, cache, ids, CHUNKS["mixed"]), ids)
    for name, grad in expected.items():
        close(actual[name], grad)
    first = run(model, cache_of(model, "dense", batch_size=2), ids[:, :9], [7, 2])
    expected = gradients(model, first, ids[:, :9])
    cache.reset()
    first = run(model, cache, ids[:, :9], [7, 2])
    with torch.no_grad():
        go_on(model, cache)
    actual = gradients(model, first, ids[:, :9])
    for name, grad in expected.items():
        close(actual[name], grad)


@pytest.mark.parametrize("kind", ["dense", "window:30"])
def test_a_step_without_gradients_does_not_cut_off_earlier_ones(kind: str) -> None:
    """Tokens of the middle chunk are constants to later ones; those before them still get a gradient."""
    model, ids = copy.deepcopy(model_of("grouped")), random_ids((2, 12), 0, VOCABULARY)
    keys: list[Tensor] = []

    def project(
        *args: Tensor, inner: Callable[..., tuple[Tensor, ...]] = model.transformer.h[0].attn.project
    ) -> object:
        parts = inner(*args)
        keys.append(parts[1])
        return parts

    model.transformer.h[0].attn.project = project
    cache = cache_of(model, kind, batch_size=2)
    for start, stop in ((0, 4), (4, 8), (8, 12)):
        with torch.set_grad_enabled(start != 4):
            logits = model(ids[:, start:stop], cache=cache)
    first, middle, _ = keys
    assert not middle.requires_grad
    (grad,) = torch.autograd.grad(logits.logsumexp(-1).sum(), first, retain_graph=True)
    assert (grad.abs().sum((0, 1, 3)) > 0).all()


def test_positions_that_start_again_leave_the_last_sequence_behind() -> None:
    model = copy.deepcopy(model_of("grouped"))
    model.set_kv_cache(2, dtype=torch.float64)
    for seed in range(2):
        ids = random_ids((2, 12), seed, VOCABULARY)
        expected = gradients(model, model(ids), ids)
        parts = [model(ids[:, pos], input_pos=pos) for pos in torch.arange(12).split([7, 4, 1])]
        actual = gradients(model, torch.cat(parts, dim=1), ids)
        for name, grad in expected.items():
            close(actual[name], grad)


def test_without_gradients_the_buffers_stay_where_they_are() -> None:
    """Copies are for training only, and end with it."""
    model, ids = model_of("grouped"), random_ids((2, 4), 0, VOCABULARY)
    cache = cache_of(model, "dense", batch_size=2)
    run(model, cache, ids, [4])
    cache.reset()
    with torch.no_grad():
        run(model, cache, ids, [4])
        places = [buffer.data_ptr() for buffer in cache.buffers()]
        go_on(model, cache)
        model(ids, cache=cache, step=cache.plan([1, 4]))
        cache.rewind([1, 0])
    assert [buffer.data_ptr() for buffer in cache.buffers()] == places
    assert not any(buffer.requires_grad for buffer in cache.buffers())
