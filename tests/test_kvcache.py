# Licensed under the Apache License 2.0, see the LICENSE file.

"""The exact caches: any chunking, any batch composition, any rewind gives the logits of the cache-free forward pass."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.config import Config
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.model import GPT
from tests.tiny import NAMES, WINDOWED, random_ids, tiny_pair

LENGTH = 36
SLACK = 3
TOLERANCE = 1e-5


@functools.cache
def model_of(name: str) -> GPT:
    """Return our model of a row, in float64 so that any real difference stands out from rounding."""
    return copy.deepcopy(tiny_pair(name)[1]).double()


def small_cache(config: Config, batch_size: int, max_length: int = LENGTH, slack: int = SLACK) -> KVCache:
    """Build an exact cache whose rings are so small that short sequences wrap them."""
    specs = [LayerSpec.from_config(config, i, max_length, slack=slack) for i in range(config.n_layer)]
    return KVCache(specs, batch_size, torch.float64)


def feed(model: GPT, cache: KVCache, rows: list[list[int]]) -> list[Tensor]:
    """Run one forward pass that appends `rows` (ragged) to the cache; the logits of the new tokens of each row."""
    counts = [len(row) for row in rows]
    padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
    logits = model(padded, cache=cache, step=cache.plan(counts))
    assert torch.isfinite(logits).all(), "padding must stay finite too"
    return [logits[b, :n] for b, n in enumerate(counts)]


def full(model: GPT, row: list[int]) -> Tensor:
    """Return the logits of one row without a cache.

    longrope chooses its frequencies by the length a sequence may reach, so such a row is padded to the cache's.
    """
    is_longrope = "long_factor" in (model.config.rope_adjustments or {})
    padding = [0] * (LENGTH - len(row)) if is_longrope else []
    return model(torch.tensor([row + padding]))[0, : len(row)]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def sequence(length: int = LENGTH, seed: int = 0) -> list[int]:
    return random_ids((length,), seed).tolist()


CHUNKINGS = {
    "one chunk": [LENGTH],
    "uneven chunks": [4, 4, 2, 3, 9, 1, 1, 2, 7, 3],  # within the slack of 3 and beyond, across the wrap of the rings
    "token by token": [1] * LENGTH,
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_any_chunking_equals_the_full_forward(name: str, chunking: str) -> None:
    model, tokens = model_of(name), sequence()
    cache = small_cache(model.config, 1)
    start, logits = 0, []
    for n in CHUNKINGS[chunking]:
        logits += feed(model, cache, [tokens[start : start + n]])
        start += n
    assert cache.lengths == [LENGTH]
    close(torch.cat(logits), full(model, tokens))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_ragged_batch_equals_single_runs(name: str) -> None:
    """Rows on either side of a ring's wrap, prefilled together, then decoded, one of them idle now and then."""
    model = model_of(name)
    rows = [sequence(n, seed) for seed, n in enumerate((30, 11, 18))]
    expected = [full(model, row) for row in rows]
    cache = small_cache(model.config, 3)
    done = [0, 0, 0]
    plan = [(14, 3, 5), (5, 1, 0), *[(1, 1, 1)] * 3, (1, 0, 1), (1, 1, 0), (4, 3, 6), (2, 0, 2), (0, 0, 1)]
    for counts in plan:
        outs = feed(model, cache, [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)])
        for b, (out, n) in enumerate(zip(outs, counts, strict=True)):
            close(out, expected[b][done[b] : done[b] + n])
            done[b] += n
    assert cache.lengths == done == [30, 11, 18]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rewind_and_replay(name: str) -> None:
    model, tokens = model_of(name), sequence()
    cache = small_cache(model.config, 1)
    feed(model, cache, [tokens[:20]])
    feed(model, cache, [sequence(SLACK, seed=9)])  # a draft that is rejected
    assert cache.max_rewind(0) >= SLACK
    cache.rewind(SLACK)
    other = tokens[:20] + sequence(16, seed=5)
    (out,) = feed(model, cache, [other[20:22]])
    close(out, full(model, other[:22])[20:])
    cache.rewind(1)
    (out,) = feed(model, cache, [other[21:]])
    close(out, full(model, other)[21:])


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_rewinding_further_than_is_exact_is_refused(name: str) -> None:
    model = model_of(name)
    cache = small_cache(model.config, 2)
    feed(model, cache, [sequence(30), sequence(2)])
    with pytest.raises(ValueError, match=rf"row 0.*{SLACK + 1}.*{SLACK}"):
        cache.rewind([SLACK + 1, 0])
    with pytest.raises(ValueError, match=r"row 1.*3.*2"):
        cache.rewind([0, 3])
    assert cache.lengths == [30, 2]
    cache.rewind([SLACK, 2])
    assert cache.lengths == [27, 0]
    with pytest.raises(ValueError, match=r"row 0.*1.*0"):  # the slots beyond the length hold what was rewound
        cache.rewind([1, 0])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_reset_row_and_reuse(name: str) -> None:
    model = model_of(name)
    cache = small_cache(model.config, 2)
    keep, first, second = sequence(32), sequence(29, seed=1), sequence(13, seed=2)
    feed(model, cache, [keep[:8], first])
    cache.reset_row(1)
    assert cache.lengths == [8, 0]
    outs = feed(model, cache, [keep[8:30], second[:3]])
    close(outs[0], full(model, keep[:30])[8:])
    close(outs[1], full(model, second[:3]))
    outs = feed(model, cache, [keep[30:], second[3:]])
    close(outs[0], full(model, keep)[30:])
    close(outs[1], full(model, second)[3:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_export_and_import_row(name: str) -> None:
    model, tokens = model_of(name), sequence()
    cache = small_cache(model.config, 2)
    feed(model, cache, [tokens[:25], sequence(7, seed=1)])
    state = cache.export_row(0)
    feed(model, cache, [sequence(4, seed=2), []])
    cache.import_row(1, state)
    (_, out) = feed(model, cache, [[], tokens[25:]])
    close(out, full(model, tokens)[25:])


@pytest.mark.parametrize("name", NAMES)
def test_allocated_bytes_equal_the_estimate(name: str) -> None:
    config = tiny_pair(name)[1].config
    for batch_size, max_length, dtype in [(1, 64, torch.float32), (3, 17, torch.bfloat16)]:
        kwargs = {"batch_size": batch_size, "max_length": max_length, "dtype": dtype}
        cache = KVCache.from_config(config, "dense", **kwargs)
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in cache.buffers()}
        assert KVCache.estimate(config, "dense", **kwargs) == cache.nbytes() == sum(storages.values())


def test_sliding_layers_hold_their_window_only() -> None:
    config = tiny_pair("mistral_window")[1].config
    short, long = (KVCache.estimate(config, max_length=n) for n in (64, 4096))
    assert short == long
    mixed = tiny_pair("gemma3_text")[1].config  # one of four layers is global
    per_token = 2 * mixed.n_query_groups * mixed.head_size * 4
    assert KVCache.estimate(mixed, max_length=1064) - KVCache.estimate(mixed, max_length=64) == 1000 * per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_bytes_per_token(dtype: torch.dtype) -> None:
    """One latent and one rotated key a token and layer, whatever the number of heads."""
    config = tiny_pair("deepseek_v3")[1].config
    short, long = (KVCache.estimate(config, max_length=n, dtype=dtype) for n in (20, 50))
    per_token = (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize * config.n_layer
    assert long - short == 30 * per_token


def test_long_contexts_allocate_nothing_quadratic() -> None:
    model = GPT(toy_config(block_size=131072))
    model.set_kv_cache(1, 131072)
    largest = max(t.numel() for t in [*model.buffers(), *(b for b in model.kv_cache.buffers())])
    assert largest <= 4 * 131072 * model.config.n_query_groups * model.config.head_size
    with torch.no_grad():
        out = model(torch.tensor([[3]]), input_pos=torch.tensor([0]), input_pos_maxp1=1)
    assert torch.isfinite(out).all()


def toy_config(**overrides: Any) -> Config:
    fields: dict[str, Any] = {
        "n_layer": 1,
        "n_head": 2,
        "n_query_groups": 1,
        "n_embd": 8,
        "vocab_size": 50,
        "padded_vocab_size": 50,
        "block_size": 64,
        "rotary_percentage": 1.0,
    }
    return Config(**{**fields, **overrides})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@torch.no_grad()
def test_two_streams_on_one_model(name: str) -> None:
    """Two live caches advanced in turn do not disturb each other: the model holds no state of a request."""
    model = model_of(name)
    rows = [sequence(LENGTH, seed) for seed in range(2)]
    caches = [small_cache(model.config, 1) for _ in rows]
    expected = [full(model, row) for row in rows]
    for cache, row, n in zip(caches, rows, (5, 12), strict=True):
        feed(model, cache, [row[:n]])
    for _ in range(20):
        for cache, row, want in zip(caches, rows, expected, strict=True):
            at = cache.lengths[0]
            (out,) = feed(model, cache, [row[at : at + 1]])
            close(out, want[at : at + 1])


@pytest.mark.parametrize("how", ["rewind", "reset", "fail"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_stale_nan_does_not_leak(name: str, how: str) -> None:
    """A masked weight of zero times a stale NaN is a NaN: what a rewound, reset or failed step left must not matter."""
    model, poison = copy.deepcopy(model_of(name)), 7
    model.transformer.wte.weight.data[poison] = float("nan")
    head = model.lm_head.weight.detach().clone()  # a tied head is poisoned too
    head[poison] = 0.0
    model.lm_head.weight = torch.nn.Parameter(head)
    tokens = [3 if t == poison else t for t in sequence()]
    bad = [poison] * SLACK

    def run(rows: list[list[int]]) -> list[Tensor]:
        counts = [len(row) for row in rows]
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
        out = model(padded, cache=cache, step=cache.plan(counts))
        return [out[b, :n] for b, n in enumerate(counts)]

    cache = small_cache(model.config, 2)
    run([tokens[:4], tokens[:9]])
    if how == "rewind":
        run([bad, []])
        cache.rewind([SLACK, 0])
    elif how == "reset":
        run([bad, []])
        cache.reset_row(0)
        run([tokens[:4], []])
    else:
        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            run([bad, []])
        handle.remove()
    assert cache.lengths == [4, 9]
    outs = run([tokens[4:5], tokens[9:11]])
    expected = full(model, tokens[:11])
    close(outs[0], expected[4:5])
    close(outs[1], expected[9:11])


@torch.no_grad()
def test_longrope_follows_the_length_that_the_cache_can_hold() -> None:
    """Up to the original length, 16 here, the short factors serve, beyond it the long ones, from the first token on."""
    model, tokens = model_of("phi3"), sequence(12)
    for max_length, expected in [(16, model(torch.tensor([tokens]))[0]), (17, full(model, tokens))]:
        cache = small_cache(model.config, 1, max_length)
        logits = [feed(model, cache, [tokens[:7]])[0], feed(model, cache, [tokens[7:]])[0]]
        close(torch.cat(logits), expected)


def fail(*args: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@torch.no_grad()
def test_a_failing_forward_commits_nothing(name: str) -> None:
    model, tokens = model_of(name), sequence()
    cache = small_cache(model.config, 1)
    feed(model, cache, [tokens[:9]])
    handle = model.transformer.h[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        feed(model, cache, [tokens[9:12]])
    handle.remove()
    assert cache.lengths == [9]
    (out,) = feed(model, cache, [tokens[9:]])
    close(out, full(model, tokens)[9:])


@torch.no_grad()
def test_a_failing_chunk_that_overwrote_a_ring_empties_the_row() -> None:
    """The ring has let go of what came before, so the row cannot go on; the other row, within the slack, can."""
    model, tokens = model_of("mistral_window"), sequence()
    cache = small_cache(model.config, 2)
    feed(model, cache, [tokens[:9], tokens[:9]])
    handle = model.transformer.h[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        feed(model, cache, [tokens[9:], tokens[9:10]])
    handle.remove()
    assert cache.lengths == [0, 9]
    outs = feed(model, cache, [tokens[:5], tokens[9:14]])
    close(outs[0], full(model, tokens[:5]))
    close(outs[1], full(model, tokens[:14])[9:])
    with pytest.raises(ValueError, match="token id 113"):  # refused before anything is written
        model(torch.tensor([[113] * 9] * 2), cache=cache, step=cache.plan(9))
    assert cache.lengths == [5, 14]


def test_plan_refuses_what_does_not_fit_and_commits_nothing() -> None:
    cache = small_cache(model_of("llama").config, 2, max_length=10)
    cache.commit(cache.plan([8, 3]))
    with pytest.raises(ValueError, match=r"row 0.*8 \+ 3 = 11.*10"):
        cache.plan([3, 1])
    with pytest.raises(ValueError, match=r"11.*10"):
        cache.plan(3)
    with pytest.raises(ValueError, match=r"3.*2"):
        cache.plan([1, 1, 1])
    with pytest.raises(ValueError, match=r"-1"):
        cache.plan([-1, 1])
    with pytest.raises(ValueError, match=r"0"):
        cache.plan(0)
    assert cache.lengths == [8, 3]
    cache.plan([2, 7])
    assert cache.lengths == [8, 3]  # planning alone changes nothing


@torch.no_grad()
def test_a_batch_that_does_not_fit_the_cache() -> None:
    model = model_of("llama")
    cache = small_cache(model.config, 2)
    with pytest.raises(ValueError, match=r"3.*2"):
        model(random_ids((3, 4)), cache=cache, step=cache.plan(4))
    with pytest.raises(ValueError, match=r"4 tokens.*5"):
        model(random_ids((2, 5)), cache=cache, step=cache.plan(4))
    assert cache.lengths == [0, 0]


def test_sizes_and_kinds_that_make_no_sense() -> None:
    config = model_of("llama").config
    with pytest.raises(ValueError, match="no-such-kind"):
        KVCache.from_config(config, "no-such-kind")
    with pytest.raises(ValueError, match="0"):
        KVCache.from_config(config, batch_size=0)
    with pytest.raises(ValueError, match="0"):
        KVCache.from_config(config, max_length=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
@torch.no_grad()
def test_masks_are_built_without_a_loop(softcap: float | None) -> None:
    """The number of operations does not grow with the prompt: no mask is built row by row, in any layer."""
    fields = {"sliding_window_size": 4, "attention_logit_softcapping": softcap}
    model = GPT(toy_config(block_size=512, **fields)).eval()

    def count(n_tokens: int, cached: bool) -> int:
        ids = random_ids((2, n_tokens), vocab_size=50)
        cache = KVCache.from_config(model.config, batch_size=2, max_length=512) if cached else None
        with torch.profiler.profile() as profile:
            model(ids, cache=cache, step=cache.plan([n_tokens, n_tokens - 3]) if cache is not None else None)
        return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))

    for cached in (False, True):
        count(400, cached)  # fills the table of rotary frequencies
        assert count(40, cached) == count(400, cached)


@torch.no_grad()
def test_decoding_reads_and_allocates_only_the_filled_part() -> None:
    """Eager attention slices by the host length: work follows the tokens stored, not the size of the buffers."""
    from torch.utils.flop_counter import FlopCounterMode

    model = GPT(toy_config(block_size=4096)).eval()

    def flops(max_length: int) -> int:
        cache = KVCache.from_config(model.config, max_length=max_length)
        model(random_ids((1, 9), vocab_size=50), cache=cache, step=cache.plan(9))
        with FlopCounterMode(display=False) as counter:
            model(random_ids((1, 1), vocab_size=50), cache=cache, step=cache.plan(1))
        return counter.get_total_flops()

    assert flops(16) == flops(4096)


def test_report_says_size_and_rings() -> None:
    report = KVCache.from_config(tiny_pair("gemma3_text")[1].config, batch_size=2, max_length=48).report()
    assert "2 x 48" in report
    assert "3 of them" in report
