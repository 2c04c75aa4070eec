# Licensed under the Apache License 2.0, see the LICENSE file.

"""Speculative decoding changes how fast tokens come, not which: greedy ones are equal, samples equally likely."""

from __future__ import annotations

import copy
import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from litgpt import LLM
from litgpt.__main__ import main as litgpt_main
from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.generate import speculative
from litgpt.generate.compiled import CompiledDecode
from litgpt.generate.engine import Engine
from litgpt.generate.row import Row
from litgpt.generate.sampling import Sampler, probabilities
from litgpt.generate.speculative import Draft, DraftModel, PromptLookup, Speculation, check, check_same_vocabulary
from litgpt.generate.types import Result, SamplingParams
from litgpt.kvcache import KVCache
from litgpt.kvcache.prefix import PrefixStore
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer
from tests.tiny import random_ids, tiny_pair
from tests.tiny_text import EOS, VOCAB_SIZE, ScriptedModel, tiny_config, write_tokenizer
from tests.toy_tokenizers import byte_level, write_folder

CPU = torch.device("cpu")
WINDOWED = {"sliding_window_size": 5, "sliding_window_indices": [1, 0]}
PROMPTS = [[1, 2, 3], [4, 9] * 11, [5, 6, 7, 8, 9, 5, 6, 7]]


def random_model(seed: int = 3, **changes: Any) -> GPT:
    """A model whose answers vary; in float64, so that no choice hangs on how many tokens are computed at once."""
    torch.manual_seed(seed)
    model = GPT(tiny_config(**changes)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


class Prophet:
    """A drafter that knows how rows go on, and lies now and then."""

    def __init__(self, answers: Sequence[list[int]], lies: float = 0.0) -> None:
        self.answers = answers
        self.lies = lies
        self.random = random.Random(0)

    def draft(self, tokens: list[int], n: int) -> Draft:
        (answer,) = [a for a in self.answers if a[: len(tokens)] == tokens][:1] or [tokens]
        ids = answer[len(tokens) : len(tokens) + self.random.randint(0, n)]
        return Draft([int(i != 1) if self.random.random() < self.lies else i for i in ids])


def prophecy(answers: Sequence[list[int]], k: int = 6, lies: float = 0.0) -> Speculation:
    return Speculation(lambda row, sampler: Prophet(answers, lies), k)


def outcome(result: Result) -> tuple:
    return result.text, result.token_ids, result.finish_reason


# Greedy rows


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "dense"),
        (WINDOWED, "dense"),
        ({}, "window:6"),
        ({}, "sinks:2+6"),
        ({"attention_logit_softcapping": 3.0, "parallel_residual": False}, "dense"),
        (WINDOWED, "int8"),
        ({}, "int4"),
    ],
)
@pytest.mark.parametrize("drafter", ["lookup", "model", "prophet"])
def test_greedy_rows_equal_plain_ones(changes: dict[str, Any], kind: str, drafter: str) -> None:
    model = random_model(**changes)
    generator = random.Random(5)
    prompts = [[generator.randrange(12) for _ in range(generator.randint(1, 30))] for _ in range(8)]
    params = [SamplingParams(max_new_tokens=generator.randint(1, 30), temperature=0) for _ in prompts]
    plain = Engine(model, kv_cache=kind).generate(prompts, params)
    speculation = {
        "lookup": Speculation(lambda row, sampler: PromptLookup(min_ngram=1), 5),
        "model": Speculation.by_model(Engine(random_model(seed=4, n_layer=1, **changes)), 3),
        "prophet": prophecy([p + r.token_ids for p, r in zip(prompts, plain, strict=True)], lies=0.2),
    }[drafter]
    results = Engine(model, kv_cache=kind, speculation=speculation).generate(prompts, params)
    assert list(map(outcome, results)) == list(map(outcome, plain))
    for result in results:
        timing = result.timing
        assert timing.new_tokens == 1 + timing.steps + timing.accepted  # the last step is not cut short here
    if drafter != "model":  # a random model does not agree with another one
        assert sum(r.timing.accepted for r in results) > 5
        assert sum(r.timing.steps for r in results) < sum(r.timing.steps for r in plain)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "gpt_oss"])
def test_greedy_rows_of_families_equal_plain_ones(name: str) -> None:
    model = copy.deepcopy(tiny_pair(name)[1]).double()
    prompts = [random_ids((n,), seed=n).tolist() for n in (3, 21, 9)]
    params = SamplingParams(max_new_tokens=20, temperature=0)
    plain = Engine(model).generate(prompts, params)
    speculation = prophecy([p + r.token_ids for p, r in zip(prompts, plain, strict=True)], lies=0.2)
    results = Engine(model, speculation=speculation).generate(prompts, params)
    assert list(map(outcome, results)) == list(map(outcome, plain))
    assert sum(r.timing.accepted for r in results) > 5


def test_a_right_draft_saves_forward_passes() -> None:
    script = [0, *range(1, 30)]
    model = ScriptedModel([script])
    (result,) = Engine(model, speculation=prophecy([script])).generate(
        [[0]], SamplingParams(max_new_tokens=29, temperature=0)
    )
    assert result.token_ids == script[1:]
    assert model.n_forwards == 1 + result.timing.steps
    assert result.timing.drafted == result.timing.accepted == 28 - result.timing.steps
    assert result.timing.tokens_per_step == 28 / result.timing.steps > 2


def test_the_same_model_is_always_right() -> None:
    model = random_model(**WINDOWED)
    speculation = Speculation.by_model(Engine(model), 4)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1, top_k=30, top_p=0.9)):
        (result,) = Engine(model, speculation=speculation).generate([PROMPTS[0]], replace(params, max_new_tokens=51))
        assert (result.timing.steps, result.timing.drafted, result.timing.accepted) == (10, 40, 40)
        assert result.timing.tokens_per_step == 5


@pytest.mark.slow
def test_a_real_model_copies_faster(smollm2_gguf: Path) -> None:
    llm = LLM.load(smollm2_gguf, precision="32-true")
    request = "Repeat word for word: Llamas are social animals and live with others as a herd. Their wool is soft."
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "return_details": True}
    plain, result = llm.generate(request, **options), llm.generate(request, **options, speculate="lookup")
    assert outcome(result) == outcome(plain)
    print(f"SmolLM2, copying: {result.timing.tokens_per_step:.1f} tokens a step")
    assert result.timing.tokens_per_step > 3


@pytest.mark.slow
def test_a_real_model_past_its_window(gemma3_gguf: Path) -> None:
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    llm = LLM.load(gemma3_gguf, precision="32-true", prompt_style="raw")
    prompt = llm.tokenizer.decode(llm.tokenizer.encode(text, bos=False)[:620])
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "return_details": True}
    plain, result = llm.generate(prompt, **options), llm.generate(prompt, **options, speculate="lookup")
    assert plain.prompt_tokens > 512
    assert outcome(result) == outcome(plain)
    assert result.timing.drafted > result.timing.accepted  # some were taken back


# Ends, in the middle of an accepted draft too

answers = st.lists(st.sampled_from([*b"ab ", *"é😀".encode(), 0xFF, EOS]), max_size=25)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@settings(max_examples=80, deadline=None)
@given(
    answer=answers,
    stop=st.lists(st.text("ab é😀", min_size=1, max_size=3), max_size=2),
    stop_sequences=st.lists(st.lists(st.sampled_from([*b"ab "]), min_size=1, max_size=3).map(tuple), max_size=2),
    budget=st.integers(1, 30),
    context=st.integers(2, 40),
    include_stop=st.booleans(),
    k=st.integers(1, 9),
)
def test_ends_and_streams_equal_plain_ones(
    tokenizer: Tokenizer,
    answer: list[int],
    stop: list[str],
    stop_sequences: list[tuple[int, ...]],
    budget: int,
    context: int,
    include_stop: bool,
    k: int,
) -> None:
    script = [0, *answer]
    params = SamplingParams(
        max_new_tokens=budget,
        temperature=0,
        stop=tuple(stop),
        stop_sequences=tuple(stop_sequences),
        stop_ids=frozenset({EOS}),
        include_stop=include_stop,
        logprobs=1,
    )
    streams = []
    for speculation in (None, prophecy([script + [0] * 40], k, lies=0.1)):
        engine = Engine(ScriptedModel([script], context=context), tokenizer, speculation=speculation)
        streams.append(engine.stream([[0]], params))
    assert list(streams[0]) == list(streams[1])
    plain, result = (stream.results[0] for stream in streams)
    assert outcome(result) == outcome(plain)
    assert result.logprobs == plain.logprobs
    assert result.timing.new_tokens == plain.timing.new_tokens


def test_logprobs_and_penalty_equal_plain_ones() -> None:
    model = random_model()
    params = SamplingParams(max_new_tokens=25, temperature=0, repetition_penalty=1.5, logprobs=2)
    plain = Engine(model).generate(PROMPTS, params)
    speculation = prophecy([p + r.token_ids for p, r in zip(PROMPTS, plain, strict=True)], lies=0.2)
    results = Engine(model, speculation=speculation).generate(PROMPTS, params)
    for result, expected in zip(results, plain, strict=True):
        assert result.token_ids == expected.token_ids
        assert result.logprobs is not None
        assert expected.logprobs is not None
        for got, want in zip(result.logprobs, expected.logprobs, strict=True):
            assert got.token_id == want.token_id
            assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
            assert [i for i, _ in got.top] == [i for i, _ in want.top]
    assert sum(r.timing.accepted for r in results) > 10


# Sampled rows


class MarkovModel(nn.Module):
    """Logits that depend on the last token only."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        size = len(table)
        self.table = table
        self.config = tiny_config(n_layer=1, vocab_size=size, padded_vocab_size=size)
        self.max_seq_length = 64
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(size, 1)})

    def forward(self, idx: torch.Tensor, cache: KVCache, step: Step, last_only: bool = False) -> torch.Tensor:
        cache.commit(step)
        if last_only and step.last is not None:
            return self.table[idx.gather(1, step.last[:, None])]
        return self.table[idx[:, -1:] if last_only else idx]


def markov(seed: int, size: int = 6) -> Any:
    return MarkovModel(1.5 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))


def chi_square(counts: Counter, expected: dict[Any, float]) -> float:
    """How many standard deviations the statistic is above its mean; rare outcomes are taken together."""
    n = counts.total()
    assert not set(counts) - {outcome for outcome, p in expected.items() if p > 0}, "an impossible outcome came"
    common = {outcome: p for outcome, p in expected.items() if n * p >= 5}
    cells = [(counts[outcome], n * p) for outcome, p in common.items()]
    rest = n - sum(count for count, _ in cells), n * (1 - sum(common.values()))
    cells += [rest] if rest[1] > 1 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 3, "temperature": 0.8},
    "top_p": {"top_p": 0.8},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
}


def follow_up(model: Any, params: SamplingParams, last: int, length: int) -> dict[tuple[int, ...], float]:
    """The probabilities of all sequences of `length` tokens after `last`."""
    table = torch.stack([probabilities(row, params) for row in model.table]).tolist()
    expected = {}
    for tokens in itertools.product(range(len(table)), repeat=length):
        p = 1.0
        for before, token in itertools.pairwise((last, *tokens)):
            p *= table[before][token]
        expected[tokens] = p
    return expected


def sample_many(model: Any, speculation: Speculation, params: SamplingParams, n: int) -> Counter:
    counts: Counter = Counter()
    engine = Engine(model, speculation=speculation, max_batch_size=250)
    seeds = [replace(params, seed=seed) for seed in range(n)]
    for result in engine.generate([[0, 1, 2, 0, 1]] * n, seeds):
        counts[tuple(result.token_ids)] += 1
    return counts


DRAFTERS: dict[str, Callable[[], Speculation]] = {
    "lookup": lambda: Speculation(lambda row, sampler: PromptLookup(min_ngram=1), 3),
    "model": lambda: Speculation.by_model(Engine(markov(2)), 2),
    "smaller vocabulary": lambda: Speculation.by_model(Engine(markov(2, size=5)), 2),
    "larger vocabulary": lambda: Speculation.by_model(Engine(markov(2, size=8)), 2),
}


CASES = [*itertools.product(("lookup", "model"), SAMPLING), ("smaller vocabulary", "all"), ("larger vocabulary", "all")]


@pytest.mark.parametrize(("drafter", "sampling"), CASES)
def test_samples_are_distributed_as_the_model_says(drafter: str, sampling: str) -> None:
    model = markov(1)
    if drafter == "smaller vocabulary":
        model.table[:, 5] = -9.0  # the drafter cannot go on from what it does not know
    params = SamplingParams(max_new_tokens=4, **SAMPLING[sampling])
    counts = sample_many(model, DRAFTERS[drafter](), params, 1500)
    deviation = chi_square(counts, follow_up(model, params, last=1, length=4))
    assert deviation < 4


def test_a_wrong_rule_of_acceptance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always accepting, and drawing by p in place of what was rejected, both show."""
    model, params = markov(1), SamplingParams(max_new_tokens=4)
    expected = follow_up(model, params, last=1, length=4)
    with monkeypatch.context() as patch:
        patch.setattr(speculative, "uniform", lambda *args: torch.zeros(()))
        assert chi_square(sample_many(model, DRAFTERS["model"](), params, 1500), expected) > 10
    draw = speculative.draw_index

    def draw_by_p(weights: torch.Tensor, generator: Any) -> torch.Tensor:
        return draw(torch.where(weights.sum() < 0.999, weights + 0.5, weights), generator)

    monkeypatch.setattr(speculative, "draw_index", draw_by_p)
    assert chi_square(sample_many(model, DRAFTERS["model"](), params, 1500), expected) > 10


@pytest.mark.parametrize("certain", [True, False])
def test_the_check_of_one_token(certain: bool) -> None:
    """The first token is distributed by p whatever q is."""
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.25] * 4]).log()
    q = torch.tensor([[0.1, 0.6, 0.0, 0.3]], dtype=torch.float64)
    sampler = Sampler(SamplingParams(seed=0), [0], 4, CPU)
    counts: Counter = Counter()
    for _ in range(8000):
        token = 1 if certain else int(speculative.draw_index(q[0], sampler.generator))
        counts[check(sampler, logits, Draft([token], None if certain else q))[0]] += 1
    assert chi_square(counts, {0: 0.5, 1: 0.1, 2: 0.3, 3: 0.1}) < 4


def test_a_row_does_not_depend_on_the_others() -> None:
    model, draft = random_model(), random_model(seed=4, n_layer=1)
    params = [SamplingParams(max_new_tokens=20, seed=i, top_k=10, temperature=0.9) for i in range(3)]
    for make in (lambda: Speculation.parse("lookup"), lambda: Speculation.by_model(Engine(draft), 3)):
        together = Engine(model, speculation=make()).generate(PROMPTS, params)
        for prompt, p, result in zip(PROMPTS, params, together, strict=True):
            (alone,) = Engine(model, speculation=make()).generate([prompt], p)
            assert alone.token_ids == result.token_ids


# Drafters


@pytest.mark.parametrize(
    ("tokens", "n", "ids"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # the most recent of equals
        ([5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 2, [3, 1]),  # the longest
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([7, 7, 7], 4, [7, 7, 7, 7]),  # loops
        ([0, 1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
    ],
)
def test_prompt_lookup(tokens: list[int], n: int, ids: list[int]) -> None:
    assert PromptLookup().draft(tokens, n) == Draft(ids)
    drafter = PromptLookup()
    for end in range(1, len(tokens), 2):  # the same, met bit by bit; what was wrong before makes it shorter
        drafter.draft(tokens[:end], n)
    found = drafter.draft(tokens, n).ids
    assert found == ids[: len(found)]
    assert bool(found) == bool(ids)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), n=st.integers(1, 8))
def test_prompt_lookup_equals_a_search(tokens: list[int], n: int) -> None:
    expected: list[int] = []
    for size in (2, 3):
        for start in range(size, len(tokens)):
            if tokens[start - size : start] == tokens[-size:]:
                longer = tokens + (tokens[start:] * n)
                expected = longer[start : start + n]
    assert PromptLookup().draft(tokens, n).ids == expected


def lengths_of_drafts(answer: list[int], start: int) -> list[int]:
    """Of the drafts on the way through an answer, of at most 8 tokens each."""
    drafter, lengths = PromptLookup(), []
    while start < len(answer):
        ids = drafter.draft(answer[:start], 8).ids
        lengths.append(len(ids))
        right = [guess == token for guess, token in zip(ids, answer[start:], strict=False)]
        start += 1 + [*right, False].index(False)
    return lengths


def test_lookup_drafts_less_where_it_is_wrong() -> None:
    text = list(range(40))
    copied = lengths_of_drafts([*text, 90, 0, 1, *text[2:]], start=43)
    assert copied == [8, 8, 8, 8, 8]
    generator = random.Random(0)
    free = lengths_of_drafts([generator.randrange(8) for _ in range(1000)], start=50)
    assert sum(free) < 1.4 * len(free)  # 8 times as many before
    # wrong once, then a copy again: as long as ever after a few steps
    back = lengths_of_drafts([*text, 90, 0, 1, 95, 0, 1, *text[2:]], start=43)
    assert back[0] == 8
    assert [n for n in back if n][1:6] == [1, 1, 3, 7, 8]  # the first of them goes on as if 95 followed again


@pytest.mark.parametrize("changes", [{}, WINDOWED])
def test_a_draft_model_keeps_in_step(changes: dict[str, Any]) -> None:
    """Its guesses are those of the model without a cache, however many were taken before."""
    model = random_model(n_layer=2, **changes)
    engine = Engine(model)
    params = SamplingParams(max_new_tokens=None, seed=0, temperature=0.7, top_k=20)
    tokens = list(PROMPTS[2])
    sampler = Sampler(params, tokens, VOCAB_SIZE, CPU)
    drafter = DraftModel(engine, Row(0, list(tokens), params, 64, None), sampler)
    generator = random.Random(1)
    while len(tokens) < 63:
        ids, probs = drafter.draft(tokens, generator.randint(1, 6))
        assert probs is not None
        for i in range(len(ids)):
            with torch.no_grad():
                logits = model(torch.tensor([tokens + ids[:i]]))[0, -1]
            torch.testing.assert_close(probs[i], probabilities(logits, params), atol=1e-6, rtol=0)
            assert probs[i, ids[i]] > 0
        taken = ids[: generator.randint(0, len(ids))]
        tokens = (tokens + taken + [generator.randrange(VOCAB_SIZE) for _ in range(generator.choice([1, 1, 4]))])[:63]


def test_a_draft_model_with_a_short_context_falls_silent() -> None:
    model, draft = random_model(), random_model(seed=4, n_layer=1, block_size=16)
    plain = Engine(model).generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20))
    engine = Engine(model, speculation=Speculation.by_model(Engine(draft), 3))
    results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert results[0].timing.drafted > 0
    assert results[1].timing.drafted == 0  # its prompt is too long already


def test_drafts_are_no_longer_than_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    draft = PromptLookup.draft

    def note(self: PromptLookup, tokens: list[int], n: int) -> Draft:
        asked.append(n)
        return draft(self, tokens, n)

    monkeypatch.setattr(PromptLookup, "draft", note)
    model = random_model(sliding_window_size=5)
    params = SamplingParams(max_new_tokens=50, temperature=0)
    (plain,) = Engine(model).generate([[4, 9] * 6], params)
    (result,) = Engine(model, speculation=Speculation.parse("lookup:100")).generate([[4, 9] * 6], params)
    assert result.token_ids == plain.token_ids
    assert max(asked) == 16


def test_compiled_steps_serve_where_there_is_no_draft() -> None:
    model = random_model(**WINDOWED)
    params = SamplingParams(max_new_tokens=30, temperature=0)
    (plain,) = Engine(model).generate([PROMPTS[0]], params)
    n_compiled = 0
    engine = Engine(model, compile=True, speculation=prophecy([PROMPTS[0] + plain.token_ids], k=2, lies=0.3))
    decode = CompiledDecode(model, backend="eager")

    def count(idx: torch.Tensor, cache: KVCache, step: Step) -> torch.Tensor:
        nonlocal n_compiled
        n_compiled += 1
        return decode(idx, cache, step)

    engine._decode_step = count
    (result,) = engine.generate([PROMPTS[0]], params)
    assert result.token_ids == plain.token_ids
    assert 0 < n_compiled < result.timing.steps


# What a person can do wrong


@pytest.mark.parametrize("kind", ["h2o:8", "snap:8", "tova:8", "h2o:8,int8"])
def test_kinds_that_evict_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match="cannot take tokens back"):
        Engine(random_model(), kv_cache=kind, speculation=Speculation.parse("lookup"))


def test_a_draft_engine_that_cannot_go_back_or_stores_prefixes_is_refused() -> None:
    draft = random_model(seed=4, n_layer=1)
    with pytest.raises(UserError, match="prefix store"):
        Speculation.by_model(Engine(draft, prefix_store=PrefixStore(2**20)), 3)
    with pytest.raises(UserError, match="cannot take tokens back"):
        Speculation.by_model(Engine(draft, kv_cache="h2o:8"), 3)


@pytest.mark.parametrize("text", ["magic", "lookup:", "lookup:x", "lookup:0", "lookup:-1", ""])
def test_bad_ways_to_speculate(text: str) -> None:
    with pytest.raises(UserError, match="speculat"):
        Speculation.parse(text)


def test_nan_is_named() -> None:
    model = markov(1)
    model.table[3] = float("nan")
    model.table[:3, 3] = 50  # from anywhere to where there are no numbers
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="logits contain NaN"):
            Engine(model, speculation=Speculation.parse("lookup")).generate(
                [[0, 1]], SamplingParams(temperature=temperature)
            )


def test_other_vocabularies_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    check_same_vocabulary(tokenizer, tokenizer)
    other = Tokenizer(write_folder(tmp_path / "other", byte_level()))
    with pytest.raises(UserError, match=r"another vocabulary: token .* is .* there and"):
        check_same_vocabulary(other, tokenizer)


# The commands


def write_checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    write_tokenizer(folder)
    """A model that soon repeats itself: it says eight letters, each led to by the one before."""
    model = random_model(seed, **changes).float()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.proj.weight.zero_()
        model.lm_head.weight[: ord("a")] = 0
        model.lm_head.weight[ord("i") :] = 0
    torch.save(model.state_dict(), folder / "lit_model.pth")
    model.config.save(folder / "model_config.yaml")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(folder / "draft", 4, n_layer=1), write_checkpoint(folder / "target", 3)


OPTIONS = ["--temperature=0", "--precision=64-true", "--max_new_tokens=20", "--prompt=a loop, a loop, a "]


def test_generate_with_lookup(checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target = str(checkpoints[1])
    litgpt_main(["generate", target, *OPTIONS])
    plain = capsys.readouterr()
    litgpt_main(["generate", target, *OPTIONS, "--speculate=lookup"])
    out, err = capsys.readouterr()
    assert out == plain.out
    assert "drafted tokens accepted" in err
    assert "tokens a step" in err
    assert "speculation" not in plain.err
    with pytest.raises(SystemExit):
        litgpt_main(["generate", target, "--speculate=magic"])
    assert "use lookup" in capsys.readouterr().err


def test_generate_speculatively(checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    draft, target = map(str, checkpoints)
    litgpt_main(["generate", target, *OPTIONS])
    plain = capsys.readouterr().out
    litgpt_main(["generate_speculatively", draft, target, *OPTIONS, "--speculative_k=2"])
    out, err = capsys.readouterr()
    assert out == plain
    assert "drafted tokens accepted" in err
    litgpt_main(["generate_speculatively", target, target, *OPTIONS, "--speculative_k=4"])
    out, err = capsys.readouterr()
    assert out == plain
    assert "15 of 15 drafted tokens accepted, 4.75 tokens a step" in err


def test_generate_speculatively_with_another_vocabulary(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_checkpoint(tmp_path / "draft", 4, vocab_size=512, padded_vocab_size=512)
    write_folder(draft, byte_level())
    with pytest.raises(SystemExit):
        litgpt_main(["generate_speculatively", str(draft), str(checkpoints[1]), *OPTIONS])
    assert "the draft model has another vocabulary" in capsys.readouterr().err


def test_llm(checkpoints: tuple[Path, Path]) -> None:
    llm = LLM.load(checkpoints[1], precision="64-true")
    request: dict[str, Any] = {"prompt": "a loop, a loop, a ", "temperature": 0, "max_new_tokens": 20}
    result = llm.generate(**request, speculate="lookup:4", return_details=True)
    assert result.text == llm.generate(**request)
    assert result.timing.drafted > 0
    with pytest.raises(UserError, match="cannot take tokens back"):
        LLM.load(checkpoints[1], kv_cache="h2o:8").generate("x", speculate="lookup")


def test_importing_the_command_does_not_import_torch() -> None:
    code = "import sys, litgpt.generate.speculative_decoding; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
