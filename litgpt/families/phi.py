# Licensed under the Apache License 2.0, see the LICENSE file.

"""Phi-1.5, 2, 3, 3.5 and 4."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_MINI: dict[str, Any] = {"n_layer": 32, "n_embd": 3072, "intermediate_size": 8192}
_PHI_4: dict[str, Any] = {
    "vocab_size": 100352,
    "n_layer": 40,
    "n_embd": 5120,
    "n_head": 40,
    "n_query_groups": 10,
    "intermediate_size": 17920,
}
_PHI_4_MINI: dict[str, Any] = _MINI | {
    "vocab_size": 200019,
    "padded_vocab_size": 200064,
    "block_size": 131072,
    "n_head": 24,
    "n_query_groups": 8,
    "rotary_percentage": 0.75,
    "sliding_window_size": 262145,
    "tie_embeddings": True,
}


def _phi_4(prompt: str, name: str, **fields: Any) -> Family:
    return Family(org="microsoft", hf_type="phi3", prompt=prompt, sizes=[size(name, **fields)])


FAMILIES = [
    *(
        Family(
            org="microsoft",
            hf_type="phi",
            prompt=prompt,
            base={"vocab_size": 50257, "padded_vocab_size": 51200, "block_size": 2048},
            sizes=[row],
        )
        for prompt, row in (
            ("phi-1", size("phi-1_5", n_layer=24, n_embd=2048)),
            ("phi-2", size("phi-2", n_layer=32, n_embd=2560, rotary_percentage=0.4)),
        )
    ),
    Family(
        org="microsoft",
        hf_type="phi3",
        prompt="phi-3",
        base=_MINI | {"vocab_size": 32000, "padded_vocab_size": 32064},
        sizes=[
            size("Phi-3-mini-4k-instruct", sliding_window_size=2048),
            size("Phi-3-mini-128k-instruct", block_size=131072, sliding_window_size=262145),
            size("Phi-3.5-mini-instruct"),
        ],
    ),
    _phi_4("phi-4", "phi-4", block_size=16384, rope_base=250000, **_PHI_4),
    _phi_4("phi-4-reasoning", "Phi-4-reasoning", block_size=32768, rope_base=500000, **_PHI_4),
    _phi_4("phi-4-reasoning", "Phi-4-reasoning-plus", block_size=32768, rope_base=500000, **_PHI_4),
    _phi_4("phi-4-mini", "Phi-4-mini-instruct", **_PHI_4_MINI),
    _phi_4("phi-4-mini-reasoning", "Phi-4-mini-reasoning", **_PHI_4_MINI),
]
