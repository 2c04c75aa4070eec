# Licensed under the Apache License 2.0, see the LICENSE file.

"""Activation checkpointing changes memory, and nothing else to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch

from litgpt import lora
from litgpt.attention import Step
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from litgpt.train.activation import checkpoint_activations
from tests.live_bytes import LiveBytes
from tests.tiny import random_ids, tiny_pair


def with_lora(name: str) -> GPT:
    """A tiny model with LoRA and dropout everywhere, in training mode."""
    plain = tiny_pair(name)[1]
    fields = {key: value for key, value in vars(plain.config).items() if key in lora.Config.__dataclass_fields__}
    options = {"lora_r": 3, "lora_dropout": 0.3, "lora_targets": "all-linear"}
    gpt = lora.GPT(lora.Config(**{**fields, **options}))
    gpt.load_state_dict(plain.state_dict(), strict=False)
    lora.mark_only_lora_as_trainable(gpt)
    for parameter in gpt.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return gpt.train()


def train_once(gpt: GPT, step: Step | None = None) -> list[torch.Tensor]:
    torch.manual_seed(7)
    loss = gpt.hidden(random_ids((2, 11)), step).square().sum()
    gradients = torch.autograd.grad(loss, [p for p in gpt.parameters() if p.requires_grad])
    return [loss, *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("mode", ["block", "selective"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_gradients_are_the_same_bits(name: str, mode: str) -> None:
    gpt = with_lora(name)
    steps = [None, Step.packed([[4, 7], [3, 6]], torch.device("cpu"))]
    plain = [train_once(gpt, step) for step in steps]
    checkpoint_activations(gpt, mode)
    steps[1] = Step.packed([[4, 7], [3, 6]], torch.device("cpu"))  # nothing that the other pass has worked out
    for before, step in zip(plain, steps, strict=True):
        after = train_once(gpt, step)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def kept_by(gpt: GPT, mode: str, idx: torch.Tensor) -> int:
    """Bytes that wait for the backward pass."""
    checkpoint_activations(gpt, mode)
    with LiveBytes() as live:
        hidden = gpt.hidden(idx)
        kept = live.now
    assert hidden.requires_grad
    return kept


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_less_is_kept(name: str) -> None:
    gpt = with_lora(name)
    none, selective, block = (kept_by(gpt, mode, random_ids((2, 40))) for mode in ("none", "selective", "block"))
    assert block < selective < none
    assert block < none / 3


def test_names_copies_and_the_way_back() -> None:
    gpt = with_lora("llama")
    names, expected = list(gpt.state_dict()), train_once(gpt)
    checkpoint_activations(gpt, "block")
    assert list(gpt.state_dict()) == names
    twin = copy.deepcopy(gpt)
    for parameter in gpt.parameters():
        torch.nn.init.zeros_(parameter)  # a copy that still ran the blocks of the original would notice
    assert all(torch.equal(a, b) for a, b in zip(expected, train_once(twin), strict=True))
    checkpoint_activations(twin, "none")
    assert all("forward" not in vars(block) for block in twin.transformer.h)
    with pytest.raises(ValueError, match="'all'"):
        checkpoint_activations(twin, "all")


def test_generation_with_a_cache_is_left_alone() -> None:
    plain = tiny_pair("llama")[1]
    gpt = copy.deepcopy(plain)
    checkpoint_activations(gpt, "selective")
    idx = random_ids((1, 9))
    for model in (plain, gpt):
        cache = KVCache.from_config(model.config, batch_size=1, max_length=12)
        logits = model(idx, cache=cache)  # with gradients: written once, read once
        assert cache.lengths == [9]
        torch.testing.assert_close(logits, plain(idx), atol=1e-4, rtol=0)
