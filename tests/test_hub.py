# Licensed under the Apache License 2.0, see the LICENSE file.

"""Downloading from a hub, against a small one on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from litgpt.checkpoint import hub, transfer
from litgpt.checkpoint.source import companions
from litgpt.errors import UserError
from litgpt.scripts.download import download_from_hub
from tests.hub_stub import HubStub, hub_for_tests, set_endpoint, set_offline

REPO = "HuggingFaceTB/SmolLM2-135M"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB; what is in it does not matter to a download


def model_files() -> dict[str, bytes]:
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# A model",
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"not this one",
        "onnx/model.onnx": b"nor this one",
    }


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """A hub with one model, and a working directory without checkpoints."""
    with hub_for_tests({REPO: model_files()}, tmp_path, monkeypatch) as running:
        yield running


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_needed_is_downloaded(stub: HubStub) -> None:
    folder = hub.resolve(REPO)
    assert folder == Path("checkpoints") / REPO
    assert files_in(folder) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    before = len(stub.requests)
    assert hub.resolve(REPO) == folder  # the second time nobody is asked
    assert hub.resolve(f"checkpoints/{REPO}") == folder
    assert len(stub.requests) == before


def test_a_hub_page_is_a_repository(stub: HubStub) -> None:
    assert hub.resolve(f"https://huggingface.co/{REPO}") == Path("checkpoints") / REPO


def test_continues_in_the_same_run_when_the_connection_breaks(stub: HubStub) -> None:
    stub.drops = {"model.safetensors": 2}
    folder = hub.download_repo(REPO)
    half, three_quarters = len(WEIGHTS) // 2, len(WEIGHTS) * 3 // 4
    assert stub.gets("model.safetensors") == [None, f"bytes={half}-", f"bytes={three_quarters}-"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def interrupt(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends when the connection breaks half way through the weights."""
    stub.drops = {"model.safetensors": 1}
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_is_transient", lambda error: False)
        with pytest.raises(UserError, match="cannot download") as caught:
            hub.resolve(REPO)
    assert "what has arrived is kept" in caught.value.hint
    stub.requests.clear()


def test_continues_in_a_later_run(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(stub, monkeypatch)
    folder = Path("checkpoints") / REPO
    assert not (folder / "model.safetensors").exists()
    assert (folder / "config.json").exists()
    assert hub.resolve(REPO) == folder  # a name that is only half there is downloaded on
    assert stub.gets("model.safetensors") == [f"bytes={len(WEIGHTS) // 2}-"]
    assert stub.gets("config.json") == []
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / transfer.INCOMPLETE).exists()


def test_an_interrupted_folder_elsewhere_says_so(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "else" / "where" / transfer.INCOMPLETE).mkdir(parents=True)
    with pytest.raises(UserError, match="was interrupted"):
        hub.resolve(tmp_path / "else" / "where")


def test_gives_up_when_nothing_more_comes(stub: HubStub) -> None:
    stub.drops = {"tokenizer.json": 10**6}
    with pytest.raises(UserError, match="cannot download"):
        hub.download_repo(REPO)


def test_a_changed_file_is_not_continued_but_fetched_anew(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(stub, monkeypatch)
    stub.repos[REPO]["model.safetensors"] = WEIGHTS[::-1]
    folder = hub.download_repo(REPO)
    assert stub.gets("model.safetensors") == [None]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS[::-1]


def test_damaged_on_the_way(stub: HubStub) -> None:
    stub.corrupt = {"model.safetensors"}
    with pytest.raises(UserError, match=r"model\.safetensors arrived damaged"):
        hub.download_repo(REPO)
    stub.corrupt = set()
    folder = hub.download_repo(REPO)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_there_is_kept_and_what_changed_is_replaced(stub: HubStub) -> None:
    folder = hub.download_repo(REPO)
    stub.repos[REPO]["tokenizer.json"] = b'{"version": "1.1"}'  # as long as before
    stub.requests.clear()
    hub.download_repo(REPO)
    assert [path for _, path, _, _ in stub.requests if "/resolve/" in path] == [
        f"/{REPO}/resolve/0123456789abcdef0123456789abcdef01234567/tokenizer.json"
    ]
    assert (folder / "tokenizer.json").read_bytes() == b'{"version": "1.1"}'


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        (401, "RepoNotFound", "does not exist", "HF_TOKEN"),
        (401, "GatedRepo", "is gated", "HF_TOKEN"),
        (403, "GatedRepo", "is gated", "accept it at"),
        (403, "", "access is denied", "HF_TOKEN"),
        (404, "RepoNotFound", "does not exist", "check the name"),
    ],
)
def test_refusals(stub: HubStub, status: int, code: str, message: str, hint: str) -> None:
    stub.refuse = {"org/model": (status, code)}
    with pytest.raises(UserError, match=message) as caught:
        hub.download_repo("org/model", access_token="hf_secret_token")
    assert hint in caught.value.hint
    assert "hf_secret_token" not in f"{caught.value} {caught.value.__cause__}"
    assert not Path("checkpoints").exists()


def test_token_is_sent(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.download_repo(REPO, access_token="hf_given")
    assert {token for _, _, _, token in stub.requests} == {"Bearer hf_given"}
    stub.requests.clear()
    shutil.rmtree("checkpoints")
    monkeypatch.setenv("HF_TOKEN", "hf_from_environment")
    hub.download_repo(REPO)
    assert {token for _, _, _, token in stub.requests} == {"Bearer hf_from_environment"}


def test_name_like_a_known_one(stub: HubStub) -> None:
    with pytest.raises(UserError, match="does not exist") as caught:
        hub.resolve("EleutherAI/pythia-14mm")
    assert "EleutherAI/pythia-14m" in caught.value.hint


def test_listed_file_that_is_not_there(stub: HubStub) -> None:
    stub.lost = {"tokenizer.json"}
    with pytest.raises(UserError, match=r"HTTP 404"):
        hub.download_repo(REPO)


def test_shard_that_the_repository_lacks(stub: HubStub) -> None:
    files = stub.repos[REPO]
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["model-00001-of-00002.safetensors"] = b"one"
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors"):
        hub.download_repo(REPO)
    files["model-00002-of-00002.safetensors"] = b"two"
    folder = hub.download_repo(REPO)
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"two"
    assert not (folder / "model.safetensors").exists()  # only what the index names


@pytest.mark.parametrize("name", ["../../evil.safetensors", "..\\evil.safetensors", "C:evil.safetensors"])
def test_index_that_points_outside(name: str, stub: HubStub) -> None:
    files = stub.repos[REPO]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    files[name] = b"evil"
    with pytest.raises(UserError, match="outside of its folder"):
        hub.download_repo(REPO)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": [1]}'])
def test_index_that_is_none(content: bytes, stub: HubStub) -> None:
    stub.repos[REPO]["model.safetensors.index.json"] = content
    with pytest.raises(UserError, match="is no index of weights"):
        hub.download_repo(REPO)


def test_further_chat_templates(stub: HubStub) -> None:
    name = "additional_chat_templates/tools.jinja"
    stub.repos[REPO] |= {name: b"{{ tools }}", "additional_chat_templates/../evil.jinja": b"evil"}
    folder = hub.download_repo(REPO, tokenizer_only=True)
    assert (folder / name).read_bytes() == b"{{ tools }}"
    assert name in companions(folder)
    assert not (folder / "evil.jinja").exists()


def test_no_weights(stub: HubStub) -> None:
    del stub.repos[REPO]["model.safetensors"], stub.repos[REPO]["pytorch_model.bin"]
    with pytest.raises(UserError, match="no weights in a known format"):
        hub.download_repo(REPO)
    folder = hub.download_repo(REPO, tokenizer_only=True)
    assert (folder / "tokenizer.json").exists()


def test_one_of_many_gguf_files(stub: HubStub) -> None:
    names = ("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf")
    stub.repos["org/m-gguf"] = {name: name.encode() for name in names}
    folder = Path("checkpoints/org/m-gguf")
    assert hub.resolve("org/m-gguf") == folder / "m-Q4_K_M.gguf"
    assert files_in(folder) == {"m-Q4_K_M.gguf"}
    assert hub.resolve("org/m-gguf:q8_0") == folder / "m-Q8_0.gguf"
    (folder / "mmproj-m-Q5_K_M.gguf").write_bytes(b"an encoder of images")
    assert hub.only_gguf(folder) == folder / "m-Q4_K_M.gguf"
    with pytest.raises(UserError, match=r"'Q3_K' .*m-Q2_K\.gguf"):
        hub.resolve("org/m-gguf:Q3_K")


def test_unsupported_architecture_costs_no_weights(stub: HubStub) -> None:
    stub.repos[REPO]["config.json"] = b'{"model_type": "no_such_model"}'
    with pytest.raises(UserError, match="no_such_model") as caught:
        hub.resolve(REPO)
    assert "--convert_checkpoint false" in caught.value.hint
    assert stub.gets("model.safetensors") == []
    download_from_hub(REPO, convert_checkpoint=False)
    assert stub.gets("model.safetensors") == [None]


def test_no_space(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UserError, match="GB free"):
        hub.download_repo(REPO)


def test_offline(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.download_repo(REPO)
    set_offline(monkeypatch)
    stub.requests.clear()
    assert hub.resolve(REPO) == folder
    assert hub.download_repo(REPO) == folder
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.resolve("org/other")
    (folder / transfer.INCOMPLETE).mkdir()
    with pytest.raises(UserError, match="not complete on this machine"):
        hub.resolve(REPO)
    assert stub.requests == []


def test_offline_from_the_cache_of_other_programs(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repo = tmp_path / "cache" / "models--org--cached"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (snapshot / "model.safetensors").write_bytes(b"")
    set_offline(monkeypatch)
    assert hub.resolve("org/cached") == snapshot


def test_hub_out_of_reach(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"cannot download .*127\.0\.0\.1:1") as caught:
        hub.resolve(REPO)
    assert "check the network" in caught.value.hint


@pytest.mark.parametrize("name", ["nothing", "no/such/path", "model.gguf", "org/model.gguf", "checkpoints/x"])
def test_not_a_repository(stub: HubStub, name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        hub.resolve(name)
    assert stub.requests == []


def test_paths(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "org" / "model").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    assert hub.resolve("org/model") == Path("checkpoints/org/model")
    assert hub.resolve(tmp_path / "model.gguf") == tmp_path / "model.gguf"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub.resolve("org/model") == Path("org/model")  # what is here comes first


def test_download_writes_the_config_for_litgpt(stub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    from litgpt.config import Config

    download_from_hub(REPO)
    folder = Path("checkpoints") / REPO
    assert capsys.readouterr().out == f"{folder}\n"
    assert Config.from_file(folder / "model_config.yaml") == Config.from_hf(folder)


def test_download_list(capsys: pytest.CaptureFixture[str]) -> None:
    download_from_hub("list")
    names = capsys.readouterr().out.split()
    assert REPO in names
    assert names == sorted(names)


def test_download_refuses_a_bare_name() -> None:
    with pytest.raises(UserError, match="not a repository id"):
        download_from_hub("pythia-14m")


def test_the_command_in_a_process_of_its_own(stub: HubStub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_TOKEN reach the hub's client; nothing of the token shows, with tracebacks on neither."""
    env = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret", "LITGPT_DEBUG": "1"}
    command = [sys.executable, "-m", "litgpt", "download"]
    env["PYTHONPATH"] = str(Path(hub.__file__).parents[2])

    def download(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *args], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8")

    done = download(REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{Path('checkpoints') / REPO}\n"
    assert ("GET", f"/api/models/{REPO}?blobs=true", None, "Bearer hf_secret") in stub.requests
    weights = (tmp_path / "checkpoints" / REPO / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).digest() == hashlib.sha256(WEIGHTS).digest()
    failed = download("org/absent")
    assert failed.returncode == 1
    assert "error: org/absent does not exist" in failed.stderr
    assert "hf_secret" not in done.stdout + done.stderr + failed.stdout + failed.stderr
