# Licensed under the Apache License 2.0, see the LICENSE file.

"""The memory of training: estimated before loading, probed before training, explained when there is too little."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from litgpt import lora
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.model import GPT
from litgpt.train import memory
from litgpt.train.activation import checkpoint_activations
from litgpt.train.curve import draw_loss, read_curves, smooth
from litgpt.train.memory import MemoryEstimate, check_fits, estimate_training, explain_out_of_memory, probe
from tests.live_bytes import LiveBytes
from tests.tiny import random_ids, tiny_pair

BATCH, LENGTH = 2, 24


def maker(name: str, with_lora: bool, **overrides: int) -> Callable[[], GPT]:
    """Builds a tiny model as it is trained."""
    config_class = lora.Config if with_lora else Config
    plain = vars(tiny_pair(name)[1].config)
    fields = {key: value for key, value in plain.items() if key in config_class.__dataclass_fields__}
    options = {"lora_r": 3, "lora_dropout": 0.1, "lora_targets": "all-linear"} if with_lora else {}
    config = config_class(**{**fields, **options, **overrides})

    def make() -> GPT:
        gpt = (lora.GPT if with_lora else GPT)(config)
        if with_lora:
            lora.mark_only_lora_as_trainable(gpt)
        return gpt

    return make


def adamw(gpt: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in gpt.parameters() if p.requires_grad])


def saved_bytes(gpt: GPT, idx: torch.Tensor) -> int:
    """What autograd keeps of a real forward pass, parameters aside: each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*gpt.parameters(), *gpt.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gpt.hidden(idx)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_activations_are_what_autograd_keeps(name: str, with_lora: bool) -> None:
    make = maker(name, with_lora, **({"n_layer": 5} if name == "llama" else {}))
    estimate = estimate_training(make, adamw, BATCH, LENGTH)
    assert estimate.activations == saved_bytes(make(), random_ids((BATCH, LENGTH)))


def test_the_other_terms_are_those_of_a_real_step() -> None:
    make = maker("qwen2", False)  # its embedding and head are one tensor
    estimate = estimate_training(make, adamw, BATCH, LENGTH)
    gpt = make()
    optimizer = adamw(gpt)
    gpt.hidden(random_ids((BATCH, LENGTH))).sum().backward()
    gpt.lm_head.weight.grad = torch.zeros_like(gpt.lm_head.weight)
    optimizer.step()
    assert estimate.weights == sum(p.nbytes for p in gpt.parameters())
    assert estimate.gradients == sum(p.grad.nbytes for p in gpt.parameters())
    state = [t for values in optimizer.state.values() for t in values.values()]
    assert estimate.optimizer == sum(t.nbytes for t in state)
    plain = estimate_training(make, lambda m: torch.optim.SGD(m.parameters()), BATCH, LENGTH)
    assert plain.optimizer == 0


def test_frozen_in_16_bits_and_autocast() -> None:
    make = maker("llama", True)

    def halved() -> GPT:
        gpt = make()
        for parameter in gpt.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        return gpt

    estimate = estimate_training(halved, adamw, BATCH, LENGTH, autocast=torch.bfloat16)
    gpt = halved()
    assert estimate.weights == sum(p.nbytes for p in gpt.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert estimate.activations == saved_bytes(gpt, random_ids((BATCH, LENGTH)))


@pytest.mark.parametrize(("name", "n_layer"), [("llama", 6), ("deepseek_v3", 3)])
def test_checkpointed_activations(name: str, n_layer: int) -> None:
    make = maker(name, True, n_layer=n_layer)
    none, selective, block = (
        estimate_training(make, adamw, BATCH, LENGTH, mode).activations for mode in ("none", "selective", "block")
    )
    assert block < selective < none
    gpt = make()
    for mode, expected in (("block", block), ("selective", selective)):
        checkpoint_activations(gpt, mode)
        with LiveBytes() as live:
            hidden = gpt.hidden(random_ids((BATCH, LENGTH)))
            waiting = live.now - hidden.nbytes
            hidden.sum().backward()
        assert waiting < expected < 1.4 * live.peak


def test_nothing_is_allocated_and_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    make = maker("llama", True, n_layer=3, n_embd=32_768, intermediate_size=131_072)  # 200 GB
    estimate = estimate_training(make, adamw, 1, 65_536)
    assert estimate.weights > 100 * 2**30
    assert torch.equal(before, torch.get_rng_state())


GIB = 2**30
EVEN = MemoryEstimate(GIB, GIB, GIB, GIB, GIB, batch_size=4, length=512)


def with_most_of(term: str, **fields: object) -> MemoryEstimate:
    return MemoryEstimate(**{**vars(EVEN), term: 8 * GIB, **fields})


@pytest.mark.parametrize(
    ("estimate", "flag"),
    [
        (with_most_of("activations"), "--train.micro_batch_size 2"),
        (with_most_of("activations", batch_size=1), "--train.checkpoint_activations block"),
        (with_most_of("activations", batch_size=1, checkpointing="block"), "--train.max_seq_length 256"),
        (with_most_of("loss", batch_size=1), "--train.max_seq_length 256"),
        (with_most_of("weights"), "--precision bf16-true"),
        (with_most_of("optimizer"), "finetune_lora"),
        (with_most_of("gradients"), "finetune_lora"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_names_the_largest_part_and_a_flag(estimate: MemoryEstimate, flag: str, error: Exception) -> None:
    with pytest.raises(UserError) as caught, explain_out_of_memory(estimate):
        raise error
    assert f"of which {estimate.largest} 8.0 GiB" in caught.value.message
    assert "12.0 GiB" in caught.value.message
    assert flag in caught.value.hint


def test_a_real_lack_of_memory_is_recognised() -> None:
    with pytest.raises(UserError, match="out of memory"), explain_out_of_memory(EVEN):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(EVEN):
        torch.ones(2, 3) @ torch.ones(2, 3)  # anything else stays what it is


def test_the_flags_exist() -> None:
    from litgpt.args import TrainArgs

    known = TrainArgs.__dataclass_fields__
    assert {"micro_batch_size", "checkpoint_activations", "max_seq_length"} <= set(known)


def test_table() -> None:
    assert EVEN.table().splitlines() == [
        "memory of a step of 4 x 512 tokens:",
        *(f"  {name:<12}     1.0 GiB" for name in ("weights", "gradients", "optimizer", "activations", "loss")),
        "  total            5.0 GiB",
    ]


@pytest.mark.parametrize("available", [GIB, 100 * GIB, None])
def test_what_does_not_fit_is_said_beforehand(
    available: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: available)
    monkeypatch.setattr(logging.getLogger("litgpt"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="litgpt"):
        check_fits(with_most_of("activations"), torch.device("cpu"))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "memory of a step" in caplog.records[0].getMessage()
    assert bool(warnings) == (available == GIB)
    if warnings:
        assert "about 12.0 GiB, 1.0 GiB are free" in warnings[0]
        assert "--train.micro_batch_size 2" in warnings[0]


def test_probe_leaves_no_trace() -> None:
    gpt = maker("llama", True)().train()
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    state = torch.get_rng_state()
    ran = False

    def run() -> None:
        nonlocal ran
        gpt.hidden(random_ids((BATCH, LENGTH))).sum().backward()
        ran = any(p.grad is not None for p in gpt.parameters())

    assert probe(run, gpt.parameters(), torch.device("cpu")) is None
    assert ran
    assert all(p.grad is None for p in gpt.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in gpt.state_dict().items())


METRICS = "step,loss,val_loss\n1,4.0,\n2,3.0,\n2,,3.5\n3,nan,\n4,2.0,\nx,1.0,\n"


def test_curves_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(METRICS, encoding="utf-8")
    assert read_curves(path) == {"loss": [(1, 4.0), (2, 3.0), (4, 2.0)], "val_loss": [(2, 3.5)]}
    with pytest.raises(UserError, match="no metrics at"):
        read_curves(tmp_path / "other.csv")
    path.write_text("step,loss\n", encoding="utf-8")
    with pytest.raises(UserError, match="no loss in it"):
        read_curves(path)


def test_smoothing() -> None:
    assert smooth([3.0, 1.0]) == [3.0, 1.0]
    values = [float(i % 2) for i in range(40)]  # a window of two
    assert smooth(values) == [0.0, *[0.5] * 39]


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.csv").write_text(METRICS, encoding="utf-8")
    draw_loss(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "loss.png"}


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS, encoding="utf-8")
    monkeypatch.setattr("litgpt.constants.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"matplotlib.*litgpt\[loggers\]"):
        draw_loss(tmp_path / "metrics.csv", tmp_path / "loss.png")
