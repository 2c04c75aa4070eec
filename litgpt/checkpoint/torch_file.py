# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reading one file written by `torch.save`, mapped into memory and without running any code from it."""

from __future__ import annotations

import logging
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from litgpt.checkpoint.types import TensorInfo
from litgpt.errors import MissingFileError, UserError, first_line

logger = logging.getLogger(__name__)


def load_tensors_only(path: str | Path) -> Any:
    """`torch.load` on the CPU with `weights_only=True`, mapped when the file allows it.

    Raises:
        UserError: the file is missing, damaged, or holds anything but tensors and plain containers.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path} is missing", "download or convert it again")
    # Files of torch before 1.6 are no zip archives and cannot be mapped.
    can_map = zipfile.is_zipfile(path)
    if not can_map:
        logger.debug("%s is an old torch file or damaged, it is read as a whole", path)
    try:
        with warnings.catch_warnings():  # torch asks people to report pickles of other programs; the error says more
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "unsupported" not in str(error).lower():
            raise UserError(f"{path} is damaged: {first_line(error)}", "download or convert it again") from error
        raise UserError(
            f"{path} holds objects that are not tensors and could run code, so it is not read",
            "use the safetensors files of the model, or convert the file where you trust it",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}", "download or convert it again") from error


class TorchFile:
    """A file that holds a state dict, bare or as the entry `model` of a training checkpoint.

    Args:
        path: the file.

    Attributes:
        close_after: how many bytes to use before calling `close`.

    Raises:
        UserError: see `load_tensors_only`; also when it holds no state dict.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._state: dict[str, torch.Tensor] | None = None
        state = self._tensors()
        self._infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        # Opening again costs time for each tensor listed, so a big file is opened less often for its size.
        self.close_after = max(32 << 20, self.path.stat().st_size // 32)

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._infos

    def get(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file."""
        return self._tensors()[name]

    def close(self) -> None:
        """Let the file go; what was read leaves memory with the last tensor over it. `get` opens the file again."""
        self._state = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self._state is None:
            content = load_tensors_only(self.path)
            if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
                content = content["model"]
            if not isinstance(content, Mapping) or not all(isinstance(t, torch.Tensor) for t in content.values()):
                raise UserError(
                    f"{self.path} holds no state dict: a mapping from names to tensors, bare or as its entry 'model'",
                    "give the file or folder of a model",
                )
            # torch.compile puts this before the names of the module it wraps
            self._state = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in content.items()}
        return self._state
