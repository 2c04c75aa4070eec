# Licensed under the Apache License 2.0, see the LICENSE file.

"""The models known by name: how a family is written down, and looking one up.

A family is a file beside this one with a list `FAMILIES`. Its fields start from what the `model_type` implies
(`architectures.ARCHITECTURES`), then come the family's base and the row of the size.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from litgpt.errors import UserError
from litgpt.families.architectures import ARCHITECTURES

MODULES = (
    "falcon",
    "gemma",
    "llama",
    "llama_others",
    "mistral",
    "olmo",
    "phi",
    "pythia",
    "qwen",
    "smollm",
    "stablelm",
)


@dataclass(frozen=True)
class Size:
    """One shape and the models that have it; written with `size`."""

    name: str
    variants: tuple[str, ...]
    fields: dict[str, Any]
    org: str | None = None
    hf: str | None = None


def size(name: str, *variants: str, org: str | None = None, hf: str | None = None, **fields: Any) -> Size:
    """One row of a family.

    Args:
        name: the model's name. `{}` marks where a variant's suffix goes, the end unless given.
        variants: suffixes of further models of this shape, such as `-Instruct`.
        org: the organisation on the hub, if not the family's.
        hf: the name on the hub, if the family's rule does not give it.
        fields: fields of `Config` that differ from the family's base.
    """
    return Size(name, variants, fields, org, hf)


@dataclass(frozen=True)
class Family:
    """Models that share an organisation, an architecture and a prompt style.

    Args:
        org: organisation on the hub.
        hf_type: the `model_type`, a key of `ARCHITECTURES`.
        prompt: named prompt style of the models whose name contains `prompt_for`.
        prompt_for: part of a name; every name contains the empty one.
        base: fields of `Config` that all sizes share.
        pattern: sliding and global layers, `"5:1"` or `"SL"`; needs `sliding_window_size`.
        hf_name: the name on the hub from the name here.
        sizes: the rows.
    """

    org: str
    hf_type: str
    prompt: str | None = None
    prompt_for: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    pattern: str | None = None
    hf_name: Callable[[str], str] = str
    sizes: list[Size] = field(default_factory=list)

    def configs(self) -> Iterator[dict[str, Any]]:
        """The fields of each model."""
        for row in self.sizes:
            fields = ARCHITECTURES[self.hf_type].fixed | self.base | row.fields
            if self.pattern:
                indices = layer_pattern(self.pattern, fields["n_layer"])
                fields["sliding_window_indices"] = indices
                if "rope_local_base_freq" in fields:
                    fields["rope_indices"] = list(indices)
            for variant in ("", *row.variants):
                name = row.name.format(variant) if "{}" in row.name else row.name + variant
                hub = {"org": row.org or self.org, "name": row.hf or self.hf_name(name)}
                prompt = self.prompt if self.prompt_for in name else None
                named = {"name": name, "hf_config": hub, "family": self.hf_type, "prompt_style": prompt}
                yield copy.deepcopy(named | fields)


def layer_pattern(pattern: str, n_layer: int) -> list[int]:
    """One entry a layer, 1 = sliding, 0 = global.

    Args:
        pattern: `"5:1"` (five sliding, then one global) or letters, `S` sliding and `L` global; repeated as needed.
        n_layer: number of layers.
    """
    if ":" in pattern:
        sliding, full = pattern.split(":")
        pattern = "S" * int(sliding) + "L" * int(full)
    assert set(pattern) <= {"S", "L"}, pattern
    return [int(pattern[i % len(pattern)] == "S") for i in range(n_layer)]


@functools.cache
def configs() -> list[dict[str, Any]]:
    """The fields of every model known by name."""
    modules = (importlib.import_module(f"litgpt.families.{name}") for name in MODULES)
    return [config for module in modules for family in module.FAMILIES for config in family.configs()]


@functools.cache
def name_to_config() -> dict[str, dict[str, Any]]:
    """The same, by name."""
    by_name = {config["name"]: config for config in configs()}
    assert len(by_name) == len(configs()), "two models have one name"
    return by_name


def find(name: str) -> dict[str, Any] | None:
    """Fields of a model by its name here, its name on the hub, or `organisation/name`; None when unknown."""
    if not name:
        return None
    if name in name_to_config():
        return name_to_config()[name]
    for config in configs():
        hub = config.get("hf_config", {})
        if name in (hub.get("name"), f"{hub.get('org')}/{hub.get('name')}"):
            return config
    return None


def lookup(name: str) -> dict[str, Any]:
    """Like `find`, with a private copy of the fields.

    Raises:
        UserError: unknown name; the hint lists the most similar ones.
    """
    if (found := find(name)) is not None:
        return copy.deepcopy(found)
    known = {n.lower(): n for n in name_to_config()}
    close = difflib.get_close_matches(name.split("/")[-1].lower(), known, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(known[n] for n in close)}?" if close else "see litgpt.config.configs for the names"
    raise UserError(f"{name!r} is not a supported config name", hint)


def guess_family(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the name and shape of an unregistered LitGPT config imply for the fields that LitGPT does not write."""
    name = str(fields.get("name") or (fields.get("hf_config") or {}).get("name") or "")
    low, mlp = name.lower(), fields.get("mlp_class_name", "GptNeoxMLP")
    by_name = (
        ("gemma-3", "gemma3_text"),
        ("gemma-2-", "gemma2"),
        ("gemma", "gemma"),
        ("qwen3", "qwen3_moe" if mlp == "LLaMAMoE" else "qwen3"),
        ("qwen", "qwen2"),
        ("qwq", "qwen2"),
        ("phi-3", "phi3"),
        ("phi-4", "phi3"),
        ("phi", "phi"),
        ("mistral", "mistral"),
        ("olmo-2", "olmo2"),
        ("olmo", "olmo"),
        ("falcon-", "falcon"),
        ("stablelm-3b", "stablelm"),
        ("stablelm-zephyr", "stablelm"),
        ("stable-code", "stablelm"),
    )
    family = next((kind for part, kind in by_name if part in low), None) or _family_by_shape(fields, mlp)
    out: dict[str, Any] = {"family": family}
    if "Gemma" in name:
        out["norm_unit_offset"] = out["tie_embeddings"] = True
    if "OLMo" in name and fields.get("norm_class_name", "LayerNorm") == "LayerNorm":
        out["norm_affine"] = False
    if mlp == "LLaMAMoE":
        out["moe_router"] = "sigmoid" if fields.get("n_expert_groups") else "topk_softmax"
    return out


def _family_by_shape(fields: Mapping[str, Any], mlp: str) -> str:
    if fields.get("latent_attention"):
        return "deepseek_v3"
    if mlp == "LLaMAMoE":
        return "qwen3_moe" if fields.get("norm_qk") else "mixtral"
    if mlp == "LLaMAMLP":
        return "qwen3" if fields.get("norm_qk") else "qwen2" if fields.get("attn_bias") else "llama"
    return "gemma" if mlp == "GemmaMLP" else "gpt_neox"
