# Licensed under the Apache License 2.0, see the LICENSE file.

"""LoRA: a trainable update of low rank beside frozen linear maps, https://arxiv.org/abs/2106.09685.

With its relatives rsLoRA (https://arxiv.org/abs/2312.03732), DoRA (https://arxiv.org/abs/2402.09353), PiSSA
(https://arxiv.org/abs/2404.02948) and LoRA+ (https://arxiv.org/abs/2402.12354).

The plain model, made with the layers of `lora_layers.py` where the config wants them.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch import Tensor

from litgpt import model as base
from litgpt.attention import KVView, Step
from litgpt.config import Config as BaseConfig
from litgpt.layers import ROLES
from litgpt.lora_layers import START, LoRAExperts, LoRALayer, LoRALinear, LoRAQKVLinear, each_adapter
from litgpt.peft import VariantGPT

__all__ = [
    "GPT",
    "Block",
    "CausalSelfAttention",
    "Config",
    "Layers",
    "LoRALayer",
    "LoRALinear",
    "LoRAQKVLinear",
    "lora_filter",
    "lora_layers",
    "lora_plus_groups",
    "mark_only_lora_as_trainable",
    "merge_lora_weights",
    "plain_lora",
    "unmerge_lora_weights",
]

logger = logging.getLogger(__name__)

QKV = ("query", "key", "value")  # the parts of the fused map, in its order
_ATTENTION = ["qkv", "q", "kv", "proj"]
PRESETS = {"attention": _ATTENTION, "mlp": ["mlp"], "all-linear": [*_ATTENTION, "mlp"]}


@dataclass
class Config(BaseConfig):
    """The plain config and where LoRA goes.

    Args:
        lora_r: rank of the updates; 0 for none.
        lora_alpha: the update is scaled by `lora_alpha / lora_r`.
        lora_dropout: dropout on the input of the update.
        lora_query: update the queries; of latent attention, every map that makes them.
        lora_key: update the keys; of latent attention, the maps that make keys and values together.
        lora_value: the same for values.
        lora_projection: update the output of the attention.
        lora_mlp: update the feed-forward networks, experts included.
        lora_head: update the head.
        use_rslora: scale by `lora_alpha / sqrt(lora_r)` instead.
        use_dora: train the norm of each row of the weight separately from its direction.
        lora_init: "pissa" starts from the weight's largest singular values instead of from noise.
        lora_targets: where updates go, instead of the switches above: "attention", "mlp" or "all-linear", or one or
            more regular expressions. Each is compared with the role of a map ("qkv", "query", "key", "value", "q",
            "kv", "proj", "mlp", "head"), its own name ("fc_1", "kv_b_proj", ...) and its full name ("h.0.attn.proj",
            "h.0.attn.query", ...).
        lora_router: update the routers of experts, which nothing else does.
    """

    lora_r: int = 0
    lora_alpha: float = 1
    lora_dropout: float = 0.0
    lora_query: bool = False
    lora_key: bool = False
    lora_value: bool = False
    lora_projection: bool = False
    lora_mlp: bool = False
    lora_head: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    lora_init: Literal["default", "pissa"] = "default"
    lora_targets: str | list[str] | None = None
    lora_router: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_r < 0:
            raise ValueError(f"lora_r must not be negative, got {self.lora_r}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be in 0..1, got {self.lora_dropout}")
        if self.lora_init not in ("default", "pissa"):
            raise ValueError(f"lora_init must be 'default' or 'pissa', got {self.lora_init!r}")
        for pattern in self._patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"lora_targets has {pattern!r}, which is no regular expression: {error}") from error

    @property
    def _patterns(self) -> list[str]:
        given = [self.lora_targets] if isinstance(self.lora_targets, str) else self.lora_targets or []
        return [pattern for name in given for pattern in PRESETS.get(name, [name])]

    def has_lora(self, path: str, role: str) -> bool:
        """Whether the map `path` gets an update in this role; a fused one is asked for each of `QKV`."""
        if self.lora_r == 0 or role == "gate":
            return self.lora_r > 0 and self.lora_router
        if self.lora_targets is None:
            return {
                **dict(zip(QKV, (self.lora_query, self.lora_key, self.lora_value), strict=True)),
                "q": self.lora_query,
                "kv": self.lora_key or self.lora_value,
                "proj": self.lora_projection,
                "mlp": self.lora_mlp,
                "head": self.lora_head,
            }[role]
        stem, _, own = path.rpartition(".")
        names = {role, path} | {own} - set(ROLES)  # "proj" is a role: a feed-forward network's is not meant by it
        if role in QKV:
            names |= {"qkv", f"{stem}.{role}"}
        return any(re.fullmatch(pattern, name) for pattern in self._patterns for name in names)

    @property
    def lora_options(self) -> dict[str, Any]:
        """What every layer with LoRA is told."""
        return {
            "r": self.lora_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "init": self.lora_init,
        }


class LoRAMoE(base.LLaMAMoE):
    """A mixture of experts. Rows of a batch that have adapters of their own go through it one adapter at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        forward = super().forward
        mixed = each_adapter(self, lambda rows: forward(x[rows]))
        return forward(x) if mixed is None else mixed


class MultiheadLatentAttention(base.MultiheadLatentAttention):
    """Latent attention. The weight that it takes apart is adapted for one adapter at a time."""

    def attend(self, q: Tensor, view: KVView, step: Step) -> Tensor:
        """Attend from `q` to the latents of the view."""
        attend = super().attend
        mixed = each_adapter(self, lambda rows: attend(*_some(rows, q, view, step)))
        return attend(q, view, step) if mixed is None else mixed

    def attention_mass(self, q: Tensor, view: KVView, step: Step, last: int | None) -> Tensor:
        """Attention that each slot receives."""
        mass = super().attention_mass
        mixed = each_adapter(self, lambda rows: mass(*_some(rows, q, view, step), last))
        return mass(q, view, step, last) if mixed is None else mixed


def _some(rows: Tensor, q: Tensor, view: KVView, step: Step) -> tuple[Tensor, KVView, Step]:
    """Some rows of what attention works on."""

    def pick(tensor: Tensor) -> Tensor:  # one row may stand for all
        return tensor if tensor.size(0) == 1 else tensor[rows]

    ropes = step.sink_rope and [r and r._replace(cos=pick(r.cos), sin=pick(r.sin)) for r in step.sink_rope]
    view = view._replace(k=view.k[rows], v=view.v[rows], pos=pick(view.pos))
    step = dataclasses.replace(step, pos=pick(step.pos), end=pick(step.end), memo={}, sink_rope=ropes)
    return q[rows], view, step


class Layers(base.Layers):
    """The plain parts, with LoRA where the config wants it."""

    def attention(self, config: BaseConfig, block_idx: int) -> nn.Module:
        """The attention of a block."""
        if config.latent_attention is not None:
            return MultiheadLatentAttention(config, block_idx, self)
        return super().attention(config, block_idx)

    def mlp(self, config: BaseConfig, block_idx: int) -> nn.Module:
        """The feed-forward network of a block."""
        if config.layer_is_moe(block_idx):
            return LoRAMoE(config, f"h.{block_idx}.mlp", self)
        return super().mlp(config, block_idx)

    def linear(self, config: BaseConfig, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """A linear map, see `LayersBase.linear`."""
        config = cast(Config, config)
        if role == "qkv":
            enabled = [config.has_lora(path, part) for part in QKV]
            if any(enabled):
                heads = cast("tuple[int, int, int]", (config.head_size, config.n_head, config.n_query_groups))
                return LoRAQKVLinear(n_in, n_out, *heads, enable_lora=enabled, bias=bias, **config.lora_options)
        elif role in ROLES and config.has_lora(path, role):
            return LoRALinear(n_in, n_out, bias=bias, **config.lora_options)
        return super().linear(config, path, role, n_in, n_out, bias)

    def experts(self, config: BaseConfig, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """One linear map an expert, stacked."""
        config = cast(Config, config)
        if config.has_lora(path, role):
            return LoRAExperts(config.n_expert, n_in, n_out, bias, **config.lora_options)
        return super().experts(config, path, role, n_in, n_out, bias)


class Block(base.Block):
    """A block with LoRA."""

    layers_class = Layers


class CausalSelfAttention(base.CausalSelfAttention):
    """Attention with LoRA."""

    layers_class = Layers


class GPT(VariantGPT):
    """A model with LoRA."""

    config: Config
    config_class = Config
    layers_class = Layers
    added = ("lora_",)
    constant = START

    def __init__(self, config: Config, layers: base.Layers | None = None) -> None:
        super().__init__(config, layers)
        if config.lora_r > 0 and config.lora_targets is not None and not any(lora_layers(self)):
            raise ValueError(f"lora_targets {config.lora_targets!r} match nothing in this model")


def lora_layers(model: nn.Module) -> list[LoRALayer]:
    """The layers that have an update."""
    return [layer for layer in model.modules() if isinstance(layer, LoRALayer) and layer.active]


def lora_filter(key: str, value: Any) -> bool:
    """Whether the tensor `key` is LoRA's."""
    return "lora_" in key


def mark_only_lora_as_trainable(model: nn.Module, bias: Literal["none", "lora_only", "all"] = "none") -> None:
    """Freeze everything but LoRA's tensors.

    Args:
        model: the model.
        bias: "lora_only" trains the biases of maps with an update too, "all" every bias. Files of LoRA hold no biases.

    Raises:
        ValueError: nothing would be trained.
    """
    if bias not in ("none", "lora_only", "all"):
        raise ValueError(f"bias must be 'none', 'lora_only' or 'all', got {bias!r}")
    if not lora_layers(model):
        raise ValueError("the model has no LoRA layers, nothing would be trained: set lora_r and where updates go")
    for name, parameter in model.named_parameters():
        is_bias = name.rpartition(".")[2] == "bias"
        learns = lora_filter(name, parameter) and not name.endswith(START)
        parameter.requires_grad = learns or (bias == "all" and is_bias)
    for layer in lora_layers(model) if bias == "lora_only" else ():
        if (own := cast("Tensor | None", layer.holder.bias)) is not None:
            own.requires_grad = True


def lora_plus_groups(model: nn.Module, lr: float, ratio: float = 16.0) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer by which `lora_B` learns `ratio` times as fast as the rest.

    LoRA+, https://arxiv.org/abs/2402.12354, whose authors recommend 16.
    """
    fast: list[nn.Parameter] = []
    slow: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (fast if name.endswith("lora_B") else slow).append(parameter)
    return [{"params": slow, "lr": lr}, {"params": fast, "lr": lr * ratio}]


def plain_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file of LoRA without PiSSA's `lora_A0` and `lora_B0`: `B A - B0 A0` as one update of twice the rank.

    The scale is still that of the rank before.
    """
    plain = {key: value for key, value in state.items() if not key.endswith(START)}
    for key in [key for key in state if key.endswith("lora_A0")]:
        stem, r = key.removesuffix("A0"), state[f"{key.removesuffix('A0')}B"].size(1)
        both = [state[f"{stem}{name}"].unflatten(0, (-1, r)) for name in ("A", "A0")]  # (P, r, n_in)
        plain[f"{stem}A"] = torch.cat(both, dim=1).flatten(0, 1)
        plain[f"{stem}B"] = torch.cat((state[f"{stem}B"], -state[f"{stem}B0"]), dim=1)
    return plain


def merge_lora_weights(model: nn.Module, keep_base: bool = True) -> float:
    """Put every update into its weight, so that the model costs as much as the plain one.

    Args:
        model: the model.
        keep_base: keep the weights from before for `unmerge_lora_weights`; they take as much memory again.

    Returns:
        How much of an update was lost to rounding to the weight's dtype: the length of the error by the length of the
        update, for the map that suffered most.
    """
    lost = max((layer.merge(keep_base) for layer in lora_layers(model)), default=0.0)
    _note_tie(model)
    return lost


def unmerge_lora_weights(model: nn.Module) -> None:
    """Undo `merge_lora_weights`: the weights are what they were, bit for bit.

    Raises:
        ValueError: the weights from before were not kept.
    """
    for layer in lora_layers(model):
        layer.unmerge()
    _note_tie(model)


def _note_tie(model: nn.Module) -> None:
    """A head that had an update of its own merged into it is no longer the embedding."""
    if not isinstance(model, GPT) or not isinstance(model.lm_head, LoRALinear):
        return
    tied = model.lm_head.linear.weight is model.transformer.wte.weight
    if model.config.tie_embeddings and not tied:
        logger.warning("the head was tied to the embedding; with its update merged it is a tensor of its own")
    if model.config.tie_embeddings != tied:
        model.config = dataclasses.replace(model.config, tie_embeddings=tied)
