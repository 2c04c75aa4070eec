# Licensed under the Apache License 2.0, see the LICENSE file.

"""Writing a checkpoint as a `.gguf` file: the way back of `gguf_config` and `gguf_layout`, a tensor at a time.

The container is written by the `gguf` package. Names and rearrangements are those of
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from litgpt.checkpoint.convert import as_hf
from litgpt.checkpoint.gguf_config import GEMMA3_LOCAL_ROPE_BASE, SLIDING_PATTERN, build_hf_config, llama3_factors
from litgpt.checkpoint.gguf_layout import LAYER, LLAMA_TOP
from litgpt.checkpoint.gguf_reader import GGUFContents, StoredTensor
from litgpt.checkpoint.gguf_vocabulary import vocabulary_metadata
from litgpt.checkpoint.hf_config import architecture_fields
from litgpt.checkpoint.lazy_state import LazyState
from litgpt.checkpoint.plan import plan_import
from litgpt.checkpoint.save import atomic_write
from litgpt.checkpoint.source import open_source
from litgpt.checkpoint.types import TensorInfo
from litgpt.config import Config
from litgpt.constants import require
from litgpt.errors import UserError
from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WeightType = Literal["F32", "F16", "BF16", "Q8_0"]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_gguf(path: Path, out_file: Path, weight_type: WeightType = "Q8_0") -> None:
    """Write a checkpoint as a `.gguf` file.

    Args:
        path: a checkpoint of any kind.
        out_file: the file.
        weight_type: of the matrices; vectors are F32, and matrices whose rows do not divide into blocks F16.

    Raises:
        UserError: the `gguf` package is missing, or the model has something that such a file cannot say.
    """
    require("gguf", "writing GGUF files")
    if weight_type not in get_args(WeightType):
        raise UserError(f"no weight type {weight_type!r}", f"use one of {', '.join(get_args(WeightType))}")
    with open_source(path) as source:
        plan = plan_import(source, source.config())
        config = plan.config
        if config.family not in ARCHITECTURES:
            raise UserError(
                f"a model of the type {config.family!r} cannot be written as a .gguf file",
                f"these can: {', '.join(ARCHITECTURES)}",
            )
        infos, get = as_hf(LazyState(source, plan), config)
        tensors = {_stored_name(name, config): _Stored(name, info, weight_type, config) for name, info in infos.items()}
        factors = _rope_factors(config)
        metadata = _metadata(config)
        _check(metadata, tensors, factors, config)
        metadata |= _file_type(weight_type) | _vocabulary(path, config)
        with atomic_write(out_file) as temporary:
            _write(temporary, metadata, tensors, factors, get)


class _Stored:
    """How a tensor of Hugging Face is stored.

    Args:
        name: its name there.
        info: its shape and dtype there.
        weight_type: what the person wants.
        config: the model.
    """

    def __init__(self, name: str, info: TensorInfo, weight_type: str, config: Config) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.name, self.shape = name, info.shape
        self.transform = _transform(name, config)
        self.type_name = weight_type if len(info.shape) > 1 else "F32"
        if info.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]][0]:
            self.type_name = "F16"
        self.kind = GGMLQuantizationType[self.type_name]
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        self.byte_shape = (*info.shape[:-1], info.shape[-1] // block * block_bytes)

    def encode(self, tensor: Tensor) -> np.ndarray:
        """The bytes of the tensor, (..., bytes of a row)."""
        from gguf import quantize

        tensor = tensor if self.transform is None else self.transform(tensor)
        if self.type_name in _TYPES:
            tensor = tensor.to(_TYPES[self.type_name]).contiguous()
            return tensor.view(torch.uint8).numpy().reshape(self.byte_shape)
        return quantize(tensor.float().contiguous().numpy(), self.kind)


def _write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, _Stored],
    factors: np.ndarray | None,
    get: Callable[[str], Tensor],
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, metadata["general.architecture"])
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture":  # the writer has written it
            adders[type(value)](key, value)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, stored in tensors.items():
        n_bytes = math.prod(stored.byte_shape)
        writer.add_tensor_info(name, stored.byte_shape, np.dtype(np.uint8), n_bytes, stored.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for stored in tensors.values():
        writer.write_tensor_data(stored.encode(get(stored.name)))
    writer.close()


def _check(
    metadata: dict[str, Any], tensors: Mapping[str, _Stored], factors: np.ndarray | None, config: Config
) -> None:
    """Read the header as it will be, and refuse a model that is another one afterwards."""
    none = np.empty(0, dtype=np.uint8)
    listed = {name: StoredTensor(stored.shape, stored.type_name, none) for name, stored in tensors.items()}
    if factors is not None:
        listed["rope_freqs.weight"] = StoredTensor(factors.shape, "F32", factors.view(np.uint8))
    again = architecture_fields(Config.from_hf(build_hf_config(GGUFContents(metadata, listed, ()))))
    wanted = architecture_fields(config)
    lost = [key for key in wanted if wanted[key] != again[key] and key != "family"]
    if lost:
        raise UserError(
            f"a .gguf file of the type {metadata['general.architecture']!r} cannot say what this model has: "
            f"{', '.join(lost)}",
            "`litgpt convert_from_litgpt` writes a Hugging Face folder, which can",
        )


def _metadata(config: Config) -> dict[str, Any]:
    """Everything but the vocabulary."""
    arch = ARCHITECTURES[config.family or ""]
    assert config.n_query_groups is not None and config.head_size is not None and config.intermediate_size is not None
    own: dict[str, Any] = {
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_query_groups,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.rope_base),
        "vocab_size": config.padded_vocab_size,
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if any(config.sliding_window_indices or []):
        own["attention.sliding_window"] = config.sliding_window_size
    if arch in SLIDING_PATTERN:
        own["attention.scale"] = float(config.attention_scale)
        sliding = [bool(slides) for slides in config.sliding_window_indices or [0] * config.n_layer]
        if sliding != [(i + 1) % SLIDING_PATTERN[arch] != 0 for i in range(config.n_layer)]:
            own["attention.sliding_window_pattern"] = sliding
    if config.rope_local_base_freq not in (None, GEMMA3_LOCAL_ROPE_BASE):
        own["rope.freq_base_swa"] = float(config.rope_local_base_freq or 0)
    own |= _scaling(config)
    general = {"general.architecture": arch, "general.name": config.name or "unnamed"}
    return general | {f"{arch}.{key}": value for key, value in own.items() if value is not None}


def _file_type(weight_type: str) -> dict[str, Any]:
    """What most tensors are stored in, for programs that list files."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    name = "ALL_F32" if weight_type == "F32" else f"MOSTLY_{weight_type}"
    return {"general.file_type": LlamaFileType[name].value, "general.quantization_version": GGML_QUANT_VERSION}


def _scaling(config: Config) -> dict[str, Any]:
    rope = config.rope_adjustments or {}
    kind = rope.get("rope_type", "linear")
    if not rope or _is_llama3(config):
        return {}
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_seq_len"]
        found |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow")}
    return found


def _is_llama3(config: Config) -> bool:
    return "low_freq_factor" in (config.rope_adjustments or {})


def _rope_factors(config: Config) -> np.ndarray | None:
    """By what each frequency is divided, for the kind of stretching that has a tensor of its own."""
    if not _is_llama3(config):
        return None
    assert config.rope_adjustments is not None and config.head_size is not None
    rope = dict(config.rope_adjustments)
    rope["original_max_position_embeddings"] = rope.get("original_max_seq_len")
    return llama3_factors(config.head_size, config.rope_base, rope).astype(np.float32)


def _vocabulary(path: Path, config: Config) -> dict[str, Any]:
    if path.is_dir() and not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        logger.warning("%s has no tokenizer, so the .gguf file gets none, which llama.cpp does not open", path)
        return {}
    assert config.padded_vocab_size is not None
    return vocabulary_metadata(Tokenizer(path), config.padded_vocab_size)


_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _stored_name(name: str, config: Config) -> str:
    """llama.cpp's name of a tensor."""
    if match := _IN_LAYER.fullmatch(name):
        names = {theirs: ours for ours, theirs in LAYER[config.family or ""].items()}
        return f"blk.{match[1]}.{names[match[2]]}.{match[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{ {theirs: ours for ours, theirs in LLAMA_TOP.items()}[module] }.{leaf}"


def _transform(name: str, config: Config) -> Callable[[Tensor], Tensor] | None:
    if config.family in ("llama", "mistral") and ".self_attn.q_proj." in name:
        return partial(_to_neighbours, heads=config.n_head)
    if config.family in ("llama", "mistral") and ".self_attn.k_proj." in name:
        assert config.n_query_groups is not None
        return partial(_to_neighbours, heads=config.n_query_groups)
    if config.norm_unit_offset and name.endswith(("norm.weight", "layernorm.weight")):
        return _plus_one
    return None


def _to_neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Hugging Face rotates i with i + half of the head, llama.cpp neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _plus_one(tensor: Tensor) -> Tensor:
    """llama.cpp's norms have no offset."""
    return tensor.float() + 1.0
