# Licensed under the Apache License 2.0, see the LICENSE file.

"""An optimizer from its name, or from a name and arguments."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from litgpt.errors import UserError, first_line

Spec = str | Mapping[str, Any]


def make_optimizer(
    spec: Spec, model: nn.Module, lr_scale: Callable[[str], float] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the parameters that learn.

    Args:
        spec: `"AdamW"`, the full name of a class, or `{"class_path": ..., "init_args": {...}}`.
        model: its frozen parameters are left out.
        lr_scale: gives the factor of a parameter's learning rate by its name. Each group of the optimizer notes its
            own peak as `initial_lr`.

    Raises:
        UserError: an unknown class, or arguments it does not take; nothing to train.
    """
    path, arguments = _read(spec)
    found = _find(path)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(lr_scale(name) if lr_scale else 1.0, []).append(parameter)
    if not groups:
        raise UserError("there is nothing to train: no parameter learns", "choose at least one layer to train")
    try:
        optimizer = found([{"params": params} for params in groups.values()], **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer {path}: {first_line(error)}", f"its arguments here: {arguments}") from error
    for scale, group in zip(groups, optimizer.param_groups, strict=True):
        if scale != 1.0:
            group["lr"] = float(group["lr"]) * scale
        group["initial_lr"] = float(group["lr"])
    return optimizer


def _read(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    unknown = set(spec) - {"class_path", "init_args"}
    if unknown or not isinstance(spec.get("class_path"), str):
        raise UserError(
            f"--optimizer is not understood: {dict(spec)}",
            'write a name, or {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}',
        )
    return spec["class_path"], dict(spec.get("init_args") or {})


def _find(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module or "torch.optim"), name, None)
    except ImportError as error:
        raise UserError(f"--optimizer {path}: {first_line(error)}", f"pip install {module.split('.')[0]}?") from error
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    known = [key for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "Optimizer"]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4) or ["AdamW"]
    raise UserError(f"there is no optimizer {path!r}", f"did you mean {close[0]}? Any class of torch.optim will do")
