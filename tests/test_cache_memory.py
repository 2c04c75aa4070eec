# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a cache takes is known before it is allocated, and one that does not fit is refused with what does."""

from __future__ import annotations

import functools
import logging
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.generate.engine import Engine
from litgpt.generate.types import SamplingParams
from litgpt.kvcache import KVCache, memory
from tests.published_configs import DEEPSEEK_V3
from tests.tiny import NAMES, tiny_hf_config, tiny_pair

KINDS = [
    *("dense", "int8", "int4", "offload", "window:5", "sinks:2+5", "h2o:6", "snap:6", "tova:6"),
    *("h2o:6,int8", "window:5,int4", "tova:6,offload"),
]
CPU = torch.device("cpu")


@functools.cache
def config_of(name: str) -> Config:
    return Config.from_hf(tiny_hf_config(name).to_dict())


@functools.cache
def published(name: str) -> Config:
    return Config.from_hf(DEEPSEEK_V3) if name == "DeepSeek-V3" else Config.from_name(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_estimate_is_what_is_allocated(name: str, kind: str) -> None:
    for dtype, length in ((torch.float32, 50), (torch.bfloat16, 7)):
        cache = KVCache.from_config(config_of(name), kind, 3, length, dtype)
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in cache.buffers()}
        allocated = sum(storages.values())
        assert memory.estimate(config_of(name), kind, 3, length, dtype) == cache.nbytes() == allocated


# 16 bits: 2 (keys and values) * 2 bytes * layers * groups * head size; sliding layers grow no further; a latent of
# 512 + 64. In 8 bits 4 more bytes for 64 channels, in 4 bits 4 more for 32.
BYTES_PER_TOKEN = {
    "Llama-3-8B": {"dense": 4 * 32 * 8 * 128, "int8": 2 * 32 * 8 * (128 + 8), "int4": 2 * 32 * 8 * (64 + 16)},
    "Qwen3-8B": {"dense": 4 * 36 * 8 * 128, "int8": 2 * 36 * 8 * (128 + 8), "int4": 2 * 36 * 8 * (64 + 16)},
    "Gemma-3-4b-it": {"dense": 4 * 5 * 4 * 256, "int8": 2 * 5 * 4 * (256 + 16), "int4": 2 * 5 * 4 * (128 + 32)},
    "DeepSeek-V3": {"dense": 2 * 61 * 576, "int8": 61 * (576 + 36), "int4": 61 * (288 + 72)},
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token(name: str) -> None:
    config = published(name)
    for kind, expected in BYTES_PER_TOKEN[name].items():
        assert memory.bytes_per_token(config, kind) == expected
    assert memory.bytes_per_token(config, "offload") == BYTES_PER_TOKEN[name]["dense"]
    for kind in ("window:1024", "sinks:4+1020", "h2o:1024", "snap:1024", "tova:1024", "h2o:1024,int8"):
        assert memory.bytes_per_token(config, kind) == 0
    assert BYTES_PER_TOKEN["Llama-3-8B"]["dense"] == 131072


def test_table_beside_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parent.parent / "extensions" / "benchmark" / "cache_bytes.py"
    monkeypatch.setattr("sys.argv", [str(script), "4096"])
    runpy.run_path(str(script), run_name="__main__")
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "|" in line}
    assert "| 131072, 512.1 MiB | 147456, 576.1 MiB | 20480," in rows["dense"]
    assert "| 70272, 274.6 MiB |" in rows["dense"]
    assert "| 4997120, 19520.0 MiB |" in rows["LitGPT 0.5.13"]
    assert set(rows) >= {"int8", "int4", "offload", "window:1024", "sinks:4+1020", "h2o:1024", "transformers 5"}


@pytest.mark.parametrize("kind", ["dense", "int4", "h2o:1024"])
@pytest.mark.parametrize("name", ["Llama-3-8B", "Gemma-3-4b-it"])
def test_longest_length_is_the_longest(name: str, kind: str) -> None:
    config = published(name)
    sizes: dict[str, Any] = {"batch_size": 2, "dtype": torch.bfloat16}
    budget = 300 * 2**20
    longest = memory.longest_length(config, kind, budget, **sizes)
    assert memory.estimate(config, kind, length=longest, **sizes) <= budget
    if longest < config.block_size:
        assert memory.estimate(config, kind, length=longest + 1, **sizes) > budget
    assert memory.longest_length(config, kind, 0, **sizes) == 0
    assert memory.longest_length(config, kind, 2**60, limit=77, **sizes) == 77


@pytest.mark.parametrize(
    ("available", "hint"),
    [
        (1000, r"fits up to \d+ tokens; KV cache int8 fits all 8192"),
        (600, r"fits up to 47\d\d tokens; KV cache int8 fits all 8192 in 544.1 MiB"),
        (400, r"fits up to \d+ tokens; KV cache int4 fits all"),
        (140, r"fits up to \d+ tokens; KV cache h2o:1024 fits all"),
        (1, r"fits up to 7 tokens; use fewer rows or a shorter length"),
        (0, r"^use fewer rows or a shorter length"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    monkeypatch: pytest.MonkeyPatch, available: int, hint: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: available * 2**20)
    with pytest.raises(UserError, match=r"dense for 1 x 8192 tokens takes 1.0 GiB, .* free on cpu") as error:
        memory.ensure_fits(published("Llama-3-8B"), "dense", 1, 8192, torch.bfloat16)
    assert re.search(hint, error.value.hint), error.value.hint


def test_smaller_kinds_are_smaller() -> None:
    config = published("Llama-3-8B")
    for kind in ("dense", "int8", "offload", "window:2048", "h2o:1024", "h2o:1024,int8", "sinks:4+1020"):
        others = list(memory.smaller_kinds(kind, 8192))
        assert others
        for other in others:
            assert memory.estimate(config, other, 1, 8192) < memory.estimate(config, kind, 1, 8192), (kind, other)


def test_free_memory_is_known_here() -> None:
    free = memory.available_bytes(CPU)
    assert free is None or 0 < free < 2**50
    assert memory.available_bytes(torch.device("meta")) is None


MEMINFO = "MemTotal:       99999 kB\nMemFree:         1 kB\nMemAvailable:    5000 kB\n"
V2 = {"memory.max": "3000000\n", "memory.current": "2500000\n", "memory.stat": "anon 7\ninactive_file 400000\nx 1\n"}
V1 = {
    "memory.limit_in_bytes": "3000000\n",
    "memory.usage_in_bytes": "2500000\n",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 300000\n",
}
NONE_V1 = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "2500000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 5_120_000),
        ("0::/\n", {}, 5_120_000),
        ("0::/\n", {".": V2}, 900_000),
        ("0::/a/b\n", {"a/b": V2}, 900_000),
        ("0::/a/b\n", {"a": V2, "a/b": {"memory.max": "max\n", "memory.current": "1\n"}}, 900_000),
        ("0::/a/b\n", {"a": V2, "a/b": {**V2, "memory.current": "2999999\n"}}, 400_001),
        ("0::/outside/the/container\n", {".": V2}, 900_000),
        ("0::/a\n", {"a": {**V2, "memory.current": "9000000\n"}}, 0),
        ("0::/a\n", {"a": {**V2, "memory.max": "900000000\n"}}, 5_120_000),
        ("4:memory:/a\n1:cpu:/\n0::/\n", {"memory/a": V1}, 800_000),
        ("4:cpu,memory:/a\n", {"memory": V1, "memory/a": NONE_V1}, 800_000),
        ("4:memory:/a\n", {"memory": NONE_V1}, 5_120_000),
        ("4:cpu:/a\n", {"memory/a": V1}, 5_120_000),
    ],
)
def test_limits_of_containers_count(
    groups: str, files: dict[str, dict[str, str]], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO, encoding="utf-8")
    (proc / "self" / "cgroup").write_text(groups, encoding="utf-8")
    for folder, contents in files.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (cgroups / folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(memory, "PROC", proc)
    monkeypatch.setattr(memory, "CGROUPS", cgroups)
    assert memory.available_bytes(CPU) == free


def test_without_any_figures_there_is_no_telling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.available_bytes(CPU) is None


def test_offloaded_caches_need_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory, "available_bytes", asked.append)
    memory.ensure_fits(config_of("llama"), "offload", device="cuda")
    memory.ensure_fits(config_of("llama"), "int8", device="cuda")
    assert [device.type for device in asked] == ["cpu", "cuda"]


def test_engine_reports_before_it_allocates(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_pair("llama")[1]
    with caplog.at_level(logging.INFO, "litgpt"):
        Engine(model, kv_cache="int8").generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    assert any("KV cache: " in line and "int8" in line and "\n" not in line for line in caplog.messages)
    caplog.clear()
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100)
    with caplog.at_level(logging.INFO, "litgpt"), pytest.raises(UserError, match="KV cache of kind dense for 1 x"):
        Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    assert any("KV cache: " in line for line in caplog.messages)
