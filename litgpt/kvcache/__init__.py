# Licensed under the Apache License 2.0, see the LICENSE file.

"""One cache abstraction for every model: storage and positions, never masks and never slices."""

from litgpt.kvcache.base import LayerCache, LayerSpec, batched_index_select
from litgpt.kvcache.cache import KVCache
from litgpt.kvcache.replay import ReplayCache
from litgpt.kvcache.spec import CacheKind

__all__ = ["CacheKind", "KVCache", "LayerCache", "LayerSpec", "ReplayCache", "batched_index_select"]
