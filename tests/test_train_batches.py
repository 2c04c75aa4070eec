# Licensed under the Apache License 2.0, see the LICENSE file.

"""Which samples a step has: every one once an epoch, whatever the division, and the same from any step on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from litgpt.errors import UserError
from litgpt.model import GPT
from litgpt.train.batches import Batch, Plan, collate, derive_seed, eval_batches, lengths_of, train_steps
from litgpt.train.objective import Objective
from tests.tiny_text import tiny_config
from tests.tiny_training import Samples, make_run, rows


def plan(n: int = 21, **changes: object) -> Plan:
    lengths = Samples(n).lengths
    fields = {"lengths": lengths, "seed": 3, "global_batch_size": 8, "micro_batch_size": 3, **changes}
    return Plan(**fields)  # type: ignore[arg-type]


@given(
    n=st.integers(1, 60),
    global_size=st.integers(1, 20),
    micro_size=st.integers(1, 9),
    world=st.integers(1, 5),
    seed=st.integers(0, 5),
    packing=st.sampled_from(["auto", "none", "bucket", "pack"]),
)
@settings(deadline=None, max_examples=60)
def test_every_sample_once_an_epoch(
    n: int, global_size: int, micro_size: int, world: int, seed: int, packing: Any
) -> None:
    lengths = [4 + i % 5 for i in range(n)]
    ranks = [Plan(lengths, seed, global_size, micro_size, rank, world, packing) for rank in range(world)]
    per_epoch = ranks[0].steps_per_epoch
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            dealt = [rank.micro_batches(step) for rank in ranks]
            assert len({len(batches) for batches in dealt}) == 1  # devices wait for each other
            flat = [i for batches in dealt for batch in batches for i in batch]
            sizes = [len(batch) for batches in dealt for batch in batches]
            tokens = [sum(lengths[i] for i in batch) for batches in dealt for batch in batches]
            assert max(tokens) <= micro_size * max(lengths)
            assert ranks[0].packing == "pack" or max(sizes) <= micro_size
            assert sorted(flat) == sorted(ranks[0].group(step))
            assert len(flat) <= global_size
            seen += flat
        assert sorted(seen) == list(range(n))


def test_the_group_of_a_step_depends_on_nothing_but_seed_and_step() -> None:
    divisions = [(m, r, b) for m in (1, 4) for r in (0, 1) for b in ("none", "pack")]
    groups = {tuple(plan(micro_batch_size=m, rank=r, world_size=2, packing=b).group(4)) for m, r, b in divisions}
    assert len(groups) == 1
    assert plan(seed=4).group(4) != plan().group(4)
    first, second = ([i for step in range(s, s + 3) for i in plan().group(step)] for s in (0, 3))
    assert first != second  # another order in another epoch
    assert len(plan().group(2)) == 21 % 8  # the tail is a step of its own


def test_buckets_hold_similar_lengths() -> None:
    def padding(packing: str) -> int:
        made = plan(200, global_batch_size=64, micro_batch_size=8, packing=packing)
        rows = [[made.lengths[i] for i in batch] for step in range(3) for batch in made.micro_batches(step)]
        return sum(max(row) * len(row) - sum(row) for row in rows)

    assert padding("bucket") < 0.3 * padding("none")


def test_auto_joins_samples_where_padding_would_be_computed() -> None:
    assert Plan([9] * 64, 0, 16, 4, packing="auto").packing == "bucket"
    assert Plan([9] * 64, 0, 16, 1, packing="auto").packing == "pack"
    assert Plan([2, 20] * 32, 0, 3, 3, packing="auto").packing == "pack"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_from_any_step_on_are_the_same(num_workers: int) -> None:
    data, made = Samples(21), plan()
    straight = list(islice(train_steps(data, made, 0, num_workers), 7))
    resumed = list(islice(train_steps(data, made, 4, num_workers), 3))
    for a, b in zip(straight[4:], resumed, strict=True):
        assert all(torch.equal(x.input_ids, y.input_ids) for x, y in zip(a, b, strict=True))
    for step, batches in enumerate(straight):
        expected = [collate([data[i] for i in indices]) for indices in made.micro_batches(step)]
        assert [b.input_ids.tolist() for b in batches] == [b.input_ids.tolist() for b in expected]


def test_collate_pads_and_counts() -> None:
    samples = [
        {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([-100, 6, 7])},
        {"input_ids": torch.tensor([8, 9]), "labels": torch.tensor([8, 9])},
    ]
    batch = collate(samples)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [8, 9, -100]]
    assert batch.tokens == 5
    assert batch.supervised == 3  # nothing comes before the label 8
    assert Batch.empty().supervised == 0


def test_lengths_of_a_dataset_that_does_not_know_them() -> None:
    data = Samples(5)
    assert lengths_of(data.samples) == data.lengths
    assert lengths_of(data) == data.lengths


def test_no_data_is_an_error() -> None:
    with pytest.raises(UserError, match="empty"):
        Plan([], 0, 1, 1)


def test_evaluation_batches_are_dealt_evenly() -> None:
    data = Samples(10)
    alone = list(eval_batches(data, 3, None, 0, 1))
    assert [len(b.input_ids) for b in alone] == [3, 3, 3, 1]
    for world in (2, 3):
        dealt = [list(eval_batches(data, 3, None, rank, world)) for rank in range(world)]
        assert len({len(batches) for batches in dealt}) == 1
        tokens = sorted(b.tokens for batches in dealt for b in batches if b.tokens)
        assert tokens == sorted(b.tokens for b in alone)
    assert len(list(eval_batches(data, 3, 2, 0, 1))) == 2


def test_seeds_of_different_uses_differ() -> None:
    assert len({derive_seed("a", 1, 2), derive_seed("b", 1, 2), derive_seed("a", 12), derive_seed("a", 2, 1)}) == 4
    assert derive_seed("order", 1337, 0) == 507298293352879006  # orders stay what they are


@pytest.fixture(scope="module")
def reference() -> tuple[Samples, dict[str, torch.Tensor], float]:
    """Eight samples, and loss and gradient of the mean over their learnt tokens, computed one sample at a time."""
    torch.manual_seed(0)
    model, data = GPT(tiny_config()).double(), Samples(8)
    losses, count = torch.zeros((), dtype=torch.float64), 0
    for sample in data.samples:
        logits = model(sample["input_ids"][None])[0]
        for t in range(len(sample["labels"]) - 1):
            if (label := int(sample["labels"][t + 1])) != -100:
                losses, count = losses - logits[t].log_softmax(0)[label], count + 1
    (losses / count).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return data, gradients, float(losses.detach() / count)


@pytest.mark.parametrize("packing", ["none", "bucket", "pack"])
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8, 100])
def test_gradient_does_not_depend_on_the_division(
    reference: tuple[Samples, dict[str, torch.Tensor], float], micro: int, packing: str, tmp_path: Path
) -> None:
    data, expected, loss = reference
    torch.manual_seed(0)
    model = GPT(tiny_config())
    found: dict[str, torch.Tensor] = {}

    class Spy(torch.optim.SGD):
        def step(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    run = make_run(tmp_path, data, model=model, micro_batch_size=micro, packing=packing, lr_schedule="constant")
    run.optimizer = Spy(model.parameters(), lr=0.1)
    run.train()
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-6
    assert float(rows(tmp_path)[0]["loss"]) == pytest.approx(loss, abs=1e-5)


def test_a_batch_without_labels_teaches_nothing() -> None:
    model = GPT(tiny_config())
    loss = Objective(model)(Batch.empty())
    loss.backward()
    assert float(loss) == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in model.parameters()) == sum(1 for _ in model.parameters())
