# Licensed under the Apache License 2.0, see the LICENSE file.

"""Generating with what finetuning left behind: the commands, `generate --adapter`, and `LLM`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.__main__ import main
from litgpt.api import LLM
from litgpt.checkpoint.adapter_files import VARIANTS, load_finetuned, open_adapter
from litgpt.generate.base import generate
from litgpt.model import GPT
from litgpt.prompts import Alpaca
from litgpt.scripts.merge_lora import merge_lora
from litgpt.tokenizer import Tokenizer
from tests.tiny_finetuned import logits, write_base, write_finetuned

OPTIONS = ["--temperature", "0", "--max_new_tokens", "12", "--precision", "32-true"]
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The output of a command."""

    def call(*args: object) -> str:
        main([str(arg) for arg in args])
        return capsys.readouterr().out.rstrip("\n")

    return call


def expected_text(model: GPT, base: Path, prompt: str) -> str:
    """The same by the model's own forward passes."""
    tokenizer = Tokenizer(base)
    ids = tokenizer.encode(prompt)
    tokens = generate(model, ids, len(ids) + 12, temperature=0.0, eos_id=tokenizer.eos_id, include_prompt=False)
    ended = len(tokens) and int(tokens[-1]) == tokenizer.eos_id
    return tokenizer.decode(tokens[:-1] if ended else tokens)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", block_size=256)
    (tmp_path / "base" / "prompt_style.yaml").write_text("class_path: litgpt.prompts.Default\n", encoding="utf-8")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", VARIANTS)
def test_generate_with_an_adapter(kind: str, base: Path, tmp_path: Path, run: Run) -> None:
    model = write_finetuned(kind, base, tmp_path / "out")
    text = expected_text(model, base, "hello")
    assert text != expected_text(GPT.from_checkpoint(base), base, "hello")
    file = tmp_path / "out" / VARIANTS[kind].file_name
    assert run("generate", base, "--prompt", "hello", "--adapter", tmp_path / "out", *OPTIONS) == text
    assert run("generate", base, "--prompt", "hello", "--adapter", file, *OPTIONS) == text
    assert run("generate", tmp_path / "out", "--prompt", "hello", *OPTIONS) == text  # the base is noted there


@pytest.mark.parametrize("kind", ["adapter", "adapter_v2"])
def test_commands_for_adapters(kind: str, base: Path, tmp_path: Path, run: Run) -> None:
    model = write_finetuned(kind, base, tmp_path / "out")
    text = expected_text(model, base, "hello")
    for path in (tmp_path / "out" / VARIANTS[kind].file_name, tmp_path / "out"):
        assert run(f"generate_{kind}", base, "--prompt", "hello", "--adapter_path", path, *OPTIONS) == text


def test_command_for_full_finetuning(base: Path, tmp_path: Path, run: Run) -> None:
    other = write_base(tmp_path / "other", seed=3, block_size=256)
    text = expected_text(other, base, "hello")
    checkpoint = {"model": other.state_dict(), "optimizer": {"state": {}}, "iter_num": 3, "step_count": 3}
    for name, content in (("training.pth", checkpoint), ("flat.pth", other.state_dict())):
        torch.save(content, tmp_path / name)
        args = ("--prompt", "hello", "--finetuned_path", tmp_path / name)
        assert run("generate_full", base, *args, *OPTIONS) == text
    assert run("generate_full", base, "--prompt", "hello", "--finetuned_path", tmp_path / "other", *OPTIONS) == text


@pytest.mark.parametrize("command", ["generate", "generate_adapter", "generate_full"])
def test_the_prompt_format_of_the_training_is_used(command: str, base: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    if command == "generate_full":
        model: GPT = write_base(out, seed=3, block_size=256)
        args: tuple[Any, ...] = ("--finetuned_path", out)
    else:
        model = write_finetuned("adapter", base, out)
        args = ("--adapter" if command == "generate" else "--adapter_path", out)
    (out / "prompt_style.yaml").write_text("class_path: litgpt.prompts.Alpaca\n", encoding="utf-8")
    text = expected_text(model, base, Alpaca().apply("hello"))
    assert run(command, base, "--prompt", "hello", *args, *OPTIONS) == text
    if command != "generate":
        text = expected_text(model, base, Alpaca().apply("hello", input="more"))
        assert run(command, base, "--prompt", "hello", "--input", "more", *args, *OPTIONS) == text


def test_a_merged_folder_generates(base: Path, tmp_path: Path, run: Run) -> None:
    model = write_finetuned("lora", base, tmp_path / "out")
    merge_lora(tmp_path / "out")
    assert run("generate", tmp_path / "out", "--prompt", "hello", *OPTIONS) == expected_text(model, base, "hello")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "base", "--adapter", "nothing"), "the adapter nothing does not exist"),
        (("generate", "base", "--adapter", "base"), "base holds no adapter"),
        (("generate", "other", "--adapter", "out"), "does not fit the model: 15 of the wrong shape"),
        (("generate_adapter", "base"), "lit_model.pth.adapter does not exist"),
        (("generate_full", "base"), "lit_model_finetuned.pth does not exist"),
        (("merge_lora", "base"), "base holds no adapter"),
    ],
)
def test_mistakes_are_one_line(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_base(tmp_path / "base")
    write_base(tmp_path / "other", n_embd=40)
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 1
    error, hint = capsys.readouterr().err.strip().splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("kind", VARIANTS)
def test_llm_loads_answers_and_saves(kind: str, base: Path, tmp_path: Path) -> None:
    model = write_finetuned(kind, base, tmp_path / "out")
    text = expected_text(model, base, "hello")
    llm = LLM.load(base, adapter=tmp_path / "out", precision="32-true", device="cpu")
    assert llm.generate("hello", max_new_tokens=12, temperature=0.0) == text
    before = {name: tensor.clone() for name, tensor in llm.state_dict().items()}
    llm.save(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.state_dict().items())
    again = LLM.load(tmp_path / "saved", precision="32-true", device="cpu")
    assert again.model is not None
    assert (logits(again.model) - logits(model)).abs().max() < 1e-5
    assert LLM.load(tmp_path / "out", device="cpu", distribute=None).adapter == open_adapter(tmp_path / "out")


def test_llm_saves_a_plain_model_over_an_adapter(base: Path, tmp_path: Path) -> None:
    write_finetuned("adapter_v2", base, tmp_path / "out")
    LLM.load(base, adapter=tmp_path / "out", precision="32-true", device="cpu").save(tmp_path / "saved")
    LLM.load(base, precision="32-true", device="cpu").save(tmp_path / "saved")
    again = LLM.load(tmp_path / "saved", precision="32-true", device="cpu")
    assert again.model is not None
    assert torch.equal(logits(again.model), logits(GPT.from_checkpoint(base)))


def test_llm_takes_the_prompt_format_of_the_training(base: Path, tmp_path: Path) -> None:
    write_finetuned("lora", base, tmp_path / "out")
    (tmp_path / "out" / "prompt_style.yaml").write_text("class_path: litgpt.prompts.Alpaca\n", encoding="utf-8")
    assert isinstance(LLM.load(base, adapter=tmp_path / "out", distribute=None).prompt_style, Alpaca)
    assert isinstance(LLM.load(tmp_path / "out", distribute=None).prompt_style, Alpaca)
    assert not isinstance(LLM.load(base, distribute=None).prompt_style, Alpaca)


def test_llm_in_training_has_the_adapter(base: Path, tmp_path: Path) -> None:
    model = write_finetuned("lora", base, tmp_path / "out", lora_dropout=0.0)
    llm = LLM.load(base, adapter=tmp_path / "out", distribute=None)
    llm.trainer_setup()
    assert isinstance(llm.model, GPT)
    assert llm.model.training
    assert torch.equal(logits(llm.model), logits(model))


def test_in_half_precision(base: Path, tmp_path: Path) -> None:
    model = write_finetuned("lora", base, tmp_path / "out")
    half = load_finetuned(base, open_adapter(tmp_path / "out"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert (logits(half).float() - logits(model)).abs().max() < 0.1 * logits(model).abs().max()
