# Licensed under the Apache License 2.0, see the LICENSE file.

"""Gradients through caches of every kind at the memory of one chunk: decide once, then replay the decisions backwards.

What a policy keeps depends on the weights of attention, but the decision itself has no gradient. So the gradient of a
long text under a cache is that of a plain forward pass in which each query of each row and group sees what the cache
let it see. It is computed in two passes: the first goes through the text without gradients, chunk by chunk, and notes
all keys and values and which of them were let go of when. The second goes through the chunks from the last to the
first: each is computed again with gradients, from the noted keys and values that it saw, and adds to their gradients,
which the chunk they came from takes up when its turn comes.

Memory: keys, values and their gradients of the whole text, and the activations of one chunk. Time: one forward pass
more than with all activations kept, as for any recomputation of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import get_device_states, set_device_states

from litgpt.attention import KVView, Step
from litgpt.errors import UserError
from litgpt.kvcache.base import LayerCache, LayerSpec
from litgpt.kvcache.cache import KVCache
from litgpt.kvcache.registry import EXACT
from litgpt.kvcache.storage import PlainStore

NEVER = 2**62  # later than any position

Loss = Callable[[torch.Tensor, Step], torch.Tensor]
"""Runs the model on tokens `(B, T)` with the cache and a step, and returns the loss, a sum over tokens: a scalar."""


class ReplayLayer(LayerCache):
    """One layer: lets another cache decide and notes what it does, or does the same again.

    Its own store keeps every token, the slot being the position.

    Args:
        decider: the cache whose decisions are noted.
        batch_size: rows.
        dtype: element type of the buffers.
        device: where they live.

    Attributes:
        until: `(B, G, max_length)`, the position of the first query that no longer sees a token; `NEVER` if none.

    Raises:
        UserError: the decider stores something else than the keys and values themselves.
    """

    compilable = False  # how many tokens are seen is asked of the device
    chunk_invariant = False

    def __init__(
        self, decider: LayerCache, batch_size: int, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        spec = decider.spec
        if not isinstance(decider.store, PlainStore):
            raise UserError(f"a KV cache in {spec.store} has no gradient", "use a kind without int8 and int4")
        super().__init__(replace(spec, policy="dense", budget=None, window=None, n_sink=0), batch_size, dtype, device)
        self.decider = decider
        self.needs_weights, self.observe_last = decider.needs_weights, decider.observe_last
        self.until: torch.Tensor
        until = torch.full((batch_size, spec.groups, self.slots), NEVER, dtype=torch.long, device=device)
        self.register_buffer("until", until, persistent=False)
        self._rules: dict[str, Any] = {}  # of visibility, beside the positions
        self._grads: list[torch.Tensor] | None = None  # of the store's buffers, while replaying
        self._new: list[torch.Tensor] = []  # keys and values of the step
        self._old: list[torch.Tensor] = []  # those it saw of earlier steps, from the slots `_at`
        self._at: torch.Tensor

    def update(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """See `LayerCache.update`."""
        if self._grads is not None:
            return self._replay(k, v, step)
        view = self.decider.update(k, v, step)
        self._rules = {"n_sink": view.n_sink, "window": view.window, "relative_sinks": view.relative_sinks}
        self._note(view.pos, step)
        self.store.write(self._slots(step), k, v)
        return view

    def observe(self, sums: torch.Tensor, step: Step) -> None:
        """See `LayerCache.observe`."""
        self.decider.observe(sums, step)

    def _slots(self, step: Step) -> torch.Tensor:
        return torch.where(step.pos < 0, self.slots, step.pos)

    def _note(self, pos: torch.Tensor, step: Step) -> None:
        """Note which earlier tokens are not among the positions `(B or 1, G or 1, S)` that the step sees."""
        n_batch, n_groups, n_slots = self.until.shape
        pos = torch.where(pos < 0, n_slots, pos).expand(n_batch, n_groups, -1)
        seen = torch.zeros((n_batch, n_groups, n_slots + 1), dtype=torch.bool, device=pos.device)
        seen = seen.scatter_(2, pos, True)[..., :n_slots]
        begin = step.begin[:, None, None]
        gone = ~seen & (torch.arange(n_slots, device=pos.device) < begin)
        self.until.copy_(torch.where(gone, self.until.minimum(begin), self.until))

    def _replay(self, k: torch.Tensor, v: torch.Tensor | None, step: Step) -> KVView:
        """Show the step's own tokens behind the earlier ones that it saw, as leaves that will have a gradient."""
        n_batch, n_groups, n_slots = self.until.shape
        begin, index = step.begin[:, None, None], torch.arange(n_slots, device=k.device)
        seen = (index < begin) & (self.until > begin)
        pos = torch.where(seen, index, -1).topk(int(seen.sum(-1).max()), dim=-1).values  # (B, G, S)
        self._new = [k] if v is None else [k, v]
        self._at = pos.clamp_min(0).unsqueeze(-1)
        self._old = [
            old.gather(2, self._at.expand(-1, -1, -1, old.size(-1))).detach().requires_grad_()
            for old in self.store.read(k)[: len(self._new)]
        ]
        parts = [torch.cat((old, new), dim=2) for old, new in zip(self._old, self._new, strict=True)]
        values = parts[0][..., : self.spec.v_dim] if v is None else parts[1]
        spec, key = self.decider.spec, None
        if spec.policy in EXACT:  # positions alone decide: all groups see the same, and so do layers of one kind
            pos, n_groups = pos[:, :1], 1
            key = ("replay", spec.policy, spec.window, spec.n_sink, spec.slots)
        pos = torch.cat((pos, step.pos.unsqueeze(1).expand(n_batch, n_groups, -1)), dim=2)
        return KVView(parts[0], values, pos, key=key, **self._rules)

    def start(self) -> None:
        """From now on replay; later tokens have contributed nothing yet."""
        buffers = self.store.buffers()
        self._grads = [torch.zeros_like(b, dtype=torch.promote_types(b.dtype, torch.float32)) for b in buffers]
        self.needs_weights = False  # all is decided

    def stop(self) -> None:
        """From now on let the decider decide, and note it."""
        self._grads = None
        self._new, self._old = [], []
        self.needs_weights = self.decider.needs_weights

    def pending(self, step: Step) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The step's keys and values, each with the gradient that later steps have left for it."""
        assert self._grads is not None
        for new, grad in zip(self._new, self._grads, strict=True):
            if new.requires_grad:
                slots = self._slots(step)[:, None, :, None].to(grad.device)
                yield new, grad.gather(2, slots.expand(new.shape)).to(new)

    def seen(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The slots `(B, G, S, 1)` of the earlier tokens that the step saw, and their keys and values."""
        return self._at, self._old

    def collect(self, at: torch.Tensor, earlier: Sequence[torch.Tensor]) -> None:
        """Leave the gradients of what `seen` gave to the steps it came from; call it after the backward pass."""
        assert self._grads is not None
        for old, grad in zip(earlier, self._grads, strict=True):
            if old.grad is not None:
                grad.scatter_add_(2, at.expand(old.shape).to(grad.device), old.grad.to(grad))

    def max_rewind(self, length: int, high: int) -> int:
        """Nothing: what was noted is not taken back."""
        return 0

    def forget(self, row: int, start: int, stop: int) -> None:
        """Empty a row; see `LayerCache.forget`."""
        self.decider.forget(row, start, stop)
        self.until[row] = NEVER
        self.store.forget(row, slice(start, stop))


class ReplayCache(KVCache):
    """A cache of any kind through which a backward pass goes chunk by chunk; see the module.

        cache = ReplayCache.from_config(model.config, "h2o:1024", batch_size=2, max_length=8192)

        def loss(idx, step):
            logits = model(idx, cache=cache, step=step)
            ...  # the sum over the chunk's tokens; their positions are `step.pos`

        total = cache.backward(ids, [512] * 16, loss)  # gradients are added to those of the parameters

    The arguments are those of `KVCache`.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        batch_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(specs, batch_size, dtype, device)
        deciders = self.layer_caches()
        self.layers = nn.ModuleList(ReplayLayer(layer, batch_size, dtype, self.device) for layer in deciders)
        self._run: list[tuple[torch.Tensor, Step, torch.Tensor, tuple[list[int], list[torch.Tensor]]]] = []

    def replay_layers(self) -> list[ReplayLayer]:
        """The layers, with their type; `until` of each holds what was decided."""
        return list(self.layers)  # type: ignore[arg-type]

    def backward(self, ids: torch.Tensor, chunks: Sequence[int | Sequence[int]], loss: Loss) -> torch.Tensor:
        """Add the gradient of a whole text to that of the parameters, and return the loss.

        Args:
            ids: `(B, L)` tokens of new sequences.
            chunks: tokens of each chunk, in every row or in each row, as `plan` takes them.
            loss: see `Loss`. It is called twice a chunk, and must do the same both times; random numbers are the same.
        """
        total = self.record(ids, chunks, loss)
        self.replay(loss)
        return total

    @torch.no_grad()
    def record(self, ids: torch.Tensor, chunks: Sequence[int | Sequence[int]], loss: Loss) -> torch.Tensor:
        """The first pass: decide, and note it; see `backward`."""
        self.reset()
        self._run = []
        total = torch.zeros((), device=ids.device)
        for n in chunks:
            step = self.plan(n)
            idx = ids.gather(1, step.pos.clamp_min(0).expand(len(ids), -1))
            self._run.append((idx, step, torch.get_rng_state(), get_device_states(ids)))
            total = total + loss(idx, step)
        return total

    def replay(self, loss: Loss) -> None:
        """The second pass: gradients under the decisions that were noted; afterwards the cache is empty."""
        torch.clear_autocast_cache()  # weights that were cast without gradients
        try:
            for layer in self.replay_layers():
                layer.start()
            while self._run:
                idx, step, random, (devices, device_random) = self._run.pop()
                with torch.enable_grad(), torch.random.fork_rng(devices):
                    torch.set_rng_state(random)
                    set_device_states(devices, device_random)
                    value = loss(idx, replace(step, memo={}))  # without the masks of the first pass
                roots = [(value, torch.ones_like(value))] if value.requires_grad else []
                for layer in self.replay_layers():
                    roots += layer.pending(step)
                # Taken now: blocks whose activations are checkpointed run once more in the backward pass
                seen = [layer.seen() for layer in self.replay_layers()]
                if roots:
                    torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
                for layer, earlier in zip(self.replay_layers(), seen, strict=True):
                    layer.collect(*earlier)
        finally:
            for layer in self.replay_layers():
                layer.stop()
            self.reset()
