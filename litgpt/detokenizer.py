# Licensed under the Apache License 2.0, see the LICENSE file.

"""Incremental detokenizer: text that grows with the tokens and never takes anything back."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer


class StreamDecoder:
    """Decode one row of tokens as they come.

    The joined texts equal `tokenizer.decode` of all tokens, for any tokens; each push costs time in proportion to the
    tokens pushed. Text is held back only while it may still change: an unfinished multi-byte character, or a run of
    byte tokens (SentencePiece decides on such a run as a whole).

    Args:
        tokenizer: whose `decode` is followed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._skip = tokenizer.special_ids
        self._decoder: _ByteLevelDecoder | _PieceDecoder = (
            _ByteLevelDecoder(tokenizer) if _is_byte_level(tokenizer) else _PieceDecoder(tokenizer)
        )

    def push(self, ids: int | Sequence[int] | torch.Tensor) -> str:
        """Take the next token or tokens and return the text that is now certain, possibly empty."""
        values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        values = [values] if isinstance(values, int) else values
        return "".join([self._decoder.push(int(index)) for index in values if index not in self._skip])

    def finish(self) -> str:
        """Return the text that was held back; the decoder is then ready for a new text."""
        return self._decoder.finish()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.backend != "huggingface":
        return False
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.processor.decoder, ByteLevel)


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a visible character: itself, or one from U+0100 on, in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _token_bytes(token: str) -> bytes:
    """Bytes of a token; added tokens hold ordinary text."""
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes([table[character] for character in token])
    return token.encode("utf-8")


class _ByteLevelDecoder:
    """Tokens are strings of bytes, the text is their UTF-8 decoding, invalid bytes replaced."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_of = tokenizer.processor.id_to_token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, index: int) -> str:
        token = self._token_of(index)
        return "" if token is None else self._utf8.decode(_token_bytes(token))

    def finish(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _PieceDecoder:
    """A token's text depends on whether it is the first, and in a run of byte tokens on the whole run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._visible: list[int] = []  # the last tokens that are text on their own
        self._before: list[int] = []  # decoding starts with these, the visible ones and the last, not at the beginning
        self._known = ""  # their text
        self._run: list[int] = []  # byte tokens that wait for the end of their run

    def push(self, index: int) -> str:
        piece = self._piece(index)
        if piece is None:
            return ""
        if self._is_byte(index, piece):
            self._run.append(index)
            return ""
        return self._release_run() + self._text_of([index])

    def finish(self) -> str:
        rest = self._release_run()
        self._visible, self._before, self._known = [], [], ""
        return rest

    def _release_run(self) -> str:
        run, self._run = self._run, []
        return self._text_of(run) if run else ""

    def _text_of(self, ids: list[int]) -> str:
        text = self._tokenizer.decode([*self._before, *ids])[len(self._known) :]
        alone = self._tokenizer.decode(ids)
        if alone:
            self._visible, self._before, self._known = ids, ids, alone
        else:  # spaces: the first ones are dropped, how many depends on the library; others part two runs of bytes
            self._before = [*(self._visible or self._before), *ids]
            self._known = self._tokenizer.decode(self._before)
        return text

    def _piece(self, index: int) -> str | None:
        processor = self._tokenizer.processor
        if self._tokenizer.backend == "huggingface":
            return processor.id_to_token(index)
        return processor.id_to_piece(index) if index < processor.vocab_size() else None

    def _is_byte(self, index: int, piece: str) -> bool:
        if self._tokenizer.backend == "sentencepiece":
            return self._tokenizer.processor.is_byte(index)
        return re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece) is not None
