# Licensed under the Apache License 2.0, see the LICENSE file.

"""IA3 against formulas written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litgpt import ia3
from litgpt.ia3 import Config, IA3Experts, IA3Linear
from litgpt.peft import load_variant, variant_state_dict
from tests.test_peft_grid import COMMON, FEATURES, VOCABULARY, base_of
from tests.tiny import random_ids


def make(feature: str, **fields: Any) -> ia3.GPT:
    made = ia3.GPT(Config(**{**COMMON, **FEATURES[feature], **fields})).eval()
    made.load_state_dict(base_of(feature).state_dict())
    return made


def ids(*shape: int) -> Tensor:
    return random_ids(shape, vocab_size=VOCABULARY)


def test_factors_on_keys_and_values_of_the_fused_map() -> None:
    layer = IA3Linear(10, 48, 24, bias=True)
    nn.init.normal_(layer.ia3_scale)
    x = torch.randn(2, 3, 10)
    q, kv = F.linear(x, layer.linear.weight, layer.linear.bias).split(24, dim=-1)
    torch.testing.assert_close(layer(x), torch.cat((q, kv * layer.ia3_scale), dim=-1))


def test_factors_on_the_input() -> None:
    layer = IA3Linear(10, 4)
    nn.init.normal_(layer.ia3_scale)
    x = torch.randn(2, 3, 10)
    torch.testing.assert_close(layer(x), layer.linear(x * layer.ia3_scale))
    torch.testing.assert_close(layer(x), x @ layer.weight.T)


def test_experts_have_factors_of_their_own() -> None:
    layer = IA3Experts(4, 6, 8, bias=True)
    for p in layer.parameters():
        nn.init.normal_(p)
    x, expert = torch.randn(7, 6), torch.tensor([0, 0, 1, 1, 3, 3, 3])
    pairs = zip(expert, x, strict=True)
    expected = torch.stack([layer.weight[e] @ (layer.ia3_scale[e] * row) + layer.bias[e] for e, row in pairs])
    for counts in (None, torch.bincount(expert, minlength=4)):
        torch.testing.assert_close(layer(x, expert, counts), expected)


def test_places() -> None:
    """Keys, values and the inside of feed-forward networks, wherever the architecture has them."""
    plain = {"attn.qkv.ia3_scale": (24,), "mlp.proj.ia3_scale": (14,)}
    shared = {
        "mlp.shared_experts.proj.ia3_scale": (20,),
        **{f"mlp.experts.{j}.proj.ia3_scale": (10,) for j in range(4)},
    }
    latent = {"attn.kv_b_proj.ia3_scale": (32,)}
    expected = {
        "grouped-query": plain,
        "shared experts": {"attn.qkv.ia3_scale": (24,), **shared},
        "latent attention": {**latent, "mlp.proj.ia3_scale": (14,)},
    }
    for feature, tensors in expected.items():
        state = variant_state_dict(make(feature))
        found = {key.split(".", 3)[3]: tuple(value.shape) for key, value in state.items() if ".h.1." in key}
        assert found == tensors
        assert all(ia3.ia3_filter(key, value) for key, value in state.items())


def test_save_and_load() -> None:
    trained, other = make("all at once"), make("all at once")
    torch.manual_seed(0)
    for value in variant_state_dict(trained).values():
        value.copy_(torch.rand_like(value) + 0.5)
    assert not torch.allclose(trained(ids(1, 8)), other(ids(1, 8)))
    load_variant(other, variant_state_dict(trained))
    assert torch.equal(trained(ids(1, 8)), other(ids(1, 8)))


def test_trainable_float32_over_a_bfloat16_base() -> None:
    for feature in ("MoE", "latent attention"):
        made = make(feature).bfloat16()
        ia3.mark_only_ia3_as_trainable(made)
        for p in made.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        found = made(ids(2, 5))
        assert found.dtype == torch.bfloat16
        found.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in made.parameters() if p.requires_grad)
