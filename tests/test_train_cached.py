# Licensed under the Apache License 2.0, see the LICENSE file.

"""Training under a KV cache: the loss and gradient of what the cache let be seen, at the memory of a chunk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from litgpt import lora
from litgpt.args import EvalArgs
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from litgpt.train.activation import checkpoint_activations
from litgpt.train.batches import IGNORE, Batch, collate
from litgpt.train.memory import estimate_training
from litgpt.train.objective import CachedObjective, Objective
from tests.live_bytes import LiveBytes
from tests.tiny_text import tiny_config
from tests.tiny_training import Samples, make_run, rows, weights_of

EXACT_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding layers": {"sliding_window_size": 6, "sliding_window_indices": [1, 0]},
    "head of a few": {"final_logit_softcapping": 3.0, "logit_multiplier": 0.5, "tie_embeddings": True},
}


def model_of(dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(tiny_config(**config)).to(dtype)


def batch_of(n: int = 3, longest: int = 20) -> Batch:
    samples = Samples(n, longest=longest)
    return collate([samples[i] for i in range(n)])


def gradients(objective: Objective, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = objective(batch)
    loss.backward()
    found = {name: p.grad for name, p in objective.gpt.named_parameters() if p.grad is not None}
    objective.zero_grad(set_to_none=True)
    return loss.detach(), found


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
@pytest.mark.parametrize("config", EXACT_CONFIGS.values(), ids=EXACT_CONFIGS)
def test_dense_is_the_full_forward(config: dict[str, Any], chunk_size: int) -> None:
    model, batch = model_of(**config), batch_of()
    expected = gradients(Objective(model, 20), batch)
    assert_same(gradients(CachedObjective(model, 20, "dense", chunk_size), batch), expected)
    assert len(expected[1]) == len(list(model.parameters()))


@pytest.mark.parametrize("chunk_size", [3, 8])
def test_window_is_the_forward_under_that_mask(chunk_size: int) -> None:
    """The oracle has no cache: a model whose layers all slide."""
    model = model_of()
    windowed = GPT(tiny_config(sliding_window_size=5, sliding_window_indices=[1, 1])).double()
    windowed.load_state_dict(model.state_dict())
    batch = batch_of()
    expected = gradients(Objective(windowed, 20), batch)
    assert_same(gradients(CachedObjective(model, 20, "window:5", chunk_size), batch), expected)
    full = gradients(Objective(model, 20), batch)
    assert (full[0] - expected[0]).abs() > 1e-3


@pytest.mark.parametrize("kind", ["h2o:5", "snap:5", "tova:5", "sinks:2+4"])
def test_evicting_is_one_graph_through_all_chunks(kind: str) -> None:
    """The oracle holds the activations of all chunks: a cache that decides anew, with gradients."""
    model, batch, size = model_of(), batch_of(), 4
    ids, following = batch.input_ids, torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE)
    cache = KVCache.from_config(model.config, kind, len(ids), ids.size(1), torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for idx, labels in zip(ids.split(size, 1), following.split(size, 1), strict=True):
        logits = model(idx, cache=cache)
        loss = loss + cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    loss.backward()
    expected = loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert_same(gradients(CachedObjective(model, 20, kind, size), batch), expected)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_with_checkpointed_activations(mode: Any) -> None:
    """Blocks run once more in the backward pass, and must not meet a cache that has gone on."""
    model, batch = model_of(), batch_of()
    expected = gradients(Objective(model, 20), batch)
    checkpoint_activations(model, mode)
    assert_same(gradients(CachedObjective(model, 20, "dense", 4), batch), expected)


def test_dropout_is_the_same_in_both_passes() -> None:
    """Two objectives from one seed: the gradient is that of the loss that was returned."""
    plain = {f.name: getattr(tiny_config(), f.name) for f in dataclasses.fields(Config) if f.init}
    config = lora.Config(**plain, lora_r=2, lora_dropout=0.5, lora_query=True, lora_value=True)
    torch.manual_seed(0)
    model = lora.GPT(config).double().train()
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    lora.mark_only_lora_as_trainable(model)
    objective, batch = CachedObjective(model, 20, "h2o:5", 4), batch_of()

    def loss_at(shift: float, direction: dict[str, Tensor]) -> float:
        with torch.no_grad():
            for name, d in direction.items():
                model.get_parameter(name).add_(d, alpha=shift)
            torch.manual_seed(3)
            value = objective(batch)
            for name, d in direction.items():
                model.get_parameter(name).sub_(d, alpha=shift)
        return float(value)

    torch.manual_seed(3)
    loss, grads = gradients(objective, batch)
    assert float(loss) == loss_at(0, grads)
    assert all("lora_" in name for name in grads)
    expected = sum(float((g * g).sum()) for g in grads.values())
    step = 1e-6
    slope = (loss_at(step, grads) - loss_at(-step, grads)) / (2 * step)
    assert slope == pytest.approx(expected, rel=1e-5)


def test_autocast() -> None:
    """Weights that were cast without gradients must not be met again where gradients are wanted."""
    model, batch = model_of(torch.float32), batch_of()
    expected = gradients(Objective(model, 20), batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(CachedObjective(model, 20, "dense", 4), batch)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() < 0.05 * grad.norm(), name
        assert found[1][name].dtype == torch.float32


def test_division_into_micro_batches_does_not_matter(tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 8):
        run = make_run(
            tmp_path / str(size), Samples(8), model=model_of(), micro_batch_size=size, kv_cache="h2o:5", chunk_size=4
        )
        run.train()
        found.append(weights_of(run.model))
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-10, rtol=0)


def test_evaluation_sees_what_training_sees(tmp_path: Path) -> None:
    data, model = Samples(4), model_of()
    run = make_run(
        tmp_path,
        data,
        data,
        model,
        EvalArgs(interval=10**6, initial_validation=True, final_validation=False),
        kv_cache="window:5",
        chunk_size=4,
        global_batch_size=4,
        micro_batch_size=4,
    )
    run.train()
    found = rows(tmp_path)
    assert float(found[0]["val_loss"]) == pytest.approx(float(found[1]["loss"]), abs=1e-6)


def test_joined_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="joined samples"):
        make_run(tmp_path, Samples(4), kv_cache="dense", packing="pack")


@pytest.mark.parametrize(("kind", "share"), [("dense", 0.75), ("window:64", 0.5), ("h2o:64", 0.5)])
def test_memory_is_that_of_a_chunk(kind: str, share: float) -> None:
    """Peak of a step, counted tensor by tensor, beside that of one piece, and beside the estimate."""
    length, chunk_size = 1024, 64
    config = Config(
        n_layer=6, n_embd=64, n_head=4, n_query_groups=1, intermediate_size=256, padded_vocab_size=64, block_size=length
    )

    def make() -> GPT:
        return GPT(config)

    model = make()
    ids = torch.randint(64, (1, length), generator=torch.manual_seed(0))
    batch = Batch(ids, ids, (length,))
    peaks = []
    for objective in (Objective(model, length), CachedObjective(model, length, kind, chunk_size)):
        with LiveBytes() as live:
            gradients(objective, batch)
        peaks.append(live.peak)
    assert peaks[1] < share * peaks[0]
    made = estimate_training(
        make, lambda gpt: torch.optim.SGD(gpt.parameters()), 1, length, kv_cache=kind, chunk_size=chunk_size
    )
    estimated = made.total - made.weights
    assert 0.75 * peaks[1] < estimated < 1.2 * peaks[1]  # what the backward pass of one layer holds is left out
