# Licensed under the Apache License 2.0, see the LICENSE file.

"""What scripts written for LitGPT call on checkpoint folders, on top of the general readers and writers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from litgpt.checkpoint.hub import CHECKPOINTS, resolve
from litgpt.checkpoint.source import LITGPT_FILE, companions
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.config import Config
from litgpt.errors import MissingFileError

if TYPE_CHECKING:
    import lightning as L

logger = logging.getLogger(__name__)


def load_checkpoint(fabric: L.Fabric | None, model: nn.Module, checkpoint_path: str | Path, strict: bool = True) -> Any:
    """Read the tensors of a `lit_model.pth` into a model that exists. `GPT.from_checkpoint` needs no model.

    Args:
        fabric: kept for compatibility: every process reads the file on its own.
        model: gets the tensors; it may be wrapped by `fabric.setup_module`.
        checkpoint_path: the file: a state dict, bare or as the entry `model` of a training checkpoint.
        strict: refuse missing and unexpected tensors.

    Returns:
        What `load_state_dict` says about missing and unexpected tensors.

    Raises:
        UserError: the file is missing or damaged.
    """
    file = TorchFile(checkpoint_path)
    return model.load_state_dict({name: file.get(name) for name in file.tensors()}, strict=strict)


def copy_config_files(source_dir: str | Path, out_dir: str | Path) -> None:
    """Copy everything but the weights from one checkpoint folder to another: config, tokenizer and prompt format."""
    for name in ("config.json", "model_config.yaml", *companions(Path(source_dir))):
        path, target = Path(source_dir) / name, Path(out_dir) / name
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def save_config(config: Config, checkpoint_dir: str | Path) -> None:
    """Write the `model_config.yaml` of a folder."""
    config.save(Path(checkpoint_dir) / "model_config.yaml")


def extend_checkpoint_dir(checkpoint_dir: Path) -> Path:
    """The same folder, or the one of that name under `checkpoints/` if only that exists."""
    below = CHECKPOINTS / checkpoint_dir
    return below if below.exists() and not checkpoint_dir.exists() else checkpoint_dir


def auto_download_checkpoint(
    model_name: str | Path, access_token: str | None = None, ignore_tokenizer_files: bool = False
) -> Path:
    """The folder of a model, downloaded if need be; see `litgpt.checkpoint.hub.resolve`.

    Args:
        model_name: a path or a repository id.
        access_token: for a repository that is not public.
        ignore_tokenizer_files: kept for compatibility: a model is whatever can be opened.
    """
    return resolve(model_name, access_token=access_token)


def check_valid_checkpoint_dir(
    checkpoint_dir: Path,
    model_filename: str = LITGPT_FILE,
    verbose: bool = True,
    raise_error: bool = False,
    ignore_tokenizer_files: bool = False,
) -> None:
    """Check that a LitGPT folder has the files to start from. `litgpt validate` looks into them too.

    Args:
        checkpoint_dir: the folder.
        model_filename: the file with the weights.
        verbose: log what is missing before leaving.
        raise_error: raise, instead of ending the program with exit code 1.
        ignore_tokenizer_files: do without a tokenizer.

    Raises:
        FileNotFoundError: with `raise_error`, the folder or a file is missing.
        SystemExit: without it.
    """
    needed: list[tuple[str, ...]] = [(model_filename,), ("model_config.yaml",)]
    if not ignore_tokenizer_files:
        needed += [("tokenizer.json", "tokenizer.model"), ("tokenizer_config.json",)]
    missing = [" or ".join(names) for names in needed if not any((checkpoint_dir / name).is_file() for name in names)]
    if not missing:
        return
    what = f"lacks {', '.join(missing)}" if checkpoint_dir.is_dir() else "is not a folder"
    error = MissingFileError(f"{str(checkpoint_dir)!r} {what}", "`litgpt download` fetches a model")
    if raise_error:
        raise error
    if verbose:
        logger.error("%s", error)
    raise SystemExit(1)
