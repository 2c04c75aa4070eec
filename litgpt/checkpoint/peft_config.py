# Licensed under the Apache License 2.0, see the LICENSE file.

"""`adapter_config.json` of Hugging Face PEFT: what it says about LoRA, and what of it cannot be expressed here.

The fields are those of https://huggingface.co/docs/peft/package_reference/lora and .../ia3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litgpt.errors import MissingFileError, UserError

CONFIG_FILE = "adapter_config.json"

# Fields that are read here or that do not change what a trained adapter computes: the tensors in the file say which
# maps are adapted, so the rules by which they were once chosen are not needed.
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "feedforward_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("init_lora_weights", "init_ia3_weights", "runtime_config", "megatron_config", "megatron_core", "eva_config"),
    "qalora_group_size",
    "fan_in_fan_out",  # whatever it says, PEFT goes by the map: true for the turned ones of GPT-2, false for others
}
# Ways to start that change the base model's weights: without that change the tensors mean something else.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Read and check `adapter_config.json`.

    Raises:
        UserError: it is missing or damaged, or says something that has no counterpart here; all of it is named.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist", "give the folder that PEFT's save_pretrained wrote") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}", "save the adapter again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it holds no object", "save the adapter again")
    kind = config.get("peft_type")
    if kind not in ("LORA", "IA3"):
        raise UserError(f"{path}: adapters of the type {kind} cannot be read", "LORA and IA3 can")
    refused = [f"{key}={value!r}" for key, value in config.items() if key not in _KNOWN and _means_something(value)]
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        refused.append(f"init_lora_weights={init!r}")
    if refused:
        raise UserError(
            f"{path} asks for what has no counterpart here: {', '.join(refused)}",
            "merge the adapter with PEFT (merge_and_unload) and load the merged model",
        )
    return config


def _means_something(value: Any) -> bool:
    return bool(value) and value != "none"


def lora_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor on `b @ a` of one linear map, as PEFT computes it.

    Args:
        config: content of `adapter_config.json`.
        module: the map's name in the Hugging Face model.
        rank: rows of its `a`.
    """
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the name or its end."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
