# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a prompt style is, and how a conversation is written turn by turn."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from litgpt.config import Config
from litgpt.errors import UserError

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

prompt_styles: dict[str, type[PromptStyle]] = {}
"""Styles by the name that the command line uses."""
_models: list[tuple[str, type[PromptStyle]]] = []  # patterns of the names of published models

Prompt = str | Sequence[Mapping[str, Any]]  # a request, or a conversation as messages with `role` and `content`


class PromptStyle:
    """Turns a request into the text that a model sees; this base class leaves it as it is.

    Subclasses override `apply`, and where needed `stop_tokens`. The class keywords `name` (for the command line) and
    `models` (a pattern of names of published models) make a style known.
    """

    bos: ClassVar[bool | None] = None
    """Whether encoding adds BOS: None as the tokenizer does by itself, False when the text has all it needs."""
    stop: ClassVar[tuple[tuple[str | int, ...], ...]] = ()
    """Sequences of tokens that end an answer in this format, beside the tokenizer's own."""

    def __init_subclass__(cls, name: str | None = None, models: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            prompt_styles[name] = cls
        if models is not None:
            _models.append((models, cls))

    def apply(self, prompt: Prompt, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        """Write the prompt of a model.

        Args:
            prompt: the user's request, or messages with `role` (system, user, assistant) and `content`.
            sys_prompt: replaces the default system prompt; a system message goes before it.
            kwargs: further fields of a data sample, such as `input`.

        Raises:
            UserError: messages that the format cannot express.
        """
        if sys_prompt:
            _warn_no_system(type(self).__name__)
        return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)

    def stop_tokens(self, tokenizer: Tokenizer) -> tuple[list[int], ...]:
        """Sequences of token ids that end an answer, the eos first."""
        own = [token for token in (tokenizer.eos_id, *sorted(getattr(tokenizer, "stop_ids", ()))) if token is not None]
        sequences = [[token] for token in dict.fromkeys(own)]
        for tokens in self.stop:
            try:
                sequence = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in tokens]
            except ValueError:  # a format is also used with other vocabularies
                continue
            if sequence not in sequences:
                sequences.append(sequence)
        return tuple(sequences)

    def bind(self, tokenizer: Tokenizer) -> PromptStyle:
        """Give the style the tokenizer it will be used with; only some need it."""
        return self

    def init_args(self) -> dict[str, Any]:
        """Arguments that make an equal instance, plain values only."""
        return {}

    @classmethod
    def from_name(cls, name: str) -> PromptStyle:
        """The style of that name in `prompt_styles`.

        Raises:
            UserError: there is none.
        """
        if name not in prompt_styles:
            raise UserError(f"unknown prompt style {name!r}", f"choose one of: {', '.join(sorted(prompt_styles))}")
        return prompt_styles[name]()

    @classmethod
    def from_config(cls, config: Config) -> PromptStyle:
        """The style of a model's family, else the one that its name implies."""
        return cls.from_name(config.prompt_style) if config.prompt_style else model_name_to_prompt_style(config.name)


def model_name_to_prompt_style(model_name: str) -> PromptStyle:
    """The style of a published model by its name; no format for any other name."""
    for pattern, style in reversed(_models):  # special cases are defined after what they specialise
        if re.search(pattern, model_name):
            return style()
    return Default()


class Default(PromptStyle, name="raw"):
    """No format: the text as it is."""


class Turns(PromptStyle):
    """A format that is written turn by turn; subclasses state the pieces."""

    start: str = ""
    system: str | None = None  # default system prompt
    system_turn: str | None = None  # around the system prompt; None: the format has no place for one
    user_turn: str = "{prompt}"  # `{system}` in it: the system turn goes there in the first turn, else before it
    reply: str = ""  # header of an answer
    end: str = "\n"  # after an answer, when the conversation goes on
    strip: bool = False  # messages lose their outer whitespace

    def apply(self, prompt: Prompt, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        """Write the conversation, and the header of the answer to come; see `PromptStyle.apply`."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else self._clean(prompt)
        system = sys_prompt or self.system
        if messages and messages[0]["role"] == "system":
            system = messages.pop(0)["content"]
        if system and self.system_turn is None:
            _warn_no_system(type(self).__name__)
        waiting = (self.system_turn or "").format(system=system) if system else ""
        text = self.start
        if "{system}" not in self.user_turn:
            text, waiting = text + waiting, ""
        for message in messages:
            if message["role"] == "user":
                text += self.user_turn.format(system=waiting, prompt=message["content"])
                waiting = ""
            else:
                text += self.reply + message["content"] + self.end
        return text + self.reply

    def _clean(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        for index, message in enumerate(messages):
            if message.get("role") not in ("system", "user", "assistant"):
                raise UserError(f"unknown role {message.get('role')!r}", "roles are system, user and assistant")
            if message["role"] == "system" and index:
                raise UserError(f"message {index} has the role system", "a system message can only come first")
            if not isinstance(message.get("content"), str):
                raise UserError(f"the content of message {index} is not a text", "give a text")
        return [
            {"role": message["role"], "content": message["content"].strip() if self.strip else message["content"]}
            for message in messages
        ]


@lru_cache
def _warn_no_system(style: str) -> None:
    logger.warning("prompt style %s has no place for a system prompt, it is left out", style)
