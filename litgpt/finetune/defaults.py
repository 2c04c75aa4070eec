# Licensed under the Apache License 2.0, see the LICENSE file.

"""Types and defaults that the finetuning commands share."""

from __future__ import annotations

from typing import Literal

from litgpt.args import CHUNK_SIZE, EvalArgs, LogArgs, TrainArgs
from litgpt.quantize import TrainingQuantization as Quantize

__all__ = ["CHUNK_SIZE", "EVAL", "EVAL_FULL", "LOG", "TRAIN", "LoggerChoice", "Quantize", "Strategy"]

LoggerChoice = Literal["csv", "tensorboard", "wandb", "mlflow", "litlogger"]
Strategy = Literal["auto", "ddp", "fsdp"]

TRAIN = TrainArgs(global_batch_size=16, micro_batch_size=1, epochs=5)
EVAL = EvalArgs(interval=100, max_new_tokens=100)
EVAL_FULL = EvalArgs(interval=600, max_new_tokens=100)
LOG = LogArgs()
