# Licensed under the Apache License 2.0, see the LICENSE file.

"""Typed access to the keys of a `config.json` that other people wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from litgpt.errors import UserError

Kind = Literal["size", "count", "number", "positive", "flag", "text"]

_HUGE = 1e300
_MEANING: dict[Kind, str] = {
    "size": "a whole number above 0",
    "count": "a whole number, 0 or more",
    "number": "a number",
    "positive": "a number above 0",
    "flag": "true or false",
    "text": "a string",
}


def words(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


def typed(key: str, value: Any, kind: Kind) -> Any:
    """Return `value` as its `kind`, or raise a `UserError` that names the key."""
    if kind == "flag":
        fits = isinstance(value, bool)
    elif kind == "text":
        fits = isinstance(value, str)
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE  # false for NaN
        if fits and kind in ("size", "count"):
            fits = value == int(value) and value >= (1 if kind == "size" else 0)
            value = int(value) if fits else value
        elif fits and kind == "positive":
            fits = value > 0
    if not fits:
        raise UserError(f"{key} is {value!r}, expected {_MEANING[kind]}")
    return value


class Keys:
    """The keys of one JSON object; remembers which were asked for, so that the rest can be reported.

    Args:
        raw: the object as read.
        defaults: what an absent key means. A key that is in neither is required.
        nullable: keys for which an explicit null is an answer of its own ("none"), not the same as an absent key.
        label: what to call the object in messages.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        nullable: frozenset[str] = frozenset(),
        label: str = "",
    ) -> None:
        self.raw = raw
        self.defaults = defaults
        self.nullable = nullable
        self.label = label
        self.asked: set[str] = set()

    def get(self, key: str, kind: Kind) -> Any:
        """The value of `key`, checked to be of `kind`; None when it is null or absent and that is allowed."""
        self.asked.add(key)
        value = self.raw.get(key)
        if value is None and not (key in self.raw and key in self.nullable):
            if key not in self.defaults:
                raise UserError(f"{self.label} lacks {key}", "is the file complete?")
            value = self.defaults[key]
        return None if value is None else typed(f"{self.label}: {key}", value, kind)

    def take(self, key: str) -> Any:
        """The value of `key` as it is, None when absent."""
        self.asked.add(key)
        return self.raw.get(key)

    def unread(self) -> list[str]:
        """Keys with a value that nobody asked for."""
        return sorted(key for key, value in self.raw.items() if value is not None and key not in self.asked)
