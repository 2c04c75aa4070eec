# Licensed under the Apache License 2.0, see the LICENSE file.

"""Selection after the prompt."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from litgpt.attention import Step
from litgpt.kvcache.policies.base import EvictingCache

OBSERVED = 32  # last queries of the prompt that vote, as in the paper
POOL = 7  # neighbours that share a vote, so that what is kept stays readable
GENERATED = 1e6  # above every score of a prompt token


class Snap(EvictingCache):
    """Keeps the prompt tokens that the end of the prompt attends to, https://arxiv.org/abs/2404.14469 section 4.

    Generated tokens are kept before prompt tokens, the newest first, so the cache stays within its budget.
    """

    observe_last = OBSERVED

    def rescore(self, score: torch.Tensor, sums: torch.Tensor, pos: torch.Tensor, step: Step) -> torch.Tensor:
        """Votes of the last queries of a chunk, pooled over neighbouring positions; single tokens do not vote."""
        is_newest = (pos == step.pos.amax(dim=1)[:, None, None]) & (pos >= 0)
        with_generated = torch.where(is_newest, GENERATED + pos, score)
        if step.size == 1:
            return with_generated
        order = pos.argsort(dim=-1, stable=True)  # neighbours in the text, not in the slots
        votes = sums.masked_fill(pos < 0, 0).gather(-1, order)
        pooled = F.max_pool1d(votes, POOL, stride=1, padding=POOL // 2)
        pooled = torch.zeros_like(votes).scatter_(-1, order, pooled)
        # the voters themselves are needed to go on
        voters = pos >= step.end[:, None, None] - OBSERVED
        is_chunk = (step.pos >= 0).sum(dim=1)[:, None, None] > 1  # others of the batch may have one token, or none
        return torch.where(is_chunk, torch.where(voters, GENERATED - 1, pooled), with_generated)
