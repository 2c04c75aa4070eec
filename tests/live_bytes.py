# Licensed under the Apache License 2.0, see the LICENSE file.

"""Counts the bytes of the tensors that are alive, by watching every operation: exact, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context in which `now` is the size of all storages made inside it that still live, and `peak` its maximum.

    `largest` is that of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := _key(tensor)) not in known:
                storage = tensor.untyped_storage()
                self._made[key] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
