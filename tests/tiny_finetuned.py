# Licensed under the Apache License 2.0, see the LICENSE file.

"""A tiny base that can talk, and what finetuning it would have left behind, without any training."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from litgpt.checkpoint.adapter_files import VARIANTS, save_state
from litgpt.checkpoint.convert import save_litgpt
from litgpt.model import GPT
from litgpt.peft import VariantGPT, variant_state_dict
from tests.tiny import randomize
from tests.tiny_text import tiny_config, write_tokenizer

LORA: dict[str, Any] = {
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "lora_query": True,
    "lora_value": True,
    "lora_mlp": True,
}


def write_base(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> GPT:
    """Write a LitGPT folder with a tokenizer and random weights."""
    model = GPT(tiny_config(n_layer=3, **changes))
    randomize(model, seed)
    model.to(dtype)
    save_litgpt(model, model.config, folder)
    write_tokenizer(folder)
    return model


def write_finetuned(kind: str, base: Path, folder: Path, seed: int = 1, **settings: Any) -> VariantGPT:
    """Write the folder of a variant with random tensors in float32, and return the model that it makes."""
    torch.manual_seed(seed)
    settings = {**LORA, **settings} if kind == "lora" else settings
    model = import_module(f"litgpt.{kind}").GPT.from_checkpoint(base, dtype=torch.float32, **settings)
    for name, tensor in variant_state_dict(model).items():
        if any(part in name for part in ("scale", "magnitude", "norm", "ln_f")):
            tensor.mul_(1 + 0.2 * torch.randn_like(tensor))
        else:
            torch.nn.init.normal_(tensor, std=3.0 if "gating" in name else 0.1 if kind == "lora" else 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    save_state(variant_state_dict(model), folder / VARIANTS[kind].file_name)
    hyperparameters = {"checkpoint_dir": str(base), "precision": None, "devices": 1, **settings}
    (folder / "hyperparameters.yaml").write_text(yaml.safe_dump(hyperparameters), encoding="utf-8")
    return model


def logits(model: GPT) -> torch.Tensor:
    """What a model says to 16 tokens, `(1, 16, V)`."""
    with torch.no_grad():
        out = model(torch.arange(16)[None] * 11 % 250)
    assert isinstance(out, torch.Tensor)
    return out
