# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reading files of records: JSON, JSON Lines and Parquet. Whatever is wrong with a file is said with the line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from litgpt.checkpoint.save import hash_file
from litgpt.constants import require
from litgpt.errors import MissingFileError, UserError

SUFFIXES = (".json", ".jsonl", ".parquet")


class Records(Sequence[Any]):
    """The records of one file or several.

    Args:
        items: the records.
        digest: a hash of what they were made of; equal digests mean equal records.
        place: where a record stands, for messages.
    """

    def __init__(self, items: list[Any], digest: str, place: Callable[[int], str]) -> None:
        self.items, self.digest, self.place = items, digest, place

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def map(self, name: str, function: Callable[[Any], Any]) -> Records:
        """The same records in another form.

        Args:
            name: tells the function from others that may be used on the same file.
            function: gets a record, which it must not change.
        """
        digest = hashlib.sha256(f"{self.digest} {name}".encode()).hexdigest()
        return Records([function(item) for item in self.items], digest, self.place)


def read_records(*paths: Path) -> Records:
    """Read files one after the other.

    Raises:
        UserError: a file is missing, empty, damaged or of an unknown kind.
    """
    parts = [_read(Path(path)) for path in paths]
    if len(parts) == 1:
        return parts[0]
    origin = [(part, index) for part in parts for index in range(len(part))]

    def place(index: int) -> str:
        part, within = origin[index]
        return part.place(within)

    digest = hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest()
    return Records([item for part in parts for item in part], digest, place)


def check_suffix(path: Path) -> None:
    """Raise unless a file has a name that we can read.

    Raises:
        UserError: it has not.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is not a file that data is read from", f"give a {', '.join(SUFFIXES)} file")


def _read(path: Path) -> Records:
    check_suffix(path)
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist", "check the path")
    suffix = path.suffix.lower()
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    try:
        items, place = readers[suffix](path)
        digest = hash_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}", "check the file") from error
    if not items:
        raise UserError(f"{path} holds no records", "check the path")
    return Records(items, digest, place)


def _read_json(path: Path) -> tuple[list[Any], Callable[[int], str]]:
    text = _text(path)
    if not text.strip():
        return [], str
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "one object a line is JSON Lines: name it .jsonl" if error.msg == "Extra data" else "mend the file"
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}", hint) from error
    if not isinstance(items, list):
        raise UserError(f"{path} must hold a list of records, not {type(items).__name__}", "put them into [ ... ]")
    return items, lambda index: f"{path}:{_line_of(text, index)} (record {index + 1})"


def _read_jsonl(path: Path) -> tuple[list[Any], Callable[[int], str]]:
    items, lines = [], []
    # Not splitlines(): JSON texts may hold characters that it takes for line ends.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            items.append(json.loads(line))
        except json.JSONDecodeError as error:
            hint = "each line must be one JSON object"
            raise UserError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}", hint) from error
        lines.append(number)
    return items, lambda index: f"{path}:{lines[index]}"


def _read_parquet(path: Path) -> tuple[list[Any], Callable[[int], str]]:
    require("pyarrow", f"reading {path}")
    from pyarrow import ArrowException, parquet

    try:
        items = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise UserError(f"{path} is damaged or no Parquet file: {error}", "get it again") from error
    return items, lambda index: f"{path}, row {index + 1}"


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8: byte {content[error.start]:#04x}", "save it as UTF-8") from error


def _line_of(text: str, index: int) -> int:
    """The line on which an element of a JSON list begins; only needed for messages."""
    decoder, end = json.JSONDecoder(), text.index("[") + 1
    for _ in range(index):
        end = decoder.raw_decode(text, _next_element(text, end))[1]
    return text.count("\n", 0, _next_element(text, end)) + 1


def _next_element(text: str, start: int) -> int:
    gap = re.compile(r"[\s,]*").match(text, start)
    assert gap is not None
    return gap.end()
