# Licensed under the Apache License 2.0, see the LICENSE file.

"""Where each tensor of a Hugging Face checkpoint lies in a GGUF, and what undoes llama.cpp's rearrangements."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from litgpt.checkpoint.gguf_reader import StoredTensor
from litgpt.errors import UserError

Transform = Callable[[torch.Tensor], torch.Tensor]


class Origin(NamedTuple):
    """A Hugging Face tensor is this part of a stored one (along its first axis), passed through `transform`."""

    stored: str
    expert: int | None = None
    rows: slice | None = None
    transform: Transform | None = None

    def shape(self, stored: StoredTensor) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor."""
        shape = stored.shape[1:] if self.expert is not None else stored.shape
        return shape if self.rows is None else (self.rows.stop - self.rows.start, *shape[1:])


LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER = {
    "llama": LLAMA_LAYER,
    "mistral": LLAMA_LAYER,
    "mixtral": {**LLAMA_LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen2": LLAMA_LAYER,
    "qwen3": {**LLAMA_LAYER, **QK_NORM},
    "qwen3_moe": {**LLAMA_LAYER, **QK_NORM, "ffn_gate_inp": "mlp.gate"},
    "gemma": LLAMA_LAYER,
    "gemma2": {**LLAMA_LAYER, **SANDWICH_NORMS},
    "gemma3_text": {**LLAMA_LAYER, **QK_NORM, **SANDWICH_NORMS},
    "phi3": {**LLAMA_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt_neox": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    "phi": {**LLAMA_LAYER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
}
LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TOP = {
    "gpt_neox": {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    "phi": {**LLAMA_TOP, "output_norm": "model.final_layernorm"},
}
EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "down": "w2", "up": "w3"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}),
}
# Rotary constants: the first three are in the config, the last follows from it.
IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")

IN_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
IN_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(?:_exps|\.(\d+))\.weight")
ON_TOP = re.compile(r"([a-z_]+)\.(weight|bias)")


def find_origins(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Origin]:
    """Every Hugging Face tensor of the model and where it comes from.

    Args:
        config: the model's `config.json`.
        tensors: what the GGUF holds.

    Raises:
        UserError: tensors that belong to nothing in this family, all of them named.
    """
    origins: dict[str, Origin] = {}
    unknown = []
    for name, stored in tensors.items():
        if IGNORED.fullmatch(name):
            continue
        found = _origins_of(name, stored, config)
        unknown += [] if found else [name]
        origins.update(found)
    if unknown:
        shown = ", ".join(sorted(unknown)[:20]) + (", ..." if len(unknown) > 20 else "")
        raise UserError(
            f"{len(unknown)} tensors of the GGUF file have no place in a {config['model_type']} model: {shown}",
            "the file is of a variant that is not supported",
        )
    return origins


def _origins_of(name: str, stored: StoredTensor, config: dict[str, Any]) -> dict[str, Origin]:
    family = config["model_type"]
    layers = "gpt_neox.layers" if family == "gpt_neox" else "model.layers"
    if family in EXPERTS and (match := IN_EXPERT.fullmatch(name)):
        module, leaves = EXPERTS[family]
        prefix, leaf = f"{layers}.{match[1]}.{module}", f"{leaves[match[2]]}.weight"
        if match[3] is not None:  # files from before April 2024 have a tensor an expert
            return {f"{prefix}.{match[3]}.{leaf}": Origin(name)}
        return {f"{prefix}.{i}.{leaf}": Origin(name, expert=i) for i in range(stored.shape[0])}
    if match := IN_LAYER.fullmatch(name):
        layer, leaf, suffix = match.groups()
        prefix = f"{layers}.{layer}"
        if family == "phi" and leaf == "attn_qkv":
            return _split_qkv(name, f"{prefix}.self_attn", suffix, config)
        if leaf in LAYER[family]:
            return {f"{prefix}.{LAYER[family][leaf]}.{suffix}": Origin(name, transform=_transform(leaf, config))}
    if match := ON_TOP.fullmatch(name):
        leaf, suffix = match.groups()
        top = TOP.get(family, LLAMA_TOP)
        if leaf in top:
            return {f"{top[leaf]}.{suffix}": Origin(name, transform=_transform(leaf, config))}
    return {}


def _split_qkv(name: str, prefix: str, suffix: str, config: dict[str, Any]) -> dict[str, Origin]:
    n_head, n_groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config["hidden_size"] // n_head
    q, kv = n_head * head_size, n_groups * head_size
    rows = {"q_proj": slice(0, q), "k_proj": slice(q, q + kv), "v_proj": slice(q + kv, q + 2 * kv)}
    return {f"{prefix}.{leaf}.{suffix}": Origin(name, rows=part) for leaf, part in rows.items()}


def _transform(leaf: str, config: dict[str, Any]) -> Transform | None:
    family = config["model_type"]
    if family in ("llama", "mistral", "mixtral") and leaf in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"]
        return partial(_to_half_rotary, heads=heads)
    if family == "gpt_neox" and leaf == "attn_qkv":
        return partial(_interleave_qkv, heads=config["num_attention_heads"])
    if family.startswith("gemma") and leaf.endswith("norm"):
        return _minus_one
    return None


def _to_half_rotary(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours (0,1), (2,3), ...; Hugging Face rotates i with i + half of the head."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _interleave_qkv(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """From q of all heads, k of all, v of all to q, k, v head by head."""
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).reshape(tensor.shape)


def _minus_one(tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp stores 1 + weight, as its norms have no offset."""
    return (tensor.float() - 1.0).to(tensor.dtype)
