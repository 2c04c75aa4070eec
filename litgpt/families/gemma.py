# Licensed under the Apache License 2.0, see the LICENSE file.

"""Gemma 1, 2 and 3, and CodeGemma."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_7B: dict[str, Any] = {
    "n_layer": 28,
    "n_embd": 3072,
    "n_head": 16,
    "head_size": 256,
    "intermediate_size": 24576,
}
_GEMMA_2: dict[str, Any] = {
    "block_size": 8192,
    "vocab_size": 256000,
    "head_size": 256,
    "attention_scores_scalar": 256,
    "sliding_window_size": 4096,
    "attention_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3: dict[str, Any] = {
    "block_size": 131072,
    "vocab_size": 262144,
    "head_size": 256,
    "attention_scores_scalar": 256,
    "rope_base": 1000000,
    "rope_local_base_freq": 10000,
}
_LONG: dict[str, Any] = {"sliding_window_size": 1024, "rope_adjustments": {"factor": 8.0}}
_270M: dict[str, Any] = {"n_layer": 18, "n_embd": 640, "n_head": 4, "n_query_groups": 1, "intermediate_size": 2048}

FAMILIES = [
    Family(
        org="google",
        hf_type="gemma",
        prompt="gemma",
        prompt_for="-it",
        base={"vocab_size": 256000, "padding_multiple": 64},
        hf_name=str.lower,
        sizes=[
            size("Gemma-2b", "-it", n_layer=18, n_embd=2048, n_head=8, n_query_groups=1, intermediate_size=16384),
            size("Gemma-7b", "-it", **_7B),
            size("CodeGemma-7b-it", **_7B),
        ],
    ),
    Family(
        org="google",
        hf_type="gemma2",
        prompt="gemma",
        prompt_for="-it",
        base=_GEMMA_2,
        pattern="SL",
        hf_name=str.lower,
        sizes=[
            size("Gemma-2-2b", "-it", n_layer=26, n_embd=2304, n_head=8, n_query_groups=4, intermediate_size=9216),
            size("Gemma-2-9b", "-it", n_layer=42, n_embd=3584, n_head=16, n_query_groups=8, intermediate_size=14336),
            size(
                "Gemma-2-27b",
                "-it",
                n_layer=46,
                n_embd=4608,
                n_head=32,
                n_query_groups=16,
                intermediate_size=36864,
                head_size=128,
                attention_scores_scalar=144,
            ),
        ],
    ),
    Family(
        org="google",
        hf_type="gemma3_text",
        prompt="gemma",
        prompt_for="-it",
        base=_GEMMA_3 | {"sliding_window_size": 512},
        pattern="5:1",
        hf_name=str.lower,
        sizes=[
            size("Gemma-3-270m", "-it", block_size=32768, **_270M),
            size("Gemma-3-1b-it", n_layer=26, n_embd=1152, n_head=4, n_query_groups=1, intermediate_size=6912),
            size(
                "Gemma-3-4b-it", n_layer=34, n_embd=2560, n_head=8, n_query_groups=4, intermediate_size=10240, **_LONG
            ),
            size(
                "Gemma-3-12b-it", n_layer=48, n_embd=3840, n_head=16, n_query_groups=8, intermediate_size=15360, **_LONG
            ),
            size(
                "Gemma-3-27b-it",
                n_layer=62,
                n_embd=5376,
                n_head=32,
                n_query_groups=16,
                intermediate_size=21504,
                head_size=128,
                attention_scores_scalar=168,
                **_LONG,
            ),
        ],
    ),
]
