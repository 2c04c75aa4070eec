# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt merge_lora`: a base and its LoRA become one plain model.

Importing this module does not import torch, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt.errors import UserError

if TYPE_CHECKING:
    import torch

    from litgpt.checkpoint.adapter_files import Adapter

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf", ".json")


def merge_lora(
    checkpoint_dir: Path,
    pretrained_checkpoint_dir: Path | None = None,
    precision: str | None = None,
) -> None:
    """Put a LoRA into the weights of its base, so that the model runs at the speed of a plain one.

    Writes `lit_model.pth` beside the LoRA, with the config and tokenizer of the base. What is there already and was
    made of the same LoRA and base is kept; anything else is replaced.

    Args:
        checkpoint_dir: The folder that `litgpt finetune_lora` wrote, or one of Hugging Face PEFT.
        pretrained_checkpoint_dir: The base: a folder, a .gguf file or the id of a repository. Default: the one that
            it was trained from.
        precision: The type of the weights written: bf16-true, 16-true or 32-true. Default: as in the base.
    """
    from litgpt.checkpoint.adapter_files import MERGE_RECORD, base_state, find_base, load_finetuned, open_adapter
    from litgpt.checkpoint.convert import save_litgpt
    from litgpt.checkpoint.source import companions, open_source
    from litgpt.lora import GPT, merge_lora_weights
    from litgpt.runtime import pick_device, pick_precision, weight_dtype

    dtype = None if precision is None else weight_dtype(pick_precision(precision, pick_device("cpu")))
    adapter = open_adapter(checkpoint_dir)
    base = find_base(adapter, pretrained_checkpoint_dir)
    record = _record(adapter, base, dtype)
    if _is_current(adapter.folder, record):
        logger.info("%s is already the merge of this LoRA and this base", adapter.folder)
        return
    model = load_finetuned(base, adapter, dtype=dtype, keep_dtype=True)
    if not isinstance(model, GPT):
        raise UserError(
            f"{adapter.path} is no LoRA: only a LoRA can be merged", "`litgpt generate --adapter` uses others"
        )
    lost = merge_lora_weights(model, keep_base=False)
    with open_source(base) as source:
        # Finetuning leaves the tokenizer beside the LoRA, PEFT may not
        here = companions(adapter.folder)
        has_tokenizer = any(name.startswith("tokenizer.") for name in here)
        files = {} if has_tokenizer else source.companion_files()
        hf_config = source.hf_config() if source.kind != "litgpt" or (base / "config.json").is_file() else None
    files = {name: content for name, content in files.items() if name not in here}
    files[MERGE_RECORD] = json.dumps(record, indent=2).encode("utf-8")
    save_litgpt(base_state(model), model.config, adapter.folder, hf_config, files)
    dtype = model.transformer.wte.weight.dtype
    logger.info("merged %s into %s", adapter.path, base)
    logger.info("written to %s in %s; rounding lost at most %.2g of an update", adapter.folder, dtype, lost)


def finish_lora(folder: Path, base: Path) -> None:
    """Complete what LoRA training wrote: merge it, and add the files by which Hugging Face PEFT opens the folder.

    Args:
        folder: with the LoRA.
        base: checkpoint of its base.
    """
    from litgpt.checkpoint.adapter_files import AdapterFile, export_peft, open_adapter

    merge_lora(folder, base)
    adapter = open_adapter(folder)
    assert isinstance(adapter, AdapterFile)
    try:
        export_peft(adapter, base, folder)
    except UserError as error:
        logger.info("not written for PEFT: %s", error.message)


def _record(adapter: Adapter, base: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Everything that a merge depends on: another record means another result.

    The files of the LoRA go by their content. Those of the base are too large for that: they go by size and time.
    """
    from litgpt.checkpoint.adapter_files import HYPERPARAMETERS
    from litgpt.checkpoint.peft_config import CONFIG_FILE
    from litgpt.checkpoint.peft_folder import PICKLED_FILE, WEIGHTS_FILE
    from litgpt.checkpoint.save import hash_file

    if adapter.path.is_file():
        own = [adapter.path, adapter.folder / HYPERPARAMETERS]
    else:
        own = [adapter.folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, PICKLED_FILE)]
    weights = [base] if base.is_file() else sorted(path for path in base.iterdir() if path.suffix in _WEIGHTS)
    return {
        "lora": {path.name: hash_file(path) for path in own if path.is_file()},
        "base": str(base.resolve()),
        "base_files": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weights},
        "dtype": None if dtype is None else str(dtype),
    }


def _is_current(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a folder holds a whole model that was merged from what the record says."""
    from litgpt.checkpoint.adapter_files import MERGE_RECORD
    from litgpt.checkpoint.save import check_manifest
    from litgpt.checkpoint.source import LITGPT_FILE

    try:
        made_of = json.loads((folder / MERGE_RECORD).read_text(encoding="utf-8"))
        check_manifest(folder)
    except (OSError, ValueError):  # no record, or a folder that is not whole
        return False
    return made_of == record and (folder / LITGPT_FILE).is_file()
