# Licensed under the Apache License 2.0, see the LICENSE file.

"""Samples in one row give the loss and the gradients of the samples one by one, for every feature of a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from litgpt import attention, model
from litgpt.attention import KVView, Step
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from litgpt.train.loss import linear_cross_entropy
from litgpt.train.packing import pack, plan_packs, waste
from tests.live_bytes import LiveBytes
from tests.tiny import NAMES, random_ids, tiny_pair

LENGTHS = (14, 1, 9, 3)  # longer and shorter than the windows of 5 and 6, in no order
REACH = max(LENGTHS)


def samples(lengths: tuple[int, ...] = LENGTHS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids, and labels of which the first half is masked."""
    ids = [random_ids((n,), seed=i) for i, n in enumerate(lengths)]
    return ids, [torch.where(torch.arange(len(x)) < len(x) // 2, -100, x) for x in ids]


def loss_of(gpt: GPT, ids: torch.Tensor, labels: torch.Tensor, step: Step) -> torch.Tensor:
    """What training computes: labels are those of the next position."""
    hidden = gpt.hidden(ids, step)[:, :-1].flatten(0, 1)
    config = gpt.config
    return linear_cross_entropy(
        hidden,
        gpt.lm_head,
        labels[:, 1:].flatten(),
        softcap=config.final_logit_softcapping,
        logit_multiplier=config.logit_multiplier,
    )


def one_by_one(gpt: GPT, ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    steps = [Step.without_cache(len(x), x.device, REACH) for x in ids]
    return sum(loss_of(gpt, x[None], y[None], step) for x, y, step in zip(ids, labels, steps, strict=True))


def padded(gpt: GPT, ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    pad = torch.nn.utils.rnn.pad_sequence
    x, y = pad(ids, True, 5), pad(labels, True, -100)
    return loss_of(gpt, x, y, Step.without_cache(x.size(1), x.device, REACH))


def bucketed(gpt: GPT, ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return sum(padded(gpt, [ids[i] for i in part], [labels[i] for i in part]) for part in (order[:2], order[2:]))


def packed(gpt: GPT, ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    row = pack(ids, labels)
    return loss_of(gpt, row.input_ids, row.labels, row.step(REACH))


def packed_rows(gpt: GPT, ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    """Two rows, the second with padding."""
    parts = [pack(ids[:2], labels[:2]), pack(ids[2:], labels[2:])]
    pad = torch.nn.utils.rnn.pad_sequence
    x = pad([part.input_ids[0] for part in parts], True, 5)
    y = pad([part.labels[0] for part in parts], True, -100)
    return loss_of(gpt, x, y, Step.packed([part.lengths for part in parts], x.device, REACH))


def double(name: str) -> GPT:
    return copy.deepcopy(tiny_pair(name)[1]).double()


def assert_same_training(gpt: GPT, *divisions, atol: float = 1e-10) -> None:
    ids, labels = samples()
    parameters = list(gpt.parameters())
    expected = one_by_one(gpt, ids, labels)
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    for division in divisions:
        loss = division(gpt, ids, labels)
        torch.testing.assert_close(loss, expected, atol=atol, rtol=0)
        for a, b in zip(torch.autograd.grad(loss, parameters, allow_unused=True), gradients, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=10 * atol, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_the_samples_one_by_one(name: str) -> None:
    assert_same_training(double(name), padded, packed_rows)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_any_division_is_the_same(name: str) -> None:
    assert_same_training(double(name), packed, bucketed)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_in_expanded_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "LATENT_ABSORB_LIMIT", 4)
    assert_same_training(double(name), packed)


@pytest.mark.parametrize("name", NAMES)
def test_packed_loss_is_that_of_transformers(name: str) -> None:
    hf, gpt = tiny_pair(name)
    ids, labels = samples()
    with torch.no_grad():
        theirs = 0.0
        for x, y in zip(ids, labels, strict=True):
            logits = hf(x[None]).logits[0, :-1]
            theirs += F.cross_entropy(logits, y[1:], ignore_index=-100, reduction="sum").item()
        ours = packed(gpt, ids, labels).item()
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_visible_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_one(q: torch.Tensor, view: KVView, step: Step, scale: float, **_: object) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, view.k, view.v, is_causal=True, scale=scale, enable_gqa=True)

    monkeypatch.setattr(attention, "_attend_packed", as_one)
    with pytest.raises(AssertionError):
        assert_same_training(double("llama"), packed)


@settings(max_examples=10, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=3), seed=st.integers(0))
def test_hidden_states_of_any_rows(rows: list[list[int]], seed: int) -> None:
    _, gpt = tiny_pair("gemma3_text")
    size = max(map(sum, rows))
    idx = random_ids((len(rows), size), seed=seed % 2**31)
    with torch.no_grad():
        hidden = gpt.hidden(idx, Step.packed(rows, idx.device))
        assert hidden.isfinite().all()
        for row, lengths in enumerate(rows):
            start = 0
            for n in lengths:
                own = slice(start, start + n)
                alone = gpt.hidden(idx[row : row + 1, own])
                torch.testing.assert_close(hidden[row : row + 1, own], alone, atol=2e-5, rtol=0)
                start += n


def test_nothing_of_the_size_of_the_square_of_a_row() -> None:
    _, gpt = tiny_pair("mistral_window")
    lengths = (6,) * 100
    idx = random_ids((1, sum(lengths)))
    step = Step.packed([lengths], idx.device, 64)
    with LiveBytes() as live:
        gpt.hidden(idx, step)
    assert live.largest < sum(lengths) ** 2  # not even one byte for each pair


def test_the_labels_of_a_packed_row_do_not_cross_samples() -> None:
    ids, labels = samples((3, 1, 2))
    labels = [x.clone() for x in ids]
    row = pack(ids, labels)
    expected = torch.cat([torch.cat((torch.tensor([-100]), x[1:])) for x in ids])
    assert torch.equal(row.labels[0], expected)
    assert torch.equal(row.input_ids[0], torch.cat(ids))
    assert all(torch.equal(a, b) for a, b in zip(ids, labels, strict=True))  # the samples are left as they were
    assert row.step().pos.tolist() == [[0, 1, 2, 0, 0, 1]]


def test_bad_rows() -> None:
    cpu = torch.device("cpu")
    for rows in ([], [[]], [[3], [2, 0]]):
        with pytest.raises(ValueError, match="at least one token"):
            Step.packed(rows, cpu)
    _, gpt = tiny_pair("llama")
    with pytest.raises(ValueError, match="for 5 tokens a row, got 6"):
        gpt(random_ids((1, 6)), step=Step.packed([[2, 3]], cpu))
    with pytest.raises(ValueError, match="cannot forward 65 tokens"):
        gpt(random_ids((1, 67)), step=Step.packed([[65, 2]], cpu))
    assert gpt(random_ids((1, 80)), step=Step.packed([[40, 40]], cpu)).shape[:2] == (1, 80)  # longer than the context
    cache = KVCache.from_config(gpt.config, batch_size=1, max_length=8)
    with pytest.raises(ValueError, match="packed rows"):
        gpt(random_ids((1, 5)), cache=cache, step=Step.packed([[2, 3]], cpu))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), capacity=st.integers(40, 90))
def test_packs_hold_every_sample_once_and_waste_little(lengths: list[int], capacity: int) -> None:
    packs = plan_packs(lengths, capacity)
    assert sorted(i for group in packs for i in group) == list(range(len(lengths)))
    used = sorted(sum(lengths[i] for i in group) for group in packs)
    assert all(0 < n <= capacity for n in used)
    assert len(used) < 2 or used[0] + used[1] > capacity
    assert packs == plan_packs(lengths, capacity)


def test_packs_of_a_case_that_comes_out_even() -> None:
    lengths = [3, 7, 5, 5, 2, 8, 10]
    assert len(plan_packs(lengths, 10)) == 4
    assert plan_packs([], 10) == []
    for bad in ([11], [4, 0]):
        with pytest.raises(ValueError, match="1 to 10 tokens"):
            plan_packs(bad, 10)


def test_waste() -> None:
    lengths = [4, 1, 3]
    assert waste([[0, 1], [2]], lengths, packed=False) == pytest.approx(3 / 11)
    assert waste([[0, 1], [2]], lengths, packed=True) == 0
    assert waste([], lengths, packed=False) == 0


def test_planning_many_samples_is_quick() -> None:
    lengths = torch.randint(1, 2049, (50_000,)).tolist()
    packs = plan_packs(lengths, 2048)
    assert sum(lengths) / (2048 * len(packs)) > 0.99
