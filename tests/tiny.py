# Licensed under the Apache License 2.0, see the LICENSE file.

"""Tiny random Hugging Face models, one row an architecture: the independent oracle of the tests.

Every tensor is random, norms, biases, sinks and correction biases included, so nothing is trivially zero or one. Sizes
are small and differ from each other wherever the architecture allows it, so a mixed-up dimension shows.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from litgpt.model import GPT


@dataclass(frozen=True)
class Row:
    """One tiny architecture: the config class in `transformers` and the fields that differ from `_COMMON`."""

    config_class: str
    fields: dict[str, Any]


_COMMON = {
    "vocab_size": 113,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GQA = {"num_key_value_heads": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.0, 4.5],
    "original_max_position_embeddings": 16,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 7,
    "num_mtp_layers": 0,
    "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
}
_DEEPSEEK_V2 = {key: value for key, value in _DEEPSEEK.items() if key not in ("norm_topk_prob", "num_mtp_layers")}
_DEEPSEEK_V2["qk_nope_head_dim"] = 8  # transformers reads pairs as complex numbers, so strides must be even
_FULL = ["full_attention", "full_attention"]
_LLAMA4 = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_FALCON = {"hidden_size": 40, "ffn_hidden_size": 52, "tie_word_embeddings": True}
_FALCON_NEW = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
_QWEN3_MOE = {
    **_GQA,
    "head_dim": 10,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_GEMMA = {**_GQA, "head_dim": 10, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def _rows() -> dict[str, Row]:
    llama, moe = "LlamaConfig", "Qwen3MoeConfig"
    neox = {"rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5}}
    oss = {
        **_GQA,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 1.5,  # low enough that it clamps in a tiny model
        "rope_parameters": {**_YARN, "rope_theta": 15000.0, "truncate": False},
    }
    return {
        "llama": Row(llama, {**_GQA, "head_dim": 10}),
        "llama_llama3rope": Row(
            llama, {**_GQA, "head_dim": 10, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}
        ),
        "llama_linear": Row(
            llama, {**_GQA, "head_dim": 8, "rope_parameters": {**_DEFAULT_ROPE, "rope_type": "linear", "factor": 4.0}}
        ),
        "llama_yarn": Row(llama, {**_GQA, "head_dim": 10, "rope_parameters": _YARN}),
        "llama_bias": Row(llama, {**_GQA, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
        "llama_mha": Row(llama, {"head_dim": 6, "num_key_value_heads": 4}),
        "llama_mqa": Row(llama, {"head_dim": 12, "num_key_value_heads": 1}),
        "qwen2": Row("Qwen2Config", {**_GQA, "hidden_size": 40, "tie_word_embeddings": True}),
        "qwen2_window": Row(
            "Qwen2Config",
            {**_GQA, "hidden_size": 40, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        "qwen3": Row("Qwen3Config", {**_GQA, "head_dim": 10}),
        "mistral_window": Row("MistralConfig", {**_GQA, "head_dim": 10, "sliding_window": 6}),
        "mixtral": Row("MixtralConfig", {**_GQA, "hidden_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2}),
        "qwen3_moe": Row(moe, _QWEN3_MOE),
        "qwen3_moe_unnormed": Row(
            moe, {**_QWEN3_MOE, "num_hidden_layers": 3, "norm_topk_prob": False, "mlp_only_layers": [1]}
        ),
        "gemma": Row("GemmaConfig", _GEMMA),
        "gemma2": Row(
            "Gemma2Config",
            {
                **_GEMMA,
                "num_hidden_layers": 3,
                "sliding_window": 6,
                "query_pre_attn_scalar": 7,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 2.0,
            },
        ),
        "gemma3_text": Row(
            "Gemma3TextConfig",
            {
                **_GEMMA,
                "num_hidden_layers": 4,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 7,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        ),
        "gpt_neox": Row("GPTNeoXConfig", {**neox, "hidden_size": 48}),
        "gpt_neox_sequential": Row("GPTNeoXConfig", {**neox, "hidden_size": 48, "use_parallel_residual": False}),
        "phi": Row(
            "PhiConfig", {**_GQA, "hidden_size": 48, "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5}}
        ),
        "phi3": Row(
            "Phi3Config",
            {**_GQA, "hidden_size": 32, "original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
        ),
        "deepseek_v3": Row("DeepseekV3Config", _DEEPSEEK),
        "deepseek_v3_no_q_lora": Row(
            "DeepseekV3Config",
            {
                **_DEEPSEEK,
                "q_lora_rank": None,
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": _DEFAULT_ROPE,
            },
        ),
        "deepseek_v2": Row("DeepseekV2Config", _DEEPSEEK_V2),
        "deepseek_v2_grouped": Row(
            "DeepseekV2Config",
            {
                **_DEEPSEEK_V2,
                "q_lora_rank": None,
                "topk_method": "group_limited_greedy",
                "rope_parameters": _DEFAULT_ROPE,
            },
        ),
        "gpt_oss": Row("GptOssConfig", oss),
        "cohere2": Row(
            "Cohere2Config",
            {**_GQA, "hidden_size": 40, "num_hidden_layers": 3, "sliding_window": 6, "logit_scale": 0.3}
            | {
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "tie_word_embeddings": True,
            },
        ),
        "ernie4_5": Row("Ernie4_5Config", {**_GQA, "head_dim": 10, "use_bias": True}),
        "exaone4": Row(
            "Exaone4Config",
            {**_GQA, "hidden_size": 40, "num_hidden_layers": 3, "sliding_window": 6}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        "exaone4_full": Row("Exaone4Config", {**_GQA, "hidden_size": 40, "sliding_window": None, "layer_types": _FULL}),
        "glm": Row("GlmConfig", {**_GQA, "head_dim": 12}),
        "glm4": Row("Glm4Config", {**_GQA, "head_dim": 12}),
        "gpt2": Row("GPT2Config", {"n_inner": 52, "tie_word_embeddings": True}),
        "granite": Row(
            "GraniteConfig",
            {**_GQA, "hidden_size": 40, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
            | {"residual_multiplier": 0.7, "attention_multiplier": 0.2},
        ),
        "helium": Row("HeliumConfig", {**_GQA, "hidden_size": 40, "head_dim": 10, "attention_bias": True}),
        "ministral3": Row("Ministral3Config", {**_GQA, "head_dim": 10, "rope_parameters": _LLAMA4}),
        "nemotron": Row("NemotronConfig", {**_GQA, "head_dim": 12, "attention_bias": True}),
        "olmo3": Row(
            "Olmo3Config",
            {**_GQA, "hidden_size": 40, "num_hidden_layers": 4, "sliding_window": 6}
            | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT_ROPE}},
        ),
        "olmoe": Row(
            "OlmoeConfig",
            {**_GQA, "hidden_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.1},
        ),
        "seed_oss": Row("SeedOssConfig", {**_GQA, "head_dim": 10}),
        "smollm3": Row(
            "SmolLM3Config", {**_GQA, "hidden_size": 40, "num_hidden_layers": 3, "no_rope_layer_interval": 2}
        ),
        "olmo": Row("OlmoConfig", {**_GQA, "hidden_size": 40, "clip_qkv": 0.8}),
        "olmo2": Row("Olmo2Config", {**_GQA, "hidden_size": 40}),
        "falcon_7b": Row("FalconConfig", {**_FALCON, "multi_query": True}),
        "falcon_40b": Row("FalconConfig", {**_FALCON_NEW, "bias": True}),
        "falcon_11b": Row("FalconConfig", {**_FALCON_NEW, "num_ln_in_parallel_attn": 1}),
        "falcon_sequential": Row("FalconConfig", {**_FALCON, "multi_query": False, "parallel_attn": False}),
        "stablelm": Row("StableLmConfig", {**_GQA, **neox, "hidden_size": 48, "use_qkv_bias": True}),
        "stablelm_qk_norm": Row(
            "StableLmConfig", {**_GQA, **neox, "hidden_size": 48, "qk_layernorm": True, "use_parallel_residual": True}
        ),
    }


ROWS = _rows()
NAMES = list(ROWS)
WINDOWED = ("qwen2_window", "mistral_window", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3")


def tiny_hf_config(name: str, **overrides: Any) -> Any:
    """Build the `transformers` config of a row; `overrides` win over the row's fields."""
    import transformers

    row = ROWS[name]
    fields = {**_COMMON, **row.fields, **overrides}
    # Rope dictionaries are completed in place by transformers: never hand out the tables above.
    rope = fields.get("rope_parameters")
    if rope is not None:
        fields["rope_parameters"] = {k: dict(v) if isinstance(v, dict) else v for k, v in rope.items()}
    config = getattr(transformers, row.config_class)(**fields)
    config._attn_implementation = "eager"
    return config


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter and persistent buffer a random value that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    tied: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in tied or not tensor.is_floating_point():
            continue
        tied.add(id(tensor))
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        with torch.no_grad():
            if "sinks" in name:
                tensor.copy_(noise)
            elif "correction_bias" in name:
                tensor.copy_(0.2 * noise)
            elif "bias" in name:
                tensor.copy_(0.3 * noise)
            elif tensor.ndim == 1:  # a norm: starts at one, or at zero where (1 + weight) is applied
                tensor.add_(0.3 * noise)
            else:
                tensor.copy_(noise * (0.5 if "embed" in name else tensor.shape[-1] ** -0.5))


def tiny_hf_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """Build the random `transformers` model of a row: float32, eager attention, eval mode."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_hf_config(name, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    randomize(model, seed)
    return model.eval()


def save_tiny(name: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Write a row as a Hugging Face folder and return the model that was written."""
    model = tiny_hf_model(name, seed, **overrides)
    model.save_pretrained(folder)
    return model


@functools.cache
def tiny_pair(name: str) -> tuple[Any, GPT]:
    """Return the `transformers` model of a row and ours, from one folder. All tests share them: never change them."""
    from litgpt.model import GPT

    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(name, Path(folder))
        return model, GPT.from_checkpoint(folder)


def random_ids(shape: tuple[int, ...], seed: int = 0, vocab_size: int = _COMMON["vocab_size"]) -> Tensor:
    """Draw token ids uniformly, int64."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
