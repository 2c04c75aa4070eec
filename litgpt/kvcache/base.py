# Licensed under the Apache License 2.0, see the LICENSE file.

"""The parts every cache is made of: what a layer needs to be told, and the per-layer base class."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from litgpt.attention import KVView, Step
from litgpt.kvcache.registry import EXACT
from litgpt.kvcache.spec import CacheKind
from litgpt.kvcache.storage import STORES

if TYPE_CHECKING:
    from litgpt.config import Config

DEFAULT_SLACK = 16  # longest chunk a ring takes in place, and how far it can be rewound


@dataclass(frozen=True)
class LayerSpec:
    """Everything that decides the buffers of one layer; no tensors.

    Attributes:
        groups: key/value heads; 1 for latent attention.
        k_dim: width of a key; for latent attention the latent and the rotated part together.
        v_dim: width of a value.
        max_length: longest sequence in tokens.
        window: sliding window in tokens, None for full attention.
        n_sink: first positions that are kept beside the window.
        slack: tokens a ring holds beyond its window, so that a chunk is written before it is attended to.
        alias_v: values are the first `v_dim` elements of the keys, in one buffer.
        policy: what is kept when not everything fits, one of `registry.POLICIES`.
        budget: tokens that an evicting policy keeps.
        store: how it is stored, one of `registry.STORES`.
    """

    groups: int
    k_dim: int
    v_dim: int
    max_length: int
    window: int | None = None
    n_sink: int = 0
    slack: int = DEFAULT_SLACK
    alias_v: bool = False
    policy: str = "dense"
    budget: int | None = None
    store: str = "plain"

    @property
    def slots(self) -> int:
        """Positions that the buffers hold."""
        if self.budget is not None:
            return min(self.max_length, self.budget + self.slack)
        if self.window is None:
            return self.max_length
        return min(self.max_length, self.n_sink + self.window + self.slack - 1)

    @property
    def is_ring(self) -> bool:
        """Whether slots are used again."""
        return self.slots < self.max_length

    @property
    def ring(self) -> int:
        """Slots used in turn."""
        return self.slots - self.n_sink

    @property
    def layout(self) -> Hashable:
        """Layers with the same layout store every position in the same slot."""
        return (self.slots, self.n_sink, self.is_ring)

    @classmethod
    def from_config(
        cls,
        config: Config,
        block_idx: int,
        max_length: int,
        slack: int = DEFAULT_SLACK,
        kind: CacheKind = CacheKind(),  # noqa: B008  (frozen)
    ) -> LayerSpec:
        """What layer `block_idx` of a model needs for sequences of `max_length` tokens.

        A policy that bounds the cache applies to the layers with global attention; sliding ones are bounded already.
        """
        window = config.layer_window(block_idx)
        options: dict[str, Any] = {"slack": slack, "store": kind.store}
        if window is None and kind.policy in ("window", "sinks"):
            window = kind.budget
            options |= {"policy": kind.policy, "n_sink": kind.n_sink}
        elif window is None and kind.policy not in EXACT:
            options |= {"policy": kind.policy, "budget": kind.budget}
        if config.latent_attention is not None:
            k_dim = config.kv_lora_rank + config.qk_rope_head_dim
            return cls(1, k_dim, config.kv_lora_rank, max_length, window, alias_v=True, **options)
        assert config.n_query_groups is not None
        assert config.head_size is not None
        return cls(config.n_query_groups, config.head_size, config.head_size, max_length, window, **options)


class LayerCache(nn.Module):
    """Keys and values of one layer. A kind of cache is a subclass that fills in `update`.

    Args:
        spec: sizes of the layer.
        batch_size: rows.
        dtype: element type of the buffers.
        device: where they live.
    """

    # The contract of a kind, verified by the generic tests
    compilable = True  # `update` has no host decision that depends on the data
    chunk_invariant = True  # the same result however a sequence is cut into chunks
    needs_weights = False  # `observe` wants the attention mass of each slot after every step
    observe_last: int | None = None  # of so many last queries; None: of all

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        # worked out once: these are read in every layer of every step
        self.slots, self.ring, self.is_ring, self.layout = spec.slots, spec.ring, spec.is_ring, spec.layout
        self.store = STORES[spec.store](spec, batch_size, dtype, device)

    def update(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """Store the step's keys and values and return a view of everything stored.

        Args:
            k: `(B, G, T, k_dim)`.
            v: `(B, G, T, v_dim)`, None when values alias keys.
            step: the positions.
        """
        raise NotImplementedError

    def observe(self, sums: torch.Tensor, step: Step) -> None:
        """Learn what the step's queries attended to; called after attention when `needs_weights`.

        Args:
            sums: `(B, G, S)` attention mass on the slots of the view that `update` returned, see
                `attention.column_sums`.
            step: the positions.
        """
        raise NotImplementedError

    def max_rewind(self, length: int, high: int) -> int:
        """How many tokens a row of `length` can be taken back exactly, `high` being the longest it has been."""
        raise NotImplementedError

    def forget(self, row: int, start: int, stop: int) -> None:
        """Zero what is stored for positions `start..stop-1`.

        Stale slots are never visible, but a masked weight of zero times a stale infinity or NaN is a NaN.
        """
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(b.numel() * b.element_size() for b in self.buffers())


def batched_index_select(t: torch.Tensor, dim: int, idx: torch.Tensor) -> torch.Tensor:
    """`index_select` with an index a row.

    Args:
        t: `(B, ...)`, or any shape when `idx` has one dimension.
        dim: the dimension of `t` that is indexed.
        idx: `(T,)` for all rows, or `(B, T)`.
    """
    if idx.dim() == 1:
        return torch.index_select(t, dim, idx)
    shape = list(t.shape)
    shape[dim] = idx.size(1)
    view = [1] * t.dim()
    view[0], view[dim] = idx.shape
    return t.gather(dim, idx.view(view).expand(shape))
