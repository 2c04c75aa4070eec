# Licensed under the Apache License 2.0, see the LICENSE file.

"""Frozen linear maps whose weight is stored in few bits.

They take the place of `nn.Linear`. The activations keep their precision: the weight is unpacked for each product, or
multiplied as it is where the library has a kernel for that, and unpacked again for the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


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

    def statistics(self) -> list[Tensor]:
        """What is stored beside `packed`."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight unpacked, a new tensor each time, for code that multiplies by it in another way."""
        return self.dense(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight and its statistics."""
        return sum(tensor.nbytes for tensor in [self.packed, *self.statistics()])

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

    def statistics(self) -> list[Tensor]:
        """Scales of the blocks; when they are in 8 bits, their own scales too."""
        state = self.state
        return [state.absmax, *([state.offset, state.state2.absmax] if self.nested else [])]

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

    def statistics(self) -> list[Tensor]:
        """The scale of each row."""
        return [self.scale]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear8bit:
        super()._apply(fn, recurse)
        self.scale = self.scale.to(self.packed.device)
        return self


class LinearTorchao(QuantizedLinear):
    """Each row of the weight in 8 bits, as a tensor of torchao that multiplies by itself."""

    def pack(self, weight: Tensor) -> None:
        """Set `packed`, an `Int8Tensor` `(n_out, n_in)`."""
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

    def statistics(self) -> list[Tensor]:
        """The parts of the tensor: eight bits a number, and the scale of each row."""
        return [self.packed.qdata, self.packed.scale]
