# Licensed under the Apache License 2.0, see the LICENSE file.

"""Folders of Hugging Face PEFT, read and written, with `peft` itself as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from litgpt import lora
from litgpt.checkpoint.adapter_files import AdapterFile, export_peft, load_finetuned, open_adapter
from litgpt.checkpoint.peft_folder import write_peft
from litgpt.checkpoint.source import open_source
from litgpt.errors import MissingFileError, UserError
from litgpt.generate.base import generate
from litgpt.model import GPT
from litgpt.peft import VariantGPT, variant_state_dict
from tests.tiny import random_ids, randomize, save_tiny, tiny_hf_config
from tests.tiny_finetuned import write_finetuned

peft = pytest.importorskip("peft")

# Their maps, where a family has separate ones, where it fuses queries, keys and values, and where it fuses more
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj"],
    "gemma3_text": ["v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "falcon_7b": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {r"layers\.1\..*": 5}, "alpha_pattern": {"v_proj": 9}},
}


# Phi 3's scaled angles depend on the length of the text in ways that differ between caches: not a matter of adapters
OVERRIDES: dict[str, dict[str, Any]] = {"phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}}


def save_base(name: str, folder: Path) -> Any:
    return save_tiny(name, folder, **OVERRIDES.get(name, {}))


def randomize_lora(model: torch.nn.Module) -> None:
    """Give LoRA's tensors values that change the output; lengths of rows near what they are."""
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand_like(parameter))
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def their_folder(base: Any, folder: Path, targets: list[str], **options: Any) -> Any:
    """Write a folder with `peft` and return its model."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config)
    randomize_lora(model)
    model.save_pretrained(folder)
    return model.eval()


def our_folder(kind: str, base: Path, folder: Path, **settings: Any) -> VariantGPT:
    """Write a LoRA or IA3 file of ours, and beside it the folder of PEFT; return the model."""
    model = write_finetuned(kind, base, folder, **settings)
    adapter = open_adapter(folder)
    assert isinstance(adapter, AdapterFile)
    export_peft(adapter, base, folder)
    return model


@torch.no_grad()
def difference(ours: GPT, theirs: Any, n_tokens: int = 24) -> float:
    ids = random_ids((2, n_tokens))
    return (ours(ids) - theirs(ids).logits).abs().max().item()


@torch.no_grad()
def assert_same_text(ours: GPT, theirs: Any) -> None:
    """32 tokens, greedily."""
    prompt = random_ids((5,), seed=1)
    mine = generate(ours, prompt, 37, temperature=0.0)
    expected = theirs.generate(prompt[None], max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert mine.tolist() == expected[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_their_folder_opens_here(name: str, kind: str, tmp_path: Path) -> None:
    base = save_base(name, tmp_path / "base")
    theirs = their_folder(base, tmp_path / "adapter", TARGETS[name], **KINDS[kind])
    ours = load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))
    assert difference(ours, theirs) < 1e-5
    if kind == "lora":
        assert_same_text(ours, theirs)


SWITCHES = {"lora_query": True, "lora_value": True, "lora_projection": True, "lora_mlp": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"lora_init": "pissa"},
    "head and layers": {"lora_head": True, "lora_targets": [r"h\.1\..*", "query", "lm_head"]},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_our_folder_opens_there(name: str, kind: str, tmp_path: Path) -> None:
    base = save_base(name, tmp_path / "base")
    ours = our_folder("lora", tmp_path / "base", tmp_path / "out", **SWITCHES, **OPTIONS[kind])
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert difference(ours, theirs) < 1e-5
    if kind == "lora":
        assert_same_text(ours, theirs)
    # and back: the same function again, in the fewest columns that hold it
    (tmp_path / "out" / "lit_model.pth.lora").unlink()
    again = load_finetuned(tmp_path / "base", open_adapter(tmp_path / "out"))
    assert difference(again, theirs) < 1e-5
    assert again.config.lora_r == ours.config.lora_r * (2 if kind == "pissa" else 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "phi3"])
def test_ia3(name: str, tmp_path: Path) -> None:
    base = save_base(name, tmp_path / "base")
    ours = our_folder("ia3", tmp_path / "base", tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert difference(ours, theirs) < 1e-5
    assert_same_text(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_finetuned(tmp_path / "base", open_adapter(tmp_path / "theirs"))
    assert torch.equal(*(variant_state_dict(m)["transformer.h.1.attn.qkv.ia3_scale"] for m in (ours, again)))
    assert difference(again, theirs) < 1e-5


def test_ia3_elsewhere_is_refused(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    config = peft.IA3Config(target_modules=["q_proj", "v_proj", "up_proj"], feedforward_modules=["up_proj"])
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "ia3" in name:
            torch.nn.init.normal_(parameter, mean=1.0)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"inputs of transformer\.h\.0\.mlp\.fc_2.*outputs of .*qkv \(q\)"):
        load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))


def test_a_fused_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    """One A for queries, keys and values there is three equal ones here, and one again there."""
    base = save_base("gpt_neox", tmp_path / "base")
    their_folder(base, tmp_path / "adapter", TARGETS["gpt_neox"])
    adapter = open_adapter(tmp_path / "adapter")
    with open_source(tmp_path / "base") as source:
        learnt = adapter.read(source)
        write_peft(tmp_path / "again", learnt.state, source.config(lora.Config, **learnt.settings))
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = read_config(tmp_path / "again")
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 6, {})
    assert sorted(config["target_modules"]) == sorted(TARGETS["gpt_neox"])


def test_what_is_written_for_fused_maps(tmp_path: Path) -> None:
    save_base("phi3", tmp_path / "base")
    our_folder("lora", tmp_path / "base", tmp_path / "out", **SWITCHES)
    config = read_config(tmp_path / "out")
    assert (config["r"], config["lora_alpha"]) == (8, 16)  # 4 and 8 here: two maps of theirs hold two of ours each
    assert config["rank_pattern"] == {"o_proj": 4, "down_proj": 4}
    assert config["alpha_pattern"] == {"o_proj": 8, "down_proj": 8}
    assert set(config["target_modules"]) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    b = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]  # queries | keys | values
    assert b.shape == (64, 8)
    assert not b[:32, 4:].any()
    assert not b[32:48].any()
    assert not b[48:, :4].any()
    assert b[:32, :4].all()
    assert b[48:, 4:].all()


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], r".*layers\.1\..*(k_proj|up_proj)", "all-linear"])
def test_where_updates_are_follows_from_the_tensors(targets: Any, tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    theirs = their_folder(base, tmp_path / "adapter", targets)
    ours = load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))
    assert difference(ours, theirs) < 1e-5
    parts = sum(sum(layer.enabled) for layer in lora.lora_layers(ours))
    assert parts == sum(isinstance(module, peft.tuners.lora.LoraLayer) for module in theirs.modules())


def test_layers_to_transform_and_the_old_format(tmp_path: Path) -> None:
    base = save_base("qwen3", tmp_path / "base")
    theirs = their_folder(base, tmp_path / "adapter", ["v_proj"], layers_to_transform=[1])
    safe = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(safe), tmp_path / "adapter" / "adapter_model.bin")
    safe.unlink()
    ours = load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))
    assert difference(ours, theirs) < 1e-5
    assert ours.config.lora_targets == [r"h\.(1)\.attn\.value"]


def test_a_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = tiny_hf_config("gemma3_text").to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    base = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    randomize(base)
    base.save_pretrained(tmp_path / "base")
    ours = our_folder("lora", tmp_path / "base", tmp_path / "out", **SWITCHES)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert difference(ours, theirs) < 1e-5
    (tmp_path / "out" / "lit_model.pth.lora").unlink()
    assert difference(load_finetuned(tmp_path / "base", open_adapter(tmp_path / "out")), theirs) < 1e-5


def test_experts_are_refused_the_attention_beside_them_is_not(tmp_path: Path) -> None:
    base = save_base("mixtral", tmp_path / "base")
    ours = our_folder("lora", tmp_path / "base", tmp_path / "out", lora_mlp=False)
    assert difference(ours, peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()) < 1e-5
    with pytest.raises(UserError, match=r"of experts: transformer\.h\.\*\.mlp\.experts\.\*\.fc_\*\.lora_A"):
        our_folder("lora", tmp_path / "base", tmp_path / "out", lora_mlp=True)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


def change_config(folder: Path, **fields: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(read_config(folder) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "LOHA"}, "adapters of the type LOHA"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"lora_bias": True, "use_qalora": True}, "lora_bias=True, use_qalora=True"),
        ({"something_new": {"a": 1}}, "something_new={'a': 1}"),
    ],
)
def test_what_has_no_counterpart_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    their_folder(save_base("llama", tmp_path / "base"), tmp_path / "adapter", ["q_proj"])
    change_config(tmp_path / "adapter", **fields)
    with pytest.raises(UserError) as caught:
        load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))
    assert named in caught.value.message
    assert caught.value.hint


def test_tensors_that_do_not_belong_are_named_together(tmp_path: Path) -> None:
    their_folder(save_base("llama", tmp_path / "base"), tmp_path / "adapter", ["q_proj", "v_proj", "lm_head"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)

    def error_with(tensors: dict[str, torch.Tensor]) -> str:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        with pytest.raises(UserError) as caught:
            load_finetuned(tmp_path / "base", open_adapter(tmp_path / "adapter"))
        return caught.value.message

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    message = error_with({name: tensor for name, tensor in whole.items() if name != first})
    assert "1 missing: model.layers.0.self_attn.q_proj.lora_A" in message
    message = error_with({**whole, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(1)})
    assert "1 of an unknown kind: model.embed_tokens.lora_embedding_A" in message
    head = "base_model.model.lm_head.base_layer.weight"
    assert "1 trained as a whole: lm_head.base_layer.weight" in error_with({**whole, head: whole[head] + 1})
    moved = {name.replace("layers.1", "layers.7"): tensor for name, tensor in whole.items()}
    cut = {name: tensor[:-1] if "0.self_attn.v_proj.lora_B" in name else tensor for name, tensor in moved.items()}
    message = error_with(cut)
    assert "2 not in the model: model.layers.7.self_attn.q_proj, model.layers.7.self_attn.v_proj" in message
    assert (
        "1 of the wrong shape: model.layers.0.self_attn.v_proj [4, 36] and [19, 4] for a weight of [20, 36]" in message
    )


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    their_folder(save_base("llama", tmp_path / "base"), tmp_path / "adapter", ["q_proj"])
    adapter = open_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        load_finetuned(tmp_path / "base", adapter)
    file.unlink()
    with pytest.raises(MissingFileError, match=r"adapter_model\.safetensors does not exist"):
        load_finetuned(tmp_path / "base", adapter)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"adapter_config\.json is damaged"):
        load_finetuned(tmp_path / "base", adapter)
