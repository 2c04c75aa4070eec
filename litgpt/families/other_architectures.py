# Licensed under the Apache License 2.0, see the LICENSE file.

"""More rows of `architectures.ARCHITECTURES`: types that are not among the first families, in alphabetical order."""

from __future__ import annotations

from typing import Any

from litgpt.errors import UserError
from litgpt.families.architecture import LLAMA, SHARED, Architecture
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


_POST_NORM = LLAMA | {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
_OLMO_2 = _POST_NORM | {"norm_qk": True, "norm_qk_type": "olmo2"}
_OLMO_KEYS = SHARED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False}

OTHERS: dict[str, Architecture] = {
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
    "olmo": Architecture(
        LLAMA | {"norm_class_name": "LayerNorm", "norm_affine": False},
        {key: value for key, value in _OLMO_KEYS.items() if key != "rms_norm_eps"} | {"clip_qkv": None},
    ),
    "olmo2": Architecture(_OLMO_2, _OLMO_KEYS),
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
