# Licensed under the Apache License 2.0, see the LICENSE file.

"""Bytes that the KV caches of known models take: every kind of this package, beside LitGPT 0.5.13 and transformers.

python extensions/benchmark/cache_bytes.py [LENGTH]

Allocates nothing. Ours is asked of the cache itself; the others are formulas, read off their sources.
"""

from __future__ import annotations

import sys

import torch

from litgpt.config import Config
from litgpt.kvcache.memory import bytes_per_token, estimate

KINDS = (
    *("dense", "offload", "int8", "int4"),
    *("window:1024", "sinks:4+1020", "h2o:1024", "snap:1024", "tova:1024", "h2o:1024,int8"),
)
DTYPE = torch.bfloat16
DEEPSEEK_V3 = Config(
    name="DeepSeek-V3",
    block_size=163840,
    n_layer=61,
    n_embd=7168,
    n_head=128,
    latent_attention={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
)


def models() -> list[Config]:
    """The rows of the table."""
    return [*map(Config.from_name, ("Llama-3-8B", "Qwen3-8B", "Gemma-3-4b-it")), DEEPSEEK_V3]


def litgpt_bytes(config: Config, length: int) -> int:
    """What LitGPT 0.5.13 allocates for one row in 16 bits: `build_kv_cache` of the two attention classes in `model.py`.

    Keys and values of every head for latent attention, of every group otherwise; a layer with a sliding window has
    `min(length, window)` slots.
    """
    return sum(2 * _values_per_slot(config) * min(length, w or length) for w in _windows(config))


def transformers_bytes(config: Config, length: int) -> int:
    """What transformers 5 holds for one row of `length` tokens in 16 bits: `DynamicCache` of `cache_utils.py`.

    A layer with a sliding window keeps `window - 1` tokens (`DynamicSlidingWindowLayer.update`); DeepSeek's attention
    caches expanded keys and values of every head (`DeepseekV3Attention.forward`).
    """
    return sum(2 * _values_per_slot(config) * min(length, w - 1 if w else length) for w in _windows(config))


def _values_per_slot(config: Config) -> int:
    """Numbers that both packages keep of a token and layer."""
    if config.latent_attention is not None:
        return config.n_head * (config.qk_head_dim + config.v_head_dim)
    assert config.n_query_groups is not None
    assert config.head_size is not None
    return 2 * config.n_query_groups * config.head_size


def _windows(config: Config) -> list[int | None]:
    return [config.layer_window(i) for i in range(config.n_layer)]


def main() -> None:
    """Print the table."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    lines = [
        f"One row in bfloat16: bytes that a token adds once windows and budgets are full, and MiB at {length} tokens",
        "",
        "| kind | " + " | ".join(config.name for config in models()) + " |",
        "|---|" + "---|" * len(models()),
    ]
    for kind in KINDS:
        cells = [(bytes_per_token(c, kind, DTYPE), estimate(c, kind, 1, length, DTYPE)) for c in models()]
        lines.append(_line(kind, cells))
    for name, formula in (("LitGPT 0.5.13", litgpt_bytes), ("transformers 5", transformers_bytes)):
        far = 2**30
        cells = [(formula(c, far + 1) - formula(c, far), formula(c, length)) for c in models()]
        lines.append(_line(name, cells))
    sys.stdout.write("\n".join(lines) + "\n")


def _line(name: str, cells: list[tuple[int, int]]) -> str:
    return f"| {name} | " + " | ".join(f"{token}, {total / 2**20:.1f} MiB" for token, total in cells) + " |"


if __name__ == "__main__":
    main()
