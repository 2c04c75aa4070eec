# Licensed under the Apache License 2.0, see the LICENSE file.

"""Bounded kinds of cache against brute-force oracles: plain loops over rows, groups, heads and queries.

The evicting kinds are compared as layers, given the same queries, keys and values: what they keep and what attention
returns. Windows and sinks are compared as whole models.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from litgpt.attention import attend, column_sums
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.policies import EvictingCache, snap
from litgpt.model import GPT
from tests.tiny import random_ids, tiny_hf_model
from tests.tiny_cached import MAX_LENGTH, TOLERANCE, VOCABULARY, cache_of, close, feed, full, model_of

SCALE = 0.4
GROUPS, HEADS, SIZE = 2, 4, 3
OBSERVED, POOL = 4, 3  # of Snap in these tests


# The oracle of what evicts: one row and group is a list of tokens


@dataclass
class Held:
    """A token that is kept."""

    pos: int
    k: list[float]
    v: list[float]
    score: float = 0.0


Mass = list[dict[int, float]]  # of each query in order: position -> weight, summed over the heads of the group


def h2o_best(tokens: list[Held], budget: int) -> list[Held]:
    newest = max((t.pos for t in tokens), default=0)
    recent = [t for t in tokens if t.pos > newest - budget // 2]
    others = sorted((t for t in tokens if t not in recent), key=lambda t: (-t.score, -t.pos))
    return [*recent, *others][: max(budget, len(recent))]


def highest(tokens: list[Held], budget: int) -> list[Held]:
    return sorted(tokens, key=lambda t: (-t.score, -t.pos))[:budget]


def h2o_score(tokens: list[Held], mass: Mass) -> None:
    for token in tokens:
        token.score += sum(query.get(token.pos, 0.0) for query in mass)


def tova_score(tokens: list[Held], mass: Mass) -> None:
    for token in tokens:
        token.score = mass[-1].get(token.pos, 0.0)


def snap_score(tokens: list[Held], mass: Mass) -> None:
    tokens = sorted(tokens, key=lambda t: t.pos)
    if len(mass) == 1:  # a generated token: before every prompt token, the newest first
        tokens[-1].score = 1e6 + tokens[-1].pos
        return
    votes = [sum(query.get(t.pos, 0.0) for query in mass[-OBSERVED:]) for t in tokens]
    for i, token in enumerate(tokens):
        is_voter = token.pos > tokens[-1].pos - OBSERVED
        token.score = 1e6 - 1 if is_voter else max(votes[max(0, i - POOL // 2) : i + POOL // 2 + 1])


Rule = tuple[Callable[[list[Held], Mass], None], Callable[[list[Held], int], list[Held]]]
RULES: dict[str, Rule] = {
    "h2o": (h2o_score, h2o_best),
    "tova": (tova_score, highest),
    "snap": (snap_score, highest),
}


class Oracle:
    """What one row and group keeps, token by token and query by query."""

    def __init__(self, policy: str, budget: int) -> None:
        self.rescore, self.best = RULES[policy]
        self.budget = budget
        self.tokens: list[Held] = []
        self.length = 0

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> list[list[list[float]]]:
        """Take in `(R, n, D)` queries and `(n, D)` keys and values; outputs by head and query."""
        if not k.size(0):
            return []
        self.tokens = self.best(self.tokens, self.budget)
        for i in range(k.size(0)):
            self.tokens.append(Held(self.length + i, k[i].tolist(), v[i].tolist()))
        outputs: list[list[list[float]]] = [[] for _ in range(q.size(0))]
        mass: Mass = []
        for i in range(k.size(0)):
            visible = [t for t in self.tokens if t.pos <= self.length + i]
            mass.append({})
            for head, queries in enumerate(q.tolist()):
                exps = [math.exp(SCALE * sum(a * b for a, b in zip(queries[i], t.k, strict=True))) for t in visible]
                weights = [e / sum(exps) for e in exps]
                for t, w in zip(visible, weights, strict=True):
                    mass[-1][t.pos] = mass[-1].get(t.pos, 0.0) + w
                outputs[head].append(
                    [sum(w * t.v[d] for t, w in zip(visible, weights, strict=True)) for d in range(v.size(1))]
                )
        self.length += k.size(0)
        self.rescore(self.tokens, mass)
        return outputs


class LayerRun:
    """One layer of a cache, driven as attention drives it."""

    def __init__(self, policy: str, batch_size: int, budget: int, slack: int, max_length: int = 64) -> None:
        spec = LayerSpec(GROUPS, SIZE, SIZE, max_length, slack=slack, policy=policy, budget=budget)
        self.cache = KVCache([spec], batch_size, torch.float64)
        layer = self.cache.layers[0]
        assert isinstance(layer, EvictingCache)
        self.layer: EvictingCache = layer

    def step(self, q: Tensor, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        step = self.cache.plan(counts)
        view = self.layer.update(k, v, step)
        out = attend(q, view, step, scale=SCALE)
        self.layer.observe(column_sums(q, view, step, scale=SCALE, last=self.layer.observe_last), step)
        self.cache.commit(step)
        return out

    def kept(self, row: int, group: int) -> set[int]:
        return set(self.layer.pos[row, group].tolist()) - {-1}


def draw(batch_size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of whole sequences, large enough that attention prefers some tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return 2 * torch.randn(batch_size, heads, length, SIZE, generator=generator, dtype=torch.float64)

    return normal(HEADS), normal(GROUPS), normal(GROUPS)


def cut(x: Tensor, starts: list[int], counts: list[int]) -> Tensor:
    """The next `counts` tokens of each row of `(B, H, T, D)`, padded on the right with what must not matter."""
    out = torch.full((len(starts), x.size(1), max(counts), x.size(3)), 9.0, dtype=x.dtype)
    for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
        out[b, :, :n] = x[b, :, start : start + n]
    return out


@pytest.fixture
def small_snap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer voters and neighbours, so that short sequences have tokens to choose from."""
    monkeypatch.setattr(snap, "OBSERVED", OBSERVED)
    monkeypatch.setattr(snap, "POOL", POOL)
    monkeypatch.setattr(snap.Snap, "observe_last", OBSERVED)


PROGRAMS: dict[str, list[list[int]]] = {  # new tokens a row, step by step
    "single tokens": [[1, 1, 1]] * 24,
    "in place": [[3, 3, 3], [2, 2, 2], [3, 3, 3], *[[1, 1, 1]] * 9, [3, 3, 3]],
    "long prompt": [[14, 14, 14], *[[1, 1, 1]] * 8],
    "long chunks": [[9, 9, 9], [7, 7, 7], [1, 1, 1], [5, 5, 5], *[[1, 1, 1]] * 3],
    "ragged": [[13, 2, 6], [1, 3, 0], [1, 0, 2], [0, 12, 1], [1, 1, 9], [3, 1, 1], [1, 1, 1], [0, 1, 0], [1, 1, 1]],
}


@pytest.mark.usefixtures("small_snap")
@pytest.mark.parametrize("budget", [1, 6, 7])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("policy", RULES)
def test_evicting_kinds_equal_a_brute_force(policy: str, program: str, budget: int) -> None:
    """The same tokens are kept in every row and group, and every output agrees."""
    slack, counts_by_step = 3, PROGRAMS[program]
    batch_size = 3
    q, k, v = draw(batch_size, 40)
    run = LayerRun(policy, batch_size, budget, slack)
    oracles = [[Oracle(policy, budget) for _ in range(GROUPS)] for _ in range(batch_size)]
    done = [0] * batch_size
    for counts in counts_by_step:
        out = run.step(cut(q, done, counts), cut(k, done, counts), cut(v, done, counts), counts)
        for b, n in enumerate(counts):
            span = slice(done[b], done[b] + n)
            for g, oracle in enumerate(oracles[b]):
                heads = slice(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)
                wanted = oracle.step(q[b, heads, span], k[b, g, span], v[b, g, span])
                if n:
                    torch.testing.assert_close(
                        out[b, heads, :n], torch.tensor(wanted, dtype=out.dtype), atol=TOLERANCE, rtol=0
                    )
                kept = {t.pos for t in oracle.tokens}
                best = {t.pos for t in oracle.best(oracle.tokens, budget)}
                # what is over the budget may stay until the row's next step, or go at once after a long chunk
                assert best <= run.kept(b, g) <= kept
                assert run.kept(b, g) in (best, kept)
            done[b] += n


@pytest.mark.parametrize("policy", RULES)
def test_groups_and_rows_choose_for_themselves(policy: str) -> None:
    q, k, v = draw(3, 30)
    run = LayerRun(policy, 3, 6, 3)
    run.step(q[:, :, :20], k[:, :, :20], v[:, :, :20], [20] * 3)
    for t in range(20, 30):
        run.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], [1] * 3)
    chosen = {frozenset(run.kept(b, g)) for b in range(3) for g in range(GROUPS)}
    # Snap has nothing left of the prompt by then: ten generated tokens fill the budget of six
    assert len(chosen) == (1 if policy == "snap" else 3 * GROUPS)


def slots_of(run: LayerRun, row: int) -> dict[str, Tensor]:
    """Copies of a row's buffers, without the slot for padding."""
    return {name: buffer[row, :, :-1].clone() for name, buffer in run.cache.named_buffers()}


@pytest.mark.usefixtures("small_snap")
@pytest.mark.parametrize("program", ["ragged", "long prompt"])
@pytest.mark.parametrize("policy", RULES)
def test_a_row_does_not_depend_on_its_batch(policy: str, program: str) -> None:
    """Alone, a row takes other paths: short chunks in place where the batch has a long one."""
    q, k, v = draw(3, 40)
    together = LayerRun(policy, 3, 6, 3)
    alone = [LayerRun(policy, 1, 6, 3) for _ in range(3)]
    done = [0, 0, 0]
    for counts in PROGRAMS[program]:
        before = [slots_of(together, b) for b in range(3)]
        out = together.step(cut(q, done, counts), cut(k, done, counts), cut(v, done, counts), counts)
        for b, n in enumerate(counts):
            if not n:
                for name, buffer in slots_of(together, b).items():
                    assert torch.equal(buffer, before[b][name]), f"idle row: {name}"
                continue
            span = slice(done[b], done[b] + n)
            row = slice(b, b + 1)
            expected = alone[b].step(q[row, :, span], k[row, :, span], v[row, :, span], [n])
            torch.testing.assert_close(out[row, :, :n], expected, atol=TOLERANCE, rtol=0)
            done[b] += n


@pytest.mark.parametrize("policy", RULES)
def test_equal_batches_are_equal_bit_for_bit(policy: str) -> None:
    """Rows that are fed alike stay alike to the last bit, and the order of the rows is of no account."""
    q, k, v = (x.expand(4, -1, -1, -1).clone() for x in draw(1, 30))
    run = LayerRun(policy, 4, 6, 3)
    for start, n in [(0, 11), (11, 3), (14, 2), *[(t, 1) for t in range(16, 30)]]:
        span = slice(start, start + n)
        out = run.step(q[:, :, span], k[:, :, span], v[:, :, span], [n] * 4)
        assert all(torch.equal(out[0], out[b]) for b in range(1, 4))
    for buffer in run.cache.buffers():
        assert all(torch.equal(buffer[0], buffer[b]) for b in range(1, 4))


# Whole models


def with_window(model: GPT, window: int) -> GPT:
    """The same model with a sliding window in its global layers."""
    model = copy.deepcopy(model)
    for block in model.transformer.h:
        if block.attn.window is None:
            block.attn.window = window
    return model


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize(
    "feature", ["grouped", "multi_query", "mixed_softcap", "mixed_sinks", "latent", "no_rope_layer", "two_bases"]
)
@torch.no_grad()
def test_window_equals_a_model_with_that_window(feature: str, window: int) -> None:
    model = model_of(feature)
    windowed = with_window(model, window)
    rows = [random_ids((n,), seed, VOCABULARY).tolist() for seed, n in enumerate((36, 30))]
    expected = [full(windowed, row) for row in rows]
    programs = [
        [(36, 30)],
        [(1, 1)] * 30,
        [(7, 2), (2, 3), (1, 0), (9, 4), (1, 1), (3, 13), (12, 1), (1, 6), (0, 0)],  # around the slack of 3
    ]
    for program in programs:
        cache = cache_of(model, f"window:{window}", batch_size=2)
        done = [0, 0]
        for counts in program:
            if not any(counts):
                continue
            outs = feed(model, cache, [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)])
            for b, n in enumerate(counts):
                close(outs[b], expected[b][done[b] : done[b] + n])
                done[b] += n
        cache.rewind([3, 2])
        outs = feed(model, cache, [[5, 6], [7]])
        close(outs[0], full(windowed, [*rows[0][: done[0] - 3], 5, 6])[-2:])
        close(outs[1], full(windowed, [*rows[1][: done[1] - 2], 7])[-1:])


def turn(x: Tensor, position: int, base: float) -> Tensor:
    """Rotate one vector `(D,)` to a position, halves layout."""
    half = x.numel() // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * base ** (-2 * i / x.numel()), dtype=torch.float64)
        a, b = x[i], x[i + half]
        out[i], out[i + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def sinks_by_loops(model: GPT, row: list[int], n_sink: int, window: int) -> Tensor:
    """Logits of a plain model over sinks and a window, query by query.

    A query sees the sinks as if they stood right before its window, and the tokens of the window where they are.
    """
    config = model.config
    n_head, n_groups, size = config.n_head, config.n_query_groups, config.head_size
    x = model.transformer.wte(torch.tensor(row))
    for block in model.transformer.h:
        qkv = block.attn.qkv(block.norm_1(x)).view(len(row), -1, size)
        out = torch.zeros(len(row), n_head, size, dtype=x.dtype)
        for at in range(len(row)):
            visible = [p for p in range(at + 1) if p < n_sink or p > at - window]
            place = min(at, n_sink + window - 1)  # of the query inside the cache
            for head in range(n_head):
                group = head * n_groups // n_head
                scores = []
                for p in visible:
                    distance = place - p if p < n_sink else at - p
                    q = turn(qkv[at, head], distance, config.rope_base)
                    scores.append(q @ qkv[p, n_head + group] * size**-0.5)
                weights = torch.stack(scores).softmax(0)
                values = torch.stack([qkv[p, n_head + n_groups + group] for p in visible])
                out[at, head] = weights @ values
        x = x + block.attn.proj(out.flatten(1))
        x = x + block.mlp(block.norm_2(x))
    return model.lm_head(model.transformer.ln_f(x))


ROPE_TOLERANCE = 1e-5  # the model's angles are float32; the distance of a sink is a difference of two of them


@pytest.mark.parametrize(("n_sink", "window"), [(2, 5), (1, 1), (4, 9)])
@torch.no_grad()
def test_sinks_equal_plain_loops(n_sink: int, window: int) -> None:
    """Any chunking and batch, past the length that the model was made for too."""
    model = model_of("grouped")
    lengths = (MAX_LENGTH + 12, 30)
    rows = [random_ids((n,), seed, VOCABULARY).tolist() for seed, n in enumerate(lengths)]
    expected = [sinks_by_loops(model, row, n_sink, window) for row in rows]
    programs = [
        [lengths],
        [(1, 1)] * 30 + [(1, 0)] * (lengths[0] - 30),
        [(7, 2), (2, 3), (1, 0), (9, 4), (1, 1), (3, 13), (12, 1), (1, 6), (16, 0)],  # around the slack of 3
    ]
    outputs = []
    for program in programs:
        cache = cache_of(model, f"sinks:{n_sink}+{window}", batch_size=2, max_length=lengths[0])
        assert cache.layer_caches()[0].slots == n_sink + window + 2
        done, logits = [0, 0], [[], []]
        for counts in program:
            outs = feed(model, cache, [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)])
            for b, n in enumerate(counts):
                logits[b].append(outs[b])
                done[b] += n
        assert tuple(done) == lengths
        outputs.append(torch.cat([*logits[0], *logits[1]]))
        close(outputs[-1], torch.cat(expected), ROPE_TOLERANCE)
        close(outputs[-1], outputs[0])


@torch.no_grad()
def test_sinks_far_beyond_the_context_see_near_distances_only() -> None:
    """What a query sees does not depend on how far the text has gone: positions are those inside the cache."""
    model, n_sink, window = model_of("grouped"), 2, 5
    tokens = random_ids((40,), 3, VOCABULARY).tolist()
    head, tail = tokens[:n_sink], tokens[n_sink : n_sink + 3 * window]
    outs = []
    for filler in (12, 500):
        cache = cache_of(model, f"sinks:{n_sink}+{window}", max_length=600)
        middle = random_ids((filler,), 4, VOCABULARY).tolist()
        feed(model, cache, [head + middle])
        # two layers look back through two windows: after three, nothing of the filler is left
        outs.append(feed(model, cache, [tail])[0][-1])
    close(outs[0], outs[1], ROPE_TOLERANCE)


@pytest.mark.parametrize(("n_sink", "window"), [(2, 8), (4, 20)])
@torch.no_grad()
def test_stretched_rotations_follow_positions_inside_the_cache(n_sink: int, window: int) -> None:
    """Phi-3 rotates in another way past 16 tokens. transformers, given what is kept as a text of its own, agrees.

    One layer, so that keys and values hang on nothing but their own tokens. 10 kept tokens never reach 16, however
    long the text; 24 do.
    """
    hf_model = tiny_hf_model("phi3", num_hidden_layers=1).double()
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        model = GPT.from_checkpoint(folder)
    kept = n_sink + window
    assert model.rope.is_long(kept) == (kept > 16)
    tokens = random_ids((40,), 3).tolist()
    cache = KVCache.from_config(model.config, f"sinks:{n_sink}+{window}", max_length=60, dtype=torch.float64)
    for start in (0, 10, 30):
        logits = feed(model, cache, [tokens[start : {0: 10, 10: 30, 30: 40}[start]]])[0]
        length = cache.lengths[0]
        if length > kept:
            inside = tokens[:n_sink] + tokens[length - window : length]
        elif model.rope.is_long(kept):
            continue  # transformers decides by what is there so far, we by what may come, so that keys stay as they are
        else:
            inside = tokens[:length]
        expected = hf_model(torch.tensor([inside])).logits[0, -1]
        close(logits[-1], expected, ROPE_TOLERANCE)


@pytest.mark.parametrize("kind", ["window:20", "sinks:4+16", "h2o:20", "snap:20", "tova:20"])
@pytest.mark.parametrize("feature", ["grouped", "mixed_softcap", "mixed_sinks", "latent", "multi_query"])
@torch.no_grad()
def test_a_budget_that_is_not_used_up_equals_dense_exactly(feature: str, kind: str) -> None:
    model = model_of(feature)
    rows = [random_ids((20,), seed, VOCABULARY).tolist() for seed in range(2)]
    programs = [[(20, 20)], [(1, 1)] * 20, [(14, 14), *[(1, 1)] * 6], [(3, 2), (1, 0), (9, 4), (1, 1), (6, 13)]]
    for program in programs:
        dense, other = (cache_of(model, name, batch_size=2) for name in ("dense", kind))
        done = [0, 0]
        # the same kernel on the same slots; with sinks there is another one, and chunks are not read from the slots
        is_bitwise = max(map(max, program)) == 1 and not kind.startswith("sinks")
        for counts in program:
            new = [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)]
            for expected, actual in zip(feed(model, dense, new), feed(model, other, new), strict=True):
                close(actual, expected)
                assert not is_bitwise or torch.equal(actual, expected)
            done = [d + n for d, n in zip(done, counts, strict=True)]


@pytest.mark.parametrize("kind", ["window:7", "sinks:2+5", "h2o:7", "snap:7", "tova:7"])
def test_bounded_kinds_leave_sliding_layers_alone(kind: str) -> None:
    config = model_of("mixed_softcap").config
    dense, bounded = (KVCache.from_config(config, name, max_length=200) for name in ("dense", kind))
    sliding, global_ = (0, 1)
    assert bounded.layer_caches()[sliding].spec == dense.layer_caches()[sliding].spec
    assert type(bounded.layer_caches()[sliding]) is type(dense.layer_caches()[sliding])
    assert bounded.layer_caches()[global_].slots <= 7 + 16
    assert dense.layer_caches()[global_].slots == 200
