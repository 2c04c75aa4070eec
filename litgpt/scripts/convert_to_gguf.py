# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt convert_to_gguf`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)


def convert_to_gguf(
    checkpoint_dir: Path, output_file: Path, weight_type: Literal["F32", "F16", "BF16", "Q8_0"] = "Q8_0"
) -> None:
    """Write a model as one .gguf file with its tokenizer and chat template, as llama.cpp and others read it.

    Args:
        checkpoint_dir: A checkpoint of any kind: a Hugging Face or LitGPT folder, or a .gguf file.
        output_file: The file to write.
        weight_type: The type of the matrices; Q8_0 takes 8.5 bits a weight.
    """
    from litgpt.checkpoint.gguf_writer import write_gguf
    from litgpt.checkpoint.hub import resolve

    write_gguf(resolve(checkpoint_dir), output_file, weight_type)
    logger.info("wrote %s", output_file)
