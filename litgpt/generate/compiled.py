# Licensed under the Apache License 2.0, see the LICENSE file.

"""The decode step, compiled to one graph that serves every length and every cache of the same size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.kvcache import KVCache
from litgpt.model import GPT

# One graph a batch size and size of cache, of all engines in the process; torch's own limit of 8 would end in an error
MAX_GRAPHS = 256
StepFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, KVCache], torch.Tensor]


class CompiledDecode:
    """One token a row through one compiled graph; call it as `(idx (B, 1), cache, step) -> logits (B, 1, V)`.

    Lengths enter the graph as tensors and attention runs over the full buffers under a mask: a host integer would mean
    one graph a value, and a length read from a tensor would break the graph.

    Args:
        model: the model.
        backend: backend of `torch.compile`.
        compiler: what compiles the function `(idx, pos, end, cache) -> logits`, instead of `torch.compile`.
    """

    def __init__(
        self, model: GPT, backend: Any = "inductor", compiler: Callable[[StepFunction], StepFunction] | None = None
    ) -> None:
        self.model = model
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
        options: dict[str, Any] | None = None
        if backend == "inductor" and model.transformer.wte.weight.is_cpu:
            from litgpt.generate.matvec import MatVecPass

            options = {"post_grad_custom_pre_pass": MatVecPass()}
        torch_compiler = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False, options=options)
        self.compiled: StepFunction = (compiler or torch_compiler)(self._run)

    def _run(self, idx: torch.Tensor, pos: torch.Tensor, end: torch.Tensor, cache: KVCache) -> torch.Tensor:
        logits = self.model.run(idx, Step(pos, end), cache)
        assert isinstance(logits, torch.Tensor)
        return logits

    def __call__(self, idx: torch.Tensor, cache: KVCache, step: Step) -> torch.Tensor:
        """Run a step of one token a row, planned on `cache`, and commit it.

        Raises:
            UserError: the cache is of a kind that does not compile.
        """
        assert step.size == 1, "the compiled step takes one token a row"
        if not cache.compilable:
            raise UserError("this kind of KV cache does not compile", "leave out --compile, or use --kv_cache dense")
        for table in self.model.rope.tables:  # filled here, so that the graph only reads it
            self.model.rope.frequencies(table, cache.rope_length, cache.device)
        # rows that agree may share one position: spell it out, so that there is one graph
        pos = step.pos.repeat(cache.batch_size // len(step.pos), 1)
        end = step.end.repeat(cache.batch_size // len(step.end))
        idx = idx.clone(memory_format=torch.contiguous_format)  # a slice has other strides: another graph
        logits = self.compiled(idx, pos, end, cache)
        cache.commit(step)
        return logits
