# Licensed under the Apache License 2.0, see the LICENSE file.

"""A checkpoint of any kind, seen as the state dict of our model, without a model and without holding its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from litgpt.checkpoint.plan import EMBEDDING, HEAD, Plan, build_empty
from litgpt.checkpoint.source import Source
from litgpt.checkpoint.tables import Link
from litgpt.checkpoint.types import TensorInfo

logger = logging.getLogger(__name__)


class LazyState(Mapping[str, Tensor]):
    """The state dict of the plain model; each tensor is put together when it is asked for, and only the last is kept.

    Args:
        source: the opened checkpoint.
        plan: how it is read.
        dtype: of the tensors; None takes the checkpoint's. Buffers keep the model's own, as they do when it is loaded.

    Attributes:
        infos: shape and dtype of every tensor. A head that is tied to the embedding is listed too.
    """

    def __init__(self, source: Source, plan: Plan, dtype: torch.dtype | None = None) -> None:
        from litgpt.model import GPT

        self._source = source
        model = build_empty(GPT, plan.config)
        buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
        dtype = dtype or plan.dtype
        self.infos = {
            name: TensorInfo(tuple(tensor.shape), buffers.get(name, dtype))
            for name, tensor in model.state_dict().items()
        }
        self._pieces: dict[str, list[tuple[str, Link]]] = {}
        for theirs, links in plan.links.items():
            for link in links:
                self._pieces.setdefault(link.ours, []).append((theirs, link))
        if plan.config.tie_embeddings:  # one of the two is in the file
            for name, other in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
                self._pieces.setdefault(name, self._pieces.get(other, []))
        self._last: tuple[str, Tensor] | None = None
        self._unreleased = 0

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # two would take twice the memory
            self._last = (name, self._assemble(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def _assemble(self, name: str) -> Tensor:
        info = self.infos[name]
        whole = torch.empty(info.shape, dtype=info.dtype)
        for theirs, link in self._pieces[name]:
            logger.debug("%s: from %s", name, theirs)
            into = link.our_view(whole)
            into.copy_(link.their_view(self._source.get(theirs)))
            self._unreleased += into.nbytes
        if self._unreleased >= self._source.release_after:
            self._source.release()
            self._unreleased = 0
        return whole
