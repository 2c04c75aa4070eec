# Licensed under the Apache License 2.0, see the LICENSE file.

"""LLaMA-Adapter V2: the prompts of the first, a scale and a bias on every linear map, and trainable norms.

https://arxiv.org/abs/2304.15010
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from litgpt import adapter
from litgpt import model as base
from litgpt.adapter import Config
from litgpt.attention import KVView, Step
from litgpt.config import Config as BaseConfig
from litgpt.layers import StackedLinear
from litgpt.peft import VariantGPT, WrappedLinear, dense_weight, mark_only_variant_as_trainable

__all__ = [
    "GPT",
    "AdapterV2Linear",
    "Block",
    "CausalSelfAttention",
    "Config",
    "Layers",
    "adapter_filter",
    "mark_only_adapter_v2_as_trainable",
]

ADDED = (*adapter.ADDED, "adapter_scale", "adapter_bias")
NORMS = ("norm_1", "norm_2", "ln_f")  # those that are trained and saved


class AdapterV2Linear(WrappedLinear):
    """A linear map, `adapter_scale * (W x + adapter_bias)`.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        **kwargs: of `torch.nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.adapter_bias = nn.Parameter(torch.zeros(out_features))
        self.adapter_scale = nn.Parameter(torch.ones(out_features))

    def reset_parameters(self) -> None:
        """Scale one, bias zero."""
        nn.init.zeros_(self.adapter_bias)
        nn.init.ones_(self.adapter_scale)

    @property
    def weight(self) -> Tensor:
        """The scaled weight `(n_out, n_in)`; what is added to its product with x is `shift`."""
        weight = dense_weight(self.linear)
        return self.adapter_scale.to(weight.dtype).unsqueeze(-1) * weight

    @property
    def shift(self) -> Tensor:
        """What is added to the product of `weight` and x, `(n_out,)`."""
        bias = self.adapter_bias if self.bias is None else self.adapter_bias + self.bias
        return self.adapter_scale * bias

    def forward(self, x: Tensor) -> Tensor:
        """`(..., n_in) -> (..., n_out)`."""
        y = self.linear(x)
        return self.adapter_scale.to(y.dtype) * (y + self.adapter_bias.to(y.dtype))


class AdapterV2Experts(StackedLinear):
    """The stacked linear maps of E experts with a scale and a bias each."""

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__(n_expert, n_in, n_out, bias)
        self.adapter_bias = nn.Parameter(torch.zeros(n_expert, n_out))
        self.adapter_scale = nn.Parameter(torch.ones(n_expert, n_out))

    def reset_parameters(self) -> None:
        """Scale one, bias zero; while there are none, the plain maps."""
        if hasattr(self, "adapter_scale"):
            AdapterV2Linear.reset_parameters(cast(AdapterV2Linear, self))
        else:
            super().reset_parameters()

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor | None) -> Tensor:
        """Map each row by its own expert, see `StackedLinear.forward`."""
        y = super().forward(x, expert, counts)
        return self.adapter_scale.to(y.dtype)[expert] * (y + self.adapter_bias.to(y.dtype)[expert])


class _TrainedNorm:
    """A norm that may have weights of a higher precision than what it normalises."""

    def forward(self, x: Tensor) -> Tensor:
        weight = cast(Any, self).weight
        return super().forward(x if weight is None else x.to(weight.dtype)).to(x.dtype)  # type: ignore[misc]


class RMSNorm(_TrainedNorm, base.RMSNorm):
    """Root mean square norm that is trained."""


class LayerNorm(_TrainedNorm, base.LayerNorm):
    """Layer norm that is trained."""


class Layers(adapter.Layers):
    """The adapter's parts, with scaled and shifted maps and trainable norms."""

    def linear(self, config: BaseConfig, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """A linear map, see `LayersBase.linear`."""
        return AdapterV2Linear(n_in, n_out, bias=bias)

    def experts(self, config: BaseConfig, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """One linear map an expert, stacked."""
        return AdapterV2Experts(config.n_expert, n_in, n_out, bias)

    def attention(self, config: BaseConfig, block_idx: int) -> nn.Module:
        """The attention of a block."""
        made = CausalSelfAttention if config.latent_attention is None else MultiheadLatentAttention
        return made(cast(Config, config), block_idx, self)

    def norm(self, config: BaseConfig, path: str, size: int, eps: float | None = None) -> nn.Module:
        """A norm over `size` elements."""
        norm = super().norm(config, path, size, eps)
        if path.rpartition(".")[2] in NORMS:
            norm.__class__ = RMSNorm if isinstance(norm, base.RMSNorm) else LayerNorm  # as made, but for the dtype
        return norm


class CausalSelfAttention(adapter.CausalSelfAttention):
    """Attention with a prompt, scaled and shifted maps."""

    layers_class = Layers


class _ShiftedValues(base.MultiheadLatentAttention):
    """Latent attention whose `kv_b_proj` adds something to what it makes of a latent.

    What it adds to keys is the same for all of them and changes no softmax; what it adds to values is left as it is by
    weights that add up to one.
    """

    def attend(self, q: Tensor, view: KVView, step: Step) -> Tensor:
        y = super().attend(q, view, step)  # (B, H, T, v_head_dim)
        config = self.config
        shift = cast(AdapterV2Linear, self.kv_b_proj).shift.unflatten(0, (config.n_head, -1))
        return y + shift[:, None, config.qk_nope_head_dim :].to(y.dtype)


class MultiheadLatentAttention(adapter.PromptedAttention, _ShiftedValues):
    """Latent attention with a prompt, scaled and shifted maps."""

    layers_class = Layers


class Block(base.Block):
    """A block with everything of the adapter."""

    layers_class = Layers


class GPT(VariantGPT):
    """A model with prompts in its attention, scaled and shifted maps and trainable norms."""

    config_class = Config
    layers_class = Layers
    added = ADDED
    trained = NORMS


def adapter_filter(key: str, value: Any) -> bool:
    """Whether the tensor `key` is one of those that the adapter trains."""
    return any(name in key for name in (*ADDED, *NORMS))


def mark_only_adapter_v2_as_trainable(model: GPT) -> None:
    """Freeze everything but the adapter's tensors and the norms."""
    mark_only_variant_as_trainable(model)
