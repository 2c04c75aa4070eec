# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a cache keeps when it cannot keep everything: one file a policy."""

from litgpt.kvcache.base import LayerCache
from litgpt.kvcache.exact import ExactCache
from litgpt.kvcache.policies.h2o import H2O
from litgpt.kvcache.policies.snap import Snap
from litgpt.kvcache.policies.tova import TOVA

POLICIES: dict[str, type[LayerCache]] = {
    "dense": ExactCache,
    "window": ExactCache,
    "sinks": ExactCache,
    "h2o": H2O,
    "snap": Snap,
    "tova": TOVA,
}
"""Policy of a `LayerSpec` -> the class of its layers."""
