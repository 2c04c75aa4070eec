# Licensed under the Apache License 2.0, see the LICENSE file.

"""One row of a cache, taken out: to fork it, to keep it for the next request, or to write it to disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from litgpt.kvcache.base import LayerCache, LayerSpec
    from litgpt.kvcache.cache import KVCache


@dataclass(frozen=True)
class RowState:
    """A copy of one row. It holds the slots in use only, so a short row is small whatever the cache's length.

    Attributes:
        length: tokens.
        high: longest length since the row was reset, where a ring has wrapped; else `length`.
        max_rewind: how many tokens can be taken back exactly after importing it.
        specs: what the buffers were made for, one a layer.
        buffers: by the names they have in the cache, without the dimension of rows.
    """

    length: int
    high: int
    max_rewind: int
    specs: tuple[LayerSpec, ...]
    buffers: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def cut(self, length: int) -> RowState:
        """The row taken back to `length` tokens; it shares the buffers.

        Raises:
            ValueError: the row cannot be taken back that far exactly.
        """
        n = self.length - length
        if not 0 <= n <= self.max_rewind:
            raise ValueError(f"cannot rewind {n} tokens exactly, at most {self.max_rewind}")
        buffers = {}
        for name, buffer in self.buffers.items():
            spec = self.specs[int(name.split(".")[1])]
            buffers[name] = buffer[:, : _slots_used(spec, length, self.high)]
        high = self.high if any(self.high > spec.slots for spec in self.specs) else length
        return RowState(length, high, self.max_rewind - n, self.specs, buffers)


def export_row(cache: KVCache, row: int) -> RowState:
    """A copy of a row; see `KVCache.export_row`."""
    length, high = cache.lengths[row], cache._high[row]
    specs = tuple(layer.spec for layer in cache.layer_caches())
    buffers: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(cache.layer_caches()):
        for name, part in _parts(layer, row, _slots_used(layer.spec, length, high)).items():
            buffers[f"layers.{i}.{name}"] = part.clone()
    has_wrapped = any(high > spec.slots for spec in specs)
    return RowState(length, high if has_wrapped else length, cache.max_rewind(row), specs, buffers)


def import_row(cache: KVCache, row: int, state: RowState) -> None:
    """Overwrite a row; see `KVCache.import_row`."""
    _check(cache, state)
    cache.reset_row(row)
    for i, layer in enumerate(cache.layer_caches()):
        layer.store.let_go()
        for name, part in _parts(layer, row, _slots_used(state.specs[i], state.length, state.high)).items():
            part.copy_(state.buffers[f"layers.{i}.{name}"])
        if state.high > state.length:  # rings of a row that was taken back
            layer.forget(row, state.length, state.high)
    cache.lengths[row], cache._high[row] = state.length, state.high


def _slots_used(spec: LayerSpec, length: int, high: int) -> int:
    """Slots that a row uses: the first ones, as long as none has been used twice."""
    return length if high <= spec.slots else spec.slots


def _parts(layer: LayerCache, row: int, n_slots: int) -> dict[str, torch.Tensor]:
    """Views of a row's first slots in every buffer of a layer, `(G, n_slots, ...)`."""
    return {name: buffer[row, :, :n_slots] for name, buffer in layer.named_buffers()}


def _check(cache: KVCache, state: RowState) -> None:
    """Raise ValueError if the cache has no place for a row."""
    if state.length > cache.max_length:
        raise ValueError(f"a row of {state.length} tokens does not fit a KV cache of {cache.max_length}")
    layers = cache.layer_caches()
    if len(layers) != len(state.specs):
        raise ValueError(f"a row of {len(state.specs)} layers does not fit a KV cache of {len(layers)}")
    names = {name: buffer.dtype for name, buffer in cache.named_buffers()}
    if names != {name: buffer.dtype for name, buffer in state.buffers.items()}:
        raise ValueError("the row is stored in another way or in another dtype than the KV cache")
    for i, (layer, spec) in enumerate(zip(layers, state.specs, strict=True)):
        here = layer.spec
        if replace(here, max_length=0) != replace(spec, max_length=0):
            raise ValueError(f"layer {i} of the row was made for {spec}, the KV cache has {here}")
        has_wrapped = state.high > spec.slots
        if _slots_used(spec, state.length, state.high) > here.slots or (has_wrapped and here.slots != spec.slots):
            raise ValueError(
                f"layer {i} of the row uses {spec.slots} slots again and again, the KV cache has {here.slots} of them"
            )
