# Licensed under the Apache License 2.0, see the LICENSE file.

"""Checkpoints written as `.gguf` files; our reader, the `gguf` package and `transformers` read them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from litgpt.__main__ import main
from litgpt.checkpoint import gguf_writer
from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.gguf import GGUFFile
from litgpt.checkpoint.gguf_pretokenizers import PRE_TOKENIZERS
from litgpt.checkpoint.gguf_writer import write_gguf
from litgpt.errors import UserError
from litgpt.tokenizer import Tokenizer
from tests import gguf_writer as converter
from tests.tiny import random_ids, save_tiny
from tests.toy_tokenizers import CHATML, byte_level, sentencepiece_like, write_folder

transformers = pytest.importorskip("transformers")

FULL_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LAYERS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
# Those that transformers does not read from a GGUF have its own defaults
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_bias": ("llama_bias", {}),
    "llama_linear": ("llama_linear", {}),
    "mistral": ("mistral_window", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128, "hidden_size": 64}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {"full_attention": FULL_ROPE, "sliding_attention": LOCAL_ROPE},
        },
    ),
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "gemma3")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out = model(random_ids((2, 12)))
    return out if isinstance(out, Tensor) else out.logits


@pytest.mark.parametrize("name", ROWS)
def test_float32_is_read_back_the_same(name: str, tmp_path: Path) -> None:
    row, overrides = ROWS[name]
    theirs = save_tiny(row, tmp_path / "hf", **overrides)
    main(["convert_to_gguf", str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--weight_type", "F32"])
    expected, file = load_file(tmp_path / "hf" / "model.safetensors"), GGUFFile(tmp_path / "m.gguf")
    assert file.tensors().keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        tolerance = 2e-7 if row.startswith("gemma") and "norm" in tensor_name else 0.0  # 1 is added and taken away
        assert torch.allclose(file.get(tensor_name), tensor, rtol=0, atol=tolerance), tensor_name
    assert (logits(load_model(tmp_path / "m.gguf")) - logits(theirs)).abs().max() <= 1e-4
    if name in READ_BY_TRANSFORMERS:
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="m.gguf", attn_implementation="eager"
        )
        assert (logits(back) - logits(theirs)).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama", "llama_llama3rope", "qwen2", "qwen3", "gemma3_text"])
def test_same_tensors_as_the_converter_of_the_tests(name: str, tmp_path: Path) -> None:
    """The container of the other writer, which takes its names from the `gguf` package."""
    save_tiny(name, tmp_path / "hf")
    converter.write_gguf(tmp_path / "hf", tmp_path / "theirs.gguf")
    if name == "llama_llama3rope":  # the parameters of no published model: a file cannot say them
        with pytest.raises(UserError, match="rope_adjustments"):
            write_gguf(tmp_path / "hf", tmp_path / "ours.gguf", "F32")
        return
    write_gguf(tmp_path / "hf", tmp_path / "ours.gguf", "F32")
    ours, theirs = (gguf.GGUFReader(tmp_path / f"{who}.gguf") for who in ("ours", "theirs"))
    by_name = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == by_name.keys()
    for tensor in ours.tensors:
        assert tensor.shape.tolist() == by_name[tensor.name].shape.tolist()
        np.testing.assert_allclose(tensor.data, by_name[tensor.name].data, rtol=0, atol=2e-7)


def test_llama3_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = {"head_dim": 64, "rope_parameters": rope, "max_position_embeddings": 131072}
    save_tiny("llama_llama3rope", tmp_path / "hf", **sizes)
    write_gguf(tmp_path / "hf", tmp_path / "ours.gguf", "F32")
    converter.write_gguf(tmp_path / "hf", tmp_path / "theirs.gguf")
    ours, theirs = (
        next(t.data for t in gguf.GGUFReader(tmp_path / f"{who}.gguf").tensors if t.name == "rope_freqs.weight")
        for who in ("ours", "theirs")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types_of_the_weights(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 80}  # rows of 80 do not divide into blocks of 32
    save_tiny("llama", tmp_path / "hf", **sizes)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind)  # type: ignore[arg-type]
    expected, file = load_file(tmp_path / "hf" / "model.safetensors"), GGUFFile(tmp_path / "m.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == kind
    assert types["blk.0.ffn_down.weight"] == ("F16" if kind == "Q8_0" else kind)
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert gguf.LlamaFileType(file.metadata["general.file_type"]).name == f"MOSTLY_{kind}"
    for name, tensor in expected.items():
        if kind == "Q8_0" and tensor.ndim > 1 and "down" not in name:
            largest = tensor.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            # Half a step of the largest number / 127, and the rounding of that step to float16
            bound = (largest / 127 * 0.5 + largest * 2**-11).expand(*largest.shape[:-1], 32).flatten(-2)
            assert ((file.get(name) - tensor).abs() <= bound).all(), name
        else:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float16}[kind]
            rounded = tensor if tensor.ndim == 1 else tensor.to(dtype)
            assert torch.equal(file.get(name).float(), rounded.float()), name


# The tokenizer

TEXTS = [
    "Hello world, this is a text.",
    "né😀 über 日本語",
    "  two  spaces\n\tand",
    "123 456",
    "<|im_start|>user",
    "<s>x",
    " a b",  # two merges compete
    "",
]


def chat_folder(folder: Path, kind: str) -> Path:
    tokenizer = byte_level() if kind == "gpt2" else sentencepiece_like()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, "add_bos_token": True}
    save_tiny("llama", folder, vocab_size=tokenizer.get_vocab_size() + 3)
    return write_folder(folder, tokenizer, config=settings)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokenizer_comes_along(kind: str, tmp_path: Path) -> None:
    before = Tokenizer(chat_folder(tmp_path / "hf", kind))
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    after = Tokenizer(tmp_path / "m.gguf")
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == kind
    assert len(metadata["tokenizer.ggml.tokens"]) == load_model(tmp_path / "hf").config.padded_vocab_size
    for text in TEXTS:
        ids = before.encode(text)
        assert after.encode(text).tolist() == ids.tolist(), text
        assert after.decode(ids) == before.decode(ids)
    assert (after.bos_id, after.eos_id, after.use_bos) == (before.bos_id, before.eos_id, before.use_bos)
    assert after.chat_template == before.chat_template
    assert before.stop_ids <= after.stop_ids


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "deepseek-v3"])
def test_name_of_the_splitting(name: str) -> None:
    from litgpt.checkpoint.gguf_vocabulary import _name_of_splitting

    splitting = PRE_TOKENIZERS[name]
    content = {"pre_tokenizer": splitting.as_json(), "normalizer": splitting.normalizer}
    content["model"] = {"ignore_merges": splitting.whole_words}
    assert _name_of_splitting(content) == name


def test_splitting_without_a_name_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "hf", "gpt2")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="no name for how"):
        write_gguf(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.slow
def test_real_model_there_and_back(smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GGUF -> Hugging Face -> GGUF of 8 bits: the same tokens, and an answer that makes sense."""
    main(["convert_from_litgpt", str(smollm2_gguf), str(tmp_path / "hf"), "--model_pth", "false"])
    main(["convert_to_gguf", str(tmp_path / "hf"), str(tmp_path / "m.gguf")])
    first, again = Tokenizer(smollm2_gguf), Tokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        assert again.encode(text).tolist() == first.encode(text).tolist()
    assert again.stop_ids == first.stop_ids
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert theirs.encode("The quick brown fox") == first.encode("The quick brown fox").tolist()
    capsys.readouterr()
    main(["generate", str(tmp_path / "m.gguf"), "--prompt", "What is the capital of France?", "--temperature", "0"])
    assert "Paris" in capsys.readouterr().out


# What cannot be written


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "deepseek_v3"])
def test_other_families_are_refused(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "hf")
    with pytest.raises(UserError, match="cannot be written as a") as caught:
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    assert "llama" in caught.value.hint


def test_what_the_format_cannot_say_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen2_window", tmp_path / "hf")
    monkeypatch.setattr(gguf_writer, "_write", lambda *_: pytest.fail("written"))
    with pytest.raises(UserError, match="sliding_window"):
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    with pytest.raises(UserError, match="Q9"):
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "Q9")  # type: ignore[arg-type]


def test_interrupted_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "hf")
    (tmp_path / "m.gguf").write_bytes(b"old")

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_writer, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "m.gguf"}
