# Licensed under the Apache License 2.0, see the LICENSE file.

"""Which samples a step has, and in which micro-batches: a function of the seed and the number of the step.

The steps of an epoch cut a random order of the samples into groups of the global batch size; the last group is what is
left over. How a group is cut into micro-batches and dealt to devices changes speed and memory, never the group, so
every division gives the same gradient, and the number of the step is all that it takes to go on after an interruption.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from litgpt.errors import UserError
from litgpt.train.loss import IGNORE_INDEX as IGNORE
from litgpt.train.packing import pack, plan_packs, waste

Packing = Literal["auto", "none", "bucket", "pack"]
AUTO_WASTE = 0.02  # share of padding from which on joining is faster: extensions/benchmark/packing.py, on a CPU
AUTO_STEPS = 20  # steps that are looked at for it


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits for one use, unrelated to the seeds of other uses."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


@dataclass
class Batch:
    """Some samples: one a row, padded on the right, or joined in one row.

    Attributes:
        input_ids: `(B, T)` token ids.
        labels: `(B, T)` the same ids where they are learnt, -100 elsewhere; not shifted.
        lengths: tokens of each sample.
        packed: whether they are joined in one row.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    lengths: tuple[int, ...]
    packed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @property
    def supervised(self) -> int:
        """Tokens that are predicted: the first of a row has nothing before it."""
        return int((self.labels[:, 1:] != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return replace(self, input_ids=self.input_ids.to(device), labels=self.labels.to(device))

    @classmethod
    def empty(cls) -> Batch:
        """A batch that teaches nothing, for a device that has fewer micro-batches in a step than the others."""
        return cls(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2), IGNORE), ())


def collate(samples: Sequence[dict[str, Any]], ignore_index: int = IGNORE, packed: bool = False) -> Batch:
    """Put samples into one batch.

    Args:
        samples: `{"input_ids": (n,), "labels": (n,)}`.
        ignore_index: how they mark what is not learnt.
        packed: join them in one row instead of padding them.
    """
    ids = [torch.as_tensor(sample["input_ids"], dtype=torch.long) for sample in samples]
    labels = [torch.as_tensor(sample["labels"], dtype=torch.long) for sample in samples]
    labels = [row.masked_fill(row == ignore_index, IGNORE) for row in labels]
    if packed:
        row = pack(ids, labels)
        return Batch(row.input_ids, row.labels, row.lengths, packed=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(pad(ids, True, 0), pad(labels, True, IGNORE), tuple(map(len, ids)))


def collate_for(dataset: Any, packed: bool = False) -> Callable[[Sequence[dict[str, Any]]], Batch]:
    """`collate` for the samples of a dataset."""
    return partial(collate, ignore_index=getattr(dataset, "ignore_index", IGNORE), packed=packed)


def dataset_of(make_loader: Callable[[], Any]) -> tuple[Any, int]:
    """The dataset of the loader that a data module makes, and its number of worker processes.

    Args:
        make_loader: the module's `train_dataloader` or `val_dataloader`.

    Returns:
        An empty dataset when there is no loader.
    """
    with warnings.catch_warnings():  # the loader is not used, so the number of its workers does no harm
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = make_loader()
    return ([], 0) if loader is None else (loader.dataset, loader.num_workers)


def lengths_of(dataset: Any) -> list[int]:
    """Tokens of every sample; datasets that do not know are read once."""
    known = getattr(dataset, "lengths", None)
    return list(known) if known is not None else [len(dataset[i]["input_ids"]) for i in range(len(dataset))]


def packing_under_cache(packing: Packing) -> Packing:
    """How samples share a pass through a KV cache, whose rows hold one sample each.

    Raises:
        UserError: they are to be joined.
    """
    if packing == "pack":
        raise UserError("a KV cache cannot hold joined samples", "use --train.packing bucket, or leave out --kv_cache")
    return "bucket" if packing == "auto" else packing


@dataclass(frozen=True, eq=False)
class Plan:
    """The micro-batches of every step for one device.

    Args:
        lengths: tokens of each sample.
        seed: decides the order, together with the epoch.
        global_batch_size: samples of a step over all devices.
        micro_batch_size: samples of a micro-batch.
        rank: which device this is.
        world_size: how many there are.
        packing: how samples share a forward pass, see `litgpt.args.TrainArgs`.
    """

    lengths: Sequence[int]
    seed: int
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    packing: Packing = "bucket"

    def __post_init__(self) -> None:
        if not self.lengths:
            raise UserError("there is nothing to train on: the training data is empty", "check the --data options")
        if self.packing == "auto":
            # Joined samples have no padding, but are attended to one by one
            padded = [self._cut(self.group(step), "bucket") for step in range(min(self.steps_per_epoch, AUTO_STEPS))]
            lost = waste([batch for step in padded for batch in step], self.lengths, packed=False)
            joined = self.micro_batch_size == 1 or lost > AUTO_WASTE
            object.__setattr__(self, "packing", "pack" if joined else "bucket")

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample was seen once; the last may have fewer samples."""
        return math.ceil(len(self.lengths) / self.global_batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def group(self, step: int) -> list[int]:
        """The samples of a step, over all devices."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(len(self.lengths), self.seed, epoch)
        return order[place * self.global_batch_size : (place + 1) * self.global_batch_size]

    def micro_batches(self, step: int) -> list[list[int]]:
        """The micro-batches of this device in a step; all devices have the same number, the last may be empty."""
        every = self._cut(self.group(step), self.packing)
        mine = every[self.rank :: self.world_size]
        return mine + [[]] * (math.ceil(len(every) / self.world_size) - len(mine))

    def _cut(self, group: Sequence[int], packing: Packing) -> list[list[int]]:
        """The micro-batches of all devices: the longest samples first, so that running out of memory shows at once."""
        if packing == "pack":
            packs = plan_packs([self.lengths[i] for i in group], self.micro_batch_size * max(self.lengths))
            return [[group[i] for i in indices] for indices in packs]
        if packing == "bucket":
            group = sorted(group, key=lambda i: -self.lengths[i])
        return _split(group, self.micro_batch_size)

    def longest(self) -> list[int]:
        """The micro-batch that needs the most memory."""
        return sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])[: self.micro_batch_size]


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(n, generator=generator).tolist()


def _split(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


class _Indices:
    """What the loader asks for: the micro-batches that are not empty, step by step."""

    def __init__(self, plan: Plan, first: int) -> None:
        self.plan, self.first = plan, first

    def __iter__(self) -> Iterator[list[int]]:
        for step in count(self.first):
            yield from filter(None, self.plan.micro_batches(step))


def train_steps(dataset: Any, plan: Plan, first: int, num_workers: int = 0) -> Iterator[list[Batch]]:
    """The micro-batches of each step, from step `first` on, without end.

    Args:
        dataset: map-style, see `collate` for its samples.
        plan: which samples come when.
        first: the step to begin with.
        num_workers: processes that read samples ahead.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=_Indices(plan, first),
        num_workers=min(num_workers, os.cpu_count() or 1),
        collate_fn=collate_for(dataset, packed=plan.packing == "pack"),
    )
    batches = iter(loader)
    for step in count(first):
        yield [next(batches) if indices else Batch.empty() for indices in plan.micro_batches(step)]


def eval_batches(dataset: Any, batch_size: int, max_batches: int | None, rank: int, world_size: int) -> Iterator[Batch]:
    """The first samples in their order, dealt to the devices, each of which gets the same number of batches."""
    every = _split(range(len(dataset)), batch_size)[:max_batches]
    together = collate_for(dataset)
    for i in range(rank, math.ceil(len(every) / world_size) * world_size, world_size):
        yield together([dataset[j] for j in every[i]]) if i < len(every) else Batch.empty()
