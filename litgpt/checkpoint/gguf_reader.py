# Licensed under the Apache License 2.0, see the LICENSE file.

"""The GGUF container: metadata and the table of tensors, read in one pass with every length checked.

The `gguf` package has a reader too, but it makes a numpy array of every token (3 s for 49k tokens, 11 s for 262k) and
loops for ever on some damaged lengths. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from litgpt.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class StoredTensor(NamedTuple):
    """A tensor as it lies in the file: `data` are the raw bytes, one row of the last axis after the other."""

    shape: tuple[int, ...]  # torch order: the file lists the fastest axis first
    type_name: str  # "F32", "Q4_K", ...
    data: np.ndarray  # uint8, shape (*shape[:-1], bytes of a row)


class GGUFContents(NamedTuple):
    """Everything a GGUF says: metadata by key, tensors by name (bytes are mapped, not read), and the maps."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    maps: tuple[mmap.mmap, ...]


def read_gguf(path: Path) -> GGUFContents:
    """Read the header of a GGUF; of a split one, give the first part and the others are found beside it.

    Raises:
        UserError: not a GGUF, a damaged or truncated one, or a part of a split one is missing.
    """
    contents = _read_part(path)
    n_parts = contents.metadata.get("split.count", 1)
    if not isinstance(n_parts, int) or n_parts <= 1:
        return contents
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        raise UserError(
            f"{path} is one of {n_parts} parts, but its name does not end in -00001-of-{n_parts:05d}.gguf",
            "give the parts the names they had",
        )
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{n_parts:05d}.gguf") for i in range(1, n_parts + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise UserError(f"{path} lacks {len(missing)} of its {n_parts} parts: {', '.join(missing)}", "download them")
    first = contents if parts[0] == path else _read_part(parts[0])
    tensors, maps = dict(first.tensors), first.maps
    for path in parts[1:]:
        part = _read_part(path)
        tensors |= part.tensors
        maps += part.maps
    return GGUFContents(first.metadata, tensors, maps)


def _read_part(path: Path) -> GGUFContents:
    if not path.is_file():
        raise UserError(f"{path} is not a file", "check the path of the GGUF file")
    if path.stat().st_size < 24:  # magic, version and the two counts
        raise UserError(f"{path} is no GGUF file: it has only {path.stat().st_size} bytes", "download it again")
    with path.open("rb") as file:
        # Copy-on-write: torch wants writable memory, and writing to it must not touch the file.
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = _Header(path, buffer)
    metadata = header.read_metadata()
    table = header.read_tensor_table()
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise header.damaged(f"general.alignment is {alignment!r}")
    start = -(-header.position // alignment) * alignment
    data = np.frombuffer(buffer, dtype=np.uint8)
    tensors = {name: _map_tensor(path, data, name, start, entry) for name, entry in table.items()}
    return GGUFContents(metadata, tensors, (buffer,))


class _TableEntry(NamedTuple):
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _map_tensor(path: Path, data: np.ndarray, name: str, start: int, entry: _TableEntry) -> StoredTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(entry.type_id)
    except ValueError:
        raise UserError(
            f"{path}: tensor {name} has the unknown type {entry.type_id}",
            "a newer `gguf` package may know it: pip install -U gguf",
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    shape = entry.shape
    if shape[-1] % block:
        raise UserError(f"{path}: rows of {name} have {shape[-1]} values, no multiple of {kind.name}'s {block}")
    row_shape = (*shape[:-1], shape[-1] // block * block_bytes)
    n_bytes = int(np.prod(row_shape, dtype=object))
    begin = start + entry.offset
    if begin + n_bytes > data.size:
        raise UserError(
            f"{path} is truncated: tensor {name} ends at byte {begin + n_bytes}, the file has {data.size}",
            "download it again",
        )
    return StoredTensor(shape, kind.name, data[begin : begin + n_bytes].reshape(row_shape))


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        if buffer[:4] != MAGIC:
            raise UserError(f"{path} is no GGUF file: it begins with {buffer[:4]!r}", "give a file made for llama.cpp")
        self.position = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "is big-endian" if swapped else f"has GGUF version {version}, known are {VERSIONS}"
            raise UserError(f"{path} {what}", "convert the model again with a current llama.cpp")
        self.n_tensors = self.scalar("Q")
        self.n_fields = self.scalar("Q")

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged or truncated: {what}", "download it again")

    def take(self, n_bytes: int) -> bytes:
        begin, end = self.position, self.position + n_bytes
        if end > self.size:
            raise self.damaged(f"{n_bytes} bytes are needed at byte {begin}, the file has {self.size}")
        self.position = end
        return self.buffer[begin:end]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # A token may be half of a character; a replacement there is better than refusing the model.
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self.array()
        if type_id in SCALARS:
            return self.scalar(SCALARS[type_id])
        raise self.damaged(f"value of unknown type {type_id} at byte {self.position}")

    def array(self) -> list[Any]:
        type_id, length = self.scalar("I"), self.scalar("Q")
        if type_id in SCALARS:
            code = SCALARS[type_id]
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize("<" + code))))
        if type_id == STRING:
            return self.strings(length)
        raise self.damaged(f"array of unsupported type {type_id} at byte {self.position}")

    def strings(self, length: int) -> list[str]:
        """`string` for many: the vocabularies are here, so the loop avoids all calls but two."""
        result: list[str] = []
        position, buffer, size = self.position, self.buffer, self.size
        read_length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        while len(result) < length:
            begin = position + 8
            if begin > size:
                raise self.damaged(f"it ends within a list of {length} strings")
            position = begin + read_length(buffer, position)[0]
            if position > size:
                raise self.damaged(f"a string ends at byte {position}, the file has {size}")
            result.append(buffer[begin:position].decode("utf-8", errors="replace"))
        self.position = position
        return result

    def read_metadata(self) -> dict[str, Any]:
        metadata = {}
        for _ in range(self.n_fields):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        return metadata

    def read_tensor_table(self) -> dict[str, _TableEntry]:
        table = {}
        for _ in range(self.n_tensors):
            name = self.string()
            n_dims = self.scalar("I")
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.damaged(f"tensor {name!r} has {n_dims} dimensions")
            dims = tuple(self.scalar("Q") for _ in range(n_dims))
            if 0 in dims:
                raise self.damaged(f"tensor {name!r} has the dimensions {dims}")
            if name in table:
                raise self.damaged(f"tensor {name!r} is listed twice")
            table[name] = _TableEntry(dims[::-1], self.scalar("I"), self.scalar("Q"))
        return table
