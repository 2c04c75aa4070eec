# Licensed under the Apache License 2.0, see the LICENSE file.

"""The functions that people import from `litgpt.utils`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from litgpt import GPT
from litgpt.errors import UserError
from litgpt.utils import (
    auto_download_checkpoint,
    check_valid_checkpoint_dir,
    chunked_cross_entropy,
    copy_config_files,
    extend_checkpoint_dir,
    get_default_supported_precision,
    load_checkpoint,
    num_parameters,
    save_config,
)
from tests.tiny_text import tiny_config, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_tokenizer(tmp_path / "org" / "tiny")
    torch.save(GPT(tiny_config()).state_dict(), folder / "lit_model.pth")
    save_config(tiny_config(), folder)
    return folder


@pytest.mark.parametrize("chunk_size", [0, 1, 4, 128])
@pytest.mark.parametrize("head_chunk", [0, 3, 7])
def test_loss_in_pieces_is_the_loss(chunk_size: int, head_chunk: int) -> None:
    logits = torch.randn(2, 7, 11, requires_grad=True)
    targets = torch.randint(11, (2, 7), dtype=torch.int32)
    targets[0, :3] = -100
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten().long())
    loss = chunked_cross_entropy(list(logits.split(head_chunk, 1)) if head_chunk else logits, targets, chunk_size)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_loss_of_nothing_is_zero() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    for chunk_size in (0, 2):
        loss = chunked_cross_entropy(logits, torch.full((1, 3), 7), chunk_size, ignore_index=7)
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, logits)[0].any()


def test_loss_of_half_precision_is_float32() -> None:
    assert chunked_cross_entropy(torch.randn(1, 3, 5).bfloat16(), torch.zeros(1, 3)).dtype == torch.float32


def test_num_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert [num_parameters(model, requires_grad=wanted) for wanted in (None, True, False)] == [26, 10, 16]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_load_checkpoint(folder: Path, nested: bool, wrapped: bool) -> None:
    from lightning.fabric import Fabric

    state = torch.load(folder / "lit_model.pth")
    torch.save({"model": state, "step_count": 3} if nested else state, folder / "lit_model.pth")
    model = GPT(tiny_config())
    fabric = Fabric(accelerator="cpu", devices=1)
    load_checkpoint(fabric, fabric.setup_module(model) if wrapped else model, folder / "lit_model.pth")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_load_checkpoint_is_strict(folder: Path) -> None:
    other = GPT(tiny_config(lm_head_bias=True))
    with pytest.raises(RuntimeError, match=r"lm_head\.bias"):
        load_checkpoint(None, other, folder / "lit_model.pth")
    load_checkpoint(None, other, folder / "lit_model.pth", strict=False)
    with pytest.raises(UserError, match="missing"):
        load_checkpoint(None, other, folder / "none.pth")


def test_copy_config_files(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    copy_config_files(folder, out)
    copied = {path.name for path in out.iterdir()}
    assert copied == {path.name for path in folder.iterdir()} - {"lit_model.pth"}
    assert "model_config.yaml" in copied
    assert "tokenizer.json" in copied


def test_folders_under_checkpoints(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").rename(tmp_path / "other")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "other").rename(tmp_path / "checkpoints" / "org")
    monkeypatch.chdir(tmp_path)
    assert extend_checkpoint_dir(Path("org/tiny")) == Path("checkpoints/org/tiny")
    assert extend_checkpoint_dir(Path("checkpoints/org/tiny")) == Path("checkpoints/org/tiny")
    assert extend_checkpoint_dir(Path("org/none")) == Path("org/none")
    assert auto_download_checkpoint("org/tiny") == Path("checkpoints/org/tiny")


def test_check_valid_checkpoint_dir(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_valid_checkpoint_dir(folder)
    (folder / "tokenizer.json").unlink()
    check_valid_checkpoint_dir(folder, ignore_tokenizer_files=True)
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer\.json or tokenizer\.model"):
        check_valid_checkpoint_dir(folder, raise_error=True)
    with pytest.raises(FileNotFoundError, match=r"lacks other\.pth"):
        check_valid_checkpoint_dir(folder, "other.pth", raise_error=True, ignore_tokenizer_files=True)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        check_valid_checkpoint_dir(folder / "none", raise_error=True)
    with pytest.raises(SystemExit, match="1"):
        check_valid_checkpoint_dir(folder)


def test_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, plain, training in ((True, "bf16-true", "bf16-mixed"), (False, "32-true", "32-true")):
        monkeypatch.setattr("litgpt.runtime.computes_in_bf16", lambda _, fast=fast: fast)
        assert get_default_supported_precision(training=False) == plain
        assert get_default_supported_precision(training=True) == training
