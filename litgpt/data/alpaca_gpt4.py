# Licensed under the Apache License 2.0, see the LICENSE file.

"""Alpaca's instructions with answers of GPT-4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from litgpt.data.alpaca import Alpaca


@dataclass(kw_only=True, eq=False)
class AlpacaGPT4(Alpaca):
    """Alpaca with answers of GPT-4, from https://github.com/Instruction-Tuning-with-GPT-4/GPT-4-LLM.

    Args:
        val_split_fraction: How much to hold out for validation. The default makes it 2,000 samples.
        download_dir: Where the downloaded file is kept.
        file_url: Where to get it.
        file_name: What it is called here.
    """

    val_split_fraction: float = 0.03847
    download_dir: Path = Path("data/alpacagpt4")
    file_url: str = (
        "https://raw.githubusercontent.com/Instruction-Tuning-with-GPT-4/GPT-4-LLM/main/data/alpaca_gpt4_data.json"
    )
    file_name: str = "alpacagpt4_data_cleaned_archive.json"
