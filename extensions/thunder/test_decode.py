# Licensed under the Apache License 2.0, see the LICENSE file.

"""Decoding through Thunder equals eager decoding, from one trace. Needs an environment of its own, see README.md."""

from __future__ import annotations

from typing import Any

import pytest
import thunder
import torch
from decode import thunder_decode

from litgpt.config import Config
from litgpt.kvcache import KVCache
from litgpt.model import GPT

MAX_LENGTH = 48
LLAMA: dict[str, Any] = {
    "block_size": 64,
    "vocab_size": 100,
    "padding_multiple": 1,
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 32,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 48,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "window": {"sliding_window_size": 6, "sliding_window_indices": [1, 0]},
    "experts": {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 20},
    "neox": {"bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "parallel_residual": True},
    "latent": {
        "n_query_groups": 4,
        "latent_attention": {
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
        },
    },
}


@pytest.mark.parametrize("kind", ["dense", "window:5", "sinks:2+5"])
@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_same_logits_from_one_trace(name: str, kind: str) -> None:
    """Prompts of two lengths, then steps past the wrap of every ring."""
    torch.manual_seed(0)
    model = GPT(Config(name=name, **(LLAMA | MODELS[name]))).eval()
    caches = [KVCache.from_config(model.config, kind, 2, MAX_LENGTH, torch.float32) for _ in range(2)]
    prompts = torch.randint(0, 100, (2, 9))
    for cache in caches:
        model(prompts, cache=cache, step=cache.plan([9, 4]))
    step = thunder_decode(model)
    for _ in range(12):
        idx = torch.randint(0, 100, (2, 1))
        actual = step(idx, caches[0], caches[0].plan(1))
        expected = model(idx, cache=caches[1], step=caches[1].plan(1))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert thunder.cache_misses(step.compiled) == 1
