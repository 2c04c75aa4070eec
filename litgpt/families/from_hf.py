# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reads Hugging Face's `config.json`: `model_type` decides how, so models load without being registered by name.

Three tables say everything: `RENAMES` (a key there -> a field here), `ARCHITECTURES` (what a `model_type` implies, and
what an absent key means) and `IGNORED` (keys without influence on the forward pass). A key in none of them is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litgpt.errors import UserError
from litgpt.families.hf_rope import rope_fields, yarn_mscale
from litgpt.families.keys import Keys, Kind


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


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
    "tie_word_embeddings": ("tie_embeddings", "flag"),
    "use_parallel_residual": ("parallel_residual", "flag"),
    "attention_bias": ("attn_bias", "flag"),
    "mlp_bias": ("mlp_bias", "flag"),
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

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")

# An explicit null there means "none"; everywhere else it means the same as an absent key.
NULLABLE = _words(
    """
    num_key_value_heads head_dim sliding_window attn_logit_softcapping final_logit_softcapping q_lora_rank n_group
    topk_group n_shared_experts
    """
)

# Written by every model, or left over from training and generation; none changes the forward pass.
IGNORED = _words(
    """
    architectures auto_map model_type transformers_version torch_dtype dtype use_cache return_dict id2label label2id
    num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix pruned_heads torchscript
    use_bfloat16 tf_legacy_loss is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder chunk_size_feed_forward initializer_range pretraining_tp attn_implementation
    experts_implementation use_flash_attn router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    num_nextn_predict_layers num_mtp_layers gradient_checkpointing name_or_path transformers.js_config unsloth_fixed
    unsloth_version is_llama_config rope_interleaved upcast_attn

    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences return_dict_in_generate remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty max_new_tokens cache_implementation
    """
)
_IGNORED_ENDINGS = ("dropout", "pdrop", "_token_id", "_token_index")
_IGNORED_BEGINNINGS = ("_", "output_")


@dataclass(frozen=True)
class Architecture:
    """How one `model_type` is read.

    Args:
        fixed: fields that the type implies and the file does not say.
        keys: the type's own keys and what each means when the file leaves it out.
        window: layers with the sliding window when `layer_types` is absent: "all", "tail" (from `max_window_layers`
            on), or a period of which the last layer is global ("alternate" = 2, "pattern" = `sliding_window_pattern`).
        ignored: keys that this type's files carry and nobody reads.
        must_be: keys that may be present with this value only.
        finish: reads what needs more than a rename.
    """

    fixed: dict[str, Any]
    keys: dict[str, Any]
    window: str = ""
    ignored: frozenset[str] = frozenset()
    must_be: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Keys, dict[str, Any]], None] | None = None


def _moe(keys: Keys, fields: dict[str, Any]) -> None:
    """Which layers are mixtures, for the types that say so by a step and a list of exceptions."""
    step, dense = keys.get("decoder_sparse_step", "size"), keys.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise UserError(f"{keys.label}: mlp_only_layers is {dense!r}, expected a list of layer numbers")
    indices = [int((i + 1) % step == 0 and i not in dense) for i in range(fields["n_layer"])]
    if not all(indices):
        fields["moe_indices"] = indices


def _experts_only(keys: Keys, fields: dict[str, Any]) -> None:
    """The experts' width is called `intermediate_size` where there is no dense layer."""
    fields["moe_intermediate_size"] = fields["intermediate_size"]


def _latent_attention(keys: Keys, fields: dict[str, Any]) -> None:
    """DeepSeek's attention and router, https://arxiv.org/abs/2412.19437."""
    latent = {key: keys.get(key, "size") for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")}
    latent |= {key: keys.get(key, "size") for key in ("qk_nope_head_dim", "v_head_dim")}
    fields["latent_attention"] = latent
    fields["n_query_groups"] = fields["n_head"]
    fields["head_size"] = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    fields["n_shared_expert"] = fields["n_shared_expert"] or None
    rope = fields.get("rope_adjustments") or {}
    if all_dim := rope.get("mscale_all_dim"):
        fields["attention_multiplier"] = fields["head_size"] ** -0.5 * yarn_mscale(rope["factor"], all_dim) ** 2
    if fields["n_expert_groups"] in (None, 1):  # one group of all experts restricts nothing
        fields["n_expert_groups"] = fields["n_topk_groups"] = None
    else:
        fields["n_topk_scores_per_group"] = 2 if fields["moe_router"] == "sigmoid" else 1


def _deepseek_v2(keys: Keys, fields: dict[str, Any]) -> None:
    method = keys.get("topk_method", "text")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"{keys.label}: topk_method {method!r} is not supported for 'deepseek_v2'")
    if method == "greedy":
        fields["n_expert_groups"] = None
    _latent_attention(keys, fields)


_LLAMA = {
    "norm_class_name": "RMSNorm",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
    "mlp_class_name": "LLaMAMLP",
}
_GEMMA = _LLAMA | {
    "mlp_class_name": "GemmaMLP",
    "gelu_approximate": "tanh",
    "scale_embeddings": True,
    "norm_unit_offset": True,
    "tie_embeddings": True,
}
_GEMMA_2 = _GEMMA | {"post_attention_norm": True, "post_mlp_norm": True}
_MOE = _LLAMA | {"mlp_class_name": "LLaMAMoE"}
_DEEPSEEK = _MOE | {"rope_interleave": True}
_SHARED = {"rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
_GEMMA_KEYS = _SHARED | {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA_KEYS |= {"attention_bias": False, "use_bidirectional_attention": False}
_GEMMA_2_KEYS = _GEMMA_KEYS | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_QWEN_KEYS = _SHARED | {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_QWEN_KEYS |= {"num_key_value_heads": 32, "max_window_layers": 28}
_DEEPSEEK_KEYS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        _LLAMA, _SHARED | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
    ),
    "qwen2": Architecture(_LLAMA | {"attn_bias": True}, _QWEN_KEYS, window="tail"),
    "qwen3": Architecture(
        _LLAMA | {"norm_qk": True}, _QWEN_KEYS | {"head_dim": 128, "attention_bias": False}, window="tail"
    ),
    "qwen3_moe": Architecture(
        _MOE | {"norm_qk": True, "moe_router": "softmax_topk"},
        _QWEN_KEYS
        | {"num_key_value_heads": 4, "attention_bias": False, "norm_topk_prob": False, "moe_intermediate_size": 768}
        | {"num_local_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
        window="all",
        ignored=_words("max_window_layers"),
        finish=_moe,
    ),
    "mistral": Architecture(
        _LLAMA,
        _SHARED | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="all",
    ),
    "mixtral": Architecture(
        _MOE | {"moe_router": "topk_softmax"},
        _SHARED
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        window="all",
        finish=_experts_only,
    ),
    # The first files say "gelu" and mean its tanh form; `hidden_activation` came later and says the same.
    "gemma": Architecture(
        _GEMMA,
        _GEMMA_KEYS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        ignored=_words("hidden_activation"),
    ),
    "gemma2": Architecture(_GEMMA_2, _GEMMA_2_KEYS, window="alternate", ignored=_words("hidden_act")),
    "gemma3_text": Architecture(
        _GEMMA_2 | {"norm_qk": True},
        _GEMMA_2_KEYS
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "max_position_embeddings": 131072}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
        # The text part of the multimodal files states only what differs from these.
        | {"vocab_size": 262208, "num_attention_heads": 8},
        window="pattern",
        ignored=_words("hidden_act"),
    ),
    "gpt_neox": Architecture(
        {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP"},
        {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "use_parallel_residual": True}
        | {"hidden_act": "gelu", "attention_bias": True, "partial_rotary_factor": 0.25},
    ),
    "phi": Architecture(
        {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh"}
        | {"shared_attention_norm": True, "lm_head_bias": True, "rotary_percentage": 0.5},
        {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": None}
        | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        must_be={"qk_layernorm": False},
        ignored=_words("rotary_dim flash_attn flash_rotary fused_dense"),
    ),
    "phi3": Architecture(
        _LLAMA,
        _SHARED
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
        | {"sliding_window": None},
        window="all",
        must_be={"attention_bias": False, "mlp_bias": False},
    ),
    "deepseek_v2": Architecture(
        _DEEPSEEK | {"moe_router": "softmax_topk"},
        _DEEPSEEK_KEYS
        | {"max_position_embeddings": 2048, "n_shared_experts": 2, "num_local_experts": 64, "first_k_dense_replace": 0}
        | {"routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "moe_intermediate_size": 1407}
        | {"num_experts_per_tok": None, "topk_method": "greedy", "mlp_bias": False},
        must_be={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        ignored=_words("head_dim qk_head_dim num_key_value_heads"),
        finish=_deepseek_v2,
    ),
    "deepseek_v3": Architecture(
        _DEEPSEEK | {"moe_router": "sigmoid", "moe_correction_bias": True},
        _DEEPSEEK_KEYS
        | {"max_position_embeddings": 4096, "n_shared_experts": 1, "num_local_experts": 256, "first_k_dense_replace": 3}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "rope_interleave": True},
        must_be={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        ignored=_words("head_dim qk_head_dim num_key_value_heads"),
        finish=_latent_attention,
    ),
    "gpt_oss": Architecture(
        _MOE | {"moe_router": "topk_softmax", "moe_router_bias": True, "mlp_bias": True, "attention_sinks": True},
        _SHARED
        | {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
        | {"sliding_window": 128, "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"swiglu_limit": 7.0, "rope_theta": 150000.0},
        window="alternate",
        must_be={"swiglu_alpha": 1.702},
        ignored=_words("initial_context_length"),
        finish=_experts_only,
    ),
}

_ALWAYS = {"tie_word_embeddings": False}
_WRAPPERS = {"gemma3": "gemma3_text"}  # multimodal files; only their `text_config` is read


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
    raw = _one_spelling(raw, label)
    keys = Keys(raw, _ALWAYS | arch.keys, NULLABLE, label)
    fields: dict[str, Any] = arch.fixed | {"family": model_type}
    for key, (name, kind) in RENAMES.items():
        if key in keys.defaults or key in REQUIRED:
            fields[name] = keys.get(key, kind)
    fields["padded_vocab_size"] = fields["vocab_size"]
    _activation(keys, fields)
    _biases(fields, model_type)
    indices = _window(keys, fields, arch.window)
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
    known = ", ".join(sorted([*ARCHITECTURES, *_WRAPPERS]))
    if not isinstance(model_type, str):
        raise UserError(f"{label} has no model_type", f"known types: {known}")
    if model_type in _WRAPPERS:
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{label} of type {model_type!r} lacks text_config")
        model_type = _WRAPPERS[model_type]
        shared = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
        raw = text | shared
    if model_type not in ARCHITECTURES:
        raise UserError(f"{label}: model_type {model_type!r} is not supported", f"known types: {known}")
    return raw, model_type


def _one_spelling(raw: Mapping[str, Any], label: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in raw.items():
        name = SPELLINGS.get(key, key)
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
    elif fields["mlp_class_name"] != "GptNeoxMLP" and name in ("silu", "swish"):
        fields |= {"mlp_class_name": "LLaMAMLP"} if fields["mlp_class_name"] == "GemmaMLP" else {}
    else:
        raise UserError(f"{keys.label}: {key} {name!r} is not supported for {fields['family']!r}")


def _biases(fields: dict[str, Any], model_type: str) -> None:
    """One key there covers the projections in and out of the attention; here each has its own."""
    if model_type == "gpt_neox":
        has_bias = fields.pop("attn_bias")
        fields |= {} if has_bias else {"bias": False, "mlp_bias": True}
    elif "attn_bias" in fields and model_type != "qwen2":
        fields |= {"attn_proj_bias": True} if fields["attn_bias"] else {}
    if fields.get("mlp_bias") is False:
        fields["mlp_bias"] = None  # as `bias`


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
    elif rule in ("alternate", "pattern"):
        expected = [int((i + 1) % _period(keys, rule) != 0) for i in range(n_layer)]
    indices = _layer_types(keys, n_layer) or expected
    if rule == "all" and indices != expected:
        raise UserError(f"{keys.label}: layer_types disagree with sliding_window {window}, which {rule} layers use")
    if any(indices) and window is None:
        raise UserError(f"{keys.label}: layer_types name sliding layers but sliding_window is not set")
    if any(indices):
        fields |= {"sliding_window_size": window, "sliding_window_indices": indices}
    return indices


def _period(keys: Keys, rule: str) -> int:
    if rule == "alternate":
        return 2
    keys.asked.add("sliding_window_pattern")
    return keys.get(
        "_sliding_window_pattern" if "_sliding_window_pattern" in keys.raw else "sliding_window_pattern", "size"
    )


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
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"{label}: the weights are quantized with {method!r}, which cannot be read",
            "use the unquantized checkpoint, or a GGUF of the model",
        )


def _refuse_other_values(keys: Keys, must_be: dict[str, Any]) -> None:
    for key, value in must_be.items():
        if keys.take(key) not in (None, value):
            raise UserError(f"{keys.label}: {key} is {keys.raw[key]!r}, only {value!r} is supported")
    if keys.take("use_bidirectional_attention"):
        raise UserError(f"{keys.label}: use_bidirectional_attention is not supported", "this is an encoder")


def _refuse_unknown(keys: Keys, arch: Architecture, model_type: str) -> None:
    known = IGNORED | arch.ignored | {"quantization_config"}
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
