# Licensed under the Apache License 2.0, see the LICENSE file.

"""The README of the caches: its policy runs, and its table says what the code does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import litgpt.kvcache
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.generate.engine import Engine
from litgpt.generate.types import SamplingParams
from litgpt.kvcache import KVCache
from litgpt.kvcache.base import DEFAULT_SLACK
from litgpt.kvcache.exact import ExactCache
from litgpt.kvcache.memory import bytes_per_token
from litgpt.kvcache.policies import POLICIES, EvictingCache, register_policy
from litgpt.kvcache.registry import STORES, usage
from litgpt.kvcache.spec import CacheKind
from tests.test_prefix import feed, model_of, tokens_of

FOLDER = Path(litgpt.kvcache.__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")
HEADER = ["kind", "what is kept", "KiB a token", "exact", "compilable", "rewind", "needs weights", "chunk-invariant"]
NUMBERS = {"N": "20", "S+N": "4+20"}
LENGTH = 56  # more than any budget and slack


def table() -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("|")]
    rows = [[cell.strip(" `") for cell in line] for line in lines if len(line) == len(HEADER)]
    assert rows[0] == HEADER
    return rows[2:]


def kind_of(form: str) -> str:
    name, _, argument = form.partition(":")
    return f"{name}:{NUMBERS[argument]}" if argument else name


def test_the_table_is_complete() -> None:
    assert [row[0].partition(":")[0] for row in table()] == [*POLICIES, *STORES[1:]]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
@torch.no_grad()
def test_the_table_is_true(row: list[str]) -> None:
    form, _, kib, exact, compilable, rewind, needs_weights, chunk_invariant = row
    kind, model = kind_of(form), model_of("llama")
    assert float(kib) * 1024 == bytes_per_token(Config.from_name("Llama-3-8B"), kind, torch.bfloat16)
    cache = KVCache.from_config(model.config, kind, 1, 64, torch.float64)
    tokens = tokens_of(LENGTH)
    for i in range(0, LENGTH, 8):
        logits = feed(model, cache, [tokens[i : i + 8]])[0]
    error = (logits - model(torch.tensor([tokens]))[0, -1]).abs().max()
    assert (error < 1e-10) == (exact == "yes")
    assert cache.max_rewind(0) == {"all": LENGTH, "none": 0, str(DEFAULT_SLACK): DEFAULT_SLACK}[rewind]
    words = [compilable, cache.layer_caches()[0].needs_weights, chunk_invariant]
    assert words == [
        "yes" if cache.compilable else "no",
        needs_weights == "yes",
        "yes" if cache.chunk_invariant else "no",
    ]


def test_every_file_is_named() -> None:
    files = README.partition("## Files")[2]
    for path in FOLDER.glob("*.py"):
        assert f"`{path.name}`" in files or path.name == "__init__.py", path.name


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """The README's policy as a module, registered while the test runs."""
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    module = ModuleType("my_policy")
    sys.modules["my_policy"] = module
    exec(compile(code, "my_policy", "exec"), module.__dict__)
    yield module
    del POLICIES["fading"], sys.modules["my_policy"]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@torch.no_grad()
def test_the_policy_runs(name: str, example: ModuleType) -> None:
    model = model_of(name)
    assert str(CacheKind.parse("fading:12,int8")) == "fading:12,int8"
    assert "fading:N" in usage()
    params = SamplingParams(max_new_tokens=12, temperature=0, stop_ids=frozenset())
    prompts = [tokens_of(45), tokens_of(5)]
    engine = Engine(model, kv_cache="fading:12", prefill_chunk=20)
    together = engine.generate(prompts, params)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    # with room for everything it is exact
    plenty = Engine(model, kv_cache="fading:64").generate(prompts, params)
    dense = Engine(model).generate(prompts, params)
    assert [r.token_ids for r in plenty] == [r.token_ids for r in dense]


@torch.no_grad()
def test_the_policy_keeps_its_budget_and_the_newest(example: ModuleType) -> None:
    model = model_of("llama")
    cache = KVCache.from_config(model.config, "fading:12", 1, 64, torch.float64)
    for token in tokens_of(LENGTH):
        feed(model, cache, [[token]])
    feed(model, cache, [tokens_of(1)])
    for layer in cache.layer_caches():
        assert isinstance(layer, example.Fading)
        for group in layer.pos[0]:
            held = sorted(group[group >= 0].tolist())
            assert len(held) <= 12 + DEFAULT_SLACK
            assert held[-example.Fading.RECENT :] == list(range(LENGTH + 1 - example.Fading.RECENT, LENGTH + 1))
            assert held[0] < LENGTH - 12, "it keeps more than the newest"


def test_names_of_policies(example: ModuleType) -> None:
    assert register_policy("fading", example.Fading) is example.Fading
    with pytest.raises(ValueError, match="exists already, as Fading"):
        register_policy("fading", EvictingCache)
    for name in ("int8", "plain", "a:b", "A", "", "x,y"):
        with pytest.raises(ValueError, match="cannot be called"):
            register_policy(name, ExactCache)
    with pytest.raises(UserError, match="fading needs how many tokens"):
        CacheKind.parse("fading")
