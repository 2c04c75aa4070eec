# Licensed under the Apache License 2.0, see the LICENSE file.

"""Finding stop sequences in a stream, and holding back what may still turn out to be one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class _Node(Generic[Symbol]):
    """A prefix of some pattern."""

    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[Symbol, _Node[Symbol]] = {}
        self.depth = depth
        self.fallback: _Node[Symbol] | None = None  # longest proper suffix that is a prefix too; None at the root
        self.match = 0  # length of the longest pattern that ends here


class HoldBack(Generic[Symbol]):
    """Passes symbols (token ids or characters) on, except those that are or may become a stop pattern.

    Patterns are found wherever they begin, overlaps included: [5, 7] in 5, 5, 7. The search is Aho and Corasick's
    (https://doi.org/10.1145/360825.360855): constant work a symbol, however many patterns there are.

    Args:
        patterns: non-empty sequences of symbols.
    """

    def __init__(self, patterns: Iterable[Sequence[Symbol]]) -> None:
        self._node = self._root = _build(patterns)
        self._held: list[Symbol] = []
        self.matched: list[Symbol] | None = None

    def push(self, symbol: Symbol) -> Sequence[Symbol]:
        """Take one symbol and return those that are certain now. After a match, see `matched` and push no more."""
        assert self.matched is None
        node = self._node
        while symbol not in node.children and node.fallback is not None:
            node = node.fallback
        node = self._node = node.children.get(symbol, self._root)
        if not node.depth and not self._held:
            return (symbol,)
        self._held.append(symbol)
        if node.match:
            return self._split(node.match, match=True)
        return self._split(node.depth)

    def flush(self) -> Sequence[Symbol]:
        """The end has come: return what was held back."""
        return self._split(0)

    def _split(self, n: int, match: bool = False) -> Sequence[Symbol]:
        """Keep the last `n` held symbols, or make them the match, and return those before."""
        border = len(self._held) - n
        released, rest = self._held[:border], self._held[border:]
        self._held = [] if match else rest
        if match:
            self.matched = rest
        return released


def _build(patterns: Iterable[Sequence[Symbol]]) -> _Node[Symbol]:
    root: _Node[Symbol] = _Node(0)
    for pattern in patterns:
        assert len(pattern), "an empty stop pattern matches everywhere"
        node = root
        for symbol in pattern:
            node = node.children.setdefault(symbol, _Node(node.depth + 1))
        node.match = node.depth
    # Breadth first, so that the fallback of a node is complete before the node's children ask for it
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for symbol, child in node.children.items():
            fallback = node.fallback
            while fallback is not None and symbol not in fallback.children:
                fallback = fallback.fallback
            child.fallback = root if fallback is None else fallback.children[symbol]
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
