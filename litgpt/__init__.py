# Licensed under the Apache License 2.0, see the LICENSE file.

"""litgpt: readable GPT models that load, generate and finetune almost any open checkpoint."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgpt.api import LLM
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer

__version__ = "0.6.0.dev0"
__all__ = ["GPT", "LLM", "Config", "PromptStyle", "Tokenizer"]

# Imported when first asked for: `import litgpt` must stay cheap, the command line depends on it.
_EXPORTS = {
    "LLM": "litgpt.api",
    "GPT": "litgpt.model",
    "Config": "litgpt.config",
    "PromptStyle": "litgpt.prompts",
    "Tokenizer": "litgpt.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
