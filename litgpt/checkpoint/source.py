# Licensed under the Apache License 2.0, see the LICENSE file.

"""Opening whatever a person points at: a Hugging Face folder, a `.gguf` file or a LitGPT folder.

A source lists its tensors from headers alone and reads each one when it is asked for, so a model of any size can be
checked before memory is allocated and filled without a second copy.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from litgpt.checkpoint.dequantize import Dequantizer, find_dequantizer, read_config, read_json, without_quantization
from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.save import check_manifest
from litgpt.checkpoint.tables import LITGPT, Table, table_for
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.checkpoint.types import TensorInfo
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from litgpt.checkpoint.gguf import GGUFFile

Kind = Literal["hf", "gguf", "litgpt"]

LITGPT_FILE = "lit_model.pth"
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "prompt_style.yaml",
)
_AGAIN = "download or convert the model again"


class Source(ABC):
    """An opened checkpoint; use it as a context manager or call `close`.

    Attributes:
        kind: which kind of checkpoint it is.
        path: the folder, or the file of a GGUF.
        release_after: how many bytes to read before calling `release`.
    """

    kind: Kind
    release_after = 16 << 20

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def config(self, config_class: type[Config] = Config, **overrides: Any) -> Config:
        """The architecture, with `overrides` winning over what the files say."""

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The content of `config.json`, for exporting."""

    def companion_files(self) -> dict[str, bytes]:
        """The files beside the weights that a copy needs: tokenizer, chat template, generation settings."""
        return {name: (self.path / name).read_bytes() for name in companions(self.path)}

    @abstractmethod
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, without reading any."""

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """Read one tensor, on the CPU. It may lie over a mapped file: do not write to it.

        Asking for the same one again costs nothing, so nobody has to hold it while `release` is called.
        """

    def nbytes_stored(self) -> int:
        """Bytes of all tensors as the files hold them, without reading any."""
        return sum(info.nbytes for info in self.tensors().values())

    def table(self, config: Config) -> Table:
        """The names and layouts that this checkpoint uses."""
        return table_for(config.family)

    @abstractmethod
    def release(self) -> None:
        """Let what was read so far leave memory where that is possible, but for tensors that are still held."""

    @abstractmethod
    def close(self) -> None:
        """Let the files go."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FolderSource(Source):
    """Files of one format that together hold a Hugging Face model.

    Args:
        path: the folder.
        reader: opens one of its files.
        files: the file of every tensor by name, or the only file.
    """

    kind: Kind = "hf"

    def __init__(
        self, path: Path, reader: type[SafetensorsFile] | type[TorchFile], files: dict[str, str] | str
    ) -> None:
        super().__init__(path)
        names = {files} if isinstance(files, str) else set(files.values())
        self._files = {name: reader(path / name) for name in sorted(names)}
        self.release_after = max(file.close_after for file in self._files.values())
        if isinstance(files, str):
            files = dict.fromkeys(self._files[files].tensors(), files)
        self._file_of = files
        infos = {name: file.tensors() for name, file in self._files.items()}
        lost = sorted(name for name, file in files.items() if name not in infos[file])
        if lost:
            raise UserError(
                f"{path}: the index names {len(lost)} tensors that are not in their files, the first is {lost[0]}"
                f" in {files[lost[0]]}",
                _AGAIN,
            )
        # In the order of the files, so that reading goes through each once
        self._infos = self._stored = {
            name: info for file, entries in infos.items() for name, info in entries.items() if files.get(name) == file
        }
        self._last: tuple[str, Tensor] | None = None
        self._dequantizer: Dequantizer | None = None
        if self.kind == "hf":
            config = path / "config.json"
            self._dequantizer = find_dequantizer(read_json(config), self._stored, f"{config}")
        if self._dequantizer is not None:
            self._infos = self._dequantizer.visible()

    def config(self, config_class: type[Config] = Config, **overrides: Any) -> Config:
        """Read `config.json`."""
        if (self.path / "config.json").is_file():
            return read_config(self.path, config_class, **overrides)
        return config_class.from_checkpoint(self.path, **overrides)

    def hf_config(self) -> dict[str, Any]:
        """The content of `config.json`; of one for quantized weights, what it would say of these."""
        file = self.path / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8-sig"))
            return without_quantization(content) if self._dequantizer is not None else content
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is missing or damaged: {error}", "copy it from the original model") from error

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, from the files' headers."""
        return self._infos

    def nbytes_stored(self) -> int:
        """Bytes of all tensors, quantized as they are."""
        return sum(info.nbytes for info in self._stored.values())

    def get(self, name: str) -> Tensor:
        """A tensor over the mapped file, or one that was quantized there."""
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        self._last = None  # two would take twice the memory
        if self._dequantizer is not None and (tensor := self._dequantizer.get(name, self._read)) is not None:
            self._last = (name, tensor)
            return tensor
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get(name)

    def release(self) -> None:
        """Let the mapped files go; they are opened again on demand."""
        for file in self._files.values():
            file.close()

    def close(self) -> None:
        """Let the files go."""
        self._last = None
        self.release()


class LitGPTSource(FolderSource):
    """A folder with `lit_model.pth` (or weights of another name) and `model_config.yaml`."""

    kind: Kind = "litgpt"

    def __init__(self, path: Path, file: str = LITGPT_FILE) -> None:
        super().__init__(path, TorchFile, file)

    def config(self, config_class: type[Config] = Config, **overrides: Any) -> Config:
        """Read `model_config.yaml`."""
        return config_class.from_checkpoint(self.path, **overrides)

    def table(self, config: Config) -> Table:
        """Our own names."""
        return LITGPT


class GGUFSource(Source):
    """A `.gguf` file, seen as a Hugging Face folder."""

    kind: Kind = "gguf"

    def __init__(self, path: Path) -> None:
        from litgpt.checkpoint.gguf import GGUFFile  # the container code is only needed for such files

        super().__init__(path)
        self._file: GGUFFile | None = GGUFFile(path)
        self._last: tuple[str, Tensor] | None = None

    @property
    def file(self) -> GGUFFile:
        """The file, as the reader of the format shows it."""
        assert self._file is not None, f"{self.path} was closed"
        return self._file

    def config(self, config_class: type[Config] = Config, **overrides: Any) -> Config:
        """Read the metadata."""
        return config_class.from_hf(self.file.hf_config(), **({"name": self.file.name} | overrides))

    def nbytes_stored(self) -> int:
        """Bytes of all tensors, quantized as they are."""
        return self.file.nbytes_stored

    def hf_config(self) -> dict[str, Any]:
        """The metadata as `config.json` would say it."""
        return self.file.hf_config()

    def companion_files(self) -> dict[str, bytes]:
        """The tokenizer and generation settings, rebuilt from the metadata."""
        files = self.file.tokenizer_files()
        return {name: json.dumps(content, ensure_ascii=False).encode("utf-8") for name, content in files.items()}

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor as it will be after dequantizing."""
        return self.file.tensors()

    def get(self, name: str) -> Tensor:
        """Read and dequantize one tensor, unless it is the one that was asked for last."""
        if self._last is None or self._last[0] != name:
            self._last = None  # two would take twice the memory
            self._last = (name, self.file.get(name))
        return self._last[1]

    def release(self) -> None:
        """Let pages of the mapped file go."""
        self.file.release()

    def close(self) -> None:
        """Let the file go."""
        self._file = self._last = None


def companions(folder: Path) -> list[str]:
    """Names of the files beside the weights that a copy of a model needs: tokenizer, chat templates, settings."""
    templates = sorted(path.name for path in folder.glob("additional_chat_templates/*.jinja"))
    names = [*_COMPANIONS, *(f"additional_chat_templates/{name}" for name in templates)]
    return [name for name in names if (folder / name).is_file()]


def open_source(path: str | Path) -> Source:
    """Open a checkpoint.

    Args:
        path: a Hugging Face folder, a LitGPT folder or one `.pth` file in it, or a `.gguf` file.

    Raises:
        UserError: there is nothing, nothing known, or something damaged at `path`.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFSource(path)
        if path.suffix == ".pth":
            return LitGPTSource(path.parent, path.name)
        raise UserError(f"{path} is not a checkpoint that can be opened", "give a folder or a .gguf file")
    if not path.exists():
        raise MissingFileError(f"{path} does not exist", "check the path, or download the model first")
    check_manifest(path)
    if (path / LITGPT_FILE).is_file():
        return LitGPTSource(path)
    if (found := find_hf_files(path)) is not None:
        return found
    raise _nothing_found(path)


def find_hf_files(path: Path) -> FolderSource | None:
    """Open the Hugging Face files of a folder, whatever else it holds; None when there are none."""
    for index, single, reader in (
        ("model.safetensors.index.json", "model.safetensors", SafetensorsFile),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", TorchFile),
    ):
        # Only what an index names belongs to the model; other weight files may be duplicates in another layout.
        if (path / index).is_file():
            return FolderSource(path, reader, _read_index(path / index))
        if (path / single).is_file():
            return FolderSource(path, reader, single)
    return None


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of every tensor."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}", _AGAIN) from error
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise UserError(f"{path} names a file outside of its folder: {file}", "do not use this checkpoint")
        if not (path.parent / file).is_file():
            raise UserError(f"{path.parent / file} is missing, but {path.name} names it", _AGAIN)
    return files


def _nothing_found(path: Path) -> UserError:
    found = sorted(entry.name for entry in path.iterdir())
    if (path / LITGPT_FILE).is_dir():
        return UserError(
            f"{path / LITGPT_FILE} is a folder: training on several devices wrote it in parts",
            "join them first: `fabric consolidate PATH_OF_THE_FOLDER`",
        )
    if ggufs := [name for name in found if name.endswith(".gguf")]:
        return UserError(f"{path} is a folder with a .gguf file", f"give the file itself: {path / ggufs[0]}")
    if parts := [name for name in found if name.endswith((".safetensors", ".bin"))]:
        return UserError(
            f"{path} has {parts[0]} but neither an index nor a file named model.safetensors or pytorch_model.bin",
            _AGAIN,
        )
    what = f"no model weights, only {', '.join(found[:5])}" if found else "nothing"
    return UserError(
        f"there is {what} in {path}",
        f"a model folder holds model.safetensors (or parts with an index), pytorch_model.bin or {LITGPT_FILE}",
    )
