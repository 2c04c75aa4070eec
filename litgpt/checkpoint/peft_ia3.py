# Licensed under the Apache License 2.0, see the LICENSE file.

"""IA3 of ours <-> factors by the names of linear maps.

A factor on each output is one entry a row of the weight, so it moves like the lengths of rows in DoRA: here it is an
update of rank 0 with a "magnitude". Factors on inputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from litgpt.checkpoint.peft_layout import Place, Shapes, Update, part_rows
from litgpt.checkpoint.plan import build_empty
from litgpt.checkpoint.tables import summarize
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.ia3 import GPT

_SUFFIX = ".ia3_scale"


def output_factors(values: Tensor) -> Update:
    """Factors on the outputs of a map, `(out,)`, to be carried between layouts."""
    return Update(values.new_zeros(0, 0), values.new_zeros(len(values), 0), 1.0, values)


def ia3_factors(
    state: Mapping[str, Tensor], config: Config, shapes: Shapes, is_fused: Callable[[str], bool]
) -> tuple[dict[Place, Update], dict[str, Tensor]]:
    """The factors on outputs by part, and those on inputs by map, in float32.

    Args:
        state: the tensors of an IA3 file.
        config: the model's sizes.
        shapes: of our weights.
        is_fused: whether the family has one map for what is several parts of the named one of ours.
    """
    outputs: dict[Place, Update] = {}
    inputs: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, values = name.removesuffix(_SUFFIX), tensor.float()
        if module.endswith(".proj"):
            inputs[module] = values
            continue
        n_rows = shapes[module][0]
        whole = torch.cat((torch.ones(n_rows - len(values)), values))  # the queries have none
        for part, rows in part_rows(module, n_rows, config).items():
            if part != "q" or is_fused(module):
                outputs[module, part] = output_factors(whole[rows])
    return outputs, inputs


def ia3_state(
    outputs: Mapping[Place, Update], inputs: Mapping[str, Tensor], config: Config, shapes: Shapes, folder: Path
) -> dict[str, Tensor]:
    """The tensors of an IA3 file; what has no factors gets ones.

    Raises:
        UserError: there are factors where our IA3 has none, all of them named.
    """
    places = {
        name.removesuffix(_SUFFIX): torch.ones(tensor.shape)
        for name, tensor in build_empty(GPT, config).state_dict().items()
        if name.endswith(_SUFFIX)
    }
    misplaced = [f"inputs of {module}" for module in inputs if module not in places or not module.endswith(".proj")]
    for (module, part), update in outputs.items():
        assert update.magnitude is not None
        rows = part_rows(module, shapes[module][0], config)[part]
        first = shapes[module][0] - len(places[module]) if module in places else 0
        if part == "q" and bool((update.magnitude == 1).all()):
            continue
        if part == "q" or module not in places or module.endswith(".proj"):
            misplaced.append(f"outputs of {module}" + (f" ({part})" if part else ""))
        else:
            places[module][rows.start - first : rows.stop - first] = update.magnitude
    _refuse_misplaced(misplaced, folder)
    return {f"{module}{_SUFFIX}": inputs.get(module, tensor) for module, tensor in places.items()}


def _refuse_misplaced(misplaced: Iterable[str], folder: Path) -> None:
    if listed := summarize(misplaced):
        raise UserError(
            f"{folder} has factors where IA3 has none here, on {listed}",
            "it can be keys, values and inputs of the last map of feed-forward networks; merge the rest with PEFT",
        )
