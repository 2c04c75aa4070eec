# Licensed under the Apache License 2.0, see the LICENSE file.

"""Heavy hitters."""

from __future__ import annotations

import torch

from litgpt.attention import Step
from litgpt.kvcache.policies.base import EvictingCache


class H2O(EvictingCache):
    """Keeps the tokens that have received the most attention so far, and the most recent ones.

    Half of the budget each, https://arxiv.org/abs/2306.14048 section 4.
    """

    def rescore(self, score: torch.Tensor, sums: torch.Tensor, pos: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention mass accumulated over all queries."""
        return score + sums

    def _best(self, score: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        newest = pos.amax(dim=-1, keepdim=True)
        is_recent = pos > newest - self.budget // 2
        return super()._best(score.masked_fill(is_recent, torch.inf), pos)
