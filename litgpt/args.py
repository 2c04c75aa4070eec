# Licensed under the Apache License 2.0, see the LICENSE file.

"""The groups of settings that training commands share: `--train.*`, `--eval.*` and `--log.*`. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Literal

from litgpt.errors import UserError

CHUNK_SIZE = 1024  # tokens that go through a KV cache at once while training


@dataclass
class TrainArgs:
    """How to train.

    Args:
        save_interval: Optimizer steps between checkpoints; null: only the end is saved.
        log_interval: Optimizer steps between lines of the log.
        global_batch_size: Samples of an optimizer step, over all devices.
        micro_batch_size: Samples computed at once on a device. It changes speed and memory, not the result.
        lr_warmup_steps: Optimizer steps over which the learning rate rises to its peak.
        lr_warmup_fraction: The same as a fraction of an epoch; takes the place of lr_warmup_steps.
        epochs: How often to go through the data.
        max_tokens: Train on about this many tokens.
        max_steps: The largest number of optimizer steps.
        max_time: The largest number of seconds; those before an interruption count.
        max_seq_length: The longest sample in tokens; longer ones are cut. Default: the model's context.
        tie_embeddings: Whether embedding and head are one tensor; for pretraining.
        max_norm: Gradients with a larger norm are scaled down to it.
        min_lr: The learning rate at the end of a decaying schedule; of no effect above the peak.
        lr_schedule: How the learning rate falls after the warm-up.
        packing: How samples share a forward pass: none pads to the longest of a micro-batch, bucket puts samples of
            similar length together, pack joins samples in one row that do not see each other. All give the same
            gradients; auto is the fastest of them that is exact here.
        checkpoint_activations: What is computed again in the backward pass to save memory: none, each block as a whole
            (block), or all but the matrix products of each block (selective).
        neftune_alpha: Strength of the noise on the embeddings (NEFTune), for instance 5.
        keep_last: Keep only this many of the latest step folders; null: all.

    Raises:
        UserError: a value outside its range.
    """

    save_interval: int | None = 1000
    log_interval: int = 1
    global_batch_size: int = 64
    micro_batch_size: int = 4
    lr_warmup_steps: int | None = 100
    lr_warmup_fraction: float | None = None
    epochs: int | None = None
    max_tokens: int | None = None
    max_steps: int | None = None
    max_time: float | None = None
    max_seq_length: int | None = None
    tie_embeddings: bool | None = None
    max_norm: float | None = None
    min_lr: float = 6e-5
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    packing: Literal["auto", "none", "bucket", "pack"] = "auto"
    checkpoint_activations: Literal["none", "block", "selective"] = "none"
    neftune_alpha: float | None = None
    keep_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "log_interval"):
            _require(getattr(self, name) >= 1, f"--train.{name}", getattr(self, name), "at least 1")
        for name in ("save_interval", "keep_last", "max_tokens", "max_seq_length"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"--train.{name}", value, "at least 1, or null")
        for name in ("epochs", "max_steps", "lr_warmup_steps", "max_time"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"--train.{name}", value, "at least 0, or null")
        for name in ("max_norm", "neftune_alpha"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"--train.{name}", value, "above 0, or null")
        _require(self.min_lr >= 0, "--train.min_lr", self.min_lr, "at least 0")
        fraction = self.lr_warmup_fraction
        _require(fraction is None or 0 <= fraction <= 1, "--train.lr_warmup_fraction", fraction, "between 0 and 1")

    def gradient_accumulation_iters(self, devices: int, num_nodes: int = 1) -> int:
        """Micro-batches of a full optimizer step on one device."""
        return math.ceil(self.batch_size(devices, num_nodes) / self.micro_batch_size)

    def batch_size(self, devices: int, num_nodes: int = 1) -> int:
        """Samples of a full optimizer step on one device (the first: it has the most)."""
        return math.ceil(self.global_batch_size / (devices * num_nodes))

    def warmup_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the warm-up."""
        if self.lr_warmup_fraction is not None:
            return math.ceil(self.lr_warmup_fraction * steps_per_epoch)
        return self.lr_warmup_steps or 0

    def warmup_iters(self, devices: int, num_nodes: int, max_iters: int, train_dataloader: Sized) -> int:
        """The warm-up in micro-batches of one device, at most `max_iters`; for scripts with a loop of their own."""
        if self.lr_warmup_fraction is not None:
            return min(max_iters, math.ceil(self.lr_warmup_fraction * len(train_dataloader)))
        return min(max_iters, (self.lr_warmup_steps or 0) * self.gradient_accumulation_iters(devices, num_nodes))


@dataclass
class EvalArgs:
    """How to evaluate while training. Evaluation never changes what is learnt.

    Args:
        interval: Optimizer steps between evaluations.
        max_new_tokens: Length of the answer to the example; null or 0: no example.
        max_iters: The largest number of micro-batches of an evaluation during training; the last one takes all.
        initial_validation: Evaluate before the first step.
        final_validation: Evaluate on everything after the last step.
        evaluate_example: Which validation sample to answer at each evaluation: first, random or its number.
        patience: Stop after this many evaluations in a row without a lower validation loss; null: never.
        save_best: Keep the weights with the lowest validation loss in the folder `best`.
    """

    interval: int = 600
    max_new_tokens: int | None = None
    max_iters: int = 100
    initial_validation: bool = False
    final_validation: bool = True
    evaluate_example: str | int = "first"
    patience: int | None = None
    save_best: bool = False

    def __post_init__(self) -> None:
        _require(self.interval >= 1, "--eval.interval", self.interval, "at least 1")
        _require(self.max_iters >= 0, "--eval.max_iters", self.max_iters, "at least 0")
        tokens = self.max_new_tokens
        _require(tokens is None or tokens >= 0, "--eval.max_new_tokens", tokens, "at least 0, or null")
        _require(self.patience is None or self.patience >= 1, "--eval.patience", self.patience, "at least 1, or null")
        example = self.evaluate_example
        known = example in ("first", "random") if isinstance(example, str) else example >= 0
        _require(known, "--eval.evaluate_example", example, "first, random or the number of a sample")


@dataclass
class LogArgs:
    """What loggers of experiments are told.

    Args:
        project: Project, for wandb; the experiment, for mlflow.
        run: Name of the run.
        group: Group of the run, for wandb.
        teamspace: Teamspace, for litlogger.
        metadata: Further values to note with the run.
        log_model: Upload checkpoints, for litlogger.
        save_logs: Upload what is written to the terminal, for litlogger.
        checkpoint_name: Name of uploaded checkpoints, for litlogger.
    """

    project: str | None = None
    run: str | None = None
    group: str | None = None
    teamspace: str | None = None
    metadata: dict | None = None
    log_model: bool = False
    save_logs: bool = True
    checkpoint_name: str | None = None


def _require(holds: bool, name: str, value: Any, must_be: str) -> None:
    if not holds:
        raise UserError(f"{name} must be {must_be}, got {value!r}")
