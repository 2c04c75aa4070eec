# Licensed under the Apache License 2.0, see the LICENSE file.

"""GGUF metadata as the `config.json` that the same model has on Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from litgpt.checkpoint.gguf_reader import GGUFContents
from litgpt.errors import UserError

# What llama.cpp assumes when the file is silent; for Gemma 3 the published files are.
ROPE_BASE = 10000.0
GEMMA3_LOCAL_ROPE_BASE = 10000.0
SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}  # every n-th layer is global
GEMMA2_SOFTCAPS = (50.0, 30.0)
# The 27B models scale the scores by the width of a head as n_embd / n_head, the others by the actual one. A GGUF
# does not say; as llama.cpp does, they are told by their depth.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# The only parameters that Llama 3.x was published with (apart from the factor).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Facts:
    """Look-ups in the metadata under the architecture's prefix, and in the tensors."""

    def __init__(self, contents: GGUFContents) -> None:
        self.metadata, self.tensors = contents.metadata, contents.tensors
        self.arch = str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UserError(
                f"the GGUF file lacks the metadata {self.arch}.{key}", "it was written by an unusual tool: try another"
            )
        return value

    def count(self, key: str, default: Any = None) -> int:
        """A size that may be listed once a layer, as long as it is the same in all."""
        value = self.need(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if any(not isinstance(v, int) or v < 1 for v in values):
            raise self._wrong(key, value)
        if len(values) != 1:
            raise UserError(
                f"{self.arch}.{key} differs from layer to layer ({sorted(values)}): no family here has that"
            )
        return int(values.pop())

    def number(self, key: str, default: float | None = None) -> float:
        """A number that is not negative."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(key, value)
        return _tidy(value)

    def _wrong(self, key: str, value: Any) -> UserError:
        return UserError(f"the GGUF file says that {self.arch}.{key} is {value!r}", "it is damaged: download it again")

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    @property
    def head_size(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // self.count("attention.head_count"))

    @property
    def rotary_share(self) -> float:
        return self.count("rope.dimension_count", self.head_size) / self.head_size


def build_hf_config(contents: GGUFContents) -> dict[str, Any]:
    """The `config.json` of the model in a GGUF, in the spelling of transformers 4.

    Raises:
        UserError: an architecture that is not known here, or metadata that must be there and is not.
    """
    facts = _Facts(contents)
    if facts.arch not in ARCHITECTURES:
        raise UserError(
            f"GGUF architecture {facts.arch!r} is not supported",
            f"supported are {', '.join(sorted(ARCHITECTURES))}",
        )
    if not facts.has("token_embd.weight"):
        raise UserError(
            f"the GGUF file holds no model: token_embd.weight is not among its {len(facts.tensors)} tensors",
            "give a file with weights, not one with only a vocabulary or a projector",
        )
    config = {**_common(facts), **ARCHITECTURES[facts.arch](facts)}
    return {key: value for key, value in config.items() if value is not None}


def _common(facts: _Facts) -> dict[str, Any]:
    n_layer = facts.count("block_count")
    if n_layer > len(facts.tensors):
        raise UserError(
            f"the GGUF file says that it has {n_layer} layers, but holds only {len(facts.tensors)} tensors",
            "it is damaged: download it again",
        )
    ids = {name: facts.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_IDS.items()}
    return {
        "hidden_size": facts.count("embedding_length"),
        "num_hidden_layers": n_layer,
        "num_attention_heads": facts.count("attention.head_count"),
        "intermediate_size": facts.count("feed_forward_length"),
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": facts.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not facts.has("output.weight"),
        "torch_dtype": FLOAT_TYPES.get(facts.tensors["token_embd.weight"].type_name, "float32"),
        **{f"{name}_token_id": value for name, value in ids.items()},
    }


TOKEN_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _llama_like(facts: _Facts, model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "num_key_value_heads": facts.count("attention.head_count_kv", facts.count("attention.head_count")),
        "head_dim": facts.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", ROPE_BASE),
        "rope_scaling": _rope_scaling(facts),
    }


def _llama(facts: _Facts) -> dict[str, Any]:
    if facts.get("expert_count", 0):
        return {
            **_llama_like(facts, "mixtral", "MixtralForCausalLM"),
            "num_local_experts": facts.count("expert_count"),
            "num_experts_per_tok": facts.count("expert_used_count"),
            "sliding_window": facts.get("attention.sliding_window"),
        }
    if facts.get("attention.sliding_window"):  # a Llama with a window is a Mistral
        window = facts.count("attention.sliding_window")
        return {**_llama_like(facts, "mistral", "MistralForCausalLM"), "sliding_window": window}
    return {
        **_llama_like(facts, "llama", "LlamaForCausalLM"),
        "attention_bias": facts.has("blk.0.attn_q.bias"),
        "mlp_bias": facts.has("blk.0.ffn_up.bias"),
    }


def _qwen2(facts: _Facts) -> dict[str, Any]:
    config = _llama_like(facts, "qwen2", "Qwen2ForCausalLM")
    del config["head_dim"]  # not a field of Qwen2's
    return {**config, "use_sliding_window": False}


def _qwen3(facts: _Facts) -> dict[str, Any]:
    return {
        **_llama_like(facts, "qwen3", "Qwen3ForCausalLM"),
        "attention_bias": facts.has("blk.0.attn_q.bias"),
        "use_sliding_window": False,
    }


def _qwen3_moe(facts: _Facts) -> dict[str, Any]:
    return {
        **_qwen3(facts),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(facts: _Facts) -> dict[str, Any]:
    return {**_llama_like(facts, "gemma", "GemmaForCausalLM"), "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(facts: _Facts) -> dict[str, Any]:
    config = _llama_like(facts, "gemma2", "Gemma2ForCausalLM")
    del config["hidden_act"]
    attention_cap, final_cap = GEMMA2_SOFTCAPS
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(facts),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", attention_cap),
        "final_logit_softcapping": facts.number("final_logit_softcapping", final_cap),
        "sliding_window": facts.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(facts),
    }


def _gemma3(facts: _Facts) -> dict[str, Any]:
    config = _llama_like(facts, "gemma3_text", "Gemma3ForCausalLM")
    del config["hidden_act"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(facts),
        "rope_theta": facts.number("rope.freq_base", 1e6),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": _layer_types(facts),
    }


def _query_scalar(facts: _Facts) -> int | float:
    if scale := facts.number("attention.scale", 0.0):
        return round(scale**-2, 3)  # a whole number in all models, but for the rounding of the scale
    if facts.count("block_count") == GEMMA_27B_LAYERS[facts.arch]:
        return facts.count("embedding_length") // facts.count("attention.head_count")
    return facts.head_size


def _layer_types(facts: _Facts) -> list[str]:
    n_layer = facts.count("block_count")
    pattern = facts.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = facts.count("attention.sliding_window_pattern", SLIDING_PATTERN[facts.arch])
        pattern = [(i + 1) % period != 0 for i in range(n_layer)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern[:n_layer]]


def _phi3(facts: _Facts) -> dict[str, Any]:
    config = _llama_like(facts, "phi3", "Phi3ForCausalLM")
    del config["head_dim"]
    return {
        **config,
        "partial_rotary_factor": facts.rotary_share,
        "sliding_window": facts.get("attention.sliding_window") or None,
        "original_max_position_embeddings": facts.get("rope.scaling.original_context_length"),
    }


def _gptneox(facts: _Facts) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "rotary_pct": facts.rotary_share,
        "rotary_emb_base": facts.number("rope.freq_base", ROPE_BASE),
        "rope_scaling": _rope_scaling(facts),
        "use_parallel_residual": bool(facts.get("use_parallel_residual", True)),
        "attention_bias": facts.has("blk.0.attn_qkv.bias"),
    }


def _phi2(facts: _Facts) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "num_key_value_heads": facts.count("attention.head_count_kv", facts.count("attention.head_count")),
        "hidden_act": "gelu_new",
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": facts.rotary_share,
        "rope_theta": facts.number("rope.freq_base", ROPE_BASE),
        "rope_scaling": _rope_scaling(facts),
        "qk_layernorm": False,
    }


ARCHITECTURES: dict[str, Callable[[_Facts], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gptneox": _gptneox,
    "phi2": _phi2,
}


def _rope_scaling(facts: _Facts) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; per-frequency factors, where the file has them, are the truth."""
    if facts.has("rope_factors_long.weight"):
        long, short = (_factors(facts, f"rope_factors_{which}.weight") for which in ("long", "short"))
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if facts.has("rope_freqs.weight"):
        return _scaling_from_factors(facts, _factors(facts, "rope_freqs.weight"))
    # Files from before `rope.scaling.type` have a linear factor or none.
    kind = facts.get("rope.scaling.type", "linear")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(f"rope scaling {kind!r} of the GGUF file is not supported", "supported are linear and yarn")
    return _yarn(facts, factor)


def _yarn(facts: _Facts, factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.get("rope.scaling.original_context_length"),
        "beta_fast": facts.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": facts.get("rope.scaling.yarn_beta_slow"),
    }
    share = facts.number("rope.scaling.attn_factor", 1.0)
    if share != 1.0:  # of the usual factor; Hugging Face wants the product
        scaling["attention_factor"] = share * (1.0 + 0.1 * math.log(factor))
    return {key: value for key, value in scaling.items() if value is not None}


def _factors(facts: _Facts, name: str) -> list[float]:
    if not facts.has(name):
        raise UserError(f"the GGUF file lacks the tensor {name}", "download it again")
    stored = facts.tensors[name]
    if stored.type_name != "F32":
        raise UserError(f"{name} is {stored.type_name} in the GGUF file, it must be F32")
    factors = [_tidy(value) for value in stored.data.view(np.float32).ravel().tolist()]
    if not all(0.0 < factor < math.inf for factor in factors):
        raise UserError(f"{name} in the GGUF file holds values that are no factors", "download it again")
    return factors


def _scaling_from_factors(facts: _Facts, factors: list[float]) -> dict[str, Any]:
    """Find the "llama3" parameters behind the factors; others are given as "longrope", which lists them."""
    llama3 = {"rope_type": "llama3", "factor": _tidy(max(factors)), **LLAMA3_ROPE}
    size = facts.count("rope.dimension_count", facts.head_size)
    if np.allclose(factors, llama3_factors(size, facts.number("rope.freq_base", ROPE_BASE), llama3), rtol=1e-4):
        return llama3
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": facts.count("context_length"),
        "attention_factor": 1.0,
    }


def llama3_factors(size: int, base: float, scaling: dict[str, Any]) -> np.ndarray:
    """By what "llama3" divides each frequency: not at all the fast ones, by `factor` the slow ones.

    Args:
        size: rotated elements of a head.
        base: of the frequencies.
        scaling: the `rope_scaling` of config.json.
    """
    frequencies = base ** -(np.arange(0, size, 2) / size)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / scaling["factor"] + share)


def _tidy(value: float) -> float:
    """The short decimal that a float32 came from: 1e-06 for 9.999999974752427e-07."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
