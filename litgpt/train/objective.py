# Licensed under the Apache License 2.0, see the LICENSE file.

"""What training makes small: the summed loss of a micro-batch, as one module that can be wrapped for many devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from litgpt.attention import Step
from litgpt.kvcache import KVCache, ReplayCache
from litgpt.train.batches import IGNORE, Batch
from litgpt.train.loss import linear_cross_entropy

if TYPE_CHECKING:
    from litgpt.model import GPT


class Objective(nn.Module):
    """The loss of a model on a batch, summed over the tokens that are learnt.

    A sum, not a mean: only the whole step knows how many tokens it has.

    Args:
        gpt: the model.
        reach: the longest sample of the training. Rotary tables that depend on the length go by it, so that the other
            samples of a micro-batch make no difference.
        neftune_alpha: strength of the noise on the embeddings while training; None: no noise.
    """

    def __init__(self, gpt: GPT, reach: int = 0, neftune_alpha: float | None = None) -> None:
        super().__init__()
        self.gpt, self.reach, self.neftune_alpha = gpt, reach, neftune_alpha

    def forward(self, batch: Batch) -> torch.Tensor:
        """A scalar in float32 or more; 0 for a batch without labels."""
        gpt = self.gpt
        gpt.check_ids(batch.input_ids)
        if not batch.packed:
            step = Step.without_cache(batch.input_ids.size(1), batch.input_ids.device, self.reach)
        else:
            step = Step.packed([batch.lengths], batch.input_ids.device, self.reach)
        with self._noise(batch):
            hidden = gpt.hidden(batch.input_ids, step)[:, :-1].flatten(0, 1)  # (B * (T - 1), C)
        return self.loss(hidden, batch.labels[:, 1:].flatten())

    def _noise(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        embedding, alpha, size = self.gpt.transformer.wte, self.neftune_alpha, None
        if alpha is not None and self.training and batch.lengths:
            size = noise_size(batch, alpha, embedding.embedding_dim, batch.input_ids.device)
        return noisy_embeddings(embedding, size)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of hidden states `(N, C)`, given the token that follows each, `(N,)`."""
        config = self.gpt.config
        return linear_cross_entropy(
            hidden,
            self.gpt.lm_head,
            labels,
            softcap=config.final_logit_softcapping,
            logit_multiplier=config.logit_multiplier,
        )


class CachedObjective(Objective):
    """The same loss under a KV cache, in which the tokens go through the model chunk by chunk.

    So each token sees what the cache kept of those before its chunk, as when generating, and only one chunk at a time
    has activations. See `litgpt.kvcache.replay` for the gradient.

    Args:
        gpt: the model.
        reach: see `Objective`.
        kind: the kind of the cache, as `KVCache.from_config` takes it.
        chunk_size: tokens of a chunk.
        neftune_alpha: see `Objective`.
    """

    def __init__(self, gpt: GPT, reach: int, kind: str, chunk_size: int, neftune_alpha: float | None = None) -> None:
        super().__init__(gpt, reach, neftune_alpha)
        self.kind, self.chunk_size = kind, chunk_size

    def forward(self, batch: Batch, backward: bool = False) -> torch.Tensor:
        """See `Objective.forward`; `backward` adds the gradients to those of the parameters at once."""
        assert not batch.packed, "joined samples would share a cache"
        ids = batch.input_ids
        self.gpt.check_ids(ids)
        cache = self._make_cache(ids)
        following = nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE)
        chunks = [part.size(1) for part in ids.split(self.chunk_size, dim=1)]
        loss = partial(self._loss_of_chunk, cache, following)
        learning = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if backward or not (torch.is_grad_enabled() and learning):
            with self._noise(batch):
                return (cache.backward if backward else cache.record)(ids, chunks, loss)
        return _WithGradients.apply(self, batch, list(learning), *learning.values())

    def _make_cache(self, ids: torch.Tensor) -> ReplayCache:
        place, dtype = ids.device.type, self.gpt.transformer.wte.weight.dtype
        if torch.is_autocast_enabled(place):
            dtype = torch.get_autocast_dtype(place)
        length = max(self.reach, ids.size(1))
        cache = ReplayCache.from_config(self.gpt.config, self.kind, len(ids), length, dtype, ids.device)
        assert isinstance(cache, ReplayCache)
        return cache

    def _loss_of_chunk(self, cache: KVCache, following: torch.Tensor, idx: torch.Tensor, step: Step) -> torch.Tensor:
        hidden = self.gpt.hidden(idx, step, cache).flatten(0, 1)
        cache.commit(step)
        assert step.start is not None
        return self.loss(hidden, following[:, step.start : step.start + step.size].flatten())


class _WithGradients(torch.autograd.Function):
    """Carries the gradients of a `CachedObjective`, whose backward pass is many, to the one of the whole step."""

    @staticmethod
    def forward(
        ctx: Any, objective: CachedObjective, batch: Batch, names: Sequence[str], *parameters: torch.Tensor
    ) -> torch.Tensor:
        """The loss; `parameters` have the names `names` in the objective."""
        leaves = {name: p.detach().requires_grad_() for name, p in zip(names, parameters, strict=True)}
        with torch.enable_grad():
            loss = functional_call(objective, leaves, (batch, True))
        ctx.save_for_backward(*(leaf.grad for leaf in leaves.values()))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients times the one that comes in."""
        return None, None, None, *(None if grad is None else grad * outer for grad in ctx.saved_tensors)


def noise_size(batch: Batch, alpha: float, width: int, device: torch.device) -> torch.Tensor:
    """`alpha / sqrt(L * C)` with L the length of the sample that a token belongs to: `(B, 1, 1)`, joined `(1, T, 1)`.

    NEFTune, https://arxiv.org/abs/2310.05914.
    """
    lengths = torch.tensor(batch.lengths, device=device)
    size = alpha / (lengths * width) ** 0.5
    return size.repeat_interleave(lengths).view(1, -1, 1) if batch.packed else size.view(-1, 1, 1)


@contextlib.contextmanager
def noisy_embeddings(embedding: nn.Module, size: torch.Tensor | None) -> Iterator[None]:
    """Context in which uniform noise up to a size is added to what an embedding gives; None adds nothing."""
    if size is None:
        yield
        return

    def add_noise(_: nn.Module, __: object, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.rand_like(x) * 2 - 1) * size.to(x.dtype)

    handle = embedding.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
