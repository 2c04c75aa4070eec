# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt validate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from litgpt.errors import UserError

if TYPE_CHECKING:
    from litgpt.checkpoint.source import Source
    from litgpt.config import Config
    from litgpt.tokenizer import Tokenizer

T = TypeVar("T")
SAMPLE_TEXT = "Hello world, it is 12:30."


@dataclass
class Checkpoint:
    """What the checks have found out so far; a later check needs what an earlier one has opened.

    Args:
        path: the folder or file.
        model_filename: the weights to check, if the folder holds several.
        dtype: for which the memory is estimated.
        training: estimate the memory of training.
    """

    path: Path
    model_filename: str
    dtype: str
    training: bool
    source: Source | None = field(default=None, init=False)
    config: Config | None = field(default=None, init=False)
    tokenizer: Tokenizer | None = field(default=None, init=False)


class _Skip(Exception):
    """A check that cannot be made because an earlier one failed."""


def validate_setup(
    checkpoint_dir: Path,
    model_filename: str = "lit_model.pth",
    dtype: str = "float32",
    training: bool = False,
) -> None:
    """Check that a checkpoint is complete and usable, and print a report. Weights are not loaded.

    Args:
        checkpoint_dir: A checkpoint folder (Hugging Face or LitGPT), a .gguf file, or the id of a repository.
        model_filename: The file with the weights, for LitGPT folders that hold several.
        dtype: The type that the memory is estimated for: float32, bfloat16 or float16.
        training: Estimate the memory for training (weights, gradients, AdamW) instead of inference.

    Raises:
        UserError: a check failed.
    """
    from litgpt.checkpoint.hub import resolve
    from litgpt.runtime import parse_dtype

    parse_dtype(dtype)  # refused before anything is printed
    checkpoint = Checkpoint(resolve(checkpoint_dir), model_filename, dtype, training)
    sys.stdout.write(f"{checkpoint.path}\n")
    results = [_run(name, check, checkpoint) for name, check in CHECKS.items()]
    if checkpoint.source is not None:
        checkpoint.source.close()
    if failed := results.count("FAILED"):
        raise UserError(f"{failed} of {len(CHECKS)} checks failed for {checkpoint.path}", "the report says what to do")


def _run(name: str, check: Callable[[Checkpoint], str], checkpoint: Checkpoint) -> str:
    """Make one check and print its line of the report; returns `ok`, `FAILED` or `skipped`."""
    try:
        status, text = "ok", check(checkpoint)
    except _Skip as reason:
        status, text = "skipped", str(reason)
    except UserError as error:
        status, text = "FAILED", f"{error.message}; {error.hint}" if error.hint else error.message
    except (ValueError, OSError) as error:
        status, text = "FAILED", str(error)
    sys.stdout.write(f"{status:<8}{name + ':':<12}{' '.join(text.split())}\n")
    return status


def check_files(checkpoint: Checkpoint) -> str:
    """The files are there, readable and as long as they say."""
    from litgpt.checkpoint.save import check_manifest
    from litgpt.checkpoint.source import LITGPT_FILE, LitGPTSource, open_source

    path, name = checkpoint.path, checkpoint.model_filename
    if path.is_dir():
        check_manifest(path, hashes=True)
    if name != LITGPT_FILE:
        if not (path / name).is_file():
            raise UserError(
                f"{path / name} does not exist", "leave out --model_filename to check what the folder holds"
            )
        checkpoint.source = open_source(path / name) if name.endswith(".gguf") else LitGPTSource(path, name)
    else:
        checkpoint.source = open_source(path)
    tensors = checkpoint.source.tensors()
    return f"{checkpoint.source.kind} checkpoint with {len(tensors)} tensors"


def check_config(checkpoint: Checkpoint) -> str:
    """The architecture is known."""
    source = _needed(checkpoint.source, "the files cannot be opened")
    config = checkpoint.config = source.config()
    return (
        f"{config.name or 'unnamed'} ({config.family}): {config.n_layer} layers, width {config.n_embd}, "
        f"{config.n_head} heads, context {config.block_size}"
    )


def check_weights(checkpoint: Checkpoint) -> str:
    """Every tensor of the model is there, with its shape, and no other."""
    from litgpt.checkpoint.plan import plan_import

    source = _needed(checkpoint.source, "the files cannot be opened")
    config = _needed(checkpoint.config, "the architecture is not known")
    plan = plan_import(source, config)
    checkpoint.config = plan.config
    return f"all names and shapes fit; stored as {str(plan.dtype).removeprefix('torch.')}"


def check_tokenizer(checkpoint: Checkpoint) -> str:
    """A text becomes ids and the same text again."""
    from litgpt.tokenizer import Tokenizer

    tokenizer = checkpoint.tokenizer = Tokenizer(checkpoint.path)
    ids = tokenizer.encode(SAMPLE_TEXT)
    text = tokenizer.decode(ids)
    if text.strip() != SAMPLE_TEXT:
        raise UserError(
            f"{SAMPLE_TEXT!r} becomes {text!r} when encoded and decoded", "the tokenizer files do not match"
        )
    template = "a chat template" if tokenizer.chat_template else "no chat template"
    return f"{tokenizer.backend}, {tokenizer.vocab_size} tokens, {template}"


def check_vocabulary(checkpoint: Checkpoint) -> str:
    """The embedding has a row for every token."""
    tokenizer = _needed(checkpoint.tokenizer, "there is no tokenizer")
    config = _needed(checkpoint.config, "the architecture is not known")
    rows = config.padded_vocab_size
    assert rows is not None
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {rows} rows",
            "the tokenizer belongs to another model",
        )
    return f"{tokenizer.vocab_size} tokens for {rows} rows of the embedding"


def check_memory(checkpoint: Checkpoint) -> str:
    """How much memory the model needs."""
    from litgpt.checkpoint.plan import build_empty
    from litgpt.model import GPT
    from litgpt.runtime import num_parameters, parse_dtype

    count = num_parameters(build_empty(GPT, _needed(checkpoint.config, "the architecture is not known")))
    # Training holds a gradient and two states of AdamW beside each weight.
    copies = 4 if checkpoint.training else 1
    gigabytes = count * parse_dtype(checkpoint.dtype).itemsize * copies / 1e9
    purpose = "training, activations apart" if checkpoint.training else "the weights"
    return f"{count:,} parameters; {gigabytes:.2f} GB for {purpose} in {checkpoint.dtype}"


CHECKS: dict[str, Callable[[Checkpoint], str]] = {
    "files": check_files,
    "config": check_config,
    "weights": check_weights,
    "tokenizer": check_tokenizer,
    "vocabulary": check_vocabulary,
    "memory": check_memory,
}


def _needed(value: T | None, otherwise: str) -> T:
    if value is None:
        raise _Skip(otherwise)
    return value
