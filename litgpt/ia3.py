# Licensed under the Apache License 2.0, see the LICENSE file.

"""IA3: learnt factors on keys, values and the inside of feed-forward networks, https://arxiv.org/abs/2205.05638."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from litgpt import model as base
from litgpt.config import Config
from litgpt.layers import StackedLinear
from litgpt.peft import VariantGPT, WrappedLinear, dense_weight, mark_only_variant_as_trainable

__all__ = ["GPT", "Block", "CausalSelfAttention", "Config", "Layers", "ia3_filter", "mark_only_ia3_as_trainable"]


class IA3Linear(WrappedLinear):
    """A linear map with factors on its input, or on the last elements of its output.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        n_scaled: so many of the last output elements have a factor; None for all elements of the input instead.
        bias: whether the map has a bias.
    """

    def __init__(self, in_features: int, out_features: int, n_scaled: int | None = None, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.n_plain = None if n_scaled is None else out_features - n_scaled
        self.ia3_scale = nn.Parameter(torch.ones(in_features if n_scaled is None else n_scaled))

    def reset_parameters(self) -> None:
        """Factors of one."""
        nn.init.ones_(self.ia3_scale)

    @property
    def weight(self) -> Tensor:
        """The weight with the factors in it `(n_out, n_in)`."""
        weight = dense_weight(self.linear)
        if self.n_plain is None:
            return weight * self.ia3_scale.to(weight.dtype)
        return self._scale_last(weight.mT).mT

    def forward(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)`."""
        if self.n_plain is None:
            return self.linear(x * self.ia3_scale.to(x.dtype))
        return self._scale_last(self.linear(x))

    def _scale_last(self, y: Tensor) -> Tensor:
        plain, scaled = y.tensor_split((self.n_plain,), dim=-1)  # type: ignore[arg-type]
        return torch.cat((plain, scaled * self.ia3_scale.to(y.dtype)), dim=-1)


class IA3Experts(StackedLinear):
    """The stacked linear maps of E experts with factors on their inputs."""

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__(n_expert, n_in, n_out, bias)
        self.ia3_scale = nn.Parameter(torch.ones(n_expert, n_in))

    def reset_parameters(self) -> None:
        """Factors of one; while there are none, the plain maps."""
        if hasattr(self, "ia3_scale"):
            nn.init.ones_(self.ia3_scale)
        else:
            super().reset_parameters()

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor | None) -> Tensor:
        """Map each row by its own expert, see `StackedLinear.forward`."""
        return super().forward(x * self.ia3_scale.to(x.dtype)[expert], expert, counts)


class Layers(base.Layers):
    """The plain parts, with factors where IA3 has them."""

    def linear(self, config: Config, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """A linear map, see `LayersBase.linear`."""
        name = path.rpartition(".")[2]
        if role == "qkv":
            assert config.n_query_groups is not None
            assert config.head_size is not None
            return IA3Linear(n_in, n_out, 2 * config.n_query_groups * config.head_size, bias)
        if name == "kv_b_proj":  # makes the keys and values of latent attention
            return IA3Linear(n_in, n_out, n_out, bias)
        if role == "mlp" and name == "proj":
            return IA3Linear(n_in, n_out, bias=bias)
        return super().linear(config, path, role, n_in, n_out, bias)

    def experts(self, config: Config, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """One linear map an expert, stacked."""
        if path.endswith(".proj"):
            return IA3Experts(config.n_expert, n_in, n_out, bias)
        return super().experts(config, path, role, n_in, n_out, bias)


class Block(base.Block):
    """A block with IA3's factors."""

    layers_class = Layers


class CausalSelfAttention(base.CausalSelfAttention):
    """Attention with factors on keys and values."""

    layers_class = Layers


class GPT(VariantGPT):
    """A model with IA3's factors."""

    layers_class = Layers
    added = ("ia3_",)


def ia3_filter(key: str, value: Any) -> bool:
    """Whether the tensor `key` is IA3's."""
    return "ia3_" in key


def mark_only_ia3_as_trainable(model: GPT) -> None:
    """Freeze everything but the factors."""
    mark_only_variant_as_trainable(model)
