# Licensed under the Apache License 2.0, see the LICENSE file.

"""Every kind of cache that says it compiles decodes as one graph, and as it does in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from tests.tiny import random_ids, tiny_pair

MAX_LENGTH = 60
KINDS = [
    "int8",
    "int4",
    "offload",
    "window:5",
    "sinks:2+5",
    "h2o:6",
    "snap:6",
    "tova:6",
    "h2o:6,int8",
    "sinks:2+5,int4",
]
MODELS = ["llama", "deepseek_v3"]
QUICK = [("llama", "int8"), ("llama", "sinks:2+5,int4"), ("llama", "h2o:6"), ("deepseek_v3", "int4")]
ALL = [(name, kind) for name in MODELS for kind in KINDS if (name, kind) not in QUICK]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(name: str) -> GPT:
    """Return our model of a row, in float64: rounding must not turn one code of few bits into the next."""
    return copy.deepcopy(tiny_pair(name)[1]).double()


def filled_cache(model: GPT, kind: str, prompts: list[int]) -> KVCache:
    cache = KVCache.from_config(model.config, kind, len(prompts), MAX_LENGTH, torch.float64)
    model(random_ids((len(prompts), max(prompts))), cache=cache, step=cache.plan(prompts))
    return cache


def decode_both(model: GPT, decode: CompiledDecode, compiled: KVCache, eager: KVCache, n_steps: int) -> None:
    """Feed the same tokens through the compiled step and through the plain one."""
    tokens = random_ids((compiled.batch_size, n_steps), seed=1)
    for t in range(n_steps):
        idx = tokens[:, t : t + 1]
        actual = decode(idx, compiled, compiled.plan(1))
        expected = model(idx, cache=eager, step=eager.plan(1))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert compiled.lengths == eager.lengths


@pytest.mark.parametrize(("name", "kind"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL)])
@torch.no_grad()
def test_many_steps_are_one_graph(name: str, kind: str) -> None:
    """A bounded kind holds at most 23 slots here, so rings wrap and evicting kinds evict; then ragged rows follow."""
    model = model_of(name)
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(model, backend=counter)
    caches = [filled_cache(model, kind, [9, 9]) for _ in range(2)]
    assert caches[0].compilable
    decode_both(model, decode, *caches, 24)
    assert counter.frame_count == 1
    for cache in caches:  # a row starts again: ragged from here on
        cache.reset_row(1)
    decode_both(model, decode, *caches, 3)
    for cache in caches:  # and is forked
        cache.import_row(1, cache.export_row(0))
        cache.rewind(min(2, cache.max_rewind(0)))
    decode_both(model, decode, *caches, 2)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "h2o:6,int8"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_inductor(name: str, kind: str) -> None:
    model = model_of(name)
    decode_both(model, CompiledDecode(model), *(filled_cache(model, kind, [9, 4]) for _ in range(2)), 12)
