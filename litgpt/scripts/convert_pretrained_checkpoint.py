# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt convert_pretrained_checkpoint`."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def convert_pretrained_checkpoint(checkpoint_dir: Path, output_dir: Path) -> None:
    """Keep only the model of a checkpoint that training can resume from.

    Args:
        checkpoint_dir: A folder that pretraining or full finetuning wrote.
        output_dir: The folder to write.
    """
    from litgpt.checkpoint.export import extract_pretrained
    from litgpt.checkpoint.hub import resolve

    extract_pretrained(resolve(checkpoint_dir), output_dir)
    logger.info("wrote %s", output_dir)
