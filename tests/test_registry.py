# Licensed under the Apache License 2.0, see the LICENSE file.

"""The models known by name: LitGPT's values, and that the documents name every type."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from litgpt.config import EXPLICIT, Config, configs, name_to_config
from litgpt.families.architectures import ARCHITECTURES
from litgpt.families.from_hf import _ALIASES, _WRAPPERS
from litgpt.families.registry import MODULES, layer_pattern

# SHA-256 of the fields that LitGPT 0.5.13 has for these models: `fingerprint` over its own `configs`.
LITGPT_FINGERPRINTS = {
    "falcon": "1502a2838dfb6cc7",
    "gemma": "de4e74864ab8ead2",
    "llama": "6c211e61f6ae4de0",
    "llama_others": "ae2d8ec8b7195f4f",
    "mistral": "6ce969e1044bc658",
    "olmo": "1e052bd2fefe49b3",
    "phi": "4df0faa053160031",
    "pythia": "59f7bdcfca787d4b",
    "qwen": "5bd24f80fb1ea22b",
    "smollm": "29cef80b2c9fa457",
    "stablelm": "1cbbd918c4ba1472",
}


def fingerprint(fields: list[dict[str, Any]]) -> str:
    """One number for the LitGPT fields of many configs."""
    rows = []
    for row in sorted(fields, key=lambda row: row["name"]):
        kept = {key: value for key, value in row.items() if key not in EXPLICIT}
        if kept.get("moe_intermediate_size") == kept.get("intermediate_size"):
            kept["moe_intermediate_size"] = None  # LitGPT fills it in later
        rows.append(kept)
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("module", MODULES)
def test_models_have_litgpts_values(module: str) -> None:
    families = importlib.import_module(f"litgpt.families.{module}").FAMILIES
    names = [c["name"] for family in families for c in family.configs() if "270m" not in c["name"]]
    assert fingerprint([vars(Config.from_name(name)) for name in names]) == LITGPT_FINGERPRINTS[module]


def test_spot_rows() -> None:
    assert len(configs) == len(name_to_config) >= 212  # those of LitGPT 0.5.13 and Gemma 3 270M
    config = Config.from_name("Gemma-2-27b-it")
    assert (config.n_layer, config.attention_scores_scalar, config.sliding_window_indices) == (46, 144, [1, 0] * 23)
    assert (config.family, config.prompt_style) == ("gemma2", "gemma")
    assert config.norm_unit_offset
    assert config.scale_embeddings
    assert Config.from_name("Gemma-2-27b").prompt_style is None
    config = Config.from_name("meta-llama/Meta-Llama-3.1-8B-Instruct")
    assert (config.name, config.prompt_style, config.block_size) == ("Llama-3.1-8B-Instruct", "llama3", 131072)
    config = Config.from_name("Qwen3-30B-A3B")
    assert (config.moe_router, config.n_expert, config.head_size) == ("topk_softmax", 128, 128)
    assert Config.from_name("SmolLM2-135M").tie_embeddings
    assert not Config.from_name("Qwen2.5-7B").tie_embeddings


def test_prompt_styles_exist() -> None:
    from litgpt.prompts import prompt_styles

    assert {c["prompt_style"] for c in configs} - {None} <= set(prompt_styles)


def test_every_config_is_consistent() -> None:
    for fields in configs:
        config = Config(**fields)
        assert config.name == fields["name"]
        assert set(config.hf_config) == {"org", "name"}
        hub = config.hf_config
        assert Config.from_name(f"{hub['org']}/{hub['name']}") == config == Config.from_name(hub["name"])


def test_layer_patterns() -> None:
    assert layer_pattern("5:1", 8) == [1, 1, 1, 1, 1, 0, 1, 1]
    assert layer_pattern("SSSL", 5) == [1, 1, 1, 0, 1]


def test_the_documents_name_every_type() -> None:
    root = Path(__file__).parent.parent
    rows = re.findall(r"^\| `(\w+)` \|", (root / "litgpt/families/README.md").read_text(encoding="utf-8"), re.M)
    assert rows == sorted(ARCHITECTURES)
    models = (root / "README.md").read_text(encoding="utf-8").split("## Models")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*\|(.*)\|$", models, re.M))))
    assert named - {"model_type"} == {*ARCHITECTURES, *_WRAPPERS, *_ALIASES}
