# Licensed under the Apache License 2.0, see the LICENSE file.

"""Mistral, Mathstral and Mixtral."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_BASE: dict[str, Any] = {
    "block_size": 32768,
    "vocab_size": 50254,  # not the tokenizer's, but what LitGPT's files say; `padded_vocab_size` bounds it
    "n_layer": 32,
    "n_query_groups": 8,
    "intermediate_size": 14336,
    "rope_base": 1000000,
}
_LARGE: dict[str, Any] = {"n_layer": 88, "n_head": 96, "n_embd": 12288, "intermediate_size": 28672}
_8X22B: dict[str, Any] = {"n_layer": 56, "n_head": 48, "n_embd": 6144, "intermediate_size": 16384}

FAMILIES = [
    Family(
        org="mistralai",
        hf_type="mistral",
        prompt="codellama",
        prompt_for="Instruct",
        base=_BASE | {"padded_vocab_size": 32768},
        sizes=[
            size(
                "Mistral-7B{}-v0.1",
                "-Instruct",
                padded_vocab_size=32000,
                block_size=4096,
                rope_base=10000,
                sliding_window_size=4096,
            ),
            size("Mistral-7B-v0.2", org="unsloth", padded_vocab_size=32000),
            size("Mistral-7B-Instruct-v0.2", padded_vocab_size=32000),
            size("Mistral-7B{}-v0.3", "-Instruct"),
            size("Mistral-Large-Instruct-2407", **_LARGE),
            size("Mistral-Large-Instruct-2411", **_LARGE),
            size("Mathstral-7B-v0.1", hf="mathstral-7B-v0.1", sliding_window_size=4096),
        ],
    ),
    Family(
        org="mistralai",
        hf_type="mixtral",
        prompt="codellama",
        prompt_for="Instruct",
        base=_BASE | {"n_expert": 8, "n_expert_per_token": 2},
        sizes=[
            size("Mixtral-8x7B{}-v0.1", "-Instruct", padded_vocab_size=32000),
            size("Mixtral-8x22B{}-v0.1", "-Instruct", padded_vocab_size=32768, block_size=65536, **_8X22B),
        ],
    ),
]
