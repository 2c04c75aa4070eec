# Licensed under the Apache License 2.0, see the LICENSE file.

"""Writing files so that an interruption never leaves one that looks valid.

A file gets its name only when it is whole: it is written under a temporary name in the same folder, flushed to the
disk, then renamed. A folder of several files says in `manifest.json` whether it is whole: the manifest is marked
incomplete before the first file changes and gets the sizes and hashes of all files after the last one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from litgpt.errors import UserError

MANIFEST = "manifest.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".gguf")


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; `path` is replaced by it when the block ends without an exception.

    The temporary file lies in the folder of `path` (renaming across file systems is not atomic) and is removed when
    the block fails. A process that is killed leaves `path` as it was, and beside it a hidden `.tmp` file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner may read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


class FolderWriter:
    """Context in which the files of one folder are written; outside of it the folder is whole or says that it is not.

    Files that an earlier manifest of the folder lists stay listed, so several steps may add to one folder.

    Args:
        folder: where the files go; created when missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._names: set[str] = set()

    def __enter__(self) -> FolderWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._names = set(read_manifest(self.folder).get("files", {}))
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        self._write_manifest(complete=False)
        return self

    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Like `atomic_write`, for the file `name` of this folder, which the manifest will list."""
        self._names.add(name)
        return atomic_write(self.folder / name)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self.file(name) as path:
            path.write_bytes(content)

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as an indented JSON file."""
        self.write_bytes(name, _as_json(value))

    def forget(self, names: Iterable[str]) -> None:
        """Remove files of an earlier content that the new one does not have."""
        for name in names:
            self._names.discard(name)
            (self.folder / name).unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # the manifest keeps saying "incomplete"
        self._write_manifest(complete=True)

    def _write_manifest(self, complete: bool) -> None:
        files: dict[str, dict[str, Any]] = {name: {} for name in sorted(self._names)}
        if complete:
            files = {name: _describe(self.folder / name) for name in files if (self.folder / name).is_file()}
        with atomic_write(self.folder / MANIFEST) as path:
            path.write_bytes(_as_json({"complete": complete, "files": files}))


def add_to_manifest(folder: str | Path, names: Iterable[str]) -> None:
    """List files that were added, each atomically, to a folder that we wrote; others have no manifest and get none.

    Args:
        folder: the folder; whole, as far as its manifest says.
        names: the files.
    """
    folder = Path(folder)
    if not (manifest := read_manifest(folder)):
        return
    manifest["files"] |= {name: _describe(folder / name) for name in names}
    with atomic_write(folder / MANIFEST) as path:
        path.write_bytes(_as_json(manifest))


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's `manifest.json`, empty when there is none or it is somebody else's."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) and "complete" in manifest
    return manifest if is_ours else {}


def check_manifest(folder: str | Path, hashes: bool = False) -> None:
    """Raise if a folder we wrote is not whole; folders without our manifest pass.

    Args:
        folder: the folder to check.
        hashes: read every listed file and compare its hash too; without it only the sizes of weight files are
            compared, because people edit configuration files by hand.

    Raises:
        UserError: writing the folder was interrupted, or a file was changed, cut or removed since.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest:
        return
    hint = "write, convert or download it again"
    if not manifest["complete"]:
        raise UserError(f"{folder} is half written: the command that was writing it did not finish", hint)
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not {"size", "sha256"} <= entry.keys():
            raise UserError(f"{folder / MANIFEST} is damaged: it does not say the size and hash of {name!r}", hint)
        path = folder / name
        if not (hashes or name.endswith(_WEIGHT_SUFFIXES)):
            continue
        if not path.is_file():
            raise UserError(f"{path} is missing, but {MANIFEST} lists it", hint)
        if path.stat().st_size != entry["size"]:
            raise UserError(f"{path} has {path.stat().st_size} bytes, but {MANIFEST} says {entry['size']}", hint)
        if hashes and hash_file(path) != entry["sha256"]:
            raise UserError(f"the content of {path} is not what {MANIFEST} says: it was changed or damaged", hint)


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def hash_file(path: Path, digest: Any = None) -> str:
    """Hexadecimal hash of a file's content.

    Args:
        path: the file.
        digest: a `hashlib` object to continue; a new sha256 when None.
    """
    digest = hashlib.sha256() if digest is None else digest
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": hash_file(path)}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make a rename durable, where the system can open folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
