# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a record of a data set means: an instruction with its answer, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgpt.errors import UserError

# Names that data sets use for the roles of a chat template
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_FORMS = (
    "a record has `instruction`, `output` and maybe `input`, or `messages` with `role` and `content`, "
    "or `conversations` with `from` and `value`"
)


@dataclass(frozen=True)
class Instruction:
    """A request and its answer.

    Args:
        prompt: the request.
        answer: what is to be learnt.
        fields: what else the record says, for prompt styles that use it, such as `input`.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, at least one of them the assistant's.

    Args:
        messages: in their order.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


def parse_record(record: Any) -> Instruction | Conversation:
    """Find out what a record is.

    Raises:
        UserError: it is neither an instruction nor a conversation.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"a record must be an object, not {type(record).__name__}", _FORMS)
    is_chat = {"messages", "conversations"} & record.keys() and not {"instruction", "output"} <= record.keys()
    if not is_chat and ("instruction" in record or "output" in record):
        return _instruction(record)
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            return _conversation(record, key)
    raise UserError(f"the record has only the fields {', '.join(map(repr, record)) or '(none)'}", _FORMS)


def _instruction(record: Mapping[str, Any]) -> Instruction:
    for key in ("instruction", "output"):
        if not isinstance(record.get(key), str):
            problem = f"is {type(record[key]).__name__}, not a text" if key in record else "is missing"
            raise UserError(f"the field {key!r} {problem}", _FORMS)
    if not isinstance(record.get("input"), str | None):
        raise UserError(f"the field 'input' is {type(record['input']).__name__}, not a text", _FORMS)
    # `PromptStyle.apply` has arguments of its own by these names.
    fields = {str(key): value for key, value in record.items() if key not in ("self", "prompt")}
    return Instruction(record["instruction"], record["output"], fields)


def _conversation(record: Mapping[str, Any], key: str) -> Conversation:
    if not isinstance(record[key], list) or not record[key]:
        raise UserError(f"the field {key!r} is not a list of messages", _FORMS)
    messages = [_message(entry, index) for index, entry in enumerate(record[key])]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("the conversation has no message of the assistant", "there is nothing to learn from it")
    return Conversation(messages, _tools(record.get("tools")))


def _message(entry: Any, index: int) -> dict[str, Any]:
    if isinstance(entry, str):  # texts in turn
        return {"role": ("user", "assistant")[index % 2], "content": entry}
    if not isinstance(entry, Mapping):
        raise UserError(f"message {index + 1} is {type(entry).__name__}, not an object", _FORMS)
    message = dict(entry)
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UserError(f"message {index + 1} has no role", _FORMS)
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        problem = "has no content" if content is None else f"has a content of type {type(content).__name__}"
        raise UserError(f"message {index + 1} {problem}", _FORMS)
    return {**message, "role": _ROLES.get(role, role)}


def _tools(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Tools given as a list, or as its JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"the field 'tools' is not valid JSON: {error}", "give a list of JSON schemas") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise UserError(f"the field 'tools' is {type(value).__name__}, not a list", "give a list of JSON schemas")
    return value
