# Licensed under the Apache License 2.0, see the LICENSE file.

"""Instructions for long texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litgpt.data.base import InstructionData
from litgpt.data.download import fetch_urls
from litgpt.data.files import Records, read_records
from litgpt.prompts import PromptStyle

_URL = "https://raw.githubusercontent.com/akoksal/LongForm/main/dataset"
_FILES = ("train.json", "val.json")


@dataclass(kw_only=True, eq=False)
class LongForm(InstructionData):
    """LongForm, from https://github.com/akoksal/LongForm.

    Args:
        prompt_style: How prompts are written, a name or a class of litgpt.prompts.
        download_dir: Where the downloaded files are kept.
    """

    prompt_style: str | PromptStyle | None = "longform"
    download_dir: Path = Path("data/longform")

    def prepare_data(self) -> None:
        """Download the files if they are not there."""
        fetch_urls({name: f"{_URL}/{name}" for name in _FILES}, Path(self.download_dir))

    def read(self) -> tuple[Records, Records | float]:
        """Read the files; see `InstructionData.read`."""
        train, held_out = (read_records(Path(self.download_dir) / name) for name in _FILES)
        return train.map("longform", _instruction), held_out.map("longform", _instruction)


def _instruction(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the form of an instruction; what is called its input is the request."""
    return {"instruction": record.get("input"), "output": record.get("output")}
