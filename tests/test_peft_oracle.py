# Licensed under the Apache License 2.0, see the LICENSE file.

"""The variants train as Hugging Face's `peft` does: the same start, the same batches, the same losses for 20 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litgpt import adapter, ia3, lora
from litgpt.peft import VariantGPT, mark_only_variant_as_trainable
from tests.tiny import random_ids, save_tiny

peft = pytest.importorskip("peft")

STEPS = 20
TOLERANCE = 1e-5
LEARNING_RATE = 3e-3
QV = {"lora_query": True, "lora_value": True}
EVERYTHING = {"lora_targets": ["qkv", "proj", "mlp", "head"]}
QKV_NAMES = ("q_proj", "k_proj", "v_proj")
MLP_NAMES = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}
LINEARS = [*QKV_NAMES, "o_proj", *MLP_NAMES.values(), "lm_head"]


def theirs_of(path: str) -> list[str]:
    """The names in the Hugging Face model of what one of our maps holds, e.g. `transformer.h.0.attn.qkv`."""
    if path == "lm_head":
        return ["lm_head"]
    _, _, layer, kind, name = path.split(".")
    if kind == "mlp":
        return [f"model.layers.{layer}.mlp.{MLP_NAMES[name]}"]
    names = QKV_NAMES if name == "qkv" else ("o_proj",)
    return [f"model.layers.{layer}.self_attn.{each}" for each in names]


@torch.no_grad()
def copy_lora(ours: lora.GPT, theirs: Any) -> None:
    """Give their model our start."""
    modules = dict(theirs.base_model.model.named_modules())
    for path, layer in ours.named_modules():
        if not isinstance(layer, lora.LoRALayer):
            continue
        enabled = [name for name, on in zip(theirs_of(path), layer.enabled, strict=True) if on]
        parts = zip(enabled, layer.lora_A.split(layer.r), layer.lora_B.split(layer.updated_widths), strict=True)
        for name, a, b in parts:
            modules[name].lora_A["default"].weight.copy_(a)
            modules[name].lora_B["default"].weight.copy_(b)


@torch.no_grad()
def copy_ia3(ours: ia3.GPT, theirs: Any) -> None:
    """Both start from ones: make it random, so that every factor counts."""
    modules = dict(theirs.base_model.model.named_modules())
    for path, layer in ours.named_modules():
        if not isinstance(layer, ia3.IA3Linear):
            continue
        layer.ia3_scale.add_(0.3 * torch.randn_like(layer.ia3_scale))
        names = theirs_of(path)[-2:]  # keys and values
        for name, part in zip(names, layer.ia3_scale.chunk(len(names)), strict=True):
            factor = modules[name].ia3_l["default"]
            factor.copy_(part.view(factor.shape))


@torch.no_grad()
def copy_prompts(ours: adapter.GPT, theirs: Any) -> None:
    for block, layer in zip(ours.transformer.h, theirs.model.model.layers, strict=True):
        if block.attn.is_prompted:
            block.attn.gating_factor.fill_(0.2)
            layer.self_attn.adaption_gate.fill_(0.2)
            layer.self_attn.adaption_prompt.copy_(block.attn.adapter_wte.weight)


def losses(model: nn.Module, logits_of: Callable[[Tensor], Tensor]) -> Iterator[float]:
    """The loss of each of the steps, taken with plain AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    for step in range(STEPS):
        ids = random_ids((3, 14), seed=step % 4)  # batches come again, so that there is something to learn
        loss = F.cross_entropy(logits_of(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def compare(ours: VariantGPT, theirs: Any, label: str) -> None:
    """Equal logits before training, equal losses on the way, equal logits afterwards."""
    mark_only_variant_as_trainable(ours)
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (ours, theirs)]
    assert sizes[0] == sizes[1]
    ids = random_ids((2, 11), seed=9)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=TOLERANCE, rtol=0)
    found = list(losses(ours.train(), ours))
    expected = list(losses(theirs.train(), lambda ids: theirs(ids).logits))
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    print(f"\n{label}: loss {expected[0]:.3f} -> {expected[-1]:.3f}, largest difference in {STEPS} steps {worst:.1e}")
    assert expected[-1] < expected[0] - 0.02, "nothing was learnt, so the comparison says little"
    assert worst <= TOLERANCE
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-3, rtol=0)


LORA_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA q v": (QV, {"target_modules": ["q_proj", "v_proj"]}),
    "LoRA everywhere": (EVERYTHING, {"target_modules": LINEARS}),
    "rsLoRA": ({**EVERYTHING, "use_rslora": True}, {"target_modules": LINEARS, "use_rslora": True}),
    "DoRA": ({**EVERYTHING, "use_dora": True}, {"target_modules": LINEARS, "use_dora": True}),
    "DoRA k": ({"lora_key": True, "use_dora": True}, {"target_modules": ["k_proj"], "use_dora": True}),
}


@pytest.mark.parametrize("case", list(LORA_CASES))
@pytest.mark.parametrize("row", ["llama", "llama_bias"])
def test_lora(case: str, row: str, tmp_path: Path) -> None:
    fields, options = LORA_CASES[case]
    theirs = save_tiny(row, tmp_path)
    torch.manual_seed(1)
    ours = lora.GPT.from_checkpoint(tmp_path, lora_r=4, lora_alpha=6, **fields)
    for layer in lora.lora_layers(ours):  # an update from the start: the lengths of rows change with it
        nn.init.normal_(layer.lora_B, std=0.0 if layer.use_dora else 0.1)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
    copy_lora(ours, theirs)
    compare(ours, theirs, f"{case}, {row}")


def test_ia3(tmp_path: Path) -> None:
    theirs = save_tiny("llama", tmp_path)
    torch.manual_seed(1)
    ours = ia3.GPT.from_checkpoint(tmp_path)
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(theirs, config)
    copy_ia3(ours, theirs)
    compare(ours, theirs, "IA3")


def test_adapter_with_one_head(tmp_path: Path) -> None:
    """Their gate is one number for all heads, so they agree where there is one head."""
    theirs = save_tiny("llama", tmp_path, num_attention_heads=1, num_key_value_heads=1, head_dim=36)
    torch.manual_seed(1)
    ours = adapter.GPT.from_checkpoint(tmp_path, adapter_prompt_length=5, adapter_start_layer=1)
    config = peft.AdaptionPromptConfig(adapter_len=5, adapter_layers=1, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, config)
    copy_prompts(ours, theirs.base_model if hasattr(theirs.base_model, "peft_config") else theirs)
    compare(ours, theirs, "Adapter")
