# Licensed under the Apache License 2.0, see the LICENSE file.

"""`litgpt finetune_adapter`: train a prompt in each of the upper layers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.finetune.defaults import CHUNK_SIZE, EVAL, LOG, TRAIN, LoggerChoice, Quantize, Strategy


def setup(
    checkpoint_dir: Path,
    out_dir: Path = Path("out/finetune/adapter"),
    precision: str | None = None,
    quantize: Quantize | None = None,
    devices: int | str = 1,
    num_nodes: int = 1,
    data: DataModule | None = None,
    train: TrainArgs = TRAIN,
    eval: EvalArgs = EVAL,
    log: LogArgs = LOG,
    optimizer: str | dict = "AdamW",
    logger_name: LoggerChoice = "csv",
    seed: int = 1337,
    access_token: str | None = None,
    resume: bool | Literal["auto"] | Path = False,
    overwrite: bool = False,
    strategy: Strategy = "auto",
    kv_cache: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    adapter_prompt_length: int = 10,
    adapter_start_layer: int = 2,
) -> None:
    """Finetune a model with LLaMA-Adapter: prompts in its upper layers learn, its weights stay as they are.

    Args:
        checkpoint_dir: A checkpoint folder (Hugging Face or LitGPT), a .gguf file, or the id of a repository.
        out_dir: Where checkpoints and logs go.
        precision: bf16-true or bf16-mixed compute in 16 bits, 32-true in 32; what learns is held in 32 bits. Default:
            16 bits where the hardware computes in bf16.
        quantize: Hold the frozen weights in 4 or 8 bits.
        devices: How many devices to train on, or auto for all.
        num_nodes: How many machines to train on.
        data: The data; default Alpaca.
        train: How to train.
        eval: How to evaluate.
        log: What loggers of experiments are told.
        optimizer: The optimizer's name, or its class_path and init_args.
        logger_name: Where metrics go beside the CSV file.
        seed: Decides the order of the data and all random numbers.
        access_token: For a repository that is not public; default $HF_TOKEN.
        resume: Go on from a step folder: its path; true for the latest in out_dir; auto for the same if there is one.
        overwrite: Replace the checkpoints of an earlier run in out_dir.
        strategy: How several devices share the work: ddp, each with a copy of the model, or fsdp, which divides it.
        kv_cache: Train on long samples under a KV cache of this kind, as generate takes it, a chunk at a time: dense
            changes nothing but memory and time; window:1024, h2o:1024 and others learn to do with what they keep.
        chunk_size: Tokens that go through that KV cache at once.
        adapter_prompt_length: Tokens of the prompt of a layer.
        adapter_start_layer: The first layer with a prompt.
    """
    arguments = dict(locals())
    from litgpt.adapter import GPT, mark_only_adapter_as_trainable
    from litgpt.peft import load_variant, variant_state_dict
    from litgpt.train.command import finetune
    from litgpt.train.method import Method

    finetune(
        Method(
            "adapter", GPT, "lit_model.pth.adapter", mark_only_adapter_as_trainable, variant_state_dict, load_variant
        ),
        arguments,
    )
