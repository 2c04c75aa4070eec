# Licensed under the Apache License 2.0, see the LICENSE file.

"""More rows of `architectures.ARCHITECTURES`: types that are not among the first families, in alphabetical order."""

from __future__ import annotations

from typing import Any

from litgpt.errors import UserError
from litgpt.families.architecture import LLAMA, MOE, SHARED, Architecture, experts_only
from litgpt.families.keys import Keys, words


def _falcon(keys: Keys, fields: dict[str, Any]) -> None:
    """Which of Falcon's three decoders: sequential, parallel with a shared norm, parallel with two norms."""
    if keys.get("alibi", "flag"):
        raise UserError(
            f"{keys.label}: alibi is true, only rotary positions are supported", "Falcon-RW is of this kind"
        )
    new, parallel = keys.get("new_decoder_architecture", "flag"), keys.get("parallel_attn", "flag")
    if new and not parallel:
        raise UserError(f"{keys.label}: new_decoder_architecture without parallel_attn is not supported")
    if not new:
        fields["n_query_groups"] = 1 if keys.get("multi_query", "flag") else fields["n_head"]
    keys.asked.add("multi_query")
    norms = keys.get("num_ln_in_parallel_attn", "size") or (2 if new else 1)
    fields |= {"parallel_residual": parallel, "shared_attention_norm": parallel and not (new and norms == 2)}


def _stablelm(keys: Keys, fields: dict[str, Any]) -> None:
    fields["shared_attention_norm"] = fields["parallel_residual"]
    if fields["norm_qk"]:
        fields["norm_qk_type"] = "each_head"


def _rotate_only_sliding_layers(keys: Keys, fields: dict[str, Any]) -> None:
    """Layers that see everything do not rotate, where some layers slide."""
    if keys.get("sliding_window", "size") is not None:
        sliding = fields.get("sliding_window_indices") or [0] * fields["n_layer"]
        fields["rope_indices"] = [0 if is_sliding else -1 for is_sliding in sliding]


def _smollm3(keys: Keys, fields: dict[str, Any]) -> None:
    """`no_rope_layers` has a 1 where a layer does rotate."""
    n_layer, period = fields["n_layer"], keys.get("no_rope_layer_interval", "size")
    rotates = keys.take("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % period != 0) for i in range(n_layer)]
    if not isinstance(rotates, list) or len(rotates) < n_layer or any(value not in (0, 1) for value in rotates):
        raise UserError(f"{keys.label}: no_rope_layers is {rotates!r}, expected a 0 or 1 for each of {n_layer} layers")
    if not all(rotates[:n_layer]):
        fields["rope_indices"] = [0 if value else -1 for value in rotates[:n_layer]]


def _granite(keys: Keys, fields: dict[str, Any]) -> None:
    fields["logit_multiplier"] = 1 / keys.get("logits_scaling", "positive")


_POST_NORM = LLAMA | {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
_OLMO_2 = _POST_NORM | {"norm_qk": True, "norm_qk_type": "olmo2"}
_OLMO_KEYS = SHARED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False}
_GLM = LLAMA | {"rope_interleave": True, "attn_proj_bias": None}
_GLM_KEYS = SHARED | {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_GLM_KEYS |= {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5}

OTHERS: dict[str, Architecture] = {
    "cohere2": Architecture(
        LLAMA
        | {"norm_class_name": "LayerNorm", "norm_bias": False, "parallel_residual": True, "rope_interleave": True}
        | {"shared_attention_norm": True, "tie_embeddings": True},
        {"layer_norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
        | {"max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False}
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "logit_scale": 0.0625},
        window="pattern",
        must_be={"use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0}
        | {"position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"},
        ignored=words("layer_switch use_embedding_sharing use_parallel_embedding"),
        finish=_rotate_only_sliding_layers,
    ),
    "ernie4_5": Architecture(
        LLAMA | {"rope_interleave": True},
        SHARED
        | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
        | {"tie_word_embeddings": True, "use_bias": False, "rope_theta": 5e5},
    ),
    "exaone4": Architecture(
        _POST_NORM | {"norm_qk": True},
        SHARED
        | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
        | {"sliding_window": 4096, "sliding_window_pattern": 4},
        window="hybrid",
        ignored=words("sliding_window_pattern"),  # where nothing slides
        finish=_rotate_only_sliding_layers,
    ),
    "falcon": Architecture(
        {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "rotary_percentage": 1.0}
        | {"tie_embeddings": True, "bias": False},
        {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": None, "hidden_act": "gelu"}
        | {"intermediate_size": None, "use_bias": False, "tie_word_embeddings": True, "alibi": False}
        | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
        | {"num_ln_in_parallel_attn": None},
        spellings={"num_kv_heads": "num_key_value_heads", "layer_norm_epsilon": "layer_norm_eps", "bias": "use_bias"}
        | {"ffn_hidden_size": "intermediate_size", "activation": "hidden_act", "n_embed": "hidden_size"},
        must_be={"apply_residual_connection_post_layernorm": False},
        ignored=words("head_dim rotary"),
        finish=_falcon,
    ),
    "glm": Architecture(_GLM, _GLM_KEYS),
    "glm4": Architecture(_GLM | {"post_attention_norm": True, "post_mlp_norm": True}, _GLM_KEYS),
    "gpt2": Architecture(
        {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "parallel_residual": False}
        | {"learned_positions": True, "rotary_percentage": 0.0, "tie_embeddings": True},
        {"layer_norm_eps": 1e-5, "max_position_embeddings": 1024, "hidden_act": "gelu_new", "intermediate_size": None}
        | {"tie_word_embeddings": True},
        spellings={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        | {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
        | {"activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps"},
        must_be={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        ignored=words(
            """n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels"""
        ),
    ),
    "granite": Architecture(
        LLAMA,
        SHARED
        | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "logits_scaling": 1.0}
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
        finish=_granite,
    ),
    "helium": Architecture(
        LLAMA | {"rope_interleave": True, "attn_proj_bias": None},
        SHARED
        | {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "max_position_embeddings": 4096}
        | {"rope_theta": 1e5, "attention_bias": False, "mlp_bias": False},
    ),
    "ministral3": Architecture(
        LLAMA,
        SHARED
        | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
        | {"sliding_window": None, "rope_theta": 1e6, "llama_4_scaling_beta": None}
        | {
            "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        },
        window="all",
    ),
    "nemotron": Architecture(
        LLAMA | {"norm_class_name": "LayerNorm", "norm_unit_offset": True, "mlp_class_name": "GptNeoxMLP"},
        {"norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None, "hidden_act": "relu2"}
        | {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False},
        ignored=words("kv_channels"),
    ),
    "olmo": Architecture(
        LLAMA | {"norm_class_name": "LayerNorm", "norm_affine": False},
        {key: value for key, value in _OLMO_KEYS.items() if key != "rms_norm_eps"} | {"clip_qkv": None},
    ),
    "olmo2": Architecture(_OLMO_2, _OLMO_KEYS),
    # Only the layers that see everything are stretched: those that slide have a rotary table of their own.
    "olmo3": Architecture(
        _OLMO_2,
        _OLMO_KEYS
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5, "rope_local_base_freq": None},
        window="pattern",
    ),
    "olmoe": Architecture(
        MOE | {"norm_qk": True, "norm_qk_type": "olmo2", "moe_router": "softmax_topk"},
        _OLMO_KEYS
        | {"max_position_embeddings": 4096, "clip_qkv": None, "num_local_experts": 64, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
        finish=experts_only,
    ),
    "seed_oss": Architecture(
        LLAMA,
        SHARED
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "mlp_bias": False}
        | {"attention_bias": True, "attention_out_bias": False},
    ),
    "smollm3": Architecture(
        LLAMA,
        SHARED
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
        | {"attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4}
        | {"sliding_window": None, "use_sliding_window": False},
        window="all",
        must_be={"use_sliding_window": False},
        ignored=words("max_window_layers"),
        finish=_smollm3,
    ),
    "stablelm": Architecture(
        LLAMA | {"norm_class_name": "LayerNorm", "rotary_percentage": 0.25, "attn_proj_bias": None},
        {"layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 32, "hidden_act": "silu"}
        | {
            "partial_rotary_factor": 0.25,
            "attention_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
        },
        spellings={"use_qkv_bias": "attention_bias"},
        must_be={"rotary_scaling_factor": 1.0},
        finish=_stablelm,
    ),
}
