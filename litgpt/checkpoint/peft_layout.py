# Licensed under the Apache License 2.0, see the LICENSE file.

"""Low-rank updates in our layout <-> in the layout of a family's Hugging Face model.

A family's table says which rows of their linear maps are which rows of ours. The columns of LoRA's B, and DoRA's
magnitudes, have one entry a row of the weight, so they move by the same table; A belongs to the input and stays.

Where we have one map for queries, keys and values, each of the three has its own A and B. A map of theirs that fuses
what has several As here gets them stacked, with B in blocks: rank 3r, and exactly the same function. A map of theirs
that has one A for what is several parts here gives that A to each of them, which is exact too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from litgpt.checkpoint.tables import Link, Table, by_row
from litgpt.config import Config

Place = tuple[str, str]
"""A linear map of ours and its part: "q", "k" or "v" of a fused one, else ""."""
Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each of our weights, `(out, in)`, by the name of its linear map."""


class Update(NamedTuple):
    """What is added to a weight W: `scale * b @ a`. With DoRA, the rows of the sum then get a given length."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scale: float
    magnitude: Tensor | None = None  # (out,)

    @property
    def rank(self) -> int:
        """The number of rows of `a`."""
        return self.a.shape[0]


def part_rows(module: str, n_rows: int, config: Config) -> dict[str, slice]:
    """The rows of each part of one of our linear maps."""
    if not module.endswith(".attn.qkv"):
        return {"": slice(0, n_rows)}
    assert config.head_size is not None
    assert config.n_query_groups is not None
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    return {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}


def to_theirs(parts: Mapping[Place, Update], table: Table, config: Config, shapes: Shapes) -> dict[str, Update]:
    """Carry our updates to the linear maps of the family's model.

    Args:
        parts: the update of every part that has one; `b` and `magnitude` have the rows of the part.
        table: the family's names and layouts.
        config: the model's sizes.
        shapes: of our weights.

    Returns:
        One update for each of their maps that is touched, by its name; its rank is 0 if all of its parts have that.
        With DoRA, a part without an update of a map that they fuse must be among `parts` with rank 0 and the lengths
        of its rows.
    """
    found: dict[str, list[Update]] = {}
    for (module, part), update in parts.items():
        n_rows = shapes[module][0]
        rows = part_rows(module, n_rows, config)[part]
        inside = torch.zeros(n_rows, 1, dtype=torch.bool)
        inside[rows] = True
        pieces: dict[str, Update] = {}
        for link in by_row(table.export_links(f"{module}.weight", config)):
            if not link.our_view(inside).any():
                continue
            name, shape = _module(link.theirs), link.their_shape(tuple(link.our_view(inside).shape))
            into = pieces.setdefault(name, _empty(update, shape[0]))
            for target, source in _pairs(into, _spread(update, rows, n_rows)):
                link.their_view(target).copy_(link.our_view(source))
        for name, piece in pieces.items():
            found.setdefault(name, []).append(piece)
    return {name: join(pieces) for name, pieces in found.items()}


def to_ours(theirs: Mapping[str, Update], table: Table, config: Config, shapes: Shapes) -> dict[Place, Update]:
    """Carry updates of the family's model to the parts of our linear maps; the reverse of `to_theirs`.

    Columns of a B that is in blocks go only to the part that they belong to, and a part for which none are left has no
    update.
    """
    found: dict[Place, list[Update]] = {}
    for name, update in theirs.items():
        for module, link_of in _by_module(by_row(table.import_links(table.canonical(f"{name}.weight"), config))):
            n_rows = shapes[module][0]
            into, touched = _empty(update, n_rows), torch.zeros(n_rows, 1, dtype=torch.bool)
            for link in link_of:
                link.our_view(touched).fill_(True)
                for target, source in _pairs(into, update):
                    link.our_view(target).copy_(link.their_view(source))
            for part, rows in part_rows(module, n_rows, config).items():
                if not touched[rows].any():
                    continue
                piece = _without_others(_cut(into, rows), update.b)
                if piece.rank or piece.magnitude is not None:
                    found.setdefault((module, part), []).append(piece)
    return {place: join(pieces) for place, pieces in found.items()}


def join(updates: list[Update]) -> Update:
    """The sum of updates of one weight as one update, with A given once where all have the same.

    The magnitudes are of disjoint rows and zero elsewhere.
    """
    first = max(updates, key=lambda update: update.rank)
    with_rank = [update for update in updates if update.rank] or [first]
    scaled = [update.b * (update.scale / first.scale) for update in with_rank]
    magnitudes = [update.magnitude for update in updates if update.magnitude is not None]
    magnitude = torch.stack(magnitudes).sum(0) if magnitudes else None
    if all(update.rank == first.rank and torch.equal(update.a, first.a) for update in with_rank):
        return Update(first.a, torch.stack(scaled).sum(0), first.scale, magnitude)
    return Update(torch.cat([update.a for update in with_rank]), torch.cat(scaled, dim=1), first.scale, magnitude)


def with_rank(update: Update, rank: int, scale: float) -> Update:
    """The same update with another scale and a rank that is not lower: the further columns of B are zero."""
    more = rank - update.rank
    a = torch.cat((update.a, update.a.new_zeros(more, update.a.shape[1])))
    b = torch.cat((update.b * (update.scale / scale), update.b.new_zeros(update.b.shape[0], more)), dim=1)
    return Update(a, b, scale, update.magnitude)


def _module(tensor_name: str) -> str:
    return tensor_name.removesuffix(".weight")


def _by_module(links: list[Link]) -> Iterator[tuple[str, list[Link]]]:
    modules = dict.fromkeys(_module(link.ours) for link in links)
    return ((module, [link for link in links if _module(link.ours) == module]) for module in modules)


def _empty(update: Update, n_rows: int) -> Update:
    """An update of the same kind for a map with so many rows, zero everywhere."""
    magnitude = None if update.magnitude is None else update.magnitude.new_zeros(n_rows)
    return Update(update.a, update.b.new_zeros(n_rows, update.rank), update.scale, magnitude)


def _spread(update: Update, rows: slice, n_rows: int) -> Update:
    """The update of some rows as one of the whole map."""
    whole = _empty(update, n_rows)
    for target, source in _pairs(whole, update):
        target[rows] = source
    return whole


def _cut(update: Update, rows: slice) -> Update:
    magnitude = None if update.magnitude is None else update.magnitude[rows]
    return update._replace(b=update.b[rows], magnitude=magnitude)


def _pairs(a: Update, b: Update) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors with an entry a row, pairwise, as matrices."""
    yield a.b, b.b
    if a.magnitude is not None and b.magnitude is not None:
        yield a.magnitude[:, None], b.magnitude[:, None]


def _without_others(update: Update, whole: Tensor) -> Update:
    """Without the columns of B that are zero here and belong to the rows of other parts of the map."""
    keep = update.b.any(0) | ~whole.any(0)
    return update._replace(a=update.a[keep], b=update.b[:, keep])
