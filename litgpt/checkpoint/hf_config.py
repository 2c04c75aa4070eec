# Licensed under the Apache License 2.0, see the LICENSE file.

"""A `Config` as Hugging Face's `config.json`, for models that never had one: the way back of `Config.from_hf`."""

from __future__ import annotations

import dataclasses
from typing import Any

from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.families.architecture import Architecture
from litgpt.families.architectures import ARCHITECTURES
from litgpt.families.from_hf import RENAMES, REQUIRED

# The classes that `architectures` names; the types that a config.json can be made for
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
# Fields that do not describe the architecture
_BESIDE = {"name", "hf_config", "prompt_style", "padding_multiple", "vocab_size"}


def to_hf(config: Config) -> dict[str, Any]:
    """Write a `Config` as `config.json`.

    Raises:
        UserError: the architecture has something that the file of its type has no key for.
    """
    family = config.family
    if family not in _CLASSES:
        raise UserError(
            f"no config.json can be made for the model type {family!r}",
            "copy the config.json of the original model into the folder",
        )
    arch = ARCHITECTURES[family]
    out: dict[str, Any] = {"model_type": family, "architectures": [_CLASSES[family]]}
    for key, (name, _) in RENAMES.items():
        value = getattr(config, name)
        if value is not None and (key in arch.keys or key in (*REQUIRED, "tie_word_embeddings")):
            out[key] = value
    if family == "gpt_neox":  # its key is about the attention, whose biases are those of all layers here
        out["attention_bias"] = config.bias
    out["vocab_size"] = config.padded_vocab_size
    out |= _activation(config, arch) | _window(config, arch) | _rope(config, arch)
    again = Config.from_hf(out)
    wanted, found = architecture_fields(config), architecture_fields(again)
    lost = [name for name in wanted if wanted[name] != found[name]]
    if lost:
        raise UserError(
            f"no config.json of the type {family!r} says what this model has: {', '.join(lost)}",
            "copy the config.json of the original model into the folder",
        )
    return out


def architecture_fields(config: Config) -> dict[str, Any]:
    """The fields that decide what the model computes, in one spelling."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    fields["rope_adjustments"] = {k: v for k, v in (config.rope_adjustments or {}).items() if k != "rope_type"}
    for name in ("attn_proj_bias", "mlp_bias"):
        fields[name] = config.bias if fields[name] is None else fields[name]
    fields["attention_scores_scalar"] = config.attention_scale
    if not any(config.sliding_window_indices or []):
        fields["sliding_window_size"] = fields["sliding_window_indices"] = None
    return {name: value for name, value in fields.items() if name not in _BESIDE}


def _activation(config: Config, arch: Architecture) -> dict[str, Any]:
    key = "hidden_activation" if "hidden_activation" in arch.keys else "hidden_act"
    gelu = "gelu_pytorch_tanh" if config.gelu_approximate == "tanh" else "gelu"
    return {key: gelu if config.mlp_class_name in ("GemmaMLP", "GptNeoxMLP") else "silu"}


def _window(config: Config, arch: Architecture) -> dict[str, Any]:
    if not arch.window:
        return {}
    sliding = config.sliding_window_indices or [0] * config.n_layer
    out: dict[str, Any] = {"sliding_window": config.sliding_window_size if any(sliding) else None}
    if "use_sliding_window" in arch.keys:
        out["use_sliding_window"] = any(sliding)
    if arch.window != "all":
        out["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return out


def _rope(config: Config, arch: Architecture) -> dict[str, Any]:
    neox = config.family == "gpt_neox"
    out: dict[str, Any] = {"rotary_emb_base" if neox else "rope_theta": config.rope_base}
    if neox or "partial_rotary_factor" in arch.keys:
        out["rotary_pct" if neox else "partial_rotary_factor"] = config.rotary_percentage
    if config.rope_local_base_freq is not None:
        out["rope_local_base_freq"] = config.rope_local_base_freq
    if config.rope_adjustments is not None:
        scaling = dict(config.rope_adjustments)
        scaling.setdefault("rope_type", "llama3" if "low_freq_factor" in scaling else "linear")
        if "original_max_seq_len" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
        out["rope_scaling"] = scaling
    return out
