# Licensed under the Apache License 2.0, see the LICENSE file.

"""Fetching files of known size and hash over HTTP: several at once, resumed after an interruption, verified.

huggingface_hub lists the files and knows the accounts; it does not continue a file that an earlier process left half
done, so that part is here. A file gets its name only when it is whole and its hash is right.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from litgpt.checkpoint.progress import byte_bar
from litgpt.checkpoint.save import hash_file
from litgpt.errors import UserError, first_line

logger = logging.getLogger(__name__)

INCOMPLETE = ".incomplete"  # folder of half-fetched files; it is there exactly while a download is not finished
WORKERS = 4  # one connection seldom fills a fast line
RETRIES = 5  # in a row without a single new byte
RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A file on the server.

    Args:
        name: path inside the repository.
        url: where to get it.
        size: in bytes, None if the server did not say.
        digest: hexadecimal sha256 of the content (large files), or its git blob id (small files), None if unknown.
    """

    name: str
    url: str
    size: int | None = None
    digest: str | None = None

    def part(self, folder: Path) -> Path:
        """Where the half-fetched file is kept; another content of the same name gets another place."""
        return folder / INCOMPLETE / f"{self.name}.{(self.digest or 'unknown')[:16]}"

    def matches(self, path: Path) -> bool:
        """Whether the file at `path` is this one, as far as size and hash are known."""
        if not path.is_file() or (self.size is not None and path.stat().st_size != self.size):
            return False
        return self.digest is None or _digest(path, self.digest) == self.digest


class _Stopped(Exception):
    """Another file failed or the person pressed Ctrl-C: end this one quietly."""


def fetch_all(files: Sequence[RemoteFile], folder: Path, headers: Mapping[str, str], label: str) -> None:
    """Bring the files into a folder, leaving alone those that are there already.

    Args:
        files: what to fetch.
        folder: where the files go; half-fetched ones wait in its `.incomplete` folder for the next call.
        headers: sent with each request; the connection drops the credentials when it is sent on to another host.
        label: shown beside the progress bar.

    Raises:
        UserError: not enough space, or a file arrived with the wrong content.
        huggingface_hub.errors.HTTPError: the server refused, or could not be reached.
    """
    missing = [file for file in files if not file.matches(folder / file.name)]
    if not missing:
        return
    (folder / INCOMPLETE).mkdir(parents=True, exist_ok=True)
    total = sum(file.size or 0 for file in missing)
    have = sum(_size(file.part(folder)) for file in missing)
    _check_space(folder, total - have)
    stop = threading.Event()
    with (
        byte_bar(label, total, have) as bar,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        futures = [pool.submit(_fetch, file, folder, headers, bar.update, stop) for file in missing]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(
    file: RemoteFile, folder: Path, headers: Mapping[str, str], count: Callable[[int], object], stop: threading.Event
) -> None:
    """Bring one file, trying again for as long as each attempt gets a little further."""
    from huggingface_hub.errors import HTTPError

    part = file.part(folder)
    part.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    while True:
        before = _size(part)
        try:
            if file.size is None or before < file.size:
                _append(file, part, before, headers, count, stop)
            break
        except HTTPError as error:
            failures = 0 if _size(part) > before else failures + 1
            if failures > RETRIES or not _is_transient(error):
                raise
            logger.info("%s: %s; trying to continue", file.name, first_line(error))
            if stop.wait(RETRY_SECONDS * failures):
                raise _Stopped from error
    if not file.matches(part):
        size = _size(part)
        part.unlink()
        raise UserError(
            f"{file.name} arrived damaged: {size} bytes, expected {file.size}, or another content",
            "start the download again; the other files are kept",
        )
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)


def _append(
    file: RemoteFile,
    part: Path,
    start: int,
    headers: Mapping[str, str],
    count: Callable[[int], object],
    stop: threading.Event,
) -> None:
    """Make one request for the rest of a file and append what comes."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    # Ranges count the bytes of the encoded content, so it must not be compressed.
    headers = {**headers, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", file.url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        if response.status_code >= 400:
            response.read()  # the reason is in the body
            hf_raise_for_status(response)
        resumed = response.status_code == 206
        if start and not resumed:
            count(-start)
        with part.open("ab" if resumed else "wb") as out:
            for chunk in response.iter_bytes():
                if stop.is_set():
                    raise _Stopped
                out.write(chunk)
                count(len(chunk))


def _is_transient(error: Exception) -> bool:
    """Whether it makes sense to try again: the connection failed, or the server is busy or broken."""
    response = getattr(error, "response", None)
    return response is None or response.status_code in (408, 429) or response.status_code >= 500


def _digest(path: Path, like: str) -> str:
    """Hash a file the way `like` was made: sha256 for 64 digits, git's blob id for 40."""
    return hash_file(path, None if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size))


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the download needs {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free",
            "free some space, or choose another place with --checkpoint_dir",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
