# Licensed under the Apache License 2.0, see the LICENSE file.

"""Samples that share a row: which ones go together, and how much is computed for nothing.

Joining samples changes memory and speed, never the result: `Step.packed` keeps them from seeing each other, and the
positions of each start at 0.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import torch

from litgpt.attention import Step
from litgpt.train.loss import IGNORE_INDEX


class PackedRow(NamedTuple):
    """Samples one after the other.

    Attributes:
        input_ids: `(1, T)` token ids.
        labels: `(1, T)` the ids that are learnt, -100 elsewhere, not shifted. The first of each sample is -100 too, so
            that the last token of a sample is not asked for the first one of the next.
        lengths: tokens of each sample.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    lengths: tuple[int, ...]

    def step(self, reach: int = 0) -> Step:
        """What the model has to know; `reach` as in `Step.packed`."""
        return Step.packed([self.lengths], self.input_ids.device, reach)


def pack(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> PackedRow:
    """Join samples to one row.

    Args:
        ids: `(n,)` token ids of each sample.
        labels: `(n,)` the same where they are learnt, -100 elsewhere; not shifted.
    """
    joined = torch.cat(list(labels)).clone()
    lengths = tuple(map(len, ids))
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    joined[starts.to(joined.device)] = IGNORE_INDEX
    return PackedRow(torch.cat(list(ids)).unsqueeze(0), joined.unsqueeze(0), lengths)


def plan_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide samples over as few packs as a quick rule finds.

    Best-fit decreasing: the longest first, each into the fullest pack that has room. Any two packs hold more than
    `capacity` together, so all but one are more than half full; in the limit there are at most 11/9 of the fewest
    possible (https://doi.org/10.1137/0203025). The same lengths always give the same packs.

    Args:
        lengths: tokens of each sample.
        capacity: tokens a pack can hold.

    Returns:
        Indices into `lengths`, by pack.

    Raises:
        ValueError: a sample without tokens, or with more than a pack can hold.
    """
    if lengths and not 0 < min(lengths) <= max(lengths) <= capacity:
        raise ValueError(f"samples must have 1 to {capacity} tokens to be packed, got {min(lengths)} to {max(lengths)}")
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[i], 0))
        if place < len(room):
            left, pack_index = room.pop(place)
        else:
            left, pack_index = capacity, len(packs)
            packs.append([])
        packs[pack_index].append(i)
        insort(room, (left - lengths[i], pack_index))
    return packs


def waste(groups: Sequence[Sequence[int]], lengths: Sequence[int], packed: bool) -> float:
    """The share of the computed tokens that are padding.

    Args:
        groups: the samples of each micro-batch.
        lengths: tokens of each sample.
        packed: whether the samples of a micro-batch stand in one row, else one a row, padded to the longest.
    """
    used = sum(lengths[i] for group in groups for i in group)
    if packed:
        computed = used
    else:
        computed = sum(len(group) * max(lengths[i] for i in group) for group in groups if group)
    return 1 - used / computed if computed else 0.0
