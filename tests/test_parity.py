# Licensed under the Apache License 2.0, see the LICENSE file.

"""Every family against `transformers`: same folder, same tokens, same logits, with and without the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from litgpt.kvcache import KVCache
from tests.tiny import _DEFAULT_ROPE, _LLAMA4, NAMES, random_ids, tiny_hf_model, tiny_pair

TOLERANCE = 1e-4
# Below and above every window (5, 6) and original length (16, 32) of the rows.
SHORT, LONG = 5, 40


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, float]]]:
    """Collect the differences of a run; `pytest -v` shows them."""
    rows: dict[str, dict[str, float]] = {}
    yield rows
    if request.config.get_verbosity() > 0:
        kinds = ("short", "long", "cached")
        lines = ["", f"{'max abs difference':24}" + "".join(f"{kind:>12}" for kind in kinds)]
        lines += [
            f"{name:24}" + "".join(f"{diffs.get(k, math.nan):12.1e}" for k in kinds) for name, diffs in rows.items()
        ]
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("\n".join(lines))


def max_diff(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; the shapes must be the same."""
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.mark.parametrize(("kind", "length"), [("short", SHORT), ("long", LONG)])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_full_forward(name: str, kind: str, length: int, table: dict[str, dict[str, float]]) -> None:
    theirs, ours = tiny_pair(name)
    ids = random_ids((2, length))
    diff = max_diff(ours(ids), theirs(ids).logits)
    table.setdefault(name, {})[kind] = diff
    assert diff <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_prefill_and_decode(name: str, table: dict[str, dict[str, float]]) -> None:
    theirs, ours = tiny_pair(name)
    ids = random_ids((2, LONG), seed=1)
    expected = theirs(ids).logits
    cache = KVCache.from_config(ours.config, "dense", batch_size=2, max_length=LONG)
    logits = [ours(ids[:, :9], cache=cache, step=cache.plan(9))]
    for t in range(9, LONG):
        logits.append(ours(ids[:, t : t + 1], cache=cache, step=cache.plan(1), last_only=True))
    diff = max_diff(torch.cat(logits, dim=1), expected)
    table.setdefault(name, {})["cached"] = diff
    assert cache.lengths == [LONG, LONG]
    assert diff <= TOLERANCE


@torch.no_grad()
def test_the_oracle_is_sensitive() -> None:
    """The rows differ where they should: a window, a cap or a sink that were ignored would show."""
    ids = random_ids((1, LONG))

    def logits(name: str, **overrides: object) -> Tensor:
        return tiny_hf_model(name, **overrides)(ids).logits

    for name, overrides in [
        ("mistral_window", {"sliding_window": 7}),
        ("gemma2", {"attn_logit_softcapping": 4.0}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"query_pre_attn_scalar": 8}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("deepseek_v3", {"topk_group": 3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmo", {"clip_qkv": None}),
        ("olmoe", {"clip_qkv": None}),
        ("cohere2", {"sliding_window": 7}),
        ("cohere2", {"layer_types": ["sliding_attention"] * 3}),
        ("exaone4", {"layer_types": ["sliding_attention"] * 3}),
        ("smollm3", {"no_rope_layer_interval": 3}),
        ("granite", {"attention_multiplier": 0.3}),
        ("ministral3", {"rope_parameters": _LLAMA4 | {"llama_4_scaling_beta": 0.0}}),
        ("olmo3", {"rope_parameters": {"full_attention": _DEFAULT_ROPE, "sliding_attention": _DEFAULT_ROPE}}),
        ("falcon_40b", {"num_ln_in_parallel_attn": 1}),
    ]:
        assert max_diff(logits(name), logits(name, **overrides)) > 100 * TOLERANCE, (name, overrides)
