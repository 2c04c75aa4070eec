# Licensed under the Apache License 2.0, see the LICENSE file.

"""Llama 2, 3, 3.1, 3.2 and 3.3."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_7B: dict[str, Any] = {"n_layer": 32, "intermediate_size": 11008}
_13B: dict[str, Any] = {"n_layer": 40, "n_head": 40, "n_embd": 5120, "intermediate_size": 13824}
_70B: dict[str, Any] = {
    "n_layer": 80,
    "n_head": 64,
    "n_embd": 8192,
    "n_query_groups": 8,
    "intermediate_size": 28672,
}
_8B: dict[str, Any] = {"n_layer": 32, "n_query_groups": 8, "intermediate_size": 14336}
_405B: dict[str, Any] = _70B | {"n_layer": 126, "n_head": 128, "n_embd": 16384, "intermediate_size": 53248}
_1B: dict[str, Any] = {"n_layer": 16, "n_embd": 2048, "n_query_groups": 8, "intermediate_size": 8192}
_3B: dict[str, Any] = {"n_layer": 28, "n_embd": 3072, "n_head": 24, "n_query_groups": 8, "intermediate_size": 8192}

BASE_2: dict[str, Any] = {"vocab_size": 32000, "padding_multiple": 64}
BASE_3: dict[str, Any] = {
    "block_size": 8192,
    "vocab_size": 128000,
    "padded_vocab_size": 128256,
    "rope_base": 500000,
}


def llama3_rope(factor: float) -> dict[str, Any]:
    """Context stretched from 8192 to 131072 tokens."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    return {"block_size": 131072, "rope_adjustments": scaling}


BASE_31 = BASE_3 | llama3_rope(8.0)
BASE_32 = BASE_3 | llama3_rope(32.0) | {"tie_embeddings": True}

FAMILIES = [
    Family(
        org="meta-llama",
        hf_type="llama",
        prompt="llama2",
        prompt_for="-chat",
        base=BASE_2,
        sizes=[
            size("Llama-2-7b{}-hf", "-chat", **_7B),
            size("Llama-2-13b{}-hf", "-chat", **_13B),
            size("Llama-2-70b{}-hf", "-chat", **_70B),
        ],
    ),
    Family(
        org="meta-llama",
        hf_type="llama",
        prompt="llama3",
        prompt_for="-Instruct",
        base=BASE_3,
        hf_name="Meta-{}".format,
        sizes=[size("Llama-3-8B", "-Instruct", **_8B), size("Llama-3-70B", "-Instruct", **_70B)],
    ),
    Family(
        org="meta-llama",
        hf_type="llama",
        prompt="llama3",
        prompt_for="-Instruct",
        base=BASE_31,
        hf_name="Meta-{}".format,
        sizes=[
            size("Llama-3.1-8B", "-Instruct", **_8B),
            size("Llama-3.1-70B", "-Instruct", **_70B),
            size("Llama-3.1-405B", "-Instruct", **_405B),
        ],
    ),
    Family(
        org="meta-llama",
        hf_type="llama",
        prompt="llama3",
        prompt_for="-Instruct",
        base=BASE_32,
        sizes=[size("Llama-3.2-1B", "-Instruct", **_1B), size("Llama-3.2-3B", "-Instruct", **_3B)],
    ),
    Family(
        org="meta-llama",
        hf_type="llama",
        prompt="llama3",
        base=BASE_31,
        sizes=[size("Llama-3.3-70B-Instruct", **_70B)],
    ),
]
