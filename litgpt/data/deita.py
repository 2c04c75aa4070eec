# Licensed under the Apache License 2.0, see the LICENSE file.

"""Conversations chosen for their quality and complexity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litgpt.data.base import InstructionData
from litgpt.data.download import fetch_dataset
from litgpt.data.files import Records, read_records

_PATTERNS = ("data/train_sft-*.parquet", "data/test_sft-*.parquet")


@dataclass(kw_only=True, eq=False)
class Deita(InstructionData):
    """Deita-10k, from https://huggingface.co/datasets/HuggingFaceH4/deita-10k-v0-sft.

    Args:
        include_multiturn_conversations: Learn whole conversations; otherwise only the first answer of each.
        download_dir: Where the downloaded files are kept.
        repo_id: The data set on the hub.
    """

    include_multiturn_conversations: bool = False
    download_dir: Path = Path("data/deita")
    repo_id: str = "HuggingFaceH4/deita-10k-v0-sft"

    def prepare_data(self) -> None:
        """Download the files if they are not there."""
        fetch_dataset(self.repo_id, _PATTERNS, Path(self.download_dir))

    def read(self) -> tuple[Records, Records | float]:
        """Read the files; see `InstructionData.read`."""
        found = fetch_dataset(self.repo_id, _PATTERNS, Path(self.download_dir))
        train, held_out = (read_records(*paths) for paths in found)
        if self.include_multiturn_conversations:
            return train, held_out
        return train.map("first answer", _first_answer), held_out.map("first answer", _first_answer)


def _first_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A conversation up to its first answer."""
    roles = [message["role"] for message in record["messages"]]
    end = roles.index("assistant") + 1 if "assistant" in roles else len(roles)
    return {**record, "messages": record["messages"][:end]}
