# Licensed under the Apache License 2.0, see the LICENSE file.

"""Rows kept from earlier requests, found again by how the next prompt begins.

The rows hang in a trie of token ids whose edges carry runs of tokens. Several tries stand side by side, one a scope:
rows of one scope may be imported into each other's caches.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn

from litgpt.errors import UserError
from litgpt.kvcache.rows import RowState


@dataclass
class PrefixStats:
    """What a store has been good for.

    Attributes:
        lookups: prompts looked up.
        hits: of these, found at least in part.
        tokens: tokens of the prompts looked up.
        tokens_saved: of these, not computed again.
        evicted: rows dropped for lack of room.
    """

    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    tokens_saved: int = 0
    evicted: int = 0


class PrefixStore:
    """Rows of one model by their tokens, the least recently used ones dropped when the bytes run out.

    A stored row serves a prompt up to where they part, if it can be taken back that far exactly (`max_rewind`): always
    for full caches, within the slack for rings, not at all for caches that evict. What is found is therefore what the
    model would compute. A row is dropped early once a longer one can serve all that it can.

    Args:
        max_bytes: bytes of all rows together.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise UserError(f"a prefix store of {max_bytes} bytes holds nothing", "give it some megabytes")
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.stats = PrefixStats()
        self._roots: dict[Hashable, _Node] = {}
        self._by_use: OrderedDict[_Node, RowState] = OrderedDict()  # the next to be dropped first
        self._model: weakref.ref[nn.Module] | None = None
        self._weights = 0  # how often they have been changed in place

    def __len__(self) -> int:
        return len(self._by_use)

    def bind(self, model: nn.Module) -> None:
        """Say whose rows these are. They are forgotten if the weights have been changed in place since, as by training.

        Raises:
            UserError: they are another model's.
        """
        if self._model is None:
            self._model = weakref.ref(model)
        elif self._model() is not model:
            raise UserError("the prefix store holds rows of another model", "make a store for each model")
        weights = sum(0 if p.is_inference() else p._version for p in model.parameters())
        if weights != self._weights:
            self.clear()
            self._model, self._weights = weakref.ref(model), weights

    def clear(self) -> None:
        """Forget all rows and whose they were, not the statistics."""
        self._model = None
        self._roots.clear()
        self._by_use.clear()
        self.nbytes = 0

    def lookup(self, tokens: Sequence[int], scope: Hashable = None) -> tuple[RowState | None, int]:
        """The row that saves the most tokens.

        Args:
            tokens: how the prompt begins, as far as it may be taken from a stored row.
            scope: see the module; None if all rows are of one kind.

        Returns:
            The row and its length, so many of `tokens`; None, 0 if there is none.
        """
        self.stats.lookups += 1
        self.stats.tokens += len(tokens)
        for node, depth in reversed(self._walk(tokens, scope)):
            for found in node.stored():
                assert found.state is not None
                if found.state.length - depth <= found.state.max_rewind:
                    self._by_use.move_to_end(found)
                    self.stats.hits += 1
                    self.stats.tokens_saved += depth
                    return found.state.cut(depth), depth
        return None, 0

    def insert(self, tokens: Sequence[int], state: RowState, scope: Hashable = None) -> bool:
        """Keep a row.

        Args:
            tokens: all tokens that the row holds.
            state: the row; not to be changed afterwards.
            scope: see the module.

        Returns:
            Whether the store has it now, or a row that can serve all that it can.
        """
        assert len(tokens) == state.length, f"{len(tokens)} tokens came with a row of {state.length}"
        path = self._walk(tokens, scope)
        if path and path[-1][1] == len(tokens):
            for found in path[-1][0].stored():
                if _covers(found.state, state):
                    self._by_use.move_to_end(found)
                    return True
        if state.nbytes > self.max_bytes or not tokens:
            return False
        for node, depth in path:
            if node.state is not None and node.state.length == depth and _covers(state, node.state):
                self._drop(node)
        while self.nbytes + state.nbytes > self.max_bytes:
            self._drop(next(iter(self._by_use)))
            self.stats.evicted += 1
        node = self._roots.setdefault(scope, _Node()).at(tuple(tokens))
        assert node.state is None
        node.state = self._by_use[node] = state
        self.nbytes += state.nbytes
        return True

    def report(self) -> str:
        """One line for people."""
        stats = self.stats
        return (
            f"prefix store: {len(self)} rows, {self.nbytes / 2**20:.1f} of {self.max_bytes / 2**20:.1f} MiB; "
            f"{stats.hits} hits in {stats.lookups} prompts, "
            f"{stats.tokens_saved} of {stats.tokens} tokens saved, {stats.evicted} rows evicted"
        )

    def _walk(self, tokens: Sequence[int], scope: Hashable) -> list[tuple[_Node, int]]:
        """The nodes on the way of `tokens`, each with how many tokens agree; the last edge perhaps in part only."""
        path: list[tuple[_Node, int]] = []
        node, depth = self._roots.get(scope), 0
        while node is not None and depth < len(tokens) and (child := node.children.get(tokens[depth])) is not None:
            n = _common(child.edge, tokens, depth)
            depth += n
            path.append((child, depth))
            node = child if n == len(child.edge) else None
        return path

    def _drop(self, node: _Node) -> None:
        state = self._by_use.pop(node)
        self.nbytes -= state.nbytes
        node.state = None
        while node.parent is not None and node.state is None and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent


class _Node:
    """A place in the trie: the tokens since its parent, and the row that ends here."""

    def __init__(self, edge: tuple[int, ...] = (), parent: _Node | None = None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.state: RowState | None = None

    def stored(self) -> Iterator[_Node]:
        """The nodes with rows from here on, this one first."""
        todo = [self]
        while todo:
            node = todo.pop()
            if node.state is not None:
                yield node
            todo.extend(node.children.values())

    def at(self, tokens: tuple[int, ...]) -> _Node:
        """The node that lies `tokens` further on, made if need be."""
        node = self
        while tokens:
            child = node.children.get(tokens[0])
            if child is None:
                child = node.children[tokens[0]] = _Node(tokens, node)
            n = _common(child.edge, tokens, 0)
            if n < len(child.edge):
                child = child.split(n)
            node, tokens = child, tokens[n:]
        return node

    def split(self, n: int) -> _Node:
        """A new node after the first `n` tokens of the edge."""
        assert self.parent is not None
        middle = self.parent.children[self.edge[0]] = _Node(self.edge[:n], self.parent)
        self.edge, self.parent = self.edge[n:], middle
        middle.children[self.edge[0]] = self
        return middle


def _common(edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """How many tokens of an edge agree with `tokens` from `start` on."""
    n = min(len(edge), len(tokens) - start)
    return next((i for i in range(n) if edge[i] != tokens[start + i]), n)


def _covers(row: RowState | None, beginning: RowState) -> bool:
    """Whether a row that starts with all tokens of another serves every length that the other does."""
    return row is not None and row.max_rewind - (row.length - beginning.length) >= beginning.max_rewind
