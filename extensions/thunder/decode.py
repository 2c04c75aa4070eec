# Licensed under the Apache License 2.0, see the LICENSE file.

"""The decode step of litgpt through Thunder, in place of `torch.compile`.

    engine_step = thunder_decode(model)
    logits = engine_step(idx, cache, cache.plan(1))

It is the same function over the same cache: lengths are tensors, buffers are written in place, so one trace serves
every step.
"""

from __future__ import annotations

from typing import Any

import thunder

from litgpt.generate.compiled import CompiledDecode
from litgpt.model import GPT


def thunder_decode(model: GPT, **options: Any) -> CompiledDecode:
    """A decode step compiled by `thunder.jit`; call it as `(idx (B, 1), cache, step) -> logits (B, 1, V)`.

    Args:
        model: the model.
        **options: of `thunder.jit`, such as `executors`.
    """
    return CompiledDecode(model, compiler=lambda run: thunder.jit(run, **options))
