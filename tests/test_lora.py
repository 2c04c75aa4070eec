# Licensed under the Apache License 2.0, see the LICENSE file.

"""LoRA and its relatives: layers against formulas written out, places, merging, several adapters on one model."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt import lora, model
from litgpt.checkpoint.convert import save_litgpt
from litgpt.errors import UserError
from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache
from litgpt.lora import Config, LoRALinear, LoRAQKVLinear
from litgpt.lora_adapters import LoRAAdapters
from litgpt.lora_layers import LoRAExperts
from litgpt.peft import load_variant, variant_state_dict
from tests.test_peft_grid import ALL_TARGETS, COMMON, FEATURES, MOE, VOCABULARY, base_of
from tests.tiny import random_ids

QKV_WIDTHS = [24, 12, 12]


def make(feature: str = "grouped-query", seed: int = 0, **fields: Any) -> lora.GPT:
    """A model with LoRA on the base of a row of the grid."""
    torch.manual_seed(seed)
    made = lora.GPT(Config(**{**COMMON, **FEATURES[feature], **fields})).eval()
    made.load_state_dict(base_of(feature).state_dict())
    return made


@torch.no_grad()
def learn(made: lora.GPT, seed: int = 1) -> lora.GPT:
    """Give LoRA's tensors values as after training."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in made.named_parameters():
        if "lora_magnitude" in name:
            p.mul_(1 + 0.3 * torch.rand(p.shape, generator=generator))
        elif "lora_" in name:
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return made


def ids(*shape: int, seed: int = 0) -> Tensor:
    return random_ids(shape, seed, VOCABULARY)


def logits(made: model.GPT, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = made(tokens)
    assert isinstance(found, Tensor)
    return found


# Layers


@pytest.mark.parametrize("enabled", list(itertools.product([True, False], repeat=3))[:-1])
@pytest.mark.parametrize("dora", [False, True])
def test_fused_map_is_three_maps(enabled: tuple[bool, ...], dora: bool) -> None:
    """Each part by itself: `W x + scale * B A x`, rows scaled by DoRA's lengths; heads are not n_embd wide together."""
    torch.manual_seed(0)
    layer = LoRAQKVLinear(10, 48, 6, 4, 2, r=3, lora_alpha=5, enable_lora=enabled, use_dora=dora)
    n_parts = sum(enabled)
    widths = [width for width, on in zip(QKV_WIDTHS, enabled, strict=True) if on]
    assert layer.lora_A.shape == (3 * n_parts, 10)
    assert layer.lora_B.shape == (sum(widths), 3)
    for p in (layer.lora_A, layer.lora_B, *([layer.lora_magnitude] if dora else [])):
        nn.init.normal_(p)
    x = torch.randn(2, 5, 10)
    expected, part, row = [], 0, 0
    begin = 0
    for width, on in zip(QKV_WIDTHS, enabled, strict=True):
        weight, bias = layer.linear.weight[begin : begin + width], layer.linear.bias[begin : begin + width]
        if on:
            a, b = layer.lora_A[3 * part : 3 * part + 3], layer.lora_B[row : row + width]
            weight = weight + 5 / 3 * b @ a
            if dora:
                weight = weight / weight.norm(dim=1, keepdim=True) * layer.lora_magnitude[row : row + width, None]
            part, row = part + 1, row + width
        expected.append(x @ weight.T + bias)
        begin += width
    torch.testing.assert_close(layer(x), torch.cat(expected, dim=-1), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(x @ layer.weight.mT + layer.bias, layer(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_experts_are_single_maps(dora: bool) -> None:
    torch.manual_seed(0)
    layer = LoRAExperts(4, 6, 8, bias=True, r=2, lora_alpha=3, use_dora=dora)
    for p in layer.parameters():
        nn.init.normal_(p)
    x, expert = torch.randn(9, 6), torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3])
    weight = layer.weight + 1.5 * layer.lora_B @ layer.lora_A
    if dora:
        weight = weight / weight.norm(dim=-1, keepdim=True) * layer.lora_magnitude.unsqueeze(-1)
    expected = torch.stack([weight[e] @ row + layer.bias[e] for e, row in zip(expert, x, strict=True)])
    for counts in (None, torch.bincount(expert, minlength=4)):  # gathered as in decoding, sorted as in prefill
        torch.testing.assert_close(layer(x, expert, counts), expected, atol=2e-5, rtol=1e-5)


def test_scales() -> None:
    assert LoRALinear(4, 4, r=4, lora_alpha=8).scaling == 2
    assert LoRALinear(4, 4, r=4, lora_alpha=8, use_rslora=True).scaling == 4


def test_rank_zero_is_the_plain_map() -> None:
    layer = LoRALinear(4, 6)
    x = torch.randn(2, 3, 4)
    assert torch.equal(layer(x), layer.linear(x))
    assert [name for name, _ in layer.named_parameters()] == ["linear.weight", "linear.bias"]


def test_dropout_is_for_training_only() -> None:
    layer = LoRALinear(50, 4, r=2, lora_dropout=0.5)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(1, 3, 50)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_pissa_starts_from_the_largest_singular_values() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(12, 9, r=3, lora_alpha=5, init="pissa")
    u, s, v = torch.linalg.svd(layer.linear.weight.detach())
    best = u[:, :3] * s[:3] @ v[:3]
    torch.testing.assert_close(layer.scaling * layer.lora_B @ layer.lora_A, best, atol=1e-5, rtol=0)
    x = torch.randn(2, 3, 12)
    assert torch.equal(layer(x), layer.linear(x))


def test_pissa_as_plain_lora() -> None:
    trained = learn(make(**ALL_TARGETS, lora_init="pissa"))
    plain = make(**{**ALL_TARGETS, "lora_r": 6, "lora_alpha": 10})  # twice the rank at the same scale
    load_variant(plain, lora.plain_lora(variant_state_dict(trained)))
    torch.testing.assert_close(logits(plain, ids(2, 8)), logits(trained, ids(2, 8)), atol=2e-5, rtol=0)


def test_trainable_float32_over_a_bfloat16_base() -> None:
    for fields in ({}, {"use_dora": True}, {"lora_init": "pissa"}):
        made = make("MoE", **ALL_TARGETS, **fields).bfloat16()
        lora.mark_only_lora_as_trainable(made)
        for p in made.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        found = made(ids(2, 5))
        assert found.dtype == torch.bfloat16
        found.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in made.parameters() if p.requires_grad)


# Where updates go


def places(**fields: Any) -> set[str]:
    made = lora.GPT(Config(**{**COMMON, "lora_r": 2, **fields}))
    return {
        name.removeprefix("transformer.")
        for name, layer in made.named_modules()
        if isinstance(layer, lora.LoRALayer) and layer.active
    }


ATTENTION = {f"h.{i}.attn.{name}" for i in range(2) for name in ("qkv", "proj")}
MLP = {f"h.{i}.mlp.{name}" for i in range(2) for name in ("fc_1", "fc_2", "proj")}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("attention", ATTENTION),
        ("mlp", MLP),
        ("all-linear", ATTENTION | MLP),
        ("proj", {"h.0.attn.proj", "h.1.attn.proj"}),
        (["fc_1", "head"], {"h.0.mlp.fc_1", "h.1.mlp.fc_1", "lm_head"}),
        (r"h\.1\..*", {name for name in ATTENTION | MLP if name.startswith("h.1.")}),
        (["query", r"h\.0\.mlp\.proj"], {"h.0.attn.qkv", "h.1.attn.qkv", "h.0.mlp.proj"}),
    ],
)
def test_targets(targets: str | list[str], expected: set[str]) -> None:
    assert places(lora_targets=targets) == expected


def test_targets_choose_parts_of_the_fused_map() -> None:
    for targets, enabled in (("value", [False, False, True]), ("qkv", [True] * 3), ("attention", [True] * 3)):
        made = lora.GPT(Config(**COMMON, lora_r=2, lora_targets=targets))
        assert made.transformer.h[0].attn.qkv.enabled == enabled
    made = lora.GPT(Config(**COMMON, lora_r=2, lora_targets=r"h\.0\.attn\.(query|key)"))
    assert made.transformer.h[0].attn.qkv.enabled == [True, True, False]
    assert type(made.transformer.h[1].attn.qkv) is nn.Linear


def test_router_only_when_asked() -> None:
    for fields in (ALL_TARGETS, {"lora_targets": ".*"}, {"lora_targets": "all-linear"}):
        fields = {**MOE, **fields}
        assert not any("gate" in name for name in places(**fields))
        assert {"h.0.mlp.gate", "h.1.mlp.gate"} <= places(**fields, lora_router=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lora_query": True}, {"q_a_proj", "q_b_proj"}),
        ({"lora_key": True}, {"kv_a_proj_with_mqa", "kv_b_proj"}),
        ({"lora_value": True}, {"kv_a_proj_with_mqa", "kv_b_proj"}),
        ({"lora_targets": "kv_b_proj"}, {"kv_b_proj"}),
    ],
)
def test_latent_attention(fields: dict[str, Any], expected: set[str]) -> None:
    found = places(**{**FEATURES["latent attention"], **fields})
    assert found == {f"h.{i}.attn.{name}" for i in range(2) for name in expected}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_targets": "nowhere"}, "'nowhere' match nothing"),
        ({"lora_targets": ["fc_1", "("]}, "no regular expression"),
        ({"lora_r": -1}, "lora_r must not be negative, got -1"),
        ({"lora_dropout": 1.0}, r"lora_dropout must be in 0\.\.1, got 1\.0"),
        ({"lora_init": "zeros"}, "got 'zeros'"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora.GPT(Config(**{**COMMON, "lora_r": 2, **fields}))


# Loading and saving

LITGPT_FILE = {  # what LitGPT 0.5.13 writes for q, v, projection, mlp and head of rank 3, by shape
    "lm_head.lora_A": (3, 12),
    "lm_head.lora_B": (31, 3),
    "transformer.h.1.attn.qkv.lora_A": (6, 12),
    "transformer.h.1.attn.qkv.lora_B": (36, 3),
    "transformer.h.1.attn.proj.lora_A": (3, 24),
    "transformer.h.1.attn.proj.lora_B": (12, 3),
    "transformer.h.1.mlp.gate.lora_A": (3, 12),
    "transformer.h.1.mlp.gate.lora_B": (4, 3),
    "transformer.h.1.mlp.experts.0.fc_1.lora_A": (3, 12),
    "transformer.h.1.mlp.experts.0.fc_1.lora_B": (10, 3),
    "transformer.h.1.mlp.experts.0.fc_2.lora_A": (3, 12),
    "transformer.h.1.mlp.experts.0.fc_2.lora_B": (10, 3),
    "transformer.h.1.mlp.experts.0.proj.lora_A": (3, 10),
    "transformer.h.1.mlp.experts.0.proj.lora_B": (12, 3),
}


def test_names_and_shapes_are_litgpt_s() -> None:
    state = variant_state_dict(make("MoE", **{**ALL_TARGETS, "lora_key": False, "lora_router": True}))
    others = ("h.0.", "experts.1.", "experts.2.", "experts.3.")
    assert {k: tuple(v.shape) for k, v in state.items() if not any(part in k for part in others)} == LITGPT_FILE
    assert all(lora.lora_filter(key, value) for key, value in state.items())


@pytest.mark.parametrize("feature", ["MoE", "dense first", "shared experts", "grouped router", "latent attention"])
def test_a_base_that_lacks_something_is_refused(feature: str) -> None:
    """Another architecture is never built in silence: one error names every tensor."""
    state = base_of(feature).state_dict()
    lacking = [key for key in state if "h.1.mlp" in key or "kv_b_proj" in key][:3]
    for key in lacking:
        del state[key]
    with pytest.raises(UserError) as error:
        make(feature, **ALL_TARGETS).load_state_dict({**state, "transformer.h.1.surprise": torch.zeros(1)})
    assert "1 unexpected: transformer.h.1.surprise" in str(error.value)
    for key in lacking:
        assert key.rpartition(".")[0] in str(error.value).replace(".linear", "")


def test_a_file_that_does_not_fit_changes_nothing() -> None:
    made = make(**ALL_TARGETS)
    before = {key: value.clone() for key, value in made.state_dict().items()}
    state = variant_state_dict(learn(make(**ALL_TARGETS)))
    state["lm_head.lora_A"] = state["lm_head.lora_A"][:2]
    state["lm_head.lora_C"] = state.pop("transformer.h.0.attn.qkv.lora_B")
    with pytest.raises(UserError) as error:
        load_variant(made, state, "lit_model.pth.lora")
    for part in (
        "lit_model.pth.lora does not fit",
        "1 missing: transformer.h.0.attn.qkv.lora_B",
        "1 unexpected: lm_head.lora_C",
        "lm_head.lora_A [2, 12] instead of [3, 12]",
    ):
        assert part in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"lora_init": "pissa"}])
def test_from_checkpoint_starts_at_the_base(fields: dict[str, Any], tmp_path: Path) -> None:
    """Initial values that depend on the weights are taken when these are there."""
    base = base_of("MoE")
    save_litgpt(base, base.config, tmp_path)
    made = lora.GPT.from_checkpoint(tmp_path, **ALL_TARGETS, **fields)
    torch.testing.assert_close(logits(made, ids(2, 9)), logits(base, ids(2, 9)), atol=1e-5, rtol=0)


# Training


def test_what_is_trainable() -> None:
    def trainable(bias: Any) -> set[str]:
        made = make("biases", lora_r=2, lora_query=True)
        lora.mark_only_lora_as_trainable(made, bias)
        return {name for name, p in made.named_parameters() if p.requires_grad}

    updates, biases = trainable("none"), trainable("all")
    assert updates == {f"transformer.h.{i}.attn.qkv.lora_{x}" for i in range(2) for x in "AB"}
    assert trainable("lora_only") - updates == {f"transformer.h.{i}.attn.qkv.linear.bias" for i in range(2)}
    assert {name for name in biases - updates if not name.endswith("bias")} == set()
    assert {"lm_head.bias", "transformer.ln_f.bias"} < biases
    with pytest.raises(ValueError, match="got 'some'"):
        trainable("some")
    with pytest.raises(ValueError, match="no LoRA layers"):
        lora.mark_only_lora_as_trainable(make())


def test_lora_plus_has_two_rates() -> None:
    made = make(**ALL_TARGETS, use_dora=True)
    lora.mark_only_lora_as_trainable(made)
    slow, fast = lora.lora_plus_groups(made, lr=1e-3, ratio=8)
    assert (slow["lr"], fast["lr"]) == (1e-3, 8e-3)
    assert {id(p) for p in fast["params"]} == {id(layer.lora_B) for layer in lora.lora_layers(made)}
    trainable = {id(p) for p in made.parameters() if p.requires_grad}
    assert {id(p) for p in slow["params"] + fast["params"]} == trainable
    torch.optim.AdamW([slow, fast])


# Merging


def test_unmerging_restores_every_bit_in_bfloat16() -> None:
    """Adding and subtracting in bfloat16 drifts; after fifty rounds nothing may have changed."""
    made = learn(make("MoE", **ALL_TARGETS).bfloat16())
    before = {key: value.clone() for key, value in made.state_dict().items()}
    for _ in range(50):
        lost = lora.merge_lora_weights(made)
        assert any(not torch.equal(value, before[key]) for key, value in made.state_dict().items())
        lora.unmerge_lora_weights(made)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert 0 < lost < 0.1


def test_merge_error_is_what_rounding_takes() -> None:
    for dtype, most in ((torch.float64, 0.0), (torch.bfloat16, 0.05)):
        made = learn(make(**ALL_TARGETS).to(dtype))
        layer = made.transformer.h[0].mlp.fc_1
        exact = layer.linear.weight.double() + layer.scaling * layer.lora_B.double() @ layer.lora_A.double()
        update = exact - layer.linear.weight.double()
        lost = lora.merge_lora_weights(made)
        print(f"\nshare of an update lost by merging in {dtype}: {lost:.2e}")
        assert lost <= most
        own = (layer.linear.weight.double() - exact).norm() / update.norm()
        assert own <= lost + 1e-6


def test_merging_twice_is_merging_once() -> None:
    made = learn(make(**ALL_TARGETS))
    lora.merge_lora_weights(made)
    once = logits(made, ids(1, 7))
    lora.merge_lora_weights(made)
    assert torch.equal(logits(made, ids(1, 7)), once)


def test_base_that_was_not_kept() -> None:
    made = learn(make(**ALL_TARGETS))
    lora.merge_lora_weights(made, keep_base=False)
    with pytest.raises(ValueError, match="keep_base=True"):
        lora.unmerge_lora_weights(made)


def test_merging_the_head_unties_it(caplog: pytest.LogCaptureFixture) -> None:
    made = learn(make("tied embeddings", **ALL_TARGETS))
    embedding = made.transformer.wte.weight.clone()
    with caplog.at_level(logging.WARNING, logger="litgpt.lora"):
        lora.merge_lora_weights(made)
    assert "tied to the embedding" in caplog.text
    assert not made.config.tie_embeddings
    assert torch.equal(made.transformer.wte.weight, embedding)
    assert not torch.equal(made.lm_head.linear.weight, embedding)
    lora.unmerge_lora_weights(made)
    assert made.config.tie_embeddings
    assert made.lm_head.linear.weight is made.transformer.wte.weight


# Several adapters on one model

SMALL = {"lora_r": 2, "lora_alpha": 7, "lora_value": True, "lora_mlp": True}
OTHER = {"lora_r": 3, "lora_alpha": 4, "lora_query": True, "lora_key": True, "lora_head": True, "use_rslora": True}
BOTH = {**ALL_TARGETS, "lora_alpha": 1}
MIXED = ["grouped-query", "MoE", "latent attention", "all at once", "tied embeddings"]


def several(feature: str, **fields: Any) -> tuple[LoRAAdapters, dict[str | None, model.GPT]]:
    """Two adapters of different rank, scale and place on one model, and a model with each alone."""
    alone: dict[str | None, model.GPT] = {None: base_of(feature)}
    adapters = LoRAAdapters(make(feature, seed=5, **BOTH, **fields))
    for seed, (name, own) in enumerate({"small": SMALL, "other": OTHER}.items()):
        trained = learn(make(feature, seed=seed, **own, **fields), seed)
        adapters.add(name, variant_state_dict(trained), trained.config)
        alone[name] = trained
    return adapters, alone


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}])
@pytest.mark.parametrize("feature", MIXED)
def test_switching(feature: str, fields: dict[str, Any]) -> None:
    adapters, alone = several(feature, **fields)
    assert adapters.names == ["small", "other"]
    for name in ("small", "other", None, "small"):
        adapters.use(name)
        torch.testing.assert_close(
            logits(adapters.model, ids(2, 9)), logits(alone[name], ids(2, 9)), atol=2e-5, rtol=1e-5
        )
        lora.merge_lora_weights(adapters.model)  # switching undoes it
    adapters.use(None)
    state = adapters.model.state_dict()
    for key, value in base_of(feature).state_dict().items():
        stem, _, leaf = key.rpartition(".")
        assert torch.equal(value, state[key] if key in state else state[f"{stem}.linear.{leaf}"]), key


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}])
@pytest.mark.parametrize("feature", MIXED)
@torch.no_grad()
def test_an_adapter_a_row(feature: str, fields: dict[str, Any]) -> None:
    """A ragged batch through the cache: each row is what its own adapter alone makes of it."""
    adapters, alone = several(feature, **fields)
    names = ["other", None, "small", "other"]
    adapters.use_rows(names)
    counts, tokens = [5, 3, 6, 1], ids(4, 6)
    cache = KVCache.from_config(adapters.model.config, batch_size=4, max_length=16, dtype=torch.float32)
    first = adapters.model(tokens, cache=cache, step=cache.plan(counts))
    next_token = ids(4, 1, seed=2)
    second = adapters.model(next_token, cache=cache)
    for row, (name, n) in enumerate(zip(names, counts, strict=True)):
        whole = torch.cat((tokens[row : row + 1, :n], next_token[row : row + 1]), dim=1)
        expected = logits(alone[name], whole)[0]
        found = torch.cat((first[row, :n], second[row]))
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="chosen for 4 rows, the batch has 2"):
        adapters.model(tokens[:2])
    adapters.use("small")
    torch.testing.assert_close(logits(adapters.model, tokens), logits(alone["small"], tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["grouped-query", "all at once"])
@torch.no_grad()
def test_decoding_an_adapter_a_row_compiles_to_one_graph(feature: str) -> None:
    torch._dynamo.reset()
    adapters, _ = several(feature)
    made = adapters.model
    adapters.use_rows(["other", None, "small"])
    caches = [KVCache.from_config(made.config, batch_size=3, max_length=16, dtype=torch.float32) for _ in range(2)]
    for cache in caches:
        made(ids(3, 4), cache=cache)
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(made, backend=counter)
    for t in range(4):
        token = ids(3, 1, seed=t)
        compiled = decode(token, caches[0], caches[0].plan(1))
        torch.testing.assert_close(compiled, made(token, cache=caches[1]), atol=1e-4, rtol=0)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_adapters_that_do_not_fit() -> None:
    adapters, _ = several("grouped-query")
    with pytest.raises(ValueError, match="no adapter 'missing': small, other can be used"):
        adapters.use("missing")

    def add(**fields: Any) -> None:
        trained = make(**fields)
        adapters.add("new", variant_state_dict(trained), trained.config)

    with pytest.raises(UserError, match="its rank is 5, the model's 3"):
        add(lora_r=5, lora_query=True)
    with pytest.raises(UserError, match="has DoRA, unlike the model"):
        add(lora_r=2, lora_query=True, use_dora=True)
    only_values = LoRAAdapters(make(lora_r=2, lora_value=True))
    for fields, message in (
        ({"lora_query": True}, "a part of queries, keys and values"),
        ({"lora_mlp": True}, "the model has none there"),
    ):
        trained = make(lora_r=2, **fields)
        with pytest.raises(UserError, match=message):
            only_values.add("new", variant_state_dict(trained), trained.config)
    assert only_values.names == []


def test_removing_and_replacing_an_adapter() -> None:
    adapters, alone = several("grouped-query")
    adapters.use("small")
    adapters.remove("small")
    assert (adapters.used, adapters.names) == (None, ["other"])
    torch.testing.assert_close(logits(adapters.model, ids(1, 5)), logits(alone[None], ids(1, 5)))
    adapters.use("other")
    trained = alone["small"]
    adapters.add("other", variant_state_dict(trained), trained.config)  # type: ignore[arg-type]
    adapters.use("other")
    torch.testing.assert_close(logits(adapters.model, ids(1, 5)), logits(trained, ids(1, 5)), atol=2e-5, rtol=1e-5)


# Quantized bases


@pytest.mark.parametrize("dora", [False, True])
def test_update_beside_a_weight_in_four_bits(dora: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = LoRALinear(64, 128, r=4, lora_alpha=8, bias=False, use_dora=dora)
    quantized = bnb.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    quantized.weight = bnb.nn.Params4bit(layer.linear.weight.data, requires_grad=False, quant_type="nf4")
    layer.linear = quantized.to("cpu")
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 3, 64)
    weight = bnb.functional.dequantize_4bit(quantized.weight.data, quantized.weight.quant_state)
    weight = weight + 2 * layer.lora_B @ layer.lora_A
    if dora:
        weight = weight / weight.norm(dim=1, keepdim=True) * layer.lora_magnitude[:, None]
    torch.testing.assert_close(layer(x), x @ weight.T, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="cannot be merged into a quantized weight"):
        layer.merge()
