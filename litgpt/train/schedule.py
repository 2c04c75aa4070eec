# Licensed under the Apache License 2.0, see the LICENSE file.

"""The learning rate as a pure function of the step."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from litgpt.args import TrainArgs
from litgpt.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """A linear rise over `warmup` steps, then a fall from 1 to `floor` at the end of `total` steps.

    The values are factors of the peak learning rate. Step 0 is the first and has a rate above 0; the peak is reached
    at step `warmup - 1`.

    Args:
        kind: how it falls; constant does not.
        warmup: steps of the rise; one longer than the training is shortened to it, so that the peak is reached.
        total: steps of the whole training; None (endless) goes with `constant` only.
        floor: the factor that the fall ends at, between 0 and 1.
    """

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 0
    total: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        assert self.total is not None or self.kind == "constant"
        assert 0 <= self.floor <= 1
        if self.total is not None and self.warmup > self.total:
            object.__setattr__(self, "warmup", self.total)

    def __call__(self, step: int) -> float:
        """The factor at a step, counted from 0; steps past the end have the last value."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        assert self.total is not None
        falling = self.total - self.warmup
        done = min((step - self.warmup) / falling, 1.0) if falling else 1.0
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left


def make_schedule(train: TrainArgs, peak: float, steps_per_epoch: int, total: int | None) -> Schedule:
    """The schedule that the settings describe.

    Args:
        train: the settings.
        peak: the optimizer's learning rate.
        steps_per_epoch: optimizer steps of an epoch.
        total: optimizer steps of the training, None when only time limits it.

    Raises:
        UserError: a falling schedule without an end.
    """
    if total is None and train.lr_schedule != "constant":
        raise UserError(
            f"the learning rate cannot fall ({train.lr_schedule}) to an end that is not known",
            "give --train.epochs, --train.max_steps or --train.max_tokens, or --train.lr_schedule constant",
        )
    warmup = train.warmup_steps(steps_per_epoch)
    if total is not None and warmup > total:
        logger.info("the warm-up of %d steps is shortened to the %d steps of the training", warmup, total)
    floor = train.min_lr / peak if peak else 0.0
    if floor > 1 and train.lr_schedule != "constant":
        logger.warning("--train.min_lr %g is above the learning rate %g, which falls to 0 instead", train.min_lr, peak)
    return Schedule(train.lr_schedule, warmup, total, floor if floor <= 1 else 0.0)
