# Licensed under the Apache License 2.0, see the LICENSE file.

"""Every kind of cache that says it compiles decodes as one graph, and as it does in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from tests.test_kinds import kinds
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


def filled_cache(model: GPT, kind: str, prompts: Sequence[int]) -> KVCache:
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


def ragged_life(model: GPT, decode: CompiledDecode, kind: str, batch_size: int) -> None:
    """Decode rows of many lengths, and on after all that may happen to them, as in eager mode."""
    caches = [filled_cache(model, kind, range(5, 5 + batch_size)) for _ in range(2)]
    tokens = iter(random_ids((100, batch_size, 1), seed=batch_size))

    def decode_both_ways(counts: list[int]) -> None:
        idx = next(tokens)
        actual = decode(idx, caches[0], caches[0].plan(counts))
        expected = model(idx, cache=caches[1], step=caches[1].plan(counts))
        for row, n in enumerate(counts):
            if n:
                torch.testing.assert_close(actual[row], expected[row], atol=1e-5, rtol=0)

    last = batch_size - 1
    every, only_last = [1] * batch_size, [0] * last + [1]
    for _ in range(3):
        decode_both_ways(every)
    decode_both_ways(only_last)  # the others rest
    for cache in caches:
        cache.rewind([min(2 + row % 2, cache.max_rewind(row)) for row in range(batch_size)])
    decode_both_ways(every)
    for cache in caches:
        cache.reset_row(0)
    decode_both_ways(every)
    for cache in caches:
        cache.import_row(0, cache.export_row(last))
    decode_both_ways(every)
    for cache in caches:
        cache.reset()
    decode_both_ways(every)
    assert caches[0].lengths == caches[1].lengths == every


MANY = range(1, 10)  # more than the graphs that torch allows by default
SINGLE = dict.fromkeys([*kinds(stores=["plain"]), *kinds(policies=["dense"])])
SIZES = [
    *(("llama", kind, MANY) for kind in SINGLE),
    *(("llama", kind, (1, 3)) for kind in kinds() if kind not in SINGLE),
    *(("gemma3_text", kind, MANY) for kind in ("dense", "sinks:2+5", "tova:7")),
    *(("deepseek_v3", kind, MANY) for kind in ("dense", "window:7", "h2o:7,int8")),
    *(("mixtral", kind, MANY) for kind in ("dense", "snap:7")),
]


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [("llama", "h2o:7", (1, 2)), *(pytest.param(*row, marks=pytest.mark.slow) for row in SIZES)],
)
@torch.no_grad()
def test_one_graph_a_batch_size(name: str, kind: str, sizes: Sequence[int]) -> None:
    """And no further one, however the rows live on, when a size comes back, or in another cache of that size."""
    model = model_of(name)
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(model, backend=counter)
    for n_graphs, batch_size in enumerate(sizes, start=1):
        ragged_life(model, decode, kind, batch_size)
        assert counter.frame_count == n_graphs, f"batch size {batch_size}"
    for batch_size in (sizes[0], sizes[-1]):
        ragged_life(model, decode, kind, batch_size)
    assert counter.frame_count == len(sizes)


def test_every_compilable_kind_is_counted() -> None:
    config = tiny_pair("llama")[1].config
    compilable = {kind for kind in kinds() if KVCache.from_config(config, kind, device="meta").compilable}
    assert compilable == {kind for name, kind, _ in SIZES if name == "llama"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "h2o:6,int8"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_inductor(name: str, kind: str) -> None:
    model = model_of(name)
    decode_both(model, CompiledDecode(model), *(filled_cache(model, kind, [9, 4]) for _ in range(2)), 12)
