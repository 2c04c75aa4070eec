# Licensed under the Apache License 2.0, see the LICENSE file.

"""From the arguments of a finetuning command to a finished folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.strategies import ModelParallelStrategy

from litgpt.args import CHUNK_SIZE, EvalArgs, LogArgs, TrainArgs
from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.hub import resolve
from litgpt.checkpoint.plan import main_dtype
from litgpt.checkpoint.source import open_source
from litgpt.config import Config
from litgpt.data import Alpaca
from litgpt.errors import UsageError, UserError
from litgpt.generate.loading import autocast_dtype
from litgpt.kvcache import ReplayCache
from litgpt.peft import VariantGPT, reset_added, variant_filter
from litgpt.quantize import check_quantization, load_quantized
from litgpt.runtime import num_parameters, weight_dtype
from litgpt.tokenizer import Tokenizer
from litgpt.train.batches import dataset_of, lengths_of
from litgpt.train.curve import draw_loss
from litgpt.train.devices import make_fabric, pick_training_precision
from litgpt.train.loggers import make_logger
from litgpt.train.loop import fit, seed_everything
from litgpt.train.memory import MemoryEstimate, check_fits, estimate_training, explain_out_of_memory
from litgpt.train.method import Method
from litgpt.train.optimizer import Spec, make_optimizer
from litgpt.train.state import Companions, claim, describe_arguments, find_resume

if TYPE_CHECKING:
    from litgpt.model import GPT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The arguments that all finetuning commands share; see `litgpt.finetune.full.setup`."""

    checkpoint_dir: Path
    out_dir: Path
    data: Any
    train: TrainArgs
    eval: EvalArgs
    log: LogArgs
    optimizer: Spec
    logger_name: str
    seed: int
    precision: str | None = None
    devices: int | str = 1
    num_nodes: int = 1
    quantize: str | None = None
    resume: bool | Literal["auto"] | Path | None = False
    overwrite: bool = False
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    access_token: str | None = None
    kv_cache: str | None = None
    chunk_size: int = CHUNK_SIZE


def finetune(method: Method, arguments: Mapping[str, Any]) -> None:
    """Finetune a model.

    Args:
        method: the way.
        arguments: those of the command: the fields of `Settings`, and the method's own, which are only noted.

    Raises:
        UserError: anything that a person can mend.
    """
    s = Settings(**{f.name: arguments[f.name] for f in fields(Settings) if f.name in arguments})
    if s.train.tie_embeddings is not None:
        raise UserError("--train.tie_embeddings is for pretraining", "the checkpoint says whether they are tied")
    resume = find_resume(s.resume, s.out_dir)
    path = resolve(s.checkpoint_dir, access_token=s.access_token)
    precision = pick_training_precision(s.precision, method.partial)
    if s.quantize is not None:
        check_quantization(s.quantize, precision.replace("-mixed", "-true"))
    experiment_logger = make_logger(
        s.logger_name, s.out_dir, f"finetune-{path.name}", s.log, resuming=resume is not None
    )
    fabric = make_fabric(s.devices, s.num_nodes, precision, s.strategy, method.partial, experiment_logger)
    if s.kv_cache is not None and isinstance(fabric.strategy, ModelParallelStrategy):
        raise UserError("a model that is divided over devices does not train under a KV cache", "use --strategy ddp")
    fabric.launch()
    if fabric.is_global_zero:
        claim(s.out_dir, resume is not None, s.overwrite)
    else:
        logging.getLogger("litgpt").setLevel(logging.ERROR)
    fabric.barrier()

    tokenizer = Tokenizer(path)
    with open_source(path) as source:
        model_config = source.config(method.gpt_class.config_class, **method.config(arguments))
        dtype = main_dtype(source.tensors().values())
        files = source.companion_files()
        if source.kind != "litgpt" or (path / "config.json").is_file():  # what LitGPT converted may lack it
            files["config.json"] = json.dumps(source.hf_config(), indent=2).encode("utf-8")
    if s.kv_cache is not None:
        _check_cache(s.kv_cache, model_config, s.chunk_size, precision)
    data = Alpaca() if s.data is None else s.data
    data.connect(
        tokenizer=tokenizer,
        batch_size=s.train.micro_batch_size,
        max_seq_length=min(s.train.max_seq_length or model_config.block_size, model_config.block_size),
    )
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup()

    estimate = None
    if s.quantize is None:  # what a packed weight takes is known only when it is packed
        estimate = _estimate(method, model_config, precision, s, data)
        if fabric.is_global_zero:
            check_fits(estimate, fabric.device)
    seed_everything(s.seed)
    # A model that will be divided may be too large for one device
    place = torch.device("cpu") if isinstance(fabric.strategy, ModelParallelStrategy) else fabric.device
    model = load_for_training(method, path, precision, place, s.quantize, method.config(arguments))
    if fabric.is_global_zero:
        learnt, frozen = num_parameters(model, True), num_parameters(model, False)
        logger.info(
            "trainable parameters: %s, frozen: %s (%s, %s)", f"{learnt:,}", f"{frozen:,}", precision, fabric.device
        )
    style = getattr(data, "prompt_style", None)
    companions = Companions(model.config, files, describe_arguments(arguments), style, dtype)
    with explain_out_of_memory(estimate) if estimate is not None else nullcontext():
        metrics = fit(
            fabric,
            method,
            model,
            data,
            s.train,
            s.eval,
            optimizer=s.optimizer,
            seed=s.seed,
            out_dir=s.out_dir,
            companions=companions,
            resume=resume,
            tokenizer=tokenizer,
            kv_cache=s.kv_cache,
            chunk_size=s.chunk_size,
        )
    if fabric.is_global_zero:
        _draw(metrics, s.out_dir / "loss.png")
    if fabric.is_global_zero and method.finalise is not None:
        method.finalise(s.out_dir / "final", path)
    fabric.barrier()


def _check_cache(kind: str, config: Config, chunk_size: int, precision: str) -> None:
    """Raise UserError for a KV cache that the model cannot be trained under."""
    if chunk_size < 1:
        raise UsageError(f"--chunk_size must be at least 1, got {chunk_size}")
    if precision.startswith("16"):
        raise UserError(f"small gradients are lost in {precision} under a KV cache", "use --precision bf16-mixed")
    ReplayCache.from_config(config, kind, device="meta")


def _estimate(method: Method, config: Config, precision: str, s: Settings, data: Any) -> MemoryEstimate:
    """The memory of a step, worked out without allocating any of it."""

    def make_model() -> GPT:
        model = method.gpt_class(config)
        method.mark_trainable(model)
        frozen, learnt = held_dtypes(method, precision)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(learnt if parameter.requires_grad else frozen)
        return model

    return estimate_training(
        make_model,
        lambda model: make_optimizer(s.optimizer, model, method.lr_scale),
        s.train.micro_batch_size,
        max(lengths_of(dataset_of(data.train_dataloader)[0]), default=1),
        s.train.checkpoint_activations,
        autocast_dtype(precision),
        s.kv_cache,
        s.chunk_size,
    )


def _draw(metrics: Path, picture: Path) -> None:
    """Draw the loss, if that is possible; nothing depends on it."""
    try:
        draw_loss(metrics, picture)
    except UserError as error:
        logger.info("%s is not drawn: %s", picture, error)


def held_dtypes(method: Method, precision: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of what is frozen and of what learns."""
    learnt = weight_dtype(precision)
    return (weight_dtype(precision.replace("-mixed", "-true")) if method.partial else learnt), learnt


def load_for_training(
    method: Method,
    path: Path,
    precision: str,
    device: torch.device,
    quantize: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> GPT:
    """Load a model for a method, with its trainable parameters marked and in the dtype that they are updated in.

    Args:
        method: the way of finetuning.
        path: the base checkpoint.
        precision: from `pick_training_precision`.
        device: where it goes.
        quantize: how the frozen weights are stored; None: as they are.
        config: fields of the config that the method adds.
    """
    held, learnt = held_dtypes(method, precision)
    options: dict[str, Any] = {"gpt_class": method.gpt_class, "dtype": held, "device": device, **(config or {})}
    model = load_model(path, **options) if quantize is None else load_quantized(path, quantize, **options)
    method.mark_trainable(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or (isinstance(model, VariantGPT) and variant_filter(model, name)):
            parameter.data = parameter.data.to(learnt)
    if isinstance(model, VariantGPT) and held != learnt:
        reset_added(model)  # DoRA and PiSSA start from numbers that must not be rounded
    return model
