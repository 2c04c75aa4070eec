# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a person gets wrong is answered by one line of error, one hint and an exit code, never by a traceback."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from litgpt.__main__ import COMMANDS, main
from litgpt.cli import load
from litgpt.errors import UserError
from tests import tiny_text
from tests.tiny import save_tiny

WEIGHTS = "model.safetensors"

Fails = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 64 tokens of context that generates."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("good")
    save_tiny("llama", folder, vocab_size=tiny_text.VOCAB_SIZE)
    return tiny_text.write_tokenizer(folder, chat_template=None)


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


@pytest.fixture
def fails(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run the command line, which must fail properly; returns the error and the hint."""
    monkeypatch.delenv("LITGPT_DEBUG", raising=False)

    def call(*args: object, code: int = 1) -> tuple[str, str]:
        with pytest.raises(SystemExit) as left:
            main([*map(str, args)])
        out, err = capfd.readouterr()
        assert left.value.code == code, err
        assert out == ""
        assert "Traceback" not in err
        *messages, error, hint = err.splitlines()
        assert all(line.startswith(("loaded ", "warning: ")) for line in messages), err
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        assert len(hint) > len("hint: ")
        return error.removeprefix("error: "), hint.removeprefix("hint: ")

    return call


def generate(folder: Path, *args: object) -> tuple[object, ...]:
    return ("generate", folder, "--prompt", "Hello", "--precision", "32-true", "--device", "cpu", *args)


def test_the_good_one_works(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main([*map(str, generate(folder, "--max_new_tokens", 3))])
    assert capfd.readouterr().out


# The path


def test_missing_path(fails: Fails, tmp_path: Path) -> None:
    error, hint = fails(*generate(tmp_path / "nothing"))
    assert "nothing" in error
    assert "does not exist" in error
    assert "repository id" in hint


def test_missing_repository(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error, hint = fails(*generate(Path("org/nothing")))  # the tests run with HF_HUB_OFFLINE
    assert "org/nothing" in error
    assert "HF_HUB_OFFLINE" in f"{error} {hint}"


def test_empty_folder(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error, _ = fails(*generate(tmp_path / "empty"))
    assert str(tmp_path / "empty") in error


def test_a_file_that_is_no_checkpoint(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    error, _ = fails(*generate(tmp_path / "notes.txt"))
    assert "notes.txt" in error


def test_no_path_and_no_demo_model(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITGPT_HOME", str(tmp_path))
    error, hint = fails("generate", code=2)
    assert "demo model is not installed" in error
    assert "litgpt.scripts.demo" in hint


# The weights


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors(fails: Fails, folder: Path, keep: float) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    error, _ = fails(*generate(folder))
    assert WEIGHTS in error


@pytest.mark.parametrize("keep", [0, 3, 20, 5000, 1_000_000, -1])
def test_truncated_gguf(fails: Fails, smollm2_gguf: Path, tmp_path: Path, keep: int) -> None:
    file = tmp_path / "cut.gguf"
    shutil.copyfile(smollm2_gguf, file)
    os.truncate(file, keep if keep >= 0 else file.stat().st_size + keep)
    error, _ = fails(*generate(file))
    assert "cut.gguf" in error


def test_gguf_that_is_something_else(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    error, _ = fails(*generate(tmp_path / "x.gguf"))
    assert "x.gguf" in error


def test_missing_shard(fails: Fails, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}), encoding="utf-8"
    )
    error, _ = fails(*generate(folder))
    assert "model-00001-of-00001.safetensors" in error


def test_unmapped_and_missing_tensors(fails: Fails, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.self_attn.surprise.weight"] = torch.zeros(3)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(35)
    save_file(tensors, folder / WEIGHTS)
    error, _ = fails(*generate(folder))
    for name in ("model.layers.0.self_attn.surprise.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        assert name in error  # all of them at once


class _Evil:
    """Something that a pickle file must not be able to create."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("evil",))


@pytest.mark.parametrize("content", [_Evil(), {"lm_head.weight": _Evil()}, [1, 2], {"lm_head.weight": "text"}])
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_bin_with_something_else_than_tensors(
    fails: Fails, folder: Path, monkeypatch: pytest.MonkeyPatch, content: object, writer: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / WEIGHTS).unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        (torch.save if writer == "torch" else pickle.dump)(content, file)
    error, _ = fails(*generate(folder))
    assert "pytorch_model.bin" in error
    assert not (folder / "evil").exists()


# The configuration


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_unknown_model_type(fails: Fails, folder: Path) -> None:
    edit_config(folder, model_type="perceptron_9000")
    error, _ = fails(*generate(folder))
    assert "perceptron_9000" in error


def test_unknown_field(fails: Fails, folder: Path) -> None:
    edit_config(folder, attention_is_all_you_need=True)
    error, _ = fails(*generate(folder))
    assert "attention_is_all_you_need" in error


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama"}'])
def test_damaged_config(fails: Fails, folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    fails(*generate(folder))


def test_missing_config(fails: Fails, folder: Path) -> None:
    (folder / "config.json").unlink()
    error, _ = fails(*generate(folder))
    assert "config.json" in error


# The tokenizer


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "Nothing"}}'])
def test_unreadable_tokenizer(fails: Fails, folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    error, _ = fails(*generate(folder))
    assert "tokenizer.json" in error


def test_no_tokenizer(fails: Fails, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    error, _ = fails(*generate(folder))
    assert "tokenizer.json" in error


def test_unreadable_sentencepiece_model(fails: Fails, folder: Path) -> None:
    pytest.importorskip("sentencepiece")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"nonsense")
    error, _ = fails(*generate(folder))
    assert "tokenizer.model" in error


def test_broken_chat_template(fails: Fails, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    fails(*generate(folder))


# The settings


def test_prompt_longer_than_the_context(fails: Fails, folder: Path) -> None:
    error, _ = fails(*generate(folder), "--prompt", "x" * 100)
    assert "64" in error
    assert "100" in error or "101" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", "-1"),
        ("num_samples", "0"),
        ("temperature", "-0.5"),
        ("temperature", ".nan"),
        ("top_p", "1.5"),
        ("top_k", "-3"),
        ("min_p", "2"),
        ("repetition_penalty", "0"),
        ("precision", "bf17"),
        ("device", "tpu"),
        ("prompt_style", "no_such_style"),
        ("kv_cache", "no_such_kind"),
    ],
)
def test_settings_out_of_range(fails: Fails, folder: Path, option: str, value: str) -> None:
    error, hint = fails(*generate(folder), f"--{option}", value)
    assert option in f"{error} {hint}".replace(" ", "_") or value in error


def test_setting_of_the_wrong_type(fails: Fails, folder: Path) -> None:
    error, _ = fails(*generate(folder), "--max_new_tokens", "many", code=2)
    assert error == "--max_new_tokens takes an integer, not 'many'"
    error, _ = fails(*generate(folder), "--quantize", "nf4", code=2)
    assert error.startswith("--quantize takes bnb.nf4, ")


# The other commands


def test_validate_reports_and_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_config(folder, model_type="perceptron_9000")
    with pytest.raises(SystemExit) as left:
        main(["validate", str(folder)])
    out, err = capfd.readouterr()
    assert left.value.code == 1
    assert "perceptron_9000" in out
    assert err.startswith("error: 1 of 6 checks failed")


@pytest.mark.parametrize("command", sorted(name for name in COMMANDS if name not in ("version", "download")))
def test_every_command_explains_a_missing_path(fails: Fails, tmp_path: Path, command: str) -> None:
    parameters = inspect.signature(load(COMMANDS[command].target)).parameters.values()
    paths = [tmp_path / "nothing" for parameter in parameters if parameter.default is parameter.empty]
    error, _ = fails(command, *paths)
    assert "does not exist" in error


def test_the_api_raises_value_errors(folder: Path) -> None:
    """In Python the same faults are exceptions, with the same words."""
    from litgpt.model import GPT

    edit_config(folder, model_type="perceptron_9000")
    with pytest.raises(UserError, match="perceptron_9000") as caught:
        GPT.from_checkpoint(folder)
    assert isinstance(caught.value, ValueError)
