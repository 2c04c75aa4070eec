# Licensed under the Apache License 2.0, see the LICENSE file.

"""Fetching data sets: each file once, continued after an interruption, and there only when it is whole."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from litgpt.checkpoint.hub import list_files
from litgpt.checkpoint.hub_errors import explained
from litgpt.checkpoint.transfer import INCOMPLETE, RemoteFile, fetch_all
from litgpt.errors import UserError


def fetch_urls(urls: Mapping[str, str], folder: Path) -> None:
    """Fetch the files that a folder does not have yet.

    Args:
        urls: name of a file -> where to get it.
        folder: where the files go.

    Raises:
        UserError: a file cannot be had; the hint says how to go on without a network.
    """
    if all((folder / name).is_file() for name in urls):
        return
    with _alone(folder):
        missing = [RemoteFile(name, url) for name, url in urls.items() if not (folder / name).is_file()]
        with _or_by_hand(folder), explained(", ".join(f.url for f in missing), lambda: "check the address"):
            fetch_all(missing, folder, {}, folder.name)
        shutil.rmtree(folder / INCOMPLETE, ignore_errors=True)


def fetch_dataset(
    repo_id: str, patterns: Sequence[str], folder: Path, access_token: str | None = None
) -> list[list[Path]]:
    """Fetch files of a data set from the hub, unless the folder has them.

    Args:
        repo_id: `org/name`.
        patterns: which files, such as `data/train-*.parquet`.
        folder: where the files go, under their own names.
        access_token: for data sets that are not public; None uses `$HF_TOKEN` or the stored login.

    Returns:
        For each pattern the files that it fits, sorted.

    Raises:
        UserError: a file cannot be had; the hint says how to go on without a network.
    """
    if (found := _find(patterns, folder)) is not None:
        return found
    with _alone(folder):
        if (found := _find(patterns, folder)) is not None:  # another process was quicker
            return found
        with _or_by_hand(folder), explained(f"datasets/{repo_id}", lambda: "check the name"):
            files, headers = list_files(repo_id, access_token, "dataset")
            for pattern in patterns:
                if not fnmatch.filter(files, pattern):
                    raise UserError(f"the data set {repo_id} has no file {pattern}")
            wanted = [file for name, file in files.items() if any(fnmatch.fnmatch(name, p) for p in patterns)]
            fetch_all(wanted, folder, headers, folder.name)
        shutil.rmtree(folder / INCOMPLETE, ignore_errors=True)
        found = _find(patterns, folder)
        assert found is not None
        return found


def _find(patterns: Sequence[str], folder: Path) -> list[list[Path]] | None:
    """The files of a folder that each pattern fits; None if one fits none, or a download did not finish."""
    found = [sorted(folder.glob(pattern)) for pattern in patterns]
    return found if all(found) and not (folder / INCOMPLETE).exists() else None


@contextmanager
def _or_by_hand(folder: Path) -> Iterator[None]:
    """Add to an error what can be done without a network."""
    try:
        yield
    except UserError as error:
        hint = f"put the files into {folder} by hand"
        raise UserError(error.message, f"{error.hint}; or {hint}" if error.hint else hint) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time fetches into a folder."""
    from filelock import FileLock

    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}", "choose another --data.download_dir") from error
    try:
        yield
    finally:
        lock.release()
