# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt download`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from litgpt.errors import UserError

logger = logging.getLogger(__name__)


def download_from_hub(
    repo_id: str,
    access_token: str | None = None,
    tokenizer_only: bool = False,
    convert_checkpoint: bool = True,
    dtype: str | None = None,
    checkpoint_dir: Path = Path("checkpoints"),
    model_name: str | None = None,
) -> None:
    """Download a model from a hub. A download that was interrupted continues where it stopped.

    The downloaded files are used as they are: no command needs a converted copy. The folder is printed.

    Args:
        repo_id: The repository, as org/name, or org/name:Q8_0 for one of many .gguf files; `list` shows known names.
        access_token: For private and gated repositories. Default: $HF_TOKEN or the stored login.
        tokenizer_only: Fetch only the tokenizer and the configuration.
        convert_checkpoint: Check that the architecture is supported, before its weights are fetched, and write it to
            model_config.yaml. The weights are not converted, since every command reads them as they are.
        dtype: Write the weights in this type to lit_model.pth as well, for instance bfloat16.
        checkpoint_dir: Where the folder org/name is created.
        model_name: A known model whose architecture this is; the weights are then written to lit_model.pth as well.
    """
    if repo_id == "list":
        sys.stdout.write("\n".join(known_repos()) + "\n")
        return
    from litgpt.checkpoint.dequantize import read_config
    from litgpt.checkpoint.hub import download_repo
    from litgpt.config import Config
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    name, _, quant = repo_id.partition(":")
    if name.count("/") != 1:
        raise UserError(
            f"{repo_id!r} is not a repository id", "write it as org/name; `litgpt download list` shows some"
        )
    folder = download_repo(
        name,
        checkpoint_dir / name,
        access_token,
        tokenizer_only=tokenizer_only,
        quant=quant or None,
        check_config=convert_checkpoint and model_name is None,
    )
    if convert_checkpoint and not tokenizer_only and folder == checkpoint_dir / name:
        if model_name is not None or dtype is not None:
            convert_hf_checkpoint(folder, model_name, dtype)
        elif (folder / "config.json").is_file():
            read_config(folder, Config).save(folder)
    _warn_of_outdated_copy(folder)
    sys.stdout.write(f"{folder}\n")


def _warn_of_outdated_copy(folder: Path) -> None:
    """Say when `lit_model.pth` hides newer weights; it may be somebody's work, so it is not removed."""
    copy = folder / "lit_model.pth"
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if copy.is_file() and any(file.stat().st_mtime > copy.stat().st_mtime for file in weights):
        logger.warning("%s is older than the weights beside it, but is used before them: remove it to use them", copy)


def known_repos() -> list[str]:
    """Return the repositories of the models that have a name here, sorted."""
    from litgpt.config import configs

    return sorted({f"{config['hf_config']['org']}/{config['hf_config']['name']}" for config in configs})
