# Licensed under the Apache License 2.0, see the LICENSE file.

"""Tokenizer: what the files say about BOS and stopping, and agreement with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.errors import UserError
from litgpt.tokenizer import StreamDecoder, Tokenizer
from tests.assets import REAL_TOKENIZERS, our_tokenizer, reference_tokenizer
from tests.toy_tokenizers import CHATML, add_bos_template, byte_level, sentencepiece_like, write_folder

# BOS


@pytest.mark.parametrize("name", ["Llama-3-renamed", "x", "SmolLM2-Instruct", "Meta-Llama-3.1-8B"])
@pytest.mark.parametrize("in_post_processor", [True, False])
def test_bos_follows_the_files_and_not_the_name_of_the_folder(
    tmp_path: Path, name: str, in_post_processor: bool
) -> None:
    raw = add_bos_template(byte_level()) if in_post_processor else byte_level()
    tokenizer = Tokenizer(write_folder(tmp_path / name, raw, config={"bos_token": "<s>"}))
    assert tokenizer.use_bos == in_post_processor
    assert (tokenizer.encode("a")[0].item() == tokenizer.bos_id) == in_post_processor


@pytest.mark.parametrize(
    ("config", "in_post_processor", "expected"),
    [
        ({"add_bos_token": True}, False, True),
        ({"add_bos_token": False}, True, False),
        ({"add_bos_token": None}, True, True),
        ({"tokenizer_class": "LlamaTokenizer"}, False, True),
        ({"tokenizer_class": "LlamaTokenizerFast"}, False, True),
        ({"tokenizer_class": "GemmaTokenizerFast"}, False, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False, False),
        ({"tokenizer_class": None}, False, False),
        ({"tokenizer_class": "Qwen2Tokenizer"}, False, False),
    ],
)
def test_bos_by_config(tmp_path: Path, config: dict[str, Any], in_post_processor: bool, expected: bool) -> None:
    raw = add_bos_template(byte_level()) if in_post_processor else byte_level()
    tokenizer = Tokenizer(write_folder(tmp_path, raw, config={"bos_token": "<s>", **config}))
    assert tokenizer.use_bos is expected


def test_never_two_bos_nor_two_eos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(write_folder(tmp_path, add_bos_template(byte_level()), config=config))
    for bos in (None, True):
        ids = tokenizer.encode("<s>a</s>", bos=bos, eos=True).tolist()
        assert ids.count(tokenizer.bos_id) == ids.count(tokenizer.eos_id) == 1
    assert tokenizer.encode("a", bos=False).tolist() == [tokenizer.token_to_id("a")]
    assert tokenizer.encode("a", bos=True, eos=True).tolist() == [
        tokenizer.bos_id,
        tokenizer.token_to_id("a"),
        tokenizer.eos_id,
    ]


def test_bos_known_only_from_the_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, add_bos_template(byte_level())))
    assert tokenizer.bos_id == tokenizer.token_to_id("<s>")
    assert tokenizer.use_bos


def test_a_text_that_starts_with_the_bos_token_keeps_it_without_use_bos(tmp_path: Path) -> None:
    """SmolLM2's BOS is `<|im_start|>`, which its chat format begins with."""
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config={"bos_token": "<|im_start|>"}))
    assert not tokenizer.use_bos
    assert tokenizer.encode("<|im_start|>user")[0].item() == tokenizer.bos_id


def test_missing_bos_and_eos_are_clear_errors(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level()))
    assert tokenizer.bos_id is None
    assert tokenizer.eos_id is None
    with pytest.raises(UserError, match="no BOS"):
        tokenizer.encode("a", bos=True)
    with pytest.raises(UserError, match="no EOS"):
        tokenizer.encode("a", eos=True)


# Encoding


def test_encode_arguments(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level()))
    ids = tokenizer.encode("abcdef ghi", device=torch.device("cpu"))
    assert ids.dtype == torch.int
    assert ids.ndim == 1
    assert tokenizer.encode("abcdef ghi", max_length=3).tolist() == ids.tolist()[:3]
    assert tokenizer.encode("").tolist() == []
    with pytest.raises(UserError, match="not valid Unicode at character 1"):
        tokenizer.encode("a\udce9")


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    tokenizer = Tokenizer(write_folder(tmp_path, raw))
    text = "Hello world, this is a text. Hello!"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a").numel() == 1


def test_vocabulary(tmp_path: Path) -> None:
    raw = byte_level()
    tokenizer = Tokenizer(write_folder(tmp_path, raw))
    assert tokenizer.vocab_size == raw.get_vocab_size(with_added_tokens=False)
    assert tokenizer.token_to_id("a") == raw.token_to_id("a")
    with pytest.raises(ValueError, match="'nope' is not in the vocabulary"):
        tokenizer.token_to_id("nope")
    assert tokenizer.backend == "huggingface"
    assert tokenizer.model_name == tmp_path.name


def test_named_special_token_that_is_an_ordinary_entry_of_the_vocabulary(tmp_path: Path) -> None:
    """It is recognised in a text, and invisible in the answer, without getting a new id."""
    raw = sentencepiece_like()
    expected = raw.token_to_id("▁hello")
    tokenizer = Tokenizer(write_folder(tmp_path, raw, config={"eos_token": "▁hello"}))
    assert tokenizer.eos_id == expected
    assert expected in tokenizer.special_ids
    assert tokenizer.decode([expected]) == ""


# Stop ids and odd files


def test_stop_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    names = ("<s>", "<e1>", "<e2>", "<e3>", "<e4>", "<e5>", "<e6>", "<|im_end|>", "<end>")
    raw = byte_level(names)
    ids = {name: raw.token_to_id(name) for name in names}
    template = "{% for m in messages %}<s>{{ m.content }}{{ '<end>' if m.role == 'assistant' }}{% endfor %}"
    folder = write_folder(
        tmp_path,
        raw,
        config={"eos_token": {"__type": "AddedToken", "content": "<e1>"}, "chat_template": template},
        special_tokens_map={"eos_token": "<e2>"},
        generation_config={"eos_token_id": [ids["<e3>"], ids["<e4>"]]},
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ids["<e5>"]}), encoding="utf-8")
    tokenizer = Tokenizer(folder)
    assert tokenizer.stop_ids == {ids[name] for name in names if name not in ("<s>", "<e6>")}
    assert tokenizer.eos_id == ids["<e1>"]


def test_end_of_turn_is_not_the_eos(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "chat_template": CHATML}
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config=config))
    assert tokenizer.stop_ids == {tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")}


def test_end_of_turn_of_a_template_that_wants_content_in_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ '\n' + m.content[0]['text'] + ' <eot>' }}{% endfor %}"
    raw = byte_level(("<eot>",))
    tokenizer = Tokenizer(write_folder(tmp_path, raw, config={"chat_template": template}))
    assert tokenizer.stop_ids == {raw.token_to_id("<eot>")}


def test_a_token_between_reasoning_and_answer_does_not_end_a_turn(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|begin|>{{ m.role }}{% if m.reasoning_content %}<|think|>"
        "{{ m.reasoning_content }}<|end|><|begin|>{% endif %}<|content|>{{ m.content }}<|end|><|over|>{% endfor %}"
    )
    raw = byte_level(("<|end|>", "<|over|>", "<|begin|>"))
    tokenizer = Tokenizer(write_folder(tmp_path, raw, config={"chat_template": template}))
    assert tokenizer.stop_ids == {raw.token_to_id("<|over|>")}


def test_tokens_that_mean_something_else_do_not_stop(tmp_path: Path) -> None:
    """`<|end|>` parts reasoning from answer in gpt-oss; `</s>` is an HTML tag in Gemma's vocabulary."""
    raw = byte_level(("<|end|>", "<|return|>"))
    raw.add_tokens(["</s>"])
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>{% endfor %}"
    tokenizer = Tokenizer(write_folder(tmp_path, raw, config={"chat_template": template}))
    assert tokenizer.stop_ids == {raw.token_to_id("<|return|>")}


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% broken", "{{ messages.__class__ }}", "hi"])
def test_stop_ids_survive_any_template(tmp_path: Path, template: str) -> None:
    config = {"eos_token": "</s>", "chat_template": template}
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config=config))
    assert tokenizer.token_to_id("</s>") in tokenizer.stop_ids


def test_eos_from_generation_config_alone_is_one_id(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(("<s>",)), generation_config={"eos_token_id": [7, 8]}))
    assert tokenizer.eos_id == 7
    assert tokenizer.stop_ids == {7, 8}


@pytest.mark.parametrize(
    "text",
    [
        '{\n "bos_token_id": 5,\n "eos_token_id": [\n  7,\n  8\n ],\n "temperature": 0.6\n "top_p": 0.9\n}',  # no comma
        '{"bos_token_id": 5, "eos_token_id": [7, 8,],}',
    ],
)
def test_generation_config_with_wrong_commas(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(("<s>",)), generation_config=text))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (5, 7, {7, 8})
    assert "not valid JSON" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00"])
def test_generation_config_beyond_repair_is_left_out(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config={"eos_token": "</s>"}, generation_config=text))
    assert tokenizer.eos_id == tokenizer.token_to_id("</s>")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_unreadable_tokenizer_files_are_named(tmp_path: Path, file: str, content: bytes) -> None:
    write_folder(tmp_path, byte_level(), config={})
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=file):
        Tokenizer(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer(tmp_path)
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither a folder nor a \.gguf"):
        Tokenizer(tmp_path / "file.bin")


@pytest.mark.parametrize("key", ["tokenizer_class", "bos_token", "eos_token", "add_bos_token", "model_max_length"])
def test_no_key_of_tokenizer_config_is_needed(tmp_path: Path, key: str) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "model_max_length": 5,
    }
    del config[key]
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config=config))
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"


# Real tokenizers


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_tokenizers_equal_transformers(name: str) -> None:
    ours, theirs = our_tokenizer(name), reference_tokenizer(name)
    for text in ("Hello world", "  né😀 x", " a", "x\n\n y\t12345", "<s> 123  456", "it's 日本語"):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, bos=False).tolist() == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        decoder = StreamDecoder(ours)
        assert "".join(map(decoder.push, expected)) + decoder.finish() == ours.decode(expected)
    if name != "deepseek_v3":  # its files contradict each other; add_bos_token, which transformers 5 ignores, wins
        assert ours.encode("Hello").tolist() == theirs("Hello")["input_ids"]
    assert ours.eos_id == theirs.eos_token_id


@pytest.mark.parametrize(
    ("name", "stop_tokens", "use_bos"),
    [
        ("llama3", ["<|end_of_text|>", "<|eot_id|>"], False),
        ("llama3_1", ["<|end_of_text|>", "<|eot_id|>"], True),
        ("qwen3", ["<|endoftext|>", "<|im_end|>"], False),
        ("gemma3", ["<eos>", "<end_of_turn>"], True),
        ("deepseek_v3", ["<｜end▁of▁sentence｜>"], True),
    ],
)
def test_real_stop_tokens_and_bos(name: str, stop_tokens: list[str], use_bos: bool) -> None:
    tokenizer = our_tokenizer(name)
    assert tokenizer.stop_ids == {tokenizer.token_to_id(token) for token in stop_tokens}
    assert tokenizer.use_bos is use_bos


def test_gguf_tokenizer(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer(smollm2_gguf)
    assert tokenizer.chat_template is not None
    assert tokenizer.stop_ids == {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    ids = tokenizer.encode("né😀 12 x")
    assert tokenizer.decode(ids) == "".join(tokenizer.decode_stream(ids)) == "né😀 12 x"
