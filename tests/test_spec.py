# Licensed under the Apache License 2.0, see the LICENSE file.

"""The string that chooses a kind of cache: what it means, what is refused and why."""

from __future__ import annotations

import itertools

import pytest

from litgpt.errors import UserError
from litgpt.kvcache import KVCache
from litgpt.kvcache.registry import POLICIES, STORES
from litgpt.kvcache.spec import CacheKind
from tests.tiny_cached import model_of

FORMS = {"dense": "dense", "sinks": "sinks:4+1020"}
GOOD: dict[str, CacheKind] = {
    "dense": CacheKind(),
    "window:1024": CacheKind("window", 1024),
    "window:1": CacheKind("window", 1),
    "sinks:4+1020": CacheKind("sinks", 1020, 4),
    "h2o:1024": CacheKind("h2o", 1024),
    "snap:7": CacheKind("snap", 7),
    "tova:256": CacheKind("tova", 256),
    "int8": CacheKind(store="int8"),
    "int4": CacheKind(store="int4"),
    "offload": CacheKind(store="offload"),
    "h2o:1024,int8": CacheKind("h2o", 1024, store="int8"),
    "sinks:4+1020,int4": CacheKind("sinks", 1020, 4, "int4"),
    "window:64,offload": CacheKind("window", 64, store="offload"),
}


@pytest.mark.parametrize("text", GOOD)
def test_every_kind_is_read_and_written_the_same(text: str) -> None:
    kind = CacheKind.parse(text)
    assert kind == GOOD[text]
    assert str(kind) == text
    assert CacheKind.parse(str(kind)) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" h2o:8 , int8 ", CacheKind("h2o", 8, store="int8")),
        ("int8,h2o:8", CacheKind("h2o", 8, store="int8")),
        ("dense,int4", CacheKind(store="int4")),
        ("window:008", CacheKind("window", 8)),
    ],
)
def test_other_spellings(text: str, kind: CacheKind) -> None:
    assert CacheKind.parse(text) == kind
    assert CacheKind.parse(str(kind)) == kind


def test_every_policy_goes_with_every_store() -> None:
    """Whatever is registered can be written, is read back as itself, and makes a cache."""
    config = model_of("grouped").config
    for policy, store in itertools.product(POLICIES, STORES):
        text = FORMS.get(policy, f"{policy}:32") + ("" if store == "plain" else f",{store}")
        kind = CacheKind.parse(text)
        assert (kind.policy, kind.store) == (policy, store)
        assert CacheKind.parse(str(kind)) == kind
        assert KVCache.estimate(config, text) > 0


SENSELESS = {
    "": "unknown",
    "foo": "unknown.*foo",
    "h2o:1024,": "unknown",
    "DENSE": "unknown.*DENSE",
    "int2": "unknown.*int2",
    "dense:5": "dense takes no number",
    "h2o": "h2o needs how many",
    "h2o:": "h2o needs how many",
    "window:many": "window needs how many",
    "window:-4": "window needs how many",
    "window:1.5": "window needs how many",
    "window:٣": "window needs how many",
    "window:²": "window needs how many",
    "snap:4+8": "snap needs how many",
    "sinks:1024": "sinks needs how many",
    "sinks:4+": "sinks needs how many",
    "sinks:+1020": "sinks needs how many",
    "sinks:4+5+6": "sinks needs how many",
    "sinks:0+8": "at least 1",
    "sinks:4+0": "at least 1",
    "h2o:0": "at least 1",
    "int8:4": "int8 takes no number",
    "int8,int4": "two ways to store.*int8.*int4",
    "offload,offload": "two ways to store",
    "h2o:8,snap:8": "two policies.*h2o.*snap",
    "dense,window:8": "two policies.*dense.*window",
}


@pytest.mark.parametrize("text", SENSELESS)
def test_senseless_kinds_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UserError, match=SENSELESS[text]) as caught:
        CacheKind.parse(text)
    assert caught.value.hint
    assert "dense" in caught.value.hint or "example" in caught.value.hint
