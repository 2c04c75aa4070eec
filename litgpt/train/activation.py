# Licensed under the Apache License 2.0, see the LICENSE file.

"""Activation checkpointing: blocks forget what they computed and compute it again in the backward pass.

The gradients are the same to the last bit: random numbers (dropout) are drawn again from the same state.
https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

if TYPE_CHECKING:
    from litgpt.attention import Step
    from litgpt.model import GPT

Mode = Literal["none", "block", "selective"]

_aten = torch.ops.aten
# What `selective` keeps: products with weights, and attention by fused kernels, which grow with the length alone. The
# batched products of attention that is written out grow with its square and are computed again.
KEPT = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_aten, name)
)


def checkpoint_activations(gpt: GPT, mode: Mode) -> None:
    """Choose what the blocks of a model keep for the backward pass. Parameters and their names stay as they are.

    Args:
        gpt: the model, changed in place; may be called again with another mode.
        mode: `none` keeps everything, `block` the input of each block, `selective` that and the results of products
            with weights and of attention.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode of activation checkpointing {mode!r}: use one of {', '.join(get_args(Mode))}")
    for block in gpt.transformer.h:
        block.__dict__.pop("forward", None)  # of an earlier call
        if mode != "none":
            block.__dict__["forward"] = partial(_forward, block.forward, mode)


def _forward(
    plain: Callable[..., torch.Tensor], mode: Mode, x: torch.Tensor, rope: Any, step: Step, cache: Any = None
) -> torch.Tensor:
    if cache is not None or not torch.is_grad_enabled():  # writing to a cache twice would be wrong
        return plain(x, rope, step, cache)
    contexts = noop_context_fn
    if mode == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(plain, x, rope, step, use_reentrant=False, context_fn=contexts)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
