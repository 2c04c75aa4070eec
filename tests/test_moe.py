# Licensed under the Apache License 2.0, see the LICENSE file.

"""Mixture of experts: routers and experts against plain Python loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litgpt.config import Config
from litgpt.model import GPT, LLaMAMoE
from tests.tiny import randomize


def moe_config(**overrides: Any) -> Config:
    """Build a tiny mixture-of-experts config; `overrides` are fields of `Config`."""
    fields: dict[str, Any] = {
        "n_layer": 1,
        "n_embd": 12,
        "n_head": 2,
        "vocab_size": 31,
        "padded_vocab_size": 31,
        "block_size": 32,
        "intermediate_size": 20,
        "moe_intermediate_size": 14,
        "mlp_class_name": "LLaMAMoE",
        "norm_class_name": "RMSNorm",
        "parallel_residual": False,
        "bias": False,
        "n_expert": 8,
        "n_expert_per_token": 3,
    }
    return Config(**{**fields, **overrides})


def build_moe(config: Config, seed: int = 0) -> LLaMAMoE:
    """Build the MoE layer of a config with random weights, in float64."""
    moe = LLaMAMoE(config).double().eval()
    randomize(moe, seed)
    return moe


def route_one(config: Config, logits: list[float], correction: list[float]) -> dict[int, float]:
    """Weights of the chosen experts of one token, by the definition, in plain Python."""

    def softmax(values: list[float]) -> list[float]:
        exps = [math.exp(v - max(values)) for v in values]
        return [e / sum(exps) for e in exps]

    def best(candidates: list[int], scores: list[float], k: int) -> list[int]:
        return sorted(candidates, key=lambda e: -scores[e])[:k]

    experts, k = list(range(config.n_expert)), config.n_expert_per_token
    if config.moe_router == "topk_softmax":
        chosen = best(experts, logits, k)
        weights = dict(zip(chosen, softmax([logits[e] for e in chosen]), strict=True))
    elif config.moe_router == "softmax_topk":
        scores = softmax(logits)
        weights = {e: scores[e] for e in best(experts, scores, k)}
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        choice = [s + c for s, c in zip(scores, correction, strict=True)]
        candidates = experts
        if config.n_expert_groups:
            size = config.n_expert // config.n_expert_groups
            groups = [experts[g * size : (g + 1) * size] for g in range(config.n_expert_groups)]
            top = config.n_topk_scores_per_group or min(2, size)
            strength = [sum(sorted((choice[e] for e in group), reverse=True)[:top]) for group in groups]
            kept = best(list(range(len(groups))), strength, config.n_topk_groups or 0)
            candidates = [e for g in kept for e in groups[g]]
        weights = {e: scores[e] for e in best(candidates, choice, k)}
    if config.norm_topk_prob and config.moe_router != "topk_softmax":
        total = sum(weights.values())
        weights = {e: w / total for e, w in weights.items()}
    return {e: w * config.routed_scaling_factor for e, w in weights.items()}


def expert_forward(config: Config, state: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """One gated MLP from its tensors in the state dict."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{prefix}.{name}.weight"], state.get(f"{prefix}.{name}.bias"))

    gate, up = linear("fc_1", x), linear("fc_2", x)
    if (limit := config.swiglu_limit) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return linear("proj", gate * torch.sigmoid(1.702 * gate) * (up + 1))
    return linear("proj", F.silu(gate) * up)


def reference(moe: LLaMAMoE, config: Config, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    state = moe.state_dict()
    correction = state.get("gate.e_score_correction_bias", torch.zeros(config.n_expert)).tolist()
    out = torch.zeros_like(x)
    for b in range(x.size(0)):
        for t in range(x.size(1)):
            token = x[b, t]
            logits = F.linear(token, state["gate.weight"], state.get("gate.bias"))
            for e, weight in route_one(config, logits.tolist(), correction).items():
                out[b, t] += weight * expert_forward(config, state, f"experts.{e}", token)
            if config.n_shared_expert:
                out[b, t] += expert_forward(config, state, "shared_experts", token)
    return out


GROUPED = {"moe_router": "sigmoid", "n_expert_groups": 4, "n_topk_groups": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "topk_softmax": {"moe_router": "topk_softmax"},
    "softmax_topk": {"moe_router": "softmax_topk"},
    "softmax_topk_normed": {"moe_router": "softmax_topk", "norm_topk_prob": True},
    "sigmoid": {"moe_router": "sigmoid"},
    "sigmoid_correction": {"moe_router": "sigmoid", "moe_correction_bias": True, "norm_topk_prob": True},
    "grouped": GROUPED,
    "grouped_one_score": {**GROUPED, "n_topk_scores_per_group": 1, "n_expert_groups": 2, "n_topk_groups": 1},
    "grouped_all": {
        **GROUPED,
        "moe_correction_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_expert": 2,
    },
    "biased_clamped": {"bias": True, "mlp_bias": True, "moe_router_bias": True, "swiglu_limit": 0.6},
    "one_expert": {"n_expert": 1, "n_expert_per_token": 1},
    "all_experts": {"n_expert_per_token": 8},
}


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 40), (2, 17)])
@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_moe_equals_the_plain_loop(name: str, shape: tuple[int, int]) -> None:
    config = moe_config(**ROUTERS[name])
    moe = build_moe(config)
    x = torch.randn(*shape, config.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moe(x), reference(moe, config, x), atol=1e-6, rtol=1e-5)


def test_the_correction_bias_chooses_and_never_weighs() -> None:
    config = moe_config(moe_router="sigmoid", moe_correction_bias=True, n_expert_per_token=1)
    moe = build_moe(config)
    x = torch.randn(1, 1, config.n_embd, dtype=torch.float64)
    state = moe.state_dict()
    bias = torch.zeros(config.n_expert)
    bias[5] = 100.0
    moe.load_state_dict({**state, "gate.e_score_correction_bias": bias})
    weight = torch.sigmoid(F.linear(x[0, 0], state["gate.weight"]))[5]
    expected = weight * expert_forward(config, state, "experts.5", x[0, 0])
    torch.testing.assert_close(moe(x)[0, 0], expected, atol=1e-6, rtol=1e-5)


def test_unnormalised_softmax_over_all_experts() -> None:
    """Softmax over all experts, then top-k, nothing renormalised: identical experts scale the output below one."""
    config = moe_config(moe_router="softmax_topk", norm_topk_prob=False)
    moe = build_moe(config)
    state = moe.state_dict()
    same = {k: (state[k.replace(k.split(".")[1], "0", 1)] if k.startswith("experts.") else v) for k, v in state.items()}
    moe.load_state_dict(same)
    x = torch.randn(1, 4, config.n_embd, dtype=torch.float64)
    probs = F.softmax(F.linear(x, state["gate.weight"]), dim=-1).topk(config.n_expert_per_token).values.sum(-1)
    expected = probs[..., None] * torch.stack([expert_forward(config, same, "experts.0", t) for t in x[0]])[None]
    torch.testing.assert_close(moe(x), expected, atol=1e-6, rtol=1e-5)


def test_state_dict_names_each_expert() -> None:
    config = moe_config(**ROUTERS["grouped_all"])
    model = GPT(config)
    keys = {k.removeprefix("transformer.h.0.mlp.") for k in model.state_dict() if ".mlp." in k}
    parts = ("fc_1", "fc_2", "proj")
    expected = {f"experts.{e}.{p}.weight" for e in range(config.n_expert) for p in parts}
    expected |= {f"shared_experts.{p}.weight" for p in parts} | {"gate.weight", "gate.e_score_correction_bias"}
    assert keys == expected
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert shapes["transformer.h.0.mlp.experts.3.fc_1.weight"] == (14, 12)
    assert shapes["transformer.h.0.mlp.experts.3.proj.weight"] == (12, 14)
    assert shapes["transformer.h.0.mlp.shared_experts.proj.weight"] == (12, 28)


def test_state_dict_round_trip_is_strict_and_exact() -> None:
    config = moe_config(**ROUTERS["biased_clamped"])
    first, second = GPT(config), GPT(config)
    randomize(first, seed=1)
    state = {k: v.clone() for k, v in first.state_dict().items()}
    second.load_state_dict(state, strict=True)
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in state.items())

    name = "transformer.h.0.mlp.experts.4.fc_2.weight"
    with pytest.raises(RuntimeError, match=r"experts\.4\.fc_2\.weight"):
        second.load_state_dict({k: v for k, v in state.items() if k != name}, strict=True)
    with pytest.raises(RuntimeError, match=r"experts\.8\.fc_2\.weight"):
        second.load_state_dict({**state, name.replace(".4.", ".8."): state[name]}, strict=True)
    with pytest.raises(RuntimeError, match=r"experts\.4\.fc_2\.weight"):
        second.load_state_dict({**state, name: state[name][:3]}, strict=True)


def test_dense_first_layers_are_dense() -> None:
    config = moe_config(n_layer=3, first_k_dense_replace=1)
    model = GPT(config)
    assert [isinstance(block.mlp, LLaMAMoE) for block in model.transformer.h] == [False, True, True]
    assert model.transformer.h[0].mlp.fc_1.weight.shape == (20, 12)
    by_index = GPT(moe_config(n_layer=3, moe_indices=[1, 0, 1]))
    assert [isinstance(block.mlp, LLaMAMoE) for block in by_index.transformer.h] == [True, False, True]


def test_work_does_not_grow_with_experts_or_tokens() -> None:
    """No Python loop over tokens or experts: the number of operations is the same for any of them."""

    def count(n_expert: int, n_token: int) -> int:
        config = moe_config(n_expert=n_expert)
        moe = build_moe(config)
        x = torch.randn(1, n_token, config.n_embd, dtype=torch.float64)
        with torch.no_grad(), torch.profiler.profile() as profile:
            moe(x)
        return sum(e.count for e in profile.key_averages() if e.key.startswith("aten::"))

    assert count(8, 1) == count(64, 1)  # decode
    assert count(8, 20) == count(8, 200)  # prefill: no loop over tokens


def test_gradients_reach_every_used_expert_and_the_router() -> None:
    config = moe_config(**{**ROUTERS["grouped_all"], "n_topk_groups": 4})
    moe = build_moe(config)
    x = torch.randn(4, 16, config.n_embd, dtype=torch.float64)
    moe(x).square().sum().backward()
    for name, parameter in moe.named_parameters():
        if "correction" not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"n_expert_per_token": 9}, ("9", "8")),
        ({"n_expert_groups": 3, "n_topk_groups": 1}, ("8", "3")),
        ({"n_expert_groups": 4, "n_topk_groups": 5}, ("5", "4")),
        ({"n_expert_groups": 0, "n_topk_groups": 1}, ("8", "0")),
        ({"n_expert_groups": 4, "n_topk_groups": 2, "n_topk_scores_per_group": 3}, ("3", "2")),
        ({"n_expert_groups": 8, "n_topk_groups": 2}, ("2", "1")),
    ],
)
def test_contradicting_fields_are_named(fields: dict[str, int], numbers: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r".*".join(numbers)):
        moe_config(**fields)
