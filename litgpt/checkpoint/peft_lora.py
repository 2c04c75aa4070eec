# Licensed under the Apache License 2.0, see the LICENSE file.

"""LoRA of ours <-> updates of parts, and the settings of either side under which they are the same."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from litgpt.checkpoint.peft_layout import Place, Update, with_rank
from litgpt.checkpoint.plan import build_empty
from litgpt.config import Config
from litgpt.lora import GPT, LoRALayer, plain_lora
from litgpt.lora import Config as LoRAConfig

_SWITCHES = ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head", "lora_router")
_OF_PART = {"q": "query", "k": "key", "v": "value"}


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
    layers: dict[str, LoRALayer] = {}
    for name, layer in build_empty(GPT, config).named_modules():
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


def lora_settings(updates: Mapping[Place, Update], peft_config: Mapping[str, Any], config: Config) -> dict[str, Any]:
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
        switched = _places(lora_config(config, {"lora_r": 1, switch: True}))
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


def lora_config(config: Config, settings: Mapping[str, Any]) -> LoRAConfig:
    """The config of a plain model with further fields."""
    return LoRAConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}, **settings)


def peft_settings(theirs: Mapping[str, Update], config: LoRAConfig) -> dict[str, Any]:
    """The fields of `adapter_config.json` for updates by the names of their maps, all of one scale.

    What the tensors have more or less of than most is in the patterns.
    """
    scale = next(iter(theirs.values())).scale
    ranks = Counter(update.rank for update in theirs.values())
    rank = ranks.most_common(1)[0][0]
    other = {
        key: value
        for value in ranks
        if value != rank
        for key in short_names([name for name, update in theirs.items() if update.rank == value], list(theirs))
    }
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _alpha(scale, rank, config.use_rslora),
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": other,
        "alpha_pattern": {key: _alpha(scale, value, config.use_rslora) for key, value in other.items()},
        "bias": "none",
        "init_lora_weights": True,
    }


def short_names(names: Sequence[str], everything: Sequence[str]) -> list[str]:
    """The last parts of names, where among `everything` those mean exactly these names, and else the whole."""
    others = {name.rpartition(".")[2] for name in set(everything) - set(names)}
    return list(dict.fromkeys(name if (own := name.rpartition(".")[2]) in others else own for name in names))
