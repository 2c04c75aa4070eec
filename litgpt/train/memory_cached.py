# Licensed under the Apache License 2.0, see the LICENSE file.

"""What training under a KV cache holds beside the activations of a chunk, worked out without allocating any of it."""

from __future__ import annotations

from typing import cast

import torch

from litgpt.attention import KVView, Step
from litgpt.config import Config
from litgpt.kvcache import ReplayCache
from litgpt.kvcache.registry import EXACT
from litgpt.kvcache.replay import ReplayLayer


class LastChunk:
    """Stands for a `ReplayCache` when the last chunk of a text runs with gradients: no other sees more.

    Args:
        config: the model's description.
        kind: the kind of the cache.
        batch_size: rows.
        length: tokens of a row.
        chunk_size: tokens of a chunk.
        dtype: of keys and values.

    Attributes:
        step: of the chunk.
        nbytes: the keys and values of all tokens, their gradients in float32, and what decides; and of the keys and
            values that the chunk sees of earlier ones a copy and its gradient.
    """

    def __init__(
        self, config: Config, kind: str, batch_size: int, length: int, chunk_size: int, dtype: torch.dtype
    ) -> None:
        cache = cast(ReplayCache, ReplayCache.from_config(config, kind, batch_size, length, dtype, "meta"))
        start = max(0, length - chunk_size)
        pos, end = torch.arange(start, length).unsqueeze(0), torch.full((1,), length)
        self.step = Step(pos, end, length, start, fresh=start == 0)
        self.layers = [_Layer(layer, start, dtype) for layer in cache.replay_layers()]
        self.rope_length, self.relative_length = cache.rope_length, cache.relative_length
        stores = [buffer for layer in cache.replay_layers() for buffer in layer.store.buffers()]
        gradients = sum(max(4, buffer.itemsize) * buffer.numel() for buffer in stores)
        self.nbytes = cache.nbytes() + gradients + 2 * sum(old.nbytes for layer in self.layers for old in layer.old)


class _Layer:
    """Stands for a `ReplayLayer`."""

    needs_weights = False

    def __init__(self, layer: ReplayLayer, start: int, dtype: torch.dtype) -> None:
        spec = layer.decider.spec
        self.spec, n_batch, seen = spec, layer.until.size(0), min(start, layer.decider.slots)
        widths = [spec.k_dim] if spec.alias_v else [spec.k_dim, spec.v_dim]
        shape = (n_batch, spec.groups, seen)
        self.old = [torch.zeros((*shape, width), dtype=dtype, requires_grad=True) for width in widths]

    def update(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """What `ReplayLayer.update` shows in the second pass."""
        new = [k] if v is None else [k, v]
        parts = [torch.cat((old, part), dim=2) for old, part in zip(self.old, new, strict=True)]
        values = parts[0][..., : self.spec.v_dim] if v is None else parts[1]
        n_groups = 1 if self.spec.policy in EXACT else k.size(1)
        pos = torch.zeros(k.size(0), n_groups, parts[0].size(2), dtype=torch.long)
        return KVView(
            parts[0], values, pos, None, self.spec.n_sink, None, self.spec.window, self.spec.policy == "sinks"
        )
