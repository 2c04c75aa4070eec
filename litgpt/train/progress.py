# Licensed under the Apache License 2.0, see the LICENSE file.

"""Showing how training goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)


class Progress:
    """A progress bar with loss, learning rate and tokens per second; off a terminal, one line for each report.

    Args:
        total: steps of the whole training, None when it is not known.
        done: steps of an earlier part of it.
        enabled: False for all devices but the first.
    """

    def __init__(self, total: int | None, done: int = 0, enabled: bool = True) -> None:
        self.total, self.enabled = total, enabled
        on_terminal = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not on_terminal, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.close()

    def advance(self) -> None:
        """One step is done."""
        self._bar.update()

    def report(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        rate = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, lr {metrics['learning_rate']:.2e}, {rate}")
        elif self.enabled:
            of = "" if self.total is None else f"/{self.total}"
            logger.info(
                "epoch %d, step %d%s: loss %.4f, lr %.2e, %s",
                metrics["epoch"] + 1,
                metrics["step"],
                of,
                metrics["loss"],
                metrics["learning_rate"],
                rate,
            )

    def say(self, message: str, *values: object) -> None:
        """Show a line without tearing the bar apart."""
        if self.enabled:
            self._bar.clear()
            logger.info(message, *values)
            self._bar.refresh()
