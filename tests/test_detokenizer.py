# Licensed under the Apache License 2.0, see the LICENSE file.

"""Decoding, whole and in a stream, for every kind of decoder; SentencePiece models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from litgpt.errors import UserError
from litgpt.tokenizer import StreamDecoder, Tokenizer
from tests.toy_tokenizers import CORPUS, byte_level, sentencepiece_like, write_folder


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece_like", "metaspace", "no_decoder", "wordpiece"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers with every kind of decoder."""
    if request.param == "byte_level":
        raw = byte_level()
    else:
        raw = sentencepiece_like()
        if request.param == "metaspace":
            raw.decoder = decoders.Metaspace()
        elif request.param == "no_decoder":
            raw.decoder = None
        elif request.param == "wordpiece":
            raw.decoder = decoders.WordPiece()
    return Tokenizer(write_folder(tmp_path_factory.mktemp(request.param), raw))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_stream_equals_whole_for_any_tokens(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    size = any_tokenizer.processor.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=30))
    decoder = StreamDecoder(any_tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == any_tokenizer.decode(ids)
    cut = data.draw(st.integers(0, len(ids)))  # the same decoder again, several tokens at a time, as tensors
    parts = [decoder.push(torch.tensor(ids[:cut])), decoder.push(ids[cut:]), decoder.finish()]
    assert "".join(parts) == any_tokenizer.decode(torch.tensor(ids))


@pytest.mark.parametrize("pieces", [["<0x80>", "▁", "<0x00>", "▁", "▁", "<0xC3>", "<0xA9>"], ["▁", "▁", "<0x00>"]])
def test_a_space_parts_runs_of_bytes(any_tokenizer: Tokenizer, pieces: list[str]) -> None:
    vocabulary = any_tokenizer.vocabulary
    ids = [vocabulary[piece] for piece in pieces if piece in vocabulary]
    decoder = StreamDecoder(any_tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == any_tokenizer.decode(ids)


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_stream_of_any_text(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text).tolist()
    decoder = StreamDecoder(any_tokenizer)
    assert "".join([decoder.push(index) for index in ids]) + decoder.finish() == any_tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["né😀", "  two spaces", "a\u200d👩‍👩‍👧 é", "日本語"])
def test_stream_never_shows_half_a_character(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level()))
    parts = list(tokenizer.decode_stream(tokenizer.encode(text)))
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert len(parts) == tokenizer.encode(text).numel()


def test_stream_keeps_spaces_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, sentencepiece_like()))
    ids = tokenizer.encode("hello hello  😀 a")
    assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids) == "hello hello  😀 a"
    assert tokenizer.decode(tokenizer.token_to_id("▁hello")) == " hello"  # alone: from the middle of a text
    assert tokenizer.decode([tokenizer.token_to_id("▁hello")]) == "hello"  # a whole text
    assert tokenizer.decode(ids[0]) == tokenizer.decode(int(ids[0])) == " hello"


def test_stream_cost_does_not_grow_with_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, sentencepiece_like()))
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: Any, skip_special_tokens: bool = True) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("hello he 😀 a" * 50).tolist() + [tokenizer.token_to_id("<0xFF>")] * 500
    for index in ids:
        decoder.push(index)
    decoder.finish()
    assert sum(decoded) <= 5 * len(ids)


def test_decode_skips_special_tokens_unless_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config={"bos_token": "<s>"}))
    ids = tokenizer.encode("<s>a</s>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"
    assert tokenizer.decode([10**6]) == ""


# SentencePiece


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer.model with byte fallback."""
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', encoding="utf-8")
    return folder


def test_sentencepiece_model(sentencepiece_folder: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_folder)
    assert tokenizer.backend == "sentencepiece"
    assert tokenizer.use_bos
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.stop_ids == {2}
    ids = tokenizer.encode("Hello né😀 world", eos=True).tolist()
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "Hello né😀 world"
    assert tokenizer.encode("<s>Hello</s>").tolist() == [1, *tokenizer.encode("Hello", bos=False).tolist(), 2]
    assert tokenizer.token_to_id("<unk>") == 0
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tokenizer.token_to_id("no such token")


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_stream_equals_whole(sentencepiece_folder: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer(sentencepiece_folder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids)


def test_sentencepiece_missing_package_and_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    pytest.importorskip("sentencepiece")
    with pytest.raises(UserError, match=r"tokenizer\.model"):
        Tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'litgpt\[sentencepiece\]'"):
        Tokenizer(tmp_path)
