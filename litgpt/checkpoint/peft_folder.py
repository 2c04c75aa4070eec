# Licensed under the Apache License 2.0, see the LICENSE file.

"""Adapters in folders of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors`, both ways.

Names and layouts come from the family's table, through `litgpt.checkpoint.peft_layout`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from litgpt.checkpoint.peft_config import CONFIG_FILE, lora_scale, read_peft_config
from litgpt.checkpoint.peft_ia3 import ia3_factors, ia3_state, output_factors
from litgpt.checkpoint.peft_layout import Place, Shapes, Update, part_rows, to_ours, to_theirs
from litgpt.checkpoint.peft_lora import lora_config, lora_settings, lora_state, lora_updates, peft_settings, short_names
from litgpt.checkpoint.plan import plain_state
from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.save import FolderWriter
from litgpt.checkpoint.tables import Table, by_row, summarize, table_for
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError
from litgpt.lora import Config as LoRAConfig

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."  # of every tensor: PEFT wraps the model twice


# Reading


def read_peft(
    folder: Path, config: Config, base_tensor: Callable[[str], Tensor | None] = lambda name: None
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Read a folder of PEFT.

    Args:
        folder: with `adapter_config.json` and the weights.
        config: of the base, as its weights show it.
        base_tensor: gives a tensor of the base by its name in the folder of PEFT, None if it is not known.

    Returns:
        The name of the variant, fields of its config, and its tensors under LitGPT's names.

    Raises:
        UserError: a file is missing or damaged; tensors do not belong to this base, all of them named; or the adapter
            has what cannot be expressed here, also by name.
    """
    peft_config = read_peft_config(folder)
    table, shapes = table_for(config.family), _shapes(config)
    found = _by_map(folder, _read_tensors(folder), table, config, base_tensor)
    if peft_config["peft_type"] == "IA3":
        factors = {name: tensors["ia3_l"] for name, tensors in found.items() if "ia3_l" in tensors}
        _refuse_incomplete(folder, {name: {"ia3_l"} - tensors.keys() for name, tensors in found.items()})
        columns = {name: output_factors(values[:, 0]) for name, values in factors.items() if values.shape[1] == 1}
        rows = {name: values[0] for name, values in factors.items() if name not in columns}
        _check(folder, columns, rows, table, config, shapes)
        inputs = {_ours(name, table, config): values for name, values in rows.items()}
        return "ia3", {}, ia3_state(to_ours(columns, table, config, shapes), inputs, config, shapes, folder)
    needed = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if peft_config.get("use_dora") else set())
    _refuse_incomplete(folder, {name: needed - tensors.keys() for name, tensors in found.items()})
    theirs = {
        name: Update(
            tensors["lora_A"],
            tensors["lora_B"],
            lora_scale(peft_config, name, len(tensors["lora_A"])),
            tensors.get("lora_magnitude_vector"),
        )
        for name, tensors in found.items()
    }
    _check(folder, theirs, {}, table, config, shapes)
    updates = to_ours(theirs, table, config, shapes)
    settings = lora_settings(updates, peft_config, config)
    return "lora", settings, lora_state(updates, lora_config(config, settings))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, without the part of their names that all have."""
    if (folder / WEIGHTS_FILE).is_file():
        file: SafetensorsFile | TorchFile = SafetensorsFile(folder / WEIGHTS_FILE)
    elif (folder / PICKLED_FILE).is_file():
        file = TorchFile(folder / PICKLED_FILE)
    else:
        raise MissingFileError(f"{folder / WEIGHTS_FILE} does not exist", f"it belongs beside {CONFIG_FILE}")
    return {name.removeprefix(_PREFIX): file.get(name) for name in file.tensors()}


_TENSOR = re.compile(r"(?P<module>.+)\.(?P<name>lora_A|lora_B|lora_magnitude_vector|ia3_l)(\.weight)?")
_MERGE = "merge the adapter with PEFT (merge_and_unload) and load the result"


def _by_map(
    folder: Path,
    tensors: Mapping[str, Tensor],
    table: Table,
    config: Config,
    base_tensor: Callable[[str], Tensor | None],
) -> dict[str, dict[str, Tensor]]:
    """The trained tensors of each linear map of the language model, in float32."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown, changed = [], []
    for name, tensor in tensors.items():
        if match := _TENSOR.fullmatch(name):
            if not table.is_dropped(table.canonical(match["module"]), config):
                found.setdefault(match["module"], {})[match["name"]] = tensor.float()
        elif name.endswith(".weight") and "lora_" not in name:  # PEFT saves a copy of a head that has an update
            original = base_tensor(name.replace(".base_layer.", "."))
            if original is None:
                logger.warning("%s has a copy of %s, which cannot be compared with the base's", folder, name)
            elif original.shape != tensor.shape or not torch.equal(original.to(tensor.dtype), tensor):
                changed.append(name)
        else:
            unknown.append(name)
    _refuse(f"{folder} cannot be read", {"of an unknown kind": unknown, "trained as a whole": changed}, _MERGE)
    if not found:
        raise UserError(f"{folder} holds no trained tensors", "was the adapter saved as a whole?")
    return found


def _refuse_incomplete(folder: Path, missing: Mapping[str, set[str]]) -> None:
    names = [f"{module}.{name}" for module, lost in missing.items() for name in sorted(lost)]
    _refuse(f"{folder} is not whole", {"missing": names}, "save the adapter again")


def _check(
    folder: Path,
    rows: Mapping[str, Update],
    inputs: Mapping[str, Tensor],
    table: Table,
    config: Config,
    shapes: Shapes,
) -> None:
    """Refuse what is of maps that the base does not have, or has in other sizes."""
    unknown, wrong = [], []
    for name in (*rows, *inputs):
        links = by_row(table.import_links(table.canonical(f"{name}.weight"), config))
        module = next((module for link in links if (module := _map(link.ours)) in shapes), None)
        if module is None:
            unknown.append(name)
            continue
        piece = links[0].our_view(torch.empty(shapes[module], device="meta"))
        n_out, n_in = links[0].their_shape(tuple(piece.shape))
        if name in inputs:
            fits, given = len(inputs[name]) == n_in, f"{len(inputs[name])} factors on inputs"
        else:
            a, b = rows[name].a, rows[name].b
            fits = len(b) == n_out and len(a) == b.shape[1] and (not len(a) or a.shape[1] == n_in)
            given = f"{list(a.shape)} and {list(b.shape)}" if len(a) else f"{len(b)} factors on outputs"
        if not fits:
            wrong.append(f"{name} {given} for a weight of {[n_out, n_in]}")
    problems = {"not in the model": unknown, "of the wrong shape": wrong}
    _refuse(f"{folder} does not fit the base, a model of the type {config.family!r}", problems, "is it the right base?")


def _refuse(what: str, problems: Mapping[str, Iterable[str]], hint: str) -> None:
    listed = [f"{len(names)} {kind}: {summarize(names)}" for kind, found in problems.items() if (names := list(found))]
    if listed:
        raise UserError(f"{what}: {'; '.join(listed)}", hint)


def _shapes(config: Config) -> Shapes:
    """The shape of every matrix of the plain model, by the name of its map."""
    state = plain_state(config)
    return {name.removesuffix(".weight"): tuple(t.shape) for name, t in state.items() if t.ndim == 2}


# Writing


def write_peft(
    out_dir: Path,
    state: Mapping[str, Tensor],
    config: Config,
    *,
    base: str | None = None,
    hf_config: Mapping[str, Any] | None = None,
    base_weight: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a LoRA or IA3 as a folder of PEFT, which `PeftModel.from_pretrained(model, out_dir)` opens.

    Args:
        out_dir: the folder; it may hold other files.
        state: the tensors of the variant's file.
        config: of the model that they belong to: `litgpt.lora.Config`, or for IA3 the plain one.
        base: where PEFT finds the base: a folder or a repository id.
        hf_config: the base's `config.json`; says whether the language model is part of a larger one.
        base_weight: gives our weight of a map by its name. Needed for DoRA when the family's model fuses maps of which
            some have no update here.

    Raises:
        UserError: the family's model has no map of its own for something that was trained.
    """
    table, shapes = table_for(config.family), _shapes(config)
    _refuse_experts(state, config)
    inputs: dict[str, Tensor] = {}
    if isinstance(config, LoRAConfig):
        updates = lora_updates(state, config)
        if config.use_dora:
            updates |= _lengths_of_others(updates, table, config, shapes, base_weight)
        theirs = {name: update for name, update in to_theirs(updates, table, config, shapes).items() if update.rank}
    else:
        outputs, factors = ia3_factors(state, config, shapes, lambda module: _is_fused(module, table, config))
        theirs = to_theirs(outputs, table, config, shapes)
        inputs = {_theirs(module, table, config)[0]: values for module, values in factors.items()}
    prefix = "model.language_model." if isinstance((hf_config or {}).get("text_config"), Mapping) else table.prefix
    theirs = {_in_memory(name, table, prefix): update for name, update in theirs.items()}
    inputs = {_in_memory(name, table, prefix): values for name, values in inputs.items()}
    whole = [_in_memory(name, table, prefix) for module in shapes for name in _theirs(module, table, config)]
    alone = prefix == table.prefix  # parts of a larger model may have maps of the same name

    def short(names: Iterable[str]) -> list[str]:
        return short_names(list(names), whole) if alone else list(names)

    if isinstance(config, LoRAConfig):
        settings = peft_settings(theirs, config) | {"target_modules": short(theirs)}
    else:
        settings = {"peft_type": "IA3", "init_ia3_weights": True, "feedforward_modules": short(inputs)}
        settings["target_modules"] = short(theirs) + settings["feedforward_modules"]
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    dtype = next(iter(state.values())).dtype
    tensors = _their_tensors(theirs, inputs)
    with FolderWriter(out_dir) as folder:
        folder.write_json(CONFIG_FILE, {**settings, **common, "fan_in_fan_out": False, "modules_to_save": None})
        with folder.file(WEIGHTS_FILE) as path:
            save_file({k: v.to(dtype).contiguous() for k, v in tensors.items()}, path, {"format": "pt"})


def _their_tensors(theirs: Mapping[str, Update], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder under PEFT's names."""
    tensors = {f"{_PREFIX}{name}.ia3_l": values[None] for name, values in inputs.items()}
    for name, update in theirs.items():
        if not update.rank:
            assert update.magnitude is not None
            tensors[f"{_PREFIX}{name}.ia3_l"] = update.magnitude[:, None]
            continue
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = update.a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = update.b
        if update.magnitude is not None:
            tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = update.magnitude
    return tensors


def _refuse_experts(state: Mapping[str, Tensor], config: Config) -> None:
    """Refuse experts, which are no linear maps of their own in Hugging Face models."""
    experts = {"of experts": [name for name in state if ".experts." in name]}
    hint = "merge the adapter and export the merged model, or train without the experts (lora_targets)"
    _refuse(f"PEFT has no place in models of the type {config.family!r} for tensors", experts, hint)


def _lengths_of_others(
    updates: Mapping[Place, Update],
    table: Table,
    config: Config,
    shapes: Shapes,
    base_weight: Callable[[str], Tensor] | None,
) -> dict[Place, Update]:
    """Updates of rank 0 with the lengths of the rows that DoRA leaves alone in maps which the family fuses."""
    others = {}
    for module in dict.fromkeys(module for module, _ in updates):
        rows = part_rows(module, shapes[module][0], config)
        missing = [part for part in rows if (module, part) not in updates]
        if not missing or not _is_fused(module, table, config):
            continue
        if base_weight is None:
            raise UserError(
                f"DoRA on a part of {module}, which models of the type {config.family!r} fuse, needs the base",
                "say where the base is",
            )
        weight = base_weight(module).float()
        nothing = Update(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, 0), 1.0)
        for part in missing:
            lengths = weight[rows[part]].norm(dim=1)
            others[module, part] = nothing._replace(b=weight.new_zeros(len(lengths), 0), magnitude=lengths)
    return others


# Names


def _map(tensor: str) -> str:
    """The name of a linear map, from that of its weight."""
    return tensor.removesuffix(".weight")


def _ours(name: str, table: Table, config: Config) -> str:
    """The name of our map that holds one of the family's model."""
    return _map(table.import_links(table.canonical(f"{name}.weight"), config)[0].ours)


def _theirs(module: str, table: Table, config: Config) -> list[str]:
    """The names of the maps of the family's model that hold one of ours."""
    return list(dict.fromkeys(_map(link.theirs) for link in table.export_links(f"{module}.weight", config)))


def _is_fused(module: str, table: Table, config: Config) -> bool:
    """Whether the family has one map for all parts of one of ours."""
    return len(_theirs(module, table, config)) == 1


def _in_memory(name: str, table: Table, prefix: str) -> str:
    """The name that a map has in the model of transformers, where the file's is another."""
    if name == "embed_out":  # GPT-NeoX's head, until transformers 5
        return "lm_head"
    return prefix + name.removeprefix(table.prefix) if name.startswith(table.prefix) else name
