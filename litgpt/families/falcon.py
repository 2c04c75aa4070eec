# Licensed under the Apache License 2.0, see the LICENSE file.

"""Falcon 7B, 40B and 180B. Falcon 3 has the Llama architecture, see `llama_others`."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_7B: dict[str, Any] = {"n_layer": 32, "n_head": 71, "n_embd": 4544, "n_query_groups": 1, "shared_attention_norm": True}
_40B: dict[str, Any] = {"n_layer": 60, "n_head": 128, "n_embd": 8192, "n_query_groups": 8}
_180B: dict[str, Any] = {"n_layer": 80, "n_head": 232, "n_embd": 14848, "n_query_groups": 8}

FAMILIES = [
    Family(
        org="tiiuae",
        hf_type="falcon",
        prompt="falcon",
        prompt_for="-instruct",
        base={"block_size": 2048, "vocab_size": 65024, "padded_vocab_size": 65024},
        sizes=[
            size("falcon-7b", "-instruct", **_7B),
            size("falcon-40b", "-instruct", **_40B),
            size("falcon-180B", "-chat", **_180B),
        ],
    ),
]
