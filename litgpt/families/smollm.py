# Licensed under the Apache License 2.0, see the LICENSE file.

"""SmolLM2."""

from __future__ import annotations

from litgpt.families.registry import Family, size

FAMILIES = [
    Family(
        org="HuggingFaceTB",
        hf_type="llama",
        prompt="smollm2",
        prompt_for="-Instruct",
        base={"block_size": 8192, "vocab_size": 49152, "rope_base": 100000, "tie_embeddings": True},
        sizes=[
            size(
                "SmolLM2-135M", "-Instruct", n_layer=30, n_head=9, n_query_groups=3, n_embd=576, intermediate_size=1536
            ),
            size(
                "SmolLM2-360M", "-Instruct", n_layer=32, n_head=15, n_query_groups=5, n_embd=960, intermediate_size=2560
            ),
            size("SmolLM2-1.7B", "-Instruct", n_layer=24, n_embd=2048, intermediate_size=8192, rope_base=130000),
        ],
    ),
]
