# Licensed under the Apache License 2.0, see the LICENSE file.

"""What one way of finetuning differs in; everything else is the engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from litgpt.config import Config

if TYPE_CHECKING:
    from litgpt.model import GPT


def everything(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model."""
    return dict(model.state_dict())


def load_everything(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Read all tensors of a model, no more and no fewer."""
    model.load_state_dict(dict(state))


@dataclass(frozen=True)
class Method:
    """A way of finetuning.

    Args:
        name: as in `finetune_<name>`.
        gpt_class: the model that is trained.
        file_name: the file of what was learnt, in the folders of checkpoints.
        mark_trainable: chooses the parameters that learn; the others are frozen.
        state: the tensors that belong in the file.
        load_state: reads them back into a model; strict.
        lr_scale: how much faster a parameter, by its name, learns than the optimizer's rate says.
        finalise: called after training with the finished folder and the path of the base checkpoint.
    """

    name: str
    gpt_class: type[GPT]
    file_name: str
    mark_trainable: Callable[[Any], None]
    state: Callable[[Any], dict[str, Tensor]] = everything
    load_state: Callable[[Any, Mapping[str, Tensor]], None] = load_everything
    lr_scale: Callable[[str], float] | None = None
    finalise: Callable[[Path, Path], None] | None = None

    def config(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a command's arguments that are fields of the model's config which the plain one lacks."""
        plain = {f.name for f in fields(Config)}
        return {
            f.name: arguments[f.name] for f in fields(self.gpt_class.config_class) if f.name in arguments.keys() - plain
        }

    @property
    def partial(self) -> bool:
        """Whether the file holds only a part of the model, on top of a base."""
        return self.state is not everything
