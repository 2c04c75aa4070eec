# Licensed under the Apache License 2.0, see the LICENSE file.

"""The attention function against plain loops, and its blocked paths against the whole ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt import attention
from litgpt import model as model_module
from litgpt.attention import KVView, Step, attend, build_mask_cache
from litgpt.kvcache import KVCache
from tests.tiny import random_ids, tiny_pair

SCALE = 0.3


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    kv_pos: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Any,
) -> Tensor:
    """Query by query, head by head, slot by slot; queries without a position are left at zero."""
    out = torch.zeros(*q.shape[:3], v.size(-1), dtype=q.dtype)
    heads_a_group = q.size(1) // k.size(1)
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            group = h // heads_a_group
            for t in range(q.size(2)):
                at = int(q_pos[b, t])
                exps, total = {}, 0.0 if sinks is None else math.exp(sinks[h])
                for s in range(k.size(2)):
                    held = int(kv_pos[b, s])
                    if 0 <= held <= at and (window is None or held > at - window):
                        score = float(q[b, h, t] @ k[b, group, s]) * SCALE
                        exps[s] = math.exp(score if softcap is None else softcap * math.tanh(score / softcap))
                total += sum(exps.values())
                for s, e in exps.items():
                    out[b, h, t] += e / total * v[b, group, s]
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize("n_queries", [1, 4])
def test_attend_equals_plain_loops(
    n_queries: int, n_groups: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """Two rows of different length, slots in any order, empty slots between, a padded query."""
    generator = torch.Generator().manual_seed(0)
    n_slots, kv_pos = 9, torch.tensor([[4, 5, 6, 7, 1, 2, 3, -1, 8], [0, 1, 2, -1, -1, 5, 4, 3, -1]])
    q = torch.randn(2, 4, n_queries, 6, generator=generator, dtype=torch.float64)
    k = torch.randn(2, n_groups, n_slots, 6, generator=generator, dtype=torch.float64)
    v = torch.randn(2, n_groups, n_slots, 5, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    q_pos = torch.tensor([[5, 6, 7, 8], [3, 4, 5, -1]]) if n_queries == 4 else torch.tensor([[8], [5]])
    step = Step(q_pos, q_pos.amax(dim=1) + 1)
    actual = attend(
        q, KVView(k, v, kv_pos.unsqueeze(1)), step, scale=SCALE, window=window, softcap=softcap, sinks=sinks
    )
    expected = reference(q, k, v, q_pos, kv_pos, window, softcap, sinks)
    valid = (q_pos >= 0)[:, None, :, None]
    torch.testing.assert_close(torch.where(valid, actual, 0.0), expected, atol=1e-5, rtol=0)
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_blocks_of_queries_equal_all_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = tiny_pair(name)
    ids = random_ids((2, 30))
    expected = model(ids)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("expand_bytes", [1, 2**20])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_no_q_lora"])
@torch.no_grad()
def test_expanded_latents_equal_absorbed_ones(name: str, expand_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries expand the latents, one or several heads at a time; few absorb the up-projections instead."""
    _, model = tiny_pair(name)
    ids = random_ids((2, 30))
    expected = model(ids)
    monkeypatch.setattr(model_module, "LATENT_ABSORB_LIMIT", 0)
    monkeypatch.setattr(model_module, "EXPAND_BYTES", expand_bytes)
    torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=0)
    cache = KVCache.from_config(model.config, "dense", batch_size=2, max_length=32)
    chunks = [model(ids[:, a:b], cache=cache, step=cache.plan(b - a)) for a, b in [(0, 20), (20, 21), (21, 30)]]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=1e-4, rtol=0)


def test_layers_share_masks() -> None:
    """One mask a kind of layer and step, not one a layer."""
    _, model = tiny_pair("gemma3_text")  # three sliding layers, one global
    cache = KVCache.from_config(model.config, "dense", batch_size=2, max_length=40)
    with torch.no_grad():
        model(random_ids((2, 9)), cache=cache, step=cache.plan([9, 4]))
        step = cache.plan([3, 2])
        model(random_ids((2, 3)), cache=cache, step=step)
    masks = [key for key in step.memo if isinstance(key, tuple) and key[0] == "mask"]
    assert len(masks) == 2


def test_causal_mask_for_code_that_wants_one() -> None:
    mask = build_mask_cache(4)
    assert mask.shape == (1, 1, 4, 4)
    assert mask.dtype == torch.bool
    assert mask[0, 0].tolist() == [[s <= t for s in range(4)] for t in range(4)]
