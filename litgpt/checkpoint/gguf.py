# Licensed under the Apache License 2.0, see the LICENSE file.

"""A GGUF file as a virtual Hugging Face folder: config.json, named tensors and tokenizer files."""

from __future__ import annotations

import mmap
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from litgpt.checkpoint.gguf_config import FLOAT_TYPES, build_hf_config
from litgpt.checkpoint.gguf_layout import Origin, find_origins
from litgpt.checkpoint.gguf_reader import read_gguf
from litgpt.checkpoint.gguf_tokenizer import build_tokenizer_files
from litgpt.checkpoint.types import TensorInfo
from litgpt.constants import require
from litgpt.errors import UserError

# Of a file of many: its number, and what its weights are quantized to (`Q4_K_M`, `IQ2_XS`, `UD-Q6_K_XL`, `f16`)
_NAME_ENDINGS = re.compile(
    r"([-.](UD-)?(I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32))?(-\d{5}-of-\d{5})?$", re.IGNORECASE
)
_DTYPES: dict[str, torch.dtype] = {kind: getattr(torch, name) for kind, name in FLOAT_TYPES.items()}


class GGUFFile:
    """What the Hugging Face folder of the same model would hold, read lazily from one GGUF (or a split one).

    Args:
        path: the file; of a split model, any of its parts.

    Raises:
        UserError: the `gguf` package is missing, or the file is no GGUF, damaged, truncated or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        require("gguf", "reading GGUF files")
        self.path = Path(path)
        self._metadata, self._stored, self._maps = self._contents = read_gguf(self.path)

    @property
    def name(self) -> str:
        """Name of the model: that of the file without the type of its weights."""
        return _NAME_ENDINGS.sub("", self.path.stem)

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata by its own keys."""
        return self._metadata

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` that transformers would have, in the spelling of version 4.

        Raises:
            UserError: the architecture is not supported.
        """
        return build_hf_config(self._contents)

    @property
    def nbytes_stored(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(stored.data.nbytes for stored in self._stored.values())

    @cached_property
    def _origins(self) -> dict[str, Origin]:
        return find_origins(self.hf_config(), self._stored)

    def tensors(self) -> dict[str, TensorInfo]:
        """Hugging Face name -> shape and dtype of what `get` returns (float32 for quantized tensors).

        Raises:
            UserError: the architecture is not supported, or the file has tensors that the family does not.
        """
        infos = {}
        for name, origin in self._origins.items():
            stored = self._stored[origin.stored]
            infos[name] = TensorInfo(origin.shape(stored), _DTYPES.get(stored.type_name, torch.float32))
        return infos

    def get(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, in Hugging Face layout.

        Floating-point tensors keep their dtype and, where nothing has to be rearranged, share the mapped file's pages
        (writing to them does not change the file); quantized ones become float32.
        """
        origin = self._origins[name]
        stored = self._stored[origin.stored]
        data = stored.data
        if origin.expert is not None:
            data = data[origin.expert]
        tensor = _to_tensor(data, stored.type_name)
        if origin.rows is not None:
            tensor = tensor[origin.rows]
        return tensor if origin.transform is None else origin.transform(tensor)

    def release(self) -> None:
        """Let the pages that were read so far leave memory; tensors over them stay usable and read them again.

        Changes that were written to such a tensor are lost.
        """
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)

    def tokenizer_files(self) -> dict[str, Any]:
        """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json`, each as a dict.

        Raises:
            UserError: the file has no tokenizer or one of a kind that is not supported.
        """
        return build_tokenizer_files(self._metadata)


def _to_tensor(data: np.ndarray, type_name: str) -> torch.Tensor:
    if type_name in _DTYPES:
        return torch.from_numpy(data).view(_DTYPES[type_name])
    from gguf import GGMLQuantizationType, dequantize

    try:
        return torch.from_numpy(dequantize(data, GGMLQuantizationType[type_name]))
    except NotImplementedError:
        raise UserError(
            f"GGUF tensors of type {type_name} cannot be read", "use a file in another quantization, such as Q8_0"
        ) from None
