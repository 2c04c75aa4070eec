# Licensed under the Apache License 2.0, see the LICENSE file.

"""Models whose frozen weights are stored in 4 or 8 bits. Importing this module does not import torch.

The linear maps of the blocks are replaced one by one, while a checkpoint is read or in a model that is there already.
The embedding, the head and the routers of experts keep their dtype: they are few bytes and their errors cost most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from litgpt.constants import require
from litgpt.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from litgpt.model import GPT

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
    from litgpt.quantized_linear import Quantizer

    check_quantization(quantize)
    quantizer = Quantizer(quantize, device or "cpu", KEPT)
    model = (read or load_model)(path, filled=quantizer.filled, **options)
    quantizer.report()
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
    from litgpt.quantized_linear import Quantizer

    check_quantization(quantize)
    quantizer = Quantizer(quantize, device, keep)
    for path in [path for path, _ in model.named_modules()]:  # not the modules: each is freed when it is replaced
        quantizer.replace(model, path)
    quantizer.report()


def is_quantized(model: nn.Module, experts_only: bool = False) -> bool:
    """Whether a model holds quantized weights, or quantized experts."""
    from litgpt.quantized_linear import QuantizedExperts, QuantizedLinear

    kind = QuantizedExperts if experts_only else QuantizedLinear
    return any(isinstance(module, kind) for module in model.modules())


def _names(literal: Any) -> tuple[str, ...]:
    return literal.__args__
