# Licensed under the Apache License 2.0, see the LICENSE file.

"""StableLM and StableCode. The alpha versions have the architecture of GPT-NeoX."""

from __future__ import annotations

from typing import Any

from litgpt.families.registry import Family, size

_ALPHA_7B: dict[str, Any] = {"n_head": 48, "n_embd": 6144, "padding_multiple": 256}
_CODE_ALPHA: dict[str, Any] = {"vocab_size": 49152, "n_layer": 32, "n_embd": 2560}
_3B: dict[str, Any] = {"padded_vocab_size": 50304, "n_layer": 32, "n_embd": 2560, "intermediate_size": 6912}


def _family(hf_type: str, prompt: str | None, *sizes: Any) -> Family:
    return Family(org="stabilityai", hf_type=hf_type, prompt=prompt, sizes=list(sizes))


FAMILIES = [
    _family("gpt_neox", None, size("stablelm-base-alpha-3b"), size("stablelm-base-alpha-7b", **_ALPHA_7B)),
    _family(
        "gpt_neox", "stablelm-alpha", size("stablelm-tuned-alpha-3b"), size("stablelm-tuned-alpha-7b", **_ALPHA_7B)
    ),
    _family(
        "gpt_neox",
        None,
        size("stablecode-completion-alpha-3b", block_size=16384, **_CODE_ALPHA),
        size("stablecode-completion-alpha-3b-4k", **_CODE_ALPHA),
    ),
    _family("gpt_neox", "stablecode", size("stablecode-instruct-alpha-3b", **_CODE_ALPHA)),
    _family("stablelm", None, size("stablelm-3b-4e1t", **_3B), size("stable-code-3b", block_size=16384, **_3B)),
    _family("stablelm", "stablelm-zephyr", size("stablelm-zephyr-3b", **_3B)),
]
