# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a request to the token ids a model sees: which prompt style applies, and applying it.

The styles' classes are importable from here; their names are what `prompt_style.yaml` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from litgpt.checkpoint.save import atomic_write
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.prompt_styles import formats
from litgpt.prompt_styles.base import Default, Prompt, PromptStyle, Turns, model_name_to_prompt_style, prompt_styles
from litgpt.prompt_styles.formats import *  # noqa: F403

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Default",
    "Prompt",
    "PromptStyle",
    "Turns",
    "choose_prompt_style",
    "encode_prompt",
    "has_prompt_style",
    "load_prompt_style",
    "model_name_to_prompt_style",
    "prompt_styles",
    "save_prompt_style",
]
__all__ += formats.__all__


class ChatTemplate(PromptStyle, name="chat-template"):
    """The chat template that comes with the checkpoint.

    Args:
        tokenizer: whose template to use; `bind` gives it later.
        variables: variables of the template, such as `enable_thinking=False`.
    """

    bos = False  # the template writes BOS itself where the model wants it

    def __init__(self, tokenizer: Tokenizer | None = None, **variables: Any) -> None:
        self._tokenizer = tokenizer
        self._variables = variables

    def bind(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Use the template of this tokenizer.

        Raises:
            UserError: it has none.
        """
        if tokenizer.chat_template is None:
            raise UserError(f"{tokenizer.model_name} has no chat template", "choose a prompt style by name, or raw")
        self._tokenizer = tokenizer
        return self

    def init_args(self) -> dict[str, Any]:
        """The variables of the template."""
        return dict(self._variables)

    def apply(self, prompt: Prompt, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        """Render the conversation, and the header of the answer to come.

        Args:
            prompt: the user's request, or messages.
            sys_prompt: a system message put before a conversation without one.
            kwargs: `input` is added to a request given as text; `tools` and `documents` are handed to the template.

        Raises:
            UserError: the template is unsafe or refuses the conversation.
        """
        if isinstance(prompt, str):
            text = f"{prompt}\n\n{kwargs['input']}" if kwargs.get("input") else prompt
            prompt = [{"role": "user", "content": text}]
        messages = list(prompt)
        if sys_prompt and messages and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": sys_prompt})
        extras = {key: kwargs[key] for key in ("tools", "documents") if kwargs.get(key)}
        return self._render(messages, extras)

    def _render(self, messages: list[Mapping[str, Any]], extras: dict[str, Any]) -> str:
        """Render; a template that refuses or drops the system message gets its text with the first request."""
        if self._tokenizer is None:
            raise UserError("the chat template of which checkpoint?", "call bind(tokenizer) on the prompt style first")
        variables = {**self._variables, **extras}
        merged = _merge_system(messages)
        try:
            text = self._tokenizer.apply_chat_template(messages, **variables)
        except UserError:
            if merged is None:
                raise
        else:
            if merged is None or messages[0]["content"].strip() in text:
                return text
        return self._tokenizer.apply_chat_template(merged, **variables)


def _merge_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The conversation with its system message put before the first request, None when there is nothing to merge."""
    if len(messages) < 2 or messages[0].get("role") != "system" or messages[1].get("role") != "user":
        return None
    system, request = messages[0].get("content"), messages[1].get("content")
    if not isinstance(system, str) or not isinstance(request, str):
        return None
    return [{**messages[1], "content": f"{system}\n\n{request}"}, *messages[2:]]


def save_prompt_style(style: str | PromptStyle, checkpoint_dir: Path) -> None:
    """Write `prompt_style.yaml`, so that whatever uses the checkpoint later formats prompts the same way.

    The checkpoint's own chat template, as it is, needs no file: it is what is used without one, and LitGPT 0.5.13 has
    no style of that name.

    Args:
        style: a name or an instance.
        checkpoint_dir: folder of the checkpoint.
    """
    style = PromptStyle.from_name(style) if isinstance(style, str) else style
    file = Path(checkpoint_dir) / "prompt_style.yaml"
    if isinstance(style, ChatTemplate) and not style.init_args():
        file.unlink(missing_ok=True)
        return
    content: dict[str, Any] = {"class_path": _class_path(type(style))}
    if init_args := style.init_args():
        content["init_args"] = init_args
    with atomic_write(file) as path:
        path.write_text(yaml.safe_dump(content), encoding="utf-8")


def load_prompt_style(checkpoint_dir: Path, tokenizer: Tokenizer | None = None) -> PromptStyle:
    """Read `prompt_style.yaml`.

    The file comes with a checkpoint, so nothing is imported on its word: it can name the styles of `litgpt.prompts`
    and subclasses of `PromptStyle` that the program has already defined.

    Args:
        checkpoint_dir: folder of the checkpoint.
        tokenizer: for a chat template; None: the folder's.

    Raises:
        UserError: the file is damaged or names an unknown class.
    """
    path = Path(checkpoint_dir) / "prompt_style.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        class_path, init_args = str(content["class_path"]), dict(content.get("init_args") or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as ex:
        raise UserError(f"cannot read {path}: {ex}", "it must hold `class_path: litgpt.prompts.<Name>`") from ex
    known = {_class_path(style): style for style in _all_styles(PromptStyle)}
    if class_path not in known:
        raise UserError(
            f"{path} names the unknown prompt style {class_path}",
            "use a class of litgpt.prompts, or import the module of your own class first",
        )
    try:
        style = known[class_path](**init_args)
    except TypeError as ex:
        raise UserError(f"{path} has init_args that {class_path} does not take: {ex}") from ex
    if isinstance(style, ChatTemplate) and tokenizer is None:
        from litgpt.tokenizer import Tokenizer

        tokenizer = Tokenizer(checkpoint_dir)
    return style if tokenizer is None else style.bind(tokenizer)


def has_prompt_style(checkpoint_dir: Path) -> bool:
    """Whether a folder has a `prompt_style.yaml`."""
    return (Path(checkpoint_dir) / "prompt_style.yaml").is_file()


def _class_path(style: type[PromptStyle]) -> str:
    """Full name of a class; those of this package go by the module they are imported from."""
    if globals().get(style.__name__) is style:
        return f"litgpt.prompts.{style.__name__}"
    return f"{style.__module__}.{style.__qualname__}"


def _all_styles(base: type[PromptStyle]) -> list[type[PromptStyle]]:
    return [base, *(style for child in base.__subclasses__() for style in _all_styles(child))]


def choose_prompt_style(
    checkpoint_dir: Path | str,
    tokenizer: Tokenizer,
    config: Config | None,
    prompt_style: str | PromptStyle | type[PromptStyle] | None = None,
) -> PromptStyle:
    """The prompt style of a checkpoint, ready to be applied.

    The first of these that exists: an explicit choice, the folder's `prompt_style.yaml`, the checkpoint's chat
    template, the named style of the model's family, none.

    Args:
        checkpoint_dir: folder of the checkpoint, or a `.gguf` file.
        tokenizer: the checkpoint's tokenizer.
        config: the model's config, if it is known.
        prompt_style: a name ("raw" turns every format off), an instance or a class.
    """
    style: PromptStyle
    if isinstance(prompt_style, str):
        style = PromptStyle.from_name(prompt_style)
    elif isinstance(prompt_style, type):
        style = prompt_style()
    elif prompt_style is not None:
        style = prompt_style
    elif has_prompt_style(Path(checkpoint_dir)):
        return load_prompt_style(Path(checkpoint_dir), tokenizer)
    elif tokenizer.chat_template is not None:
        style = ChatTemplate()
    else:
        style = PromptStyle.from_config(config) if config is not None else Default()
    return style.bind(tokenizer)


def encode_prompt(
    tokenizer: Tokenizer, style: PromptStyle, prompt: Prompt, sys_prompt: str | None = None, **kwargs: Any
) -> list[int]:
    """Format a request and encode it, with exactly one BOS where the model wants one.

    Args:
        tokenizer: the checkpoint's tokenizer.
        style: from `choose_prompt_style`.
        prompt: the user's request, or messages.
        sys_prompt: system prompt in place of the style's own.
        kwargs: further fields for `style.apply`.

    Raises:
        UserError: nothing to start from: an empty prompt without a format, and the tokenizer has no BOS.
    """
    ids: list[int] = tokenizer.encode(style.apply(prompt, sys_prompt=sys_prompt, **kwargs), bos=style.bos).tolist()
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise UserError("the prompt is empty and the tokenizer has no BOS token to start from", "give a prompt")
    return [tokenizer.bos_id]
