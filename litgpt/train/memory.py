# Licensed under the Apache License 2.0, see the LICENSE file.

"""How much memory training takes, before anything is loaded, and what to do when that is too much.

There is no formula for what a model keeps: it is built and run without numbers (tensors that have a shape and nothing
else), and whatever autograd holds on to is counted. Layers of a kind are alike, so one of each kind is run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from litgpt.args import CHUNK_SIZE
from litgpt.errors import UserError
from litgpt.kvcache.memory import available_bytes, in_words
from litgpt.train.activation import KEPT, Mode
from litgpt.train.loss import chunk_rows
from litgpt.train.memory_cached import LastChunk

if TYPE_CHECKING:
    from litgpt.attention import Step
    from litgpt.model import GPT

logger = logging.getLogger(__name__)

# What the allocators of torch and Python say; a type of its own only on GPUs
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a step of training holds at once.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters that learn.
        optimizer: what the optimizer remembers.
        activations: what the forward pass of a micro-batch keeps for the backward pass.
        loss: logits of a chunk and the gradients of the head, while the loss is computed.
        batch_size: rows of the micro-batch.
        length: tokens of a row.
        checkpointing: mode of activation checkpointing.
        cache: keys, values and their gradients, of training under a KV cache; activations and loss are then those of a
            chunk.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    batch_size: int
    length: int
    checkpointing: Mode = "none"
    cache: int = 0

    @property
    def terms(self) -> dict[str, int]:
        """The parts, by name."""
        names = ["weights", "gradients", "optimizer", "activations", "loss", *(["cache"] if self.cache else [])]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(self.terms, key=lambda name: self.terms[name])

    def table(self) -> str:
        """The parts and their sum, a line each."""
        lines = {**self.terms, "total": self.total}
        shown = [f"  {name:<12}{in_words(size):>12}" for name, size in lines.items()]
        return "\n".join([f"memory of a step of {self.batch_size} x {self.length} tokens:", *shown])

    def advice(self) -> str:
        """The flag that makes the largest part smaller, the one that changes least first."""
        if self.largest in ("activations", "loss"):
            if self.batch_size > 1:
                return f"--train.micro_batch_size {self.batch_size // 2}: the same result, in smaller pieces"
            if self.largest == "activations" and self.checkpointing != "block":
                return "--train.checkpoint_activations block: the same result, about a third slower"
            return f"--train.max_seq_length {max(1, self.length // 2)}: longer samples are cut"
        if self.largest == "cache":
            return "--kv_cache with offload, as in h2o:1024,offload: the same result, slower"
        if self.largest == "weights":
            return "--quantize bnb.nf4 with finetune_lora, --precision bf16-true, or a smaller model"
        return "finetune_lora or finetune_adapter: they train few parameters"


def estimate_training(
    make_model: Callable[[], GPT],
    make_optimizer: Callable[[GPT], torch.optim.Optimizer],
    batch_size: int,
    length: int,
    checkpointing: Mode = "none",
    autocast: torch.dtype | None = None,
    kv_cache: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> MemoryEstimate:
    """What a step takes, without allocating any of it.

    Args:
        make_model: builds the model as it will be trained: its dtypes, and the parameters that learn marked. It is
            called where tensors hold no numbers, so it must not load any.
        make_optimizer: the optimizer of that model.
        batch_size: rows of a micro-batch.
        length: tokens of the longest row.
        checkpointing: mode of activation checkpointing; of a model that is not checkpointed yet.
        autocast: dtype that a mixed precision computes in.
        kv_cache: kind of the KV cache to train under.
        chunk_size: tokens that go through that cache at once.
    """
    with FakeTensorMode(), _EvenSplits(), torch.random.fork_rng(devices=[]):
        gpt = make_model().train()
        learning = [p for p in gpt.parameters() if p.requires_grad]
        last = None
        if kv_cache is not None:
            dtype = autocast or gpt.transformer.wte.weight.dtype
            last = LastChunk(gpt.config, kv_cache, batch_size, length, chunk_size, dtype)
        idx = torch.zeros((batch_size, length if last is None else last.step.size), dtype=torch.long)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            activations, hidden = _activations(gpt, idx, checkpointing, last)
        gradients = _bytes(p.untyped_storage() for p in learning)
        return MemoryEstimate(
            weights=_bytes(t.untyped_storage() for t in chain(gpt.parameters(), gpt.buffers())),
            gradients=gradients,
            optimizer=_optimizer_bytes(make_optimizer(gpt), learning),
            activations=activations,
            loss=_loss_bytes(gpt, hidden),
            batch_size=batch_size,
            length=length,
            checkpointing=checkpointing,
            cache=0 if last is None else last.nbytes + gradients,  # those of the micro-batch are apart at first
        )


class _EvenSplits(TorchFunctionMode):
    """Goes on where the model asks a tensor for numbers that it does not have.

    How many tokens each expert gets makes no difference to their sum: a split by unknown sizes becomes an even one.
    Counters of optimizers are 1.
    """

    class Unknown(float):
        """A number that nobody knows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "item":  # which `tolist` calls for every element
            return self.Unknown(1)
        if name == "split" and isinstance(args[1], list) and isinstance(args[1][0], self.Unknown):
            return args[0].tensor_split(len(args[1]))
        return func(*args, **(kwargs or {}))


@dataclass
class _Part:
    """What one part of a forward pass leaves behind, by the identity of storages.

    Attributes:
        saved: what autograd keeps.
        results: those of the operations that selective checkpointing does not compute again.
    """

    saved: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    results: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def all_bytes(self) -> int:
        return _bytes(self.saved.values())

    @property
    def result_bytes(self) -> int:
        return _bytes(self.results.values())

    @property
    def other_bytes(self) -> int:
        return _bytes(s for key, s in self.saved.items() if key not in self.results)


class _Watch(TorchDispatchMode):
    """Context that notes what waits for the backward pass, and which block left it. Parameters do not count."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.outside = _Part()  # of all blocks, or shared by them
        self.part = self.outside
        self.shared: set[int] = set()
        self._known = {_identity(t) for t in chain(gpt.parameters(), gpt.buffers())}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _identity(tensor)
        if key not in self._known:
            part = self.outside if key in self.shared else self.part
            part.saved[key] = tensor.untyped_storage()  # held, so that no other gets its identity
        return tensor

    def __enter__(self) -> _Watch:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            for tensor in filter(torch.is_tensor, tree_leaves(result)):
                self.part.results[_identity(tensor)] = tensor.untyped_storage()
        return result


class _Watched(nn.Module):
    """A block whose traces are noted apart; None leaves it out."""

    def __init__(self, block: nn.Module | None, watch: _Watch) -> None:
        super().__init__()
        self.block, self.watch, self.part = block, watch, _Part()

    def forward(self, x: torch.Tensor, rope: Any, step: Step, cache: Any) -> torch.Tensor:
        if self.block is None:
            return x
        if rope is not None:
            self.watch.shared |= {_identity(rope.cos), _identity(rope.sin)}
        self.watch.part = self.part
        x = self.block(x, rope, step, cache)
        self.watch.part = self.watch.outside
        return x


def _activations(gpt: GPT, idx: torch.Tensor, checkpointing: Mode, last: LastChunk | None) -> tuple[int, torch.Tensor]:
    """Bytes that the forward pass keeps, and what the head will read."""
    blocks = gpt.transformer.h
    layers: dict[Any, list[int]] = {}
    for i in range(len(blocks)):
        layers.setdefault(_kind(gpt, i), []).append(i)
    first = {indices[0] for indices in layers.values()}
    watch = _Watch(gpt)
    watched = [_Watched(block if i in first else None, watch) for i, block in enumerate(blocks)]
    gpt.transformer.h = nn.ModuleList(watched)
    try:
        with watch:
            hidden = gpt.hidden(idx) if last is None else gpt.hidden(idx, last.step, cast(Any, last))
    finally:
        gpt.transformer.h = blocks
    parts = [(watched[indices[0]].part, len(indices)) for indices in layers.values()]
    parts = [(part, count) for part, count in parts if part.saved]  # what comes before all that learns keeps nothing
    outside = watch.outside.all_bytes
    everything = outside + sum(count * part.all_bytes for part, count in parts)
    if checkpointing == "none" or not parts:
        return everything, hidden
    an_input = hidden.numel() * hidden.element_size()
    selective = checkpointing == "selective"
    # on top of what all blocks keep, one of them at a time has what it computes again
    again = max((part.other_bytes if selective else part.all_bytes) - an_input for part, _ in parts)
    each = sum(count * (an_input + (part.result_bytes if selective else 0)) for part, count in parts)
    return min(everything, outside + each + again), hidden


def _kind(gpt: GPT, i: int) -> Any:
    """Layers of which this is equal keep the same."""
    blocks, config = gpt.transformer.h, gpt.config
    before = chain(gpt.transformer.wte.parameters(), *(block.parameters() for block in list(blocks)[:i]))
    parameters = ((name, p.shape, p.dtype, p.requires_grad) for name, p in blocks[i].named_parameters())
    takes_gradient = any(p.requires_grad for p in before)
    return config.layer_window(i), config.layer_rope(i), takes_gradient, tuple(parameters)


def _optimizer_bytes(optimizer: torch.optim.Optimizer, learning: Collection[torch.Tensor]) -> int:
    """Bytes of an optimizer's state after a step."""
    for parameter in learning:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return _bytes(t.untyped_storage() for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t))


def _loss_bytes(gpt: GPT, hidden: torch.Tensor) -> int:
    """What `linear_cross_entropy` holds at its peak: see `litgpt.train.loss`."""
    n_rows, vocab_size = hidden.numel() // hidden.size(-1), gpt.config.padded_vocab_size
    assert vocab_size is not None
    n_tables = 2 if gpt.config.final_logit_softcapping is None else 3
    table = 4 * vocab_size * min(n_rows, chunk_rows(n_rows, hidden.size(-1), vocab_size))
    head = sum(p.numel() for p in gpt.lm_head.parameters() if p.requires_grad)
    return n_tables * table + 2 * 4 * head + hidden.numel() * hidden.element_size()


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes of storages, each once."""
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def check_fits(estimate: MemoryEstimate, device: torch.device) -> None:
    """Log the estimate, and warn with what to change if there is no room for it."""
    logger.info("%s", estimate.table())
    available = available_bytes(device)
    if available is not None and estimate.total > available:
        logger.warning(
            "training takes about %s, %s are free on %s. Most of it is %s; try %s",
            *(in_words(estimate.total), in_words(available), device, estimate.largest, estimate.advice()),
        )


@contextlib.contextmanager
def explain_out_of_memory(estimate: MemoryEstimate) -> Iterator[None]:
    """Context in which running out of memory becomes an error that says what takes most and what to change.

    Raises:
        UserError: there was not enough memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not isinstance(error, MemoryError) and not any(text in str(error).lower() for text in _OUT_OF_MEMORY):
            raise
        size = in_words(estimate.terms[estimate.largest])
        raise UserError(
            f"out of memory: a step of {estimate.batch_size} x {estimate.length} tokens takes about "
            f"{in_words(estimate.total)}, of which {estimate.largest} {size}",
            estimate.advice(),
        ) from error


def probe(run: Callable[[], Any], parameters: Iterable[torch.Tensor], device: torch.device) -> int | None:
    """Go once through what needs the most memory, the longest batch, and forget that it happened.

    So a lack of memory shows before training, not hours into it. Gradients and random numbers are as before.

    Args:
        run: forward and backward pass of the longest batch.
        parameters: of the model; they must have no gradients yet.
        device: where it runs.

    Returns:
        The peak in bytes on a GPU, None elsewhere.
    """
    parameters = list(parameters)
    assert all(p.grad is None for p in parameters), "gradients that were there would be lost"
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        run()
    for parameter in parameters:
        parameter.grad = None
    return torch.cuda.max_memory_allocated(device) if on_gpu else None
