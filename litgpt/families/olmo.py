# Licensed under the Apache License 2.0, see the LICENSE file.

"""OLMo and OLMo 2."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_7B: dict[str, Any] = {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008}
_13B: dict[str, Any] = {"n_layer": 40, "n_head": 40, "n_embd": 5120, "intermediate_size": 13824}
_OLMO_2: dict[str, Any] = {"vocab_size": 100278, "padded_vocab_size": 100352, "norm_eps": 1e-6, "rope_base": 500000}

_TRAINED = ("SFT", "DPO", "Instruct")

FAMILIES = [
    Family(
        org="allenai",
        hf_type="olmo",
        prompt="olmo",
        base={"vocab_size": 50280, "padded_vocab_size": 50304, "block_size": 2048},
        sizes=[
            size("OLMo-1B-hf", n_layer=16, n_head=16, n_embd=2048, intermediate_size=8192, tie_embeddings=True),
            size("OLMo-7B{}-hf", "-Instruct", **_7B),
        ],
    ),
    Family(
        org="allenai",
        hf_type="olmo2",
        base=_OLMO_2,
        sizes=[size("OLMo-2-1124-7B", **_7B), size("OLMo-2-1124-13B", **_13B)],
    ),
    Family(
        org="allenai",
        hf_type="olmo2",
        prompt="llama3",
        base=_OLMO_2,
        sizes=[size(f"OLMo-2-1124-{n}-{kind}", **s) for n, s in (("7B", _7B), ("13B", _13B)) for kind in _TRAINED],
    ),
]
