# Licensed under the Apache License 2.0, see the LICENSE file.

"""What every kind of cache declares about itself, verified, and what no kind may get wrong.

The kinds are read from the registries: a new policy or store takes part without a line here.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.kvcache import KVCache, LayerCache
from litgpt.kvcache.registry import POLICIES
from litgpt.kvcache.storage import STORES
from litgpt.model import GPT
from tests.tiny import random_ids
from tests.tiny_cached import FEATURES, MAX_LENGTH, VOCABULARY, cache_of, close, feed, model_of

SLACK = 3
BUDGET = 7
LENGTH = 30


def kinds(policies: Any = POLICIES, stores: Any = STORES, budget: int = BUDGET) -> list[str]:
    """Every combination as a person writes it; all bounded ones keep `budget` tokens."""
    forms = {"dense": "dense", "sinks": f"sinks:2+{budget - 2}"}
    return [
        forms.get(policy, f"{policy}:{budget}") + ("" if store == "plain" else f",{store}")
        for policy, store in itertools.product(policies, stores)
    ]


PLAIN = kinds(stores=["plain"])
ALL = kinds()
# every policy, and every store under another one: in place, in a ring, and with eviction
SOME = [*PLAIN, "int8", f"window:{BUDGET},int4", f"h2o:{BUDGET},int8", f"tova:{BUDGET},offload"]


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random_ids((length,), seed, VOCABULARY).tolist()


def feed_in_chunks(model: GPT, cache: KVCache, tokens: list[int], chunks: list[int]) -> Tensor:
    """Logits of `tokens`, fed to all rows alike in chunks of these sizes; of the first row."""
    assert sum(chunks) == len(tokens)
    ends = list(itertools.accumulate(chunks))
    parts = [tokens[end - n : end] for n, end in zip(chunks, ends, strict=True)]
    return torch.cat([feed(model, cache, [part] * cache.batch_size)[0] for part in parts])


def declared(cache: KVCache, name: str) -> bool:
    """Whether every layer declares it."""
    return all(getattr(layer, name) for layer in cache.layer_caches())


CHUNKINGS = {
    "at once": [LENGTH],
    "token by token": [1] * LENGTH,
    "around the slack": [4, 3, 2, 9, 1, 1, 5, 3, 2],
    "prompt and tokens": [17, *[1] * 13],
}


# What a kind declares


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_chunk_invariant(kind: str) -> None:
    model, tokens = model_of("mixed_softcap"), tokens_of(LENGTH)
    cache = cache_of(model, kind, slack=SLACK)
    outs = {
        name: feed_in_chunks(model, cache_of(model, kind, slack=SLACK), tokens, chunks)
        for name, chunks in CHUNKINGS.items()
    }
    if declared(cache, "chunk_invariant"):
        for out in outs.values():
            close(out, outs["at once"])
    else:  # or the declaration is too modest
        assert any((out - outs["at once"]).abs().max() > 1e-6 for out in outs.values())


@pytest.mark.parametrize("n_draft", [SLACK, 8])
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_max_rewind(kind: str, n_draft: int) -> None:
    """As deep as declared, rewinding gives what was before; one token deeper is refused."""
    model, tokens = model_of("grouped"), tokens_of(LENGTH)
    history, draft, rest = tokens[:18], tokens_of(n_draft, seed=7), tokens[18:]
    cache = cache_of(model, kind, batch_size=2, slack=SLACK)
    feed_in_chunks(model, cache, history, [13, 3, 1, 1])
    feed(model, cache, [draft, draft])
    depth = cache.max_rewind(0)
    with pytest.raises(ValueError, match=rf"row 0.*{depth + 1}.*{depth}"):
        cache.rewind([depth + 1, 0])
    with pytest.raises(ValueError, match=r"row 1"):
        cache.rewind([0, depth + 1])
    assert cache.lengths == [18 + n_draft] * 2
    cache.rewind([depth, 0])
    assert cache.lengths == [18 + n_draft - depth, 18 + n_draft]
    kept = (history + draft)[: 18 + n_draft - depth]
    other = cache_of(model, kind, slack=SLACK)
    if depth == 0:
        feed_in_chunks(model, other, history, [13, 3, 1, 1])
        feed(model, other, [draft])
    elif kept:
        assert declared(cache, "chunk_invariant"), "a kind that depends on chunks needs a reference of its own here"
        feed(model, other, [kept])
    for n in (2, 1, 5):
        new, rest = rest[:n], rest[n:]
        close(feed(model, cache, [new, []])[0], feed(model, other, [new])[0])


@pytest.mark.parametrize("kind", kinds(policies=["dense", "window", "sinks"]))
@torch.no_grad()
def test_bounded_exact_kinds_rewind_as_far_as_their_slack(kind: str) -> None:
    """The promise that speculative decoding builds on."""
    model = model_of("grouped")
    cache = cache_of(model, kind, slack=SLACK)
    feed_in_chunks(model, cache, tokens_of(LENGTH), CHUNKINGS["around the slack"])
    assert cache.max_rewind(0) == (LENGTH if kind.startswith(("dense", "int", "offload")) else SLACK)


@pytest.mark.parametrize("feature", ["grouped", "latent_sliding"])
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_fork(kind: str, feature: str) -> None:
    """A row and its copies, in the same cache and in another one, go on alike, and apart from one another."""
    model, tokens = model_of(feature), tokens_of(LENGTH)
    cache, other = cache_of(model, kind, batch_size=3, slack=SLACK), cache_of(model, kind, slack=SLACK)
    feed(model, cache, [tokens[:14], tokens_of(20, 1), tokens_of(5, 2)])
    feed(model, cache, [tokens[14:16], [], [3]])
    state = cache.export_row(0)
    feed(model, cache, [tokens_of(6, 3), [4], []])  # the source goes elsewhere
    reference = cache_of(model, kind, slack=SLACK)
    feed_in_chunks(model, reference, tokens[:16], [14, 2])
    for row in (0, 2):
        cache.import_row(row, state)
    other.import_row(0, state)
    assert cache.lengths == [16, 21, 16]
    at = 16
    for n in (1, 3, 6, 1):
        new = tokens[at : at + n]
        first, _, third = feed(model, cache, [new, [5], new])
        close(first, third)
        close(feed(model, other, [new])[0], first)
        close(feed(model, reference, [new])[0], first)
        at += n
    feed(model, cache, [[1, 2], [], []])  # a copy shares nothing with its source
    close(feed(model, cache, [[], [], [9]])[2], feed(model, other, [[9]])[0])


@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_needs_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kinds that ask for it are told what was attended to, and they are told all of it."""
    seen: list[tuple[LayerCache, Tensor]] = []
    for layer_class in set(POLICIES.values()):
        observe = layer_class.observe

        def spy(self: LayerCache, sums: Tensor, step: Any, observe: Any = observe) -> None:
            seen.append((self, sums.clone()))
            observe(self, sums, step)

        monkeypatch.setattr(layer_class, "observe", spy)
    model = model_of("mixed_softcap")
    cache = cache_of(model, kind, batch_size=2, slack=SLACK)
    curious = [layer for layer in cache.layer_caches() if layer.needs_weights]
    heads_a_group = model.config.n_head // (model.config.n_query_groups or 1)
    for counts in [(14, 9), (1, 1), (2, 3), (0, 1), (6, 0)]:
        seen.clear()
        feed(model, cache, [tokens_of(n) for n in counts])
        assert [layer for layer, _ in seen] == curious
        for layer, sums in seen:
            for b, n in enumerate(counts):
                expected = heads_a_group * min(n, layer.observe_last or n)
                close(sums[b].sum(-1), torch.full_like(sums[b, :, 0], expected))


def test_every_layer_class_answers_to_its_contract() -> None:
    for layer_class in POLICIES.values():
        assert issubclass(layer_class, LayerCache)
        for method in ("update", "max_rewind", "forget"):
            assert getattr(layer_class, method) is not getattr(LayerCache, method), f"{layer_class}.{method}"
        overrides = layer_class.observe is not LayerCache.observe
        assert overrides == layer_class.needs_weights, layer_class


# What no kind may get wrong


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_rows_do_not_depend_on_their_batch(kind: str) -> None:
    """Ragged chunks, short beside long, idle rows: each row as if it were alone. Idle rows stay as they are."""
    model = model_of("mixed_softcap")
    rows = [tokens_of(LENGTH, seed) for seed in range(3)]
    together = cache_of(model, kind, batch_size=3, slack=SLACK)
    alone = [cache_of(model, kind, slack=SLACK) for _ in rows]
    done = [0, 0, 0]
    for counts in [(13, 2, 6), (1, 3, 0), (1, 0, 2), (0, 12, 1), (1, 1, 9), (3, 1, 1), (1, 1, 1), (0, 1, 0), (8, 1, 2)]:
        new = [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)]
        before = [slots_of(together, b) for b in range(3)]
        outs = feed(model, together, new)
        for b, n in enumerate(counts):
            if n:
                close(outs[b], feed(model, alone[b], [new[b]])[0])
            else:
                after = slots_of(together, b)
                assert all(torch.equal(after[name], before[b][name]) for name in before[b])
            done[b] += n


def slots_of(cache: KVCache, row: int) -> dict[str, Tensor]:
    """Copies of a row's buffers, without the slot for padding."""
    return {name: buffer[row, :, :-1].clone() for name, buffer in cache.named_buffers()}


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_two_streams_on_one_model(kind: str) -> None:
    model = model_of("mixed_sinks")
    rows = [tokens_of(LENGTH, seed) for seed in range(2)]
    chunks = [11, 2, 5, *[1] * 12]
    expected = [feed_in_chunks(model, cache_of(model, kind, slack=SLACK), row, chunks) for row in rows]
    caches = [cache_of(model, kind, slack=SLACK) for _ in rows]
    at = 0
    for n in chunks:
        for cache, row, want in zip(caches, rows, expected, strict=True):
            close(feed(model, cache, [row[at : at + n]])[0], want[at : at + n])
        at += n


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_a_reset_row_is_a_new_row(kind: str) -> None:
    model, tokens = model_of("latent_sliding"), tokens_of(LENGTH)
    cache = cache_of(model, kind, batch_size=2, slack=SLACK)
    feed(model, cache, [tokens_of(25, 5), tokens_of(9, 6)])
    cache.reset_row(0)
    assert cache.lengths == [0, 9]
    fresh = cache_of(model, kind, slack=SLACK)
    at = 0
    for n in (2, 1, 12, 1, 1):
        new = tokens[at : at + n]
        close(feed(model, cache, [new, [8]])[0], feed(model, fresh, [new])[0])
        at += n


def fail(*args: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("n_new", [SLACK, 9])
@pytest.mark.parametrize("where", ["attend", "mlp"])
@pytest.mark.parametrize("kind", SOME)
def test_a_failing_forward_leaves_rows_as_they_were_or_empty(kind: str, where: str, n_new: int) -> None:
    """Nothing in between: a row that cannot be taken back starts again. Rows that were idle go on."""
    with torch.no_grad():
        model, tokens = copy.deepcopy(model_of("grouped")), tokens_of(LENGTH)
        cache, reference = (cache_of(model, kind, batch_size=2, slack=SLACK) for _ in range(2))
        for c in (cache, reference):
            feed(model, c, [tokens[:12], tokens[:5]])
        block = model.transformer.h[1]
        owner, name = (block.attn, "attend") if where == "attend" else (getattr(block, where), "forward")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                feed(model, cache, [tokens[12 : 12 + n_new], []])
        assert cache.lengths[0] in (0, 12)
        assert cache.lengths[1] == 5
        if cache.max_rewind(1) == 5 and n_new <= SLACK:
            assert cache.lengths[0] == 12, "a kind that can be rewound loses nothing"
        if cache.lengths[0] == 0:
            reference.reset_row(0)
        for n in (2, 1, 10, 1):
            new = [tokens_of(n, 8), tokens_of(n, 9)]
            for actual, expected in zip(feed(model, cache, new), feed(model, reference, new), strict=True):
                close(actual, expected)


@pytest.mark.parametrize("n_bad", [SLACK, 9])
@pytest.mark.parametrize("how", ["rewind", "reset", "fail"])
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_stale_nan_does_not_leak(kind: str, how: str, n_bad: int) -> None:
    """A masked weight of zero times a stale NaN is a NaN: what is no longer visible must not matter."""
    model, poison = copy.deepcopy(model_of("grouped")), 7
    model.transformer.wte.weight[poison] = float("nan")
    tokens = [3 if t == poison else t for t in tokens_of(LENGTH)]
    cache = cache_of(model, kind, batch_size=2, slack=SLACK)
    reference = cache_of(model, kind, batch_size=2, slack=SLACK)

    def run(c: KVCache, rows: list[list[int]]) -> list[Tensor]:
        counts = [len(row) for row in rows]
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
        out = model(padded, cache=c, step=c.plan(counts))
        assert isinstance(out, Tensor)
        return [out[b, :n] for b, n in enumerate(counts)]

    for c in (cache, reference):
        run(c, [tokens[:4], tokens[:12]])
    bad = [poison] * n_bad
    if how == "fail":
        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            run(cache, [bad, []])
        handle.remove()
    else:
        run(cache, [bad, []])
        if how == "reset" or cache.max_rewind(0) < n_bad:
            cache.reset_row(0)
        else:
            cache.rewind([n_bad, 0])
    if cache.lengths[0] == 0:
        reference.reset_row(0)
    assert cache.lengths == reference.lengths
    for n in (1, 2, 6, 1):
        new = [tokens[20 : 20 + n], tokens[10 : 10 + n]]
        for actual, expected in zip(run(cache, new), run(reference, new), strict=True):
            assert torch.isfinite(actual).all()
            close(actual, expected)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("feature", ["grouped", "mixed_softcap", "latent_sliding", "experts"])
@torch.no_grad()
def test_what_stands_at_padding_does_not_matter(kind: str, feature: str) -> None:
    """Even when it is not a number: in place, in rings and next to them, in long chunks, in rows that rest."""
    model, padding = copy.deepcopy(model_of(feature)), 0
    model.transformer.wte.weight[padding] = float("nan")
    rows = [[t or 1 for t in tokens_of(LENGTH, seed)] for seed in range(2)]
    cache, alone = cache_of(model, kind, batch_size=2, slack=SLACK), [cache_of(model, kind, slack=SLACK) for _ in rows]
    done = [0, 0]
    for counts in [(2, 1), (12, 2), (1, 9), (0, 1), (3, 1), (1, 0), (1, 1), (8, 11)]:
        new = [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)]
        padded = torch.tensor([row + [padding] * (max(counts) - len(row)) for row in new])
        step = cache.plan(counts)
        if max(counts) == 1:  # as compiled steps are: over the full buffers, the slot for padding included
            step.live = step.start = None
        logits = model(padded, cache=cache, step=step)
        for b, n in enumerate(counts):
            if n:
                close(logits[b, :n], feed(model, alone[b], [new[b]])[0])
            done[b] += n


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: str) -> None:
    model = model_of("grouped")
    cache = cache_of(model, kind, batch_size=2, max_length=12, slack=SLACK)
    feed(model, cache, [tokens_of(10), tokens_of(4)])
    with pytest.raises(ValueError, match=r"row 0.*10 \+ 3 = 13.*12"):
        feed(model, cache, [tokens_of(3), [1]])
    with pytest.raises(ValueError, match=r"13.*12"):
        cache.plan([1, 9])
    with pytest.raises(ValueError, match=r"3.*2"):
        model(random_ids((3, 1), 0, VOCABULARY), cache=cache)
    with pytest.raises(ValueError, match=r"3.*2"):
        cache.plan([1, 1, 1])
    with pytest.raises(ValueError, match="token id"):
        feed(model, cache, [[VOCABULARY], [1]])
    assert cache.lengths == [10, 4]
    feed(model, cache, [tokens_of(2), tokens_of(8)])
    assert cache.lengths == [12, 12]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", ALL)
def test_allocated_bytes_equal_the_estimate(kind: str, feature: str) -> None:
    config = model_of(feature).config
    for batch_size, max_length, dtype in [(1, 64, torch.float32), (3, 17, torch.bfloat16)]:
        kwargs: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length, "dtype": dtype}
        cache = KVCache.from_config(config, kind, **kwargs)
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in cache.buffers()}
        assert KVCache.estimate(config, kind, **kwargs) == cache.nbytes() == sum(storages.values())


@pytest.mark.parametrize("kind", ALL)
def test_bytes_grow_with_the_length_or_not_at_all(kind: str) -> None:
    """Nothing is quadratic in the length, and what is bounded stays so at 131072 tokens."""
    config = model_of("grouped").config
    sizes = [KVCache.estimate(config, kind, max_length=n, dtype=torch.bfloat16) for n in (1024, 2048, 131072)]
    is_bounded = f":{BUDGET}" in kind or kind.startswith("sinks")
    per_token = (sizes[1] - sizes[0]) / 1024
    assert per_token == (0 if is_bounded else pytest.approx(sizes[1] / 2049))
    assert sizes[2] == sizes[0] + per_token * (131072 - 1024)


@pytest.mark.parametrize("policy", POLICIES)
def test_latent_bytes_per_token(policy: str) -> None:
    """One latent and one rotated key a token and layer, whatever the number of heads; half of it in 8 bits."""
    config = model_of("latent").config

    def per_token(store: str) -> float:
        form = {"dense": "dense", "sinks": "sinks:4+{n}"}.get(policy, policy + ":{n}")
        text = form + ("" if store == "plain" else f",{store}")
        short, long = (
            KVCache.estimate(config, text.format(n=n), max_length=4096, dtype=torch.float32) for n in (100, 1100)
        )
        if policy == "dense":
            short, long = (KVCache.estimate(config, text, max_length=n, dtype=torch.float32) for n in (100, 1100))
        return (long - short) / 1000 / config.n_layer

    bookkeeping = 0 if POLICIES[policy] is POLICIES["dense"] else 8 + 4  # position and score of a token
    assert per_token("plain") == (config.kv_lora_rank + config.qk_rope_head_dim) * 4 + bookkeeping
    assert per_token("int8") < 0.6 * per_token("plain") + bookkeeping


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_reports_name_the_size(kind: str) -> None:
    cache = KVCache.from_config(model_of("grouped").config, kind, batch_size=2, max_length=MAX_LENGTH)
    assert f"2 x {MAX_LENGTH}" in cache.report()
