# Licensed under the Apache License 2.0, see the LICENSE file.

"""LLaMA-Adapter: a learnt prompt in each of the upper layers, let in by a gate, https://arxiv.org/abs/2303.16199."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from litgpt import model as base
from litgpt.attention import KVView, Step
from litgpt.config import Config as BaseConfig
from litgpt.peft import VariantGPT, mark_only_variant_as_trainable

ADDED = ("adapter_wte", "gating_factor")


@dataclass
class Config(BaseConfig):
    """The plain config and where prompts go.

    Args:
        adapter_prompt_length: tokens of a layer's prompt.
        adapter_start_layer: first layer that has one.
    """

    adapter_prompt_length: int = 10
    adapter_start_layer: int = 2


class PromptedAttention:
    """Attention that attends to a prompt of its own as well: `y + gate * (attention to the prompt)`.

    Goes in front of an attention class. Keys and values of the prompt are worked out in every step: what depends on
    parameters is never kept.
    """

    adapter_wte: nn.Embedding
    gating_factor: Tensor

    def __init__(self, config: Config, block_idx: int, layers: base.Layers | None = None) -> None:
        super().__init__(config, block_idx, layers)  # type: ignore[call-arg]
        self.is_prompted = block_idx >= config.adapter_start_layer
        if self.is_prompted:
            self.adapter_wte = nn.Embedding(config.adapter_prompt_length, config.n_embd)
            self.gating_factor = nn.Parameter(torch.zeros(1, 1, config.n_head, 1))

    def reset_parameters(self) -> None:
        """Close the gate; the prompt's embedding has its own `reset_parameters`."""
        nn.init.zeros_(self.gating_factor)

    def attend(self, q: Tensor, view: KVView, step: Step) -> Tensor:
        """Attend from `q` `(B, H, T, D)` to the view and to the prompt, with a softmax each."""
        attend = super().attend  # type: ignore[misc]
        y = attend(q, view, step)
        if not self.is_prompted:
            return y
        at_start = torch.zeros(1, q.size(2), dtype=torch.long, device=q.device)
        # every query and the whole prompt at one position: all of it is seen, whatever the layer's window
        from_prompt = attend(q, self.prompt_view(q), Step(at_start, at_start[:, -1] + 1))
        return y + self.gating_factor.transpose(1, 2).to(y.dtype) * from_prompt

    def prompt_view(self, q: Tensor) -> KVView:
        """Keys and values of the prompt for each row of `q`, not rotated."""
        prompt = self.adapter_wte.weight.to(q.dtype).unsqueeze(0)  # (1, L, C)
        _, k, *v = cast(Any, self).project(prompt, None)  # latent attention keeps its values inside its keys
        values = v[0] if v else k[..., : cast(Any, self).config.kv_lora_rank]
        k, values = (t.expand(q.size(0), -1, -1, -1) for t in (k, values))
        return KVView(k, values, torch.zeros(1, 1, k.size(2), dtype=torch.long, device=q.device))


class Layers(base.Layers):
    """The plain parts, with prompts in the attention."""

    def attention(self, config: BaseConfig, block_idx: int) -> nn.Module:
        """The attention of a block."""
        made = CausalSelfAttention if config.latent_attention is None else MultiheadLatentAttention
        return made(cast(Config, config), block_idx, self)


class CausalSelfAttention(PromptedAttention, base.CausalSelfAttention):
    """Multi-head, grouped-query or multi-query attention with a prompt."""

    layers_class = Layers


class MultiheadLatentAttention(PromptedAttention, base.MultiheadLatentAttention):
    """Latent attention with a prompt."""

    layers_class = Layers


class Block(base.Block):
    """A block whose attention has a prompt."""

    layers_class = Layers


class GPT(VariantGPT):
    """A model with prompts in its attention."""

    config_class = Config
    layers_class = Layers
    added = ADDED


def adapter_filter(key: str, value: Any) -> bool:
    """Whether the tensor `key` is the adapter's."""
    return any(name in key for name in ADDED)


def mark_only_adapter_as_trainable(model: GPT) -> None:
    """Freeze everything but the prompts and their gates.

    Raises:
        ValueError: no layer has a prompt.
    """
    mark_only_variant_as_trainable(model)
