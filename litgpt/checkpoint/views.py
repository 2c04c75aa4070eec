# Licensed under the Apache License 2.0, see the LICENSE file.

"""Where one piece of a tensor lies inside a whole one.

A piece is always a torch *view* of the whole, so one description serves both directions: importing copies from the
view of their tensor into the view of ours, exporting copies the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from litgpt.config import Config

Shape = tuple[int, ...]


class At(NamedTuple):
    """What a view may depend on: the model's sizes, which expert of a mixture, and which head."""

    config: Config
    expert: int = 0
    head: int = 0


class View(Protocol):
    """A piece of a tensor."""

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the piece as a view of `whole`; a RuntimeError or IndexError says that the shape cannot be right."""

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape of the whole, given that of the piece."""


@dataclass(frozen=True)
class Rows:
    """The i-th of n equal parts along the first dimension."""

    index: int
    parts: int

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the part."""
        return whole.unflatten(0, (self.parts, -1))[self.index]

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape of all parts together."""
        return (self.parts * piece[0], *piece[1:])


@dataclass(frozen=True)
class EveryNth:
    """Entries i, i + n, i + 2n ... along the first dimension: two matrices whose rows alternate, for instance."""

    index: int
    parts: int

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return every n-th entry."""
        return whole.unflatten(0, (-1, self.parts))[:, self.index]

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape with all entries."""
        return (self.parts * piece[0], *piece[1:])


@dataclass(frozen=True)
class Transposed:
    """The matrix stored as (in, out) instead of (out, in)."""

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the transposed matrix; a bias stays as it is."""
        return whole.mT if whole.ndim > 1 else whole

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape before transposing."""
        return piece[:-2] + piece[-2:][::-1]


@dataclass(frozen=True)
class OfExpert:
    """One expert's entry of a tensor that stacks all experts along the first dimension."""

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the expert's entry."""
        if whole.shape[0] != at.config.n_expert:
            raise IndexError(f"{whole.shape[0]} experts instead of {at.config.n_expert}")
        return whole[at.expert]

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape of the stack."""
        return (at.config.n_expert, *piece)


@dataclass(frozen=True)
class OfHead:
    """One head's row of a tensor that has one for each head."""

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the row."""
        return whole[at.head]

    def whole(self, piece: Shape, at: At) -> Shape:
        """Never asked for: all tensors with a row a head are ours, and theirs are the rows."""
        raise AssertionError("a tensor with a row for each head is ours, not theirs")


@dataclass(frozen=True)
class QKV:
    """The `part` (q, k or v) of our fused attention weight or bias: all queries, then all keys, then all values.

    The view has the shape (groups, heads of the part in a group, head size, ...).
    """

    part: str

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the part."""
        groups, heads, size = _part_shape(self.part, at.config)
        start = {"q": 0, "k": 0, "v": groups * size}[self.part]
        start += 0 if self.part == "q" else at.config.n_head * size
        return whole.narrow(0, start, groups * heads * size).unflatten(0, (groups, heads, size))

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape of the fused tensor."""
        assert at.config.n_query_groups is not None and at.config.head_size is not None
        return ((at.config.n_head + 2 * at.config.n_query_groups) * at.config.head_size, *piece[3:])


@dataclass(frozen=True)
class Heads:
    """A q, k or v of its own, seen as (groups, heads of the part in a group, head size, ...)."""

    part: str

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the tensor with its rows split by head."""
        return whole.unflatten(0, _part_shape(self.part, at.config))

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape with the heads joined."""
        return (piece[0] * piece[1] * piece[2], *piece[3:])


@dataclass(frozen=True)
class GroupedQKV:
    """The `part` of a fused attention tensor ordered by group: a group's queries, its key, its value, the next group's.

    With one query a group this is the layout of GPT-NeoX, with one group that of Falcon 7B.
    """

    part: str

    def view(self, whole: Tensor, at: At) -> Tensor:
        """Return the part."""
        groups, heads, size = _part_shape(self.part, at.config)
        queries = at.config.n_head // groups
        start = {"q": 0, "k": queries, "v": queries + 1}[self.part]
        return whole.unflatten(0, (groups, queries + 2, size)).narrow(1, start, heads)

    def whole(self, piece: Shape, at: At) -> Shape:
        """Return the shape of the fused tensor."""
        return QKV(self.part).whole(piece, at)


def _part_shape(part: str, config: Config) -> tuple[int, int, int]:
    """Groups, heads of the part in one group, and the head size."""
    assert config.n_query_groups is not None and config.head_size is not None
    heads = config.n_head // config.n_query_groups if part == "q" else 1
    return config.n_query_groups, heads, config.head_size
