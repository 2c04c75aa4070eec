# Licensed under the Apache License 2.0, see the LICENSE file.

"""A small part of Alpaca, for a quick try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from litgpt.data.alpaca import Alpaca
from litgpt.data.download import fetch_dataset
from litgpt.data.files import Records, read_records


@dataclass(kw_only=True, eq=False)
class Alpaca2k(Alpaca):
    """2,000 samples of Alpaca, from https://huggingface.co/datasets/mhenrichsen/alpaca_2k_test.

    Args:
        val_split_fraction: How much to hold out for validation. The default makes it 100 samples.
        download_dir: Where the downloaded files are kept.
        repo_id: The data set on the hub.
        file_name: A file in download_dir that is used in place of the data set, if it is there.
        file_url: Not used, the data set says where its files are; LitGPT's configuration files may restate it.
    """

    val_split_fraction: float = 0.05
    download_dir: Path = Path("data/alpaca2k")
    repo_id: str = "mhenrichsen/alpaca_2k_test"
    file_name: str = "alpaca2k_data_cleaned_archive.json"

    def prepare_data(self) -> None:
        """Download the data set if it is not there."""
        self._files()

    def read(self) -> tuple[Records, Records | float]:
        """Read the files; see `InstructionData.read`."""
        return read_records(*self._files()), self.val_split_fraction

    def _files(self) -> list[Path]:
        folder = Path(self.download_dir)
        if (file := folder / self.file_name).is_file():
            return [file]
        return fetch_dataset(self.repo_id, ["*.parquet"], folder)[0]
