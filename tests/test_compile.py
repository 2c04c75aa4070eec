# Licensed under the Apache License 2.0, see the LICENSE file.

"""Decoding compiles to one graph, whatever the number of steps, rings past their wrap included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.model import GPT
from tests.tiny import random_ids, tiny_pair

MAX_LENGTH = 48
PROMPT = 9
STEPS = 20  # windows of 5 and 6 with a slack of 3: the rings wrap several times


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def filled_cache(model: GPT, prompts: list[int]) -> KVCache:
    """Build a cache with small rings that holds a prompt a row, of the given lengths."""
    specs = [LayerSpec.from_config(model.config, i, MAX_LENGTH, slack=3) for i in range(model.config.n_layer)]
    cache = KVCache(specs, len(prompts), torch.float32)
    model(random_ids((len(prompts), max(prompts))), cache=cache, step=cache.plan(prompts))
    return cache


def compare_with_eager(model: GPT, decode: CompiledDecode, prompts: list[int], n_steps: int) -> None:
    """Decode the same tokens through the compiled step and through the plain one."""
    caches = [filled_cache(model, prompts) for _ in range(2)]
    tokens = random_ids((len(prompts), n_steps), seed=1)
    for t in range(n_steps):
        idx = tokens[:, t : t + 1]
        compiled = decode(idx, caches[0], caches[0].plan(1))
        eager = model(idx, cache=caches[1], step=caches[1].plan(1))
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=0)
    assert caches[0].lengths == caches[1].lengths == [n + n_steps for n in prompts]


# four kinds of layers in every run, the other families among the slow tests
ONE_GRAPH = ["llama", "gemma3_text", "mixtral", "deepseek_v3"]
MORE = ["mistral_window", "qwen3_moe", "gpt_oss", "phi3", "gpt2", "cohere2", "ministral3", "olmoe"]


@pytest.mark.parametrize("name", [*ONE_GRAPH, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
@torch.no_grad()
def test_many_steps_are_one_graph(name: str) -> None:
    _, model = tiny_pair(name)
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(model, backend=counter)
    compare_with_eager(model, decode, [PROMPT], STEPS)
    assert counter.frame_count == 1
    compare_with_eager(model, decode, [4], 3)  # another cache of the same size: the same graph
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
@torch.no_grad()
def test_ragged_rows_are_one_graph(name: str) -> None:
    _, model = tiny_pair(name)
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(model, backend=counter)
    compare_with_eager(model, decode, [PROMPT, 3, 17], 12)
    compare_with_eager(model, decode, [5, 5, 5], 3)  # rows that agree take the same graph
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_GRAPH)
@torch.no_grad()
def test_inductor(name: str) -> None:
    _, model = tiny_pair(name)
    decode = CompiledDecode(model)
    compare_with_eager(model, decode, [PROMPT], STEPS)
