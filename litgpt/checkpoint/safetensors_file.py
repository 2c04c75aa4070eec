# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reading and writing one `.safetensors` file within a few megabytes of memory.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header with the
dtype, shape and byte range of every tensor, then the bytes. The `safetensors` library maps the file as a whole, and
the pages that were read stay in the process's resident memory until the map is closed; its writer takes all tensors at
once. Here the caller says when pages may go, and tensors are written one by one.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from litgpt.checkpoint.types import TensorInfo
from litgpt.errors import UserError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_CHUNK = 1 << 24


class SafetensorsFile:
    """A `.safetensors` file, opened for lazy reading.

    Args:
        path: the file.

    Attributes:
        metadata: strings of the header.

    Raises:
        UserError: the file is missing, cut short, or is no safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        try:
            self._size = self.path.stat().st_size
            with self.path.open("rb") as file:
                self._start, header = _read_header(file, self._size)
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self._entries = {name: _read_entry(name, entry) for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is damaged or no safetensors file: {error}", "download or convert it again"
            ) from error
        end = self._start + max((end for _, _, end in self._entries.values()), default=0)
        if self._size < end:
            raise UserError(
                f"{self.path} is cut short: it has {self._size} bytes of {end}", "download or convert it again"
            )

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, from the header alone."""
        return {name: info for name, (info, _, _) in self._entries.items()}

    def get(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file: its bytes are read when they are used, and stay until `release`."""
        info, begin, _ = self._entries[name]
        if info.numel == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                # A private copy-on-write map: torch wants writable memory; nothing here writes to it.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._map, dtype=info.dtype, count=info.numel, offset=self._start + begin).view(
            info.shape
        )

    def release(self) -> None:
        """Let the pages that were read so far leave resident memory; tensors stay usable and read them again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the map; it goes when the last tensor over it goes."""
        self._map = None


def write_safetensors(
    path: str | Path, infos: Mapping[str, TensorInfo], tensors: Iterable[torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write one file, holding one tensor at a time.

    Args:
        path: the file; give a temporary name and rename it (`litgpt.checkpoint.save.atomic_write`).
        infos: name -> shape and dtype, in the order in which `tensors` yields.
        tensors: the tensors, on any device.
        metadata: strings for the header, such as `{"format": "pt"}`.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, info in infos.items():
        begin, end = end, end + info.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    with Path(path).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, info), tensor in zip(infos.items(), tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == info, f"{name}: {tuple(tensor.shape)} {tensor.dtype}, {info}"
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for chunk in flat.split(_CHUNK):
                file.write(chunk.numpy().data)


def _read_header(file: Any, size: int) -> tuple[int, dict[str, Any]]:
    """Return where the data starts and the entries of the tensors."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"{size} bytes are too few for a header of {length}")
    header = json.loads(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return 8 + length, header


def _read_entry(name: str, entry: dict[str, Any]) -> tuple[TensorInfo, int, int]:
    """Return the tensor's info and its byte range, relative to the start of the data."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name} has the unknown dtype {entry['dtype']}")
    info = TensorInfo(tuple(int(n) for n in entry["shape"]), _DTYPES[entry["dtype"]])
    begin, end = (int(n) for n in entry["data_offsets"])
    if min(info.shape, default=0) < 0 or begin < 0 or end - begin != info.nbytes:
        raise ValueError(f"tensor {name} of shape {info.shape} has the byte range {begin} to {end}")
    return info, begin, end
