# Licensed under the Apache License 2.0, see the LICENSE file.

"""Data from files of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from litgpt.data.base import InstructionData
from litgpt.data.files import SUFFIXES, Records, check_suffix, read_records
from litgpt.errors import MissingFileError, UserError
from litgpt.prompts import PromptStyle

_DEFAULT_FRACTION = 0.05


@dataclass(kw_only=True, eq=False)
class JSON(InstructionData):
    """Instructions or conversations from .json, .jsonl or .parquet files.

    A record is `{"instruction": ..., "output": ...}` and maybe `"input"`, or `{"messages": [{"role": ..., "content":
    ...}, ...]}`, or `{"conversations": [{"from": ..., "value": ...}, ...]}`.

    Args:
        json_path: A file, or a folder with train.json and val.json (or .jsonl, .parquet).
        val_split_fraction: How much of a single file to hold out for validation. Default: 0.05.
        prompt_style: How prompts are written, a name or a class of litgpt.prompts. Default: as the checkpoint says (its
            prompt_style.yaml, chat template or family), and alpaca if it says nothing.
    """

    json_path: Path = field(kw_only=False)
    val_split_fraction: float | None = None
    prompt_style: str | PromptStyle | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.json_path = Path(self.json_path).expanduser()
        if self.json_path.is_dir():
            if self.val_split_fraction is not None:
                raise UserError(
                    f"{self.json_path} is a folder, so val.json is what is held out, not val_split_fraction="
                    f"{self.val_split_fraction}",
                    "leave out val_split_fraction, or give a single file",
                )
            return
        if not self.json_path.exists():
            raise MissingFileError(
                f"{self.json_path} does not exist", "json_path is a file, or a folder with train.json and val.json"
            )
        check_suffix(self.json_path)
        if self.val_split_fraction is None:
            self.val_split_fraction = _DEFAULT_FRACTION

    def read(self) -> tuple[Records, Records | float]:
        """Read the file or the two files; see `InstructionData.read`."""
        if self.val_split_fraction is not None:
            return read_records(self.json_path), self.val_split_fraction
        return read_records(self._find("train")), read_records(self._find("val"))

    def _find(self, name: str) -> Path:
        for suffix in SUFFIXES:
            if (path := self.json_path / f"{name}{suffix}").is_file():
                return path
        raise MissingFileError(
            f"{self.json_path} has no {name}.json", "a folder must hold train.json and val.json (or .jsonl, .parquet)"
        )
