# Licensed under the Apache License 2.0, see the LICENSE file.

"""Norms, feed-forward networks and mixtures of experts.

Letters in shapes: B batch, T tokens, C embedding width, I intermediate width, N = B * T, K experts per token,
E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

if TYPE_CHECKING:
    from litgpt.config import Config

ROLES = ("qkv", "q", "kv", "proj", "mlp", "gate", "head")


def upcast(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or as it is when that is more precise already."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """Root mean square norm, https://arxiv.org/abs/1910.07467.

    Args:
        size: width of the last dimension.
        dim: the dimension that is normalised; only the last one.
        eps: added to the mean square.
        add_unit_offset: multiply by `1 + weight` (Gemma).
    """

    def __init__(self, size: int, dim: int = -1, eps: float = 1e-6, add_unit_offset: bool = False) -> None:
        super().__init__()
        assert dim == -1, "RMSNorm normalises the last dimension"
        self.weight = nn.Parameter(torch.zeros(size) if add_unit_offset else torch.ones(size))
        self.eps = eps
        self.add_unit_offset = add_unit_offset
        self._eps = torch.tensor(eps, dtype=torch.float32, device="cpu")  # not a buffer: a constant of the CPU path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`, in float32 inside."""
        weight = 1 + upcast(self.weight) if self.add_unit_offset else self.weight
        if x.device.type == "cpu" and x.dtype != torch.float64:  # half the operations that F.rms_norm is made of there
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            y = x * torch.rsqrt(torch.addcmul(self._eps, norm, norm, value=1 / x.size(-1)))
        else:
            y = F.rms_norm(upcast(x), weight.shape, None, self.eps)
        # the offset weight multiplies before rounding and the plain one after it, as the models were trained
        return (y * weight).to(x.dtype) if self.add_unit_offset else y.to(x.dtype) * weight

    def reset_parameters(self) -> None:
        """Set the weight to the neutral value."""
        nn.init.constant_(self.weight, 0.0 if self.add_unit_offset else 1.0)


class LayerNorm(nn.LayerNorm):
    """Layer norm, https://arxiv.org/abs/1607.06450, over the last dimension.

    Args:
        size: width of the last dimension.
        add_unit_offset: multiply by `1 + weight` (Nemotron).
        **options: those of `nn.LayerNorm`.
    """

    def __init__(self, size: int, add_unit_offset: bool = False, **options: Any) -> None:
        self.add_unit_offset = add_unit_offset
        super().__init__(size, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        weight = self.weight + 1 if self.add_unit_offset else self.weight
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)

    def reset_parameters(self) -> None:
        """Set weight and bias to the neutral values."""
        super().reset_parameters()
        if self.add_unit_offset:
            nn.init.zeros_(self.weight)


class HeadNorm(nn.Module):
    """The norm of each head of `(..., n_head, size)`, whose weights are its own (StableLM 2)."""

    def __init__(self, n_head: int, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_head, size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight


def build_norm(config: Config, size: int, eps: float | None = None) -> nn.Module:
    """The norm that a config asks for, over `size` elements."""
    eps = config.norm_eps if eps is None else eps
    if config.norm_class_name == "RMSNorm":
        return RMSNorm(size, eps=eps, add_unit_offset=config.norm_unit_offset)
    options: dict[str, Any] = {"elementwise_affine": config.norm_affine, "bias": config.norm_bias}
    return LayerNorm(size, config.norm_unit_offset, eps=eps, **options)


class LayersBase:
    """Makes the parts that hold weights. `litgpt.model.Layers` adds attention and the choice of MLP.

    Every part is asked for by its path in the model and the role it plays, so that a variant can change exactly the
    parts it wants by overriding one method.
    """

    def linear(self, config: Config, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """A linear map `(..., n_in) -> (..., n_out)` that plays `role` (one of `ROLES`) at `path`."""
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r} of {path!r}: use one of {', '.join(ROLES)}")
        return nn.Linear(n_in, n_out, bias=bias)

    def experts(self, config: Config, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        """One linear map an expert, stacked."""
        return StackedLinear(config.n_expert, n_in, n_out, bias)

    def norm(self, config: Config, path: str, size: int, eps: float | None = None) -> nn.Module:
        """A norm over `size` elements."""
        return build_norm(config, size, eps)

    def head_norm(self, config: Config, path: str, n_head: int, size: int) -> nn.Module:
        """A norm over the `size` elements of each of `n_head` heads, of whatever kind the config asks for."""
        if config.norm_qk_type == "each_head":
            return HeadNorm(n_head, size, config.norm_eps)
        return self.norm(config, path, size if config.norm_qk_type == "default" else n_head * size)


def gated_activation(config: Config, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU, or its clamped form of gpt-oss when the config has a limit (https://arxiv.org/abs/2508.10925)."""
    if config.swiglu_limit is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=config.swiglu_limit)
    up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _mlp_bias(config: Config) -> bool:
    return config.bias if config.mlp_bias is None else config.mlp_bias


class GptNeoxMLP(nn.Module):
    """Two linear maps with a GELU, or a squared ReLU, between them."""

    layers_class: type[LayersBase] = LayersBase

    def __init__(
        self,
        config: Config,
        intermediate_size: int | None = None,
        path: str = "mlp",
        layers: LayersBase | None = None,
    ) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        inner = intermediate_size or config.intermediate_size
        assert inner is not None
        self.fc = layers.linear(config, f"{path}.fc", "mlp", config.n_embd, inner, _mlp_bias(config))
        self.proj = layers.linear(config, f"{path}.proj", "mlp", inner, config.n_embd, _mlp_bias(config))
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        x = self.fc(x)
        if self.config.mlp_activation == "relu2":
            return self.proj(F.relu(x).square())
        return self.proj(F.gelu(x, approximate=self.config.gelu_approximate))


class LLaMAMLP(nn.Module):
    """Gated feed-forward network (SwiGLU), https://arxiv.org/abs/2002.05202."""

    layers_class: type[LayersBase] = LayersBase

    def __init__(
        self,
        config: Config,
        intermediate_size: int | None = None,
        path: str = "mlp",
        layers: LayersBase | None = None,
    ) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        inner = intermediate_size or config.intermediate_size
        assert inner is not None
        bias = _mlp_bias(config)
        self.fc_1 = layers.linear(config, f"{path}.fc_1", "mlp", config.n_embd, inner, bias)
        self.fc_2 = layers.linear(config, f"{path}.fc_2", "mlp", config.n_embd, inner, bias)
        self.proj = layers.linear(config, f"{path}.proj", "mlp", inner, config.n_embd, bias)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        return self.proj(self.activation(self.fc_1(x), self.fc_2(x)))

    def activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What happens between the linear maps."""
        return gated_activation(self.config, gate, up)


class GemmaMLP(LLaMAMLP):
    """The same with a GELU gate (GeGLU)."""

    def activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What happens between the linear maps."""
        return F.gelu(gate, approximate=self.config.gelu_approximate) * up


class StackedLinear(nn.Module):
    """One linear map for each of E experts, weights stacked to `(E, n_out, n_in)`."""

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_expert, n_out)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights, zero the biases."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """Map each row by its own expert.

        Args:
            x: `(M, n_in)`.
            expert: `(M,)` expert of each row.
            counts: `(E,)` rows of each expert when the rows are sorted by expert; None: gather each row's weights.

        Returns:
            `(M, n_out)`.
        """
        if isinstance(self.weight, nn.Module):  # stored in few bits
            y = self.weight(x, expert, counts)
        elif counts is None:
            y = torch.bmm(self.weight[expert], x.unsqueeze(-1)).squeeze(-1)
        else:
            y = grouped_linear(x, self.weight, counts)
        return y if self.bias is None else y + self.bias[expert]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`x[rows of e] @ weight[e].T` for rows sorted by expert.

    On a GPU one grouped kernel does it without a host-device sync; elsewhere each expert is one matrix product.

    Args:
        x: `(M, n_in)`.
        weight: `(E, n_out, n_in)`.
        counts: `(E,)` number of rows of each expert.
    """
    grouped_mm = getattr(F, "grouped_mm", None)  # since torch 2.10
    if (
        grouped_mm is not None
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.size(1) % 8 == weight.size(2) % 8 == 0
    ):
        return grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    chunks = x.split(counts.tolist())
    return torch.cat([F.linear(chunk, w) for chunk, w in zip(chunks, weight, strict=True)])


class Experts(nn.Module):
    """The gated feed-forward networks of E experts; a `state_dict` holds them apart as `J.fc_1.weight`, ..."""

    def __init__(self, config: Config, path: str, layers: LayersBase) -> None:
        super().__init__()
        inner = config.moe_intermediate_size
        assert inner is not None
        bias = _mlp_bias(config)
        self.fc_1 = layers.experts(config, f"{path}.fc_1", "mlp", config.n_embd, inner, bias)
        self.fc_2 = layers.experts(config, f"{path}.fc_2", "mlp", config.n_embd, inner, bias)
        self.proj = layers.experts(config, f"{path}.proj", "mlp", inner, config.n_embd, bias)
        self.config = config
        self.register_state_dict_post_hook(_unstack_experts)
        self.register_load_state_dict_pre_hook(_stack_experts)

    def forward(self, x: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """`(M, C) -> (M, C)`, see `StackedLinear.forward`."""
        gate, up = self.fc_1(x, expert, counts), self.fc_2(x, expert, counts)
        return self.proj(gated_activation(self.config, gate, up), expert, counts)


def _is_stacked(name: str) -> bool:
    return ".weight." not in name  # those of quantized experts are apart already


def _unstack_experts(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix) and _is_stacked(k)]:
        for j, part in enumerate(state_dict.pop(key)):
            state_dict[f"{prefix}{j}.{key[len(prefix) :]}"] = part


def _stack_experts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Stack the experts' tensors, and report those that are missing or do not fit by their own names."""
    for name, parameter in module.named_parameters():
        if prefix + name in state_dict or not _is_stacked(name):
            continue
        keys = [f"{prefix}{j}.{name}" for j in range(len(parameter))]
        found = {key: state_dict.pop(key) for key in keys if key in state_dict}
        wrong = {key: tuple(part.shape) for key, part in found.items() if part.shape != parameter.shape[1:]}
        missing_keys.extend(key for key in keys if key not in found)
        error_msgs.extend(
            f"size mismatch for {key}: {shape} in the checkpoint, {tuple(parameter.shape[1:])} in the model"
            for key, shape in wrong.items()
        )
        complete = len(found) == len(keys) and not wrong
        state_dict[prefix + name] = torch.stack(list(found.values())) if complete else parameter


def route(
    logits: torch.Tensor, config: Config, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose K experts for each token and weigh them.

    Covers softmax before or after the choice (Mixtral, Qwen3-MoE, gpt-oss) and the grouped choice with a correction
    bias of DeepSeek-V3 (https://arxiv.org/abs/2412.19437 section 2.1.2), which steers the choice but not the weights.

    Args:
        logits: `(N, E)` router outputs.
        config: the model's description.
        correction: `(E,)` correction bias.

    Returns:
        Weights `(N, K)`, at least float32, and expert indices `(N, K)`.
    """
    scores = upcast(logits)
    if config.moe_router == "sigmoid":
        scores = scores.sigmoid()
    elif config.moe_router == "softmax_topk":
        scores = scores.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    if config.n_expert_groups is not None:
        choice = _mask_groups(choice, config)
    _, indices = choice.topk(config.n_expert_per_token, dim=-1)
    weights = scores.gather(-1, indices)
    if config.moe_router == "topk_softmax":
        weights = weights.softmax(dim=-1)
    elif config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, indices


def _mask_groups(choice: torch.Tensor, config: Config) -> torch.Tensor:
    """Leave only the experts of the best groups; a group counts by the sum of its best scores."""
    assert config.n_expert_groups is not None
    assert config.n_topk_groups is not None
    groups = choice.unflatten(-1, (config.n_expert_groups, -1))  # (N, groups, E / groups)
    best = groups.topk(config.n_topk_scores_per_group or 2, dim=-1).values.sum(dim=-1)
    chosen = best.topk(config.n_topk_groups, dim=-1).indices
    keep = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
    return groups.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(-2)


class LLaMAMoE(nn.Module):
    """Mixture of experts. No loop over tokens: rows are sorted by expert, or each row gathers its experts' weights.

    Gathering has no shape that depends on the data, so decoding compiles; sorting reads every chosen expert's weights
    once, whatever the number of rows, which is what long inputs need.
    """

    layers_class: type[LayersBase] = LayersBase

    def __init__(self, config: Config, path: str = "mlp", layers: LayersBase | None = None) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        self.gate = layers.linear(
            config, f"{path}.gate", "gate", config.n_embd, config.n_expert, config.moe_router_bias
        )
        if config.moe_correction_bias:
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(config.n_expert))
        self.experts = Experts(config, f"{path}.experts", layers)
        if config.n_shared_expert:
            assert config.moe_intermediate_size is not None
            inner = config.moe_intermediate_size * config.n_shared_expert
            self.shared_experts = LLaMAMLP(config, inner, f"{path}.shared_experts", layers)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        config = self.config
        flat = x.reshape(-1, x.size(-1))  # (N, C)
        correction = getattr(self.gate, "e_score_correction_bias", None)
        weights, indices = route(self.gate(flat), config, correction)
        expert = indices.flatten()  # (N * K,)
        n_rows = len(expert)
        if n_rows <= config.n_expert:
            rows = flat.repeat_interleave(config.n_expert_per_token, dim=0)
            y = self.experts(rows, expert, None)
        else:
            order = expert.argsort(stable=True)
            counts = torch.zeros(config.n_expert, dtype=torch.long, device=x.device)
            counts.scatter_add_(0, expert, torch.ones_like(expert))
            rows = flat[order // config.n_expert_per_token]
            sorted_y = self.experts(rows, expert[order], counts)
            y = torch.empty_like(sorted_y).index_copy(0, order, sorted_y)
        y = (y.unflatten(0, (-1, config.n_expert_per_token)) * weights.to(y.dtype).unsqueeze(-1)).sum(dim=1)  # (N, C)
        y = y.view_as(x)
        return y + self.shared_experts(x) if config.n_shared_expert else y
