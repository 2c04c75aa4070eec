# Licensed under the Apache License 2.0, see the LICENSE file.

"""Several LoRA adapters on one model in memory: switched as a whole, or one for each row of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from litgpt.errors import UserError
from litgpt.lora import GPT, QKV, Config, lora_layers, plain_lora, unmerge_lora_weights
from litgpt.lora_layers import LoRALayer, LoRAQKVLinear, Rows, lora_scaling
from litgpt.peft import Adapters

_Tensors = dict[str, Tensor]


class LoRAAdapters(Adapters):
    """Adapters of different ranks, scales and places on one model.

    The model decides what fits: it has LoRA wherever one of them has it, a rank that none of them exceeds, `use_dora`
    if they do, and the default `lora_init` (an adapter that began with PiSSA counts with twice its rank). Make it when
    the base is loaded and nothing was trained yet.

    Args:
        model: a model with LoRA.
    """

    model: GPT

    def add(self, name: str, state: Mapping[str, Tensor], config: Config | None = None) -> None:
        """Keep an adapter under a name; one of that name is replaced.

        Args:
            name: to use it by.
            state: its tensors, as its file has them.
            config: the config that it was trained with, default the model's.

        Raises:
            UserError: it does not fit the model.
        """
        self._settle()
        super().add(name, state if config is None else self._fitted(name, state, config))

    def use(self, name: str | None) -> None:
        """Switch to an adapter; None is the model without any. Undoes merging and `use_rows`.

        Raises:
            ValueError: there is no adapter of that name, or what was merged cannot be undone.
        """
        self._settle()
        super().use(name)

    @torch.no_grad()
    def use_rows(self, names: Sequence[str | None]) -> None:
        """Give every row of the batches to come its own adapter, for generating.

        Args:
            names: the adapter of each row, None for none.

        Raises:
            ValueError: there is no adapter of such a name.
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        layers = lora_layers(self.model)
        stacks: list[dict[str, list[Tensor]]] = [{} for _ in layers]
        for name in numbers:
            self.use(name)
            for stack, layer in zip(stacks, layers, strict=True):
                ratio = layer.ratio()
                for key, value in (layer.tensors() | ({} if ratio is None else {"ratio": ratio})).items():
                    stack.setdefault(key, []).append(value.detach().clone())
        self.use(None)
        index = torch.tensor([numbers[name] for name in names], device=self.model.transformer.wte.weight.device)
        rows = Rows(index, {number: (index == number).nonzero()[:, 0] for number in numbers.values()})
        for stack, layer in zip(stacks, layers, strict=True):
            layer.bank = {key: torch.stack(values) for key, values in stack.items()}
            layer.rows = rows

    def _settle(self) -> None:
        """Leave the model with one adapter in its parameters and nothing merged."""
        unmerge_lora_weights(self.model)
        for layer in lora_layers(self.model):
            layer.rows, layer.bank = None, {}

    def _fitted(self, name: str, state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        """The adapter as this model would have it: of its rank and scale, with all of its layers and their parts."""
        if config.use_dora != self.model.config.use_dora:
            raise UserError(f"adapter {name!r} {'has' if config.use_dora else 'has no'} DoRA, unlike the model")
        fitted, theirs = {key: value.clone() for key, value in self._state(None).items()}, plain_lora(state)
        scaling = lora_scaling(config.lora_r, config.lora_alpha, config.use_rslora)
        for stem in {key.rpartition(".")[0] for key in theirs}:
            if f"{stem}.lora_A" not in fitted:
                raise UserError(f"adapter {name!r} has an update of {stem}, the model has none there")
            layer = self.model.get_submodule(re.sub(r"\.experts\.\d+\.", ".experts.", stem))
            assert isinstance(layer, LoRALayer)
            enabled = [True]
            if isinstance(layer, LoRAQKVLinear):
                enabled = [config.has_lora(stem.removeprefix("transformer."), part) for part in QKV]
            given = {key: value for key in _NAMES if (value := theirs.get(f"{stem}.{key}")) is not None}
            given["lora_B"] = given["lora_B"] * (scaling / layer.scaling)
            ours = {key: fitted[f"{stem}.{key}"] for key in given}
            try:
                _fit(layer, enabled, ours, given)
            except ValueError as error:
                raise UserError(f"adapter {name!r} does not fit {stem}: {error}") from error
        return fitted


_NAMES = ("lora_A", "lora_B", "lora_magnitude")


def _fit(layer: LoRALayer, enabled: Sequence[bool], ours: _Tensors, theirs: _Tensors) -> None:
    """Write the tensors of one map into those of a larger rank and more parts, which hold no update yet."""
    rank, begin, number = theirs["lora_B"].size(1), 0, 0
    if rank > layer.r:
        raise ValueError(f"its rank is {rank}, the model's {layer.r}")
    widths = [width for width, on in zip(layer.widths, enabled, strict=True) if on]
    parts_a, parts_b = iter(theirs["lora_A"].split(rank)), iter(theirs["lora_B"].split(widths))
    lengths = iter(theirs["lora_magnitude"].split(widths) if layer.use_dora else ())
    for width, has, on in zip(layer.widths, layer.enabled, enabled, strict=True):
        if on and not has:
            raise ValueError("it updates a part of queries, keys and values that has no update in the model")
        if on:
            ours["lora_A"][number * layer.r :][: layer.r].zero_()[:rank] = next(parts_a)
            ours["lora_B"][begin : begin + width, :rank] = next(parts_b)
            if layer.use_dora:
                ours["lora_magnitude"][begin : begin + width] = next(lengths)
        begin, number = begin + width * has, number + has
