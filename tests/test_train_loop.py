# Licensed under the Apache License 2.0, see the LICENSE file.

"""The loop: it learns what a plain loop learns, ends when it should, and evaluation leaves no trace."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from litgpt.args import EvalArgs
from litgpt.errors import UserError
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer
from litgpt.train.batches import IGNORE, collate
from litgpt.train.evaluate import answer_example, undisturbed
from litgpt.train.objective import CachedObjective, Objective, noise_size, noisy_embeddings
from litgpt.train.optimizer import make_optimizer
from tests.tiny_text import VOCAB_SIZE, tiny_config, write_tokenizer
from tests.tiny_training import ADAMW, Samples, make_run, rows, weights_of

NEVER = 10**6


def new_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(tiny_config())


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_equals_a_plain_loop(tmp_path: Path) -> None:
    """Twenty steps of AdamW with warm-up, decay and clipping, written out in plain torch."""
    data, model, plain = Samples(37), new_model(), new_model()
    run = make_run(
        tmp_path, data, model=model, epochs=4, micro_batch_size=3, lr_warmup_steps=5, max_norm=0.5, min_lr=1e-3
    )
    groups = [run.plan.group(step) for step in range(20)]
    run.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    losses = []
    for step, group in enumerate(groups):
        done = (step - 5) / 15
        rate = (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = 0.01 * rate
        logits = [plain(data[i]["input_ids"][None])[0, :-1] for i in group]
        targets = torch.cat([data[i]["labels"][1:] for i in group])
        loss = cross_entropy(torch.cat(logits), targets, ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = [float(row["loss"]) for row in rows(tmp_path)]
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-5
    assert losses[-1] < losses[0] - 0.5
    assert float(rows(tmp_path)[0]["grad_norm"]) > 0.5


@pytest.mark.parametrize("alpha", [5.0, None])
def test_evaluation_and_examples_change_nothing(tmp_path: Path, alpha: float | None) -> None:
    """NEFTune draws random numbers, and only in training mode, so it notices both kinds of trace."""
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer(tmp_path / "tokenizer")
    found = []
    for interval in (NEVER, 1):
        model = new_model()
        run = make_run(
            tmp_path / str(interval),
            Samples(24),
            Samples(5, seed=1),
            model=model,
            neftune_alpha=alpha,
            micro_batch_size=4,
            eval=EvalArgs(interval, max_new_tokens=3, evaluate_example="random", initial_validation=interval == 1),
            tokenizer=tokenizer,
        )
        run.train()
        found.append(weights_of(model))
    assert len(rows(tmp_path / "1")) == 3 + 2 + 2  # the last evaluation is the final one
    assert_equal(*found)


@pytest.mark.parametrize("packed", [False, True])
def test_neftune_goes_by_the_length_of_each_sample(packed: bool) -> None:
    """The noise of a token is up to alpha / sqrt(tokens of its sample * width), however samples share a pass."""
    data, embedding = Samples(5), torch.nn.Embedding(VOCAB_SIZE, 256)
    batch = collate([data[i] for i in range(5)], packed=packed)
    plain = embedding(batch.input_ids)
    with noisy_embeddings(embedding, noise_size(batch, 5.0, 256, plain.device)):
        noise = (embedding(batch.input_ids) - plain).detach()
    rows = noise[0].split(batch.lengths) if packed else [row[:n] for row, n in zip(noise, batch.lengths, strict=True)]
    assert len(set(batch.lengths)) > 1
    for row, n in zip(rows, batch.lengths, strict=True):
        size = 5.0 / math.sqrt(n * 256)
        assert 0.99 * size < float(row.abs().max()) <= size * (1 + 1e-5)
        assert float(row.std()) == pytest.approx(size / math.sqrt(3), rel=0.1)
    assert torch.equal(embedding(batch.input_ids), plain)


@pytest.mark.parametrize("kind", [None, "dense"])
def test_neftune_is_for_training(kind: str | None) -> None:
    data, model = Samples(3), new_model()
    batch = collate([data[i] for i in range(3)])

    def objective(alpha: float | None) -> Objective:
        return Objective(model, 20, alpha) if kind is None else CachedObjective(model, 20, kind, 4, alpha)

    plain = float(objective(None).train()(batch))
    assert float(objective(5.0).eval()(batch)) == plain
    assert abs(float(objective(5.0).train()(batch)) - plain) > 1e-3
    assert float(objective(None).train()(batch)) == plain


def test_undisturbed_restores_everything() -> None:
    model = new_model()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    expected = []
    for inside in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if inside:
            with undisturbed(model):
                assert not any(module.training for module in model.modules())
                assert not torch.is_grad_enabled()
                torch.rand(5), random.random(), np.random.rand()
                torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
                torch.manual_seed(9)
        expected.append((torch.rand(3).tolist(), random.random(), np.random.rand(), torch.backends.cudnn.benchmark))
    assert expected[0] == expected[1]
    assert [module.training for module in model.modules()] == before
    with pytest.raises(KeyError), undisturbed(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before


def test_validation_loss_is_the_mean_over_tokens(tmp_path: Path) -> None:
    """One sample has no labels: it counts nothing, and does not make the loss NaN."""
    val, model = Samples(7, seed=1), new_model()
    val.samples[2]["labels"][:] = IGNORE
    losses = []
    for sample in val.samples:
        logits, labels = model(sample["input_ids"][None])[0, :-1], sample["labels"][1:]
        losses += [cross_entropy(logits[i], labels[i]).item() for i in range(len(labels)) if labels[i] != IGNORE]
    for micro in (1, 3):
        folder = tmp_path / str(micro)
        eval = EvalArgs(final_validation=True)
        make_run(folder, Samples(4), val, model=new_model(), epochs=0, micro_batch_size=micro, eval=eval).train()
        (row,) = rows(folder)
        assert float(row["val_loss"]) == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        assert float(row["val_ppl"]) == pytest.approx(math.exp(float(row["val_loss"])))


def test_fewer_samples_than_a_batch_still_train(tmp_path: Path) -> None:
    model = new_model()
    before = weights_of(model)
    make_run(tmp_path, Samples(5), model=model, global_batch_size=16).train()
    assert len(rows(tmp_path)) == 1
    assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"epochs": 2}, 6),
        ({"epochs": 2, "max_steps": 4}, 4),
        ({"epochs": None, "max_steps": 7}, 7),
        ({"epochs": 2, "max_time": 0.0}, 0),
        ({"epochs": None, "max_time": 1e-9, "lr_schedule": "constant"}, 1),
        ({"epochs": 0}, 0),
    ],
)
def test_when_training_ends(tmp_path: Path, settings: dict[str, Any], steps: int) -> None:
    run = make_run(tmp_path, Samples(20), **settings)
    run.train()
    assert run.counters.step == steps
    assert (tmp_path / "final" / "lit_model.pth").is_file()


def test_max_tokens(tmp_path: Path) -> None:
    data = Samples(40)
    run = make_run(tmp_path, data, epochs=None, max_tokens=2 * sum(data.lengths))
    run.train()
    assert run.counters.step == 10
    assert run.counters.tokens == 2 * sum(data.lengths)
    run = make_run(tmp_path / "b", data, epochs=None, max_tokens=100)
    run.train()
    assert 100 <= run.counters.tokens < 100 + 8 * 20


def test_training_without_an_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing says when training ends"):
        make_run(tmp_path, Samples(4), epochs=None)


def test_a_sample_longer_than_the_context_is_an_error(tmp_path: Path) -> None:
    data = Samples(4)
    data.lengths[2] = 65
    with pytest.raises(UserError, match="sample 2 has 65 tokens, the longest possible is 64"):
        make_run(tmp_path, data)


def test_early_stopping_and_best(tmp_path: Path) -> None:
    """On random tokens the validation loss soon rises; the best folder holds the weights of its lowest point."""
    model = new_model()
    run = make_run(
        tmp_path,
        Samples(16),
        Samples(8, seed=1),
        model=model,
        epochs=50,
        eval=EvalArgs(interval=2, patience=3, save_best=True, final_validation=False),
    )
    run.train()
    losses = [float(row["val_loss"]) for row in rows(tmp_path) if row["val_loss"]]
    best = losses.index(min(losses))
    assert len(losses) - 1 - best == 3
    assert run.counters.step == 2 * len(losses) < 100
    assert run.counters.best_loss == min(losses)
    again = new_model()
    again.load_state_dict(torch.load(tmp_path / "best" / "lit_model.pth", weights_only=True)["model"])
    make_run(tmp_path / "b", Samples(1), Samples(8, seed=1), model=again, epochs=0, eval=EvalArgs()).train()
    assert float(rows(tmp_path / "b")[0]["val_loss"]) == pytest.approx(min(losses), abs=1e-6)


@pytest.mark.parametrize(
    ("spec", "kind", "lr"),
    [
        ("AdamW", torch.optim.AdamW, 1e-3),
        ("torch.optim.SGD", torch.optim.SGD, 1e-3),
        (ADAMW, torch.optim.AdamW, 0.01),
        ({"class_path": "Adagrad"}, torch.optim.Adagrad, 0.01),
        ({"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4, "betas": [0.9, 0.95]}}, torch.optim.AdamW, 2e-4),
    ],
)
def test_optimizer(spec: Any, kind: type, lr: float) -> None:
    optimizer = make_optimizer(spec, torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == lr


def test_frozen_parameters_are_left_out_and_rates_are_scaled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    optimizer = make_optimizer(ADAMW, model, lambda name: 16.0 if name.startswith("1") else 1.0)
    groups = {group["lr"]: group["params"] for group in optimizer.param_groups}
    assert [id(p) for p in groups[0.01]] == [id(model[0].bias)]
    assert [id(p) for p in groups[0.16]] == [id(model[1].weight), id(model[1].bias)]
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        make_optimizer("AdamW", model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("AdamWW", "did you mean AdamW"),
        ("torch.nn.Linear", "there is no optimizer"),
        ("no_such_package.Lion", "no_such_package"),
        ({"class_path": "AdamW", "init_args": {"learning_rate": 1}}, "learning_rate"),
        ({"class_path": "AdamW", "init_args": {"lr": -1.0}}, "Invalid learning rate"),
        ({"lr": 0.1}, "not understood"),
    ],
)
def test_optimizer_that_does_not_exist(spec: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_optimizer(spec, torch.nn.Linear(2, 2))


def test_the_example_is_the_prompt_of_the_sample(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    text = torch.tensor(list(b"What?Yes"))
    labels = text.clone()
    labels[:5] = IGNORE
    data = [{"input_ids": text, "labels": labels}, {"input_ids": text[:3], "labels": text[:3].clone()}]
    prompt, answer = answer_example(new_model(), tokenizer, data, EvalArgs(max_new_tokens=4), step=0)
    assert prompt == "What?"
    assert answer == answer_example(new_model(), tokenizer, data, EvalArgs(max_new_tokens=4), step=0)[1]
    eval = EvalArgs(max_new_tokens=4, evaluate_example=1)
    assert answer_example(new_model(), tokenizer, data, eval, step=0)[0] == "Wh"
