# Licensed under the Apache License 2.0, see the LICENSE file.

"""Interrupted writing: no file and no folder may look whole when it is not."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from litgpt.checkpoint.save import MANIFEST, FolderWriter, atomic_write, check_manifest, read_manifest
from litgpt.checkpoint.source import open_source
from litgpt.errors import UserError


class Interruption(BaseException):
    """Stands for a KeyboardInterrupt, a full disk or any other end in the middle."""


def test_atomic_write_replaces_only_when_done(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old", encoding="utf-8")
    with atomic_write(path) as temporary:
        assert temporary.parent == path.parent
        temporary.write_text("new", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_atomic_write_keeps_the_old_file_when_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old", encoding="utf-8")

    def write_half() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise Interruption

    with pytest.raises(Interruption):
        write_half()
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_atomic_write_gives_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with atomic_write(tmp_path / "written") as temporary:
        temporary.touch()
    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def write(folder: Path, content: str, stop_at: int = 99) -> None:
    """Write three files and raise before the `stop_at`-th step."""
    steps = iter(range(99))

    def step() -> None:
        if next(steps) == stop_at:
            raise Interruption

    with FolderWriter(folder) as writer:
        step()
        for name in ("model.safetensors", "config.json"):
            with writer.file(name) as path:
                path.write_text(content[:1], encoding="utf-8")
                step()
                path.write_text(content, encoding="utf-8")
            step()
        writer.write_json("more.json", {"content": content})
        step()


@pytest.mark.parametrize("again", [False, True], ids=["first", "over-an-old-one"])
@pytest.mark.parametrize("stop_at", range(6))
def test_interrupted_folder_is_recognised_at_every_step(tmp_path: Path, stop_at: int, again: bool) -> None:
    if again:
        write(tmp_path, "older content")
    with pytest.raises(Interruption):
        write(tmp_path, "content", stop_at)
    with pytest.raises(UserError, match="half written"):
        check_manifest(tmp_path)
    with pytest.raises(UserError, match="half written"):
        open_source(tmp_path)
    write(tmp_path, "content")  # and trying again mends it
    check_manifest(tmp_path, hashes=True)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
def test_killed_process_leaves_a_recognisable_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from litgpt.checkpoint.save import FolderWriter\n"
        "with FolderWriter(sys.argv[1]) as writer, writer.file('lit_model.pth') as path:\n"
        "    path.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "lit_model.pth").exists()
    with pytest.raises(UserError, match="half written"):
        open_source(tmp_path)
    write(tmp_path, "content")
    assert not list(tmp_path.glob(".*")), "the killed process's temporary file is still there"


def test_whole_folder(tmp_path: Path) -> None:
    write(tmp_path, "content")
    check_manifest(tmp_path, hashes=True)
    manifest = read_manifest(tmp_path)
    assert manifest["complete"]
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "more.json"]
    assert manifest["files"]["config.json"]["size"] == 7


def test_second_step_keeps_the_first_one_listed(tmp_path: Path) -> None:
    write(tmp_path, "content")
    with FolderWriter(tmp_path) as writer:
        writer.write_bytes("later.bin", b"123")
        writer.forget(["more.json", "was-never-there"])
    check_manifest(tmp_path, hashes=True)
    assert sorted(read_manifest(tmp_path)["files"]) == ["config.json", "later.bin", "model.safetensors"]
    assert not (tmp_path / "more.json").exists()


def test_damage_is_found(tmp_path: Path) -> None:
    write(tmp_path, "content")
    weights = tmp_path / "model.safetensors"
    weights.write_text("CONTENT", encoding="utf-8")
    check_manifest(tmp_path)  # same size: only the hash shows it
    with pytest.raises(UserError, match=r"model\.safetensors is not what"):
        check_manifest(tmp_path, hashes=True)
    weights.write_text("cont", encoding="utf-8")
    with pytest.raises(UserError, match=r"has 4 bytes, but manifest\.json says 7"):
        check_manifest(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match="missing"):
        check_manifest(tmp_path)


def test_editing_a_configuration_file_is_allowed(tmp_path: Path) -> None:
    write(tmp_path, "content")
    (tmp_path / "config.json").write_text("edited by hand", encoding="utf-8")
    check_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"short_name": "a web app"})])
def test_other_peoples_manifests_are_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    check_manifest(tmp_path)


def test_damaged_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"complete": true, "files": {"model.safetensors": {}}}', encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        check_manifest(tmp_path)
