# Licensed under the Apache License 2.0, see the LICENSE file.

"""Write a Hugging Face folder as a GGUF: rearranged as llama.cpp's converter does, named by the `gguf` package.

https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_neox": "gptneox",
    "phi": "phi2",
}
EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
# The mapping of the `gguf` package knows Mixtral's experts by the names of Mistral's own files.
MIXTRAL = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def write_gguf(folder: Path, path: Path, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Convert `folder` to `path` in F32, add or replace `metadata`, and return the folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_metadata(config) | (metadata or {})).items():
        if value is not None:
            _add(writer, key if "." in key and key.startswith("tokenizer.") else f"{arch}.{key}", value)
    for name, tensor in _tensors(config, load_file(folder / "model.safetensors")).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    close(writer)
    return config


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    family, n_head = config["model_type"], config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // n_head
    rope = _rope(config)
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": n_head,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": head_size if "head_dim" in config else None,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope["rope_theta"],
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
        "use_parallel_residual": config.get("use_parallel_residual"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": config.get("eos_token_id"),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        values["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
        values["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
    if rope.get("rope_type") == "longrope":
        values["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if family.startswith("gemma") and "query_pre_attn_scalar" in config:
        values["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    if family == "gemma3_text":
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
        values["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    return values


def _tensors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arch = ARCHITECTURES[config["model_type"]]
    (model_arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(model_arch, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    out = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            layer = name.split(".")[2]
            stacked = (
                f"blk.{layer}.{MIXTRAL[match[3]]}" if match[3] in MIXTRAL else names.get_name(f"{match[1]}.{match[3]}")
            )
            experts.setdefault(f"{stacked}.weight", {})[int(match[2])] = tensor
            continue
        module, suffix = name.rsplit(".", 1)
        stored = names.get_name(module)
        assert stored is not None, name
        out[f"{stored}.{suffix}"] = _rearrange(stored.rsplit(".", 1)[-1], tensor, config)
    out |= {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
    return out | _rope_factors(config)


def _rearrange(leaf: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    family = config["model_type"]
    if family in ("llama", "mistral", "mixtral") and leaf in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if family.startswith("gemma") and leaf.endswith("norm"):
        return tensor + 1
    if family == "gpt_neox" and leaf == "attn_qkv":
        by_head = tensor.reshape(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
        return np.concatenate([by_head[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3)])
    return tensor


def _rope_factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{k}.weight": np.array(rope[f"{k}_factor"], dtype=np.float32) for k in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    original, low, high = (
        rope[f"{k}"] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
