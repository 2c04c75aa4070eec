# Licensed under the Apache License 2.0, see the LICENSE file.

"""Data for training. Modules are imported when a name of theirs is first asked for, and then all of them.

All at once, because the command line finds `--data NAME` among the classes that are there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgpt.data.alpaca import Alpaca
    from litgpt.data.alpaca_2k import Alpaca2k
    from litgpt.data.alpaca_gpt4 import AlpacaGPT4
    from litgpt.data.base import DataModule, InstructionData
    from litgpt.data.dataset import SFTDataset, get_sft_collate_fn
    from litgpt.data.deita import Deita
    from litgpt.data.flan import FLAN
    from litgpt.data.json_data import JSON
    from litgpt.data.lima import LIMA
    from litgpt.data.longform import LongForm

__all__ = [
    "FLAN",
    "JSON",
    "LIMA",
    "Alpaca",
    "Alpaca2k",
    "AlpacaGPT4",
    "DataModule",
    "Deita",
    "InstructionData",
    "LongForm",
    "SFTDataset",
    "get_sft_collate_fn",
]

# Module -> names that are exported from it
_EXPORTS = {
    "alpaca": ["Alpaca"],
    "alpaca_2k": ["Alpaca2k"],
    "alpaca_gpt4": ["AlpacaGPT4"],
    "base": ["DataModule", "InstructionData"],
    "dataset": ["SFTDataset", "get_sft_collate_fn"],
    "deita": ["Deita"],
    "flan": ["FLAN"],
    "json_data": ["JSON"],
    "lima": ["LIMA"],
    "longform": ["LongForm"],
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module_name, exported in _EXPORTS.items():
        module = import_module(f"{__name__}.{module_name}")
        globals().update({export: getattr(module, export) for export in exported})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
