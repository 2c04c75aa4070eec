# Licensed under the Apache License 2.0, see the LICENSE file.

"""Writing `.safetensors` and `.pth` files one tensor at a time, so that no file has to fit into memory first."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from litgpt.checkpoint.types import TensorInfo

_SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}
_ALIGNMENT = 64  # of tensors in a `.pth`, as torch writes, so that they can be used where they are mapped
_BLOCK = 16 << 20  # bytes written at once


def write_safetensors(path: Path, infos: Mapping[str, TensorInfo], get: Callable[[str], Tensor]) -> None:
    """Write a `.safetensors` file: https://huggingface.co/docs/safetensors/index#format.

    Args:
        path: the file.
        infos: shape and dtype of every tensor.
        get: makes a tensor; each is asked for once and let go before the next.
    """
    # Wide types first, so that every tensor begins at a multiple of its element's size
    names = sorted(infos, key=lambda name: -infos[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info, start = infos[name], end
        end += info.nbytes
        header[name] = {
            "dtype": _SAFETENSORS[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            _write_tensor(file, get(name), infos[name])


def write_state_dict(
    path: Path, infos: Mapping[str, TensorInfo], get: Callable[[str], Tensor], tied: Mapping[str, str]
) -> None:
    """Write the `.pth` file that `torch.save` of a state dict would.

    It is a zip archive that stores a pickle and, uncompressed, the numbers of each tensor:
    https://docs.pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save.

    Args:
        path: the file.
        infos: shape and dtype of every tensor.
        get: makes a tensor; each is asked for once and let go before the next.
        tied: names that stand for the same numbers as another name; they are stored once.
    """
    keys = {name: str(i) for i, name in enumerate(name for name in infos if name not in tied)}
    state = OrderedDict((name, _Reference(keys[tied.get(name, name)], info)) for name, info in infos.items())
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr(_record(archive, "data.pkl"), pickled.getvalue())
        archive.writestr(_record(archive, "byteorder"), sys.byteorder)
        for name, key in keys.items():
            with archive.open(_record(archive, f"data/{key}", aligned=True), "w", force_zip64=True) as file:
                _write_tensor(file, get(name), infos[name])
        archive.writestr(_record(archive, "version"), "3\n")


def _write_tensor(file: IO[bytes], tensor: Tensor, info: TensorInfo) -> None:
    assert tuple(tensor.shape) == info.shape, f"{tuple(tensor.shape)} instead of {info.shape}"
    assert tensor.dtype == info.dtype, f"{tensor.dtype} instead of {info.dtype}"
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(flat), _BLOCK):
        file.write(flat[start : start + _BLOCK].data)


def _record(archive: zipfile.ZipFile, name: str, aligned: bool = False) -> zipfile.ZipInfo:
    """An entry of the archive; the data of an aligned one begins at a multiple of `_ALIGNMENT`."""
    record = zipfile.ZipInfo(f"archive/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    if aligned:
        assert archive.fp is not None
        # What comes before the data: the entry's header, its name, the field with 64-bit sizes, the filler's own header
        begin = archive.fp.tell() + 30 + len(record.filename) + 20 + 4
        filler = -begin % _ALIGNMENT
        record.extra = b"FB" + struct.pack("<H", filler) + b"Z" * filler
    return record


class _Storage(NamedTuple):
    """Stands for the numbers of a tensor."""

    key: str
    info: TensorInfo


class _Reference:
    """Stands for a tensor while a state dict is pickled; it becomes a tensor over its storage when that is loaded."""

    def __init__(self, key: str, info: TensorInfo) -> None:
        self.storage = _Storage(key, info)

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.storage.info.shape
        strides = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.storage, 0, shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", _STORAGES[obj.info.dtype], obj.key, "cpu", obj.info.numel
        return None
