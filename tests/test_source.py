# Licensed under the Apache License 2.0, see the LICENSE file.

"""Opening checkpoints: which files count, what is read lazily, and what damaged ones say."""

from __future__ import annotations

import collections
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.source import open_source
from litgpt.checkpoint.torch_file import TorchFile
from litgpt.checkpoint.types import TensorInfo
from litgpt.errors import UserError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"b": torch.full((3, 4), value + 1), "a": torch.full((5,), value + 2, dtype=torch.bfloat16)}


def read(folder: Path) -> dict[str, torch.Tensor]:
    with open_source(folder) as source:
        return {name: source.get(name).clone() for name in source.tensors()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def write_sharded(folder: Path, suffix: str, save: Callable[[dict[str, torch.Tensor], Path], None]) -> None:
    weight_map = {}
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    for i, (name, tensor) in enumerate(tensors().items()):
        weight_map[name] = f"{stem}-{i}.{suffix}"
        save({name: tensor}, folder / weight_map[name])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")


# Which files count


def test_single_safetensors(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), tensors())
    with open_source(tmp_path) as source:
        assert source.kind == "hf"
        assert source.tensors()["a"] == TensorInfo((5,), torch.bfloat16)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded(tmp_path: Path, suffix: str) -> None:
    write_sharded(tmp_path, suffix, save_file if suffix == "safetensors" else torch.save)
    assert_equal(read(tmp_path), tensors())


def test_stray_files_beside_the_single_one_are_ignored(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    save_file(tensors(9.0), tmp_path / "consolidated.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    torch.save(tensors(9.0), tmp_path / "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    assert_equal(read(tmp_path), tensors())


def test_the_index_decides(tmp_path: Path) -> None:
    write_sharded(tmp_path, "safetensors", save_file)
    save_file(tensors(9.0), tmp_path / "model.safetensors")
    save_file(tensors(9.0), tmp_path / "model-7.safetensors")
    assert_equal(read(tmp_path), tensors())


def test_tensor_that_the_index_leaves_out_is_left_out(tmp_path: Path) -> None:
    save_file({**tensors(), "extra": torch.zeros(1)}, tmp_path / "model-0.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "model-0.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert_equal(read(tmp_path), tensors())


@pytest.mark.parametrize("legacy", [False, True])
def test_single_bin(tmp_path: Path, legacy: bool) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_equal(read(tmp_path), tensors())


@pytest.mark.parametrize("wrapped", [False, True])
def test_litgpt_folder(tmp_path: Path, wrapped: bool) -> None:
    torch.save({"model": tensors(), "step_count": 3} if wrapped else tensors(), tmp_path / "lit_model.pth")
    save_file(tensors(9.0), tmp_path / "model.safetensors")  # what it was converted from
    assert_equal(read(tmp_path), tensors())
    with open_source(tmp_path) as source:
        assert source.kind == "litgpt"


# Reading


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    expected = {str(dtype): torch.arange(24).reshape(2, 3, 4).to(dtype) for dtype in DTYPES}
    expected |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "bool": torch.tensor([True, False])}
    save_file(expected, tmp_path / "some")
    file = SafetensorsFile(tmp_path / "some")
    assert file.tensors() == {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in expected.items()}
    assert_equal({name: file.get(name) for name in file.tensors()}, expected)


def test_tensors_stay_right_after_release_and_close(tmp_path: Path) -> None:
    big = torch.randn(300, 1000)
    save_file({"big": big}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    first = source.get("big")
    source.release()
    assert torch.equal(first, big)
    source.close()
    assert torch.equal(first, big)
    assert torch.equal(source.get("big"), big)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_are_mapped_on_demand_and_let_go(tmp_path: Path, name: str) -> None:
    def mapped() -> bool:
        return str(tmp_path / name) in Path("/proc/self/maps").read_text(encoding="utf-8")

    many = {str(i): torch.zeros(1 << 20) for i in range(16)}
    (save_file if name.endswith("safetensors") else torch.save)(many, tmp_path / name)
    source = open_source(tmp_path)
    source.tensors()
    if name.endswith("safetensors"):
        assert not mapped(), "listing the tensors needs the header alone"
    source.get("3").sum()
    assert mapped()
    source.close()
    assert not mapped()


@pytest.mark.parametrize(("reader", "save"), [(TorchFile, torch.save), (SafetensorsFile, save_file)])
def test_files_are_opened_again_on_demand(
    reader: type[TorchFile | SafetensorsFile], save: Callable[[object, Path], object], tmp_path: Path
) -> None:
    save({"x": torch.arange(6.0)}, tmp_path / "file")
    file = reader(tmp_path / "file")
    for _ in range(3):
        assert file.get("x").tolist() == [0, 1, 2, 3, 4, 5]
        file.close()


# Damage


def error_of(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    assert caught.value.hint
    return caught.value


def test_missing_path(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nowhere").message


def test_empty_folder(tmp_path: Path) -> None:
    assert "there is nothing in" in error_of(tmp_path).message


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "no model weights, only config.json" in error_of(tmp_path).message


def test_folder_with_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert str(tmp_path / "model.gguf") in error_of(tmp_path).hint


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert "not a checkpoint" in error_of(tmp_path / "notes.txt").message


def test_parts_without_an_index(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model-00001-of-00002.safetensors")
    assert "neither an index" in error_of(tmp_path).message


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:keep])
    assert "model.safetensors" in error_of(tmp_path).message
    assert "again" in error_of(tmp_path).hint


def with_header(header: object) -> bytes:
    encoded = json.dumps(header).encode("utf-8")
    return len(encoded).to_bytes(8, "little") + encoded + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        b"<html>" + b" " * 100,
        with_header([]),
        with_header({"x": 3}),
        with_header({"x": {"dtype": "F32", "shape": [4]}}),
        with_header({"x": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}),
        with_header({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}),
        with_header({"x": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}),
        with_header({"x": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}),
        with_header({"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}),
    ],
)
def test_nonsense_in_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in error_of(tmp_path).message


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path, "safetensors", save_file)
    (tmp_path / "model-1.safetensors").unlink()
    assert "model-1.safetensors is missing" in error_of(tmp_path).message


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    assert "index.json is damaged" in error_of(tmp_path).message


def test_index_that_names_a_tensor_its_file_lacks(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model-0.safetensors")
    index = {"weight_map": dict.fromkeys([*tensors(), "lost"], "model-0.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "lost" in error_of(tmp_path).message


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd"])
def test_index_that_leaves_its_folder(tmp_path: Path, file: str) -> None:
    index = {"weight_map": {"a": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "outside of its folder" in error_of(tmp_path).message


@pytest.mark.parametrize("keep", [0, 100, -30])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "lit_model.pth"])
def test_truncated_torch_file(tmp_path: Path, name: str, keep: int, legacy: bool) -> None:
    torch.save(tensors(), tmp_path / name, _use_new_zipfile_serialization=not legacy)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:keep])
    assert f"{name} is damaged" in error_of(tmp_path).message


class Unsafe:
    """Unpickling an instance would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "lit_model.pth"])
@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_unsafe_pickle_is_refused(
    tmp_path: Path, name: str, save: Callable[[object, Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({**tensors(), "evil": Unsafe()}, tmp_path / name)
    error = error_of(tmp_path)
    assert name in error.message
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content", [[1, 2], {"a": 3}, {"model": {"a": "b"}}, torch.zeros(3), collections.Counter("ab")]
)
def test_pickle_without_a_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert "holds no state dict" in error_of(tmp_path).message
