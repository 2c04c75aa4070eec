# Licensed under the Apache License 2.0, see the LICENSE file.

"""Attention of one query a row in a compiled step, reading only the blocks of the cache that hold something visible.

A compiled step must not depend on lengths that the host knows, so a plain kernel under a mask reads the cache to its
end. Here the graph works out from the mask which blocks of slots matter, and the kernel visits these alone
(https://pytorch.org/blog/flexattention/).

Letters in shapes: B batch, H query heads, G key/value groups, R = H / G, S slots, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # slots


def block_mask(visible: torch.Tensor, n_queries: int) -> BlockMask:
    """What the kernel is told of a mask that all queries of a group share.

    Args:
        visible: `(B, G, S)`, True where the row may look.
        n_queries: queries of a group, R.
    """
    n_slots = visible.size(-1)
    blocks = F.pad(visible, (0, -n_slots % BLOCK)).unflatten(-1, (-1, BLOCK))  # (B, G, S / BLOCK, BLOCK)
    live = blocks.any(dim=-1).to(torch.int32)
    # the live blocks first, in order; the kernel reads as many as there are
    indices = live.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return visible[b, h, kv]

    return BlockMask.from_kv_blocks(
        live.sum(dim=-1, dtype=torch.int32).unsqueeze(-1),
        indices.unsqueeze(-2),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(n_queries, n_slots),
    )


def attend_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: BlockMask,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from one query a row; see `litgpt.attention.attend` for the meaning of the options.

    Args:
        q: `(B, H, 1, D)`.
        k: `(B, G, S, D)`.
        v: `(B, G, S, Dv)`.
        blocks: made by `block_mask`.
        scale: factor on the scores.
        softcap: cap of the scores.
        sinks: `(H,)` logits of the learned attention sinks.

    Returns:
        `(B, H, 1, Dv)`.
    """
    n_batch, n_head, _, size = q.shape

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    folded = q.reshape(n_batch, k.size(1), -1, size)  # the heads of a group are its queries: (B, G, R, D)
    score_mod = None if softcap is None else capped
    if sinks is None:
        y = flex_attention(folded, k, v, score_mod, blocks, scale)
    else:  # a sink takes its share of the weight and gives nothing: y * sigmoid(lse - sink)
        new = hasattr(torch_flex, "AuxRequest")  # torch 2.9; asking for the log-sum-exp was spelled differently before
        wanted: dict[str, Any] = {"return_aux": torch_flex.AuxRequest(lse=True)} if new else {"return_lse": True}
        y, aux = flex_attention(folded, k, v, score_mod, blocks, scale, **wanted)
        lse = aux.lse if new else aux
        share = torch.sigmoid(lse - sinks.to(lse.dtype).view(1, k.size(1), -1))
        y = (y * share.unsqueeze(-1)).to(v.dtype)
    return y.reshape(n_batch, n_head, 1, -1)
