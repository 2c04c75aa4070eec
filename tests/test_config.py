# Licensed under the Apache License 2.0, see the LICENSE file.

"""Where a `Config` comes from and goes to: names, LitGPT's files, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import litgpt.config
from litgpt.config import EXPLICIT, IN_HF_CONFIG, Config
from litgpt.errors import MissingFileError, UserError
from tests import tiny

# The fields of LitGPT 0.5.13: its `Config.from_file` refuses any other.
_LITGPT_FIELDS = """
    name hf_config block_size n_layer n_embd vocab_size padding_multiple padded_vocab_size norm_class_name norm_eps
    norm_qk norm_qk_type post_attention_norm post_mlp_norm parallel_residual shared_attention_norm n_head head_size
    n_query_groups attn_bias attention_scores_scalar sliding_window_size sliding_window_indices
    attention_logit_softcapping rope_base rotary_percentage rope_condense_ratio rope_adjustments rope_interleave
    intermediate_size moe_intermediate_size bias mlp_class_name gelu_approximate n_expert n_shared_expert
    n_expert_groups n_topk_groups n_topk_scores_per_group n_expert_per_token first_k_dense_replace
    routed_scaling_factor norm_topk_prob scale_embeddings lm_head_bias final_logit_softcapping norm_1 norm_2
    latent_attention rope_local_base_freq rope_indices
"""
LITGPT_FIELDS = _LITGPT_FIELDS.split()
TINY: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "block_size": 8,
    "vocab_size": 10,
    "padding_multiple": 1,
    "intermediate_size": 20,
}


def litgpt_file(folder: Path, name: str) -> Path:
    """A `model_config.yaml` as LitGPT writes it: all of its fields and nothing else."""
    config = Config.from_name(name)
    path = folder / "model_config.yaml"
    path.write_text(yaml.safe_dump({key: getattr(config, key) for key in LITGPT_FIELDS}), encoding="utf-8")
    return path


# Names


def test_from_name_takes_every_kind_of_name_and_overrides() -> None:
    config = Config.from_name("Llama-3-8B-Instruct", n_layer=2)
    assert (config.n_layer, config.family, config.prompt_style) == (2, "llama", "llama3")
    assert Config.from_name("Meta-Llama-3-8B-Instruct", n_layer=2) == config
    assert Config.from_name("meta-llama/Meta-Llama-3-8B-Instruct", n_layer=2) == config
    with pytest.raises(TypeError, match="n_layers"):
        Config.from_name("Llama-3-8B-Instruct", n_layers=2)


def test_unknown_name_suggests_similar_ones() -> None:
    with pytest.raises(ValueError, match=r"'pythia-70' is not a supported config name.*did you mean pythia-70m"):
        Config.from_name("pythia-70")
    with pytest.raises(UserError, match=r"Qwen3-0\.6B"):
        Config.from_name("qwen/qwen3-0.6b")
    with pytest.raises(UserError, match=r"see litgpt\.config\.configs"):
        Config.from_name("zzzzzzzzzzzz")


def test_configs_do_not_share_state(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Config.from_name("Llama-3.2-1B")
    assert first.rope_adjustments is not None
    first.rope_adjustments["factor"] = 0.0
    first.hf_config["name"] = "changed"
    second = Config.from_name("Llama-3.2-1B")
    assert second.rope_adjustments is not None
    assert (second.rope_adjustments["factor"], second.hf_config["name"]) == (32.0, "Llama-3.2-1B")
    # People register models of their own this way.
    monkeypatch.setitem(litgpt.config.name_to_config, "mine", {"name": "mine", **TINY})
    assert Config.from_name("mine").n_embd == 16


def test_config_needs_neither_torch_nor_the_families() -> None:
    code = (
        "import sys, litgpt.config\n"
        "assert 'litgpt.families.registry' not in sys.modules\n"
        "assert len(litgpt.config.configs) == len(litgpt.config.name_to_config)\n"
        "litgpt.config.Config.from_name('pythia-14m')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert not hasattr(litgpt.config, "no_such_thing")


# LitGPT's files


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.2-1B",
        "Gemma-2-2b-it",
        "Gemma-3-1b-it",
        "Qwen2.5-0.5B",
        "Qwen3-30B-A3B",
        "Mixtral-8x7B-v0.1",
        "pythia-14m",
        "phi-2",
        "Phi-4-mini-instruct",
        "SmolLM2-135M-Instruct",
    ],
)
def test_a_litgpt_file_gets_what_its_name_implies(name: str, tmp_path: Path) -> None:
    assert Config.from_file(litgpt_file(tmp_path, name)) == Config.from_name(name)
    assert Config.from_checkpoint(tmp_path, block_size=7).block_size == 7


def test_the_hub_name_identifies_a_renamed_model(tmp_path: Path) -> None:
    path = litgpt_file(tmp_path, "Gemma-2-2b-it")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(fields | {"name": "my-finetune"}), encoding="utf-8")
    config = Config.from_file(path)
    assert (config.name, config.family, config.prompt_style) == ("my-finetune", "gemma2", "gemma")
    assert config.norm_unit_offset


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "My-Gemma-x", "mlp_class_name": "GemmaMLP"}, {"family": "gemma", "norm_unit_offset": True}),
        ({"name": "my-Gemma-3-x", "mlp_class_name": "GemmaMLP"}, {"family": "gemma3_text", "norm_unit_offset": True}),
        ({"name": "gemmacandidate"}, {"family": "gemma", "norm_unit_offset": False}),
        ({"name": "tiny"}, {"family": "gpt_neox", "norm_affine": True}),
        ({"name": "OLMo-tiny", "mlp_class_name": "LLaMAMLP"}, {"family": "olmo", "norm_affine": False}),
        ({"name": "falcon-7b"}, {"family": "falcon"}),
        ({"name": "tiny", "mlp_class_name": "LLaMAMLP"}, {"family": "llama"}),
        ({"name": "tiny", "mlp_class_name": "LLaMAMLP", "attn_bias": True}, {"family": "qwen2"}),
        ({"name": "tiny", "mlp_class_name": "LLaMAMLP", "norm_qk": True}, {"family": "qwen3"}),
        ({"name": "qwen3-tiny", "mlp_class_name": "LLaMAMLP"}, {"family": "qwen3"}),
        (
            {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
            {"family": "mixtral", "moe_router": "topk_softmax"},
        ),
        (
            {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "n_expert_groups": 2}
            | {"n_topk_groups": 1, "n_topk_scores_per_group": 2},
            {"moe_router": "sigmoid"},
        ),
    ],
)
def test_unregistered_litgpt_files(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml.safe_dump(TINY | fields), encoding="utf-8")
    config = Config.from_file(path)
    assert {key: getattr(config, key) for key in expected} == expected


def test_yaml_numbers_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text("n_embd: 64\nn_head: 4\nnorm_eps: 1e-6\nrope_base: 500000\n", encoding="utf-8")
    config = Config.from_file(path)
    assert (config.norm_eps, config.rope_base) == (1e-6, 500000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no fields"),
        ("- 1", "holds no fields"),
        ("1: 2", "holds no fields"),
        ("a: [", "not valid YAML"),
        ("n_embed: 3\nzzz: 1", "unknown keys: n_embed, zzz"),
        ("n_layer: two", "n_layer is 'two', expected int"),
        ("n_layer: true", "n_layer is True, expected int"),
        ("n_layer: null", "n_layer is None, expected int"),
        ("norm_eps: tiny", "could not convert"),
        ("hf_config: null", "hf_config is None"),
        ("n_head: 0", "n_embd 4096 is not a multiple of n_head 0"),
        ("n_embd: 10\nn_head: 3", "n_embd 10 is not a multiple of n_head 3"),
        ("mlp_class_name: LLaMAMLP", "needs intermediate_size"),
    ],
)
def test_damaged_model_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Config.from_checkpoint(tmp_path)


# Our files


def test_saved_configs_come_back_and_litgpt_reads_them(tmp_path: Path) -> None:
    configs = [Config(**fields) for fields in litgpt.config.configs]
    configs += [Config(name="mine", **TINY), Config(**TINY, tie_embeddings=True, prompt_style="alpaca")]
    for config in configs:
        config.save(tmp_path)
        written = yaml.safe_load((tmp_path / "model_config.yaml").read_text(encoding="utf-8"))
        assert set(written) == set(LITGPT_FIELDS), config.name
        assert Config.from_file(tmp_path / "model_config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["model_config.yaml"]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_saved_configs_of_any_architecture_come_back(name: str, tmp_path: Path) -> None:
    config = Config.from_hf(tiny.tiny_hf_config(name).to_dict(), name="run-7")
    config.save(tmp_path / "model_config.yaml")
    assert Config.from_checkpoint(tmp_path) == config
    written = yaml.safe_load((tmp_path / "model_config.yaml").read_text(encoding="utf-8"))
    # LitGPT must refuse what it would compute differently, so the fields that change the output are spelled out.
    unread = set(written) - set(LITGPT_FIELDS)
    assert unread <= set(EXPLICIT) - set(IN_HF_CONFIG)
    assert ("norm_unit_offset" in unread) == ("gemma" in name or name == "nemotron")
    assert ("attention_sinks" in unread) == (name == "gpt_oss")
    if name.startswith(("llama", "qwen2", "mistral", "gpt_neox", "phi", "mixtral")) and name != "llama_bias":
        assert not unread


def test_subclass_fields_are_not_written(tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class Wider(Config):
        rank: int = 0

    config = Wider.from_name("pythia-14m", rank=4)
    config.save(tmp_path)
    assert Config.from_checkpoint(tmp_path) == Config.from_name("pythia-14m")
    assert Wider.from_checkpoint(tmp_path, rank=4) == config


# Checkpoints


def test_from_checkpoint_prefers_the_litgpt_file(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2-135M"
    folder.mkdir()
    assert Config.from_checkpoint(folder) == Config.from_name("SmolLM2-135M")
    hf = tiny.tiny_hf_config("llama").to_dict()
    (folder / "config.json").write_text(json.dumps(hf, default=str), encoding="utf-8")
    config = Config.from_checkpoint(folder)
    assert (config.n_embd, config.name) == (36, "SmolLM2-135M")
    assert config.hf_config == {"org": "HuggingFaceTB", "name": "SmolLM2-135M"}
    assert Config.from_checkpoint(folder / "config.json") == config == Config.from_checkpoint(str(folder))
    Config(name="x", **TINY).save(folder)
    assert Config.from_checkpoint(folder).n_embd == 16
    assert Config.from_checkpoint(folder / "model_config.yaml", n_layer=1).n_layer == 1


def test_an_unregistered_folder_names_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    tiny.tiny_hf_config("llama").save_pretrained(folder)
    config = Config.from_checkpoint(folder, block_size=16)
    assert (config.name, config.hf_config, config.prompt_style, config.block_size) == ("my-model", {}, None, 16)


@pytest.mark.parametrize("place", ["missing", "empty", "missing.gguf", "missing.yaml"])
def test_missing_config(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFileError) as caught:
        Config.from_checkpoint(tmp_path / place)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, UserError)
    assert place in str(caught.value)
    assert "Errno" not in str(caught.value)


def test_gguf(smollm2_gguf: Path) -> None:
    config = Config.from_checkpoint(smollm2_gguf)
    assert (config.n_layer, config.n_embd, config.n_head, config.n_query_groups) == (30, 576, 9, 3)
    assert (config.family, config.tie_embeddings, config.rope_base) == ("llama", True, 100000)
    known = Config.from_name("SmolLM2-135M-Instruct")
    assert (config.name, config.hf_config, config.prompt_style) == (known.name, known.hf_config, known.prompt_style)


# The dataclass itself


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 10, "n_head": 3}, "n_embd 10 is not a multiple of n_head 3"),
        ({"n_query_groups": 5}, "n_head 32 is not a multiple of n_query_groups 5"),
        ({"sliding_window_size": 4, "sliding_window_indices": [1]}, "1 entries for 16 layers"),
        ({"rope_indices": [2] * 16}, "must hold only"),
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 2, "n_expert_per_token": 3}, r"must be in 1\.\.n_expert 2"),
        ({"latent_attention": {"kv_lora_rank": 4}}, "latent_attention lacks qk_rope_head_dim"),
    ],
)
def test_contradicting_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
