# Licensed under the Apache License 2.0, see the LICENSE file.

"""Evaluation while training, in a context that leaves no trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from litgpt.args import EvalArgs
from litgpt.generate.engine import Engine
from litgpt.generate.types import SamplingParams
from litgpt.train.batches import IGNORE, Batch, derive_seed

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from litgpt.model import GPT
    from litgpt.tokenizer import Tokenizer

EXAMPLE_TEMPERATURE = 0.8  # as the command `generate` has it


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards everything is as before.

    That is: the mode of each module, the random numbers of torch (all devices), Python and numpy, and the settings of
    cuDNN. Training goes on as if nothing had happened.
    """
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    cudnn = torch.backends.cudnn
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    model.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        random.setstate(python)
        np.random.set_state(numpy)
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags


def mean_loss(fabric: Fabric, objective: nn.Module, batches: Iterable[Batch]) -> float:
    """The loss per learnt token over all batches of all devices; NaN when no token is learnt.

    Args:
        fabric: reduces over devices and computes in its precision.
        objective: gives the summed loss of a batch.
        batches: those of this device; every device has the same number.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        if batch.supervised or fabric.world_size > 1:
            with fabric.autocast():
                loss = objective(batch.to(fabric.device))
            total += torch.tensor([float(loss), batch.supervised], dtype=torch.float64)
    total = sum_over_devices(fabric, total)
    return float(total[0] / total[1])


def answer_example(
    model: GPT,
    tokenizer: Tokenizer,
    dataset: Any,
    eval: EvalArgs,
    step: int,
    autocast: torch.dtype | None = None,
    kv_cache: str = "dense",
) -> tuple[str, str]:
    """Let the model answer a sample.

    Args:
        model: the model.
        tokenizer: decodes both texts.
        dataset: where the sample comes from.
        eval: which sample, and the length of the answer.
        step: seeds the choices.
        autocast: the dtype of a mixed precision.
        kv_cache: kind of the KV cache to answer with.

    Returns:
        The prompt and the answer, as text.
    """
    assert eval.max_new_tokens is not None
    chosen = {"first": 0, "random": derive_seed("example", step)}.get(str(eval.evaluate_example))
    index = int(eval.evaluate_example if chosen is None else chosen) % len(dataset)
    prompt = _prompt_of(dataset, index)[-(model.max_seq_length - 1) :]
    params = SamplingParams(
        max_new_tokens=eval.max_new_tokens, temperature=EXAMPLE_TEMPERATURE, seed=derive_seed("answer", step)
    )
    (result,) = Engine(model, tokenizer, kv_cache=kv_cache, autocast=autocast).generate([prompt], params)
    return tokenizer.decode(torch.tensor(prompt)), result.text


def _prompt_of(dataset: Any, index: int) -> list[int]:
    """The ids before the answer; of a dataset that does not know them, those before the first that is learnt."""
    if hasattr(dataset, "prompt"):
        return dataset.prompt(index).tolist()
    ids, labels = dataset[index]["input_ids"].tolist(), dataset[index]["labels"].tolist()
    first = next((i for i, label in enumerate(labels) if label != IGNORE), len(labels))
    return ids[:first] if first else ids[:-1]


def sum_over_devices(fabric: Fabric, values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all devices, on the CPU."""
    if fabric.world_size == 1:
        return values
    reduced = fabric.all_reduce(values.to(fabric.device), reduce_op="sum")
    assert isinstance(reduced, torch.Tensor)
    return reduced.cpu()
