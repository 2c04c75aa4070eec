# Licensed under the Apache License 2.0, see the LICENSE file.

"""What training makes small: the summed loss of a micro-batch, as one module that can be wrapped for many devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from litgpt.attention import Step
from litgpt.train.batches import Batch
from litgpt.train.loss import linear_cross_entropy

if TYPE_CHECKING:
    from litgpt.model import GPT


class Objective(nn.Module):
    """The loss of a model on a batch, summed over the tokens that are learnt.

    A sum, not a mean: only the whole step knows how many tokens it has.

    Args:
        gpt: the model.
        reach: the longest sample of the training. Rotary tables that depend on the length go by it, so that the other
            samples of a micro-batch make no difference.
    """

    def __init__(self, gpt: GPT, reach: int = 0) -> None:
        super().__init__()
        self.gpt, self.reach = gpt, reach

    def forward(self, batch: Batch) -> torch.Tensor:
        """A scalar in float32 or more; 0 for a batch without labels."""
        gpt = self.gpt
        gpt.check_ids(batch.input_ids)
        if batch.packed is None:
            step = Step.without_cache(batch.input_ids.size(1), batch.input_ids.device, self.reach)
        else:
            step = Step.packed([batch.packed], batch.input_ids.device, self.reach)
        hidden = gpt.hidden(batch.input_ids, step)[:, :-1].flatten(0, 1)  # (B * (T - 1), C)
        return linear_cross_entropy(
            hidden,
            gpt.lm_head,
            batch.labels[:, 1:].flatten(),
            softcap=gpt.config.final_logit_softcapping,
            logit_multiplier=gpt.config.logit_multiplier,
        )


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
