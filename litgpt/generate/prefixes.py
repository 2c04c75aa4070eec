# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a request takes from the store of earlier rows, and what it leaves there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from litgpt.kvcache import KVCache
from litgpt.kvcache.prefix import PrefixStore


class Prefixes:
    """The rows of one cache and a store, which may be missing.

    Results are the same as without the store. A kind whose results depend on how a prompt is cut into chunks is stored
    and restored at the borders of chunks only, where the next chunk is the one it would be anyway.

    Args:
        store: the store.
        cache: the cache of the request.
        scope: what must be equal for a row of another cache to be of use in this one.
        chunk_size: how prompts are cut.
    """

    def __init__(self, store: PrefixStore | None, cache: KVCache, scope: Hashable, chunk_size: int) -> None:
        self.store = store
        self.cache = cache
        self.chunk_size = chunk_size
        self.scope = (scope, None if cache.chunk_invariant else chunk_size)

    def restore(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Fill the empty rows with what is known of the prompts, and return what remains of each to be computed."""
        if self.store is None:
            return list(prompts)
        rest: list[Sequence[int]] = []
        for row, prompt in enumerate(prompts):
            n = 0
            if len(prompt) > 1 and self.cache.lengths[row] == 0:
                state, n = self.store.lookup(prompt[:-1], self.scope)  # the last token is computed for its logits
                if state is not None:
                    self.cache.import_row(row, state)
            rest.append(prompt[n:])
        return rest

    def keep_chunks(self, prompts: Sequence[Sequence[int]], n_fed: Sequence[int]) -> None:
        """Keep the rows that got `n_fed` tokens of their prompts in a step, where that may be of use later."""
        for row, prompt in enumerate(prompts):
            length = self.cache.lengths[row]
            if self.store is None or not n_fed[row]:
                continue
            at_border = length % self.chunk_size == 0
            is_whole = length == len(prompt)
            can_go_back = self.cache.max_rewind(row) == length  # then the whole prompt serves all its beginnings
            if (is_whole or not can_go_back) if self.cache.chunk_invariant else at_border:
                self._keep(row, prompt)

    def keep_sequences(self, sequences: Sequence[Sequence[int]]) -> None:
        """Keep all rows with their new tokens, for a conversation that goes on."""
        for row, tokens in enumerate(sequences):
            if self.store is not None and self.cache.chunk_invariant and 0 < self.cache.lengths[row] <= len(tokens):
                self._keep(row, tokens)

    def _keep(self, row: int, tokens: Sequence[int]) -> None:
        assert self.store is not None
        self.store.insert(tokens[: self.cache.lengths[row]], self.cache.export_row(row), self.scope)
