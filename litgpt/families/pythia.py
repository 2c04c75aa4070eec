# Licensed under the Apache License 2.0, see the LICENSE file.

"""Pythia."""

from __future__ import annotations

from litgpt.families.registry import Family, size

FAMILIES = [
    Family(
        org="EleutherAI",
        hf_type="gpt_neox",
        base={"block_size": 2048, "padding_multiple": 128},
        sizes=[
            size("pythia-14m", block_size=512, n_layer=6, n_embd=128, n_head=4),
            size("pythia-31m", block_size=1024, n_layer=6, n_embd=256, n_head=8),
            size("pythia-70m", "-deduped", n_layer=6, n_embd=512, n_head=8),
            size("pythia-160m", "-deduped", n_layer=12, n_embd=768, n_head=12),
            size("pythia-410m", "-deduped", n_layer=24, n_embd=1024, n_head=16),
            size("pythia-1b", "-deduped", n_layer=16, n_embd=2048, n_head=8),
            size("pythia-1.4b", "-deduped", n_layer=24, n_embd=2048, n_head=16),
            size("pythia-2.8b", "-deduped", n_layer=32, n_embd=2560, n_head=32),
            size("pythia-6.9b", "-deduped", n_layer=32, n_embd=4096, n_head=32, padding_multiple=256),
            size("pythia-12b", "-deduped", n_layer=36, n_embd=5120, n_head=40, padding_multiple=512),
        ],
    ),
]
