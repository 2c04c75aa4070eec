# Licensed under the Apache License 2.0, see the LICENSE file.

"""Write the weights of a checkpoint as a Hugging Face folder and as a LitGPT folder, for the other engines to read.

python extensions/benchmark/prepare.py CHECKPOINT OUT_DIR [DTYPE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from litgpt.checkpoint.convert import export_hf, load_model, save_litgpt
from litgpt.checkpoint.source import open_source


def main() -> None:
    """Write `OUT_DIR/hf` and `OUT_DIR/litgpt`."""
    path, out_dir = sys.argv[1], Path(sys.argv[2])
    dtype = getattr(torch, sys.argv[3]) if len(sys.argv) > 3 else torch.float32
    model = load_model(path, dtype=dtype)
    with open_source(path) as source:
        hf_config, files = source.hf_config(), source.companion_files()
    export_hf(model, model.config, out_dir / "hf", hf_config, files)
    save_litgpt(model, model.config, out_dir / "litgpt", hf_config, files)


if __name__ == "__main__":
    main()
