# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt download` with a model that can be used afterwards; the hub is a small one on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from litgpt.__main__ import main
from litgpt.checkpoint.source import open_source
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.model import GPT
from litgpt.scripts.download import download_from_hub
from tests import tiny_text
from tests.hub_stub import HubStub, hub_for_tests

REPO = "org/tiny"
FOLDER = Path("checkpoints/org/tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    pytest.importorskip("transformers")
    from tests.tiny import save_tiny

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder, vocab_size=tiny_text.VOCAB_SIZE)
    tiny_text.write_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def stub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with hub_for_tests({REPO: files}, tmp_path, monkeypatch) as running:
        yield running


def test_generate_downloads_what_it_needs(stub: HubStub, capfd: pytest.CaptureFixture[str]) -> None:
    main(["generate", REPO, "--max_new_tokens", "3", "--precision", "32-true", "--device", "cpu"])
    assert capfd.readouterr().out
    assert open_source(FOLDER).kind == "hf"


def test_downloaded_files_are_used_as_they_are(stub: HubStub) -> None:
    download_from_hub(REPO)
    assert not (FOLDER / "lit_model.pth").exists()
    assert Config.from_file(FOLDER / "model_config.yaml") == Config.from_hf(FOLDER)
    assert GPT.from_checkpoint(REPO).config.n_layer == 2


def test_weights_in_another_type(stub: HubStub) -> None:
    download_from_hub(REPO, dtype="bfloat16")
    source = open_source(FOLDER)
    assert source.kind == "litgpt"
    assert {info.dtype for info in source.tensors().values()} == {torch.bfloat16}
    converted = GPT.from_checkpoint(FOLDER).state_dict()
    (FOLDER / "lit_model.pth").unlink()
    for name, tensor in GPT.from_checkpoint(FOLDER).state_dict().items():
        assert torch.equal(converted[name], tensor.bfloat16()), name
    with pytest.raises(UserError, match="int3"):
        download_from_hub(REPO, dtype="int3")


def test_older_copy_of_the_weights_is_reported(stub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["download", REPO, "--dtype", "bfloat16"])
    main(["download", REPO])
    assert "older" not in capsys.readouterr().err
    os.utime(FOLDER / "lit_model.pth", (1, 1))  # as after an update of the repository
    main(["download", REPO])
    assert "lit_model.pth is older than the weights beside it" in capsys.readouterr().err


def test_weights_of_another_model(stub: HubStub) -> None:
    with pytest.raises(UserError, match="does not fit"):
        download_from_hub(REPO, model_name="pythia-14m")
    assert not (FOLDER / "lit_model.pth").exists()
    with pytest.raises(ValueError, match="no_such_model"):
        download_from_hub(REPO, model_name="no_such_model")


def test_tokenizer_only(stub: HubStub) -> None:
    from litgpt.tokenizer import Tokenizer

    download_from_hub(REPO, tokenizer_only=True)
    assert not list(FOLDER.glob("*.safetensors"))
    assert Tokenizer(FOLDER).decode(Tokenizer(FOLDER).encode("né 😀")) == "né 😀"
    with pytest.raises(UserError, match="no model weights") as caught:
        GPT.from_checkpoint(REPO)
    assert caught.value.hint


def test_options_by_position(stub: HubStub, tmp_path: Path) -> None:
    download_from_hub(REPO, None, True, True, None, tmp_path)
    assert (tmp_path / REPO / "tokenizer.json").is_file()
    assert not list((tmp_path / REPO).glob("*.safetensors"))


def test_another_place(stub: HubStub, tmp_path: Path) -> None:
    download_from_hub(REPO, checkpoint_dir=tmp_path / "elsewhere")
    assert GPT.from_checkpoint(tmp_path / "elsewhere" / REPO).config.n_layer == 2
