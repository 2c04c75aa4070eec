# Licensed under the Apache License 2.0, see the LICENSE file.

"""What finetuning leaves behind, apart from whole models: the tensors of a variant, to be put on top of a base.

LitGPT's files `lit_model.pth.lora`, `.adapter` and `.adapter_v2` (and ours, `.ia3`) hold `{"model": {name: tensor}}`.
Beside one lies `hyperparameters.yaml`, which names the base and, for LoRA, the rank and the scale. A folder of Hugging
Face PEFT does the same job and is read by `litgpt.checkpoint.peft_folder`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from litgpt import lora
from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.hub import CHECKPOINTS, resolve
from litgpt.checkpoint.peft_config import CONFIG_FILE, read_peft_config
from litgpt.checkpoint.peft_folder import read_peft, write_peft
from litgpt.checkpoint.plan import Plan, build_empty, plain_state, plan_import
from litgpt.checkpoint.save import atomic_write, hash_file, read_manifest
from litgpt.checkpoint.source import LITGPT_FILE, Source, open_source
from litgpt.checkpoint.tables import table_for
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError
from litgpt.model import GPT
from litgpt.peft import VariantGPT, load_variant, variant_filter, variant_state_dict

logger = logging.getLogger(__name__)

HYPERPARAMETERS = "hyperparameters.yaml"
_HF_FILES = ("model.safetensors", "pytorch_model.bin")
_WHOLE_MODELS = (LITGPT_FILE, *_HF_FILES, *(f"{name}.index.json" for name in _HF_FILES))


@dataclass(frozen=True)
class Variant:
    """A kind of finetuning that adds tensors to the model.

    Args:
        name: of its module in `litgpt`.
    """

    name: str

    @property
    def file_name(self) -> str:
        """Name of the file with its tensors."""
        return f"{LITGPT_FILE}.{self.name}"

    @property
    def gpt_class(self) -> type[VariantGPT]:
        """Its model."""
        return import_module(f"litgpt.{self.name}").GPT


MERGE_RECORD = "merged_from.json"  # what a merged model was made of
VARIANTS = {name: Variant(name) for name in ("lora", "adapter", "adapter_v2", "ia3")}


@dataclass(frozen=True)
class Learnt:
    """What an adapter holds, ready for a model.

    Args:
        variant: which kind it is.
        settings: fields of the variant's config.
        state: its tensors, under LitGPT's names.
    """

    variant: Variant
    settings: dict[str, Any]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class AdapterFile:
    """A LitGPT file with the tensors of a variant.

    Args:
        path: the file.
        variant: which kind it is.
    """

    path: Path
    variant: Variant

    @property
    def folder(self) -> Path:
        """Where the file is, and what belongs to it."""
        return self.path.parent

    @property
    def base(self) -> str | None:
        """The base that it was trained from, as the person who trained it wrote it; None when that is not known."""
        return read_hyperparameters(self.folder, required=False).get("checkpoint_dir")

    def read(self, source: Source) -> Learnt:
        """Read everything.

        Args:
            source: the base.

        Raises:
            UserError: the file is damaged, empty, or the settings that belong to it are missing.
        """
        state = read_state(self.path)
        if not state:
            raise UserError(f"{self.path} holds no tensors", "was anything trained?")
        return Learnt(self.variant, self._settings(state), state)

    def _settings(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """The fields of the config that the run had set, or that the tensors show."""
        if self.variant.name in ("adapter", "adapter_v2"):
            prompts = {_layer(name): t for name, t in state.items() if name.endswith("adapter_wte.weight")}
            if not prompts:
                raise UserError(f"{self.path} has no prompt embeddings (adapter_wte)", "is it a file of this kind?")
            return {"adapter_prompt_length": len(next(iter(prompts.values()))), "adapter_start_layer": min(prompts)}
        known = {field.name for field in dataclasses.fields(self.variant.gpt_class.config_class)}
        known -= {field.name for field in dataclasses.fields(Config)}
        if not known:
            return {}
        settings = {key: value for key, value in read_hyperparameters(self.folder).items() if key in known}
        if any(re.search(r"\.mlp\.gate\.lora_", name) for name in state):
            settings["lora_router"] = True  # `lora_mlp` of LitGPT 0.5.13 included it
        return settings


@dataclass(frozen=True)
class PeftFolder:
    """A folder that Hugging Face PEFT wrote, or that can be read by it.

    Args:
        folder: the folder.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """The same."""
        return self.folder

    @property
    def base(self) -> str | None:
        """The base that it was trained from, a path or a repository id, None when that is not known."""
        return read_peft_config(self.folder).get("base_model_name_or_path")

    def read(self, source: Source) -> Learnt:
        """Read everything; see `AdapterFile.read`."""
        config = plan_import(source, source.config()).config
        names = {table_for(config.family).canonical(name): name for name in source.tensors()}

        def base_tensor(name: str) -> Tensor | None:
            found = names.get(table_for(config.family).canonical(name))
            return None if found is None or source.kind != "hf" else source.get(found)

        name, settings, state = read_peft(self.folder, config, base_tensor)
        return Learnt(VARIANTS[name], settings, state)


Adapter = AdapterFile | PeftFolder


def open_adapter(path: str | Path) -> Adapter:
    """Recognise an adapter.

    Args:
        path: a folder that finetuning wrote, the file with the variant's tensors in it, or a folder of PEFT.

    Raises:
        UserError: there is none.
    """
    path = Path(path).expanduser()
    path = path if path.exists() else CHECKPOINTS / path if (CHECKPOINTS / path).exists() else path
    if path.is_file():
        for variant in VARIANTS.values():
            if path.name.endswith(f".{variant.name}"):
                return AdapterFile(path, variant)
        raise UserError(f"{path} is not an adapter", f"its name ends in one of: {_endings()}")
    if not path.exists():
        raise MissingFileError(f"the adapter {path} does not exist", "give a folder that finetuning or PEFT wrote")
    if (adapter := find_adapter(path)) is None:
        names = ", ".join(variant.file_name for variant in VARIANTS.values())
        raise MissingFileError(f"{path} holds no adapter", f"one is a folder with {names} or {CONFIG_FILE}")
    return adapter


def find_adapter(folder: Path) -> Adapter | None:
    """The adapter in a folder, None when there is none."""
    for variant in VARIANTS.values():
        if (folder / variant.file_name).is_file():
            return AdapterFile(folder / variant.file_name, variant)
    return PeftFolder(folder) if (folder / CONFIG_FILE).is_file() else None


def base_and_adapter(path: Path) -> tuple[Path, Adapter | None]:
    """What to load when a person names a checkpoint: a folder with an adapter alone stands for its base with it.

    A whole model beside a LoRA is the two merged. Beside other adapters it is their base.

    Raises:
        UserError: the base of an adapter is not known or not there.
    """
    adapter = find_adapter(path) if path.is_dir() else None
    if adapter is None:
        return path, None
    if not any((path / name).is_file() for name in _WHOLE_MODELS):
        return find_base(adapter), adapter
    if isinstance(adapter, AdapterFile) and adapter.variant.name != "lora":
        return path, adapter
    _warn_of_old_merge(path)
    return path, None


def _warn_of_old_merge(folder: Path) -> None:
    """Say so when the model in a folder was merged from another LoRA than the one beside it."""
    record = folder / MERGE_RECORD
    try:
        merged_at = record.stat().st_mtime_ns
        made_of = json.loads(record.read_text(encoding="utf-8"))["lora"].items()
    except (OSError, ValueError, KeyError, AttributeError):
        return
    files = {folder / name: digest for name, digest in made_of if (folder / name).is_file()}
    # Only what was written since is read: a large LoRA should not be, whenever its merge is loaded
    newer = {path: digest for path, digest in files.items() if path.stat().st_mtime_ns >= merged_at}
    changed = [path.name for path, digest in newer.items() if hash_file(path) != digest]
    if changed:
        logger.warning(
            "the model in %s was merged before %s changed; `litgpt merge_lora %s` merges again",
            folder,
            " and ".join(changed),
            folder,
        )


def find_base(adapter: Adapter, given: str | Path | None = None) -> Path:
    """The checkpoint of the base that an adapter was trained from.

    Args:
        adapter: the adapter.
        given: where it is, if not where it was.

    Raises:
        UserError: it is not known, or not there.
    """
    base = given or adapter.base
    if base is None:
        raise UserError(f"{adapter.path} does not say from which base it was trained", "name the base")
    try:
        return resolve(base)
    except MissingFileError as error:
        hint = "name the base, if it has moved" if given is None else error.hint
        raise MissingFileError(f"the base of {adapter.path} is missing: {error.message}", hint) from error


def _read_tensor(plan: Plan, source: Source, name: str) -> Tensor:
    """One tensor of our model, from the checkpoint."""
    whole = torch.empty(plain_state(plan.config)[name].shape)
    for theirs, links in plan.links.items():
        for link in links:
            if link.ours == name:
                link.our_view(whole).copy_(link.their_view(source.get(theirs)))
    return whole


def _endings() -> str:
    return ", ".join(f".{name}" for name in VARIANTS)


def load_finetuned(
    base: Path,
    adapter: Adapter,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_dtype: bool = False,
    filled: Callable[[GPT, str], None] | None = None,
) -> VariantGPT:
    """Load a base with an adapter on top, in evaluation mode.

    Args:
        base: checkpoint of the base, of any kind.
        adapter: from `open_adapter`.
        dtype: of the parameters; None keeps the base's.
        device: where they go; None is the CPU.
        keep_dtype: leave the adapter's own tensors as they are in its file, to compute with them outside of a forward
            pass.
        filled: see `litgpt.checkpoint.convert.load_model`.

    Raises:
        UserError: a file is missing or damaged, or the adapter is not one of this base; all wrong tensors are named.
    """
    with open_source(base) as source:
        learnt = adapter.read(source)
        gpt_class = learnt.variant.gpt_class
        try:
            config = source.config(gpt_class.config_class, **learnt.settings)
        except TypeError as error:
            raise UserError(f"{adapter.path} has settings of the wrong kind: {error}") from error
        config = plan_import(source, config).config
    if isinstance(adapter, AdapterFile):
        _warn_of_old_prompts(adapter, config)
    origin = f"{adapter.path}, put on {base},"
    load_variant(build_empty(gpt_class, config), learnt.state, origin)  # says what is wrong before anything is loaded
    model = load_model(base, gpt_class=gpt_class, dtype=dtype, device=device, config=config, filled=filled)
    if keep_dtype:
        for name, parameter in model.named_parameters():
            if variant_filter(model, name):
                parameter.data = parameter.data.to(next(iter(learnt.state.values())).dtype)
    load_variant(model, learnt.state, origin)
    return model


def _warn_of_old_prompts(adapter: AdapterFile, config: Config) -> None:
    """LitGPT up to 0.5 read the keys and values of prompts from the wrong rows, unless all heads share one pair."""
    if adapter.variant.name not in ("adapter", "adapter_v2") or config.latent_attention or config.n_query_groups == 1:
        return
    if not read_manifest(adapter.folder):  # it has none
        logger.warning(
            "%s was not written by this version: LitGPT 0.5 trained the prompts of models like this one, with %d "
            "key/value heads, against rows of the attention's weights in another order, so answers may be worse here",
            adapter.path,
            config.n_query_groups,
        )


def base_state(model: VariantGPT) -> dict[str, Tensor]:
    """The tensors of the plain model in a variant, under the plain names; they share memory with the model."""
    state = model.state_dict()
    return {name.replace(".linear.", "."): t for name, t in state.items() if not any(p in name for p in model.added)}


@contextmanager
def plain_weights(model: GPT) -> Iterator[tuple[dict[str, Tensor], dict[str, dict[str, Any]]]]:
    """The tensors to save of a model, and the content of further files by name, that hold what a variant learnt.

    A LoRA is merged while the context lasts, and its base restored afterwards, bit for bit.
    """
    if not isinstance(model, VariantGPT):
        yield dict(model.state_dict()), {}
    elif isinstance(model, lora.GPT):
        merged_before = any(layer.merged for layer in lora.lora_layers(model))
        lora.merge_lora_weights(model)
        try:
            yield base_state(model), {}
        finally:
            if not merged_before:
                lora.unmerge_lora_weights(model)
    else:
        variant = VARIANTS[type(model).__module__.removeprefix("litgpt.")]
        yield base_state(model), {variant.file_name: {"model": variant_state_dict(model)}}


def export_peft(adapter: AdapterFile, base: Path, out_dir: Path) -> None:
    """Write a LoRA or IA3 as a folder of Hugging Face PEFT.

    Args:
        adapter: the LoRA or IA3.
        base: checkpoint of its base.
        out_dir: the folder; it may be the one that the adapter is in.

    Raises:
        UserError: it is of another kind, or has what PEFT has no place for.
    """
    with open_source(base) as source:
        learnt = adapter.read(source)
        variant = learnt.variant
        if variant.name not in ("lora", "ia3"):
            raise UserError(f"{adapter.path} cannot be written for PEFT", "that goes for LoRA and IA3")
        plan = plan_import(source, source.config(variant.gpt_class.config_class, **learnt.settings))
        load_variant(build_empty(variant.gpt_class, plan.config), learnt.state, f"{adapter.path}")
        write_peft(
            out_dir,
            learnt.state,
            plan.config,
            base=str(base),
            hf_config=source.hf_config() if source.kind == "hf" else None,
            base_weight=lambda module: _read_tensor(plan, source, f"{module}.weight"),
        )


def _layer(name: str) -> int:
    match = re.match(r"transformer\.h\.(\d+)\.", name)
    return int(match[1]) if match else 0


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a variant's file, on the CPU; nothing but tensors is read."""
    file = TorchFile(path)
    return {name: file.get(name) for name in file.tensors()}


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a variant's file: whole or not at all."""
    with atomic_write(path) as temporary:
        torch.save({"model": {name: tensor.detach().cpu() for name, tensor in state.items()}}, temporary)


def read_hyperparameters(folder: Path, required: bool = True) -> dict[str, Any]:
    """The settings of the run that wrote a folder.

    Args:
        folder: the folder of a finetuned model.
        required: raise when there are none; otherwise they are empty.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / HYPERPARAMETERS
    if not path.is_file():
        if not required:
            return {}
        raise MissingFileError(
            f"{path} does not exist: it says with which rank and scale the weights beside it were trained",
            "give the folder that finetuning wrote, with all of its files",
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged: {error}", "copy it again from where the model was finetuned") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings", "copy it again from where the model was finetuned")
    return content
