# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a path or repository id to everything that generating text takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from litgpt.checkpoint.adapter_files import Adapter, base_and_adapter, load_finetuned, open_adapter
from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.hub import resolve
from litgpt.checkpoint.source import open_source
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.generate.engine import Engine
from litgpt.generate.speculative import Speculation
from litgpt.generate.types import SamplingParams
from litgpt.model import GPT
from litgpt.prompts import Prompt, PromptStyle, choose_prompt_style, encode_prompt, has_prompt_style
from litgpt.quantize import check_quantization, is_quantized, load_quantized
from litgpt.runtime import pick_device, pick_precision, weight_dtype
from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A model ready to run, with what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    prompt_style: PromptStyle
    path: Path
    precision: str

    def engine(self, kv_cache: str = "dense", compile: bool = False, speculation: Speculation | None = None) -> Engine:
        """A decoding engine for the model.

        Raises:
            UserError: experts that are quantized do not compile.
        """
        if compile and is_quantized(self.model, experts_only=True):
            raise UserError("quantized experts do not compile", "leave out --compile or --quantize")
        return Engine(
            self.model,
            self.tokenizer,
            kv_cache=kv_cache,
            compile=compile,
            autocast=autocast_dtype(self.precision),
            speculation=speculation,
        )

    def encode(self, prompt: Prompt, sys_prompt: str | None = None, input: str = "") -> list[int]:
        """The token ids of a request or a conversation, formatted as the model expects it.

        Args:
            prompt: the request, or the messages of the conversation.
            sys_prompt: the system prompt, for models that take one.
            input: further text that belongs to the request.
        """
        return encode_prompt(self.tokenizer, self.prompt_style, prompt, sys_prompt=sys_prompt, input=input)


def with_stops_of(style: PromptStyle, tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """The same settings, with the stop sequences of a prompt style."""
    stops = tuple(tuple(sequence) for sequence in style.stop_tokens(tokenizer))
    return replace(params, stop_sequences=params.stop_sequences + stops)


def load(
    path_or_repo: str | Path,
    *,
    precision: str | None = None,
    device: str | None = None,
    prompt_style: str | PromptStyle | None = None,
    access_token: str | None = None,
    adapter: str | Path | None = None,
    finetuned: Path | None = None,
    quantize: str | None = None,
) -> Loaded:
    """Load a checkpoint to generate with.

    Args:
        path_or_repo: a folder, a `.gguf` file or a repository id. A folder that finetuning wrote with nothing but what
            was learnt stands for its base with that.
        precision: see `litgpt.runtime.pick_precision`.
        device: see `litgpt.runtime.pick_device`.
        prompt_style: the name of a prompt style, "raw" for none; None for what the checkpoint says.
        access_token: for a repository that is not public.
        adapter: what finetuning learnt, to put on top; see `litgpt.checkpoint.adapter_files.open_adapter`.
        finetuned: weights of the same model to use in place of the checkpoint's: a `.pth` file, or a folder.
        quantize: how weights are stored, one of `litgpt.quantize.Quantization`; None: as they are computed with.

    Raises:
        UserError: the checkpoint is missing, damaged or of an unknown kind, or a setting is not available.
    """
    place = pick_device(device)
    chosen = pick_precision(precision, place)
    if quantize is not None:
        check_quantization(quantize, chosen)
    path, own = base_and_adapter(resolve(path_or_repo, access_token=access_token))
    used = own if adapter is None else open_adapter(adapter)
    tokenizer = Tokenizer(path)
    weights, config, trained_in = path, None, path if used is None else used.folder
    if finetuned is not None:
        with open_source(path) as source:
            config = source.config()
        weights, trained_in = finetuned, finetuned if finetuned.is_dir() else finetuned.parent
    model = load_weights(weights, chosen, place, config, used, quantize)
    # The format of the training, if it is noted, is the one to use
    format_dir = trained_in if has_prompt_style(trained_in) else path
    return Loaded(
        model, tokenizer, choose_prompt_style(format_dir, tokenizer, model.config, prompt_style), path, chosen
    )


def load_weights(
    path: Path,
    precision: str,
    device: torch.device,
    config: Config | None = None,
    adapter: Adapter | None = None,
    quantize: str | None = None,
) -> GPT:
    """Load a model in the dtype of a precision, and say how long that took.

    Args:
        path: the checkpoint.
        precision: as `litgpt.runtime.pick_precision` writes it.
        device: where the model goes.
        config: the architecture, if it is not the one that the checkpoint names. An adapter brings its own.
        adapter: what to put on top.
        quantize: how weights are stored, one of `litgpt.quantize.Quantization`.
    """
    start, dtype = perf_counter(), weight_dtype(precision)
    read: Callable[..., GPT]
    if adapter is None:
        read = partial(load_model, config=config)
    else:
        read = partial(load_finetuned, adapter=adapter)
    if quantize is None:
        model = read(path, dtype=dtype, device=device)
    else:
        model = load_quantized(path, quantize, read=read, dtype=dtype, device=device)
    name = path if adapter is None else f"{path} with {adapter.path}"
    logger.info("loaded %s in %.2f s (%s, %s)", name, perf_counter() - start, precision, device)
    return model


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype that a mixed precision computes in, None for the others."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
