# Licensed under the Apache License 2.0, see the LICENSE file.

"""The decode step, plain or compiled: one callable for the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.kvcache import KVCache
from litgpt.model import GPT

DecodeStep = Callable[[torch.Tensor, Step], torch.Tensor]


def decode_step(model: GPT, cache: KVCache, compile: bool = False, backend: Any = "inductor") -> DecodeStep:
    """Return `(idx (B, 1), step) -> logits (B, 1, V)`, which also commits the step to the cache.

    Args:
        model: the model.
        cache: the cache that the steps were planned on.
        compile: compile once, to a single graph that serves every length.
        backend: backend of `torch.compile`.

    Raises:
        UserError: the cache is of a kind that does not compile.
    """
    if compile:
        return CompiledDecode(model, cache, backend)

    def plain(idx: torch.Tensor, step: Step) -> torch.Tensor:
        logits = model(idx, cache=cache, step=step, last_only=True)
        assert isinstance(logits, torch.Tensor)
        return logits

    return plain


class CompiledDecode:
    """One token a row through one compiled graph.

    Lengths enter the graph as tensors and attention runs over the full buffers under a mask: a host integer would mean
    one graph a value, and a length read from a tensor would break the graph.

    Args:
        model: the model.
        cache: the cache; its buffers are updated in place.
        backend: backend of `torch.compile`.
    """

    def __init__(self, model: GPT, cache: KVCache, backend: Any = "inductor") -> None:
        if not cache.compilable:
            raise UserError("this kind of KV cache does not compile", "leave out --compile, or use --kv_cache dense")
        self.model, self.cache = model, cache
        for table in model.rope.tables:  # filled here, so that the graph only reads it
            model.rope.frequencies(table, cache.max_length, cache.device)
        self._compiled = torch.compile(self._run, backend=backend, fullgraph=True, dynamic=False)

    def _run(self, idx: torch.Tensor, pos: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        logits = self.model.run(idx, Step(pos, end), self.cache)
        assert isinstance(logits, torch.Tensor)
        return logits

    def __call__(self, idx: torch.Tensor, step: Step) -> torch.Tensor:
        """Run a step of one token a row; see `decode_step`."""
        assert step.size == 1, "the compiled step takes one token a row"
        n_rows = self.cache.batch_size
        # rows that agree may share one position: spell it out, so that there is one graph
        logits = self._compiled(
            idx, step.pos.repeat(n_rows // len(step.pos), 1), step.end.repeat(n_rows // len(step.end))
        )
        self.cache.commit(step)
        return logits
