# Licensed under the Apache License 2.0, see the LICENSE file.

"""Exported rows, and the store of rows: what comes from the store is what would have been computed."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.errors import UserError
from litgpt.generate.engine import Engine
from litgpt.generate.types import Result, SamplingParams
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.prefix import PrefixStore
from litgpt.kvcache.rows import RowState
from litgpt.model import GPT
from tests.tiny import random_ids, tiny_pair
from tests.tiny_text import tiny_config

CHUNK = 20  # longer than the slack of rings, so that long chunks happen
KINDS = ["dense", "window:10", "sinks:2+9", "h2o:12", "snap:12", "tova:12", "int8", "h2o:12,int8"]
MODELS = ["llama", "gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "phi3"))]


@functools.cache
def model_of(name: str) -> GPT:
    return copy.deepcopy(tiny_pair(name)[1]).double()


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random_ids((length,), seed).tolist()


def feed(model: GPT, cache: KVCache, rows: list[list[int]]) -> Tensor:
    """Append `rows` and return the logits after each."""
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return model(padded, cache=cache, step=cache.plan([len(row) for row in rows]), last_only=True)[:, 0]


def filled(kind: str, n: int, max_length: int = 60, name: str = "llama") -> KVCache:
    """A cache with a row of `n` tokens and an empty one."""
    cache = KVCache.from_config(model_of(name).config, kind, 2, max_length, torch.float64)
    for i in range(0, n, CHUNK):
        feed(model_of(name), cache, [tokens_of(n)[i : i + CHUNK], []])
    return cache


# Rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_fork_goes_on_like_the_original(kind: str, name: str) -> None:
    cache = filled(kind, 40, name=name)
    feed(model_of(name), cache, [[], tokens_of(50, seed=9)])  # what is overwritten was longer
    cache.import_row(1, cache.export_row(0))
    assert cache.lengths == [40, 40]
    for token in tokens_of(6, seed=1):
        logits = feed(model_of(name), cache, [[token], [token]])
        torch.testing.assert_close(logits[0], logits[1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_exported_rows_hold_the_used_slots_only(kind: str) -> None:
    cache = filled(kind, 5, max_length=500)
    per_slot = sum(layer.nbytes() / 2 / (layer.slots + 1) for layer in cache.layer_caches())
    assert cache.export_row(0).nbytes == 5 * per_slot
    assert cache.export_row(1).nbytes == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_row_goes_to_a_cache_of_another_length(kind: str, name: str) -> None:
    state = filled(kind, 20, 60, name).export_row(0)
    caches = [filled(kind, 20, 60, name), KVCache.from_config(model_of(name).config, kind, 2, 100, torch.float64)]
    caches[1].import_row(0, state)
    for token in tokens_of(12, seed=1):
        logits = [feed(model_of(name), cache, [[token], []])[0] for cache in caches]
        torch.testing.assert_close(*logits, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_wrapped_ring_goes_to_an_equal_ring_only() -> None:
    state = filled("window:10", 40).export_row(0)
    other = KVCache.from_config(model_of("llama").config, "window:10", 1, 400, torch.float64)
    other.import_row(0, state)
    short = KVCache.from_config(model_of("llama").config, "window:10", 1, 24, torch.float64)
    with pytest.raises(ValueError, match="40 tokens does not fit a KV cache of 24"):
        short.import_row(0, state)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("window:10", torch.float64, "was made for"),
        ("h2o:12", torch.float64, "another way"),
        ("dense", torch.float32, "another dtype"),
        ("int8", torch.float64, "another way"),
    ],
)
@torch.no_grad()
def test_rows_of_another_kind_are_refused_and_change_nothing(kind: str, dtype: torch.dtype, message: str) -> None:
    state = filled("dense", 7).export_row(0)
    other = KVCache.from_config(model_of("llama").config, kind, 1, 60, dtype)
    with pytest.raises(ValueError, match=message):
        other.import_row(0, state)
    assert other.lengths == [0]


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="layers"):
        filled("dense", 7, name="gemma3_text").import_row(0, filled("dense", 7).export_row(0))


@pytest.mark.parametrize("n", [36, 40])
@torch.no_grad()
def test_a_row_cut_short_is_the_row_rewound(n: int) -> None:
    for name, kind in (("gemma3_text", "dense"), ("llama", "window:10"), ("llama", "int8")):
        cache = filled(kind, 40, name=name)
        other = KVCache.from_config(model_of(name).config, kind, 2, 60, torch.float64)
        other.import_row(0, cache.export_row(0).cut(n))
        cache.rewind([40 - n, 0])
        assert other.max_rewind(0) == cache.max_rewind(0)
        for buffer, expected in zip(other.buffers(), cache.buffers(), strict=True):
            assert torch.equal(buffer[0, :, :-1], expected[0, :, :-1])
        with pytest.raises(ValueError, match="cannot rewind 41"):
            cache.export_row(0).cut(cache.lengths[0] - 41)


# The trie


def made_up(length: int, max_rewind: int, n_bytes: int = 8) -> RowState:
    spec = LayerSpec(groups=n_bytes, k_dim=1, v_dim=1, max_length=100)
    return RowState(length, length, max_rewind, (spec,), {"layers.0.x": torch.zeros(n_bytes, 1, dtype=torch.uint8)})


@pytest.mark.parametrize("rewind", [0, 3, 1000])
def test_lookup_finds_the_longest_usable_prefix(rewind: int) -> None:
    random.seed(rewind)
    store = PrefixStore(10**6)
    known: dict[tuple[int, ...], RowState] = {}
    for _ in range(300):
        tokens = tuple(random.choices((1, 2), k=random.randint(1, 12)))
        found, n = store.lookup(tokens)
        expected = max(
            (
                common
                for other, state in known.items()
                if (common := agreement(other, tokens)) and len(other) - common <= state.max_rewind
            ),
            default=0,
        )
        assert n == expected
        assert (0 if found is None else found.length) == n
        known[tokens] = made_up(len(tokens), min(rewind, len(tokens)))
        assert store.insert(tokens, known[tokens])
    assert store.nbytes == 8 * len(store)


def agreement(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_least_recently_used_rows_go_first() -> None:
    store = PrefixStore(24)
    for first in (1, 2, 3):
        store.insert([first, 0], made_up(2, 0))
    store.lookup([1, 0, 5])
    store.insert([4, 0], made_up(2, 0))
    assert [store.lookup([i, 0, 5])[1] for i in (1, 2, 3, 4)] == [2, 0, 2, 2]
    assert not store.insert([5, 0], made_up(2, 0, n_bytes=25))
    assert store.insert([5, 0], made_up(2, 0, n_bytes=24))
    assert (len(store), store.nbytes, store.stats.evicted) == (1, 24, 4)
    store.clear()
    assert (len(store), store.nbytes, store.lookup([5, 0])) == (0, 0, (None, 0))


def test_a_row_makes_way_for_a_longer_one_that_can_do_the_same() -> None:
    store = PrefixStore(1000)
    for n in (2, 3, 4):
        store.insert(range(n), made_up(n, n))
    assert len(store) == 1
    assert store.insert(range(3), made_up(3, 3))
    assert len(store) == 1
    for n in (5, 6):
        store.insert(range(n), made_up(n, 0))
    assert len(store) == 3


def test_scopes_do_not_mix() -> None:
    store = PrefixStore(1000)
    store.insert([1, 2], made_up(2, 2), scope="a")
    assert store.lookup([1, 2, 3], scope="b") == (None, 0)
    assert store.lookup([1, 2, 3], scope="a")[1] == 2


# The engine


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Result]:
    settings = SamplingParams(
        **{"max_new_tokens": 6, "temperature": 0, "logprobs": 3, "stop_ids": frozenset(), **params}
    )
    return engine.generate(prompts, settings)


def conversation() -> list[list[list[int]]]:
    """Batches of prompts that repeat, extend, shorten and branch off from each other."""
    base = tokens_of(44)
    return [
        [base[:42]],
        [base[:42], base[:25]],
        [[*base[:30], 7, 8, 9], base[:44], base[:3]],
        [base[:21], tokens_of(41, seed=5), [*base[:40], 3]],
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_without_a_store(kind: str, name: str) -> None:
    store = PrefixStore(2**30)
    plain = Engine(model_of(name), kv_cache=kind, prefill_chunk=CHUNK)
    stored = Engine(model_of(name), kv_cache=kind, prefill_chunk=CHUNK, prefix_store=store)
    for prompts in conversation():
        for a, b in zip(answers(plain, prompts), answers(stored, prompts), strict=True):
            assert a.token_ids == b.token_ids
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-10)
    assert store.stats.lookups == 9
    assert store.stats.hits >= 4
    assert f"{store.stats.tokens_saved} of {store.stats.tokens} tokens saved" in store.report()


def test_only_what_is_not_stored_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    fed: list[int] = []
    forward = GPT.forward

    def counting(self: GPT, idx: Tensor, **kwargs: Any) -> Any:
        fed.append(idx.numel())
        return forward(self, idx, **kwargs)

    monkeypatch.setattr(GPT, "forward", counting)
    engine = Engine(model, prefix_store=PrefixStore(2**30))
    (first,) = answers(engine, [tokens_of(40)])
    assert fed == [40, 1, 1, 1, 1, 1]
    del fed[:]
    answers(engine, [tokens_of(40) + first.token_ids[:5] + [3, 4]])  # the conversation goes on
    assert fed[0] == 2


def test_a_store_belongs_to_one_model() -> None:
    store = PrefixStore(1000)
    Engine(model_of("llama"), prefix_store=store)
    Engine(model_of("llama"), prefix_store=store, kv_cache="window:10")
    with pytest.raises(UserError, match="another model"):
        Engine(model_of("gemma3_text"), prefix_store=store)
    with pytest.raises(UserError, match="0 bytes"):
        PrefixStore(0)


def test_training_empties_the_store() -> None:
    model, store = copy.deepcopy(model_of("llama")), PrefixStore(2**30)
    prompts = [tokens_of(30)]
    answers(Engine(model, prefix_store=store), prompts)
    answers(Engine(model, prefix_store=store), prompts)
    assert store.stats.hits == 1
    with torch.no_grad():
        model.transformer.wte.weight.mul_(2)
    (after,) = answers(Engine(model, prefix_store=store), prompts)
    assert store.stats.hits == 1
    assert after.token_ids == answers(Engine(model), prompts)[0].token_ids


def test_a_store_that_is_too_small_changes_nothing() -> None:
    engine = Engine(model_of("llama"), prefix_store=PrefixStore(10))
    prompts = [tokens_of(30)]
    assert answers(engine, prompts)[0].token_ids == answers(engine, prompts)[0].token_ids
    assert engine.prefix_store is not None
    assert len(engine.prefix_store) == 0


# Beyond the context


def test_sinks_go_on_past_the_context_in_bounded_memory() -> None:
    torch.manual_seed(0)
    model = GPT(tiny_config(block_size=32)).double().eval()
    engine = Engine(model, kv_cache="sinks:2+20")
    (result,) = answers(engine, [tokens_of(50)], max_new_tokens=60)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 60
    (dense,) = answers(Engine(model), [tokens_of(20)], max_new_tokens=150)
    assert (dense.finish_reason, len(dense.token_ids)) == ("context", 12)
    (open_end,) = answers(engine, [tokens_of(20)], max_new_tokens=None)
    assert (open_end.finish_reason, len(open_end.token_ids)) == ("context", 12)

    short, long = (KVCache.from_config(model.config, "sinks:2+20", 1, n).nbytes() for n in (100, 1_000_000))
    assert short == long


def test_past_the_context_positions_are_those_inside_the_cache() -> None:
    """The same tokens in the cache give the same logits wherever they stand in the text (one layer: no traces)."""
    torch.manual_seed(0)
    model = GPT(tiny_config(block_size=32, n_layer=1)).double().eval()
    tail, sinks = tokens_of(21), [5, 6]
    logits = []
    with torch.inference_mode():
        for middle in (0, 300):
            cache = KVCache.from_config(model.config, "sinks:2+20", 1, 400, torch.float64)
            logits.append(feed(model, cache, [sinks + tokens_of(middle, seed=3) + tail])[0])
    # float32 angles of large positions are coarse
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)
