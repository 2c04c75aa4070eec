# Licensed under the Apache License 2.0, see the LICENSE file.

"""Which optional packages are installed. Each name is looked up on first use, and nothing is imported for it."""

from __future__ import annotations

from importlib.util import find_spec

from litgpt.errors import UserError

# Name in this module -> (module to look for, extra of this package that brings it)
_OPTIONAL = {
    "GGUF_AVAILABLE": ("gguf", "gguf"),
    "SENTENCEPIECE_AVAILABLE": ("sentencepiece", "sentencepiece"),
    "FASTAPI_AVAILABLE": ("fastapi", "serve"),
    "LM_EVAL_AVAILABLE": ("lm_eval", "eval"),
    "BITSANDBYTES_AVAILABLE": ("bitsandbytes", "quantize"),
    "TORCHAO_AVAILABLE": ("torchao", "quantize"),
    "TENSORBOARD_AVAILABLE": ("tensorboard", "loggers"),
    "WANDB_AVAILABLE": ("wandb", "loggers"),
    "MLFLOW_AVAILABLE": ("mlflow", "loggers"),
    "MATPLOTLIB_AVAILABLE": ("matplotlib", "loggers"),
}


def is_available(module: str) -> bool:
    """Return whether `module` could be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or a stub without a spec was planted
        return False


def require(module: str, purpose: str) -> None:
    """Raise if an optional module is not installed.

    Args:
        module: its name.
        purpose: what it is needed for, as the beginning of the message.

    Raises:
        UserError: it is missing; the hint says how to get it.
    """
    if not is_available(module):
        extra = next((extra for name, extra in _OPTIONAL.values() if name == module), None)
        command = f"pip install 'litgpt[{extra}]'" if extra else f"pip install {module}"
        raise UserError(f"{purpose} needs the package {module}", command)


def __getattr__(name: str) -> bool:
    if name in _OPTIONAL:
        return is_available(_OPTIONAL[name][0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
