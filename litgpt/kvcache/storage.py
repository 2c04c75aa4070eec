# Licensed under the Apache License 2.0, see the LICENSE file.

"""How a layer's keys and values are kept in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn as nn

from litgpt.errors import UserError
from litgpt.kvcache.quantized import QuantizedBuffer

if TYPE_CHECKING:
    from litgpt.kvcache.base import LayerSpec


class Store(nn.Module):
    """Keys and values of one layer in slots, `(B, G, slots + 1, D)`; the last slot takes padding.

    Whatever is written stays as it was written: a store never looks at other tokens.

    Args:
        spec: sizes of the layer.
        batch_size: rows B.
        dtype: element type of what is read.
        device: where the model computes; `meta` allocates nothing.
    """

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.alias_v, self.v_dim = spec.alias_v, spec.v_dim

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(B, G, T, D)` into `slots`, `(B or 1, T)` or `(B, G, T)`, and `read`."""
        raise NotImplementedError

    def write_run(
        self, start: int, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(B, G, T, D)` into the slots from `start` on, the same ones in every row, and `read`."""
        raise NotImplementedError

    def read(self, like: torch.Tensor, live: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers, the slot for padding included, of as many rows as `like` has and where it lives.

        A store that has to compute or move what it returns leaves out the slots from `live` on.
        """
        raise NotImplementedError

    def as_stored(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What would be read of these keys and values, once written: for chunks too long to be written first."""
        return k, k[..., : self.v_dim] if v is None else v

    def let_go(self) -> None:
        """Make sure that the buffers can be changed in place: a backward pass that may need them keeps the old ones."""

    def detach(self) -> None:
        """Let what the buffers hold take part in no later backward pass; one that is under way keeps the old ones."""

    def forget(self, row: int, slots: slice | torch.Tensor) -> None:
        """Zero slots of a row, and its slot for padding."""
        self.let_go()
        for buffer in self.buffers():
            buffer[row, :, slots] = 0
            buffer[row, :, -1] = 0


class PlainStore(Store):
    """Keys and values as they are; gradients flow through what is read.

    A backward pass may need the buffers as a step with gradients has left them, so what follows works on copies.
    """

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__(spec, batch_size, dtype, device)
        self._needed = False  # by a backward pass, perhaps
        self.k: torch.Tensor
        self.v: torch.Tensor
        for name, size in _widths(spec).items():
            shape = (batch_size, spec.groups, spec.slots + 1, size)
            self.register_buffer(name, self.allocate(shape, dtype, device), persistent=False)

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
        """A buffer of zeros."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def write_run(
        self, start: int, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.write_run`."""
        if self._needed or torch.is_grad_enabled():
            return self.write(torch.arange(start, start + k.size(2), device=k.device).unsqueeze(0), k, v, live)
        _rows(self.k, k).narrow(2, start, k.size(2)).copy_(k)
        if v is not None:
            _rows(self.v, v).narrow(2, start, v.size(2)).copy_(v)
        return self.read(k, live)

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.write`."""
        tracks = torch.is_grad_enabled()
        if tracks or self._needed:
            with _tracking():  # a step without gradients does not cut off those of earlier ones
                self.k = _put_into_copy(self.k, slots, k)
                if v is not None:
                    self.v = _put_into_copy(self.v, slots, v)
            self._needed = tracks or self._has_graph()
        else:
            _put(self.k, slots, k)
            if v is not None:
                _put(self.v, slots, v)
        return self.read(k, live)

    def let_go(self) -> None:
        """See `Store.let_go`."""
        if self._needed:
            with _tracking():
                for name, buffer in list(self.named_buffers()):
                    setattr(self, name, buffer.clone())
            self._needed = self._has_graph()

    def detach(self) -> None:
        """See `Store.detach`."""
        self.let_go()
        for buffer in self.buffers():
            if buffer.requires_grad:
                buffer.detach_()
        self._needed = False

    def _has_graph(self) -> bool:
        return any(buffer.requires_grad for buffer in self.buffers())

    def read(self, like: torch.Tensor, live: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.read`."""
        k = _rows(self.k, like)
        return k, k[..., : self.v_dim] if self.alias_v else _rows(self.v, like)


class OffloadStore(PlainStore):
    """Keys and values in the memory of the CPU, moved to the model's device when they are read.

    For caches larger than the memory of a GPU; every step moves all live slots of every layer.
    """

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
        """A buffer of zeros on the CPU, in pages that a GPU can copy from directly where there is one."""
        if device is not None and device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=device)
        pin = device is not None and device.type == "cuda"
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pin)

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.write`."""
        device = self.k.device
        super().write(slots.to(device), k.to(device), None if v is None else v.to(device))
        return self.read(k, live)

    def read(self, like: torch.Tensor, live: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.read`."""
        # copies that wait for their end: the buffers may be written again right after
        k = _rows(self.k, like)[:, :, :live].to(like.device)
        return k, k[..., : self.v_dim] if self.alias_v else _rows(self.v, like)[:, :, :live].to(like.device)


class QuantizedStore(Store):
    """Keys and values in few bits; see `quantized` for the numbers."""

    bits: ClassVar[int]

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__(spec, batch_size, dtype, device)
        self.k: QuantizedBuffer
        self.v: QuantizedBuffer
        shape = (batch_size, spec.groups, spec.slots + 1)
        for name, size in _widths(spec).items():
            self.add_module(name, QuantizedBuffer(self.bits, shape, size, dtype, device))

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.write`."""
        self._refuse_gradient(k)
        slots = _per_group(slots)
        self.k.put(slots, k)
        if v is not None:
            self.v.put(slots, v)
        return self.read(k, live)

    def write_run(
        self, start: int, k: torch.Tensor, v: torch.Tensor | None, live: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.write_run`."""
        self._refuse_gradient(k)
        self.k.put_run(start, k)
        if v is not None:
            self.v.put_run(start, v)
        return self.read(k, live)

    def read(self, like: torch.Tensor, live: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.read`."""
        k = self.k.get(like.size(0), live)
        return k, k[..., : self.v_dim] if self.alias_v else self.v.get(like.size(0), live)

    def as_stored(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Store.as_stored`; with this, what a token attends to does not depend on the chunk it came in."""
        self._refuse_gradient(k)
        k = self.k.decode(*self.k.encode(k))
        return k, k[..., : self.v_dim] if v is None else self.v.decode(*self.v.encode(v))

    def _refuse_gradient(self, k: torch.Tensor) -> None:
        if _tracks_gradient(k):
            raise UserError(
                f"an int{self.bits} KV cache has no gradient",
                "use torch.no_grad(), or a kind of cache without int8 and int4",
            )


class Int8Store(QuantizedStore):
    """About half the bytes of 16-bit numbers."""

    bits = 8


class Int4Store(QuantizedStore):
    """Less than a third of the bytes of 16-bit numbers."""

    bits = 4


def _widths(spec: LayerSpec) -> dict[str, int]:
    """The buffers of a layer and the length of their vectors."""
    return {"k": spec.k_dim} if spec.alias_v else {"k": spec.k_dim, "v": spec.v_dim}


def _rows(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    n_rows = like.size(0)
    return buffer if n_rows == buffer.size(0) else buffer.narrow(0, 0, n_rows)


def _tracks_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _per_group(slots: torch.Tensor) -> torch.Tensor:
    """`(B or 1, T)` or `(B, G, T)` -> with a dimension for groups."""
    return slots.unsqueeze(1) if slots.dim() == 2 else slots


def _put(buffer: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    buffer.scatter_(2, _per_group(slots).unsqueeze(-1).expand(x.shape), x.to(buffer.dtype))


def _put_into_copy(buffer: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    slots = slots.clone() if slots.is_inference() else slots  # the backward pass reads it
    return buffer.scatter(2, _per_group(slots).unsqueeze(-1).expand(x.shape), x.to(buffer.dtype))


def _tracking() -> AbstractContextManager[Any]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()


STORES: dict[str, type[Store]] = {"plain": PlainStore, "int8": Int8Store, "int4": Int4Store, "offload": OffloadStore}
"""Store of a `LayerSpec` -> its class."""
