# Licensed under the Apache License 2.0, see the LICENSE file.

"""From one kind of checkpoint to another, a tensor at a time: no model is built, memory holds one tensor."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from litgpt.checkpoint.adapter_files import VARIANTS, find_adapter
from litgpt.checkpoint.convert import export_hf, save_litgpt, write_litgpt_file
from litgpt.checkpoint.hf_config import to_hf
from litgpt.checkpoint.hub import only_gguf
from litgpt.checkpoint.lazy_state import LazyState
from litgpt.checkpoint.plan import plan_import
from litgpt.checkpoint.save import add_to_manifest, atomic_write, check_manifest
from litgpt.checkpoint.source import LITGPT_FILE, Source, companions, find_hf_files, open_source
from litgpt.config import Config
from litgpt.errors import UserError

logger = logging.getLogger(__name__)


def convert_to_litgpt(path: Path, config: Config | None = None, dtype: torch.dtype | None = None) -> Path:
    """Write `lit_model.pth` and `model_config.yaml` beside the files of a model.

    An earlier `lit_model.pth` is replaced, never read.

    Args:
        path: a Hugging Face folder, or a `.gguf` file.
        config: the architecture; None takes the one that the files name.
        dtype: of the weights; None keeps what they have.

    Returns:
        The folder.

    Raises:
        UserError: there is nothing to convert, or the weights do not fit the architecture.
    """
    with _open_original(path) as source:
        plan = plan_import(source, config or source.config())
        folder = path if path.is_dir() else path.parent
        written = ["model_config.yaml", LITGPT_FILE]
        if source.kind == "gguf":  # its tokenizer is inside
            texts = {name: text for name, text in source.companion_files().items() if not (folder / name).is_file()}
            written += texts
            for name, text in texts.items():
                with atomic_write(folder / name) as temporary:
                    temporary.write_bytes(text)
        plan.config.save(folder)
        with atomic_write(folder / LITGPT_FILE) as temporary:
            write_litgpt_file(LazyState(source, plan, dtype), plan.config, temporary)
    add_to_manifest(folder, written)
    return folder


def _open_original(path: Path) -> Source:
    """What another program wrote."""
    if path.is_dir():
        check_manifest(path)
        if (found := find_hf_files(path)) is not None:
            return found
    source = open_source(only_gguf(path) or path)
    if source.kind == "litgpt":
        raise UserError(
            f"{path} is a LitGPT checkpoint already",
            "give a Hugging Face folder or a .gguf file; `litgpt convert_from_litgpt` goes the other way",
        )
    return source


def convert_from_litgpt(
    path: Path, out_dir: Path, dtype: torch.dtype | None = None, torch_file: str | None = None
) -> None:
    """Write a checkpoint as a Hugging Face folder, with everything that `transformers` opens a model and tokenizer by.

    Args:
        path: a checkpoint of any kind, such as a LitGPT folder.
        out_dir: the new folder.
        dtype: of the weights; None keeps what they have.
        torch_file: name of a further file with all tensors, as `torch.save` writes them.

    Raises:
        UserError: the checkpoint cannot be read, has no place in a Hugging Face folder, or there are other weights
            in `out_dir`.
    """
    if out_dir.resolve() == (path if path.is_dir() else path.parent).resolve():
        raise UserError(f"{out_dir} is the folder of the checkpoint itself", "choose another output_dir")
    _refuse_adapter(path)
    with open_source(path) as source:
        plan = plan_import(source, source.config())
        has_config = source.kind != "litgpt" or (source.path / "config.json").is_file()
        hf_config = source.hf_config() if has_config else to_hf(plan.config)
        state = LazyState(source, plan, dtype)
        export_hf(state, plan.config, out_dir, hf_config, source.companion_files(), torch_file=torch_file)


def _refuse_adapter(path: Path) -> None:
    """A folder with a LoRA alone holds no model; beside other adapters, the model is only their base."""
    adapter = find_adapter(path) if path.is_dir() else None
    if adapter is None:
        return
    is_lora = adapter.path.name == VARIANTS["lora"].file_name or adapter.path.is_dir()
    if not is_lora:
        raise UserError(f"{adapter.path} has no place in a Hugging Face model", "only a LoRA can be merged into one")
    if not (path / LITGPT_FILE).is_file() and find_hf_files(path) is None:
        raise UserError(f"{path} holds a LoRA without its base", f"merge them first: `litgpt merge_lora {path}`")


def extract_pretrained(path: Path, out_dir: Path) -> None:
    """Keep of a training checkpoint what a model needs: its weights, config and tokenizer.

    Args:
        path: a folder that training wrote; its `lit_model.pth` also holds what training goes on from.
        out_dir: the new folder.

    Raises:
        UserError: the checkpoint cannot be read, or there is something in `out_dir` already.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} is not empty", "choose another output_dir, or remove it first")
    with open_source(path) as source:
        if source.kind != "litgpt":
            raise UserError(f"{path} has no {LITGPT_FILE}", "give a folder that training wrote")
        plan = plan_import(source, source.config())
        hf_config = source.hf_config() if (source.path / "config.json").is_file() else None
        save_litgpt(LazyState(source, plan), plan.config, out_dir, hf_config, source.companion_files())
    if not companions(out_dir):
        logger.warning("%s has no tokenizer: copy one into %s", path, out_dir)
