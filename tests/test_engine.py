# Licensed under the Apache License 2.0, see the LICENSE file.

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from litgpt.errors import UserError
from litgpt.generate import base
from litgpt.generate.engine import Engine, with_seeds
from litgpt.generate.types import Event, Result, SamplingParams
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer
from tests.tiny_text import EOS, VOCAB_SIZE, ScriptedModel, tiny_config, write_tokenizer

PROMPTS = [[1, 2, 3], [4, 9] * 11, [5, 6, 7, 8, 9]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def random_model(**changes: Any) -> GPT:
    """A model whose answers vary: its weights are large."""
    torch.manual_seed(3)
    model = GPT(tiny_config(**changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture
def model() -> GPT:
    return random_model()


def scripted(answer: list[int], tokenizer: Tokenizer | None, **params: Any) -> tuple[Result, list[Event]]:
    """The result and the events of one row that is made to say `answer`."""
    engine = Engine(ScriptedModel([[0, *answer]], context=len(answer) + 50), tokenizer)
    stream = engine.stream([[0]], SamplingParams(**{"max_new_tokens": len(answer), "temperature": 0, **params}))
    events = list(stream)
    (result,) = stream.results
    assert "".join(event.text for event in events) == result.text
    assert [event.token_id for event in events if event.token_id is not None] == result.token_ids
    return result, events


# Rows of a batch


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({}, 1),
        ({"sliding_window_size": 5}, 4),
        ({"sliding_window_size": 5}, 512),
        ({"attention_logit_softcapping": 3.0, "parallel_residual": False}, 4),
    ],
)
def test_rows_equal_single_runs(changes: dict[str, Any], chunk: int) -> None:
    model = random_model(**changes)
    engine = Engine(model, prefill_chunk=chunk)
    params = [
        SamplingParams(max_new_tokens=20, seed=7),
        SamplingParams(max_new_tokens=33, temperature=0),
        SamplingParams(max_new_tokens=8, seed=7, top_k=20, top_p=0.9, repetition_penalty=1.2),
    ]
    together = engine.generate(PROMPTS, params)
    for prompt, p, result in zip(PROMPTS, params, together, strict=True):
        (alone,) = Engine(model).generate([prompt], p)
        assert result.token_ids == alone.token_ids
        assert len(result.token_ids) == p.max_new_tokens
        assert len(set(result.token_ids)) > 1


def test_greedy_equals_the_model_without_cache(model: GPT) -> None:
    (result,) = Engine(model, prefill_chunk=2).generate([PROMPTS[0]], SamplingParams(max_new_tokens=30, temperature=0))
    ids = list(PROMPTS[0])
    for _ in range(30):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert result.token_ids == ids[3:]


def test_more_prompts_than_fit_a_batch(model: GPT) -> None:
    params = SamplingParams(max_new_tokens=5, seed=1)
    expected = Engine(model).generate(PROMPTS, params)
    results = Engine(model, max_batch_size=2).generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_a_seed_for_all_rows_and_counted_seeds(model: GPT) -> None:
    engine = Engine(model)
    same = engine.generate([PROMPTS[0]] * 2, SamplingParams(seed=4))
    assert same[0].token_ids == same[1].token_ids
    different = engine.generate([PROMPTS[0]] * 2, with_seeds(SamplingParams(seed=4), 2))
    assert different[0].token_ids == same[0].token_ids != different[1].token_ids


def test_no_prompts(model: GPT) -> None:
    assert Engine(model).generate([]) == []
    assert list(Engine(model).stream([])) == []


# Two streams, closing, modes


def test_two_streams_on_one_model(model: GPT) -> None:
    engine = Engine(model)
    params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(2)]
    expected = [engine.generate([PROMPTS[i]], params[i])[0].token_ids for i in range(2)]
    streams = [engine.stream([PROMPTS[i]], params[i]) for i in range(2)]
    got = list(zip(*streams, strict=True))
    assert [[pair[i].token_id for pair in got] for i in range(2)] == expected


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_ending_early_frees_the_cache(model: GPT, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    caches: list[weakref.ref] = []
    new_cache = Engine.new_cache

    def remember(self: Engine, *args: Any) -> Any:
        cache = new_cache(self, *args)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(Engine, "new_cache", remember)
    model.train()
    stream = Engine(model).stream([PROMPTS[0]])
    next(stream)
    assert caches[0]() is not None
    assert not model.training
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    else:
        del stream
    gc.collect()
    assert caches[0]() is None
    assert model.training


def test_modes_of_modules_come_back_and_training_goes_on(model: GPT) -> None:
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    Engine(model).generate([PROMPTS[0]])
    assert [module.training for module in model.modules()] == modes
    model(torch.tensor([PROMPTS[0]])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Ends


def test_context_ends_the_row(model: GPT) -> None:
    (result,) = Engine(model).generate([[1] * 60], SamplingParams(max_new_tokens=50))
    assert (len(result.token_ids), result.finish_reason) == (4, "context")
    (result,) = Engine(model).generate([[1] * 64], SamplingParams(max_new_tokens=50))
    assert (result.token_ids, result.finish_reason) == ([], "context")
    (result,) = Engine(model, max_length=10).generate([[1] * 4], SamplingParams(max_new_tokens=None))
    assert (len(result.token_ids), result.finish_reason) == (6, "context")


def test_length_ends_the_row(model: GPT) -> None:
    (result,) = Engine(model).generate([[1] * 60], SamplingParams(max_new_tokens=4))
    assert (len(result.token_ids), result.finish_reason) == (4, "length")


def test_no_new_tokens_run_no_model() -> None:
    model = ScriptedModel([[]])
    (result,) = Engine(model).generate([[1]], SamplingParams(max_new_tokens=0))
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
    assert model.n_forwards == 0


def test_rows_stop_at_different_times_without_more_forwards() -> None:
    model = ScriptedModel([[0, 9, EOS], [0, 9, 9, 9, EOS]])
    results = Engine(model).generate([[0], [0]], SamplingParams(temperature=0, stop_ids=frozenset({EOS})))
    assert [r.token_ids for r in results] == [[9], [9, 9, 9]]
    assert [r.timing.new_tokens for r in results] == [2, 4]
    assert model.n_forwards == 4


@pytest.mark.parametrize(
    ("stop", "answer", "kept"),
    [
        ([5, 7], [5, 5, 7, 9], [5]),
        ([6, 6, 8], [6, 6, 6, 8, 9], [6]),
        ([5, 7], [5, 5, 5], [5, 5, 5]),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_sequences_with_overlap(stop: list[int], answer: list[int], kept: list[int], include_stop: bool) -> None:
    result, _ = scripted(answer, None, stop_sequences=(tuple(stop),), include_stop=include_stop)
    found = kept != answer
    assert result.token_ids == kept + (stop if include_stop and found else [])
    assert result.finish_reason == ("stop" if found else "length")


def test_the_tokenizers_stop_ids_end_and_are_hidden(tokenizer: Tokenizer) -> None:
    for end in tokenizer.stop_ids:
        result, _ = scripted([*b"Hi", end, *b"more"], tokenizer)
        assert (result.text, result.token_ids, result.finish_reason) == ("Hi", list(b"Hi"), "stop")
    assert len(tokenizer.stop_ids) == 2


def test_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    result, _ = scripted(list(b"one END two"), tokenizer, stop=("END", "xyz"))
    assert (result.text, result.token_ids, result.finish_reason) == ("one ", list(b"one "), "stop")
    result, events = scripted(list(b"aENaEN"), tokenizer, stop=("END",))
    assert (result.text, result.finish_reason) == ("aENaEN", "length")
    assert [event.text for event in events if event.text] == ["a", "ENa", "EN"]


def test_stop_string_may_be_shown(tokenizer: Tokenizer) -> None:
    result, _ = scripted(list(b"one END two"), tokenizer, stop=("END",), include_stop=True)
    assert (result.text, result.token_ids, result.finish_reason) == ("one END", list(b"one END"), "stop")


def test_stop_string_inside_a_character(tokenizer: Tokenizer) -> None:
    """The token with the first byte of the character is not shown either."""
    result, _ = scripted(list("né😀!".encode()), tokenizer, stop=("😀",))
    assert (result.text, result.token_ids) == ("né", list("né".encode()))


answers = st.lists(st.sampled_from([*b"ab ", *"é😀".encode(), 0xFF, EOS]), max_size=25)


@settings(max_examples=100, deadline=None)
@given(answer=answers, stop=st.lists(st.text("ab é😀�", min_size=1, max_size=3), max_size=3))
def test_stream_equals_the_whole(tokenizer: Tokenizer, answer: list[int], stop: list[str]) -> None:
    """Whatever is said and whatever ends it: joined stream == text == decoded whole, cut at the first stop."""
    answer = [*answer, ord("b")]
    ids = list(itertools.takewhile(lambda i: i != EOS, answer))
    whole = tokenizer.decode(ids)
    ends = [whole.find(s) + len(s) for s in stop if s in whole]
    starts = [whole.find(s) for s in stop if s in whole and whole.find(s) + len(s) == min(ends)]
    result, events = scripted(answer, tokenizer, stop=tuple(stop), stop_ids=frozenset({EOS}))
    assert result.text == (whole[: min(starts)] if starts else whole)
    assert result.finish_reason == ("stop" if starts or EOS in answer else "length")
    if not starts:
        assert result.token_ids == ids
    else:
        assert result.token_ids == ids[: len(result.token_ids)]
        assert tokenizer.decode(result.token_ids).startswith(result.text)
    if not stop:
        assert len([e for e in events if e.token_id is not None]) == len(ids)


# Log-probabilities and bad numbers


def test_logprobs_are_the_models(model: GPT) -> None:
    params = SamplingParams(max_new_tokens=6, seed=1, temperature=3.0, logprobs=2, repetition_penalty=1.3)
    for prompt, result in zip(PROMPTS, Engine(model).generate(PROMPTS, params), strict=True):
        assert result.logprobs is not None
        ids = torch.tensor([prompt + result.token_ids])
        with torch.no_grad():
            expected = model(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        for entry, row in zip(result.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


def test_no_logprobs_unless_asked(model: GPT) -> None:
    (result,) = Engine(model).generate([[1]])
    assert result.logprobs is None
    (result,) = Engine(model).generate([[1]], SamplingParams(logprobs=0, max_new_tokens=3))
    assert result.logprobs is not None
    assert [entry.top for entry in result.logprobs] == [[], [], []]


def test_nan_is_named(model: GPT) -> None:
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float("nan"))
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="logits contain NaN"):
            Engine(model).generate([[1]], SamplingParams(temperature=temperature))


# What a person can do wrong


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([1] * 65, r"65 tokens.* 64"), ([1, 260], "260 is outside"), ([-1], "-1 is outside")],
)
def test_bad_prompts(model: GPT, prompt: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine(model).stream([[1], prompt])


def test_bad_requests(model: GPT) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        Engine(model).stream([[1]], SamplingParams(stop=("x",)))
    with pytest.raises(UserError, match="1 prompts came with 2 settings"):
        Engine(model).stream([[1]], [SamplingParams()] * 2)
    with pytest.raises(UserError, match=r"65 .* 64"):
        Engine(model, max_length=65)
    with pytest.raises(UserError, match="unknown kind"):
        Engine(model, kv_cache="sparse").generate([[1]])


# The functions on tensors


def test_generate(model: GPT) -> None:
    prompt = torch.tensor(PROMPTS[0])
    whole = base.generate(model, prompt, 20, temperature=0)
    assert whole.tolist()[:3] == PROMPTS[0]
    assert whole.shape == (20,)
    assert torch.equal(base.generate(model, prompt, 20, temperature=0, include_prompt=False), whole[3:])
    end = int(whole[9])
    stopped = base.generate(model, prompt, 20, temperature=0, eos_id=end)
    assert torch.equal(stopped, whole[: 3 + whole[3:].tolist().index(end) + 1])


def test_generate_follows_the_global_seed(model: GPT) -> None:
    def run() -> list[int]:
        torch.manual_seed(11)
        return base.generate(model, torch.tensor([1]), 20).tolist()

    assert run() == run()


def test_generate_fn_holds_back_and_hides() -> None:
    def run(include_eos: bool, include_prompt: bool = False) -> list[list[int]]:
        model: Any = ScriptedModel([[0, 5, 5, 7, 9]])
        stream = base.generate_fn(
            model,
            torch.tensor([0]),
            5,
            temperature=0,
            stop_tokens=([5, 7],),
            include_prompt=include_prompt,
            include_eos=include_eos,
        )
        return [tensor.tolist() for tensor in stream]

    assert run(include_eos=False) == [[5]]
    assert run(include_eos=True) == [[5], [5], [7]]
    assert run(include_eos=False, include_prompt=True) == [[0], [5]]


def test_generate_fn_ends_at_the_context(model: GPT) -> None:
    tokens = list(
        base.generate_fn(model, torch.ones(60, dtype=torch.int), 110, include_prompt=False, include_eos=False)
    )
    assert len(tokens) == 4
    with pytest.raises(UserError, match="no room"):
        base.generate(model, torch.tensor([1, 2]), 2)


@pytest.mark.parametrize("include_eos", [False, True])
def test_batched_generate_fn(include_eos: bool) -> None:
    model: Any = ScriptedModel([[0, 3, 5, 7, 9], [0, 3, 4, 5, 6]])
    steps = base.batched_generate_fn(
        model,
        torch.tensor([[0], [0]]),
        5,
        sample_args=[{"temperature": 0.0}, {"top_k": 1}],
        stop_tokens=([5, 7],),
        include_prompt=True,
        include_eos=include_eos,
    )
    rows = [[None if t is None else t.tolist() for t in step] for step in steps]
    if include_eos:
        assert rows == [[[0], [0]], [[3], [3]], [[5], [4]], [[7], [5]], [None, [6]]]
    else:
        assert rows == [[[0], [0]], [[3], [3]], [None, [4]], [None, [5]], [None, [6]]]


def test_sample_and_next_token(model: GPT) -> None:
    logits = torch.zeros(1, 2, VOCAB_SIZE)
    logits[0, -1, 7] = 50
    assert base.sample(logits).tolist() == [7]
    assert base.sample(logits, temperature=0.0, top_k=3, top_p=0.5).tolist() == [7]
    with pytest.raises(ValueError, match=r"top_p must be in \[0, 1\], got 1.5"):
        base.sample(logits, top_p=1.5)
    with pytest.raises(ValueError, match="NaN"):
        base.sample(logits * float("nan"))
    model.set_kv_cache(1)
    x, expected = torch.tensor([PROMPTS[0]]), base.generate(model, torch.tensor(PROMPTS[0]), 8, temperature=0)[3:]
    pos, got = torch.arange(3), []
    with torch.no_grad():
        for _ in range(5):
            token = base.next_token(model, pos, x, input_pos_maxp1=int(pos[-1]) + 1, temperature=0.0)
            got.append(int(token))
            pos, x = pos[-1:] + 1, token.view(1, 1)
    assert got == expected.tolist()


@pytest.mark.parametrize("learned", [False, True])
def test_sinks_go_on_where_there_are_positions(learned: bool) -> None:
    """Rotary positions never end, learned ones do."""
    model = random_model(learned_positions=learned, rotary_percentage=0.0 if learned else 1.0)
    size = model.config.block_size
    engine = Engine(model, kv_cache="sinks:2+6")
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=size, temperature=0))
    expected = (size - 3, "context") if learned else (size, "length")
    assert (len(result.token_ids), result.finish_reason) == expected
