# Licensed under the Apache License 2.0, see the LICENSE file.

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt.generate.stopping import HoldBack


def run(patterns: Sequence[Sequence], symbols: Sequence) -> tuple[list, list | None, list[int]]:
    """What is passed on, the match, and how much had been passed on after each symbol."""
    hold: HoldBack = HoldBack(patterns)
    shown: list = []
    lengths = []
    for symbol in symbols:
        shown += hold.push(symbol)
        lengths.append(len(shown))
        if hold.matched is not None:
            return shown, hold.matched, lengths
    return shown + list(hold.flush()), None, lengths


def expected(patterns: Sequence[Sequence], symbols: Sequence) -> tuple[list, list | None]:
    """By trying everything: the match that ends first, and of those the longest."""
    for end in range(1, len(symbols) + 1):
        hits = [p for p in patterns if list(symbols[:end][-len(p) :]) == list(p)]
        if hits:
            longest = max(hits, key=len)
            return list(symbols[: end - len(longest)]), list(longest)
    return list(symbols), None


@pytest.mark.parametrize(
    ("patterns", "symbols", "shown", "matched"),
    [
        ([[5, 7]], [5, 5, 7], [5], [5, 7]),
        (["aab"], "aaab", ["a"], ["a", "a", "b"]),
        (["abcd", "bc"], "xabce", ["x", "a"], ["b", "c"]),
        (["bc", "abc"], "abc", [], ["a", "b", "c"]),
        (["abab"], "abaab", ["a", "b", "a", "a", "b"], None),
        ([], "ab", ["a", "b"], None),
        ([[2]], [1, 2, 3], [1], [2]),
    ],
)
def test_overlapping_patterns_are_found(patterns: list, symbols: list, shown: list, matched: list | None) -> None:
    assert run(patterns, symbols)[:2] == (shown, matched)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.text("abc", max_size=30),
)
def test_any_patterns(patterns: list[str], symbols: str) -> None:
    shown, matched, lengths = run(patterns, symbols)
    assert (shown, matched) == expected(patterns, symbols)
    for n, length in enumerate(lengths[: len(lengths) - (matched is not None)], start=1):
        seen = symbols[:n]
        held = max((k for p in patterns for k in range(1, len(p)) if seen.endswith(p[:k])), default=0)
        assert length == n - held, "exactly what may begin a pattern is held back"
