# Licensed under the Apache License 2.0, see the LICENSE file.

"""Adapters in folders of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors`, both ways.

Names and layouts come from the family's table, through `litgpt.checkpoint.peft_layout`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from litgpt.checkpoint.peft_config import CONFIG_FILE, lora_scale, read_peft_config
from litgpt.checkpoint.peft_layout import Place, Shapes, Update, part_rows, to_ours, to_theirs, with_rank
from litgpt.checkpoint.plan import build_empty, plain_state
from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.save import FolderWriter
from litgpt.checkpoint.tables import Link, Table, summarize, table_for
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError
from litgpt.lora import GPT as LoRAGPT
from litgpt.lora import Config as LoRAConfig
from litgpt.lora import LoRALayer, plain_lora

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."  # of every tensor: PEFT wraps the model twice
_SWITCHES = ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head", "lora_router")
_OF_PART = {"q": "query", "k": "key", "v": "value"}


# Our tensors <-> updates of parts


def lora_updates(state: Mapping[str, Tensor], config: LoRAConfig) -> dict[Place, Update]:
    """The update of every part of the model that has one, in float32.

    Args:
        state: the tensors of a LoRA file.
        config: the config of the model that they belong to.
    """
    updates, state = {}, plain_lora(state)
    for module, layer in _lora_modules(config).items():
        parts, b = _parts(layer), state[f"{module}.lora_B"].float()
        widths = list(parts.values())
        lengths: list[Tensor | None] = [None] * len(parts)
        if layer.use_dora:
            lengths = list(state[f"{module}.lora_magnitude"].float().split(widths))
        a_of = state[f"{module}.lora_A"].float().split(b.shape[1])
        for part, a, b_of, length in zip(parts, a_of, b.split(widths), lengths, strict=True):
            updates[module, part] = Update(a, b_of, layer.scaling, length)
    return updates


def lora_state(updates: Mapping[Place, Update], config: LoRAConfig) -> dict[str, Tensor]:
    """The tensors of a LoRA file for updates of rank `config.lora_r` or less; a part without one gets zeros."""
    state = {}
    for module, layer in _lora_modules(config).items():
        found = []
        for part, width in _parts(layer).items():
            update = updates.get((module, part))
            if update is None:
                n_in = layer.lora_A.shape[-1]
                update = Update(torch.zeros(0, n_in), torch.zeros(width, 0), layer.scaling)
            found.append(with_rank(update, layer.r, layer.scaling))
        state[f"{module}.lora_A"] = torch.cat([update.a for update in found])
        state[f"{module}.lora_B"] = torch.cat([update.b for update in found])
        magnitudes = [update.magnitude for update in found if update.magnitude is not None]
        if len(magnitudes) == len(found):
            state[f"{module}.lora_magnitude"] = torch.cat(magnitudes)
    return state


def _lora_modules(config: LoRAConfig) -> dict[str, LoRALayer]:
    """The layers with updates, without storage, by the name of the map; each of stacked experts counts."""
    layers = {}
    for name, layer in build_empty(LoRAGPT, config).named_modules():
        if not isinstance(layer, LoRALayer) or not any(layer.enabled):
            continue
        if layer.lora_A.ndim == 2:
            layers[name] = layer
        else:
            stem, _, own = name.rpartition(".")
            layers.update({f"{stem}.{expert}.{own}": layer for expert in range(len(layer.lora_A))})
    return layers


def _parts(layer: LoRALayer) -> dict[str, int]:
    """The parts of a map that have an update, with their widths."""
    parts = _OF_PART if len(layer.widths) == len(_OF_PART) else ("",)
    return {part: width for part, width, on in zip(parts, layer.widths, layer.enabled, strict=True) if on}


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
    table, tensors = table_for(config.family), _read_tensors(folder)
    theirs = _their_updates(folder, tensors, peft_config, table, config, base_tensor)
    shapes = _shapes(config)
    _check(folder, theirs, table, config, shapes)
    updates = to_ours(theirs, table, config, shapes)
    settings = _settings(updates, peft_config, config)
    return "lora", settings, lora_state(updates, _lora_config(config, settings))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, without the part of their names that all have."""
    if (folder / WEIGHTS_FILE).is_file():
        file: SafetensorsFile | TorchFile = SafetensorsFile(folder / WEIGHTS_FILE)
    elif (folder / PICKLED_FILE).is_file():
        file = TorchFile(folder / PICKLED_FILE)
    else:
        raise MissingFileError(f"{folder / WEIGHTS_FILE} does not exist", f"it belongs beside {CONFIG_FILE}")
    return {name.removeprefix(_PREFIX): file.get(name) for name in file.tensors()}


_TENSOR = re.compile(r"(?P<module>.+)\.(?P<name>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")


def _their_updates(
    folder: Path,
    tensors: Mapping[str, Tensor],
    peft_config: Mapping[str, Any],
    table: Table,
    config: Config,
    base_tensor: Callable[[str], Tensor | None],
) -> dict[str, Update]:
    """The updates of a folder by the names of their linear maps."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown, changed = [], []
    for name, tensor in tensors.items():
        if match := _TENSOR.fullmatch(name):
            found.setdefault(match["module"], {})[match["name"]] = tensor.float()
        elif name.endswith(".weight") and "lora_" not in name:  # PEFT saves a copy of a head that has an update
            original = base_tensor(name.replace(".base_layer.", "."))
            if original is None:
                logger.warning("%s has a copy of %s, which cannot be compared with the base's", folder, name)
            elif original.shape != tensor.shape or not torch.equal(original.to(tensor.dtype), tensor):
                changed.append(name)
        else:
            unknown.append(name)
    needed = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if peft_config.get("use_dora") else set())
    incomplete = [f"{module}.{name}" for module, parts in found.items() for name in sorted(needed - parts.keys())]
    problems = {"of an unknown kind": unknown, "missing": incomplete, "trained as a whole": changed}
    _refuse(f"{folder} cannot be read", problems, "merge the adapter with PEFT (merge_and_unload) and load the result")
    if not found:
        raise UserError(f"{folder} holds no trained tensors", "was the adapter saved as a whole?")
    return {
        module: Update(
            parts["lora_A"],
            parts["lora_B"],
            lora_scale(peft_config, module, len(parts["lora_A"])),
            parts.get("lora_magnitude_vector"),
        )
        for module, parts in found.items()
        if not table.is_dropped(table.canonical(module), config)
    }


def _check(folder: Path, theirs: Mapping[str, Update], table: Table, config: Config, shapes: Shapes) -> None:
    """Refuse updates of maps that the base does not have, or has in other sizes."""
    unknown, wrong = [], []
    for name, update in theirs.items():
        links = table.import_links(table.canonical(f"{name}.weight"), config)
        shape = next(
            (shapes[module] for link in links if (module := link.ours.removesuffix(".weight")) in shapes), None
        )
        if shape is None:
            unknown.append(name)
            continue
        n_out, n_in = links[0].their_shape(tuple(links[0].our_view(torch.empty(shape, device="meta")).shape))
        if (len(update.b), update.a.shape[1]) != (n_out, n_in) or update.a.shape[0] != update.b.shape[1]:
            given = f"{list(update.a.shape)} and {list(update.b.shape)}"
            wrong.append(f"{name} {given} for a weight of {[n_out, n_in]}")
    problems = {"not in the model": unknown, "of the wrong shape": wrong}
    _refuse(f"{folder} does not fit the base, a model of the type {config.family!r}", problems, "is it the right base?")


def _refuse(what: str, problems: Mapping[str, Iterable[str]], hint: str) -> None:
    listed = [f"{len(names)} {kind}: {summarize(names)}" for kind, found in problems.items() if (names := list(found))]
    if listed:
        raise UserError(f"{what}: {'; '.join(listed)}", hint)


def _settings(updates: Mapping[Place, Update], peft_config: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of LoRA's config under which the updates fit a model: one rank and one scale for all."""
    rank = max(update.rank for update in updates.values())
    scale = Counter(update.scale for update in updates.values()).most_common(1)[0][0]
    use_rslora = bool(peft_config.get("use_rslora"))
    settings = {
        "lora_r": rank,
        "lora_alpha": _alpha(scale, rank, use_rslora),
        "lora_dropout": peft_config.get("lora_dropout", 0.0),
        "use_rslora": use_rslora,
        "use_dora": bool(peft_config.get("use_dora")),
    }
    return settings | _switches(set(updates), config)


def _alpha(scale: float, rank: int, use_rslora: bool) -> float:
    alpha = scale * (rank**0.5 if use_rslora else rank)
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha


def _switches(places: set[Place], config: Config) -> dict[str, Any]:
    """The switches of LoRA's config that stand for exactly these parts, or patterns where none do."""
    chosen: dict[str, Any] = {}
    covered: set[Place] = set()
    for switch in _SWITCHES:
        switched = _places(_lora_config(config, {"lora_r": 1, switch: True}))
        if chosen.setdefault(switch, bool(switched) and switched <= places):
            covered |= switched
    if covered == places:
        return chosen
    layers: dict[str, set[int]] = {}
    for module, part in places:
        match = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
        label = re.sub(r"\.experts\.\d+", ".experts", match[2]) if match else module
        label = f"{label.rpartition('.')[0]}.{_OF_PART[part]}" if part else label
        layers.setdefault(label, set()).update([int(match[1])] if match else [])
    targets = []
    for label, found in sorted(layers.items()):
        numbers = r"\d+" if len(found) == config.n_layer else f"({'|'.join(map(str, sorted(found)))})"
        targets.append(rf"h\.{numbers}\.{re.escape(label)}" if found else re.escape(label))
    return {"lora_targets": targets, "lora_router": any(module.endswith(".mlp.gate") for module, _ in places)}


def _places(config: LoRAConfig) -> set[Place]:
    return {(module, part) for module, layer in _lora_modules(config).items() for part in _parts(layer)}


def _lora_config(config: Config, settings: Mapping[str, Any]) -> LoRAConfig:
    return LoRAConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}, **settings)


def _shapes(config: Config) -> Shapes:
    """The shape of every matrix of the plain model, by the name of its map."""
    state = plain_state(config)
    return {name.removesuffix(".weight"): tuple(t.shape) for name, t in state.items() if t.ndim == 2}


# Writing


def write_peft(
    out_dir: Path,
    state: Mapping[str, Tensor],
    config: LoRAConfig,
    *,
    base: str | None = None,
    hf_config: Mapping[str, Any] | None = None,
    base_weight: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a LoRA as a folder of PEFT, which `PeftModel.from_pretrained(model, out_dir)` opens.

    Args:
        out_dir: the folder; it may hold other files.
        state: the tensors of the LoRA file.
        config: the config of the model that they belong to.
        base: where PEFT finds the base: a folder or a repository id.
        hf_config: the base's `config.json`; says whether the language model is part of a larger one.
        base_weight: gives our weight of a map by its name. Needed for DoRA when the family's model fuses maps of which
            some have no update here.

    Raises:
        UserError: the family's model has no map of its own for something that was trained.
    """
    table, shapes = table_for(config.family), _shapes(config)
    updates = lora_updates(state, config)
    _refuse_stacked(updates, table, config)
    if config.use_dora:
        updates |= _lengths_of_others(updates, table, config, shapes, base_weight)
    prefix = "model.language_model." if isinstance((hf_config or {}).get("text_config"), Mapping) else table.prefix
    theirs = {
        _name_in_memory(name, table, prefix): update
        for name, update in to_theirs(updates, table, config, shapes).items()
    }
    dtype = next(iter(state.values())).dtype
    tensors = {}
    whole = [_name_in_memory(name, table, prefix) for module in shapes for name in _their_names(module, table, config)]
    targets = _short(list(theirs), whole) if prefix == table.prefix else list(theirs)
    for name, update in theirs.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = update.a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = update.b
        if update.magnitude is not None:
            tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = update.magnitude
    with FolderWriter(out_dir) as folder:
        folder.write_json(CONFIG_FILE, _peft_config(theirs, targets, config, base))
        with folder.file(WEIGHTS_FILE) as path:
            save_file({k: v.to(dtype).contiguous() for k, v in tensors.items()}, path, {"format": "pt"})


def _their_names(module: str, table: Table, config: Config) -> list[str]:
    """The names of the maps of the family's model that hold one of ours."""
    return list(dict.fromkeys(link.theirs.removesuffix(".weight") for link in _links(module, table, config)))


def _links(module: str, table: Table, config: Config) -> list[Link]:
    return table.export_links(f"{module}.weight", config)


def _refuse_stacked(updates: Mapping[Place, Update], table: Table, config: Config) -> None:
    """Refuse experts, which are no linear maps of their own in Hugging Face models."""
    experts = [f"{module}.lora_A" for module, _ in updates if ".experts." in module]
    hint = "merge the adapter and export the merged model, or train without the experts (lora_targets)"
    _refuse(f"PEFT has no place in models of the type {config.family!r}", {"updates of experts": experts}, hint)


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
        if not missing or len(_their_names(module, table, config)) > 1:
            continue
        if base_weight is None:
            raise UserError(
                f"DoRA on a part of {module}, which models of the type {config.family!r} fuse, needs the base",
                "say where the base is",
            )
        weight = base_weight(module).float()
        for part in missing:
            lengths = weight[rows[part]].norm(dim=1)
            others[module, part] = Update(
                weight.new_zeros(0, weight.shape[1]), weight.new_zeros(len(lengths), 0), 1.0, lengths
            )
    return others


def _name_in_memory(name: str, table: Table, prefix: str) -> str:
    """The name that a map has in the model of transformers, where the file's is another."""
    if name == "embed_out":  # GPT-NeoX's head, until transformers 5
        return "lm_head"
    return prefix + name.removeprefix(table.prefix) if name.startswith(table.prefix) else name


def _short(names: Sequence[str], everything: Iterable[str]) -> list[str]:
    """The last parts of names, where those mean exactly these names, and else the whole."""
    others = {name.rpartition(".")[2] for name in set(everything) - set(names)}
    return list(dict.fromkeys(name if (own := name.rpartition(".")[2]) in others else own for name in names))


def _peft_config(
    theirs: Mapping[str, Update], targets: list[str], config: LoRAConfig, base: str | None
) -> dict[str, Any]:
    """Content of `adapter_config.json`. What the tensors have more or less of than most is in the patterns."""
    scale = next(iter(theirs.values())).scale  # one for all
    ranks = Counter(update.rank for update in theirs.values())
    rank = ranks.most_common(1)[0][0]
    other = {
        key: value
        for value in ranks
        if value != rank
        for key in _short([name for name, update in theirs.items() if update.rank == value], theirs)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _alpha(scale, rank, config.use_rslora),
        "lora_dropout": config.lora_dropout,
        "target_modules": targets,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": other,
        "alpha_pattern": {key: _alpha(scale, value, config.use_rslora) for key, value in other.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
