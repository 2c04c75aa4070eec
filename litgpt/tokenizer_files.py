# Licensed under the Apache License 2.0, see the LICENSE file.

"""What the files beside a model say about its tokenizer, from a folder or from a GGUF file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litgpt.errors import MissingFileError, UserError

logger = logging.getLogger(__name__)


@dataclass
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files; a missing file is an empty dict or None."""

    path: Path
    tokenizer_json: str | None = None
    tokenizer_model: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    special_tokens_map: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)  # config.json
    chat_templates: dict[str, str] = field(default_factory=dict)  # by name; the usual one is "default"


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer files of a folder or a `.gguf` file.

    Raises:
        UserError: there is no tokenizer, or a file it depends on is damaged.
    """
    if path.is_dir():
        return _from_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    if path.exists():
        raise UserError(f"{path} is neither a folder nor a .gguf file", "give the checkpoint's folder")
    raise MissingFileError(f"{path} does not exist", "check the path")


def _from_gguf(path: Path) -> TokenizerFiles:
    from litgpt.checkpoint.gguf import GGUFFile

    files = GGUFFile(path).tokenizer_files()
    config = files.get("tokenizer_config.json", {})
    return TokenizerFiles(
        path,
        tokenizer_json=json.dumps(files["tokenizer.json"], ensure_ascii=False),
        config=config,
        generation_config=files.get("generation_config.json", {}),
        chat_templates=_named_templates(config.get("chat_template")),
    )


def _from_folder(path: Path) -> TokenizerFiles:
    vocabulary, model = path / "tokenizer.json", path / "tokenizer.model"
    if not vocabulary.is_file() and not model.is_file():
        raise UserError(f"{path} holds neither tokenizer.json nor tokenizer.model", "download the tokenizer files")
    config = _read_json(path / "tokenizer_config.json")
    return TokenizerFiles(
        path,
        tokenizer_json=_read_text(vocabulary) if vocabulary.is_file() else None,
        tokenizer_model=model if model.is_file() else None,
        config=config,
        special_tokens_map=_read_json(path / "special_tokens_map.json"),
        generation_config=_read_tolerantly(path / "generation_config.json"),
        model_config=_read_tolerantly(path / "config.json"),
        chat_templates=_find_templates(path, config),
    )


def _find_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates of a folder: files of their own win over tokenizer_config.json, as in transformers."""
    templates = _named_templates(_read_tolerantly(path / "chat_template.json").get("chat_template"))
    templates.update(_named_templates(config.get("chat_template")))
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (file := path / "chat_template.jinja").is_file():
        templates["default"] = _read_text(file)
    return templates


def _named_templates(value: Any) -> dict[str, str]:
    """A template alone, or a list of `{"name": ..., "template": ...}`."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, Mapping) and entry.get("template")]
        return {str(entry.get("name", "default")): str(entry["template"]) for entry in entries}
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as ex:
        raise UserError(f"cannot read {path}: {ex}", "download it again") from ex


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is missing."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as ex:
        raise UserError(f"{path} is not valid JSON: {ex}", "download it again") from ex
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _read_tolerantly(path: Path) -> dict[str, Any]:
    """A JSON object of which only a few keys matter: mends missing and trailing commas, else warns and is empty."""
    try:
        return _read_json(path)
    except UserError as ex:
        logger.warning("%s; using what can be read of it", ex.message)
    text = path.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r'(["\]}\w])(\s*\n\s*")', r"\1,\2", text)
    text = re.sub(r",(\s*[\]}])", r"\1", text)
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def token_text(value: Any) -> str | None:
    """The text of a token written as a string or as the mapping of an `AddedToken`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def eos_ids(config: Mapping[str, Any]) -> list[int]:
    """`eos_token_id` of a config, which may be absent, one id or a list; multimodal configs nest it."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), Mapping):
        value = config["text_config"].get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
