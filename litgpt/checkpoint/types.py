# Licensed under the Apache License 2.0, see the LICENSE file.

"""What every kind of checkpoint file can say about its tensors before reading them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor as `get` would return it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize
