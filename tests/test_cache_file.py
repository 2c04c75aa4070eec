# Licensed under the Apache License 2.0, see the LICENSE file.

"""Caches on disk: what is loaded goes on like what was saved, and anything else is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from litgpt.checkpoint.cache_file import fingerprint, load_cache, load_rows, save_cache, save_rows
from litgpt.errors import UserError
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from tests.test_prefix import KINDS, feed, filled, model_of, tokens_of

TOKENS = [tokens_of(40), []]


def saved(path: Path, kind: str, name: str = "llama") -> KVCache:
    """Save a cache with a row of 40 tokens and an empty one."""
    cache = filled(kind, 40, name=name)
    save_cache(path, model_of(name), kind, cache, TOKENS)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_loaded_cache_goes_on_like_the_saved_one(kind: str, name: str, tmp_path: Path) -> None:
    before = saved(tmp_path / "cache", kind, name)
    after, tokens = load_cache(tmp_path / "cache", model_of(name), kind)
    assert tokens == TOKENS
    assert (after.lengths, after.max_length, after.max_rewind(0)) == ([40, 0], 60, before.max_rewind(0))
    for token in tokens_of(4, seed=1):
        logits = [feed(model_of(name), cache, [[token], [token]]) for cache in (before, after)]
        assert torch.equal(*logits)


@torch.no_grad()
def test_one_row_for_a_longer_cache(tmp_path: Path) -> None:
    model, cache = model_of("llama"), filled("dense", 40)
    save_rows(tmp_path / "row", model, "dense", [cache.export_row(0).cut(9)], [tokens_of(40)[:9]])
    assert (tmp_path / "row").stat().st_size < 16_000
    longer, tokens = load_cache(tmp_path / "row", model, "dense", max_length=64)
    logits = feed(model, longer, [[5]])
    torch.testing.assert_close(logits[0], model(torch.tensor([[*tokens[0], 5]]))[0, -1], atol=1e-10, rtol=0)
    with pytest.raises(UserError, match="does not fit a KV cache of 8 tokens"):
        load_cache(tmp_path / "row", model, "dense", max_length=8)
    with pytest.raises(ValueError, match="3 tokens came with a row of 40"):
        save_rows(tmp_path / "row", model, "dense", [cache.export_row(0)], [[1, 2, 3]])


def test_what_does_not_belong_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "cache", model_of("llama")
    saved(path, "dense")
    with pytest.raises(UserError, match="of kind 'dense', not 'window:10'"):
        load_rows(path, model, "window:10")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("transformer.h.1.mlp.proj.weight").mul_(1.01)
    for stranger in (model_of("gemma3_text"), other, copy.deepcopy(model).float()):
        with pytest.raises(UserError, match="another model"):
            load_rows(path, stranger, "dense")
    with pytest.raises(UserError, match="nothing"):
        load_rows(tmp_path / "nothing", model, "dense")
    save_file({}, tmp_path / "weights", {"format": "pt"})
    with pytest.raises(UserError, match="holds no KV cache"):
        load_rows(tmp_path / "weights", model, "dense")


@pytest.mark.parametrize("at", [0, 9, 100, 400, 0.5, -1])
def test_damage_is_found(at: float, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    saved(path, "dense")
    content = bytearray(path.read_bytes())
    content[int(at * len(content)) if isinstance(at, float) else at] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError):
        load_rows(path, model_of("llama"), "dense")
    path.write_bytes(content[:-1])
    with pytest.raises(UserError):
        load_rows(path, model_of("llama"), "dense")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    saved(path, "dense")
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("litgpt.checkpoint.cache_file.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        saved(path, "dense")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_the_fingerprint_is_of_what_is_computed() -> None:
    model = model_of("llama")
    same: GPT = copy.deepcopy(model)
    same.config.name = "renamed"
    assert fingerprint(same) == fingerprint(model)
    same.config.norm_eps *= 2
    assert fingerprint(same) != fingerprint(model)
