# Licensed under the Apache License 2.0, see the LICENSE file.

"""The adapters against formulas written out, and the faults that a kept prompt brings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litgpt import adapter, adapter_v2, model
from litgpt.adapter_v2 import AdapterV2Linear
from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.peft import Adapters, VariantGPT, load_variant, variant_state_dict
from tests.test_peft_grid import COMMON, FEATURES, PROMPTS, VOCABULARY, base_of
from tests.tiny import random_ids, randomize

VARIANTS = {"adapter": adapter, "adapter_v2": adapter_v2}


def make(variant: Any, feature: str = "grouped-query", **fields: Any) -> Any:
    """A variant with random weights on the sizes of a row of the grid."""
    config = variant.Config(**{**COMMON, **FEATURES[feature], **PROMPTS, **fields})
    made = variant.GPT(config).eval()
    randomize(made, seed=7)
    return made


def ids(*shape: int, seed: int = 0) -> Tensor:
    return random_ids(shape, seed, VOCABULARY)


# The prompt


@pytest.mark.parametrize("feature", ["multi-head", "grouped-query", "multi-query", "biases", "qk-norm"])
def test_prompt_is_attended_to_by_every_head(feature: str) -> None:
    """Keys and values from the rows of the fused map that belong to them, head by head, unrotated."""
    attn = make(adapter, feature).transformer.h[1].attn
    config, size = attn.config, COMMON["head_size"]
    n_head, n_groups = config.n_head, config.n_query_groups
    q = torch.randn(2, n_head, 5, size)
    weight, bias = attn.qkv.weight, attn.qkv.bias
    prompt = attn.adapter_wte.weight
    fused = prompt @ weight.T + (0 if bias is None else bias)
    expected = torch.empty(2, n_head, 5, size)
    for head in range(n_head):
        group = head // (n_head // n_groups)
        k = fused[:, (n_head + group) * size :][:, :size]
        v = fused[:, (n_head + n_groups + group) * size :][:, :size]
        if config.norm_qk:
            k = attn.norm_k(k)
        weights = (q[:, head] @ k.T / math.sqrt(size)).softmax(dim=-1)
        expected[:, head] = attn.gating_factor[0, 0, head, 0] * (weights @ v)
    step = Step.without_cache(5, torch.device("cpu"))
    view = model.KVView(*(torch.randn(2, n_groups, 5, size) for _ in range(2)), step.pos.unsqueeze(1), 5)
    plain = model.CausalSelfAttention.attend(attn, q, view, step)
    torch.testing.assert_close(attn.attend(q, view, step), plain + expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("length", [3, 4, 9, 20])
def test_prompt_is_seen_whatever_the_length_and_the_window(variant: str, length: int) -> None:
    """A prompt as long as the step, or longer than the window, is attended to in whole by every query."""
    made = make(VARIANTS[variant], "sliding window", adapter_prompt_length=length)
    with torch.no_grad():
        before = made(ids(1, 9))
        for position in range(length):
            wte = made.transformer.h[2].attn.adapter_wte.weight
            kept = wte[position].clone()
            wte[position] += 1
            changed = (made(ids(1, 9)) - before).abs().amax(dim=-1)[0]
            assert (changed > 0).all(), f"prompt token {position} is not seen by {(changed == 0).nonzero()[:, 0]}"
            wte[position] = kept


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("feature", ["grouped-query", "latent attention"])
def test_nothing_is_kept_between_steps(variant: str, feature: str) -> None:
    """The prompt gets its gradient after a validation pass, backward works twice, and a change is seen at once."""
    made = make(VARIANTS[variant], feature).train()
    prompt = made.transformer.h[1].attn.adapter_wte.weight
    with torch.no_grad():
        made.eval()(ids(1, 6))
    made.train()
    for _ in range(2):
        prompt.grad = None
        made(ids(2, 6)).sum().backward()
        assert prompt.grad is not None
        assert prompt.grad.count_nonzero()
    with torch.no_grad():
        made.set_kv_cache(1, 16)
        made(ids(1, 4), torch.arange(4))
        prompt.mul_(2)
        cached = made(ids(1, 1, seed=1), torch.tensor([4]))
        fresh = made(torch.cat((ids(1, 4), ids(1, 1, seed=1)), dim=1))[:, -1:]
        # only the last layer has a prompt, so what the cache holds does not depend on it
        torch.testing.assert_close(cached, fresh, atol=1e-5, rtol=0)


def test_first_prompted_layer() -> None:
    names = set(variant_state_dict(make(adapter, "sliding window", adapter_start_layer=1)))
    assert names == {f"transformer.h.{i}.attn.{x}" for i in (1, 2) for x in ("gating_factor", "adapter_wte.weight")}
    with pytest.raises(ValueError, match="nothing would be trained"):
        adapter.mark_only_adapter_as_trainable(make(adapter, adapter_start_layer=2))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_starts_at_the_base(variant: str) -> None:
    base = base_of("MoE")
    made = VARIANTS[variant].GPT(VARIANTS[variant].Config(**{**COMMON, **FEATURES["MoE"], **PROMPTS}))
    made.load_state_dict(base.state_dict())
    torch.testing.assert_close(made(ids(2, 9)), base(ids(2, 9)), atol=1e-5, rtol=0)


# Files: the names and shapes of LitGPT 0.5.13, second layer

PROMPT_FILE = {"transformer.h.1.attn.gating_factor": (1, 1, 4, 1), "transformer.h.1.attn.adapter_wte.weight": (4, 12)}
WIDTHS = {
    "lm_head": 31,
    "transformer.h.1.attn.qkv": 48,
    "transformer.h.1.attn.proj": 12,
    "transformer.h.1.mlp.gate": 4,
    "transformer.h.1.mlp.experts.0.fc_1": 10,
    "transformer.h.1.mlp.experts.0.fc_2": 10,
    "transformer.h.1.mlp.experts.0.proj": 12,
}
V2_FILE = {
    **PROMPT_FILE,
    **{f"{name}.adapter_{x}": (width,) for name, width in WIDTHS.items() for x in ("bias", "scale")},
    **{f"transformer.{name}.weight": (12,) for name in ("h.1.norm_1", "h.1.norm_2", "ln_f")},
}


@pytest.mark.parametrize(("variant", "expected"), [("adapter", PROMPT_FILE), ("adapter_v2", V2_FILE)])
def test_names_and_shapes_are_litgpt_s(variant: str, expected: dict[str, tuple[int, ...]]) -> None:
    made = make(VARIANTS[variant], "MoE", moe_router_bias=False, mlp_bias=False)
    others = ("h.0.", "experts.1.", "experts.2.", "experts.3.")
    state = variant_state_dict(made)
    assert {k: tuple(v.shape) for k, v in state.items() if not any(part in k for part in others)} == expected
    found = {key for key in made.state_dict() if VARIANTS[variant].adapter_filter(key, None)}
    assert found == set(state)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_save_and_load(variant: str) -> None:
    trained, other = make(VARIANTS[variant], "all at once"), make(VARIANTS[variant], "all at once")
    state = {key: value + 0.1 for key, value in variant_state_dict(trained).items()}
    load_variant(trained, state)
    assert not torch.allclose(trained(ids(1, 8)), other(ids(1, 8)))
    load_variant(other, variant_state_dict(trained))
    assert torch.equal(trained(ids(1, 8)), other(ids(1, 8)))
    with pytest.raises(UserError, match=r"1 missing: transformer\.h\.1\.attn\.gating_factor"):
        load_variant(other, {k: v for k, v in state.items() if k != "transformer.h.1.attn.gating_factor"})


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_several_on_one_model(variant: str) -> None:
    base = base_of("grouped-query")
    module = VARIANTS[variant]
    made = module.GPT(module.Config(**{**COMMON, **PROMPTS})).eval()
    made.load_state_dict(base.state_dict())
    adapters, expected = Adapters(made), {}
    for seed, name in enumerate(("a", "b")):
        trained: VariantGPT = module.GPT(made.config).eval()
        trained.load_state_dict(base.state_dict())
        generator = torch.Generator().manual_seed(seed)
        for value in variant_state_dict(trained).values():
            value.add_(torch.randn(value.shape, generator=generator))
        adapters.add(name, variant_state_dict(trained))
        expected[name] = trained(ids(2, 6))
    for name in ("a", "b", "a"):
        adapters.use(name)
        assert torch.equal(made(ids(2, 6)), expected[name])
    adapters.use(None)
    torch.testing.assert_close(made(ids(2, 6)), base(ids(2, 6)), atol=1e-5, rtol=0)


# Version 2


def test_linear() -> None:
    layer = AdapterV2Linear(3, 5)
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(2, 4, 3)
    expected = layer.adapter_scale * (F.linear(x, layer.linear.weight, layer.linear.bias) + layer.adapter_bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(F.linear(x, layer.weight) + layer.shift, expected)


@pytest.mark.parametrize("absorbed", [True, False])
def test_latent_attention_with_shifted_keys_and_values(absorbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed into queries and outputs, or expanded: what `kv_b_proj` makes of every latent, written out."""
    monkeypatch.setattr(model, "LATENT_ABSORB_LIMIT", 170 if absorbed else 0)
    attn = make(adapter_v2, "latent attention").transformer.h[0].attn  # without a prompt
    config, n_tokens = attn.config, 6
    q = torch.randn(2, config.n_head, n_tokens, config.qk_head_dim)
    latent = torch.randn(2, 1, n_tokens, config.kv_lora_rank + config.qk_rope_head_dim)
    step = Step.without_cache(n_tokens, torch.device("cpu"))
    view = model.KVView(latent, latent[..., : config.kv_lora_rank], step.pos.unsqueeze(1), n_tokens)
    up = attn.kv_b_proj(view.v[:, 0]).unflatten(-1, (config.n_head, -1)).transpose(1, 2)  # (B, H, T, nope + v)
    k_nope, v = up.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
    k = torch.cat((k_nope, latent[..., config.kv_lora_rank :].expand(-1, config.n_head, -1, -1)), dim=-1)
    scores = (q @ k.mT * attn.scale).masked_fill(~torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(attn.attend(q, view, step), scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["biases", "MoE", "latent attention", "softcap"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_trainable_float32_over_a_bfloat16_base(variant: str, feature: str) -> None:
    made = make(VARIANTS[variant], feature).bfloat16()
    mark = {
        "adapter": adapter.mark_only_adapter_as_trainable,
        "adapter_v2": adapter_v2.mark_only_adapter_v2_as_trainable,
    }
    mark[variant](made)
    for p in made.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    found = made(ids(2, 5))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in made.parameters() if p.requires_grad)


def test_trained_norms() -> None:
    made = make(adapter_v2, "qk-norm olmo2")
    adapter_v2.mark_only_adapter_v2_as_trainable(made)
    norms = {name for name, p in made.named_parameters() if "norm" in name or "ln_f" in name if p.requires_grad}
    assert norms == {"transformer.ln_f.weight"} | {
        f"transformer.h.{i}.norm_{n}.weight" for i in range(2) for n in (1, 2)
    }
