# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt convert_to_litgpt`."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def convert_hf_checkpoint(
    checkpoint_dir: Path,
    model_name: str | None = None,
    dtype: str | None = None,
    debug_mode: bool | None = False,
) -> None:
    """Write lit_model.pth and model_config.yaml beside the files of a model, for programs that want LitGPT's files.

    The commands here do not need them: they read a model as it was published.

    Args:
        checkpoint_dir: A Hugging Face folder, or a .gguf file.
        model_name: A known model whose architecture this is. Default: what the files say.
        dtype: The type of the weights written: float32, bfloat16 or float16. Default: as they are.
        debug_mode: Log which file each tensor comes from.
    """
    from litgpt.checkpoint.export import convert_to_litgpt
    from litgpt.checkpoint.hub import resolve
    from litgpt.config import Config
    from litgpt.runtime import parse_dtype

    if debug_mode:
        logging.getLogger("litgpt").setLevel(logging.DEBUG)
    config = None if model_name is None else Config.from_name(model_name)
    torch_dtype = None if dtype is None else parse_dtype(dtype)
    folder = convert_to_litgpt(resolve(checkpoint_dir), config, torch_dtype)
    logger.info("wrote %s", folder / "lit_model.pth")
