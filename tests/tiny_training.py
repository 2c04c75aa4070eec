# Licensed under the Apache License 2.0, see the LICENSE file.

"""A tiny checkpoint folder and tiny data to train on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from litgpt.args import EvalArgs, TrainArgs
from litgpt.checkpoint.convert import save_litgpt
from litgpt.model import GPT
from litgpt.train.loggers import TIMES
from litgpt.train.loop import Run
from litgpt.train.method import Method
from litgpt.train.state import Companions
from tests.tiny_text import VOCAB_SIZE, tiny_config, write_tokenizer

FULL = Method("full", GPT, "lit_model.pth", mark_trainable=lambda model: model.requires_grad_(True))
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences of different lengths, of which a random part is learnt."""

    def __init__(self, n: int, seed: int = 0, longest: int = 20) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = [int(torch.randint(4, longest + 1, (), generator=generator)) for _ in range(n)]
        self.samples = []
        for length in self.lengths:
            ids = torch.randint(VOCAB_SIZE - 4, (length,), generator=generator)
            labels = ids.clone()
            labels[: int(torch.randint(0, length - 2, (), generator=generator))] = -100
            self.samples.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class Data:
    """Stands in for a data module."""

    prompt_style = None

    def __init__(self, train: Any, val: Any = (), num_workers: int = 0) -> None:
        self.train, self.val, self.num_workers = train, val, num_workers

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1) -> None:
        self.max_seq_length = max_seq_length

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str = "") -> None:
        pass

    def train_dataloader(self) -> Any:
        return SimpleNamespace(dataset=self.train, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        return SimpleNamespace(dataset=self.val, num_workers=0)


def write_checkpoint(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A LitGPT folder with random weights and the tokenizer of `tests/tiny_text.py`."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    made = tiny_config(**config)
    save_litgpt(GPT(made), made, folder, hf_config={"model_type": "llama"})
    return folder


def make_run(
    tmp_path: Path,
    dataset: Any,
    val: Any = (),
    model: GPT | None = None,
    eval: EvalArgs | None = None,
    optimizer: Any = ADAMW,
    method: Method = FULL,
    num_workers: int = 0,
    seed: int = 1,
    tokenizer: Any = None,
    kv_cache: str | None = None,
    chunk_size: int = 1024,
    **train: Any,
) -> Run:
    """A training on the CPU that has not begun."""
    if model is None:
        torch.manual_seed(0)
        model = GPT(tiny_config())
    settings: dict[str, Any] = {"global_batch_size": 8, "lr_warmup_steps": 0, "epochs": 1, "save_interval": None}
    return Run(
        Fabric(accelerator="cpu", devices=1),
        method,
        model,
        Data(dataset, val, num_workers),
        TrainArgs(**{**settings, **train}),
        eval or EvalArgs(interval=10**6, final_validation=False),
        optimizer,
        seed,
        tmp_path,
        Companions(model.config, {}, {}, None),
        tokenizer,
        kv_cache,
        chunk_size,
    )


def weights_of(model: GPT) -> dict[str, Tensor]:
    """A copy of a model's tensors, by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rows(out_dir: Path, without: Sequence[str] = TIMES) -> list[dict[str, str]]:
    """The rows of the only metrics file of an output folder, without the columns that measure time."""
    (path,) = out_dir.glob("logs/csv/version_*/metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(file)]
