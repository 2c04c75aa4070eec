# Licensed under the Apache License 2.0, see the LICENSE file.

"""Gradients under recorded decisions, against a plain forward pass whose masks say what the cache let be seen."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.kvcache import KVCache, LayerSpec, ReplayCache
from litgpt.kvcache.replay import ReplayLayer
from litgpt.kvcache.spec import CacheKind
from litgpt.model import GPT
from tests.test_policies import ROPE_TOLERANCE, sinks_by_loops
from tests.tiny import random_ids
from tests.tiny_cached import FEATURES, MAX_LENGTH, TOLERANCE, VOCABULARY, cache_of, model_of

Chunks = Sequence[int | Sequence[int]]

LENGTH = 36
SLACK = 3
KINDS = ["window:5", "sinks:2+5", "h2o:6", "snap:6", "tova:6"]
CHUNKS: dict[str, Chunks] = {
    "short": [3] * 12,
    "long": [12, 12, 12],
    "mixed": [14, 3, 2, 1, 1, 9, 6],
    "ragged": [[14, 2], [1, 9], [0, 4], [5, 1], [3, 3]],
}


def replay_cache_of(model: GPT, kind: str, batch_size: int = 2, max_length: int = MAX_LENGTH) -> ReplayCache:
    parsed, config = CacheKind.parse(kind), model.config
    specs = [LayerSpec.from_config(config, i, max_length, slack=SLACK, kind=parsed) for i in range(config.n_layer)]
    return ReplayCache(specs, batch_size, torch.float64)


def loss_of_tokens(logits: Tensor, idx: Tensor, pos: Tensor) -> Tensor:
    """A sum over tokens that weighs each in its own way; padding, at position -1, counts nothing."""
    picked = logits.log_softmax(-1).gather(-1, ((3 * idx + 1) % VOCABULARY).unsqueeze(-1)).squeeze(-1)
    return (picked * (1 + pos % 7) * (pos >= 0)).sum()


def loss_with(model: GPT, cache: KVCache) -> Callable[[Tensor, Step], Tensor]:
    def loss(idx: Tensor, step: Step) -> Tensor:
        return loss_of_tokens(model(idx, cache=cache, step=step), idx, step.pos)

    return loss


def gradients(model: GPT) -> dict[str, Tensor]:
    """Take the gradients of all parameters, zero where there is none."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(
            actual[name], grad, atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


# The oracle


def tokens() -> Tensor:
    return random_ids((2, LENGTH), 1, VOCABULARY)


@functools.cache
def what_is_seen(feature: str, kind: str, chunks: str) -> tuple[list[Tensor], list[int]]:
    """For each layer `(B, G, L, L)`, which token each query sees, watched at a cache of the plain sort; row lengths."""
    model, ids = model_of(feature), tokens()
    cache = cache_of(model, kind, len(ids), slack=SLACK)
    n_batch, length = ids.shape
    seen = []
    for block, layer in zip(model.transformer.h, cache.layer_caches(), strict=True):
        seen.append(torch.zeros(n_batch, layer.spec.groups, length, length, dtype=torch.bool))
        window, n_sink = layer.spec.window or length, layer.spec.n_sink
        assert block.attn.window is None or block.attn.window == window
        update = layer.update

        def spy(
            k: Tensor,
            v: Tensor | None,
            step: Step,
            update: Any = update,
            mask: Tensor = seen[-1],
            window: int = window,
            n_sink: int = n_sink,
        ) -> Any:
            view = update(k, v, step)
            held = view.pos.expand(n_batch, mask.size(1), -1).tolist()
            for b, queries in enumerate(step.pos.expand(n_batch, -1).tolist()):
                for g, q in itertools.product(range(mask.size(1)), queries):
                    seen_by_q = [p for p in held[b][g] if 0 <= p <= q and (p > q - window or p < n_sink)]
                    if q >= 0:
                        mask[b, g, q, seen_by_q] = True
            return view

        layer.update = spy  # type: ignore[method-assign]
    with torch.no_grad():
        for n in CHUNKS[chunks]:
            step = cache.plan(n)
            model(ids.gather(1, step.pos.clamp_min(0).expand(n_batch, -1)), cache=cache, step=step)
    return seen, cache.lengths


def plain_attention(attn: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax over what is seen, nothing else."""
    config = attn.config
    if config.latent_attention is not None:
        rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
        up = attn.kv_b_proj(k[:, 0, :, :rank]).unflatten(-1, (config.n_head, nope + config.v_head_dim)).transpose(1, 2)
        k = torch.cat((up[..., :nope], k[..., rank:].expand(-1, config.n_head, -1, -1)), dim=-1)
        v = up[..., nope:]
    heads_a_group = config.n_head // k.size(1)
    k, v = (x.repeat_interleave(heads_a_group, dim=1) for x in (k, v))
    seen = seen.repeat_interleave(config.n_head // seen.size(1), dim=1)
    scores = q @ k.mT * attn.scale
    if (cap := config.attention_logit_softcapping) is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(~seen, -1e9)
    if getattr(attn, "sinks", None) is not None:
        sinks = attn.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return scores.softmax(-1)[..., : k.size(2)] @ v


def watch_projections(model: GPT) -> list[list[tuple[Tensor, ...]]]:
    """Note queries, keys and values of every layer that get a gradient, in the order they are computed."""
    noted: list[list[tuple[Tensor, ...]]] = []
    for block in model.transformer.h:
        noted.append([])

        def project(*args: Any, inner: Any = block.attn.project, notes: Any = noted[-1]) -> Any:
            parts = inner(*args)
            if torch.is_grad_enabled():
                for part in parts:
                    part.retain_grad()
                notes.append(parts)
            return parts

        block.attn.project = project
    return noted


@functools.cache
def oracle(feature: str, kind: str, chunks: str) -> tuple[float, dict[str, Tensor], list[list[Tensor]]]:
    """Loss, gradients of all parameters, and of queries, keys and values of each layer: no cache, explicit masks."""
    model, ids = copy.deepcopy(model_of(feature)), tokens()
    seen, lengths = what_is_seen(feature, kind, chunks)
    assert all(bool((mask.sum(-1) < torch.arange(1, LENGTH + 1)).any()) for mask in seen[-1:]), "nothing was evicted"
    for block, mask in zip(model.transformer.h, seen, strict=True):
        attn = block.attn

        def attend(q: Tensor, view: Any, step: Step, attn: Any = attn, mask: Tensor = mask) -> Tensor:
            return plain_attention(attn, q, view.k, view.v, mask)

        attn.attend = attend
    noted = watch_projections(model)
    pos = torch.arange(LENGTH).expand(2, -1)
    pos = torch.where(pos < torch.tensor(lengths)[:, None], pos, -1)
    loss = loss_of_tokens(model(ids), ids, pos)
    loss.backward()
    return loss.item(), gradients(model), [[part.grad for part in layer[0]] for layer in noted]


def replayed(
    feature: str, kind: str, chunks: str
) -> tuple[float, dict[str, Tensor], list[list[Tensor]], list[Tensor], list[Step]]:
    """Return the same by replaying: loss, gradients, those of projections, `until` of each layer, and the steps."""
    model, ids = copy.deepcopy(model_of(feature)), tokens()
    noted = watch_projections(model)
    cache = replay_cache_of(model, kind)
    loss = loss_with(model, cache)
    total = cache.record(ids, CHUNKS[chunks], loss)
    until = [layer.until.clone() for layer in cache.replay_layers()]
    steps = [step for _, step, *_ in cache._run]
    cache.replay(loss)
    assert cache.lengths == [0, 0]
    parts = []
    for layer in noted:
        grads = [[part.grad for part in step_parts] for step_parts in reversed(layer)]
        parts.append([in_order(list(of_part), steps) for of_part in zip(*grads, strict=True)])
    return total.item(), gradients(model), parts, until, steps


def in_order(grads: list[Tensor], steps: list[Step]) -> Tensor:
    """Put gradients of chunks `(B, H, T, D)` at their positions: `(B, H, L, D)`."""
    first = grads[0]
    whole = first.new_zeros(first.size(0), first.size(1), LENGTH + 1, first.size(3))
    for grad, step in zip(grads, steps, strict=True):
        at = torch.where(step.pos < 0, LENGTH, step.pos).expand(first.size(0), -1)
        whole.scatter_(2, at[:, None, :, None].expand(grad.shape), grad)
    return whole[:, :, :LENGTH]


def check_against_oracle(feature: str, kind: str, chunks: str) -> None:
    loss, grads, parts = oracle(feature, kind, chunks)
    total, actual, actual_parts, until, _ = replayed(feature, kind, chunks)
    assert total == pytest.approx(loss, abs=1e-8)
    compare(actual, grads)
    for layer, actual_layer in zip(parts, actual_parts, strict=True):
        for name, grad, actual_grad in zip("qkv", layer, actual_layer, strict=False):  # latents stand for k and v
            compare({name: actual_grad}, {name: grad})
    seen, lengths = what_is_seen(feature, kind, chunks)
    if kind.partition(":")[0] in ("h2o", "snap", "tova"):  # of the others the window decides
        q, p = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        mask = (p <= q) & (until[-1][:, :, None, :LENGTH] > q)
        for b, length in enumerate(lengths):
            assert torch.equal(mask[b, :, :length], seen[-1][b, :, :length])


CASES = [
    *(("grouped", kind, chunks) for kind in KINDS if not kind.startswith("sinks") for chunks in CHUNKS),
    *((feature, kind, "mixed") for feature in FEATURES if feature not in ("grouped", "sliding") for kind in ["h2o:6"]),
    ("mixed_softcap", "snap:6", "ragged"),
    ("mixed_sinks", "tova:6", "ragged"),
    ("latent_sliding", "tova:6", "ragged"),
    ("two_bases", "window:5", "ragged"),
    ("no_rope_layer", "h2o:1", "mixed"),
    ("mixed_softcap", "h2o:6,offload", "mixed"),
]


@pytest.mark.parametrize(("feature", "kind", "chunks"), CASES)
def test_gradients_equal_those_of_a_masked_forward(feature: str, kind: str, chunks: str) -> None:
    """Of all parameters, and of the queries, keys and values of each layer."""
    check_against_oracle(feature, kind, chunks)


@pytest.mark.parametrize("kind", ["h2o:6", "snap:6", "tova:6"])
def test_one_graph_over_all_chunks_gives_the_same(kind: str) -> None:
    """Without replaying, if there is room for the activations of all chunks."""
    model, ids = copy.deepcopy(model_of("mixed_softcap")), tokens()
    cache = cache_of(model, kind, 2, slack=SLACK)
    loss = loss_with(model, cache)
    total = torch.zeros(())
    for n in CHUNKS["mixed"]:
        step = cache.plan(n)
        total = total + loss(ids.gather(1, step.pos.expand(2, -1)), step)
    total.backward()
    compare(gradients(model), oracle("mixed_softcap", kind, "mixed")[1])


def test_relative_sinks_equal_plain_loops() -> None:
    model, ids = copy.deepcopy(model_of("grouped")), tokens()
    pos = torch.arange(LENGTH)
    for row in ids:
        loss_of_tokens(sinks_by_loops(model, row.tolist(), 2, 5)[None], row[None], pos[None]).backward()
    expected = gradients(model)
    cache = replay_cache_of(model, "sinks:2+5")
    for chunks in ("mixed", "long"):
        cache.backward(ids, CHUNKS[chunks], loss_with(model, cache))
        compare(gradients(model), expected, 10 * ROPE_TOLERANCE)


def no_gradient_from_later_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplayLayer, "collect", lambda self, at, earlier: None)


def evicted_one_query_late(patch: pytest.MonkeyPatch) -> None:
    replay = ReplayLayer._replay

    def late(self: ReplayLayer, *args: Any) -> Any:
        self.until += 1
        try:
            return replay(self, *args)
        finally:
            self.until -= 1

    patch.setattr(ReplayLayer, "_replay", late)


def all_groups_as_the_first(patch: pytest.MonkeyPatch) -> None:
    note = ReplayLayer._note
    patch.setattr(ReplayLayer, "_note", lambda self, pos, step: note(self, pos[:, :1], step))


def old_tokens_without_their_order(patch: pytest.MonkeyPatch) -> None:
    collect = ReplayLayer.collect

    def shifted(self: ReplayLayer, at: Tensor, earlier: Sequence[Tensor]) -> None:
        collect(self, at.roll(1, 2), earlier)

    patch.setattr(ReplayLayer, "collect", shifted)


@pytest.mark.parametrize(
    "plant",
    [no_gradient_from_later_chunks, evicted_one_query_late, all_groups_as_the_first, old_tokens_without_their_order],
)
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_against_oracle("grouped", "h2o:6", "mixed")


# What training needs besides


def test_random_numbers_are_the_same_in_both_passes() -> None:
    model, ids = copy.deepcopy(model_of("grouped")), tokens()
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5))
    found, after = [], []
    for cache in (cache_of(model, "tova:6", 2, slack=SLACK), replay_cache_of(model, "tova:6")):
        torch.manual_seed(5)
        loss = loss_with(model, cache)
        if isinstance(cache, ReplayCache):
            cache.backward(ids, [9] * 4, loss)
        else:
            sum(loss(part, cache.plan(9)) for part in ids.split(9, dim=1)).backward()  # type: ignore[union-attr]
        found.append(gradients(model))
        after.append(torch.rand(()))
    compare(*found)
    assert after[0] == after[1]


def test_activations_are_those_of_one_chunk() -> None:
    """What a backward pass keeps does not grow with the text, apart from the keys and values themselves."""
    model = copy.deepcopy(model_of("grouped"))

    def most_kept(length: int, replaying: bool) -> int:
        """Most bytes that are kept for backward at a time."""
        cache = (replay_cache_of if replaying else cache_of)(model, "h2o:6", 1, length)  # type: ignore[operator]
        kept: dict[int, int] = {}
        most = 0

        class Kept:
            def __init__(self, x: Tensor) -> None:
                nonlocal most
                self.x = x
                kept[id(self)] = x.numel() * x.element_size()
                most = max(most, sum(kept.values()))

            def __del__(self) -> None:
                del kept[id(self)]

        ids, loss = random_ids((1, length), 1, VOCABULARY), loss_with(model, cache)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda held: held.x):
            if isinstance(cache, ReplayCache):
                cache.backward(ids, [8] * (length // 8), loss)
            else:
                sum(loss(part, cache.plan(8)) for part in ids.split(8, dim=1)).backward()  # type: ignore[union-attr]
        model.zero_grad()
        return most

    assert most_kept(128, True) == most_kept(32, True)
    assert most_kept(128, False) > 3.5 * most_kept(32, False)


def test_a_cache_serves_one_text_after_the_other_and_a_failure_between() -> None:
    model, cache = copy.deepcopy(model_of("mixed_softcap")), replay_cache_of(model_of("mixed_softcap"), "h2o:6")
    loss, calls = loss_with(model, cache), 0

    def failing(idx: Tensor, step: Step) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second pass, after a backward pass
            raise RuntimeError("on purpose")
        return loss(idx, step)

    for seed in (2, 3, 1):
        calls = 0
        with pytest.raises(RuntimeError, match="on purpose"):
            cache.backward(random_ids((2, LENGTH), 9, VOCABULARY), CHUNKS["long"], failing)
        assert cache.lengths == [0, 0]
        model.zero_grad()
        total = cache.backward(random_ids((2, LENGTH), seed, VOCABULARY), CHUNKS["mixed"], loss)
        actual = gradients(model)
    expected, grads, _ = oracle("mixed_softcap", "h2o:6", "mixed")
    assert total.item() == pytest.approx(expected, abs=1e-8)
    compare(actual, grads)


@pytest.mark.parametrize("trained", ["lm_head", "transformer.h.1.mlp", "transformer.h.0.attn.proj", "transformer.wte"])
def test_some_parameters_only(trained: str) -> None:
    model = copy.deepcopy(model_of("grouped"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    cache = replay_cache_of(model, "h2o:6")
    cache.backward(tokens(), CHUNKS["mixed"], loss_with(model, cache))
    grads = {name: grad for name, grad in oracle("grouped", "h2o:6", "mixed")[1].items() if name.startswith(trained)}
    assert grads
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in grads)
    compare({name: model.get_parameter(name).grad for name in grads}, grads)  # type: ignore[misc]


def test_chunks_without_a_loss_hand_on_what_later_ones_ask_of_them() -> None:
    """An answer after a long prompt: only the last chunk has a loss."""
    model, ids = copy.deepcopy(model_of("grouped")), tokens()
    found = []
    for cache in (cache_of(model, "h2o:6", 2, slack=SLACK), replay_cache_of(model, "h2o:6")):
        plain = loss_with(model, cache)

        def loss(idx: Tensor, step: Step, plain: Any = plain) -> Tensor:
            value = plain(idx, step)
            return value if step.start == 27 else torch.zeros(())

        if isinstance(cache, ReplayCache):
            cache.backward(ids, [9] * 4, loss)
        else:
            sum(loss(part, cache.plan(9)) for part in ids.split(9, dim=1)).backward()  # type: ignore[union-attr]
        found.append(gradients(model))
    compare(*found)
    assert found[0]["transformer.wte.weight"].abs().sum() > 0


def test_a_store_of_few_bits_is_refused() -> None:
    with pytest.raises(UserError, match="int8 has no gradient"):
        ReplayCache.from_config(model_of("grouped").config, "h2o:6,int8")


def test_what_it_takes_is_known_before() -> None:
    """The keys and values of the whole text, and when each was let go of, on top of what the decider keeps."""
    config = model_of("grouped").config
    sizes: dict[str, Any] = {"batch_size": 2, "max_length": 64, "dtype": torch.float32}
    until = config.n_layer * 2 * (config.n_query_groups or 0) * 64 * 8
    plain = sum(KVCache.estimate(config, kind, **sizes) for kind in ("h2o:6", "dense"))
    assert ReplayCache.estimate(config, "h2o:6", **sizes) == plain + until
