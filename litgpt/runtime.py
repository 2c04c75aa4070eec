# Licensed under the Apache License 2.0, see the LICENSE file.

"""Where and how a model runs: device, precision, logging, cached files. Importing this module does not import torch."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

PRECISIONS = ("bf16-true", "bf16-mixed", "16-true", "16-mixed", "32-true", "64-true")
# Short forms people type, and the names of the dtypes
_PRECISION_ALIASES = {
    "bf16": "bf16-true",
    "bfloat16": "bf16-true",
    "16": "16-true",
    "fp16": "16-true",
    "float16": "16-true",
    "32": "32-true",
    "fp32": "32-true",
    "float32": "32-true",
    "64": "64-true",
    "fp64": "64-true",
    "float64": "64-true",
}


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the time of the message, so that redirection and capturing work."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Plain text for information, the level in front of anything more serious."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line to show for `record`."""
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


def setup_logging(debug: bool = False) -> None:
    """Send the messages of `litgpt.*` to standard error; safe to call more than once.

    Args:
        debug: show debugging messages as well.
    """
    log = logging.getLogger("litgpt")
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _StderrHandler) for handler in log.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_Formatter("%(message)s"))
        log.addHandler(handler)


def debug_enabled() -> bool:
    """Whether the person asked for tracebacks and debugging messages through `LITGPT_DEBUG`."""
    return os.environ.get("LITGPT_DEBUG", "").lower() not in ("", "0", "false", "no")


def cache_dir() -> Path:
    """Return the folder for what can be fetched or made again: `$LITGPT_HOME`, or `~/.cache/litgpt`.

    It need not exist yet.
    """
    home = os.environ.get("LITGPT_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "litgpt"


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device to run on.

    Args:
        device: `"auto"` or None takes the first of CUDA, MPS and CPU that is there; anything else is taken as given.

    Raises:
        UserError: the device does not exist here.
    """
    import torch

    if device is None or device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError:
        raise UserError(f"there is no device named {device!r}", "use auto, cpu, cuda, cuda:N or mps") from None
    if reason := _why_missing(chosen):
        raise UserError(f"device {str(device)!r} is not available: {reason}", "use --device cpu or --device auto")
    return chosen


def _why_missing(device: torch.device) -> str:
    """Why a device cannot be used; empty when it can."""
    import torch

    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            return "no CUDA device is visible to this build of torch"
        return f"{count} CUDA devices are visible" if (device.index or 0) >= count else ""
    if device.type == "meta":
        return "it holds no numbers"
    try:
        torch.empty(0, device=device)
    except Exception:  # each backend has its own kind of error
        return "this machine or this build of torch has none"
    return ""


def computes_in_bf16(device: torch.device) -> bool:
    """Whether the hardware has bfloat16 arithmetic units, so that bf16 is not slower than fp32."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16"))
    return False


def pick_precision(precision: str | None, device: torch.device) -> str:
    """Return the precision to compute in, written as Lightning does, for instance `bf16-true`.

    Args:
        precision: one of `PRECISIONS` or a short form of it; None or `"auto"` is `bf16-true` where the hardware
            computes in bfloat16, else `32-true`.
        device: where the model will run.

    Raises:
        UserError: an unknown precision.
    """
    if precision is None or precision == "auto":
        return "bf16-true" if computes_in_bf16(device) else "32-true"
    chosen = _PRECISION_ALIASES.get(precision, precision)
    if chosen not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}", f"use one of auto, {', '.join(PRECISIONS)}")
    return chosen


def get_default_supported_precision(training: bool) -> str:
    """Return the precision that `pick_precision` takes on the default device: mixed for training, as LitGPT does."""
    precision = pick_precision(None, pick_device())
    return precision.replace("16-true", "16-mixed") if training else precision


def num_parameters(module: nn.Module, requires_grad: bool | None = None) -> int:
    """Count the numbers in a module's parameters, a shared one once.

    Args:
        module: the module.
        requires_grad: only the trainable ones (True) or the frozen ones (False).
    """
    chosen = (p for p in module.parameters() if requires_grad is None or p.requires_grad == requires_grad)
    return sum(p.numel() for p in chosen)


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype that weights are held in under a precision of `PRECISIONS` (mixed: float32)."""
    import torch

    dtypes = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    return dtypes.get(precision, torch.float32)


def parse_dtype(name: str) -> torch.dtype:
    """Return the floating-point type that torch calls `name`, for instance `bfloat16`.

    Raises:
        UserError: there is no such type.
    """
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"{name!r} is not a type that weights are computed in", "use float32, bfloat16 or float16")
    return dtype
