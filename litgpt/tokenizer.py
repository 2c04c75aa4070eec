# Licensed under the Apache License 2.0, see the LICENSE file.

"""Text to token ids and back, as the files of a checkpoint define it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from litgpt import chat_template as templates
from litgpt.chat_template import Message
from litgpt.constants import require
from litgpt.detokenizer import StreamDecoder
from litgpt.errors import UserError
from litgpt.tokenizer_files import TokenizerFiles, eos_ids, read_tokenizer_files, token_text

__all__ = ["StreamDecoder", "Tokenizer"]

# Classes of transformers that prepend BOS unless their config says `add_bos_token: false`
_BOS_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")

# Tokens that end an answer wherever they exist as special tokens. Not among them, because elsewhere they mean something
# else, are `<|end|>` (gpt-oss writes it between reasoning and answer) and `</s>` (an HTML tag in Gemma's vocabulary):
# where they end a turn, the chat template or an eos entry says so.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
)
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a checkpoint.

    `tokenizer.json` is preferred over `tokenizer.model`. Whether encoding starts with BOS, and which tokens end an
    answer, follows from the files alone.

    Args:
        checkpoint_dir: a folder with tokenizer files, or a `.gguf` file.

    Attributes:
        path: that folder or file.
        processor: the object of the `tokenizers` or `sentencepiece` library.
        backend: "huggingface" or "sentencepiece".
        bos_id: token that starts a text, None if there is none.
        eos_id: token that ends a text, None if there is none.
        use_bos: whether `encode` starts with BOS by default.
        special_ids: tokens that `decode` leaves out.
        chat_template: the checkpoint's own template (jinja2), None if it has none.

    Raises:
        UserError: the files are missing or unreadable.
    """

    def __init__(self, checkpoint_dir: Path | str) -> None:
        self.path = path = Path(checkpoint_dir)
        self._files: TokenizerFiles = read_tokenizer_files(path)
        self.model_name = path.name if path.is_dir() else path.stem
        self.backend: Literal["huggingface", "sentencepiece"]
        self.processor: Any
        if self._files.tokenizer_json is not None:
            self.backend = "huggingface"
            self.processor = self._load_tokenizers(self._files.tokenizer_json)
        else:
            self.backend = "sentencepiece"
            self.processor = _load_sentencepiece(self._files.tokenizer_model)
        self.special_ids: frozenset[int]
        self._added: dict[str, int] = self._find_added_tokens()
        prefix_id = self._prefix_of_processor()
        self.bos_id: int | None = self._find_bos(prefix_id)
        self.eos_id: int | None = self._find_eos()
        self.use_bos: bool = self.bos_id is not None and self._wants_bos(prefix_id)
        self.chat_templates: dict[str, str] = self._files.chat_templates

    # Loading

    def _load_tokenizers(self, source: str) -> Any:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as HFTokenizer

        try:
            processor = HFTokenizer.from_str(source)
        except Exception as ex:  # the library raises plain Exception
            raise UserError(f"cannot read tokenizer.json of {self._files.path}: {ex}", "download it again") from ex
        processor.no_truncation()
        processor.no_padding()
        known = {token.content for token in processor.get_added_tokens_decoder().values()}
        named = [text for text in self.special_tokens.values() if text not in known]
        processor.add_special_tokens(
            [AddedToken(text, normalized=False) for text in named if processor.token_to_id(text) is not None]
        )
        return processor

    def _find_added_tokens(self) -> dict[str, int]:
        """Tokens that are recognised in a text as a whole; fills `special_ids`, the invisible ones among them."""
        if self.backend == "huggingface":
            decoder = self.processor.get_added_tokens_decoder()
            self.special_ids = frozenset(index for index, token in decoder.items() if token.special)
            return {token.content: index for index, token in decoder.items()}
        size = self.processor.vocab_size()
        self.special_ids = frozenset(index for index in range(size) if self.processor.is_control(index))
        return {self.processor.id_to_piece(index): index for index in self.special_ids}

    def _prefix_of_processor(self) -> int | None:
        """The token that the post-processor in tokenizer.json puts before a text."""
        if self.backend != "huggingface":
            return None
        plain = self.processor.encode("a", add_special_tokens=False).ids
        full = self.processor.encode("a").ids
        return full[0] if len(full) > len(plain) and full[:1] != plain[:1] else None

    def _find_bos(self, prefix_id: int | None) -> int | None:
        if prefix_id is not None and not isinstance(self._files.config.get("add_bos_token"), bool):
            return prefix_id
        named = self._id_of_named("bos_token")
        if named is not None:
            return named
        if self.backend == "sentencepiece" and self.processor.bos_id() >= 0:
            return int(self.processor.bos_id())
        for config in (self._files.generation_config, self._files.model_config):
            if isinstance(value := config.get("bos_token_id"), int):
                return value
        return prefix_id

    def _find_eos(self) -> int | None:
        named = self._id_of_named("eos_token")
        if named is not None:
            return named
        if self.backend == "sentencepiece" and self.processor.eos_id() >= 0:
            return int(self.processor.eos_id())
        ids = eos_ids(self._files.generation_config) or eos_ids(self._files.model_config)
        return ids[0] if ids else None

    def _wants_bos(self, prefix_id: int | None) -> bool:
        add_bos = self._files.config.get("add_bos_token")
        if isinstance(add_bos, bool):
            return add_bos
        class_name = str(self._files.config.get("tokenizer_class") or "").removesuffix("Fast")
        return prefix_id is not None or class_name in _BOS_CLASSES

    def _id_of_named(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self._lookup(text)

    def _lookup(self, token: str) -> int | None:
        if self.backend == "huggingface":
            return self.processor.token_to_id(token)
        index = self.processor.piece_to_id(token)
        return None if index == self.processor.unk_id() and token != self.processor.id_to_piece(index) else index

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones."""
        if self.backend == "huggingface":
            return self.processor.get_vocab_size(with_added_tokens=False)
        return self.processor.vocab_size()

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens as the files write them, added ones included, and their ids."""
        if self.backend == "huggingface":
            return self.processor.get_vocab(with_added_tokens=True)
        return {self.processor.id_to_piece(index): index for index in range(self.processor.vocab_size())}

    def token_to_id(self, token: str) -> int:
        """The id of a token given as text.

        Raises:
            ValueError: there is no such token.
        """
        index = self._lookup(token)
        if index is None:
            raise ValueError(f"token {token!r} is not in the vocabulary of {self.model_name}")
        return index

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens (`bos_token`, ...) as texts, the variables of a chat template."""
        merged = {**self._files.special_tokens_map, **self._files.config}
        names = [*_SPECIAL_TOKEN_KEYS, *(key for key in merged if key.endswith("_token"))]
        texts = {name: token_text(merged.get(name)) for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends an answer: all eos tokens of the files and the end of a turn."""
        files = self._files
        ids = {self.eos_id, *eos_ids(files.generation_config), *eos_ids(files.model_config)}
        for source in (files.config, files.special_tokens_map):
            text = token_text(source.get("eos_token"))
            ids.add(self._lookup(text) if text is not None else None)
        ids.update(self.special_ids & {self._added.get(token) for token in _END_OF_TURN})
        if self.chat_template is not None:
            token = templates.end_of_turn(
                lambda chat: self.apply_chat_template(chat, add_generation_prompt=False), self._added
            )
            ids.add(self._added[token] if token is not None else None)
        return frozenset(index for index in ids if index is not None)

    # Text to ids

    def encode(
        self,
        string: str,
        device: torch.device | None = None,
        bos: bool | None = None,
        eos: bool = False,
        max_length: int = -1,
    ) -> torch.Tensor:
        """Encode a text; special tokens written in it become their ids.

        Args:
            string: the text.
            device: where the result goes.
            bos: start with BOS; None: if the checkpoint's files say so. Never adds a second one.
            eos: end with EOS; never adds a second one.
            max_length: keep only that many tokens from the beginning; not positive: all.

        Returns:
            Token ids, (T,), int32.

        Raises:
            ValueError: BOS or EOS is asked for, but the tokenizer has none; or the text is not valid Unicode.
        """
        ids = self._encode_text(string)
        if bos or (bos is None and self.use_bos):
            if self.bos_id is None:
                raise UserError(f"the tokenizer of {self.model_name} has no BOS token", "encode with bos=False")
            if ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
        if eos:
            if self.eos_id is None:
                raise UserError(f"the tokenizer of {self.model_name} has no EOS token", "encode with eos=False")
            if ids[-1:] != [self.eos_id]:
                ids = [*ids, self.eos_id]
        if max_length > 0:
            ids = ids[:max_length]
        return torch.tensor(ids, dtype=torch.int, device=device)

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as ex:
            raise UserError(f"the text is not valid Unicode at character {ex.start}: {text[ex.start]!r}") from ex
        if self.backend == "huggingface":
            return self.processor.encode(text, add_special_tokens=False).ids
        # sentencepiece never produces control tokens from a text, so they are cut out first
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) + ")", text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids.extend(self.processor.encode(piece))
        return ids

    # Ids to text

    def decode(self, tensor: torch.Tensor | Sequence[int] | int, skip_special_tokens: bool = True) -> str:
        """Decode ids to a text.

        A sequence is a whole text: SentencePiece-type tokenizers drop its first space. A single id (an int or a
        0-d tensor) is a piece from the middle of a text and keeps its space.

        Args:
            tensor: one id or a sequence of ids; ids outside the vocabulary have no text.
            skip_special_tokens: leave out special tokens such as BOS.
        """
        ids = tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor
        if isinstance(ids, int):
            prefix = self._letter
            return self.decode([*prefix, ids], skip_special_tokens).removeprefix(self.decode(prefix))
        ids = [int(index) for index in ids]
        if self.backend == "huggingface":
            return self.processor.decode(ids, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            ids = [index for index in ids if index not in self.special_ids]
        return self.processor.decode([index for index in ids if index < self.processor.vocab_size()])

    @cached_property
    def _letter(self) -> list[int]:
        """Ids of an ordinary text to put before an id that is not the first one."""
        return self._encode_text("a")

    def decode_stream(
        self, token_stream: Iterable[torch.Tensor | int], device: torch.device | None = None
    ) -> Iterator[str]:
        """Decode tokens as they come; the joined texts equal `decode` of all tokens.

        Args:
            token_stream: token ids, one or several at a time.
            device: unused, kept for compatibility.

        Yields:
            One text, possibly empty, for each item, and what was held back at the end.
        """
        decoder = StreamDecoder(self)
        for token in token_stream:
            yield decoder.push(token)
        if rest := decoder.finish():
            yield rest

    # Chat

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's default chat template."""
        return self.chat_templates.get("default")

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render a conversation with the checkpoint's own template.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: end with the header of the answer to come.
            kwargs: `tools`, `documents` and variables of the template; `chat_template` names one of
                `chat_templates` or is itself a template.

        Raises:
            UserError: there is no template, or it is invalid, unsafe or refuses the conversation.
        """
        chosen = kwargs.pop("chat_template", None)
        if chosen is None:
            chosen = "tool_use" if kwargs.get("tools") and "tool_use" in self.chat_templates else "default"
        source = self.chat_templates.get(chosen, chosen if "{" in chosen else None)
        if source is None:
            raise UserError(f"{self.model_name} has no chat template {chosen!r}", "choose a prompt style by name")
        variables = {**self.special_tokens, **kwargs}
        return templates.render(source, messages, add_generation_prompt=add_generation_prompt, **variables)


def _load_sentencepiece(path: Path | None) -> Any:
    assert path is not None
    require("sentencepiece", f"reading {path}")
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as ex:
        raise UserError(f"cannot read {path}: {ex}", "download it again") from ex
