# Licensed under the Apache License 2.0, see the LICENSE file.

"""The cache of a whole model: its layers, and the length of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.kvcache.base import LayerCache, LayerSpec
from litgpt.kvcache.policies import POLICIES
from litgpt.kvcache.rows import RowState, export_row, import_row
from litgpt.kvcache.spec import CacheKind

if TYPE_CHECKING:
    from litgpt.config import Config


class KVCache(nn.Module):
    """The cache of one request or session: one `LayerCache` a layer and the length of each row, on the host.

    Rows are independent: each has its own length, so ragged batches and per-row reset are the normal case.

    Args:
        specs: one `LayerSpec` a layer.
        batch_size: rows.
        dtype: element type of the buffers.
        device: where they live.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        batch_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device) if device is not None else torch.get_default_device()
        self.layers = nn.ModuleList(POLICIES[spec.policy](spec, batch_size, dtype, device) for spec in specs)
        self.batch_size = batch_size
        self.max_length = max(spec.max_length for spec in specs)
        self.device = device
        self.dtype = dtype or torch.get_default_dtype()
        self.lengths = [0] * batch_size
        self._high = [0] * batch_size  # longest length written since the row was reset
        # Tokens that a cache with relative sinks keeps, None for other kinds: past this length the sinks are seen as if
        # they stood right before the window.
        sinks = [spec for spec in specs if spec.policy == "sinks" and spec.window is not None]
        self.relative_length = sinks[0].n_sink + (sinks[0].window or 0) if sinks else None

    @property
    def rope_length(self) -> int:
        """Length in tokens that rotations have to reach: the longest row, or with relative sinks what is kept of it."""
        return self.max_length if self.relative_length is None else min(self.max_length, self.relative_length)

    @classmethod
    def from_config(
        cls,
        config: Config,
        kind: str = "dense",
        batch_size: int = 1,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Build the cache of a model.

        Args:
            config: the model's description.
            kind: "dense": exact for this model, with rings in its sliding layers; others see `litgpt.kvcache.spec`.
            batch_size: rows.
            max_length: longest row in tokens, default the model's context.
            dtype: element type of the buffers, default torch's.
            device: where they live.

        Raises:
            UserError: unknown kind, or sizes below 1.
        """
        parsed = CacheKind.parse(kind)
        max_length = config.block_size if max_length is None else max_length
        if batch_size < 1 or max_length < 1:
            raise UserError(f"a KV cache needs batch size {batch_size} and length {max_length} of at least 1")
        specs = [LayerSpec.from_config(config, i, max_length, kind=parsed) for i in range(config.n_layer)]
        return cls(specs, batch_size, dtype, device)

    @classmethod
    def estimate(cls, config: Config, kind: str = "dense", **kwargs: Any) -> int:
        """Bytes that `from_config` with the same arguments would allocate; allocates nothing."""
        return cls.from_config(config, kind, **{**kwargs, "device": "meta"}).nbytes()

    def plan(self, n_new: int | Sequence[int]) -> Step:
        """Describe the next forward pass, without changing the cache.

        Args:
            n_new: new tokens of every row, or of each row (0 leaves a row idle). Rows shorter than the longest are
                padded on the right.

        Raises:
            ValueError: a row would grow past `max_length`, or the number of rows does not fit.
        """
        counts = [n_new] * self.batch_size if isinstance(n_new, int) else list(n_new)
        if len(counts) != self.batch_size:
            raise ValueError(f"plan got {len(counts)} rows for a cache of {self.batch_size}")
        if min(counts) < 0 or max(counts) < 1:
            raise ValueError(f"plan needs at least one new token and none negative, got {counts}")
        lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        if max(lengths) > self.max_length:
            row = max(range(len(lengths)), key=lengths.__getitem__)
            raise ValueError(
                f"row {row} would hold {self.lengths[row]} + {counts[row]} = {lengths[row]} tokens, "
                f"but the KV cache has room for {self.max_length}"
            )
        width, start = max(counts), self.lengths[0]
        if min(counts) == width and lengths.count(lengths[0]) == len(lengths):
            pos = torch.arange(start, start + width, device=self.device).unsqueeze(0)
            end = torch.full((1,), start + width, device=self.device)
            return Step(pos, end, start + width, start, fresh=start == 0, lengths=lengths)
        rows = [
            list(range(length, length + n)) + [-1] * (width - n) for length, n in zip(self.lengths, counts, strict=True)
        ]
        return Step(
            torch.tensor(rows, device=self.device),
            torch.tensor(lengths, device=self.device),
            max(lengths),
            fresh=not any(self.lengths),
            lengths=lengths,
            last=torch.tensor([max(n - 1, 0) for n in counts], device=self.device),
        )

    def commit(self, step: Step) -> None:
        """Take over the row lengths of a step whose forward pass succeeded."""
        if step.lengths is not None:
            self.lengths = list(step.lengths)
            self._high = [max(high, length) for high, length in zip(self._high, self.lengths, strict=True)]

    def abandon(self, step: Step) -> None:
        """Undo what a failed forward pass may have written.

        Rows are then as before the step. A row whose ring has already let go of tokens it would need is emptied.
        """
        if step.lengths is None:
            return
        counts = [new - old for old, new in zip(self.lengths, step.lengths, strict=True)]
        self.commit(step)
        for row, n in enumerate(counts):
            if n > self.max_rewind(row):
                self.reset_row(row)
                counts[row] = 0
        self.rewind(counts)

    def max_rewind(self, row: int) -> int:
        """How many tokens a row can be taken back exactly, right now."""
        length, high = self.lengths[row], self._high[row]
        return max(0, min(layer.max_rewind(length, high) for layer in self.layer_caches()))

    def rewind(self, n_tokens: int | Sequence[int]) -> None:
        """Take back the last tokens of every row, or of each row.

        Raises:
            ValueError: a row cannot be taken back that far exactly; nothing is changed then.
        """
        counts = [n_tokens] * self.batch_size if isinstance(n_tokens, int) else list(n_tokens)
        if len(counts) != self.batch_size:
            raise ValueError(f"rewind got {len(counts)} rows for a cache of {self.batch_size}")
        for row, n in enumerate(counts):
            if not 0 <= n <= (limit := self.max_rewind(row)):
                raise ValueError(f"row {row}: cannot rewind {n} tokens exactly, at most {limit}")
        for row, n in enumerate(counts):
            if n:
                self._forget(row, self.lengths[row] - n, self.lengths[row])
                self.lengths[row] -= n

    def reset_row(self, row: int) -> None:
        """Empty a row, for the next sequence.

        Once all rows are empty, what they held takes part in no later backward pass.
        """
        self._forget(row, 0, self._high[row])
        self.lengths[row] = self._high[row] = 0
        if not any(self._high):
            for layer in self.layer_caches():
                layer.store.detach()

    def reset(self) -> None:
        """Empty all rows."""
        for row in range(self.batch_size):
            self.reset_row(row)

    def move_to(self, starts: Sequence[int]) -> None:
        """Take the first rows to given lengths, for a caller that thinks in positions: 0 starts a new sequence.

        Raises:
            ValueError: a row is shorter than that, or cannot be taken back that far exactly; nothing is changed then.
        """
        for row, start in enumerate(starts):
            length = self.lengths[row]
            if start > length:
                raise ValueError(f"row {row} holds {length} tokens: position {start} would leave a gap")
            if start and length - start > (limit := self.max_rewind(row)):
                raise ValueError(
                    f"row {row} holds {length} tokens and can go back {limit} of them exactly, not to position {start}"
                )
        for row, start in enumerate(starts):
            if start == 0:
                self.reset_row(row)
            elif start < self.lengths[row]:
                self._forget(row, start, self.lengths[row])
                self.lengths[row] = start

    def _forget(self, row: int, start: int, stop: int) -> None:
        if stop > start:
            for layer in self.layer_caches():
                layer.forget(row, start, stop)

    def layer_caches(self) -> list[LayerCache]:
        """The layers, with their type."""
        return list(self.layers)  # type: ignore[arg-type]

    def export_row(self, row: int) -> RowState:
        """A copy of the slots that one row uses, for `import_row` of a cache of the same model and kind."""
        return export_row(self, row)

    def import_row(self, row: int, state: RowState) -> None:
        """Overwrite a row with what `export_row` returned.

        The caches may differ in `max_length`, unless a ring that has wrapped has another size here.

        Raises:
            ValueError: the state is of another model or kind, or does not fit; nothing is changed then.
        """
        import_row(self, row, state)

    @property
    def chunk_invariant(self) -> bool:
        """Whether the result does not depend on how a sequence was cut into chunks."""
        return all(layer.chunk_invariant for layer in self.layer_caches())

    @property
    def compilable(self) -> bool:
        """Whether a decode step over this cache compiles to one graph."""
        return all(layer.compilable for layer in self.layer_caches())

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes() for layer in self.layer_caches())

    def report(self) -> str:
        """One line for people: size, kind of layers."""
        caches = self.layer_caches()
        n_ring = sum(cache.spec.is_ring for cache in caches)
        rings = f", {n_ring} of them rings of {min(c.spec.slots for c in caches)} slots" if n_ring else ""
        return (
            f"KV cache: {self.nbytes() / 2**20:.1f} MiB for {self.batch_size} x {self.max_length} tokens, "
            f"{len(caches)} layers{rings}"
        )
