# Licensed under the Apache License 2.0, see the LICENSE file.

"""Chat templates: programs that come with a checkpoint, so untrusted, run in jinja2's immutable sandbox.

The surroundings a template sees (block trimming, extra tags, filters, functions) are those of `transformers`, as
https://huggingface.co/docs/transformers/chat_templating describes them: templates are written against it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from litgpt.errors import UserError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class _GenerationTag(Extension):
    """`{% generation %}` marks the text to train on; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """jinja2's `namespace()` without underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is positional only: `namespace(self=1)` is allowed
        namespace, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(namespace, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot hold {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for the class `dict`, whose attributes a template must not reach."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_PlainNamespace
    )
    return environment.from_string(source)


def _plain(value: Any) -> Any:
    """Rebuild `value` from JSON types: methods of richer objects are unknown to the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    for base in (str, int, float):  # enums and numpy scalars
        if isinstance(value, base):
            return base(value)
    return f"<{type(value).__name__}>"


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: plain data, no keys without a value, reasoning under both its names."""
    if not messages:
        raise UserError("the conversation is empty", "give at least one message")
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"a chat message must be a mapping with a role, got {message!r}")
        entry = {key: value for key, value in _plain(message).items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")
        reasoning = next((entry[name] for name in names if name in entry), None)
        if reasoning is not None:
            entry = {"thinking": reasoning, **entry, "reasoning_content": reasoning}
        plain.append(entry)
    return plain


def render(
    source: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a chat template.

    Args:
        source: the template's text.
        messages: mappings with `role` and `content`.
        add_generation_prompt: end with the header of the answer to come.
        tools: JSON schemas of the functions a model may call.
        documents: mappings with `title` and `text`.
        variables: further variables of the template, such as `bos_token` or `enable_thinking`.

    Raises:
        UserError: the template is invalid, unsafe, or refuses this conversation.
    """
    plain = _plain_messages(messages)
    try:
        return _compile(source).render(
            messages=plain,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )
    except SecurityError as ex:
        raise UserError(
            f"the chat template was stopped because it is unsafe: {ex}", "do not trust this checkpoint"
        ) from ex
    except Exception as ex:  # a template is a program: it can fail in any way
        raise UserError(f"the chat template failed: {ex}", "check the messages, or use another prompt style") from ex


def end_of_turn(render_messages: Callable[[Sequence[Message]], str], tokens: Collection[str]) -> str | None:
    """The token with which a template ends an assistant's answer, found by rendering a short conversation.

    A token that also stands between the reasoning and the answer does not end a turn.

    Args:
        render_messages: renders a conversation without a generation prompt.
        tokens: tokens that are recognised in a text as a whole.

    Returns:
        The token, or None when there is none or the template cannot render the conversation.
    """
    question, thought, answer = "Say something.", "Thinking7", "Xanadu7"
    for wrap in (str, _as_parts):
        reply = {"role": "assistant", "content": wrap(answer), "reasoning_content": thought}
        try:
            text = render_messages([{"role": "user", "content": wrap(question)}, reply])
        except UserError as ex:
            logger.debug("no end of turn from the chat template: %s", ex)
            continue
        before, found, after = text.rpartition(answer)
        if found:
            inside = before.rpartition(thought)[2] if thought in before else ""
            ends = [token for token in tokens if token.strip() and token in after and token not in inside]
            return min(ends, key=lambda token: (after.index(token), -len(token)), default=None)
    return None


def _as_parts(text: str) -> list[dict[str, str]]:
    """The content of a message the way multimodal templates want it."""
    return [{"type": "text", "text": text}]
