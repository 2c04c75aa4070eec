# Licensed under the Apache License 2.0, see the LICENSE file.

"""Hugging Face folders with weights in 8 or 4 bits, seen as if they were not quantized: tensors are expanded when read.

`quantization_config` of `config.json` says which kind it is. Two kinds are read, since models are published in nothing
else: `fp8` (DeepSeek V3) and `mxfp4` (gpt-oss).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from litgpt.checkpoint.types import TensorInfo
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.families.from_hf import QUANTIZATION

ConfigT = TypeVar("ConfigT", bound=Config)

_HINTS = {"bitsandbytes": "use the model that it was made from, with --quantize bnb.nf4 or bnb.int8"}
_HINT = "use the model that it was made from, with --quantize where memory is short, or a .gguf file of it"

Read = Callable[[str], Tensor]


class Dequantizer(ABC):
    """One kind of quantization.

    Args:
        settings: the `quantization_config`.
        dtype: what tensors are expanded to.
        infos: the tensors in the files.
    """

    def __init__(self, settings: Mapping[str, Any], dtype: torch.dtype, infos: Mapping[str, TensorInfo]) -> None:
        self.settings, self.dtype, self.infos = settings, dtype, infos

    @abstractmethod
    def visible(self) -> dict[str, TensorInfo]:
        """The tensors of the model; those that belong to quantized ones are not among them."""

    @abstractmethod
    def get(self, name: str, read: Read) -> Tensor | None:
        """A tensor of the model, None when it is in the file as it is.

        Args:
            name: from `visible`.
            read: reads a tensor of the files.
        """


class Fp8(Dequantizer):
    """8-bit floats with a factor for each block, https://arxiv.org/abs/2412.19437 section 3.3.2.

    `x.weight` (..., out, in) has the factors `x.weight_scale_inv`, one for each block of `weight_block_size` rows and
    columns, where the last block of a side may be smaller; or a single one for the whole.
    """

    _SCALE = "_scale_inv"
    _OF_INPUTS = (".activation_scale", ".input_scale")  # of the inputs, which are not quantized here

    def visible(self) -> dict[str, TensorInfo]:
        """See `Dequantizer`."""
        shown = {}
        for name, info in self.infos.items():
            if name + self._SCALE in self.infos:
                info = TensorInfo(info.shape, self.dtype)
            of_a_weight = name.endswith(self._SCALE) and name.removesuffix(self._SCALE) in self.infos
            if not of_a_weight and not name.endswith(self._OF_INPUTS):
                shown[name] = info
        return shown

    def get(self, name: str, read: Read) -> Tensor | None:
        """See `Dequantizer`."""
        if name + self._SCALE not in self.infos:
            return None
        weight, scale = read(name), read(name + self._SCALE).float()
        if scale.numel() > 1:
            scale = self._for_each_element(name, weight, scale)
        return (weight.float() * scale).to(self.dtype)

    def _for_each_element(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        size = self.settings.get("weight_block_size")
        if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise UserError(
                f"quantization_config: weight_block_size is {size!r}, expected two sizes", "is config.json damaged?"
            )
        grid = tuple(-(-n // block) for n, block in zip(weight.shape[-2:], size, strict=True))
        if scale.shape != (*weight.shape[:-2], *grid):
            raise UserError(
                f"{name}{self._SCALE} has the shape {list(scale.shape)}, blocks of {size[0]} x {size[1]} of a weight "
                f"{list(weight.shape)} need {[*weight.shape[:-2], *grid]}",
                "download the model again",
            )
        for dim, block in ((-2, size[0]), (-1, size[1])):
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
        return scale


class Mxfp4(Dequantizer):
    """4-bit floats (E2M1), 32 with one power of two: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

    `x_blocks` (experts, out, in / 32, 16) holds two numbers a byte, the first in its lower half, and `x_scales`
    (experts, out, in / 32) exponents with a bias of 127. They stand for `x` (experts, in, out).
    """

    _VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def visible(self) -> dict[str, TensorInfo]:
        """See `Dequantizer`."""
        shown = {}
        for name, info in self.infos.items():
            stem, _, kind = name.rpartition("_")
            is_part = kind in ("blocks", "scales") and {f"{stem}_blocks", f"{stem}_scales"} <= self.infos.keys()
            if not is_part:
                shown[name] = info
            elif kind == "blocks":
                self._check(stem)
                experts, out, groups, _ = info.shape
                shown[stem] = TensorInfo((experts, 32 * groups, out), self.dtype)
        return shown

    def get(self, name: str, read: Read) -> Tensor | None:
        """See `Dequantizer`."""
        if f"{name}_blocks" not in self.infos or name in self.infos:
            return None
        blocks, exponents = read(f"{name}_blocks"), read(f"{name}_scales")
        values = torch.tensor([*self._VALUES, *(-value for value in self._VALUES)])
        experts, out, groups, _ = blocks.shape
        whole = torch.empty((experts, out, groups, 16, 2), dtype=self.dtype)
        for expert in range(experts):  # each for itself: indices take 8 bytes
            factors = torch.exp2(exponents[expert].float() - 127)[..., None]
            for half, nibbles in enumerate((blocks[expert] & 15, blocks[expert] >> 4)):
                whole[expert, ..., half] = values[nibbles.int()] * factors
        return whole.view(experts, out, 32 * groups).transpose(1, 2)

    def _check(self, stem: str) -> None:
        blocks, scales = self.infos[f"{stem}_blocks"], self.infos[f"{stem}_scales"]
        right = len(blocks.shape) == 4 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape
        if not right or (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
            raise UserError(
                f"{stem}_blocks {list(blocks.shape)} and {stem}_scales {list(scales.shape)} are no 4-bit weights",
                "download the model again",
            )


_KINDS: dict[str, type[Dequantizer]] = {"fp8": Fp8, "mxfp4": Mxfp4}


def find_dequantizer(
    hf_config: Mapping[str, Any], infos: Mapping[str, TensorInfo], label: str = "config.json"
) -> Dequantizer | None:
    """The reader of a folder's quantized weights, None when they are not quantized.

    Args:
        hf_config: the content of `config.json`.
        infos: the tensors in the files.
        label: what to call the file in messages.

    Raises:
        UserError: a kind that cannot be read, or damaged tensors.
    """
    text = hf_config.get("text_config")
    places = [hf_config, *([text] if isinstance(text, Mapping) else [])]
    settings = next((place[key] for place in places for key in QUANTIZATION if place.get(key)), None)
    if not settings:
        return None
    method = settings.get("quant_method", "?") if isinstance(settings, Mapping) else str(settings)
    if method not in _KINDS:
        raise UserError(
            f"{label}: the weights are quantized (method {method!r}), which cannot be read",
            _HINTS.get(method, _HINT),
        )
    dtypes = [str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)]
    dtype = getattr(torch, dtypes[0].removeprefix("torch."), None) if dtypes else torch.bfloat16
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        dtype = torch.bfloat16
    return _KINDS[method](settings, dtype, infos)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a `config.json`, empty when it cannot be read: whoever needs it says what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(folder: Path, config_class: type[ConfigT], **overrides: Any) -> ConfigT:
    """`Config.from_hf` of a folder whose weights may be quantized in a way that can be read.

    Args:
        folder: holds `config.json`.
        config_class: `Config` or a subclass.
        overrides: fields that win over the file.

    Raises:
        UserError: see `Config.from_hf` and `find_dequantizer`.
    """
    raw = read_json(folder / "config.json")
    if find_dequantizer(raw, {}, f"{folder / 'config.json'}") is None:
        return config_class.from_hf(folder, **overrides)
    return config_class.from_hf(without_quantization(raw), **({"name": folder.resolve().name} | overrides))


def without_quantization(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the same model with plain weights."""
    plain = {key: value for key, value in hf_config.items() if key not in QUANTIZATION}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(text)
    return plain
