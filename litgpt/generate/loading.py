# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a path or repository id to everything that generating text takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.hub import resolve
from litgpt.config import Config
from litgpt.generate.engine import Engine
from litgpt.generate.speculative import Speculation
from litgpt.generate.types import SamplingParams
from litgpt.model import GPT
from litgpt.prompts import Prompt, PromptStyle, choose_prompt_style, encode_prompt
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
        """A decoding engine for the model."""
        return Engine(
            self.model,
            self.tokenizer,
            kv_cache=kv_cache,
            compile=compile,
            autocast=autocast_dtype(self.precision),
            speculation=speculation,
        )

    def encode(self, prompt: Prompt, sys_prompt: str | None = None) -> list[int]:
        """The token ids of a request or a conversation, formatted as the model expects it."""
        return encode_prompt(self.tokenizer, self.prompt_style, prompt, sys_prompt=sys_prompt)


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
) -> Loaded:
    """Load a checkpoint to generate with.

    Args:
        path_or_repo: a folder, a `.gguf` file or a repository id.
        precision: see `litgpt.runtime.pick_precision`.
        device: see `litgpt.runtime.pick_device`.
        prompt_style: the name of a prompt style, "raw" for none; None for what the checkpoint says.
        access_token: for a repository that is not public.

    Raises:
        UserError: the checkpoint is missing, damaged or of an unknown kind, or a setting is not available.
    """
    place = pick_device(device)
    chosen = pick_precision(precision, place)
    path = resolve(path_or_repo, access_token=access_token)
    tokenizer = Tokenizer(path)
    model = load_weights(path, chosen, place)
    return Loaded(model, tokenizer, choose_prompt_style(path, tokenizer, model.config, prompt_style), path, chosen)


def load_weights(path: Path, precision: str, device: torch.device, config: Config | None = None) -> GPT:
    """Load a model in the dtype of a precision, and say how long that took."""
    start = perf_counter()
    model = load_model(path, dtype=weight_dtype(precision), device=device, config=config)
    logger.info("loaded %s in %.2f s (%s, %s)", path, perf_counter() - start, precision, device)
    return model


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype that a mixed precision computes in, None for the others."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
