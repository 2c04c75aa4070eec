# Licensed under the Apache License 2.0, see the LICENSE file.

"""The pure parts of `extensions/benchmark/quality.py`, on tiny models."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.generate.engine import Engine
from litgpt.generate.loading import load
from litgpt.generate.types import SamplingParams
from litgpt.kvcache.spec import CacheKind
from tests.tiny import random_ids, save_tiny
from tests.tiny_text import write_tokenizer

SCRIPTS = Path(__file__).parent.parent / "extensions" / "benchmark"


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("quality")


@pytest.fixture(scope="module")
def texts(quality: Any) -> Any:
    return quality.texts


@pytest.fixture(scope="module")
def report(quality: Any) -> Any:
    return importlib.import_module("quality_report")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same loaded by us with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    theirs = save_tiny("llama", folder, vocab_size=260, max_position_embeddings=256)
    return theirs, load(write_tokenizer(folder), precision="32-true", device="cpu")


def test_budgets_are_shares_of_the_length(quality: Any) -> None:
    specs = {kind: quality.spec_of(kind, 2048) for kind in quality.KINDS}
    assert specs["dense"] == "dense"
    assert specs["int4"] == "int4"
    assert specs["h2o 25%"] == "h2o:512"
    assert specs["sinks 50%"] == "sinks:4+1020"
    for kind, spec in specs.items():
        parsed = CacheKind.parse(spec)
        if "%" in kind:  # sinks count too
            assert parsed.n_sink + (parsed.budget or 0) == 2048 * int(kind.split()[1].rstrip("%")) // 100


@pytest.mark.parametrize("kind", ["dense", "window:70", "h2o:70", "snap:70", "sinks:4+66"])
def test_losses_are_those_of_transformers_while_nothing_is_evicted(quality: Any, pair: Any, kind: str) -> None:
    theirs, loaded = pair
    ids = random_ids((1, 70), vocab_size=260)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    engine = Engine(loaded.model, kv_cache=kind, prefill_chunk=23)
    found = quality.losses(engine, ids[0].tolist(), quality.new_cache(engine, 70))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_losses_of_a_window_are_those_of_a_model_with_that_window(quality: Any, pair: Any) -> None:
    _, loaded = pair
    ids = random_ids((1, 60), vocab_size=260)[0].tolist()
    engine = Engine(loaded.model, kv_cache="window:9", prefill_chunk=20)
    found = quality.losses(engine, ids, quality.new_cache(engine, 60))
    dense = Engine(loaded.model, prefill_chunk=20)
    assert not torch.allclose(found[9:], quality.losses(dense, ids, quality.new_cache(dense, 60))[9:], atol=1e-3)
    model = loaded.model
    windows = [block.attn.window for block in model.transformer.h]
    try:
        for block in model.transformer.h:
            block.attn.window = 9
        with torch.inference_mode():
            logits = model(torch.tensor([ids]))
    finally:
        for block, window in zip(model.transformer.h, windows, strict=True):
            block.attn.window = window
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_answer_is_scored_token_by_token(quality: Any, pair: Any) -> None:
    theirs, loaded = pair
    engine = quality.engine_for(loaded, "dense")
    prompt = random_ids((1, 40), vocab_size=260)[0].tolist()
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    greedy = Engine(loaded.model).generate([prompt], params)[0].token_ids
    wrong = [(token + 1) % 260 for token in greedy]
    model_after_wrong = Engine(loaded.model).generate([[*prompt, wrong[0]]], params)[0].token_ids[:3]
    cases = ((greedy, True), ([*greedy[:3], wrong[3]], False), ([wrong[0], *model_after_wrong], False))
    for answer, is_greedy in cases:  # one wrong token anywhere is a wrong number
        values, found = quality.answer_logprobs(engine, prompt, answer)
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        assert values == pytest.approx(expected, abs=1e-3)
        assert found is is_greedy


def test_question_ends_where_the_number_begins(quality: Any, texts: Any, pair: Any) -> None:
    _, loaded = pair
    decode = loaded.tokenizer.decode
    for needle in texts.make_needles(5, seed=3):
        prompt, answer = quality.question(loaded, "Some text.\n", needle)
        assert decode(answer) == needle.number
        assert decode(prompt, skip_special_tokens=False).startswith("<s><|user|>user:")
        assert decode(prompt).endswith(f"What is the magic number of {needle.city}?{needle.lead} ")
        assert "Some text.\n" in decode(prompt)


def test_needles_hide_at_their_depths(texts: Any) -> None:
    needles = texts.make_needles(3, seed=1)
    assert needles == texts.make_needles(3, seed=1)
    assert needles != texts.make_needles(3, seed=2)
    assert len({needle.city for needle in needles}) == 3
    lines = [f"{i}\n" for i in range(100)]
    hidden = texts.hide(lines, needles, (0.9, 0.1, 0.5)).splitlines(keepends=True)
    assert [line for line in hidden if line in lines] == lines
    places = {line: i for i, line in enumerate(hidden)}
    assert [places[needle.sentence] for needle in needles] == [92, 10, 51]


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (2, 0), (3, 1), (8, 2), (9, 3), (10**6, 10)])
def test_most_lines(texts: Any, length: int, expected: int) -> None:
    lines = ["abc"] * 10
    assert texts.most_lines(lines, length, lambda part: sum(map(len, part))) == lines[:expected]


def test_results_are_on_disk_at_once(quality: Any, tmp_path: Path) -> None:
    results = quality.Results(tmp_path / "results.json")
    key = results.key("model", "needle 0", 512, "h2o 25%")
    assert key not in results
    results.add(key, {"found": [True, False], "logprob": [-0.1, -2.0]})
    again = quality.Results(tmp_path / "results.json")
    assert key in again
    assert again.cells == results.cells


CELLS = {
    "A | perplexity | 64 | dense": {"perplexity": 9.0, "second_half": 8.0, "bytes": 2_000_000},
    "A | perplexity | 64 | h2o 25%": {"perplexity": 11.0, "second_half": 12.0, "bytes": 500_000},
    "A | needle 0 | 64 | dense": {"found": [True, True, False], "logprob": [-0.5, -0.25, -1.5]},
    "A | needle 1 | 64 | dense": {"found": [True, True, True], "logprob": [-0.25, -0.25, -0.25]},
    "A | speed | 64 | dense": {"tokens_per_second": 12.34},
    "B | needle 0 | 128 | int4": {"found": [False] * 3, "logprob": [-3.0] * 3},
}


def test_table(quality: Any, report: Any) -> None:
    text = report.table(CELLS, quality.KINDS)
    assert "| dense | 2.0 | 9.000 | 8.000 | 5/6, -0.50 | 12.3 |" in text
    assert "| h2o 25% | 0.5 | 11.000 | 12.000 |  |  |" in text
    assert "| int4 | 0/3, -3.00 |" in text


def test_plot(quality: Any, report: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(CELLS, quality.KINDS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert math.isclose(report.CHANCE, math.log(0.1), abs_tol=0.01)
