# Licensed under the Apache License 2.0, see the LICENSE file.

"""The names that people import from here; each lives where it belongs."""

from __future__ import annotations

from litgpt.checkpoint.compat import (
    auto_download_checkpoint,
    check_valid_checkpoint_dir,
    copy_config_files,
    extend_checkpoint_dir,
    load_checkpoint,
    save_config,
)
from litgpt.runtime import get_default_supported_precision, num_parameters
from litgpt.train.loss import chunked_cross_entropy

__all__ = [
    "auto_download_checkpoint",
    "check_valid_checkpoint_dir",
    "chunked_cross_entropy",
    "copy_config_files",
    "extend_checkpoint_dir",
    "get_default_supported_precision",
    "load_checkpoint",
    "num_parameters",
    "save_config",
]
