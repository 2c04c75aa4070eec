# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reads Hugging Face's `config.json`: `model_type` decides how, so models load without being registered by name.

Three tables say everything: `RENAMES` (a key there -> a field here), `ARCHITECTURES` (what a `model_type` implies, and
what an absent key means) and `IGNORED` (keys without influence on the forward pass). A key in none of them is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litgpt.errors import UserError
from litgpt.families.architecture import Architecture
from litgpt.families.architectures import ARCHITECTURES
from litgpt.families.hf_rope import rope_fields
from litgpt.families.keys import Keys, Kind, words

RENAMES: dict[str, tuple[str, Kind]] = {
    "vocab_size": ("vocab_size", "size"),
    "hidden_size": ("n_embd", "size"),
    "num_hidden_layers": ("n_layer", "size"),
    "num_attention_heads": ("n_head", "size"),
    "num_key_value_heads": ("n_query_groups", "size"),
    "head_dim": ("head_size", "size"),
    "intermediate_size": ("intermediate_size", "size"),
    "max_position_embeddings": ("block_size", "size"),
    "rms_norm_eps": ("norm_eps", "number"),
    "layer_norm_eps": ("norm_eps", "number"),
    "norm_eps": ("norm_eps", "number"),
    "tie_word_embeddings": ("tie_embeddings", "flag"),
    "use_parallel_residual": ("parallel_residual", "flag"),
    "attention_bias": ("attn_bias", "flag"),
    "attention_out_bias": ("attn_proj_bias", "flag"),
    "mlp_bias": ("mlp_bias", "flag"),
    "use_bias": ("bias", "flag"),
    "qk_layernorm": ("norm_qk", "flag"),
    "clip_qkv": ("clip_qkv", "positive"),
    "embedding_multiplier": ("embedding_multiplier", "number"),
    "residual_multiplier": ("residual_multiplier", "number"),
    "attention_multiplier": ("attention_multiplier", "number"),
    "logit_scale": ("logit_multiplier", "number"),
    "query_pre_attn_scalar": ("attention_scores_scalar", "positive"),
    "attn_logit_softcapping": ("attention_logit_softcapping", "positive"),
    "final_logit_softcapping": ("final_logit_softcapping", "positive"),
    "num_local_experts": ("n_expert", "size"),
    "num_experts_per_tok": ("n_expert_per_token", "size"),
    "n_shared_experts": ("n_shared_expert", "count"),
    "moe_intermediate_size": ("moe_intermediate_size", "size"),
    "norm_topk_prob": ("norm_topk_prob", "flag"),
    "routed_scaling_factor": ("routed_scaling_factor", "number"),
    "first_k_dense_replace": ("first_k_dense_replace", "count"),
    "n_group": ("n_expert_groups", "size"),
    "topk_group": ("n_topk_groups", "size"),
    "rope_interleave": ("rope_interleave", "flag"),
    "swiglu_limit": ("swiglu_limit", "positive"),
}

# Other names of the same key, by version and type.
SPELLINGS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
SPELLINGS |= {"num_experts_per_token": "num_experts_per_tok", "experts_per_token": "num_experts_per_tok"}
SPELLINGS |= {"sliding_window_size": "sliding_window"}

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")

# An explicit null there means "none"; everywhere else it means the same as an absent key.
NULLABLE = words(
    """
    num_key_value_heads head_dim sliding_window attn_logit_softcapping final_logit_softcapping q_lora_rank n_group
    topk_group n_shared_experts clip_qkv
    """
)

# Written by every model, or left over from training and generation; none changes the forward pass.
IGNORED = words(
    """
    architectures auto_map model_type transformers_version torch_dtype dtype use_cache return_dict id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix pruned_heads torchscript
    use_bfloat16 tf_legacy_loss is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder chunk_size_feed_forward initializer_range pretraining_tp attn_implementation
    experts_implementation use_flash_attn router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    num_nextn_predict_layers num_mtp_layers gradient_checkpointing name_or_path transformers.js_config unsloth_fixed
    unsloth_version is_llama_config upcast_attn max_sequence_length custom_pipelines

    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences return_dict_in_generate remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty max_new_tokens cache_implementation
    """
)
QUANTIZATION = ("quantization_config", "quantization", "compression_config")
_IGNORED_ENDINGS = ("dropout", "dropout_prob", "pdrop", "_token_id", "_token_index")
_IGNORED_BEGINNINGS = ("_", "output_")


_ALWAYS = {"tie_word_embeddings": False}
# Multimodal files, of which only `text_config` is read, and the type of that where it has none
_WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_ALIASES = {"kimi_k2": "deepseek_v3"}  # types that differ from another in nothing but the name


def read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Turn a `config.json` into the fields of a `Config`.

    Args:
        source: the parsed file, the file, or the folder it is in.

    Raises:
        UserError: the file is missing, damaged or of an unknown `model_type`, a value has the wrong type, or there are
            keys that this reader does not know (all are listed).
    """
    raw, label = _load(source)
    raw, model_type = _text_part(raw, label)
    arch = ARCHITECTURES[model_type]
    _refuse_quantized(raw, label)
    raw = _one_spelling(raw, SPELLINGS | arch.spellings, label)
    keys = Keys(raw, _ALWAYS | arch.keys, NULLABLE, label)
    fields: dict[str, Any] = arch.fixed | {"family": model_type}
    for key, (name, kind) in RENAMES.items():
        if key in keys.defaults or key in REQUIRED:
            fields[name] = keys.get(key, kind)
    fields["padded_vocab_size"] = fields["vocab_size"]
    _activation(keys, fields)
    _biases(fields, model_type)
    indices = _window(keys, fields, arch.window)
    if not fields.get("learned_positions"):
        fields |= rope_fields(keys, fields, indices, model_type)
    if arch.finish:
        arch.finish(keys, fields)
    _refuse_other_values(keys, arch.must_be)
    _refuse_unknown(keys, arch, model_type)
    return fields


def _load(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config.json"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}", "is the download complete?") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}, expected an object with the model's sizes")
    return raw, str(path)


def _text_part(raw: Mapping[str, Any], label: str) -> tuple[Mapping[str, Any], str]:
    """The part of the file that describes the language model, and its type."""
    model_type = raw.get("model_type")
    known = ", ".join(sorted([*ARCHITECTURES, *_WRAPPERS, *_ALIASES]))
    if not isinstance(model_type, str):
        raise UserError(f"{label} has no model_type", f"known types: {known}")
    if model_type in _WRAPPERS:
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{label} of type {model_type!r} lacks text_config")
        model_type = str(text.get("model_type") or _WRAPPERS[model_type])
        shared = {key: raw[key] for key in ("tie_word_embeddings", *QUANTIZATION) if key in raw}
        raw = text | shared
    model_type = _ALIASES.get(model_type, model_type)
    if model_type not in ARCHITECTURES:
        raise UserError(f"{label}: model_type {model_type!r} is not supported", f"known types: {known}")
    return raw, model_type


def _one_spelling(raw: Mapping[str, Any], spellings: Mapping[str, str], label: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in raw.items():
        name = spellings.get(key, key)
        if value is not None and out.get(name) not in (None, value):
            raise UserError(f"{label} gives {name} twice: {out[name]!r} and {value!r}")
        out[name] = out.get(name) if value is None else value
    return out


def _activation(keys: Keys, fields: dict[str, Any]) -> None:
    key = "hidden_activation" if "hidden_activation" in keys.defaults else "hidden_act"
    name = keys.get(key, "text")
    tanh = name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast") or (name == "gelu" and fields["family"] == "gemma")
    if fields["mlp_class_name"] in ("LLaMAMLP", "GemmaMLP") and (tanh or name == "gelu"):
        fields |= {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh" if tanh else "none"}
    elif fields["mlp_class_name"] == "GptNeoxMLP" and (tanh or name == "gelu"):
        fields["gelu_approximate"] = "tanh" if tanh else "none"
    elif fields["mlp_class_name"] == "GptNeoxMLP" and name == "relu2":
        fields["mlp_activation"] = name
    elif fields["mlp_class_name"] != "GptNeoxMLP" and name in ("silu", "swish"):
        fields |= {"mlp_class_name": "LLaMAMLP"} if fields["mlp_class_name"] == "GemmaMLP" else {}
    else:
        raise UserError(f"{keys.label}: {key} {name!r} is not supported for {fields['family']!r}")


def _biases(fields: dict[str, Any], model_type: str) -> None:
    """One key there covers the projections in and out of the attention; here each has its own."""
    if model_type == "gpt_neox":
        has_bias = fields.pop("attn_bias")
        fields |= {} if has_bias else {"bias": False, "mlp_bias": True}
    elif fields.get("attn_bias") and "attn_proj_bias" not in fields:
        fields["attn_proj_bias"] = True
    for name in ("mlp_bias", "attn_proj_bias"):
        if fields.get(name) is fields.get("bias", True) is False:
            fields[name] = None  # as `bias`


def _window(keys: Keys, fields: dict[str, Any], rule: str) -> list[int] | None:
    """Set the sliding window and return the layers it applies to, None for a type without one."""
    if not rule:
        return None
    n_layer = fields["n_layer"]
    window = keys.get("sliding_window", "size")
    if "use_sliding_window" in keys.defaults and not keys.get("use_sliding_window", "flag"):
        window = None
    expected = [int(window is not None)] * n_layer
    if rule == "tail":
        start = keys.get("max_window_layers", "count")
        expected = [int(window is not None and i >= start) for i in range(n_layer)]
    elif rule in ("alternate", "pattern") or (rule == "hybrid" and window is not None):
        expected = [int((i + 1) % _period(keys, rule) != 0) for i in range(n_layer)]
    indices = _layer_types(keys, n_layer) or expected
    if rule == "all" and indices != expected:
        raise UserError(f"{keys.label}: layer_types disagree with sliding_window {window}, which is for all layers")
    if any(indices) and window is None:
        raise UserError(f"{keys.label}: layer_types name sliding layers but sliding_window is not set")
    if any(indices):
        fields |= {"sliding_window_size": window, "sliding_window_indices": indices}
    return indices


def _period(keys: Keys, rule: str) -> int:
    if rule == "alternate":
        return 2
    keys.asked.add("sliding_window_pattern")
    name = "_sliding_window_pattern" if "_sliding_window_pattern" in keys.raw else "sliding_window_pattern"
    if isinstance(letters := keys.raw.get(name), str) and letters.endswith("G") and letters.count("G") == 1:
        return len(letters)  # "LLLG": three local layers, then a global one
    return keys.get(name, "size")


def _layer_types(keys: Keys, n_layer: int) -> list[int] | None:
    types = keys.take("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
        raise UserError(f"{keys.label}: layer_types may hold full_attention and sliding_attention only, got {types}")
    if len(types) < n_layer:
        raise UserError(f"{keys.label}: layer_types has {len(types)} entries for {n_layer} layers")
    return [int(name == "sliding_attention") for name in types[:n_layer]]


def _refuse_quantized(raw: Mapping[str, Any], label: str) -> None:
    quantization = next((raw[key] for key in QUANTIZATION if raw.get(key)), None)
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"{label}: the weights are quantized (method {method!r}), which cannot be read",
            "use the unquantized checkpoint, or a GGUF of the model",
        )


def _refuse_other_values(keys: Keys, must_be: dict[str, Any]) -> None:
    for key, value in must_be.items():
        if keys.take(key) not in (None, value):
            raise UserError(f"{keys.label}: {key} is {keys.raw[key]!r}, only {value!r} is supported")
    if keys.take("use_bidirectional_attention"):
        raise UserError(f"{keys.label}: use_bidirectional_attention is not supported", "this is an encoder")


def _refuse_unknown(keys: Keys, arch: Architecture, model_type: str) -> None:
    known = IGNORED | arch.ignored | set(QUANTIZATION)
    unknown = [
        key
        for key in keys.unread()
        if key not in known and not key.startswith(_IGNORED_BEGINNINGS) and not key.endswith(_IGNORED_ENDINGS)
    ]
    if unknown:
        raise UserError(
            f"{keys.label}: unknown keys for model_type {model_type!r}: {', '.join(unknown)}",
            "they may change the model; remove those that do not",
        )
