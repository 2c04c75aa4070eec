# Licensed under the Apache License 2.0, see the LICENSE file.

"""Where metrics go: always a CSV file, and a logger of experiments if one is chosen."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt.args import LogArgs
from litgpt.constants import require
from litgpt.errors import UserError

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger

COLUMNS = (
    "step",
    "iter",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "total_tokens",
    "iter_time",
    "tokens_per_second",
    "val_loss",
    "val_ppl",
)
TIMES = ("iter_time", "tokens_per_second")  # the columns that differ between two runs of the same training


class MetricsFile:
    """`metrics.csv`, one row an entry, written through at once.

    Lightning's own logger rewrites its file and starts it anew on resuming; this one only appends, and can be cut back
    to an earlier end, so that a resumed run has the rows of a straight one.

    Args:
        path: the file.
        position: bytes to keep of an existing file.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not position:
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8", newline="\n")
        elif path.stat().st_size > position:
            os.truncate(path, position)

    @property
    def position(self) -> int:
        """Where the file ends now."""
        return self.path.stat().st_size

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append a row; columns without a value stay empty."""
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(metrics)


def next_version(folder: Path) -> Path:
    """The first folder `version_N` that does not exist yet."""
    used = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdigit()]
    return folder / f"version_{max(used, default=-1) + 1}"


def make_logger(choice: str, out_dir: Path, name: str, log: LogArgs, resuming: bool) -> Logger | None:
    """The chosen logger of experiments, None for csv, which is written in any case.

    Args:
        choice: csv, tensorboard, wandb, mlflow or litlogger.
        out_dir: local files go to `logs/` in it.
        name: what the run is about.
        log: names for the run.
        resuming: go on in the run of before, where the logger can.

    Raises:
        UserError: its package is missing.
    """
    folder = out_dir / "logs"
    if choice == "csv":
        return None
    require(choice, f"--logger_name {choice}")
    if choice == "tensorboard":
        from lightning.fabric.loggers import TensorBoardLogger

        return TensorBoardLogger(root_dir=folder, name="tensorboard")
    if choice == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        folder.mkdir(parents=True, exist_ok=True)
        more: dict[str, Any] = {"group": log.group, "config": log.metadata, "resume": "allow" if resuming else None}
        return WandbLogger(project=log.project or name, name=log.run, save_dir=folder, **more)
    if choice == "mlflow":
        from lightning.pytorch.loggers import MLFlowLogger

        return MLFlowLogger(
            experiment_name=log.project or name, run_name=log.run, save_dir=str(folder / "mlflow"), tags=log.metadata
        )
    return _litlogger(folder, name, log)


def _litlogger(folder: Path, name: str, log: LogArgs) -> Any:
    try:
        from lightning.pytorch.loggers import LitLogger
    except ImportError:
        raise UserError("--logger_name litlogger needs a newer Lightning", "pip install -U lightning") from None
    return LitLogger(
        root_dir=str(folder / "litlogger"),
        name=log.run or name,
        teamspace=log.teamspace,
        metadata=log.metadata,
        log_model=log.log_model,
        save_logs=log.save_logs,
        checkpoint_name=log.checkpoint_name,
    )
