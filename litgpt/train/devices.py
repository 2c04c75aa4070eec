# Licensed under the Apache License 2.0, see the LICENSE file.

"""One device or several: starting, dividing a model, and putting what is divided together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from litgpt.errors import UsageError
from litgpt.runtime import get_default_supported_precision, pick_device, pick_precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from litgpt.train.objective import Objective


def make_fabric(
    devices: int | str, num_nodes: int, precision: str, strategy: str, partial: bool, experiment_logger: Any = None
) -> Fabric:
    """What runs the training on one device or several.

    Args:
        devices: how many on each machine, or "auto" for all.
        num_nodes: how many machines.
        precision: from `pick_training_precision`.
        strategy: ddp, fsdp, or auto: ddp where most of the model is frozen, fsdp elsewhere.
        partial: most of the model is frozen.
        experiment_logger: a logger of Lightning's.

    Raises:
        UsageError: devices is no number.
    """
    count = max(1, torch.cuda.device_count()) if devices == "auto" else _as_count(devices)
    chosen = {"auto": "ddp" if partial else "fsdp"}.get(strategy, strategy)
    several: Any = "auto"
    if (world_size := count * num_nodes) > 1:
        several = ModelParallelStrategy(divide, world_size, 1) if chosen == "fsdp" else DDPStrategy()
    plain: Any = precision  # Fabric has its names spelt out as a type
    return Fabric(
        devices=count,
        num_nodes=num_nodes,
        precision=plain,
        strategy=several,
        loggers=[experiment_logger] if experiment_logger else [],
    )


def _as_count(devices: int | str) -> int:
    try:
        count = int(devices)
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"--devices takes a number of at least 1, or auto, not {devices!r}")
    return count


def pick_training_precision(precision: str | None, partial: bool) -> str:
    """The precision to train in, as Lightning writes it.

    Under a 16-bit precision the frozen part of a model is held in 16 bits and computed in 16 bits; what learns is held
    in 32 bits, so that small updates are not lost. Only a fully trained model under bf16-true or 16-true is held in 16
    bits throughout.

    Args:
        precision: what was asked for; None is bf16 where the hardware computes in it, else fp32.
        partial: most of the model is frozen.
    """
    if precision is None or precision == "auto":
        return get_default_supported_precision(training=True)
    chosen = pick_precision(precision, pick_device())
    return chosen.replace("16-true", "16-mixed") if partial else chosen


def divide(objective: Objective, mesh: DeviceMesh) -> Objective:
    """Divide a model over devices, each block on its own (FSDP2).

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    data_mesh = mesh["data_parallel"]
    for block in objective.gpt.transformer.h:
        fully_shard(block, mesh=data_mesh)
    # Embedding, final norm and head; they stay whole through the step, as the loss reads the head on its own
    fully_shard(cast(nn.Module, objective.gpt), mesh=data_mesh, reshard_after_forward=False)
    register_fsdp_forward_method(objective.gpt, "hidden")
    return objective


def is_divided(model: nn.Module) -> bool:
    """Whether each device holds only a part of the model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(state: Any) -> Any:
    """The same nested state with every divided tensor put together; all devices take part."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), state)


def divided_like(state: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, each divided as the tensor of that name is."""
    return {name: _like(tensor, places.get(name)) for name, tensor in state.items()}


def divided_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with its tensors divided as the parameters are that they belong to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        **state,
        "state": {
            index: {
                name: _like(value, parameters[index]) if isinstance(value, Tensor) and value.dim() else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        },
    }


def _like(tensor: Tensor, place: Tensor | None) -> Tensor:
    if not isinstance(place, DTensor) or isinstance(tensor, DTensor) or tensor.shape != place.shape:
        return tensor
    return distribute_tensor(tensor.to(place.device), place.device_mesh, place.placements)
