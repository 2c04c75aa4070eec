# Licensed under the Apache License 2.0, see the LICENSE file.

"""Frozen linear maps whose weight is stored in few bits.

They take the place of `nn.Linear`. The activations keep their precision: the weight is unpacked for each product, or
multiplied as it is where the library has a kernel for that, and unpacked again for the gradient of the input.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from litgpt.layers import StackedLinear

if TYPE_CHECKING:
    from litgpt.model import GPT

logger = logging.getLogger(__name__)


class QuantizedLinear(nn.Module):
    """A linear map with a frozen weight in few bits; subclasses say how it is stored.

    Args:
        linear: the map to store; not changed.
        device: where the weight is quantized and kept.
    """

    packed: Any  # a frozen parameter, or a tensor type of its own

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias  # the same parameter: a checkpoint may not have filled it yet
        self.pack(linear.weight.detach().to(device))

    def pack(self, weight: Tensor) -> None:
        """Set `packed` and the statistics that belong to it from a weight `(n_out, n_in)`."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight `(n_out, n_in)` unpacked."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)` without a gradient."""
        return F.linear(x, self.dense(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def stored(self) -> list[Tensor]:
        """The tensors that hold the weight."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight unpacked, a new tensor each time, for code that multiplies by it in another way."""
        return self.dense(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight."""
        return sum(tensor.nbytes for tensor in self.stored())

    def forward(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)`, in the dtype of `x`, or the one that autocast asks for."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self)
        return self.product(x)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class QuantizedExperts(nn.ModuleList):
    """The quantized linear maps of experts; takes the place of the weight of `litgpt.layers.StackedLinear`."""

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor | None) -> Tensor:
        """Map each row by its own expert, see `StackedLinear.forward`."""
        if counts is None:
            return torch.cat([self[number](row) for number, row in zip(expert.tolist(), x.split(1), strict=True)])
        return torch.cat([layer(rows) for layer, rows in zip(self, x.split(counts.tolist()), strict=True) if len(rows)])

    def dense(self) -> Tensor:
        """The weights `(E, n_out, n_in)` unpacked."""
        return torch.stack([cast(QuantizedLinear, layer).weight for layer in self])


class _Product(torch.autograd.Function):
    """Keeps neither the input nor the unpacked weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.layer.dense(grads[0].dtype), None


class Linear4bit(QuantizedLinear):
    """Blocks of 64 numbers in 4 bits each, by bitsandbytes; QLoRA, https://arxiv.org/abs/2305.14314 section 3.

    Args:
        linear: the map to store.
        device: where the weight is quantized and kept.
        kind: "nf4", whose 16 values are quantiles of a normal distribution, or "fp4", which are tiny floats.
        double: store the scales of the blocks in 8 bits.
    """

    def __init__(self, linear: nn.Linear, device: torch.device, kind: str, double: bool) -> None:
        self.kind, self.nested = kind, double
        super().__init__(linear, device)

    def pack(self, weight: Tensor) -> None:
        """Set `packed`, `(n_out * n_in / 2, 1)` bytes, and `state`."""
        from bitsandbytes.functional import quantize_4bit

        packed, self.state = quantize_4bit(weight, blocksize=64, compress_statistics=self.nested, quant_type=self.kind)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight unpacked."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self.state).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)`."""
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(x.dtype)
        return matmul_4bit(x, self.packed.t(), bias=bias, quant_state=self.state)

    def stored(self) -> list[Tensor]:
        """The numbers and the scales of the blocks; when these are in 8 bits, their own scales too."""
        state = self.state
        return [self.packed, state.absmax, *([state.offset, state.state2.absmax] if self.nested else [])]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear4bit:
        super()._apply(fn, recurse)
        self.state.to(self.packed.device)  # only moved: rounded scales would be other weights
        return self


class Linear8bit(QuantizedLinear):
    """Each row of the weight in 8 bits, as bitsandbytes' LLM.int8() stores it, https://arxiv.org/abs/2208.07339."""

    def pack(self, weight: Tensor) -> None:
        """Set `packed`, `(n_out, n_in)` int8, and `scale`, `(n_out, 1)` float32."""
        from bitsandbytes.functional import int8_vectorwise_quant

        packed, largest, _ = int8_vectorwise_quant(weight.to(torch.float16))
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = largest.unsqueeze(1) / 127

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight unpacked."""
        return (self.packed * self.scale).to(dtype)

    def stored(self) -> list[Tensor]:
        """The numbers and the scale of each row."""
        return [self.packed, self.scale]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear8bit:
        super()._apply(fn, recurse)
        self.scale = self.scale.to(self.packed.device)
        return self


class LinearTorchao(QuantizedLinear):
    """Each row of the weight in 8 bits, as a tensor of torchao that multiplies by itself."""

    def pack(self, weight: Tensor) -> None:
        """Set `packed`, an `Int8Tensor` `(n_out, n_in)`."""
        with _no_warnings():  # of kernels that torchao lacks on this machine: none of them is needed
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

        holder = nn.Module()
        holder.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(holder, Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=lambda module, path: True)
        self.packed = holder.weight

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight unpacked."""
        return self.packed.dequantize().to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)`."""
        return F.linear(x, self.packed, None if self.bias is None else self.bias.to(x.dtype))

    def stored(self) -> list[Tensor]:
        """The numbers and the scale of each row."""
        return [self.packed.qdata, self.packed.scale]


@contextmanager
def _no_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Quantizer:
    """Replaces linear maps and stacks of them by quantized ones, each as soon as its weight is there.

    Args:
        quantize: one of `litgpt.quantize.TrainingQuantization`.
        device: where the quantized weights go; None: where each weight is.
        keep: names of modules that are left as they are.
    """

    def __init__(self, quantize: str, device: torch.device | str | None, keep: Collection[str]) -> None:
        self.quantize, self.device, self.keep = quantize, device, {*keep}
        library, _, kind = quantize.removesuffix("-training").partition(".")
        self.make: Callable[[nn.Linear, torch.device], QuantizedLinear]
        if library == "torchao":
            self.make = LinearTorchao
        elif kind == "int8":
            self.make = Linear8bit
        else:
            self.make = partial(Linear4bit, kind=kind.removesuffix("-dq"), double=kind.endswith("-dq"))
        self._experts: Counter[str] = Counter()  # path of a stack -> experts whose weight is there
        self._count, self._before, self._after = 0, 0, 0

    def filled(self, model: GPT, name: str) -> None:
        """Quantize what the tensor `name` of the plain model completes; see `litgpt.checkpoint.convert.load_model`."""
        path, _, leaf = name.rpartition(".")
        if leaf != "weight":
            return
        if match := re.fullmatch(r"(.*\.experts)\.\d+(\.\w+)", path):
            path = "".join(match.groups())
            self._experts[path] += 1
            if self._experts[path] < model.config.n_expert:
                return
        for found in (path, f"{path}.linear"):  # a variant may wrap the map
            self.replace(model, found)

    def replace(self, model: nn.Module, path: str) -> None:
        """Quantize the linear map or the stack of them at `path`, if there is one and it is not to be kept."""
        try:
            module = model.get_submodule(path)
        except AttributeError:
            return
        if self.keep & {*path.split(".")}:
            return
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, self._quantized(module))
        elif isinstance(module, StackedLinear) and isinstance(module.weight, nn.Parameter):
            layers = []
            for weight in module.weight.detach():
                linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
                linear.weight = nn.Parameter(weight, requires_grad=False)
                layers.append(self._quantized(linear))
            del module.weight
            cast(Any, module).weight = QuantizedExperts(layers)

    def _quantized(self, linear: nn.Linear) -> QuantizedLinear:
        device = linear.weight.device if self.device is None else torch.device(self.device)
        made = self.make(linear, device)
        self._count += 1
        self._before += linear.weight.nbytes
        self._after += made.nbytes
        return made.train(linear.training)

    def report(self) -> None:
        """Say how much was saved."""
        sizes = f"{self._before / 1e6:,.1f} MB -> {self._after / 1e6:,.1f} MB"
        logger.info("quantized %d linear maps to %s: %s", self._count, self.quantize, sizes)
