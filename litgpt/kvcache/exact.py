# Licensed under the Apache License 2.0, see the LICENSE file.

"""Exact caches: every position that attention can still see is kept.

One class serves full attention (a slot a position), sliding windows (a ring) and latent attention (values alias keys):
the sizes in the `LayerSpec` are all that differs. There is no state besides the buffers: which position a slot holds is
a closed form of the row's length.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from litgpt.attention import KVView, Step
from litgpt.kvcache.base import LayerCache


class Placement(NamedTuple):
    """Where the tokens of a step go, the same for all layers of one layout.

    Attributes:
        run: first slot, when every row uses the same consecutive slots.
        slots: `(B or 1, T)` slot of each token otherwise.
        pos: `(B or 1, 1, slots + 1)` position held by each slot after the step.
        live: host integer; slots from here on are empty in every row.
    """

    run: int | None
    slots: torch.Tensor | None
    pos: torch.Tensor
    live: int | None


class ExactCache(LayerCache):
    """Slot `s` of a ring of `c` slots holds the largest position below the row's length that is `s` modulo `c`."""

    def update(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """Store the new keys and values, then show everything; see `LayerCache.update`."""
        spec = self.spec
        if step.size > spec.slack and self.is_ring:
            return self._update_by_long_chunk(k, v, step)
        place = step.memo.get(self.layout)
        if place is None:
            place = step.memo[self.layout] = self._place(step)
        if place.run is None:
            assert place.slots is not None
            keys, values = self.store.write(place.slots, k, v, place.live)
        else:
            keys, values = self.store.write_run(place.run, k, v, place.live)
        return self._view(keys, values, place.pos, place.live, self.layout)

    def _view(self, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, live: int | None, key: Hashable) -> KVView:
        spec = self.spec
        relative = spec.policy == "sinks"
        return KVView(k, v, pos, live, spec.n_sink, key, spec.window, relative)

    def _place(self, step: Step) -> Placement:
        start, run = step.start, None
        if start is not None and self.slot_of(start + step.size - 1) == self.slot_of(start) + step.size - 1:
            run = self.slot_of(start)  # the same slots in every row, and no wrap inside the chunk
        live = None if step.live is None else min(step.live, self.slots)
        return Placement(run, self._slots(step.pos) if run is None else None, self.slot_pos(step.end), live)

    def _update_by_long_chunk(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """Attend to what the ring held before next to the chunk itself, then keep the tail; only prefill comes here.

        A chunk longer than the slack would overwrite positions that its own first queries still see.
        """
        chunk_k, chunk_v = self.store.as_stored(k, v)
        if step.fresh:
            view = self._view(chunk_k, chunk_v, step.pos.unsqueeze(1), step.size, "chunk")
        else:
            # copies: the store is about to be overwritten, and gradients may still need what it held
            old_k, old_v = self.store.read(k)
            old_pos = self.slot_pos(step.begin)
            view = self._view(
                torch.cat((old_k, chunk_k.to(old_k.dtype)), dim=2),
                torch.cat((old_v, chunk_v.to(old_v.dtype)), dim=2),
                torch.cat((old_pos, step.pos.unsqueeze(1).expand(old_pos.size(0), -1, -1)), dim=2),
                None,
                ("ring and chunk", self.layout),
            )
        self._write_tail(k, v, step)
        return view

    def _write_tail(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> None:
        """Keep what the ring can hold, and the sinks; the rest goes where padding goes."""
        spec = self.spec
        keep = (step.pos >= step.end.unsqueeze(1) - self.ring) | (step.pos < spec.n_sink)
        self.store.write(torch.where(keep, self._slots(step.pos), self.slots), k, v)

    def slot_of(self, position: int) -> int:
        """Where a position is stored."""
        n_sink = self.spec.n_sink
        return position if position < n_sink else n_sink + (position - n_sink) % self.ring

    def _slots(self, pos: torch.Tensor) -> torch.Tensor:
        """`slot_of` for a tensor `(B, T)`; padding goes to the extra slot."""
        spec = self.spec
        slots = spec.n_sink + torch.remainder(pos - spec.n_sink, self.ring)
        if spec.n_sink:
            slots = torch.where(pos < spec.n_sink, pos, slots)
        return torch.where(pos < 0, self.slots, slots)

    def slot_pos(self, end: torch.Tensor) -> torch.Tensor:
        """Positions held by the slots of rows of length `end`: `(B or 1, 1, slots + 1)`, -1 for nothing."""
        spec = self.spec
        slot = torch.arange(self.slots + 1, device=end.device)
        last = end.unsqueeze(1) - 1  # (B, 1)
        pos = last - torch.remainder(last - slot, self.ring) if self.is_ring else slot.expand(last.size(0), -1)
        held = (pos >= spec.n_sink) & (pos <= last)
        if spec.n_sink:
            is_sink = slot < spec.n_sink
            pos, held = torch.where(is_sink, slot, pos), torch.where(is_sink, slot <= last, held)
        return torch.where(held & (slot < self.slots), pos, -1).unsqueeze(1)

    def max_rewind(self, length: int, high: int) -> int:
        """See `LayerCache.max_rewind`: beyond the slack, a ring that wrapped has overwritten what would be needed."""
        if high <= self.slots:
            return length
        return min(length, self.spec.slack - (high - length))

    def forget(self, row: int, start: int, stop: int) -> None:
        """See `LayerCache.forget`."""
        if not self.is_ring:
            self.store.forget(row, slice(start, min(stop, self.slots)))
        elif stop - start >= self.slots:
            self.store.forget(row, slice(0, self.slots))
        else:
            slots = sorted({self.slot_of(p) for p in range(start, stop)})
            device = next(self.store.buffers()).device
            self.store.forget(row, torch.tensor(slots, dtype=torch.long, device=device))
