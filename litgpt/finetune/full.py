# Licensed under the Apache License 2.0, see the LICENSE file.

"""`litgpt finetune_full`: train all weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.finetune.defaults import CHUNK_SIZE, EVAL_FULL, LOG, TRAIN, LoggerChoice, Strategy

if TYPE_CHECKING:
    from torch import nn


def setup(
    checkpoint_dir: Path,
    out_dir: Path = Path("out/finetune/full"),
    precision: str | None = None,
    devices: int | str = 1,
    num_nodes: int = 1,
    resume: bool | Literal["auto"] | Path = False,
    data: DataModule | None = None,
    train: TrainArgs = TRAIN,
    eval: EvalArgs = EVAL_FULL,
    log: LogArgs = LOG,
    optimizer: str | dict = "AdamW",
    logger_name: LoggerChoice = "csv",
    seed: int = 1337,
    access_token: str | None = None,
    overwrite: bool = False,
    strategy: Strategy = "auto",
    kv_cache: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> None:
    """Finetune all weights of a model.

    Args:
        checkpoint_dir: A checkpoint folder (Hugging Face or LitGPT), a .gguf file, or the id of a repository.
        out_dir: Where checkpoints and logs go.
        precision: bf16-true holds all weights in 16 bits, bf16-mixed computes in 16 bits and updates in 32, 32-true
            does all in 32. Default: bf16-mixed where the hardware computes in it, else 32-true.
        devices: How many devices to train on, or auto for all.
        num_nodes: How many machines to train on.
        resume: Go on from a step folder: its path; true for the latest in out_dir; auto for the same if there is one.
        data: The data; default Alpaca.
        train: How to train.
        eval: How to evaluate.
        log: What loggers of experiments are told.
        optimizer: The optimizer's name, or its class_path and init_args.
        logger_name: Where metrics go beside the CSV file.
        seed: Decides the order of the data and all random numbers.
        access_token: For a repository that is not public; default $HF_TOKEN.
        overwrite: Replace the checkpoints of an earlier run in out_dir.
        strategy: How several devices share the work: ddp, each with a copy of the model, or fsdp, which divides it.
        kv_cache: Train on long samples under a KV cache of this kind, as generate takes it, a chunk at a time: dense
            changes nothing but memory and time; window:1024, h2o:1024 and others learn to do with what they keep.
        chunk_size: Tokens that go through that KV cache at once.
    """
    arguments = dict(locals())
    from litgpt.model import GPT
    from litgpt.train.command import finetune
    from litgpt.train.method import Method

    finetune(Method("full", GPT, "lit_model.pth", mark_trainable=_all), arguments)


def _all(model: nn.Module) -> None:
    model.requires_grad_(True)
