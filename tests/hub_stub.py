# Licensed under the Apache License 2.0, see the LICENSE file.

"""A small model hub on 127.0.0.1 that can drop connections, refuse and forget files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from litgpt.checkpoint import transfer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStub:
    """What the hub serves and what it was asked.

    Attributes:
        repos: repository id -> file name -> content; models and data sets alike.
        large: names of files that are listed with a sha256, as files in large-file storage are.
        drops: file name -> how often its connection breaks half way.
        refuse: repository id -> (status, error code of the hub or "").
        lost: files that are listed but answer 404.
        corrupt: files whose first byte is wrong on the way.
        requests: (method, path, Range header, Authorization header) of every request.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: set[str] = field(default_factory=lambda: {"model.safetensors"})
    drops: dict[str, int] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    url: str = ""

    def gets(self, name: str) -> list[str | None]:
        """The Range headers of the downloads of one file."""
        return [byte_range for method, path, byte_range, _ in self.requests if method == "GET" and path.endswith(name)]

    def listing(self, repo_id: str) -> dict[str, object]:
        """What the hub's API says about a repository."""
        siblings = []
        for name, content in self.repos[repo_id].items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"rfilename": name, "size": len(content), "blobId": blob}
            if name in self.large:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}  # type: ignore[assignment]
            siblings.append(entry)
        return {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}


@contextmanager
def serve(stub: HubStub) -> Iterator[HubStub]:
    """Run the stub in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            stub.requests.append(("GET", self.path, self.headers.get("Range"), self.headers.get("Authorization")))
            path = self.path.split("?")[0].strip("/")
            if path.startswith(("api/models/", "api/datasets/")):
                self._answer_api(path.split("/", 2)[2])
            else:
                repo_id, _, name = path.removeprefix("datasets/").partition(f"/resolve/{COMMIT}/")
                self._answer_file(repo_id, name)

        def _answer_api(self, repo_id: str) -> None:
            if repo_id in stub.refuse:
                self._refuse(*stub.refuse[repo_id])
            elif repo_id not in stub.repos:
                self._refuse(401, "RepoNotFound")
            else:
                self._send(200, json.dumps(stub.listing(repo_id)).encode(), {"Content-Type": "application/json"})

        def _answer_file(self, repo_id: str, name: str) -> None:
            content = stub.repos.get(repo_id, {}).get(name)
            if content is None or name in stub.lost:
                self._refuse(404, "EntryNotFound")
                return
            if name in stub.corrupt:
                content = bytes([content[0] ^ 1]) + content[1:]
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
            cut = stub.drops.get(name, 0) > 0
            stub.drops[name] = stub.drops.get(name, 0) - 1
            self._send(206 if start else 200, content[start:], headers, cut=cut)

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"", {"X-Error-Code": code} if code else {})

        def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_for_tests(
    repos: dict[str, dict[str, bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubStub]:
    """Run a stub that huggingface_hub asks, with `folder` as the working directory and no account or cache."""
    from huggingface_hub import constants

    monkeypatch.chdir(folder)
    monkeypatch.setattr(transfer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no_token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    set_offline(monkeypatch, False)
    with serve(HubStub(repos=repos)) as stub:
        set_endpoint(monkeypatch, stub.url)
        yield stub


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does when huggingface_hub is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def set_offline(monkeypatch: pytest.MonkeyPatch, offline: bool = True) -> None:
    """What HF_HUB_OFFLINE does when huggingface_hub is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
