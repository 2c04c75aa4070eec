# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a cache keeps when it cannot keep everything: one file a policy, one row here."""

from litgpt.kvcache.exact import ExactCache
from litgpt.kvcache.policies.base import EvictingCache
from litgpt.kvcache.policies.h2o import H2O
from litgpt.kvcache.policies.snap import Snap
from litgpt.kvcache.policies.tova import TOVA
from litgpt.kvcache.registry import POLICIES, register_policy

__all__ = ["H2O", "POLICIES", "TOVA", "EvictingCache", "ExactCache", "Snap", "register_policy"]

register_policy("dense", ExactCache)
register_policy("window", ExactCache)
register_policy("sinks", ExactCache)
register_policy("h2o", H2O)
register_policy("snap", Snap)
register_policy("tova", TOVA)
