# Licensed under the Apache License 2.0, see the LICENSE file.

"""Token omission via attention."""

from __future__ import annotations

import torch

from litgpt.attention import Step
from litgpt.kvcache.policies.base import EvictingCache


class TOVA(EvictingCache):
    """Evicts what the newest token attends to least, https://arxiv.org/abs/2401.06104."""

    observe_last = 1

    def rescore(self, score: torch.Tensor, sums: torch.Tensor, pos: torch.Tensor, step: Step) -> torch.Tensor:
        """The attention of the row's newest query, whatever came before; rows that are idle keep their scores."""
        is_active = (step.pos >= 0).any(dim=1)[:, None, None]
        return torch.where(is_active, sums, score)
