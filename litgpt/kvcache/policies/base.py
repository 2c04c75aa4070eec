# Licensed under the Apache License 2.0, see the LICENSE file.

"""The base of policies that evict by attention: everything but how tokens are scored."""

from __future__ import annotations

import torch

from litgpt.attention import KVView, Step
from litgpt.kvcache.base import LayerCache, LayerSpec


class EvictingCache(LayerCache):
    """Keeps the `budget` best tokens of each row and group, by a score; a policy fills in `rescore`.

    Before a step at most `budget` earlier tokens are kept, the others are evicted; the step's own tokens are written
    beside them. A chunk longer than the slack attends to what is kept next to the chunk itself, and the best `budget`
    of both stay. Decisions look only at the row's own scores, so a row does not depend on the others of its batch.

    Unlike in exact caches the position of a slot is state: `pos` `(B, G, slots + 1)`, -1 for an empty slot.
    """

    chunk_invariant = False
    needs_weights = True

    def __init__(
        self, spec: LayerSpec, batch_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__(spec, batch_size, dtype, device)
        assert spec.budget is not None
        self.budget = spec.budget
        shape = (batch_size, spec.groups, spec.slots + 1)
        self.pos: torch.Tensor
        self.score: torch.Tensor
        self.register_buffer("pos", torch.full(shape, -1, dtype=torch.long, device=device), persistent=False)
        precise = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.register_buffer("score", torch.zeros(shape, dtype=precise, device=device), persistent=False)
        self._chunk: tuple[torch.Tensor, torch.Tensor | None] | None = None  # waits for its scores

    def rescore(self, score: torch.Tensor, sums: torch.Tensor, pos: torch.Tensor, step: Step) -> torch.Tensor:
        """The scores after a step; the tokens with the highest ones are kept.

        Args:
            score: `(B, G, S)` scores so far, 0 for the step's own tokens.
            sums: `(B, G, S)` attention mass that each slot received in the step, of the last `observe_last` queries.
            pos: `(B, G, S)` position held by each slot, -1 for none.
            step: the step.

        Returns:
            `(B, G, S)`, at least float32.
        """
        raise NotImplementedError

    def update(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """Store the new keys and values, then show everything; see `LayerCache.update`."""
        pos = step.pos.unsqueeze(1).expand(k.size(0), k.size(1), -1)  # (B, G, T)
        self._evict(step)
        if step.size <= self.spec.slack or self.slots >= self.spec.max_length:
            slots = self._free_slots(pos >= 0)
            live = None if step.live is None else min(step.live, self.slots)
            keys, values = self.store.write(slots, k, v, live)
            self.pos.scatter_(2, slots, pos)
            self.score.scatter_(2, slots, torch.zeros_like(pos, dtype=self.score.dtype))
            return KVView(keys, values, self.pos, live, holes=self._may_be_over(step))
        self._chunk = (k, v)
        chunk_k, chunk_v = self.store.as_stored(k, v)
        if step.fresh:
            return KVView(chunk_k, chunk_v, step.pos.unsqueeze(1), step.size, key="chunk")
        old_k, old_v = self.store.read(k)
        return KVView(
            torch.cat((old_k, chunk_k.to(old_k.dtype)), dim=2),
            torch.cat((old_v, chunk_v.to(old_v.dtype)), dim=2),
            torch.cat((self.pos, pos), dim=2),
        )

    def observe(self, sums: torch.Tensor, step: Step) -> None:
        """Score what the step attended to; after a long chunk, also choose what stays of it."""
        if self._chunk is None:
            n = sums.size(2)
            self.score[..., :n] = self.rescore(self.score[..., :n], sums, self.pos[..., :n], step)
            return
        (k, v), self._chunk = self._chunk, None
        pos = step.pos.unsqueeze(1).expand(k.size(0), k.size(1), -1)
        if step.fresh:  # the view was the chunk alone, nothing was kept before
            sums = torch.nn.functional.pad(sums, (self.slots + 1, 0))
        all_pos = torch.cat((self.pos, pos), dim=2)
        score = torch.cat((self.score, torch.zeros_like(pos, dtype=self.score.dtype)), dim=2)
        score = self.rescore(score, sums, all_pos, step)
        kept = self._best(score, all_pos)
        old_kept, new_kept = kept.split((self.slots + 1, step.size), dim=2)
        is_active = (step.pos >= 0).any(dim=1)[:, None, None]
        self.pos.masked_fill_(~old_kept & is_active, -1)
        self.score.copy_(torch.where(is_active, score[..., : self.slots + 1], self.score))
        slots = self._free_slots(new_kept)
        self.store.write(slots, k, v)
        self.pos.scatter_(2, slots, torch.where(new_kept, pos, -1))
        self.score.scatter_(2, slots, score[..., self.slots + 1 :])

    def _evict(self, step: Step) -> None:
        """Leave at most `budget` tokens in each row that gets new ones."""
        if not self._may_be_over(step):
            return
        is_active = (step.pos >= 0).any(dim=1)[:, None, None]
        self.pos.masked_fill_(~self._best(self.score, self.pos) & is_active, -1)

    def _may_be_over(self, step: Step) -> bool:
        """Whether the host cannot rule out that, before the step, some row has held more than `budget` tokens."""
        if step.fresh or self.slots <= self.budget:
            return False
        return step.live is None or step.live - 1 > self.budget

    def _best(self, score: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Mask of the `budget` tokens with the highest scores, the later one of equals."""
        by_age = pos.argsort(dim=-1, descending=True, stable=True)
        ranked = score.masked_fill(pos < 0, -torch.inf).gather(-1, by_age)
        best = by_age.gather(-1, ranked.argsort(dim=-1, descending=True, stable=True)[..., : self.budget])
        return torch.zeros_like(pos, dtype=torch.bool).scatter_(-1, best, True) & (pos >= 0)

    def _free_slots(self, wanted: torch.Tensor) -> torch.Tensor:
        """A slot for each wanted token `(B, G, T)`, the first free ones in order; the others go where padding goes."""
        index = torch.arange(self.slots, device=wanted.device)
        occupied = self.pos[..., : self.slots] >= 0
        free = torch.where(occupied, self.slots + index, index).sort(dim=-1).values  # (B, G, slots), free ones first
        rank = (wanted.cumsum(-1) - 1).clamp(0, self.slots - 1)
        return torch.where(wanted, free.gather(-1, rank), self.slots)

    def max_rewind(self, length: int, high: int) -> int:
        """Nothing: what was evicted is gone, and the scores remember the tokens taken back."""
        return 0

    def forget(self, row: int, start: int, stop: int) -> None:
        """Empty a row; see `LayerCache.forget`."""
        assert start == 0, "an evicting cache forgets whole rows"
        self._chunk = None  # a forward pass that failed has left it
        self.pos[row] = -1
        self.score[row] = 0
        self.store.forget(row, slice(0, self.slots))
