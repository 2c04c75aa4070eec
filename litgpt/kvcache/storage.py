# Licensed under the Apache License 2.0, see the LICENSE file.

"""How a layer's keys and values are kept in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn

if TYPE_CHECKING:
    from litgpt.kvcache.base import LayerSpec


class PlainStore(nn.Module):
    """Keys and values as they are, `(B, G, slots + 1, D)`; the last slot takes padding.

    Args:
        spec: sizes of the layer.
        batch_size: rows B.
        dtype: element type.
        device: where the buffers live; `meta` allocates nothing.
    """

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.alias_v, self.v_dim = spec.alias_v, spec.v_dim
        shape = (batch_size, spec.groups, spec.slots + 1)
        self.k: torch.Tensor
        self.v: torch.Tensor
        self.register_buffer("k", torch.zeros(*shape, spec.k_dim, dtype=dtype, device=device), persistent=False)
        if not self.alias_v:
            self.register_buffer("v", torch.zeros(*shape, spec.v_dim, dtype=dtype, device=device), persistent=False)

    def write_run(
        self, start: int, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(B, G, T, D)` into the slots from `start` on, the same ones in every row, and `read`."""
        if _tracks_gradient(k):
            return self.write(torch.arange(start, start + k.size(2), device=k.device).unsqueeze(0), k, v, live)
        keys, values = self.read(k)
        keys.narrow(2, start, k.size(2)).copy_(k)
        if v is not None:
            values.narrow(2, start, v.size(2)).copy_(v)
        return keys, values

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(B, G, T, D)` into `slots`, `(B or 1, T)` or `(B, G, T)`, and `read`."""
        self.k = _put(self.k, slots, k)
        if v is not None:
            self.v = _put(self.v, slots, v)
        return self.read(k)

    def read(self, like: torch.Tensor, live: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers, the slot for padding included, of as many rows as `like` has.

        A store that has to compute what it returns may leave out the slots from `live` on.
        """
        k = _rows(self.k, like)
        return k, k[..., : self.v_dim] if self.alias_v else _rows(self.v, like)

    def forget(self, row: int, slots: slice | torch.Tensor) -> None:
        """Zero slots of a row, and its slot for padding."""
        for buffer in self.buffers():
            buffer[row, :, slots] = 0
            buffer[row, :, -1] = 0


def _rows(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    n_rows = like.size(0)
    return buffer if n_rows == buffer.size(0) else buffer.narrow(0, 0, n_rows)


def _tracks_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _put(buffer: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if slots.dim() == 2:
        slots = slots.unsqueeze(1)
    index = slots.unsqueeze(-1).expand(x.shape)
    x = x.to(buffer.dtype)
    if _tracks_gradient(x) or buffer.requires_grad:
        return buffer.scatter(2, index, x)  # earlier steps saved the old buffer for their backward pass
    return buffer.scatter_(2, index, x)


STORES: dict[str, type[PlainStore]] = {"plain": PlainStore}
