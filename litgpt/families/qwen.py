# Licensed under the Apache License 2.0, see the LICENSE file.

"""Qwen2.5 (general, Coder, Math, one million tokens), QwQ, and Qwen3 dense and mixture of experts."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size


def _shape(n_layer: int, n_head: int, n_query_groups: int, n_embd: int, intermediate_size: int) -> dict[str, Any]:
    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_query_groups": n_query_groups,
        "n_embd": n_embd,
        "intermediate_size": intermediate_size,
    }


_BASE: dict[str, Any] = {
    "block_size": 32768,
    "vocab_size": 151643,
    "padded_vocab_size": 151936,
    "norm_eps": 1e-6,
    "rope_base": 1000000,
}
_TIED: dict[str, Any] = {"tie_embeddings": True}
_WIDE: dict[str, Any] = {"padded_vocab_size": 152064}
_0_5B = _shape(24, 14, 2, 896, 4864) | _TIED
_1_5B = _shape(28, 12, 2, 1536, 8960) | _TIED
_3B = _shape(36, 16, 2, 2048, 11008) | _TIED
_7B = _shape(28, 28, 4, 3584, 18944) | _WIDE
_14B = _shape(48, 40, 8, 5120, 13824) | _WIDE | {"norm_eps": 1e-5}
_32B = _shape(64, 40, 8, 5120, 27648) | _WIDE | {"norm_eps": 1e-5}
_72B = _shape(80, 64, 8, 8192, 29568) | _WIDE | {"norm_eps": 1e-5}
_1M: dict[str, Any] = {"block_size": 1010000, "rope_base": 10000000, "norm_eps": 1e-5}

_QWEN3 = _BASE | {"block_size": 40960, "head_size": 128}
_30B_A3B = _shape(48, 32, 4, 2048, 6144) | {"moe_intermediate_size": 768}
_235B_A22B = _shape(94, 64, 4, 4096, 12288) | {"moe_intermediate_size": 1536}
_2507: dict[str, Any] = {"block_size": 262144, "rope_base": 5000000}
_4B = _shape(36, 32, 8, 2560, 9728) | _TIED

FAMILIES = [
    Family(
        org="Qwen",
        hf_type="qwen2",
        prompt="qwen2.5",
        base=_BASE,
        sizes=[
            size("Qwen2.5-0.5B", "-Instruct", **_0_5B),
            size("Qwen2.5-1.5B", "-Instruct", block_size=131072, **_1_5B),
            size("Qwen2.5-3B", "-Instruct", **_3B),
            size("Qwen2.5-7B", "-Instruct", block_size=131072, **_7B),
            size("Qwen2.5-14B", "-Instruct", block_size=131072, **_14B),
            size("Qwen2.5-32B", "-Instruct", block_size=131072, **_32B),
            size("Qwen2.5-72B", "-Instruct", block_size=131072, **_72B),
            size("Qwen2.5-Coder-0.5B", "-Instruct", **_0_5B),
            size("Qwen2.5-Coder-1.5B", "-Instruct", **_1_5B),
            size("Qwen2.5-Coder-3B", "-Instruct", **_3B),
            size("Qwen2.5-Coder-7B", "-Instruct", **_7B),
            size("Qwen2.5-Coder-14B", "-Instruct", **_14B),
            size("Qwen2.5-Coder-32B", "-Instruct", **_32B),
            size("Qwen2.5-7B-Instruct-1M", **_7B | _1M),
            size("Qwen2.5-14B-Instruct-1M", **_14B | _1M),
        ],
    ),
    Family(
        org="Qwen",
        hf_type="qwen2",
        prompt="qwen2.5-math",
        base=_BASE | {"block_size": 4096, "rope_base": 10000},
        sizes=[
            size("Qwen2.5-Math-1.5B", "-Instruct", **_1_5B),
            size("Qwen2.5-Math-7B", "-Instruct", **_7B),
            size("Qwen2.5-Math-72B", "-Instruct", **_72B),
        ],
    ),
    Family(
        org="Qwen",
        hf_type="qwen2",
        prompt="qwq",
        base=_BASE | _32B,
        sizes=[size("QwQ-32B", block_size=131072), size("QwQ-32B-Preview")],
    ),
    Family(
        org="Qwen",
        hf_type="qwen3",
        prompt="qwen3",
        base=_QWEN3,
        sizes=[
            size("Qwen3-0.6B", "-Base", **_shape(28, 16, 8, 1024, 3072) | _TIED),
            size("Qwen3-1.7B", "-Base", **_shape(28, 16, 8, 2048, 6144) | _TIED),
            size("Qwen3-4B", "-Base", **_4B),
            size("Qwen3-4B-Thinking-2507", **_4B | _2507),
            size("Qwen3-4B-Instruct-2507", **_4B | _2507),
            size("Qwen3-8B", "-Base", **_shape(36, 32, 8, 4096, 12288)),
            size("Qwen3-14B", "-Base", **_shape(40, 40, 8, 5120, 17408)),
            size("Qwen3-32B", **_shape(64, 64, 8, 5120, 25600)),
        ],
    ),
    Family(
        org="Qwen",
        hf_type="qwen3_moe",
        prompt="qwen3",
        # Softmax over the chosen experts: the same as `norm_topk_prob` over all, and how LitGPT's files state it.
        base=_QWEN3 | {"n_expert": 128, "n_expert_per_token": 8, "moe_router": "topk_softmax"},
        sizes=[
            size("Qwen3-30B-A3B", "-Base", **_30B_A3B),
            size("Qwen3-30B-A3B-Thinking-2507", **_30B_A3B | _2507 | {"rope_base": 10000000}),
            size("Qwen3-30B-A3B-Instruct-2507", **_30B_A3B | _2507 | {"rope_base": 10000000}),
            size("Qwen3-235B-A22B", **_235B_A22B),
            size("Qwen3-235B-A22B-Thinking-2507", **_235B_A22B | _2507),
            size("Qwen3-235B-A22B-Instruct-2507", **_235B_A22B | _2507),
        ],
    ),
]
