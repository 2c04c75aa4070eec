# Licensed under the Apache License 2.0, see the LICENSE file.

"""Tiny random models in float64, one a feature of attention, and short ways to run them over small caches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from litgpt.config import Config
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.spec import CacheKind
from litgpt.model import GPT
from tests.tiny import randomize

MAX_LENGTH = 40
VOCABULARY = 31
TOLERANCE = 1e-10
COMMON: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 12,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 6,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "block_size": MAX_LENGTH,
    "intermediate_size": 14,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
}
LATENT = {"q_lora_rank": 5, "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5}
MIXED = {"sliding_window_size": 3, "sliding_window_indices": [1, 0]}  # the last layer is global
FEATURES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi_head": {"n_query_groups": 4},
    "multi_query": {"n_query_groups": 1, "head_size": 5, "rotary_percentage": 0.5, "bias": True},
    "sliding": {"sliding_window_size": 4},
    "mixed_softcap": {**MIXED, "attention_logit_softcapping": 2.0},
    "mixed_sinks": {**MIXED, "sliding_window_size": 5, "attention_sinks": True},
    "latent": {"n_query_groups": 4, "latent_attention": LATENT},
    "latent_sliding": {"n_query_groups": 4, "latent_attention": LATENT, **MIXED},
    "experts": {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
    "qk_norm": {"norm_qk": True, "post_attention_norm": True},
    "no_rope_layer": {"rope_indices": [0, -1]},
    "two_bases": {**MIXED, "rope_base": 5000.0, "rope_local_base_freq": 100.0, "rope_indices": [1, 0]},
}


@functools.cache
def model_of(feature: str) -> GPT:
    """The model of a row of `FEATURES`. All tests share it: never change it."""
    model = GPT(Config(**{**COMMON, **FEATURES[feature]})).double().eval()
    randomize(model, seed=len(feature))
    return model


def cache_of(model: GPT, kind: str, batch_size: int = 1, max_length: int = MAX_LENGTH, slack: int = 3) -> KVCache:
    """A cache in float64 whose slack is small, so that short chunks are long ones."""
    parsed, config = CacheKind.parse(kind), model.config
    specs = [LayerSpec.from_config(config, i, max_length, slack=slack, kind=parsed) for i in range(config.n_layer)]
    return KVCache(specs, batch_size, torch.float64)


def feed(model: GPT, cache: KVCache, rows: list[list[int]]) -> list[Tensor]:
    """Append `rows` (ragged) to the cache in one forward pass; the logits of the new tokens of each row."""
    counts = [len(row) for row in rows]
    padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
    logits = model(padded, cache=cache, step=cache.plan(counts))
    assert isinstance(logits, Tensor)
    assert torch.isfinite(logits).all(), "padding must stay finite too"
    return [logits[b, :n] for b, n in enumerate(counts)]


def full(model: GPT, row: list[int]) -> Tensor:
    """Logits of one row without a cache, `(T, V)`."""
    logits = model(torch.tensor([row]))
    assert isinstance(logits, Tensor)
    return logits[0]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
