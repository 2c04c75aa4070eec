# Licensed under the Apache License 2.0, see the LICENSE file.

"""`litgpt merge_lora`: every kind of base, redone when its inputs changed, whole or not there."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.checkpoint import convert
from litgpt.checkpoint.adapter_files import base_and_adapter, read_state
from litgpt.checkpoint.save import check_manifest
from litgpt.errors import MissingFileError, UserError
from litgpt.model import GPT
from litgpt.scripts.merge_lora import finish_lora, merge_lora
from tests.tiny import randomize, save_tiny
from tests.tiny_finetuned import LORA, logits, write_base, write_finetuned
from tests.tiny_text import write_tokenizer


def expected_weight(base: GPT, state: dict[str, torch.Tensor], name: str, scale: float) -> torch.Tensor:
    """`W + scale B A` by hand, in float64."""
    update = state[f"{name}.lora_B"].double() @ state[f"{name}.lora_A"].double()
    return base.state_dict()[f"{name}.weight"].double() + scale * update


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_what_the_formula_says_and_keep_their_dtype(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_base(tmp_path / "base", dtype)
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    with caplog.at_level(logging.INFO, "litgpt"):
        merge_lora(tmp_path / "out")
    merged = torch.load(tmp_path / "out" / "lit_model.pth", weights_only=True)
    assert merged.keys() == base.state_dict().keys()
    assert {tensor.dtype for tensor in merged.values()} == {dtype}
    state = read_state(tmp_path / "out" / "lit_model.pth.lora")
    for name in [f"transformer.h.{i}.mlp.{layer}" for i in range(3) for layer in ("fc", "proj")]:
        exact = expected_weight(base, state, name, LORA["lora_alpha"] / LORA["lora_r"])
        # Rounded from the exact sum: the LoRA itself is not rounded to the base's dtype first
        rounded = exact.to(dtype)
        torch.testing.assert_close(merged[f"{name}.weight"], rounded, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert dtype == torch.float32 or (merged[f"{name}.weight"] == rounded).double().mean() > 0.999
    kept = [name for name in merged if f"{name.removesuffix('.weight')}.lora_A" not in state]
    assert len(kept) == len(merged) - 9
    assert all(torch.equal(merged[name], base.state_dict()[name]) for name in kept)
    assert str(dtype) in caplog.text
    assert "rounding lost at most" in caplog.text


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"lora_init": "pissa"}])
def test_merged_equals_unmerged(options: dict[str, Any], tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out", **options)
    merge_lora(tmp_path / "out")
    assert (logits(GPT.from_checkpoint(tmp_path / "out")) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_other_kinds_of_base(kind: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base", vocab_size=260)
    base = tmp_path / "base"
    if kind == "gguf":
        pytest.importorskip("gguf")
        from tests.gguf_writer import write_gguf

        base = tmp_path / "base.gguf"
        write_gguf(tmp_path / "base", base)
    model = write_finetuned("lora", base, tmp_path / "out")
    write_tokenizer(tmp_path / "out")  # finetuning leaves one
    merge_lora(tmp_path / "out")
    assert (logits(GPT.from_checkpoint(tmp_path / "out")) - logits(model)).abs().max() < 1e-5


def test_precision_chooses_another_dtype(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    merge_lora(tmp_path / "out", precision="bf16-true")
    assert GPT.from_checkpoint(tmp_path / "out").lm_head.weight.dtype == torch.bfloat16


def test_a_folder_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = save_tiny("llama", tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    merge_lora(tmp_path / "adapter", tmp_path / "base")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        ours, expected = GPT.from_checkpoint(tmp_path / "adapter")(ids), model.eval()(ids).logits
    assert (ours - expected).abs().max() < 1e-5


def test_a_trained_head_is_untied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base", tie_embeddings=True)
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out", lora_head=True)
    merge_lora(tmp_path / "out")
    assert "the head was tied to the embedding" in caplog.text
    again = GPT.from_checkpoint(tmp_path / "out")
    assert not again.config.tie_embeddings
    assert (logits(again) - logits(model)).abs().max() < 1e-5


def stamp(folder: Path) -> int:
    return (folder / "lit_model.pth").stat().st_mtime_ns


def test_redone_exactly_when_an_input_changed(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    write_base(base)
    write_finetuned("lora", base, out)
    merge_lora(out)
    first, weights = stamp(out), read_state(out / "lit_model.pth")
    merge_lora(out)
    assert stamp(out) == first
    write_finetuned("lora", base, out, seed=2)  # a second run into the same folder
    merge_lora(out)
    second = stamp(out)
    assert second != first
    assert not torch.equal(
        read_state(out / "lit_model.pth")["transformer.h.0.mlp.fc.weight"], weights["transformer.h.0.mlp.fc.weight"]
    )
    write_finetuned("lora", base, out, seed=2, lora_alpha=9)  # the same tensors, another scale
    merge_lora(out)
    third = stamp(out)
    assert third != second
    randomize(model := write_base(base), seed=5)  # another base in the same place
    convert.save_litgpt(model, model.config, base)
    merge_lora(out)
    assert stamp(out) != third
    fourth = stamp(out)
    merge_lora(out, precision="bf16-true")
    assert stamp(out) != fourth


def test_a_merge_that_is_out_of_date_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    merge_lora(tmp_path / "out")
    caplog.clear()
    assert base_and_adapter(tmp_path / "out") == (tmp_path / "out", None)
    assert caplog.text == ""
    write_finetuned("lora", tmp_path / "base", tmp_path / "out", seed=5)
    assert base_and_adapter(tmp_path / "out") == (tmp_path / "out", None)
    assert "merged before lit_model.pth.lora changed" in caplog.text


def test_a_merge_of_somebody_else_is_replaced(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    shutil.copy(tmp_path / "base" / "lit_model.pth", tmp_path / "out")  # as an interrupted older run leaves it
    merge_lora(tmp_path / "out")
    assert (logits(GPT.from_checkpoint(tmp_path / "out")) - logits(model)).abs().max() < 1e-5


def test_an_interrupted_merge_is_seen_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_base(tmp_path / "base")
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    with monkeypatch.context() as patch:

        def fail(path: Path, *_: Any) -> None:
            path.write_bytes(b"half")
            raise KeyboardInterrupt

        patch.setattr(convert, "write_state_dict", fail)
        with pytest.raises(KeyboardInterrupt):
            merge_lora(tmp_path / "out")
    assert not (tmp_path / "out" / "lit_model.pth").exists()
    with pytest.raises(UserError, match="half written"):
        check_manifest(tmp_path / "out")
    merge_lora(tmp_path / "out")
    check_manifest(tmp_path / "out", hashes=True)
    assert (logits(GPT.from_checkpoint(tmp_path / "out")) - logits(model)).abs().max() < 1e-5


def test_the_prompt_format_of_the_training_stays_and_a_missing_tokenizer_comes(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    for folder, style in (("base", "Default"), ("out", "Alpaca")):
        (tmp_path / folder / "prompt_style.yaml").write_text(f"class_path: litgpt.prompts.{style}\n")
    merge_lora(tmp_path / "out")
    assert "Alpaca" in (tmp_path / "out" / "prompt_style.yaml").read_text()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned("adapter", tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(UserError, match="is no LoRA"):
        merge_lora(tmp_path / "adapter")
    with pytest.raises(MissingFileError, match="holds no adapter"):
        merge_lora(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(MissingFileError, match=r"the base of .* is missing"):
        merge_lora(tmp_path / "out")
    with pytest.raises(MissingFileError, match="elsewhere"):
        merge_lora(tmp_path / "out", tmp_path / "elsewhere")


def test_what_training_leaves_opens_everywhere(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = save_tiny("llama", tmp_path / "base")
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    write_tokenizer(tmp_path / "out")
    finish_lora(tmp_path / "out", tmp_path / "base")
    check_manifest(tmp_path / "out", hashes=True)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(ids)
        merged = GPT.from_checkpoint(tmp_path / "out")(ids)
        opened = peft.PeftModel.from_pretrained(theirs, tmp_path / "out").eval()(ids).logits
    assert (merged - expected).abs().max() < 1e-5
    assert (opened - expected).abs().max() < 1e-5


def test_what_peft_has_no_place_for_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base")  # of no family that transformers knows
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    with caplog.at_level(logging.INFO, "litgpt"):
        finish_lora(tmp_path / "out", tmp_path / "base")
    assert "not written for PEFT: no table of tensor names" in caplog.text
    assert (tmp_path / "out" / "lit_model.pth").is_file()
    assert not (tmp_path / "out" / "adapter_config.json").exists()
