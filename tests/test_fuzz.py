# Licensed under the Apache License 2.0, see the LICENSE file.

"""Damaged checkpoints: an error of ours, or what `transformers` makes of the same files; never anything else."""

from __future__ import annotations

import json
import logging
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from litgpt.checkpoint.convert import load_model
from litgpt.errors import UserError
from litgpt.prompts import choose_prompt_style, encode_prompt
from litgpt.tokenizer import Tokenizer
from tests.tiny import random_ids, save_tiny
from tests.toy_tokenizers import CHATML, byte_level, write_folder

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama_llama3rope", "qwen2_window", "qwen3_moe", "gemma3_text", "gpt_neox", "phi3", "deepseek_v3")
WRONG: tuple[Any, ...] = (None, -1, 0, 2.5, True, "x", [], {}, [1, "y"], {"a": None}, 10**30)
TEXT = "Hello né, 123"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings about damaged files would fill the screen."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@torch.no_grad()
def our_logits(folder: Path) -> Tensor | None:
    """None for an error of ours; any other exception fails the test."""
    try:
        return load_model(folder, dtype=torch.float32)(random_ids((1, 9)))
    except UserError:
        return None


@torch.no_grad()
def their_logits(folder: Path) -> Tensor | None:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return model(random_ids((1, 9))).logits
    except Exception:  # whatever it says about them, these files are no model
        return None


def assert_error_or_same(folder: Path, whole: Tensor, what: object) -> bool:
    """Whether we read the files; where `transformers` does not, it must be as if nothing was missing."""
    ours = our_logits(folder)
    if ours is not None:
        theirs = their_logits(folder)
        assert (ours - (whole if theirs is None else theirs)).abs().max() <= 1e-4, what
    return ours is not None


def without(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The content without each of its keys in turn, those of objects inside included."""
    for key, value in content.items():
        yield key, {k: v for k, v in content.items() if k != key}
        if isinstance(value, dict):
            for inner, changed in without(value):
                yield f"{key}.{inner}", content | {key: changed}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_config_without_a_key(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    read, whole = 0, their_logits(tmp_path)
    assert whole is not None
    for key, damaged in without(content):
        path.write_text(json.dumps(damaged), encoding="utf-8")
        read += assert_error_or_same(tmp_path, whole, key)
    assert read > len(content) / 4  # most keys have a default or say nothing about the model


@pytest.mark.slow
def test_config_with_wrong_values(tmp_path: Path) -> None:
    """Only errors of ours, whatever stands there; what is read is not compared: some values are none of ours."""
    save_tiny("llama_llama3rope", tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    refused = 0
    for key in content:
        for value in WRONG:
            path.write_text(json.dumps(content | {key: value}), encoding="utf-8")
            refused += our_logits(tmp_path) is None
    assert refused > 50


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "[" * 500, "[" * 5000, "\ufeff{}", "\x00", '{"model_type": 3}']
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_other_content(file: str, text: str, folder: Path) -> None:
    (folder / file).write_text(text, encoding="utf-8")
    our_logits(folder)
    our_prompt(folder)


# Tokenizers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = byte_level()
    save_tiny("llama", folder, vocab_size=tokenizer.get_vocab_size())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
        "eos_token": "</s>",
        "pad_token": "</s>",
        "add_bos_token": True,
        "chat_template": CHATML,
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {"318": {"content": "<s>", "special": True}},
    }
    generation = {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.5, "transformers_version": "5.0"}
    return write_folder(folder, tokenizer, config=config, generation_config=generation)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def our_prompt(folder: Path) -> tuple[list[int], list[int]] | None:
    """Ids of a text and of a conversation; None for an error of ours."""
    try:
        tokenizer = Tokenizer(folder)
        assert all(isinstance(index, int) for index in tokenizer.stop_ids)
        return tokenizer.encode(TEXT, bos=False).tolist(), encode_prompt(
            tokenizer, choose_prompt_style(folder, tokenizer, None), TEXT
        )
    except UserError:
        return None


def their_prompt(folder: Path) -> tuple[list[int], list[int]] | None:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except TypeError:  # it wants `__type` in a token that is written as an object, which we can do without
        return None
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    if tokenizer.chat_template is None:
        return plain, []
    chat = [{"role": "user", "content": TEXT}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return plain, tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
def test_tokenizer_without_a_key(file: str, folder: Path) -> None:
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, damaged in without(content):
        path.write_text(json.dumps(damaged), encoding="utf-8")
        ours = our_prompt(folder)
        theirs = their_prompt(folder)
        if ours is not None and theirs is not None:
            plain, chat = theirs
            assert ours[0] == plain, key
            if chat:
                assert ours[1][ours[1][0] == Tokenizer(folder).bos_id :] == chat, key
    assert our_logits(folder) is not None


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
def test_tokenizer_with_wrong_values(file: str, folder: Path) -> None:
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in content:
        for value in WRONG:
            path.write_text(json.dumps(content | {key: value}), encoding="utf-8")
            our_prompt(folder)


# Weights


def test_header_with_flipped_bytes(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    random_numbers, read, whole = random.Random(7), 0, their_logits(tmp_path)
    assert whole is not None
    for _ in range(500):
        damaged = bytearray(content)
        # The length takes 8 bytes of thousands, and is worth as much
        place = random_numbers.randrange(8) if random_numbers.random() < 0.1 else random_numbers.randrange(8 + length)
        damaged[place] ^= 1 << random_numbers.randrange(8)
        path.write_bytes(damaged)
        read += assert_error_or_same(tmp_path, whole, place)
    assert read < 50


def test_cut_anywhere(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert our_logits(tmp_path) is None
