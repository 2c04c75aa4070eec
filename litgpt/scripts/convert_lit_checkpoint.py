# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt convert_from_litgpt`."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def convert_lit_checkpoint(
    checkpoint_dir: Path, output_dir: Path, dtype: str | None = None, model_pth: bool = True
) -> None:
    """Write a model as a Hugging Face folder: weights, configuration, tokenizer and chat template.

    `transformers` opens the folder with `from_pretrained`.

    Args:
        checkpoint_dir: A LitGPT folder with the whole model, or a checkpoint of another kind, such as a .gguf file.
        output_dir: The folder to write.
        dtype: The type of the weights written: float32, bfloat16 or float16. Default: as they are.
        model_pth: Write the weights to model.pth as well, for scripts that load it as LitGPT 0.5 wrote it.
    """
    from litgpt.checkpoint.export import convert_from_litgpt
    from litgpt.checkpoint.hub import resolve
    from litgpt.runtime import parse_dtype

    torch_dtype = None if dtype is None else parse_dtype(dtype)
    convert_from_litgpt(resolve(checkpoint_dir), output_dir, torch_dtype, "model.pth" if model_pth else None)
    logger.info("wrote %s", output_dir)
