# Licensed under the Apache License 2.0, see the LICENSE file.

"""The one table of policies: what a cache may keep, by the name that a person writes.

It imports no policy, so that everything else can import it; `litgpt.kvcache.policies` fills it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from litgpt.kvcache.base import LayerCache

LayerClass = TypeVar("LayerClass", bound="type[LayerCache]")

STORES = ("plain", "int8", "int4", "offload")
EXACT = ("dense", "window", "sinks")
"""Policies whose slots follow from the positions; all others have a budget and evict."""

POLICIES: dict[str, type[LayerCache]] = {}
"""Policy of a `LayerSpec` -> the class of its layers."""


def register_policy(name: str, layer_class: LayerClass) -> LayerClass:
    """Make a policy available as the kind `name:N`, N being the tokens that it keeps.

    Args:
        name: lower case letters, digits and underscores.
        layer_class: a subclass of `litgpt.kvcache.policies.base.EvictingCache`, or of `LayerCache` with a budget.

    Returns:
        The class.

    Raises:
        ValueError: the name is taken by another class or cannot be written in a kind.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in STORES:
        raise ValueError(f"a policy cannot be called {name!r}: use lower case letters, digits and underscores")
    known = POLICIES.get(name, layer_class)
    if (known.__module__, known.__qualname__) != (layer_class.__module__, layer_class.__qualname__):
        raise ValueError(f"the policy {name!r} exists already, as {known.__name__}")
    POLICIES[name] = layer_class
    return layer_class


def evicting_policies() -> tuple[str, ...]:
    """The policies that keep a budget of tokens and evict the others."""
    return tuple(name for name in POLICIES if name not in EXACT)


def usage() -> str:
    """The kinds there are, in words."""
    forms = {"dense": "dense", "sinks": "sinks:S+N"}
    *policies, last = (forms.get(name, f"{name}:N") for name in POLICIES)
    return f"use {', '.join(policies)} or {last}, and after a comma int8, int4 or offload"
