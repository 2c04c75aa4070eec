# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt validate`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from litgpt.errors import UserError
from litgpt.model import GPT
from litgpt.scripts.validate import validate_setup
from tests import tiny_text


@pytest.fixture
def litgpt_folder(tmp_path: Path) -> Path:
    """A LitGPT checkpoint."""
    config = tiny_text.tiny_config(name="tiny", family="gpt_neox")
    folder = tiny_text.write_tokenizer(tmp_path / "tiny")
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    config.save(folder)
    return folder


def report(capsys: pytest.CaptureFixture[str], folder: Path, **options: object) -> dict[str, tuple[str, str]]:
    """Name of a check -> status and text, after checking that the outcome fits."""
    error = None
    try:
        validate_setup(folder, **options)  # type: ignore[arg-type]
    except UserError as caught:
        error = caught
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    rows = {}
    for line in lines[1:]:
        status, name, text = line.split(maxsplit=2)
        rows[name.rstrip(":")] = (status, text)
    assert (error is not None) == any(status == "FAILED" for status, _ in rows.values())
    return rows


def statuses(rows: dict[str, tuple[str, str]]) -> str:
    return " ".join(status for status, _ in rows.values())


def test_real_model(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, smollm2_gguf)
    assert statuses(rows) == "ok ok ok ok ok ok"
    assert rows["files"][1] == "gguf checkpoint with 272 tensors"
    assert "134,515,008 parameters; 0.54 GB for the weights in float32" in rows["memory"][1]


def test_litgpt_folder(litgpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, litgpt_folder)
    assert statuses(rows) == "ok ok ok ok ok ok"
    assert rows["files"][1].startswith("litgpt checkpoint")
    assert "no chat template" not in rows["tokenizer"][1]


def test_memory_of_training(litgpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = sum(p.numel() for p in GPT(tiny_text.tiny_config()).parameters())
    rows = report(capsys, litgpt_folder, training=True, dtype="bfloat16")
    assert rows["memory"][1].startswith(f"{count:,} parameters; 0.00 GB for training")
    with pytest.raises(UserError, match="int4"):
        validate_setup(litgpt_folder, dtype="int4")


def test_other_file(litgpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(litgpt_folder / "lit_model.pth", litgpt_folder / "lit_model_finetuned.pth")
    (litgpt_folder / "lit_model.pth").write_bytes(b"")
    assert statuses(report(capsys, litgpt_folder, model_filename="lit_model_finetuned.pth")) == "ok ok ok ok ok ok"
    rows = report(capsys, litgpt_folder, model_filename="nothing.pth")
    assert statuses(rows) == "FAILED skipped skipped ok skipped skipped"
    assert report(capsys, litgpt_folder)["files"][0] == "FAILED"


def test_wrong_weights_are_named(litgpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(litgpt_folder / "lit_model.pth", weights_only=True)
    state["transformer.h.0.surprise"] = torch.zeros(1)
    del state["transformer.h.1.mlp.proj.weight"]
    torch.save(state, litgpt_folder / "lit_model.pth")
    status, text = report(capsys, litgpt_folder)["weights"]
    assert status == "FAILED"
    assert "transformer.h.0.surprise" in text
    assert "transformer.h.1.mlp.proj.weight" in text


def test_tokenizer_of_a_larger_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_text.tiny_config(name="tiny", family="gpt_neox", vocab_size=100, padded_vocab_size=100)
    folder = tiny_text.write_tokenizer(tmp_path / "tiny")
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    config.save(folder)
    status, text = report(capsys, folder)["vocabulary"]
    assert status == "FAILED"
    assert "256 tokens, the embedding only 100 rows" in text


def test_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from tests.tiny import save_tiny

    folder = tmp_path / "llama"
    save_tiny("llama", folder, vocab_size=tiny_text.VOCAB_SIZE)
    rows = report(capsys, folder)
    assert statuses(rows) == "ok ok ok FAILED skipped ok"  # the tokenizer is not there
    tiny_text.write_tokenizer(folder)
    assert statuses(report(capsys, folder)) == "ok ok ok ok ok ok"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert report(capsys, folder)["weights"][1].endswith("stored as float16")
