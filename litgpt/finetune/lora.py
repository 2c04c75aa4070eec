# Licensed under the Apache License 2.0, see the LICENSE file.

"""`litgpt finetune_lora`: train a small update beside frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.finetune.defaults import CHUNK_SIZE, EVAL, LOG, TRAIN, LoggerChoice, Quantize, Strategy


def setup(
    checkpoint_dir: Path,
    out_dir: Path = Path("out/finetune/lora"),
    precision: str | None = None,
    quantize: Quantize | None = None,
    devices: int | str = 1,
    num_nodes: int = 1,
    lora_r: int = 8,
    lora_alpha: int = 16,
    lora_dropout: float = 0.05,
    lora_query: bool = True,
    lora_key: bool = False,
    lora_value: bool = True,
    lora_projection: bool = False,
    lora_mlp: bool = False,
    lora_head: bool = False,
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
    use_rslora: bool = False,
    use_dora: bool = False,
    lora_init: Literal["default", "pissa"] = "default",
    lora_targets: str | list[str] | None = None,
    lora_router: bool = False,
    lora_plus_ratio: float | None = None,
) -> None:
    """Finetune a model with LoRA: its weights stay as they are, small updates beside some of them learn.

    Args:
        checkpoint_dir: A checkpoint folder (Hugging Face or LitGPT), a .gguf file, or the id of a repository.
        out_dir: Where checkpoints and logs go.
        precision: bf16-true or bf16-mixed compute in 16 bits, 32-true in 32; what learns is held in 32 bits. Default:
            16 bits where the hardware computes in bf16.
        quantize: Hold the frozen weights in 4 or 8 bits.
        devices: How many devices to train on, or auto for all.
        num_nodes: How many machines to train on.
        lora_r: Rank of the updates.
        lora_alpha: Updates are scaled by lora_alpha / lora_r.
        lora_dropout: Dropout on the input of the updates.
        lora_query: Update the queries.
        lora_key: Update the keys.
        lora_value: Update the values.
        lora_projection: Update the output of the attention.
        lora_mlp: Update the feed-forward networks, experts included.
        lora_head: Update the head.
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
        use_rslora: Scale by lora_alpha / sqrt(lora_r) instead.
        use_dora: Learn the norm of each weight's rows apart from their direction.
        lora_init: pissa starts from the largest singular values of the weights.
        lora_targets: What is updated instead of the switches above: attention, mlp, all-linear, or regular expressions.
        lora_router: Update the routers of experts.
        lora_plus_ratio: How many times as fast lora_B learns (LoRA+), for instance 16.
    """
    arguments = dict(locals())
    from litgpt.lora import GPT, mark_only_lora_as_trainable
    from litgpt.peft import load_variant, variant_state_dict
    from litgpt.scripts.merge_lora import finish_lora
    from litgpt.train.command import finetune
    from litgpt.train.method import Method

    def speed(name: str) -> float:
        return lora_plus_ratio if lora_plus_ratio and name.endswith("lora_B") else 1.0

    method = Method(
        "lora",
        GPT,
        "lit_model.pth.lora",
        mark_only_lora_as_trainable,
        variant_state_dict,
        load_variant,
        lr_scale=speed,
        finalise=finish_lora,
    )
    finetune(method, arguments)
