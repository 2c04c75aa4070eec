# Licensed under the Apache License 2.0, see the LICENSE file.

"""Models with the Llama architecture that others trained: from scratch, or from Llama's weights."""

from __future__ import annotations

from typing import Any

from litgpt.families.llama import _7B, _8B, _13B, _70B, BASE_2, BASE_31
from litgpt.families.registry import Family, size

_33B: dict[str, Any] = {"n_layer": 60, "n_head": 52, "n_embd": 6656, "intermediate_size": 17920}
_34B: dict[str, Any] = _70B | {"n_layer": 48, "intermediate_size": 22016}
_CODE: dict[str, Any] = {"block_size": 16384, "rope_base": 1000000}
_PLAIN: dict[str, Any] = {"vocab_size": 32000, "padded_vocab_size": 32000}
_INFILLING: dict[str, Any] = {"vocab_size": 32016, "padding_multiple": 16}
_TINY: dict[str, Any] = {"n_layer": 22, "n_embd": 2048, "n_query_groups": 4, "intermediate_size": 5632}
_FALCON_HEADS: dict[str, Any] = {"n_head": 12, "n_query_groups": 4, "n_embd": 3072}
_FALCON: dict[str, dict[str, Any]] = {
    "1B": {"block_size": 4096, "n_layer": 18, "n_head": 8, "n_embd": 2048, "intermediate_size": 8192},
    "3B": {"n_layer": 22, "intermediate_size": 9216},
    "7B": {"n_layer": 28, "intermediate_size": 23040},
    "10B": {"n_layer": 40, "intermediate_size": 23040},
}
_PLATYPUS_70B: dict[str, Any] = _70B | {"n_query_groups": 64}  # as LitGPT has it; the checkpoint's own file wins

FAMILIES = [
    Family(
        org="TinyLlama",
        hf_type="llama",
        prompt="tinyllama",
        prompt_for="chat",
        base=BASE_2 | {"block_size": 2048},
        sizes=[
            size("tiny-llama-1.1b", hf="TinyLlama-1.1B-intermediate-step-1431k-3T", **_TINY),
            size("tiny-llama-1.1b-chat", hf="TinyLlama-1.1B-Chat-v1.0", **_TINY),
            size(
                "micro-llama-300M",
                org="keeeeenw",
                hf="MicroLlama",
                **_TINY | {"n_layer": 12, "n_head": 16, "n_embd": 1024},
            ),
        ],
    ),
    Family(
        org="deepseek-ai",
        hf_type="llama",
        prompt="r1",
        base=BASE_31,
        hf_name="DeepSeek-{}".format,
        sizes=[size("R1-Distill-Llama-8B", **_8B), size("R1-Distill-Llama-70B", **_70B)],
    ),
    Family(
        org="nvidia",
        hf_type="llama",
        prompt="llama3",
        base=BASE_31,
        sizes=[size("Llama-3.1-Nemotron-70B-Instruct-HF", **_70B)],
    ),
    Family(
        org="codellama",
        hf_type="llama",
        prompt="codellama",
        base=_CODE,
        sizes=[
            size("CodeLlama-7b{}-hf", "-Instruct", **_7B | _INFILLING),
            size("CodeLlama-7b-Python-hf", **_7B | _PLAIN),
            size("CodeLlama-13b-hf", **_13B | _INFILLING),
            size("CodeLlama-13b-Python-hf", **_13B | _PLAIN),
            size("CodeLlama-13b-Instruct-hf", **_13B | _INFILLING | {"block_size": 2048}),
            size("CodeLlama-34b{}-hf", "-Python", "-Instruct", **_34B | _PLAIN),
            size("CodeLlama-70b{}-hf", "-Python", **_70B | _INFILLING),
            size("CodeLlama-70b-Instruct-hf", **_70B | _INFILLING | {"vocab_size": 32015}),
        ],
    ),
    Family(
        org="openlm-research",
        hf_type="llama",
        base=BASE_2 | {"block_size": 2048, "norm_eps": 1e-6},
        sizes=[
            size("open_llama_3b", n_layer=26, n_embd=3200, intermediate_size=8640),
            size("open_llama_7b", **_7B),
            size("open_llama_13b", **_13B),
        ],
    ),
    Family(
        org="tiiuae",
        hf_type="llama",
        prompt="falcon3",
        prompt_for="-Instruct",
        base={"block_size": 32768, "vocab_size": 131072, "rope_base": 1000042, "norm_eps": 1e-6} | _FALCON_HEADS,
        sizes=[size(f"Falcon3-{name}-{kind}", **_FALCON[name]) for name in _FALCON for kind in ("Base", "Instruct")],
    ),
    Family(
        org="BSC-LT",
        hf_type="llama",
        prompt="salamandra",
        prompt_for="-instruct",
        base={"block_size": 8192, "vocab_size": 256000},
        sizes=[
            size("salamandra-2b", "-instruct", n_layer=24, n_head=16, n_embd=2048, intermediate_size=5440),
            size("salamandra-7b", "-instruct", **_7B | {"n_query_groups": 8, "norm_eps": 1e-6}),
        ],
    ),
    Family(
        org="garage-bAInd",
        hf_type="llama",
        prompt="platypus",
        base={"vocab_size": 50254, "padded_vocab_size": 32000},
        sizes=[
            size("Platypus-30B", block_size=2048, norm_eps=1e-6, **_33B),
            size("Platypus2-7B", **_7B),
            size("Platypus2-13B", **_13B),
            size("Platypus2-70B", **_PLATYPUS_70B),
            size("Camel-Platypus2-13B", **_13B),
            size("Camel-Platypus2-70B", **_70B),
            size("Stable-Platypus2-13B", **_13B),
            size("Platypus2-70B-instruct", **_70B),
        ],
    ),
    Family(
        org="stabilityai",
        hf_type="llama",
        prompt="freewilly2",
        base=BASE_2,
        sizes=[size("FreeWilly2", **_70B)],
    ),
    Family(
        org="togethercomputer",
        hf_type="llama",
        base=BASE_2,
        sizes=[size("LLaMA-2-7B-32K", rope_condense_ratio=8, **_7B)],
    ),
    Family(
        org="Trelis",
        hf_type="llama",
        prompt="llama2-function-calling",
        base=BASE_2 | {"norm_eps": 1e-6},
        sizes=[size("Llama-2-7b-chat-hf-function-calling-v2", **_7B)],
    ),
]
