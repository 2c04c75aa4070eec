# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reading one `.safetensors` file lazily, through the `safetensors` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from litgpt.checkpoint.types import TensorInfo
from litgpt.errors import UserError, first_line


class SafetensorsFile:
    """A `.safetensors` file, mapped into memory while it is read.

    Args:
        path: the file.

    Attributes:
        metadata: strings of the header.

    Raises:
        UserError: the file is missing, cut short, or is no safetensors file.
    """

    close_after = 16 << 20
    """How many bytes to use before calling `close`: opening again costs next to nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: Any = None
        try:
            # In the order of the file; nothing but the header is read for this.
            self.metadata: dict[str, str] = self._opened().metadata() or {}
            tensors = {name: self._opened().get_tensor(name) for name in self._opened().offset_keys()}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{self.path} is damaged or no safetensors file: {first_line(error)}", "download or convert it again"
            ) from error
        self._infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.close()

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._infos

    def get(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file: its bytes are read when they are used."""
        return self._opened().get_tensor(name)

    def close(self) -> None:
        """Let the file go; what was read leaves memory with the last tensor over it. `get` opens the file again."""
        self._file = None

    def _opened(self) -> Any:
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file
