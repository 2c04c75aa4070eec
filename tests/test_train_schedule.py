# Licensed under the Apache License 2.0, see the LICENSE file.

"""The learning rate: defined everywhere, above 0 from the first step on, and what the names promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgpt.args import EvalArgs, TrainArgs
from litgpt.errors import UserError
from litgpt.train.schedule import Schedule, make_schedule


@given(
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    warmup=st.integers(0, 30),
    total=st.integers(0, 30),
    floor=st.floats(0, 1),
)
def test_values(kind: str, warmup: int, total: int, floor: float) -> None:
    schedule = Schedule(kind, warmup, total, floor)  # type: ignore[arg-type]
    values = [schedule(step) for step in range(total + 3)]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert all(value > 0 for value in values[:total])
    peak = max(min(warmup, total) - 1, 0)
    assert total == 0 or values[peak] == 1
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert all(a >= b - 1e-12 for a, b in zip(values[peak:], values[peak + 1 :], strict=False))
    if kind != "constant":
        assert all(value >= floor - 1e-12 for value in values[peak:])
        assert values[total] == pytest.approx(floor)


@pytest.mark.parametrize("warmup", [0, 1, 5, 20])
def test_cosine_equals_torch(warmup: int) -> None:
    """Behind the warm-up, torch's own cosine annealing gives the same rates."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.05)
    schedule = Schedule("cosine", warmup, warmup + 20, 0.1)
    for step in range(20):
        assert 0.5 * schedule(warmup + step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-7)
        optimizer.step()
        annealing.step()


def test_linear_and_constant() -> None:
    assert [Schedule("linear", 2, 6)(step) for step in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert [Schedule("constant", 2, None)(step) for step in range(4)] == [0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("args", "warmup"),
    [
        ({"lr_warmup_steps": 0}, 0),
        ({"lr_warmup_steps": None}, 0),
        ({"lr_warmup_steps": 7}, 7),
        ({"lr_warmup_steps": 100}, 40),  # longer than the training: the peak is reached all the same
        ({"lr_warmup_steps": 100, "lr_warmup_fraction": 0.11}, 3),
        ({"lr_warmup_fraction": 0.0}, 0),
        ({"lr_warmup_fraction": 1.0}, 20),
    ],
)
def test_warmup(args: dict[str, float], warmup: int) -> None:
    schedule = make_schedule(TrainArgs(**args), peak=1e-3, steps_per_epoch=20, total=40)  # type: ignore[arg-type]
    assert schedule.warmup == warmup
    assert schedule(max(warmup - 1, 0)) == 1


def test_min_lr_is_where_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    train = TrainArgs(min_lr=1e-4, lr_warmup_steps=0)
    assert make_schedule(train, 1e-3, 5, 10)(10) == pytest.approx(0.1)
    assert make_schedule(train, 1e-4, 5, 10)(10) == 1
    assert make_schedule(train, 1e-5, 5, 10)(10) == 0
    assert make_schedule(train, 0.0, 5, 10)(10) == 0


def test_an_endless_training_cannot_fall() -> None:
    assert make_schedule(TrainArgs(lr_schedule="constant"), 1.0, 5, None)(10**9) == 1
    with pytest.raises(UserError, match="not known"):
        make_schedule(TrainArgs(), 1.0, 5, None)


@pytest.mark.parametrize(
    "args",
    [
        {"lr_warmup_fraction": -0.1},
        {"lr_warmup_fraction": 1.1},
        {"lr_warmup_steps": -1},
        {"global_batch_size": 0},
        {"micro_batch_size": 0},
        {"save_interval": 0},
        {"log_interval": 0},
        {"max_norm": 0.0},
        {"min_lr": -1.0},
        {"keep_last": 0},
        {"neftune_alpha": -1.0},
    ],
)
def test_bad_training_settings(args: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"--train.{next(iter(args))} must be"):
        TrainArgs(**args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "args", [{"interval": 0}, {"patience": 0}, {"max_iters": -1}, {"evaluate_example": "last"}, {"max_new_tokens": -1}]
)
def test_bad_evaluation_settings(args: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"--eval.{next(iter(args))} must be"):
        EvalArgs(**args)  # type: ignore[arg-type]


def test_sizes_per_device() -> None:
    train = TrainArgs(global_batch_size=16, micro_batch_size=4, lr_warmup_steps=3)
    assert train.batch_size(devices=2) == 8
    assert train.gradient_accumulation_iters(devices=2, num_nodes=2) == 1
    assert train.warmup_iters(1, 1, max_iters=1000, train_dataloader=[0] * 50) == 12
    assert train.warmup_iters(1, 1, max_iters=5, train_dataloader=[0] * 50) == 5
    assert TrainArgs(lr_warmup_fraction=0.1).warmup_iters(1, 1, 1000, [0] * 45) == math.ceil(4.5)
