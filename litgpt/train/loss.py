# Licensed under the Apache License 2.0, see the LICENSE file.

"""The cross-entropy of next tokens, without a table of tokens times vocabulary.

Letters in shapes: N positions, M positions with a label, C width of the hidden states, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy

from litgpt.layers import upcast

# Logits of a chunk: small enough to spare memory, large enough for fast matrix products, and above 32 MiB, up to which
# glibc keeps freed memory to itself (M_MMAP_THRESHOLD in mallopt(3)): the peak of the process was up to twice as high.
LOGIT_BYTES = 36 * 2**20
IGNORE_INDEX = -100  # the label of a position that does not count


def chunked_cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    chunk_size: int = 128,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Mean cross-entropy over the labelled positions, in float32.

    The log-probabilities of a piece are computed on their own, so that the whole table of positions times vocabulary
    never exists a second time.

    Args:
        logits: `(B, T, V)`, or pieces of it along T, as `GPT.forward(..., lm_head_chunk_size=...)` gives them.
        targets: `(B, T)`, the label at each position.
        chunk_size: positions of a piece when `logits` is one tensor; 0 takes all at once. Pieces stay as they are.
        ignore_index: the label of a position that does not count.

    Returns:
        A scalar; 0 when no position counts.
    """
    targets = targets.long()
    if isinstance(logits, torch.Tensor):
        flat = logits.flatten(0, -2)
        size = chunk_size or max(1, flat.size(0))
        pieces, labels = flat.split(size), targets.flatten().split(size)
    else:
        pieces = tuple(piece.flatten(0, -2) for piece in logits)
        labels = tuple(part.flatten() for part in targets.split([piece.size(1) for piece in logits], dim=1))
    losses = [
        cross_entropy(piece.float(), part, ignore_index=ignore_index, reduction="sum")
        for piece, part in zip(pieces, labels, strict=True)
    ]
    count = (targets != ignore_index).sum().clamp(min=1)  # stays on the device: nobody has to wait for it
    return torch.stack(losses).sum() / count


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    *,
    softcap: float | None = None,
    logit_multiplier: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    chunk: int | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of `cap(multiplier * head(hidden))` over the labelled positions.

    Positions without a label never reach the head. The others do so a chunk at a time, and the gradients of the
    hidden states and of the head's parameters are worked out from the logits of a chunk while these exist, so that the
    backward pass recomputes nothing and only multiplies by the gradient that comes in.

    Whatever module the head is (with a bias, frozen, tied, adapted), its gradients are autograd's. Its parameters must
    be its own: those of other modules that it reads get no gradient. There is no second derivative.

    Args:
        hidden: `(N, C)` hidden states after the final norm.
        head: maps `(n, C)` to logits `(n, V)`.
        labels: `(N,)` the token that follows each position.
        softcap: logits become `softcap * tanh(logits / softcap)`, after the multiplier.
        logit_multiplier: factor on the logits.
        ignore_index: the label of a position that does not count.
        chunk: positions a chunk, default `chunk_rows`.

    Returns:
        A scalar, float32 (float64 for float64 hidden states); 0 when no position counts.

    Raises:
        ValueError: shapes that do not fit, or no positions in a chunk.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden states must be (N, C) and labels (N,), got {tuple(hidden.shape)} and {tuple(labels.shape)}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk must hold at least one position, got {chunk}")
    options = _Options(softcap, logit_multiplier, ignore_index, chunk)
    trained = [p for p in head.parameters() if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        return _LinearCrossEntropy.apply(hidden, head, labels, options, *trained)
    return _sum_chunks(hidden, head, labels, options)[0]


def chunk_rows(n_rows: int, width: int, vocab_size: int) -> int:
    """Positions whose logits are held at once: `LOGIT_BYTES` of them, or as much as the hidden states if that is more.

    Args:
        n_rows: positions of the micro-batch.
        width: width C of the hidden states.
        vocab_size: logits a position.
    """
    return max(1, LOGIT_BYTES // (4 * vocab_size), n_rows * width // vocab_size)


class _Options(NamedTuple):
    """Of `linear_cross_entropy`, under its names."""

    softcap: float | None
    logit_multiplier: float
    ignore_index: int
    chunk: int | None


class _LinearCrossEntropy(torch.autograd.Function):
    """Carries the gradients that the forward pass worked out to the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, options: _Options, *trained: torch.Tensor
    ) -> torch.Tensor:
        """The loss; `trained` are the parameters of `head` that take a gradient."""
        loss, gradients = _sum_chunks(hidden, head, labels, options, trained, ctx.needs_input_grad[0])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [hidden.dtype, *(p.dtype for p in trained)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients times the one that comes in. New tensors: a graph that is kept may be walked again."""
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        hidden, *trained = (None if g is None else (g * outer).to(dtype) for g, dtype in pairs)
        return hidden, None, None, None, *trained


def _sum_chunks(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    options: _Options,
    trained: Sequence[torch.Tensor] = (),
    train_hidden: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss, and the gradients of the hidden states and of each of `trained`; None where it has or needs none."""
    hidden = hidden.detach()
    rows = (labels != options.ignore_index).nonzero().squeeze(1)  # (M,)
    vocab_size, sums = _start(hidden, head, trained)
    loss = upcast(hidden.new_zeros(()))
    hidden_grad = torch.zeros_like(hidden) if train_hidden else None
    for part in rows.split(options.chunk or chunk_rows(len(hidden), hidden.size(1), vocab_size)):
        h = hidden[part].requires_grad_(train_hidden)
        part_loss, gradients = _one_chunk(h, head, labels[part], options, [h, *trained] if train_hidden else trained)
        loss += part_loss
        if hidden_grad is not None and (own := gradients.pop(0)) is not None:
            hidden_grad[part] = own
        _add(sums, gradients)
        del gradients  # not beside those of the next chunk
    return loss, [hidden_grad, *sums]


def _add(totals: Sequence[torch.Tensor | None], terms: Sequence[torch.Tensor | None]) -> None:
    for total, term in zip(totals, terms, strict=True):
        if total is not None and term is not None:
            total += term


def _start(
    hidden: torch.Tensor, head: nn.Module, trained: Sequence[torch.Tensor]
) -> tuple[int, list[torch.Tensor | None]]:
    """The size of the vocabulary, and a zero for each parameter that the head uses: what no position at all gives."""
    with torch.set_grad_enabled(bool(trained)):
        logits = head(hidden[:0])
        nothing = logits.sum()
    if not nothing.requires_grad:
        return logits.size(-1), [None] * len(trained)
    found = torch.autograd.grad(nothing, trained, allow_unused=True)
    if all(g is None for g in found):
        raise RuntimeError("the head computes with other parameters than its own: their gradients would be lost")
    # sums of many terms: in float32 whatever the parameters are in
    return logits.size(-1), [None if g is None else upcast(g) for g in found]


def _one_chunk(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    options: _Options,
    wanted: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss of some rows `(n, C)` and the gradients of `wanted`. At most two tables `(n, V)`, three with a cap."""
    softcap, multiplier, *_ = options
    with torch.set_grad_enabled(bool(wanted)):
        logits = head(hidden)
    dtype, edge = logits.dtype, get_gradient_edge(logits) if logits.requires_grad else None
    scores = upcast(logits.detach())
    del logits  # the edge is all that its backward pass needs
    squashed = None
    if multiplier != 1.0:
        scores = scores * multiplier
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores = squashed * softcap
    log_p = scores.log_softmax(dim=-1)
    del scores
    at_label = (torch.arange(len(labels), device=labels.device), labels.long())
    loss = -log_p[at_label].sum()
    if edge is None:
        return loss, [None] * len(wanted)
    gradient = log_p.exp_()
    gradient[at_label] -= 1
    if squashed is not None:
        gradient *= squashed.square_().neg_().add_(1)
    if multiplier != 1.0:
        gradient *= multiplier
    return loss, list(torch.autograd.grad([edge], wanted, [gradient.to(dtype)], allow_unused=True))
