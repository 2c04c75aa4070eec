# Licensed under the Apache License 2.0, see the LICENSE file.

"""What training makes small: the summed loss of a micro-batch, as one module that can be wrapped for many devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from litgpt.train.batches import IGNORE, Batch

if TYPE_CHECKING:
    from litgpt.model import GPT


class Objective(nn.Module):
    """The loss of a model on a batch, summed over the tokens that are learnt.

    A sum, not a mean: only the whole step knows how many tokens it has.

    Args:
        gpt: the model.
    """

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, batch: Batch) -> torch.Tensor:
        """A float32 scalar; 0 for a batch without labels."""
        logits = cast(torch.Tensor, self.gpt(batch.input_ids))
        targets = batch.labels[:, 1:].flatten()
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE, reduction="sum")


@contextlib.contextmanager
def noisy_embeddings(embedding: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add uniform noise of the size `alpha / sqrt(T * C)` to what the embedding gives while it trains.

    NEFTune, https://arxiv.org/abs/2310.05914. None adds nothing.
    """
    if alpha is None:
        yield
        return

    def add_noise(module: nn.Module, _: object, x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return x
        size = alpha / (x.size(1) * x.size(2)) ** 0.5
        return x + torch.empty_like(x).uniform_(-size, size)

    handle = embedding.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
