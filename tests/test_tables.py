# Licensed under the Apache License 2.0, see the LICENSE file.

"""The tables of tensor names and layouts, read in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.checkpoint.plan import build_empty
from litgpt.checkpoint.tables import LITGPT, TABLES, Link, Table, summarize, table_for
from litgpt.checkpoint.views import QKV, At, EveryNth, GroupedQKV, Heads, OfExpert, Rows, Transposed
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.model import GPT

SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 12,
    "head_size": 5,
    "intermediate_size": 14,
    "padded_vocab_size": 23,
    "block_size": 16,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "parallel_residual": False,
    "mlp_class_name": "LLaMAMLP",
}
MOE = {"mlp_class_name": "LLaMAMoE", "n_expert": 3, "n_expert_per_token": 2, "moe_intermediate_size": 7}
SANDWICH = {"post_attention_norm": True, "post_mlp_norm": True}
PARALLEL = {"parallel_residual": True, "shared_attention_norm": True}
POST_NORM = {**SANDWICH, "norm_1": False, "norm_2": False}
NEOX = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "bias": True, "parallel_residual": True}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 4}
DEEPSEEK_V2 = {
    **MOE,
    "n_query_groups": 4,
    "first_k_dense_replace": 1,
    "n_shared_expert": 2,
    "latent_attention": LATENT,
}
FEATURES: dict[str, dict[str, Any]] = {
    "llama": {"bias": True},
    "mistral": {},
    "qwen2": {"attn_bias": True},
    "qwen3": {"norm_qk": True},
    "gemma": {"mlp_class_name": "GemmaMLP", "tie_embeddings": True},
    "gemma2": {"mlp_class_name": "GemmaMLP", **SANDWICH},
    "gemma3_text": {"mlp_class_name": "GemmaMLP", "norm_qk": True, **SANDWICH},
    "mixtral": MOE,
    "qwen3_moe": {**MOE, "norm_qk": True, "moe_indices": [0, 1]},
    "gpt_neox": {**NEOX, "n_query_groups": 4},
    "phi": {**NEOX, "shared_attention_norm": True, "lm_head_bias": True},
    "phi3": {},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": {**DEEPSEEK_V2, "moe_correction_bias": True},
    "cohere2": {"norm_class_name": "LayerNorm", "norm_bias": False, **PARALLEL},
    "ernie4_5": {"bias": True},
    "exaone4": {**POST_NORM, "norm_qk": True},
    "glm": {"attn_bias": True},
    "glm4": {"attn_bias": True, **SANDWICH},
    "gpt2": {**NEOX, "parallel_residual": False, "n_query_groups": 4, "learned_positions": True},
    "granite": {},
    "helium": {},
    "ministral3": {},
    "nemotron": {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP"},
    "olmo3": {**POST_NORM, "norm_qk": True, "norm_qk_type": "olmo2"},
    "olmoe": {**MOE, "norm_qk": True, "norm_qk_type": "olmo2"},
    "seed_oss": {"attn_bias": True},
    "smollm3": {"tie_embeddings": True},
    "olmo": {"norm_class_name": "LayerNorm", "norm_affine": False},
    "olmo2": {**POST_NORM, "norm_qk": True, "norm_qk_type": "olmo2"},
    "falcon": {**NEOX, "bias": False, "n_query_groups": 1, "shared_attention_norm": True},
    "stablelm": {"norm_class_name": "LayerNorm", "attn_bias": True, "norm_qk": True, "norm_qk_type": "each_head"},
    "gpt_oss": {**MOE, "attn_bias": True, "attention_sinks": True, "mlp_bias": True, "moe_router_bias": True},
}


def make_config(family: str, **overrides: Any) -> Config:
    return Config(family=family, **{**SIZES, **FEATURES[family], **overrides})


def random_state(config: Config) -> dict[str, Tensor]:
    state = {name: torch.randn(tensor.shape) for name, tensor in build_empty(GPT, config).state_dict().items()}
    if config.tie_embeddings:
        del state["lm_head.weight"]
    return state


def export(table: Table, state: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    theirs: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        for link in table.export_links(ours, config):
            piece = link.our_view(tensor)
            whole = theirs.setdefault(link.theirs, torch.full(link.their_shape(tuple(piece.shape)), torch.nan))
            link.their_view(whole).copy_(piece)
    return theirs


def load(table: Table, theirs: dict[str, Tensor], shapes: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    ours = {name: torch.full_like(tensor, torch.nan) for name, tensor in shapes.items()}
    for name, tensor in theirs.items():
        for link in table.import_links(table.canonical(name), config):
            link.our_view(ours[link.ours]).copy_(link.their_view(tensor))
    return ours


def test_every_family_is_tested() -> None:
    assert FEATURES.keys() == TABLES.keys()


@pytest.mark.parametrize("family", TABLES)
def test_out_and_in_again(family: str) -> None:
    """Every element of ours reaches theirs and comes back; every element of theirs is one of ours."""
    config = make_config(family)
    state = random_state(config)
    theirs = export(TABLES[family], state, config)
    back = load(TABLES[family], theirs, state, config)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
    for name, tensor in theirs.items():
        assert not tensor.isnan().any(), name
        assert not TABLES[family].is_dropped(name, config), name
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in state.values())


@pytest.mark.parametrize("family", TABLES)
def test_names_match_as_a_whole(family: str) -> None:
    config = make_config(family)
    table = TABLES[family]
    for name in export(table, random_state(config), config):
        for wrong in (f"{name}x", f"{name}.weight.weight", f"x.{name}"):
            assert not table.import_links(wrong, config), wrong
    assert not table.export_links("transformer.h.0.attn.qkv.lora_A", config)


def test_names_depend_on_the_decoder_where_the_family_has_several() -> None:
    norms = {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    for ours, theirs in norms.items():
        (link,) = TABLES["falcon"].export_links(
            f"transformer.h.1.{ours}.bias", make_config("falcon", shared_attention_norm=False)
        )
        assert link.theirs == f"transformer.h.1.{theirs}.bias"
    (link,) = TABLES["falcon"].export_links("transformer.h.1.norm_1.bias", make_config("falcon"))
    assert link.theirs == "transformer.h.1.input_layernorm.bias"


def test_a_norm_for_each_head() -> None:
    config, table = make_config("stablelm"), TABLES["stablelm"]
    links = table.export_links("transformer.h.0.attn.norm_k.weight", config)
    path = "model.layers.0.self_attn.k_layernorm.norms."
    assert [link.theirs for link in links] == [f"{path}0.weight", f"{path}1.weight"]
    whole = torch.arange(10.0).view(2, 5)
    assert torch.equal(links[1].our_view(whole), whole[1])
    assert len(table.import_links(f"{path}1.weight", config)) == 1
    assert not table.import_links(f"{path}2.weight", config), "there are two heads"


def test_unknown_family() -> None:
    with pytest.raises(UserError, match="'mamba'") as caught:
        table_for("mamba")
    assert "llama" in caught.value.hint


# Layouts against plain code


@pytest.mark.parametrize(("n_head", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("tail", [(), (6,)])
def test_fused_attention_layouts(n_head: int, groups: int, tail: tuple[int, ...]) -> None:
    size = 3
    at = At(Config(**{**SIZES, "n_head": n_head, "n_query_groups": groups, "head_size": size}))
    q, k, v = (torch.randn(heads, size, *tail) for heads in (n_head, groups, groups))
    ours = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    per_group = n_head // groups
    blocks = [torch.cat([q[g * per_group : (g + 1) * per_group], k[g, None], v[g, None]]) for g in range(groups)]
    grouped = torch.cat(blocks).flatten(0, 1)
    for part, tensor in zip("qkv", (q, k, v), strict=True):
        expected = tensor.unflatten(0, (groups, -1))
        for view, whole in ((QKV(part), ours), (Heads(part), tensor.flatten(0, 1)), (GroupedQKV(part), grouped)):
            piece = view.view(whole, at)
            assert torch.equal(piece, expected)
            assert piece.data_ptr() >= whole.data_ptr()
            assert piece._base is not None, "a view, not a copy"
            assert view.whole(tuple(piece.shape), at) == whole.shape


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (Rows(1, 3), lambda t: t[2:4]),
        (EveryNth(1, 3), lambda t: t[1::3]),
        (Transposed(), lambda t: t.transpose(-1, -2)),
        (OfExpert(), lambda t: t[2]),
    ],
)
def test_pieces(view: Any, expected: Any) -> None:
    at = At(Config(**{**SIZES, **MOE, "n_expert": 6}), expert=2)
    whole = torch.randn(6, 4, 5)
    piece = view.view(whole, at)
    assert torch.equal(piece, expected(whole))
    assert view.whole(tuple(piece.shape), at) == whole.shape


@pytest.mark.parametrize(
    ("view", "shape"), [(Rows(0, 2), (5, 3)), (EveryNth(0, 2), (5, 3)), (OfExpert(), (4, 3)), (QKV("v"), (20, 3))]
)
def test_shapes_that_cannot_be_cut_raise(view: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        view.view(torch.zeros(shape), At(make_config("mixtral")))


def separate(config: Config, layer: int, path: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
    sizes = ((7, 12), (7, 12), (12, 7))
    return {
        f"model.layers.{layer}.{path}.{e}.{name}.weight": torch.randn(size)
        for e in range(config.n_expert)
        for name, size in zip(names, sizes, strict=True)
    }


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts_are_the_separate_ones(family: str) -> None:
    config = make_config(family)
    gate, up, down = names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    path = "block_sparse_moe.experts" if family == "mixtral" else "mlp.experts"
    apart = separate(config, 1, path, names)

    def stack(name: str) -> Tensor:
        return torch.stack([apart[f"model.layers.1.{path}.{e}.{name}.weight"] for e in range(config.n_expert)])

    stacked = {
        "model.layers.1.mlp.experts.gate_up_proj": torch.cat([stack(gate), stack(up)], dim=1),
        "model.layers.1.mlp.experts.down_proj": stack(down),
    }
    table = TABLES[family]
    shapes = {name: t for name, t in random_state(config).items() if name.startswith("transformer.h.1.mlp.experts.")}
    from_apart, from_stacked = (load(table, theirs, shapes, config) for theirs in (apart, stacked))
    for name in shapes:
        assert torch.equal(from_apart[name], from_stacked[name])
    assert torch.equal(from_apart["transformer.h.1.mlp.experts.2.fc_1.weight"], stack(gate)[2])
    assert export(table, from_stacked, config).keys() == apart.keys(), "the layout that everybody reads is exported"


def test_gpt_oss_experts() -> None:
    config = make_config("gpt_oss")
    gate_up, bias = torch.randn(3, 12, 14), torch.randn(3, 14)
    down, down_bias = torch.randn(3, 7, 12), torch.randn(3, 12)
    path = "model.layers.0.mlp.experts."
    theirs = {"gate_up_proj": gate_up, "gate_up_proj_bias": bias, "down_proj": down, "down_proj_bias": down_bias}
    shapes = {name: t for name, t in random_state(config).items() if name.startswith("transformer.h.0.mlp.experts.")}
    ours = load(TABLES["gpt_oss"], {path + name: tensor for name, tensor in theirs.items()}, shapes, config)
    for e in range(3):
        expert = f"transformer.h.0.mlp.experts.{e}."
        assert torch.equal(ours[expert + "fc_1.weight"], gate_up[e, :, 0::2].T)
        assert torch.equal(ours[expert + "fc_2.weight"], gate_up[e, :, 1::2].T)
        assert torch.equal(ours[expert + "fc_1.bias"], bias[e, 0::2])
        assert torch.equal(ours[expert + "fc_2.bias"], bias[e, 1::2])
        assert torch.equal(ours[expert + "proj.weight"], down[e].T)
        assert torch.equal(ours[expert + "proj.bias"], down_bias[e])


def test_early_litgpt_attention_is_reordered() -> None:
    config = make_config("llama")
    ours = random_state(config)["transformer.h.1.attn.qkv.weight"]
    parts = [QKV(part).view(ours, At(config)) for part in "qkv"]
    legacy = {"transformer.h.1.attn.attn.weight": torch.cat(parts, dim=1).flatten(0, 2)}
    shapes = {"transformer.h.1.attn.qkv.weight": ours}
    assert torch.equal(load(LITGPT, legacy, shapes, config)["transformer.h.1.attn.qkv.weight"], ours)


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.h.weight", "model.layers.0.h.weight"),
    ],
)
def test_prefixes(name: str, expected: str) -> None:
    assert TABLES["gemma3_text"].canonical(name) == expected


def test_prefix_of_gpt_neox() -> None:
    assert TABLES["falcon"].canonical("h.0.mlp.dense_h_to_4h.weight") == "transformer.h.0.mlp.dense_h_to_4h.weight"
    table = TABLES["gpt_neox"]
    assert table.canonical("layers.0.attention.dense.bias") == "gpt_neox.layers.0.attention.dense.bias"
    assert table.canonical("embed_out.weight") == "embed_out.weight"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma3_text", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"),
        ("gemma3_text", "model.vision_tower.vision_model.embeddings.patch_embedding.weight"),
        ("gemma3_text", "multi_modal_projector.mm_input_projection_weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("deepseek_v3", "model.layers.2.mlp.experts.0.up_proj.weight"),
    ],
)
def test_dropped(family: str, name: str) -> None:
    assert TABLES[family].is_dropped(name, make_config(family))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight"),  # a layer too many is an error, except where it has a meaning
        ("llama", "model.layers.0.self_attn.q_proj.weight_scale"),
        ("gpt_neox", "gpt_neox.layers.0.attention.dense.bias"),
        ("deepseek_v3", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_not_dropped(family: str, name: str) -> None:
    assert not TABLES[family].is_dropped(name, make_config(family))


def test_link_knows_its_expert() -> None:
    (link,) = TABLES["mixtral"].export_links("transformer.h.1.mlp.experts.2.proj.weight", make_config("mixtral"))
    assert isinstance(link, Link)
    assert link.theirs == "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert link.at.expert == 2


def test_summary_names_all() -> None:
    names = [f"h.{i}.a" for i in range(30)] + ["x", "h.1.b", "h.2.b"]
    assert summarize(names) == "h.*.a (30 tensors), x, h.1.b, h.2.b"
