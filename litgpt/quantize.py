# Licensed under the Apache License 2.0, see the LICENSE file.

"""Models whose frozen weights are stored in 4 or 8 bits. Importing this module does not import torch.

The linear maps of the blocks are replaced one by one, while a checkpoint is read or in a model that is there already.
The embedding, the head and the routers of experts keep their dtype: they are few bytes and their errors cost most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from litgpt.constants import require
from litgpt.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from litgpt.model import GPT
    from litgpt.quantized_linear import QuantizedLinear

logger = logging.getLogger(__name__)

Quantization = Literal["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8", "torchao.int8"]
# Frozen bases of LoRA and of the adapters. LitGPT calls 8 bits by another name there; both mean the same here.
TrainingQuantization = Literal[Quantization, "bnb.int8-training"]

KEPT = ("lm_head", "gate")  # names of modules that keep their dtype
_PACKAGES = {"bnb": "bitsandbytes", "torchao": "torchao"}
_PRECISIONS = ("bf16-true", "16-true", "32-true")


def check_quantization(quantize: str, precision: str | None = None) -> None:
    """Raise if a model cannot be quantized that way here; call it before anything is loaded.

    Args:
        quantize: one of `TrainingQuantization`.
        precision: what the rest of the model is held and computed in, as `pick_precision` writes it; None: any.

    Raises:
        UserError: an unknown name, a package that is not installed, or a precision that does not go with it.
    """
    if quantize not in (*_names(Quantization), "bnb.int8-training"):
        raise UserError(f"unknown quantization {quantize!r}", f"use one of {', '.join(_names(Quantization))}")
    if precision is not None and precision not in _PRECISIONS:
        raise UserError(
            f"--quantize {quantize} does not go with --precision {precision}",
            "use bf16-true, 16-true or 32-true: the weights that are not quantized are held and computed in it",
        )
    require(_PACKAGES[quantize.partition(".")[0]], f"--quantize {quantize}")


def load_quantized(
    path: str | Path,
    quantize: str,
    *,
    device: torch.device | str | None = None,
    read: Callable[..., GPT] | None = None,
    **options: Any,
) -> GPT:
    """Load a checkpoint and quantize each weight as soon as it has been read.

    Memory holds the quantized model and the largest weight, never all weights in 16 bits: on the CPU, pages of memory
    that nothing was written to take no room, and they are given back tensor by tensor.

    Args:
        path: see `litgpt.checkpoint.convert.load_model`.
        quantize: see `check_quantization`.
        device: where the model goes, default the CPU.
        read: what reads the checkpoint, if not `load_model`: a function with its options.
        **options: of `load_model`; `dtype` is that of the weights that are not quantized.

    Raises:
        UserError: what `load_model` or `check_quantization` raise.
    """
    from litgpt.checkpoint.convert import load_model

    check_quantization(quantize)
    replace = _replacer(quantize, device or "cpu")
    read = load_model if read is None else read
    model = read(path, filled=lambda model, name: _replace_filled(model, name, replace), **options)
    _report(model, quantize)
    return model.to(device) if device is not None else model


def quantize_model(
    model: nn.Module, quantize: str, *, device: torch.device | str | None = None, keep: Collection[str] = KEPT
) -> None:
    """Replace the plain linear maps of a model by quantized ones, one after another, and free the plain ones.

    The map inside a variant's layer (LoRA, Adapter V2) is replaced; what the variant trains stays as it is.

    Args:
        model: the model; changed in place.
        quantize: see `check_quantization`.
        device: where the quantized weights go; default: where each weight is.
        keep: names of modules that are left as they are.

    Raises:
        UserError: what `check_quantization` raises.
    """
    check_quantization(quantize)
    replace = _replacer(quantize, device)
    for path in [path for path, _ in model.named_modules() if _is_plain(model, path, keep)]:
        replace(model, path)
    _report(model, quantize)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model holds quantized weights."""
    return any(quantized_linears(model))


def quantized_linears(model: nn.Module) -> Iterator[QuantizedLinear]:
    """The quantized linear maps of a model."""
    from litgpt.quantized_linear import QuantizedLinear

    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def _names(literal: Any) -> tuple[str, ...]:
    return literal.__args__


def _replacer(quantize: str, device: torch.device | str | None) -> Callable[[nn.Module, str], None]:
    """A function that replaces the linear map at a path of a model."""
    import torch
    from torch import nn

    from litgpt import quantized_linear as made

    library, _, kind = quantize.partition(".")
    kind = kind.removesuffix("-training")

    def replace(model: nn.Module, path: str) -> None:
        parent, _, name = path.rpartition(".")
        holder, linear = model.get_submodule(parent), cast(nn.Linear, model.get_submodule(path))
        place = linear.weight.device if device is None else torch.device(device)
        if library == "torchao":
            quantized: made.QuantizedLinear = made.LinearTorchao(linear, place)
        elif kind == "int8":
            quantized = made.Linear8bit(linear, place)
        else:
            quantized = made.Linear4bit(linear, place, kind.removesuffix("-dq"), double=kind.endswith("-dq"))
        setattr(holder, name, quantized.train(linear.training))

    return replace


def _is_plain(model: nn.Module, path: str, keep: Collection[str]) -> bool:
    """Whether a linear map that should be quantized is at `path`."""
    from torch import nn

    try:
        module = model.get_submodule(path)
    except AttributeError:  # a tensor of stacked experts has no module of its own
        return False
    return type(module) is nn.Linear and not set(path.split(".")) & {*keep}


def _replace_filled(model: GPT, name: str, replace: Callable[[nn.Module, str], None]) -> None:
    """Quantize the map that the tensor `name` of the plain model belongs to, if it is the weight of one."""
    stem, _, leaf = name.rpartition(".")
    for path in (stem, f"{stem}.linear"):  # a variant may wrap the map
        if leaf == "weight" and _is_plain(model, path, KEPT):
            replace(model, path)


def _report(model: nn.Module, quantize: str) -> None:
    """Say how much was saved, and what was not quantized though it is large."""
    from litgpt.layers import StackedLinear

    linears = list(quantized_linears(model))
    before = sum(m.in_features * m.out_features * m.dtype.itemsize for m in linears)
    after = sum(m.nbytes for m in linears)
    logger.info("quantized %d linear maps to %s: %s -> %s", len(linears), quantize, _mb(before), _mb(after))
    experts = [m.weight for m in model.modules() if isinstance(m, StackedLinear)]
    if experts:
        logger.warning("the experts keep %s: %s", experts[0].dtype, _mb(sum(w.nbytes for w in experts)))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
