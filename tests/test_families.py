# Licensed under the Apache License 2.0, see the LICENSE file.

"""`config.json` -> `Config`, against `transformers` and hand-written files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from litgpt.checkpoint.plan import plain_state
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.families.architectures import ARCHITECTURES
from tests import tiny
from tests.published_configs import (
    DEEPSEEK_V3,
    EVERY_TYPE,
    FALCON_7B,
    GEMMA_2_2B,
    GEMMA_3_4B,
    GPT_OSS,
    LLAMA_32_1B,
    MISTRAL_V01,
    OLMO_2_7B,
    PHI_35_MINI,
    PUBLISHED,
    PYTHIA_70M,
    QWEN3_30B,
)


def old_spelling(v5: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 wrote for the same model."""
    out = dict(v5)
    out["torch_dtype"] = out.pop("dtype", None)
    if "rope_parameters" not in v5:
        return out
    rope = copy.deepcopy(out.pop("rope_parameters"))
    out.pop("layer_types", None) if v5["model_type"] in ("qwen2", "qwen3") else None
    if "full_attention" in rope:
        if v5["model_type"] != "olmo3":
            out["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    neox = v5["model_type"] == "gpt_neox"
    out["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
    if (share := rope.pop("partial_rotary_factor", None)) is not None:
        out["rotary_pct" if neox else "partial_rotary_factor"] = share
    rope["type"] = rope.pop("rope_type")
    out["rope_scaling"] = None if rope["type"] == "default" else rope
    return out


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_spelling_of_a_file_means_the_same(name: str, tmp_path: Path) -> None:
    hf = tiny.tiny_hf_config(name)
    config = Config.from_hf(hf.to_dict())
    hf.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert Config.from_hf(tmp_path, name="") == config
    assert Config.from_hf(old_spelling(saved)) == config
    assert config.family == hf.model_type
    assert (config.n_layer, config.n_embd, config.n_head) == (hf.num_hidden_layers, hf.hidden_size, 4)
    assert (config.vocab_size, config.padded_vocab_size, config.block_size) == (113, 113, 64)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_layers_are_those_of_transformers(name: str) -> None:
    model = tiny.tiny_hf_model(name)
    hf, config = model.config, Config.from_hf(model.config.to_dict())
    backbone = getattr(model, model.base_model_prefix)
    for i, layer in enumerate(backbone.h if hasattr(backbone, "h") else backbone.layers):
        parts = dict(layer.named_children())
        attention = next(part for name, part in parts.items() if name.startswith(("self_att", "att")))
        scale = attention.beta if hf.model_type == "falcon" else attention.scaling
        assert config.attention_scale == pytest.approx(scale, rel=1e-6)
        kind = getattr(hf, "layer_types", None)
        window = getattr(hf, "sliding_window", None)
        sliding = kind[i] == "sliding_attention" if kind else window is not None
        assert config.layer_window(i) == (window if sliding else None)
        assert config.layer_is_moe(i) == (hasattr(layer.mlp, "experts"))
    if hasattr(backbone, "rotary_emb") and "sliding_attention" not in hf.rope_parameters:
        rotary = backbone.rotary_emb
        adjustments = config.rope_adjustments or {}
        assert adjustments.get("attention_factor", 1.0) == pytest.approx(rotary.attention_scaling, rel=1e-6)
        assert len(rotary.inv_freq) == -(-config.rope_n_elem // 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_agree_with_the_registry(name: str) -> None:
    from_file, known = vars(Config.from_hf(PUBLISHED[name])), vars(Config.from_name(name))
    differ = {key for key in known if from_file[key] != known[key]}
    allowed = {"name", "hf_config", "prompt_style", "vocab_size", "padding_multiple", "rope_adjustments"}
    if name == "Mistral-7B-v0.1":
        allowed |= {"block_size"}  # LitGPT stops at the window
    if name.startswith("Gemma"):
        allowed |= {"norm_eps"}  # 1e-6 in the file; LitGPT says 1e-5
    if name == "Gemma-3-4b-it":
        allowed |= {"padded_vocab_size"}  # the published embedding has 64 rows more
    if name == "Qwen3-30B-A3B":
        allowed |= {"moe_router", "norm_topk_prob"}  # two spellings of the same weights
    assert differ <= allowed
    if (rope := known["rope_adjustments"]) is not None:
        assert {key: value for key, value in from_file["rope_adjustments"].items() if key != "rope_type"} == rope


def test_gemma_3_multimodal_file() -> None:
    config = Config.from_hf(GEMMA_3_4B)
    assert (config.family, config.n_head, config.n_query_groups, config.head_size) == ("gemma3_text", 8, 4, 256)
    assert config.padded_vocab_size == 262208
    assert config.rope_adjustments == {"rope_type": "linear", "factor": 8.0}
    assert [config.layer_window(i) for i in range(6)] == [1024] * 5 + [None]
    assert [config.layer_rope(i) for i in range(6)] == [1] * 5 + [0]
    assert (config.rope_base, config.rope_local_base_freq) == (1e6, 1e4)
    assert config.norm_unit_offset
    assert config.tie_embeddings


def test_deepseek_v3_file() -> None:
    config = Config.from_hf(DEEPSEEK_V3)
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.rope_adjustments is not None
    assert config.rope_adjustments["attention_factor"] == 1.0
    assert [config.layer_is_moe(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert (config.moe_router, config.n_expert_groups, config.n_topk_groups) == ("sigmoid", 8, 4)
    assert config.moe_correction_bias
    assert config.rope_interleave


def test_gpt_oss_file() -> None:
    config = Config.from_hf(GPT_OSS)
    assert (config.n_expert, config.n_expert_per_token, config.moe_intermediate_size) == (32, 4, 2880)
    assert config.attention_sinks
    assert config.attn_bias
    assert config.attn_proj_bias
    assert config.rope_adjustments is not None
    assert config.rope_adjustments["truncate"] is False
    assert config.layer_window(0) == 128
    assert config.layer_window(1) is None
    without = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "layer_types")}
    assert Config.from_hf(without) == config


def test_kimi_k2_is_a_deepseek_v3() -> None:
    assert Config.from_hf(DEEPSEEK_V3 | {"model_type": "kimi_k2"}) == Config.from_hf(DEEPSEEK_V3)


def test_layers_without_rotation() -> None:
    smollm3 = {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 4, "rope_scaling": None}
    config = Config.from_hf(LLAMA_32_1B | smollm3)
    assert [config.layer_rope(i) for i in range(5)] == [0, 0, 0, -1, 0]
    assert Config.from_hf(LLAMA_32_1B | smollm3 | {"no_rope_layers": None}) == config
    for wrong in ([1, 0], [2] * 16, "none"):
        with pytest.raises(UserError, match="expected a 0 or 1 for each of 16 layers"):
            Config.from_hf(LLAMA_32_1B | smollm3 | {"no_rope_layers": wrong})
    with pytest.raises(UserError, match="use_sliding_window is True, only False is supported"):
        Config.from_hf(LLAMA_32_1B | smollm3 | {"use_sliding_window": True})

    raw = {key: v for key, v in LLAMA_32_1B.items() if key not in ("attention_bias", "mlp_bias", "rope_scaling")}
    raw |= {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLLG"}
    config = Config.from_hf(raw)
    assert [config.layer_window(i) for i in range(5)] == [8, 8, 8, None, 8]
    assert [config.layer_rope(i) for i in range(5)] == [0, 0, 0, -1, 0]
    config = Config.from_hf(raw | {"sliding_window": None, "sliding_window_pattern": None})
    assert (config.sliding_window_size, config.rope_indices) == (None, None)
    with pytest.raises(UserError, match="sliding_window_pattern is 'LGLG', expected a whole number"):
        Config.from_hf(raw | {"sliding_window_pattern": "LGLG"})


def test_stretched_layers_of_olmo_3() -> None:
    raw = OLMO_2_7B | {"model_type": "olmo3"}
    assert Config.from_hf(raw).rope_indices is None
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    config = Config.from_hf(raw | {"rope_scaling": scaling})
    assert (config.rope_base, config.rope_local_base_freq) == (500000, 500000)
    assert [config.layer_rope(i) for i in range(5)] == [1, 1, 1, 0, 1]


def test_query_growth_is_read_where_it_has_a_meaning() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    raw = {key: v for key, v in MISTRAL_V01.items() if key not in ("sliding_window", "rope_theta")}
    raw |= {"rope_parameters": rope}
    assert Config.from_hf(raw | {"model_type": "ministral3"}).query_growth == 0.1
    with pytest.raises(UserError, match="unknown keys in the rope scaling: llama_4_scaling_beta"):
        Config.from_hf(raw)


def test_longrope_file() -> None:
    rope = Config.from_hf(PHI_35_MINI).rope_adjustments
    assert rope is not None
    assert (rope["rope_type"], rope["original_max_seq_len"], len(rope["long_factor"])) == ("longrope", 4096, 48)
    assert rope["attention_factor"] == pytest.approx(1.1902380714238083)
    short = PHI_35_MINI["rope_scaling"] | {"short_factor": [1.0]}
    with pytest.raises(UserError, match="short_factor has 1 entries, 48"):
        Config.from_hf(PHI_35_MINI | {"rope_scaling": short})


def test_deepseek_v2_file() -> None:
    v3_only = ("num_nextn_predict_layers", "topk_method", "scoring_func", "norm_topk_prob")
    raw = {key: value for key, value in DEEPSEEK_V3.items() if key not in v3_only}
    raw |= {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
    config = Config.from_hf(raw)
    assert (config.moe_router, config.n_expert_groups, config.moe_correction_bias) == ("softmax_topk", None, False)
    grouped = Config.from_hf(raw | {"topk_method": "group_limited_greedy"})
    assert (grouped.n_expert_groups, grouped.n_topk_scores_per_group) == (8, 1)


def test_dense_layers_between_mixtures() -> None:
    config = Config.from_hf(QWEN3_30B | {"mlp_only_layers": [1], "decoder_sparse_step": 1})
    assert [config.layer_is_moe(i) for i in range(3)] == [True, False, True]
    config = Config.from_hf(QWEN3_30B | {"decoder_sparse_step": 2})
    assert [config.layer_is_moe(i) for i in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("change", "groups", "parallel", "shared"),
    [
        ({}, 1, True, True),
        ({"multi_query": False}, 71, True, True),
        ({"multi_query": False, "parallel_attn": False}, 71, False, False),
        ({"new_decoder_architecture": True, "num_kv_heads": 71}, 71, True, False),
        ({"new_decoder_architecture": True, "num_kv_heads": 71, "num_ln_in_parallel_attn": 1}, 71, True, True),
    ],
)
def test_decoders_of_falcon(change: dict[str, Any], groups: int, parallel: bool, shared: bool) -> None:
    config = Config.from_hf(FALCON_7B | change)
    assert config.n_query_groups == groups
    assert (config.parallel_residual, config.shared_attention_norm) == (parallel, shared)


def test_falcon_with_alibi_is_refused() -> None:
    with pytest.raises(UserError, match="alibi is true, only rotary positions are supported"):
        Config.from_hf(FALCON_7B | {"alibi": True})
    with pytest.raises(UserError, match="new_decoder_architecture without parallel_attn"):
        Config.from_hf(FALCON_7B | {"new_decoder_architecture": True, "parallel_attn": False})


def test_a_biased_and_an_unbiased_neox() -> None:
    assert Config.from_hf(PYTHIA_70M).bias
    config = Config.from_hf(PYTHIA_70M | {"attention_bias": False})
    assert (config.bias, config.attn_bias, config.mlp_bias) == (False, False, True)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_gemma_1_means_tanh_whatever_it_says(activation: str) -> None:
    raw = GEMMA_2_2B | {"model_type": "gemma", "hidden_act": activation, "hidden_activation": None}
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window"):
        del raw[key]
    config = Config.from_hf(raw)
    assert (config.mlp_class_name, config.gelu_approximate) == ("GemmaMLP", "tanh")
    assert Config.from_hf(LLAMA_32_1B | {"hidden_act": "gelu"}).gelu_approximate == "none"


@pytest.mark.parametrize(
    ("model_type", "billions"),
    [("gpt2", 0.124), ("smollm3", 3.08), ("nemotron", 4.19), ("helium", 2.17), ("exaone4", 32.0), ("ernie4_5", 0.361)],
)
def test_published_files_give_models_of_the_published_size(model_type: str, billions: float) -> None:
    config = Config.from_hf(EVERY_TYPE[model_type])
    state = plain_state(config)
    if config.tie_embeddings:
        del state["lm_head.weight"]
    assert sum(tensor.numel() for tensor in state.values()) / 1e9 == pytest.approx(billions, rel=5e-3)


# Errors


def test_unknown_keys_are_listed_together() -> None:
    with pytest.raises(UserError, match="another_thing, swiglu_limit, use_magic") as caught:
        Config.from_hf(LLAMA_32_1B | {"use_magic": True, "another_thing": 1, "swiglu_limit": 7.0, "unset": None})
    assert caught.value.hint


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'mamba2' is not supported") as caught:
        Config.from_hf(LLAMA_32_1B | {"model_type": "mamba2"})
    assert "gemma3_text" in caught.value.hint
    for missing in ({}, {"model_type": None}, {"model_type": ["llama"]}):
        with pytest.raises(UserError, match="no model_type"):
            Config.from_hf(missing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized .method 'awq'"),
        ({"quantization": {"bits": 4}}, "quantized"),
        ({"hidden_size": "2048"}, "hidden_size is '2048', expected a whole number"),
        ({"hidden_size": 2048.5}, "hidden_size is 2048.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"num_key_value_heads": 5}, "n_head 32 is not a multiple of n_query_groups 5"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"rope_scaling": {"rope_type": "mystery"}}, "rope_type 'mystery' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type is"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": {"rope_type": "default"}}, "both rope_scaling and rope_parameters"),
        ({"rope_interleaved": True}, "rope_interleaved is True, only False is supported"),
        ({"num_experts_per_tok": 2}, "unknown keys"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config.from_hf(LLAMA_32_1B | change)


def test_rope_by_kind_of_layer() -> None:
    raw = {key: value for key, value in GEMMA_2_2B.items() if key != "rope_theta"}
    full = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    both = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Config.from_hf(raw | {"rope_parameters": both})
    assert (config.rope_base, config.rope_local_base_freq) == (1e6, 1e4)
    assert [config.layer_rope(i) for i in range(3)] == [1, 0, 1]
    same = Config.from_hf(raw | {"rope_parameters": {"full_attention": full, "sliding_attention": full}})
    assert same.rope_indices is None
    for change, message in (
        ({"rope_type": "linear", "factor": 4.0}, "scaled or partial"),
        ({"partial_rotary_factor": 0.5}, "scaled or partial"),
        ({"mrope_section": [1]}, "unknown keys in the rope scaling: mrope_section"),
    ):
        with pytest.raises(UserError, match=message):
            Config.from_hf(raw | {"rope_parameters": both | {"sliding_attention": change}})
    with pytest.raises(UserError, match="unknown keys in rope_parameters: rope_theta"):
        Config.from_hf(raw | {"rope_parameters": both | {"rope_theta": 1.0}})


def test_dynamic_scaling_ends_at_the_trained_length(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.from_hf(LLAMA_32_1B | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (config.rope_adjustments, config.block_size) == (None, 131072)
    assert "dynamic rope scaling" in caplog.text


def test_contradicting_layers() -> None:
    with pytest.raises(UserError, match="layer_types disagree"):
        Config.from_hf(MISTRAL_V01 | {"layer_types": ["full_attention"] * 32})
    with pytest.raises(UserError, match="layer_types has 2 entries for 26 layers"):
        Config.from_hf(GEMMA_2_2B | {"layer_types": ["full_attention"] * 2})
    with pytest.raises(UserError, match="sliding_window is not set"):
        Config.from_hf(GEMMA_2_2B | {"sliding_window": None})
    with pytest.raises(UserError, match="may hold full_attention and sliding_attention only"):
        Config.from_hf(GEMMA_2_2B | {"layer_types": ["linear_attention"] * 26})
    with pytest.raises(UserError, match="use_bidirectional_attention"):
        Config.from_hf(GEMMA_2_2B | {"use_bidirectional_attention": True})
    with pytest.raises(UserError, match="gives sliding_window twice: 4096 and 128"):
        Config.from_hf(GEMMA_2_2B | {"sliding_window_size": 128})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama", ' + "[" * 100_000])
def test_damaged_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid JSON"):
        Config.from_hf(tmp_path)


def test_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PYTHIA_70M), encoding="utf-8-sig")
    assert Config.from_hf(tmp_path).n_layer == 6


def _places(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    outer: list[tuple[str, ...]] = [(key,) for key in raw]
    return outer + [(key, part) for key, value in raw.items() if isinstance(value, dict) for part in value]


def _survives(raw: dict[str, Any]) -> bool:
    """Whether the file is accepted; anything but a `UserError` passes through and fails the test."""
    try:
        Config.from_hf(raw)
    except UserError:
        return False
    return True


def _accepted_without(raw: dict[str, Any]) -> set[tuple[str, ...]]:
    """Damage every key in every way; returns those that may be missing."""
    accepted = set()
    for place in _places(raw):
        for value in (..., None, "text", -1, 0, 1.5, True, [], {}, [None], {"a": 1}, 10**400, float("inf")):
            damaged: Any = copy.deepcopy(raw)
            parent = damaged[place[0]] if len(place) == 2 else damaged
            if value is ...:
                del parent[place[-1]]
            else:
                parent[place[-1]] = value
            if _survives(damaged) and value is ...:
                accepted.add(place)
    return accepted


@pytest.mark.parametrize("model_type", EVERY_TYPE)
def test_any_single_damage_is_a_user_error_or_harmless(model_type: str) -> None:
    accepted = _accepted_without(EVERY_TYPE[model_type])
    needed = {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers"}
    assert model_type == "gemma3" or not {place[-1] for place in accepted if "vision_config" not in place} & needed


@pytest.mark.parametrize("name", [n for n in tiny.NAMES if n in ARCHITECTURES and n not in EVERY_TYPE])
def test_damage_of_what_transformers_writes(name: str) -> None:
    raw = json.loads(tiny.tiny_hf_config(name).to_json_string(use_diff=False))
    assert ("model_type",) not in _accepted_without(raw)
