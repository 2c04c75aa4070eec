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
from litgpt.checkpoint.adapter_files import load_finetuned, open_adapter
from litgpt.checkpoint.peft_folder import write_peft
from litgpt.checkpoint.source import open_source
from litgpt.errors import UserError
from litgpt.generate.base import generate
from litgpt.model import GPT
from litgpt.peft import variant_state_dict
from tests.tiny import random_ids, save_tiny

peft = pytest.importorskip("peft")

# Their maps, where a family has separate ones, where it fuses queries, keys and values, and where it fuses more
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj"],
    "gemma3_text": ["v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
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


def our_folder(base: Path, out: Path, **settings: Any) -> lora.GPT:
    """Write a folder of PEFT from a LoRA model of ours, and return the model."""
    model = lora.GPT.from_checkpoint(base, lora_r=3, lora_alpha=5, **settings)
    randomize_lora(model)
    plain = GPT.from_checkpoint(base)
    with open_source(base) as source:
        hf_config = source.hf_config()
    write_peft(
        out,
        variant_state_dict(model),
        model.config,
        base=str(base),
        hf_config=hf_config,
        base_weight=lambda name: plain.get_parameter(f"{name}.weight"),
    )
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


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "pissa"])
@pytest.mark.parametrize("name", TARGETS)
def test_our_folder_opens_there(name: str, kind: str, tmp_path: Path) -> None:
    base = save_base(name, tmp_path / "base")
    options = {"use_rslora": kind == "rslora", "use_dora": kind == "dora"}
    options["lora_init"] = "pissa" if kind == "pissa" else "default"
    switches = {"lora_query": True, "lora_value": True, "lora_projection": True, "lora_mlp": True}
    ours = our_folder(tmp_path / "base", tmp_path / "adapter", **switches, **options)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert difference(ours, theirs) < 1e-5
    if kind == "lora":
        assert_same_text(ours, theirs)
