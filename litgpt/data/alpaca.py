# Licensed under the Apache License 2.0, see the LICENSE file.

"""The cleaned Alpaca data: 51,759 instructions with answers of a GPT-3 model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from litgpt.data.base import InstructionData
from litgpt.data.download import fetch_urls
from litgpt.data.files import Records, read_records


@dataclass(kw_only=True, eq=False)
class Alpaca(InstructionData):
    """Alpaca, cleaned, from https://github.com/tloen/alpaca-lora.

    Args:
        val_split_fraction: How much to hold out for validation. The default makes it 2,000 samples.
        download_dir: Where the downloaded file is kept.
        file_url: Where to get it.
        file_name: What it is called here.
    """

    val_split_fraction: float = 0.03865
    download_dir: Path = Path("data/alpaca")
    file_url: str = "https://raw.githubusercontent.com/tloen/alpaca-lora/main/alpaca_data_cleaned_archive.json"
    file_name: str = "alpaca_data_cleaned_archive.json"

    def prepare_data(self) -> None:
        """Download the file if it is not there."""
        fetch_urls({self.file_name: self.file_url}, Path(self.download_dir))

    def read(self) -> tuple[Records, Records | float]:
        """Read the file; see `InstructionData.read`."""
        return read_records(Path(self.download_dir) / self.file_name), self.val_split_fraction
