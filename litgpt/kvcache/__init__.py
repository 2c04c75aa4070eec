# Licensed under the Apache License 2.0, see the LICENSE file.

"""One cache abstraction for every model: storage and positions, never masks and never slices."""

from litgpt.kvcache.base import LayerCache, LayerSpec, batched_index_select
from litgpt.kvcache.cache import KVCache, check_kind

__all__ = ["KVCache", "LayerCache", "LayerSpec", "batched_index_select", "check_kind"]
