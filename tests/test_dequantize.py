# Licensed under the Apache License 2.0, see the LICENSE file.

"""Checkpoints in 8 and 4 bits, expanded when they are read; `transformers` and plain loops are the oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.dequantize import find_dequantizer
from litgpt.checkpoint.export import convert_from_litgpt, convert_to_litgpt
from litgpt.checkpoint.hub import _check_config
from litgpt.checkpoint.source import open_source
from litgpt.config import Config
from litgpt.errors import UserError
from tests.test_show import report
from tests.tiny import random_ids, save_tiny, tiny_hf_model

transformers = pytest.importorskip("transformers")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def to_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit floats, the factor of each block, and the numbers that both stand for, block after block."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    quantized, expanded = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[part].abs().max() / 448
            quantized[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            expanded[part] = quantized[part].float() * scales[i, j]
    return quantized, scales, expanded


def quantize_fp8(folder: Path, block: tuple[int, int] | None) -> dict[str, Tensor]:
    """Rewrite a folder as DeepSeek publishes; returns its weights expanded."""
    weights, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        if tensor.ndim != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
            stored[name] = tensor.contiguous()
            continue
        quantized, scales, expanded = to_fp8(tensor, block or tuple(tensor.shape))
        stored |= {name: quantized, f"{name}_scale_inv": scales if block else scales.squeeze()}
        if block is None:
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(1.0)
        weights[name] = expanded
    save_file(stored, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
    edit_config(folder, quantization_config=settings, dtype="float32")
    return weights


@torch.no_grad()
def assert_same_logits(ours: Any, theirs: Any, tolerance: float = 1e-4) -> None:
    ids = random_ids((2, 12))
    assert (ours(ids) - theirs(ids).logits).abs().max() <= tolerance


@pytest.mark.parametrize(("name", "block"), [("deepseek_v3", (16, 8)), ("llama", (4, 4)), ("llama", None)])
def test_fp8(name: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path)
    weights = quantize_fp8(tmp_path, block)
    model = load_model(tmp_path)
    assert Config.from_checkpoint(tmp_path) == model.config
    with open_source(tmp_path) as source:
        assert source.tensors().keys() == weights.keys()
        assert source.nbytes_stored() < sum(tensor.nbytes for tensor in weights.values())
        for tensor_name, expected in weights.items():
            assert torch.equal(source.get(tensor_name), expected), tensor_name
    theirs.save_pretrained(tmp_path / "plain", state_dict=None)
    save_file({k: t.contiguous() for k, t in weights.items()}, tmp_path / "plain" / "model.safetensors")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    assert_same_logits(model, plain)


def test_fp8_like_transformers(tmp_path: Path) -> None:
    """Its own expansion of the same files, where sizes are multiples of the block."""
    save_tiny("llama", tmp_path, hidden_size=32, intermediate_size=64, head_dim=8)
    quantize_fp8(tmp_path, (16, 16))
    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, attn_implementation="eager", dtype=torch.float32
    )
    ours = load_model(tmp_path)
    weight = theirs.model.layers[1].mlp.up_proj.weight
    assert torch.equal(ours.transformer.h[1].mlp.fc_2.weight, weight.float())
    assert_same_logits(ours, theirs.float())


def test_fp8_is_shown_converted_and_exported_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama", tmp_path / "in")
    quantize_fp8(tmp_path / "in", (4, 4))
    assert "4 heads of 10" in report(tmp_path / "in", capsys)["attention"]
    convert_from_litgpt(tmp_path / "in", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    model = load_model(tmp_path / "in")
    assert_same_logits(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    convert_to_litgpt(tmp_path / "in")
    assert torch.equal(load_model(tmp_path / "in").lm_head.weight, model.lm_head.weight)
    _check_config(tmp_path / "in")  # what a download asks first


def write_mxfp4(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A gpt-oss of 4-bit experts and what they stand for, number after number."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    theirs = save_tiny("gpt_oss", folder, **sizes)
    weights, stored = load_file(folder / "model.safetensors"), {}
    lut = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    generator = torch.Generator().manual_seed(3)
    for name, tensor in list(weights.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, n_in, n_out = tensor.shape
        blocks = torch.randint(256, (experts, n_out, n_in // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 126, (experts, n_out, n_in // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expanded = torch.zeros(experts, n_in, n_out)
        for e, o, g, b in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
            byte, factor = int(blocks[e, o, g, b]), 2.0 ** (int(scales[e, o, g]) - 127)
            for half, nibble in enumerate((byte & 15, byte >> 4)):
                expanded[e, 32 * g + 2 * b + half, o] = (-1) ** (nibble >> 3) * lut[nibble & 7] * factor
        weights[name] = expanded
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.x"]})
    return theirs, weights


def test_mxfp4(tmp_path: Path) -> None:
    _, weights = write_mxfp4(tmp_path)
    with open_source(tmp_path) as source:
        assert source.tensors().keys() == weights.keys()
        for name, expected in weights.items():
            assert tuple(source.get(name).shape) == source.tensors()[name].shape
            assert torch.equal(source.get(name), expected), name
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(theirs, weights[name])
    plain = tiny_hf_model("gpt_oss", hidden_size=64, intermediate_size=32, num_local_experts=3)
    plain.load_state_dict(weights)
    assert_same_logits(load_model(tmp_path), plain)


# What cannot be read


@pytest.mark.parametrize(
    ("method", "advice"), [("gptq", "gguf"), ("awq", "gguf"), ("bitsandbytes", "--quantize bnb"), ("quanto", "gguf")]
)
@pytest.mark.parametrize("where", ["top", "text"])
def test_other_kinds_are_refused_by_name(method: str, advice: str, where: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    settings = {"quantization_config": {"quant_method": method}}
    edit_config(tmp_path, **(settings if where == "top" else {"text_config": settings}))
    with pytest.raises(UserError, match=rf"config\.json: .*{method!r}\), which cannot be read") as caught:
        load_model(tmp_path)
    assert advice in caught.value.hint


@pytest.mark.parametrize("value", [None, {}, ""])
def test_empty_settings_mean_nothing(value: Any) -> None:
    assert find_dequantizer({"quantization_config": value}, {}) is None


@pytest.mark.parametrize("fault", ["size", "shape", "unscaled", "blocks"])
def test_damaged(fault: str, tmp_path: Path) -> None:
    expected = {"size": "weight_block_size", "shape": "need", "unscaled": "float8", "blocks": "4-bit"}
    if fault == "blocks":
        write_mxfp4(tmp_path)
    else:
        save_tiny("llama", tmp_path)
        quantize_fp8(tmp_path, (4, 4))
    stored = load_file(tmp_path / "model.safetensors")
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    if fault == "size":
        edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [4]})
    elif fault == "shape":
        stored[scale] = stored[scale][:-1].clone()
    elif fault == "unscaled":
        del stored[scale]
    else:
        name = "model.layers.0.mlp.experts.down_proj_scales"
        stored[name] = stored[name][:, :-1].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=expected[fault]):
        load_model(tmp_path)


def test_text_part_of_a_quantized_vision_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save_tiny("gemma3_text", tmp_path)
    weights = quantize_fp8(tmp_path, (4, 4))
    stored = load_file(tmp_path / "model.safetensors")
    inside = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in stored.items()}
    inside["vision_tower.encoder.weight"] = torch.zeros(2, 2)
    save_file(inside, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    quantization = text.pop("quantization_config")
    whole = {"model_type": "gemma3", "text_config": text, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    with caplog.at_level("INFO", "litgpt"):
        model = load_model(tmp_path)
    assert "vision_tower.encoder.weight" in caplog.text
    theirs.load_state_dict(weights, strict=False)
    assert_same_logits(model, theirs)
