# Licensed under the Apache License 2.0, see the LICENSE file.

"""The cross-entropy of next tokens, in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy


def chunked_cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    chunk_size: int = 128,
    ignore_index: int = -100,
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
