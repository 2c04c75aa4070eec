# Licensed under the Apache License 2.0, see the LICENSE file.

"""What each `model_type` of Hugging Face implies, and what its `config.json` means when a key is absent.

Defaults are those of the config classes in https://github.com/huggingface/transformers/tree/main/src/transformers/models.
"""

from __future__ import annotations

from typing import Any

from litgpt.errors import UserError
from litgpt.families.architecture import LLAMA, MOE, SHARED, Architecture, experts_only
from litgpt.families.hf_rope import yarn_mscale
from litgpt.families.keys import Keys, words
from litgpt.families.other_architectures import OTHERS


def _moe(keys: Keys, fields: dict[str, Any]) -> None:
    """Which layers are mixtures, for the types that say so by a step and a list of exceptions."""
    step, dense = keys.get("decoder_sparse_step", "size"), keys.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise UserError(f"{keys.label}: mlp_only_layers is {dense!r}, expected a list of layer numbers")
    indices = [int((i + 1) % step == 0 and i not in dense) for i in range(fields["n_layer"])]
    if not all(indices):
        fields["moe_indices"] = indices


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
    if fields["n_expert_per_token"] is None:
        raise UserError(f"{keys.label} lacks num_experts_per_tok", "is the file complete?")
    if method == "greedy":
        fields["n_expert_groups"] = None
    _latent_attention(keys, fields)


_GEMMA = LLAMA | {
    "mlp_class_name": "GemmaMLP",
    "gelu_approximate": "tanh",
    "scale_embeddings": True,
    "norm_unit_offset": True,
    "tie_embeddings": True,
}
_GEMMA_2 = _GEMMA | {"post_attention_norm": True, "post_mlp_norm": True}
_DEEPSEEK = MOE | {"rope_interleave": True}
_GEMMA_KEYS = SHARED | {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA_KEYS |= {"attention_bias": False, "use_bidirectional_attention": False}
_GEMMA_2_KEYS = _GEMMA_KEYS | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_QWEN_KEYS = SHARED | {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
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

ARCHITECTURES: dict[str, Architecture] = OTHERS | {
    "llama": Architecture(
        LLAMA,
        SHARED | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        must_be={"rope_interleaved": False},
    ),
    "qwen2": Architecture(
        LLAMA | {"attn_bias": True, "attn_proj_bias": None},
        _QWEN_KEYS,
        window="tail",
        must_be={"use_mrope": False},
        # of the models for a million tokens; transformers does not read it either
        ignored=words("dual_chunk_attention_config"),
    ),
    "qwen3": Architecture(
        LLAMA | {"norm_qk": True}, _QWEN_KEYS | {"head_dim": 128, "attention_bias": False}, window="tail"
    ),
    "qwen3_moe": Architecture(
        MOE | {"norm_qk": True, "moe_router": "softmax_topk"},
        _QWEN_KEYS
        | {"num_key_value_heads": 4, "attention_bias": False, "norm_topk_prob": False, "moe_intermediate_size": 768}
        | {"num_local_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
        window="all",
        ignored=words("max_window_layers"),
        finish=_moe,
    ),
    "mistral": Architecture(
        LLAMA,
        SHARED | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="all",
    ),
    "mixtral": Architecture(
        MOE | {"moe_router": "topk_softmax"},
        SHARED
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        window="all",
        finish=experts_only,
    ),
    # The first files say "gelu" and mean its tanh form; `hidden_activation` came later and says the same.
    "gemma": Architecture(
        _GEMMA,
        _GEMMA_KEYS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        ignored=words("hidden_activation"),
    ),
    "gemma2": Architecture(_GEMMA_2, _GEMMA_2_KEYS, window="alternate", ignored=words("hidden_act")),
    "gemma3_text": Architecture(
        _GEMMA_2 | {"norm_qk": True},
        _GEMMA_2_KEYS
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "max_position_embeddings": 131072}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
        # The text part of the multimodal files states only what differs from these.
        | {"vocab_size": 262208, "num_attention_heads": 8},
        window="pattern",
        ignored=words("hidden_act"),
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
    ),
    "phi3": Architecture(
        LLAMA,
        SHARED
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
        | {"sliding_window": None},
        window="all",
        must_be={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False}
        | {"full_attn_mod": 1, "interpolate_factor": 1},
    ),
    "deepseek_v2": Architecture(
        _DEEPSEEK | {"moe_router": "softmax_topk"},
        _DEEPSEEK_KEYS
        | {"max_position_embeddings": 2048, "n_shared_experts": 2, "num_local_experts": 64, "first_k_dense_replace": 0}
        | {"routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "moe_intermediate_size": 1407}
        | {"num_experts_per_tok": None, "topk_method": "greedy", "mlp_bias": False},
        must_be={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        ignored=words("head_dim qk_head_dim num_key_value_heads"),
        finish=_deepseek_v2,
    ),
    "deepseek_v3": Architecture(
        _DEEPSEEK | {"moe_router": "sigmoid", "moe_correction_bias": True},
        _DEEPSEEK_KEYS
        | {"max_position_embeddings": 4096, "n_shared_experts": 1, "num_local_experts": 256, "first_k_dense_replace": 3}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "rope_interleave": True},
        must_be={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        ignored=words("head_dim qk_head_dim num_key_value_heads"),
        finish=_latent_attention,
    ),
    "gpt_oss": Architecture(
        MOE | {"moe_router": "topk_softmax", "moe_router_bias": True, "mlp_bias": True, "attention_sinks": True},
        SHARED
        | {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
        | {"sliding_window": 128, "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"swiglu_limit": 7.0, "rope_theta": 150000.0}
        | {
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False}
            | {"original_max_position_embeddings": 4096}
        },
        window="alternate",
        must_be={"swiglu_alpha": 1.702},
        ignored=words("initial_context_length"),
        finish=experts_only,
    ),
}
