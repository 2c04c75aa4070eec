# Licensed under the Apache License 2.0, see the LICENSE file.

"""Features of the model that no default family uses, against `transformers`, with weights ported by hand.

The `Config` of each row is written out here, so these tests need neither `Config.from_hf` nor the key tables.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.config import Config
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from tests.tiny import random_ids, randomize

LENGTH = 21
THEIRS = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
OURS: dict[str, Any] = {
    "block_size": 64,
    "vocab_size": 113,
    "padded_vocab_size": 113,
    "n_embd": 48,
    "intermediate_size": 52,
    "n_layer": 3,
    "n_head": 4,
    "n_query_groups": 2,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
    "rope_base": 1000,
}
PRE_NORM = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}
STRETCHED = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 8}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}

# name -> (config class, their fields, our fields, their norm names -> ours)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "layernorm_without_parameters": ("OlmoConfig", {}, {"norm_class_name": "LayerNorm", "norm_affine": False}, {}),
    "post_norm_only_and_full_width_qk_norm": (
        "Olmo2Config",
        {},
        {
            "norm_1": False,
            "norm_2": False,
            "norm_qk": True,
            "norm_qk_type": "olmo2",
            "post_attention_norm": True,
            "post_mlp_norm": True,
        },
        {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_mlp_norm"},
    ),
    "clamped_queries_keys_and_values": (
        "OlmoConfig",
        {"clip_qkv": 0.6},
        {"norm_class_name": "LayerNorm", "norm_affine": False, "clip_qkv": 0.6},
        {},
    ),
    "a_qk_norm_for_each_head": (
        "StableLmConfig",
        {"qk_layernorm": True, **HALF_ROTARY},
        {"norm_class_name": "LayerNorm", "rotary_percentage": 0.5, "norm_qk": True, "norm_qk_type": "each_head"},
        PRE_NORM,
    ),
    "query_scale_by_position": (
        "Ministral3Config",
        {"head_dim": 12, "rope_parameters": {**STRETCHED, "llama_4_scaling_beta": 0.4}},
        {"query_growth": 0.4, "rope_adjustments": {"rope_type": "linear", "factor": 2.0, "original_max_seq_len": 8}},
        PRE_NORM,
    ),
    "squared_relu_and_layernorm_around_one": (
        "NemotronConfig",
        HALF_ROTARY,
        {
            "norm_class_name": "LayerNorm",
            "norm_unit_offset": True,
            "mlp_class_name": "GptNeoxMLP",
            "mlp_activation": "relu2",
            "rotary_percentage": 0.5,
        },
        {**PRE_NORM, "mlp.up_proj": "mlp.fc"},
    ),
    "no_rope_by_layer": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1]},
        {"rope_indices": [0, -1, 0], "norm_eps": 1e-6},
        PRE_NORM,
    ),
    "interleaved_partial_rotary": (
        "GlmConfig",
        {"head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-5, **HALF_ROTARY},
        {"rotary_percentage": 0.5, "rope_interleave": True, "attn_bias": True, "attn_proj_bias": False},
        PRE_NORM,
    ),
    "sandwich_norms": (
        "Glm4Config",
        {"head_dim": 16, "attention_bias": False, "rms_norm_eps": 1e-5, **HALF_ROTARY},
        {
            "head_size": 16,
            "rotary_percentage": 0.5,
            "rope_interleave": True,
            "post_attention_norm": True,
            "post_mlp_norm": True,
        },
        {**PRE_NORM, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_mlp_norm"},
    ),
    "scalar_multipliers": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
        {
            "norm_eps": 1e-6,
            "embedding_multiplier": 3.0,
            "logit_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        PRE_NORM,
    ),
    "parallel_shared_layernorm_without_bias": (
        "CohereConfig",
        {"logit_scale": 0.3, "tie_word_embeddings": True},
        {
            "norm_class_name": "LayerNorm",
            "norm_bias": False,
            "parallel_residual": True,
            "shared_attention_norm": True,
            "rope_interleave": True,
            "logit_multiplier": 0.3,
            "tie_embeddings": True,
        },
        {"input_layernorm": "norm_1"},
    ),
    "gated_mlp_layernorm_partial_rotary": (
        "StableLmConfig",
        {"use_qkv_bias": True, **HALF_ROTARY},
        {"norm_class_name": "LayerNorm", "rotary_percentage": 0.5, "attn_bias": True, "attn_proj_bias": False},
        PRE_NORM,
    ),
}


def port_weights(theirs: dict[str, Tensor], n_layer: int, norms: dict[str, str]) -> dict[str, Tensor]:
    """Rename a Llama-like state dict, fuse q, k, v and split a fused gate and up projection."""
    ours = {"transformer.wte.weight": theirs["model.embed_tokens.weight"], "lm_head.weight": theirs["lm_head.weight"]}
    renames = {
        "self_attn.o_proj": "attn.proj",
        "self_attn.q_norm": "attn.norm_q",
        "self_attn.k_norm": "attn.norm_k",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
        **norms,
    }
    for kind in ("weight", "bias"):
        if (tensor := theirs.get(f"model.norm.{kind}")) is not None:
            ours[f"transformer.ln_f.{kind}"] = tensor
        for i in range(n_layer):
            src, dst = f"model.layers.{i}.", f"transformer.h.{i}."
            for old, new in renames.items():
                if (tensor := theirs.get(f"{src}{old}.{kind}")) is not None:
                    ours[f"{dst}{new}.{kind}"] = tensor
            qkv = [theirs.get(f"{src}self_attn.{p}_proj.{kind}") for p in "qkv"]
            if all(t is not None for t in qkv):
                ours[f"{dst}attn.qkv.{kind}"] = torch.cat(qkv)
            for part in "qk":
                heads = [t for name, t in theirs.items() if name.startswith(f"{src}self_attn.{part}_layernorm.norms.")]
                if heads and kind == "weight":
                    ours[f"{dst}attn.norm_{part}.weight"] = torch.stack(heads)
            if (fused := theirs.get(f"{src}mlp.gate_up_proj.{kind}")) is not None:
                ours[f"{dst}mlp.fc_1.{kind}"], ours[f"{dst}mlp.fc_2.{kind}"] = fused.chunk(2)
    return ours


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_feature(name: str) -> None:
    import transformers

    config_class, their_fields, our_fields, norms = ROWS[name]
    hf_config = getattr(transformers, config_class)(**{**THEIRS, **their_fields})
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    randomize(theirs, seed=3)
    ours = GPT(Config(**{**OURS, **our_fields})).eval()
    ours.load_state_dict(port_weights(theirs.state_dict(), ours.config.n_layer, norms), strict=True)
    check(ours, theirs)


@torch.no_grad()
def test_learned_positions() -> None:
    import transformers

    hf_config = transformers.GPT2Config(**{**THEIRS, "n_inner": 52, "tie_word_embeddings": True})
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    randomize(theirs, seed=3)
    fields = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh"}
    fields |= {"bias": True, "learned_positions": True, "rotary_percentage": 0.0, "n_query_groups": 4}
    ours = GPT(Config(**{**OURS, **fields})).eval()
    renames = {"ln_1": "norm_1", "ln_2": "norm_2", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj"}
    renames |= {"mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in renames.items():
            name = name.replace(f".{old}.", f".{new}.")
        is_map = ".attn." in name or ".mlp." in name
        state[name] = tensor.T if is_map and tensor.ndim == 2 else tensor
    ours.load_state_dict(state, strict=True)
    check(ours, theirs)
    cache = KVCache.from_config(ours.config, "dense", batch_size=1, max_length=65)
    with pytest.raises(ValueError, match="65 positions: this model has learned 64"):
        ours(random_ids((1, 3)), cache=cache)


def check(ours: GPT, theirs: Any) -> None:
    """The same logits, in one pass and in chunks with a cache."""
    ids = random_ids((2, LENGTH))
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids), expected, atol=1e-4, rtol=0)

    cache = KVCache.from_config(ours.config, "dense", batch_size=2, max_length=LENGTH)
    chunks = [ours(ids[:, a:b], cache=cache, step=cache.plan(b - a)) for a, b in [(0, 8), (8, 9), (9, 10), (10, 21)]]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=1e-4, rtol=0)
