# Licensed under the Apache License 2.0, see the LICENSE file.

"""A thousand carefully written conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litgpt.data.base import InstructionData
from litgpt.data.download import fetch_dataset
from litgpt.data.files import Records, read_records

_PATTERNS = ("train.jsonl",)


@dataclass(kw_only=True, eq=False)
class LIMA(InstructionData):
    """LIMA, from https://huggingface.co/datasets/GAIR/lima, which asks for an account that accepted its licence.

    Args:
        val_split_fraction: How much to hold out for validation.
        include_multiturn_conversations: Learn whole conversations; otherwise only the first answer of each.
        download_dir: Where the downloaded file is kept.
        repo_id: The data set on the hub.
        access_token: Token of the account. Default: $HF_TOKEN or the stored login.
    """

    val_split_fraction: float = 0.1
    include_multiturn_conversations: bool = False
    download_dir: Path = Path("data/lima")
    repo_id: str = "GAIR/lima"
    access_token: str | None = field(default=None, repr=False)

    def prepare_data(self) -> None:
        """Download the file if it is not there."""
        self._files()

    def read(self) -> tuple[Records, Records | float]:
        """Read the file; see `InstructionData.read`."""
        records = read_records(*self._files())
        if not self.include_multiturn_conversations:
            records = records.map("first answer", _first_answer)
        return records, self.val_split_fraction

    def _files(self) -> list[Path]:
        return fetch_dataset(self.repo_id, _PATTERNS, Path(self.download_dir), self.access_token)[0]


def _first_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first two texts of a conversation: a request and its answer."""
    return {**record, "conversations": record["conversations"][:2]}
