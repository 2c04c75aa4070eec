# Licensed under the Apache License 2.0, see the LICENSE file.

"""Attention over a view of the cache: the only place that decides visibility, builds a mask or picks a kernel.

Where a token is stored and what is visible are independent. A view says which absolute position each of its slots
holds, and a query at position `q` sees the slot of position `p` when `0 <= p <= q` and `p` lies inside the window (or
is an attention sink kept by the cache). Slots that were never written, or that belong to a sequence since rewound,
hold a position that no query sees.

Letters in shapes: B batch, T new tokens, H query heads, G key/value groups, R = H / G, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from litgpt.layers import upcast

SUM_BLOCK = 128  # queries a block when only the sums of weights are wanted
FLEX_DEVICES = ("cuda",)  # where a compiled step visits the live blocks of the cache only
QUERY_BLOCK = 512  # queries a block where scores are written out: bounds memory at QUERY_BLOCK * S instead of T * S


class KVView(NamedTuple):
    """What a cache shows to attention: full buffers and the position each slot holds.

    Attributes:
        k: `(B, G, S, D)` keys.
        v: `(B, G, S, Dv)` values.
        pos: `(B or 1, G or 1, S)` absolute position held by each slot, -1 for nothing.
        live: host integer; slots from `live` on are empty in every row. None: not known on the host.
        n_sink: positions below this are visible whatever the window.
        key: names this layout of positions within a step, so that layers share masks. None: do not share.
        window: window in tokens that the cache imposes on top of the layer's own.
        relative_sinks: sinks are seen as if they stood right before the window (positions inside the cache).
        holes: slots below `live` may be empty, so the lengths do not tell that all of them are visible.
    """

    k: torch.Tensor
    v: torch.Tensor
    pos: torch.Tensor
    live: int | None = None
    n_sink: int = 0
    key: Hashable = None
    window: int | None = None
    relative_sinks: bool = False
    holes: bool = False


@dataclass
class Step:
    """What one forward pass needs to know about positions. Built on the host, once for all layers.

    Attributes:
        pos: `(B, T)` absolute positions, -1 for padding; rows are padded on the right. `(1, T)` when all rows agree.
        end: `(B,)` length of each row after the step, `(1,)` when all rows agree.
        live: host integer, the longest row after the step. None: attend to full buffers under a mask.
        start: host integer, the length of every row before the step, when all agree and none is padded.
        fresh: every row starts at position 0.
        lengths: row lengths after the step, to be committed by the cache once the forward pass succeeded.
        last: `(B,)` index of each row's last new token, None when that is `T - 1` for every row.
        memo: what layers work out once and share, such as masks.
        size: number of new tokens T, padding included.
        sink_rope: by layer, the rotation that takes queries to where sinks see them; None without relative sinks.
        documents: by row, the lengths of the sequences that it holds one after the other; None: each row is one.
            The last of a row may be its padding.
        reach: length in tokens that sequences of a pass without a cache may reach, which the rotary tables of some
            models depend on. 0: that of the longest sequence of the step.
    """

    pos: torch.Tensor
    end: torch.Tensor
    live: int | None = None
    start: int | None = None
    fresh: bool = False
    lengths: list[int] | None = None
    last: torch.Tensor | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict)
    sink_rope: list[Any] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    reach: int = 0

    def __post_init__(self) -> None:
        self.size = self.pos.size(1)
        self.reach = self.reach or self.size

    @property
    def begin(self) -> torch.Tensor:
        """`(B,)` length of each row before the step."""
        return self.end - (self.pos >= 0).sum(dim=1)

    @classmethod
    def without_cache(cls, n_tokens: int, device: torch.device, reach: int = 0) -> Step:
        """The step of a plain forward pass over `n_tokens` positions from 0."""
        pos = torch.arange(n_tokens, device=device).unsqueeze(0)
        end = torch.full((1,), n_tokens, device=device)
        return cls(pos, end, live=n_tokens, start=0, fresh=True, reach=reach)

    @classmethod
    def packed(cls, documents: Sequence[Sequence[int]], device: torch.device, reach: int = 0) -> Step:
        """The step of a plain forward pass over rows of several sequences, none of which sees another.

        Args:
            documents: by row, the lengths in tokens of its sequences in their order. Shorter rows are padded on the
                right to the longest.
            device: where the token ids are.
            reach: see the attribute of this name.

        Raises:
            ValueError: no row, or a sequence without tokens.
        """
        if not documents or not all(row and min(row) > 0 for row in documents):
            raise ValueError(f"every row must hold sequences of at least one token, got lengths {list(documents)}")
        size = max(map(sum, documents))
        pos = torch.full((len(documents), size), -1)
        for row, lengths in zip(pos, documents, strict=True):
            row[: sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
        end = (pos >= 0).sum(dim=1)
        padded = tuple((*row, size - sum(row)) if sum(row) < size else tuple(row) for row in documents)
        reach = reach or max(map(max, documents))
        return cls(pos.to(device), end.to(device), live=size, fresh=True, documents=padded, reach=reach)

    def alone(self, n_tokens: int) -> Step:
        """The step of one sequence of `n_tokens` of a packed row; shared by all sequences of this length and layers."""
        key = ("alone", n_tokens)
        if key not in self.memo:
            self.memo[key] = Step.without_cache(n_tokens, self.pos.device)
        return self.memo[key]

    def visible(self, view: KVView, window: int | None) -> torch.Tensor:
        """The mask `(B or 1, G or 1, T, S)` over the live slots, True where a query may look.

        The only rule of visibility.
        """
        assert self.documents is None, "sequences of a packed row are attended to one by one"
        # the slot count is part of the key only where it is a host fact: hashing a traced size would pin it
        key = None if view.key is None else ("mask", view.key, view.live, window, view.n_sink)
        if key is not None and key in self.memo:
            return self.memo[key]
        kv_pos = view.pos if view.live is None else view.pos[..., : view.live]
        q, kv = self.pos[:, None, :, None], kv_pos[:, :, None, :]
        mask = (kv >= 0) & (kv <= q)
        if window is not None:
            in_window = kv > q - window
            mask = mask & (in_window | (kv < view.n_sink) if view.n_sink else in_window)
        if key is not None:
            self.memo[key] = mask
        return mask

    def block_mask(self, view: KVView, window: int | None, n_batch: int, n_groups: int, n_queries: int) -> Any:
        """The same of one token a row as `torch.nn.attention.flex_attention` takes it, with R queries a group."""
        from litgpt import flex

        key = None if view.key is None else ("blocks", view.key, view.live, window, view.n_sink, n_groups, n_queries)
        if key is None or key not in self.memo:
            visible = self.visible(view, window).squeeze(2).expand(n_batch, n_groups, -1)
            blocks = flex.block_mask(visible, n_queries)
            if key is None:
                return blocks
            self.memo[key] = blocks
        return self.memo[key]


def attend(
    q: torch.Tensor,
    view: KVView,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    q_for_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from `q` to what the view holds. Keys and values are used as stored, never repeated for grouped queries.

    Args:
        q: `(B, H, T, D)`.
        view: the slots.
        step: the positions of the queries.
        scale: factor on the scores.
        window: how many positions back a query sees, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `(H,)` logits of the learned attention sinks.
        q_for_sinks: `(B, H, T, D)` queries for the positions below `view.n_sink`, where these differ.

    Returns:
        `(B, H, T, Dv)`. Rows of padding tokens hold finite values without meaning.
    """
    if step.documents is not None:
        return _attend_packed(q, view, step, scale=scale, window=window, softcap=softcap, sinks=sinks)
    k, v = _live_slots(view)
    window = narrower(window, view.window)
    if q.size(2) == 1 and q_for_sinks is None and q.device.type in FLEX_DEVICES and torch.compiler.is_compiling():
        from litgpt import flex  # costs a second to import

        blocks = step.block_mask(view, window, q.size(0), k.size(1), q.size(1) // k.size(1))
        return flex.attend_one(q, k, v, blocks, scale=scale, softcap=softcap, sinks=sinks)
    if softcap is not None or sinks is not None or q_for_sinks is not None:
        return _attend_written_out(q, k, v, view, step, scale, window, softcap, sinks, q_for_sinks)
    n_batch, n_head, n_queries, size = q.shape
    if n_queries == 1:
        # the heads of a group become its queries, which every kernel takes: (B, G, R, D)
        q = q.reshape(n_batch, k.size(1), -1, size)
        mask = None if _all_visible(view, step, window) else step.visible(view, window)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(n_batch, n_head, 1, -1)
    # all rows start at 0, so slot s holds position s: the causal kernel needs no mask, ragged rows included
    causal = step.fresh and k.size(2) == n_queries and (window is None or n_queries <= window)
    mask = None if causal else step.visible(view, window)
    if mask is not None and mask.size(1) not in (1, n_head):
        mask = mask.repeat_interleave(n_head // mask.size(1), dim=1)  # one mask a group, for each of its heads
    width, grouped = v.size(3), n_head != k.size(1)
    if width < size and not grouped:
        v = F.pad(v, (0, size - width))  # equal widths, or the fused kernels step aside
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return y[..., :width]


def _attend_packed(q: torch.Tensor, view: KVView, step: Step, **options: Any) -> torch.Tensor:
    """Attention within each sequence of packed rows: as many calls as there are sequences, each on views of the row.

    Nothing outside a sequence is ever scored, so the cost is that of the sequences one by one.
    """
    assert step.documents is not None
    assert view.k.size(2) == step.size, "a packed step attends to its own tokens"
    rows = []
    for i, lengths in enumerate(step.documents):
        # `split`, whose backward pass joins the parts once: that of a slice would fill a whole row for each sequence
        parts = zip(*(x[i : i + 1].split(lengths, dim=2) for x in (q, view.k, view.v)), strict=True)
        outputs = []
        for n, (q_part, k_part, v_part) in zip(lengths, parts, strict=True):
            alone = step.alone(n)
            own = KVView(k_part, v_part, alone.pos.unsqueeze(1), n, key="chunk")
            outputs.append(attend(q_part, own, alone, **options).transpose(1, 2))  # (1, n, H, Dv)
        rows.append(torch.cat(outputs, dim=1))
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).transpose(1, 2)


def _all_visible(view: KVView, step: Step, window: int | None) -> bool:
    """Whether the host knows that the one query a row sees every live slot."""
    start = step.start
    if start is None or view.holes:
        return False
    return view.live == start + 1 and (window is None or start < window)


def narrower(a: int | None, b: int | None) -> int | None:
    """The smaller of two windows, None being no window."""
    return b if a is None else a if b is None else min(a, b)


def _live_slots(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, cut to the slots that the host knows to be in use."""
    k, v, live = view.k, view.v, view.live
    if live is not None and live < k.size(2):
        return k.narrow(2, 0, live), v.narrow(2, 0, live)
    return k, v


def _attend_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    view: KVView,
    step: Step,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    q_for_sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with explicit scores, for what the fused kernels cannot do; a block of queries at a time."""
    out = []
    for weights in _blocks_of_weights(q, k, view, step, scale, window, softcap, sinks, q_for_sinks, QUERY_BLOCK):
        y = weights.to(v.dtype).flatten(2, 3) @ v  # (B, G, R * n, Dv)
        out.append(y.view(q.size(0), q.size(1), weights.size(3), -1))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _blocks_of_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    view: KVView,
    step: Step,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    q_for_sinks: torch.Tensor | None,
    block_size: int,
) -> Iterator[torch.Tensor]:
    """Attention weights `(B, G, R, n, S)` of `block_size` queries at a time: memory grows with S, not with T * S."""
    n_batch, n_groups, n_slots = q.size(0), k.size(1), k.size(2)
    mask = step.visible(view, window)

    def scores_of(block: torch.Tensor) -> torch.Tensor:
        folded = block.reshape(n_batch, n_groups, -1, block.size(-1))  # the heads of a group share one product
        return upcast(folded @ k.mT).view(n_batch, n_groups, -1, block.size(2), n_slots) * scale

    for begin in range(0, q.size(2), block_size):
        block = q[:, :, begin : begin + block_size]
        scores = scores_of(block)
        if q_for_sinks is not None:
            kv_pos = view.pos if view.live is None else view.pos[..., : view.live]
            is_sink = (kv_pos < view.n_sink)[:, :, None, None]
            scores = torch.where(is_sink, scores_of(q_for_sinks[:, :, begin : begin + block_size]), scores)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        allowed = mask[:, :, None, begin : begin + block_size]
        # the lowest finite number, not -inf: a padding row sees nothing and must stay finite
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(1, n_groups, -1, 1, 1).expand(n_batch, -1, -1, block.size(2), 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)
        yield weights if sinks is None else weights[..., :-1]


def column_sums(
    q: torch.Tensor,
    view: KVView,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    last: int | None = None,
) -> torch.Tensor:
    """Attention mass that each slot receives: the weights of `attend`, summed over queries and the heads of a group.

    A second pass over the scores, a block of queries at a time, so there is never a tensor of T * S weights. For
    caches that evict by attention.

    Args:
        q: `(B, H, T, D)`.
        view: the slots.
        step: the positions of the queries; padding counts nothing.
        scale: as in `attend`.
        window: as in `attend`.
        softcap: as in `attend`.
        sinks: as in `attend`.
        last: count only the last so many queries of each row; None for all.

    Returns:
        `(B, G, S)` in float32 or better, S being the live slots.
    """
    k, _ = _live_slots(view)
    window = narrower(window, view.window)
    counts = step.pos >= 0
    if last is not None:
        counts = counts & (step.pos >= step.end.unsqueeze(1) - last)
    total: torch.Tensor | None = None
    begin = 0
    for weights in _blocks_of_weights(q, k, view, step, scale, window, softcap, sinks, None, SUM_BLOCK):
        n = weights.size(3)
        counted = counts[:, None, None, begin : begin + n, None]
        part = weights.masked_fill(~counted, 0).sum(dim=(2, 3))  # (B, G, S)
        total = part if total is None else total + part
        begin += n
    assert total is not None
    return total


def build_mask_cache(max_seq_length: int, device: torch.device | None = None) -> torch.Tensor:
    """A causal mask `(1, 1, L, L)`, True where visible, for code that wants one; the model itself builds none."""
    ones = torch.ones((max_seq_length, max_seq_length), device=device, dtype=torch.bool)
    return torch.tril(ones).unsqueeze(0).unsqueeze(0)
