# Licensed under the Apache License 2.0, see the LICENSE file.

"""Speculative decoding: cheap guesses at the next tokens, checked by the model in one forward pass.

The result is the model's own. Greedy rows get the same tokens as without drafts, and for the others a drafted token is
kept with such a probability that the tokens are distributed as without drafts (https://arxiv.org/abs/2211.17192). With
a seed they are therefore other tokens than without drafts, but as likely. All this is exact up to the rounding of the
logits: several positions at once may be summed in another order than one by one.

A good draft saves forward passes, a bad one costs the computing of a few positions more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from litgpt.errors import UserError
from litgpt.generate.row import Row
from litgpt.generate.sampling import Sampler, draw_index, nan_error, probabilities, uniform
from litgpt.kvcache import KVCache
from litgpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from litgpt.config import Config
    from litgpt.generate.engine import Engine

LOOKUP_K = 8  # longest draft of prompt lookup: copying costs nothing


class Draft(NamedTuple):
    """Guesses at the next tokens.

    Attributes:
        ids: the tokens.
        probs: `(n, V')`, for each token the probabilities that it was drawn from, of the first V' ids; None when it was
            not drawn but certain.
    """

    ids: list[int]
    probs: torch.Tensor | None = None


class Drafter(Protocol):
    """Guesses how one sequence goes on."""

    def draft(self, tokens: list[int], n: int) -> Draft:
        """At most `n` guesses, perhaps none.

        Args:
            tokens: the sequence so far. It only grows from call to call, by any number of tokens.
            n: at least 1.
        """
        ...


@dataclass(frozen=True)
class Speculation:
    """How an engine is to speculate.

    Attributes:
        new_drafter: makes the drafter of a row.
        k: longest draft; a sliding window can make it shorter.
    """

    new_drafter: Callable[[Row, Sampler], Drafter]
    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"speculation needs drafts of at least 1 token, got {self.k}")

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Read `lookup`, or `lookup:N` for drafts of at most N tokens.

        Raises:
            UserError: it is something else.
        """
        name, colon, k = text.partition(":")
        if name != "lookup" or (colon and not (k.isascii() and k.isdigit())):
            raise UserError(f"unknown way to speculate {text!r}", f"use lookup, or lookup:N (default {LOOKUP_K})")
        return cls(lambda row, sampler: PromptLookup(), int(k) if colon else LOOKUP_K)

    @classmethod
    def by_model(cls, engine: Engine, k: int) -> Speculation:
        """Drafts by a smaller model with the same vocabulary.

        Args:
            engine: of the smaller model, on the same device as the larger one.
            k: longest draft.

        Raises:
            UserError: the engine stores prefixes, or its kind of cache evicts.
        """
        if engine.prefix_store is not None:
            raise UserError(
                "a draft model feeds pieces of sequences, which a prefix store would take for whole ones",
                "make the engine of the draft model without a prefix store",
            )
        check_rewindable(engine.model.config, engine.kv_cache)
        return cls(partial(DraftModel, engine), k)


class PromptLookup:
    """Finds the last few tokens earlier in the sequence, and guesses that what followed follows again.

    The longest match counts, and of equals the most recent. Good for answers that repeat their question: summaries,
    corrections, code. So as not to slow down other text, a draft is at most one token longer than twice what was right
    of the last one.

    Args:
        max_ngram: longest match that is looked for.
        min_ngram: shortest match that counts.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.sizes = range(min_ngram, max_ngram + 1)
        self._next: dict[tuple[int, ...], int] = {}  # tokens -> where what followed them last begins
        self._n_read = 0  # tokens that are known to follow something
        self._draft: list[int] = []  # the last one
        self._start = 0  # where it began

    def draft(self, tokens: list[int], n: int) -> Draft:
        """See `Drafter.draft`."""
        for end in range(self._n_read, len(tokens)):
            for size in self.sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._n_read = len(tokens)
        if self._draft:
            n = min(n, 2 * agreement(self._draft, tokens[self._start :]) + 1)
        ids = self._copy(tokens, n)
        if ids:
            self._draft, self._start = ids, len(tokens)
        return Draft(ids)

    def _copy(self, tokens: list[int], n: int) -> list[int]:
        for size in reversed(self.sizes):
            start = self._next.get(tuple(tokens[-size:]))
            if start is not None:
                # A match near the end is a loop: once around, the copy goes on from itself
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(n)]
        return []


class DraftModel:
    """Guesses with a smaller model, under the settings of the row (without its repetition penalty).

    Its cache holds the sequence and its own guesses; those that were not taken are taken back.

    Args:
        engine: of the smaller model.
        row: the row it guesses for.
        sampler: the row's. Guesses are drawn from its generator, so that they and the checks are independent.
    """

    def __init__(self, engine: Engine, row: Row, sampler: Sampler) -> None:
        self.engine = engine
        self.sampler = sampler
        self.cache = engine.new_cache([row])
        self.depth = rewind_depth(self.cache)
        self._sure = 0  # tokens of the sequence in the cache
        self._guesses: list[int] = []  # tokens after them

    def draft(self, tokens: list[int], n: int) -> Draft:
        """See `Drafter.draft`."""
        n = min(n, self.depth, self.cache.max_length - len(tokens) + 1)  # the last guess is not fed
        if n < 1:
            return Draft([])
        ids: list[int] = []
        probs: list[torch.Tensor] = []
        with self.engine.computing():
            logits = self._feed(tokens)
            while True:
                token = self._guess(logits, probs)
                ids.append(int(token))
                if len(ids) == n:
                    break
                logits = self.engine.decode(token.view(1), self.cache, [True])[0]
        self._guesses = ids[:-1]
        return Draft(ids, torch.stack(probs) if probs else None)

    def _feed(self, tokens: list[int]) -> torch.Tensor:
        """Bring the cache up to date and return the logits `(V',)` after the last token."""
        right = agreement(self._guesses, tokens[self._sure : -1])
        self.cache.rewind(len(self._guesses) - right)
        logits = self.engine.prefill([tokens[self._sure + right :]], self.cache)[0]
        self._sure, self._guesses = len(tokens), []
        return logits

    def _guess(self, logits: torch.Tensor, probs: list[torch.Tensor]) -> torch.Tensor:
        """Choose a token; when it is drawn, note the probabilities."""
        logits = logits[: self.sampler.vocab_size]  # either model's embedding may be padded more
        if self.sampler.params.greedy:
            return logits.argmax()
        probs.append(probabilities(logits, self.sampler.params))
        return draw_index(probs[-1], self.sampler.generator)


class Speculator:
    """The decode step of a request that speculates: one forward pass, and one or more tokens a row.

    Every row has a drafter of its own. All drafts are checked together; rows keep as many tokens as are right.

    Args:
        speculation: how drafts are made.
        engine: of the model that decides.
        cache: holds the prompts.
        rows: the sequences.
        samplers: one a row, None for rows that have ended.
    """

    def __init__(
        self,
        speculation: Speculation,
        engine: Engine,
        cache: KVCache,
        rows: Sequence[Row],
        samplers: Sequence[Sampler | None],
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.rows = rows
        self.k = min(speculation.k, rewind_depth(cache))
        self.drafters = [
            None if sampler is None else speculation.new_drafter(row, sampler)
            for row, sampler in zip(rows, samplers, strict=True)
        ]

    def step(self, samplers: Sequence[Sampler | None]) -> tuple[torch.Tensor, list[list[int]]]:
        """Draft, check and take back what was wrong.

        Returns:
            Logits `(B, T, V)`, and for each row the next tokens, chosen from the first of its logits.

        Raises:
            ValueError: the logits of an active row contain NaN.
        """
        drafts = [Draft([])] * len(self.rows)
        chunks: list[list[int]] = [[] for _ in self.rows]
        for i, row in enumerate(self.rows):
            if row.active:
                tokens = row.sequence
                drafts[i] = self._draft(i, tokens)
                chunks[i] = [tokens[-1], *drafts[i].ids]
        logits = self.engine.score(chunks, self.cache)
        likeliest = _likeliest(logits, [len(chunk) for chunk in chunks])
        chosen: list[list[int]] = [[] for _ in self.rows]
        for i, sampler in enumerate(samplers):
            if sampler is None:
                continue
            if sampler.plain_greedy:
                chosen[i] = _check_greedy(likeliest[i], drafts[i].ids)
            else:
                chosen[i] = check(sampler, logits[i], drafts[i])
            self.rows[i].drafted += len(drafts[i].ids)
            self.rows[i].accepted += len(chosen[i]) - 1
        self.cache.rewind([len(chunk) - len(tokens) for chunk, tokens in zip(chunks, chosen, strict=True)])
        return logits, chosen

    def _draft(self, i: int, tokens: list[int]) -> Draft:
        row, drafter = self.rows[i], self.drafters[i]
        assert drafter is not None
        n = min(self.k, row.budget - row.n_sampled - 1)  # after the accepted ones comes one more token
        return drafter.draft(tokens, n) if n > 0 else Draft([])


def check(sampler: Sampler, logits: torch.Tensor, draft: Draft) -> list[int]:
    """Accept the first tokens of a draft, and choose the one after them.

    With p the probabilities of the sampler and q those of the draft, a drafted token is accepted with the probability
    min(1, p / q), and in place of the first that is not comes one drawn by max(0, p - q).

    Args:
        sampler: the row's way of choosing.
        logits: `(T, V)`, T at least 1 more than there are drafted tokens; position i follows i drafted tokens.
        draft: the draft.

    Returns:
        Token ids, at least one.
    """
    chosen: list[int] = []
    for i, token in enumerate(draft.ids):
        p = sampler.probabilities(logits[i])
        q = torch.zeros_like(p)
        if draft.probs is None:
            q[token] = 1
        else:
            q[: draft.probs.size(1)] = draft.probs[i]
        accepted = bool(uniform(p.device, sampler.generator) * q[token] < p[token])
        if not accepted:
            rest = (p - q).clamp_min(0)
            # p and q that agree up to rounding can leave nothing
            token = int(draw_index(torch.where(rest.sum() > 0, rest, p), sampler.generator))
        sampler.saw(token)
        chosen.append(token)
        if not accepted:
            return chosen
    return [*chosen, int(sampler.pick(logits[len(chosen)])[0])]


def _check_greedy(likeliest: list[int], ids: list[int]) -> list[int]:
    """The likeliest tokens, as long as the draft has led to them, and the one after."""
    return likeliest[: agreement(likeliest, ids) + 1]


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are the same from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _likeliest(logits: torch.Tensor, counts: list[int]) -> list[list[int]]:
    """The likeliest tokens at the first positions of each row, from `(B, T, V)` logits."""
    evidence, tokens = logits.max(dim=-1)
    ids, numbers = torch.stack((tokens.float(), evidence.float())).tolist()  # one transfer, as in `pick_all`
    for row, count in enumerate(counts):
        if any(number != number for number in numbers[row][:count]):
            raise nan_error(row)
    return [[int(i) for i in row] for row in ids]


def rewind_depth(cache: KVCache) -> int:
    """How many tokens a row of any length can be taken back."""
    layers: Any = cache.layers
    return min(layer.max_rewind(cache.max_length, cache.max_length) for layer in layers)


def check_rewindable(config: Config, kv_cache: str) -> None:
    """See that a kind of cache can take tokens back.

    Raises:
        UserError: it evicts.
    """
    if rewind_depth(KVCache.from_config(config, kv_cache, device="meta")) < 1:
        raise UserError(
            f"KV cache {kv_cache!r} cannot take tokens back, as speculative decoding must",
            "use a kind that evicts nothing: dense, window:N or sinks:S+N",
        )


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer) -> None:
    """See that a smaller model means the same tokens by its ids; special ones may differ, and are then not accepted.

    Raises:
        UserError: it does not; the message names a token.
    """
    known = target.vocabulary
    for token, index in draft.vocabulary.items():
        if known.get(token) != index and index not in draft.special_ids:
            there = f"{known[token]} in the target model" if token in known else "unknown to the target model"
            raise UserError(
                f"the draft model has another vocabulary: token {token!r} is {index} there and {there}",
                "use a smaller model of the same family as the target model",
            )
