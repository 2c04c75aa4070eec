# Licensed under the Apache License 2.0, see the LICENSE file.

"""The one decoding engine: a ragged batch of rows, prefilled in chunks and continued token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn

from litgpt.attention import Step
from litgpt.errors import UserError
from litgpt.generate.compiled import CompiledDecode
from litgpt.generate.prefixes import Prefixes
from litgpt.generate.row import Row
from litgpt.generate.sampling import Sampler, logprobs_of, pick_all
from litgpt.generate.speculative import Speculation, Speculator, check_rewindable
from litgpt.generate.types import Event, Result, SamplingParams, Timing
from litgpt.kvcache import KVCache
from litgpt.kvcache.memory import ensure_fits
from litgpt.kvcache.prefix import PrefixStore
from litgpt.kvcache.spec import CacheKind
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer

UNBOUNDED = 2**31  # longest sequence of a kind that sees positions inside the cache
StepFn = Callable[[torch.Tensor, KVCache, Step], torch.Tensor]
Prompt = Sequence[int] | torch.Tensor


class Engine:
    """Continues prompts with a model.

    Every request has a KV cache of its own, so requests on one model, interleaved streams included, do not see each
    other. Every row has its own prompt, settings, generator and end.

    Args:
        model: a GPT of any kind, on the device and in the dtype to compute with.
        tokenizer: gives text, stop strings and the default stop ids; without it results hold token ids only.
        kv_cache: kind of the cache, see `litgpt/kvcache/README.md`; `sinks` goes on past the model's context.
        prefill_chunk: longest piece of a prompt in one forward.
        max_length: size of every cache in tokens, instead of what a request needs; also the longest sequence.
        max_batch_size: prompts computed together by `generate`; more are taken in turns.
        compile: compile the decode step.
        autocast: compute in this dtype where that is safe, with weights in another (mixed precision).
        prefix_store: keeps the rows of past requests, so that a prompt that begins like one of them is computed from
            where they part; a store belongs to one model.
        speculation: draft several tokens and check them in one forward pass; the cache must be of an exact kind.

    Raises:
        UserError: a value outside its range, or a kind of cache that does not go with speculation.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        *,
        kv_cache: str = "dense",
        prefill_chunk: int = 512,
        max_length: int | None = None,
        max_batch_size: int = 16,
        compile: bool = False,
        autocast: torch.dtype | None = None,
        prefix_store: PrefixStore | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = cast(Any, model)  # its submodules are typed Tensor | Module
        self.tokenizer = tokenizer
        self.kv_cache = kv_cache
        self.prefill_chunk = prefill_chunk
        self.max_length = max_length
        self.max_batch_size = max_batch_size
        self.compile = compile
        self.autocast = autocast
        self.prefix_store = prefix_store
        if prefix_store is not None:
            prefix_store.bind(model)
        self.speculation = speculation
        endless = CacheKind.parse(kv_cache).policy == "sinks" and not model.config.learned_positions
        context = UNBOUNDED if endless else model.max_seq_length
        if max_length is not None and not 0 < max_length <= context:
            raise UserError(f"a cache of {max_length} tokens was asked for, the model's context is {context}")
        self.context = max_length or context
        if speculation is not None:
            check_rewindable(model.config, kv_cache)
        self._decode_step: StepFn = CompiledDecode(model) if compile else self._forward

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Continue each prompt to its end.

        Args:
            prompts: token ids, each of any length.
            params: settings of all rows, or one a row. A seed given for all rows seeds each alike, so that a row's
                result does not depend on the others.

        Raises:
            UserError: a prompt that is empty, longer than the context or with ids outside the vocabulary.
            ValueError: the logits contain NaN.
        """
        row_params = _one_a_row(prompts, params)
        results: list[Result] = []
        for i in range(0, len(prompts), self.max_batch_size):
            stream = self.stream(prompts[i : i + self.max_batch_size], row_params[i : i + self.max_batch_size])
            for _ in stream:
                pass
            results += stream.results
        return results

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Stream:
        """Continue the prompts together and give `Event(row, text, token_id)` as text becomes certain.

        The arguments are checked at once; the model runs as the stream is read. See `generate` for them.
        """
        rows = [
            Row(i, self._check_ids(prompt), p, self._longest(p), self.tokenizer)
            for i, (prompt, p) in enumerate(zip(prompts, _one_a_row(prompts, params), strict=True))
        ]
        return Stream(self, rows)

    def _longest(self, params: SamplingParams) -> int:
        """The longest sequence; one without an end of its own stays in the model's context, whatever the cache."""
        return min(self.context, self.model.max_seq_length) if params.max_new_tokens is None else self.context

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.transformer.wte.weight.device

    def new_cache(self, rows: Sequence[Row]) -> KVCache:
        """A cache that holds the rows to their ends, as far as the context goes."""
        need = min(max(len(row.prompt) + row.budget for row in rows), self.context)
        if self.max_length is not None:
            need = self.max_length
        elif self.compile:  # few sizes, few compilations
            need = min(max(256, 1 << (need - 1).bit_length()), self.context)
        sizes: dict[str, Any] = {
            "batch_size": len(rows),
            "max_length": need,
            "dtype": self.autocast or self.model.transformer.wte.weight.dtype,
            "device": self.device,
        }
        ensure_fits(self.model.config, self.kv_cache, **sizes)
        return KVCache.from_config(self.model.config, self.kv_cache, **sizes)

    def prefill(self, prompts: Sequence[Sequence[int]], cache: KVCache) -> torch.Tensor:
        """Feed the prompts, chunk by chunk, and return the logits after each, `(B, V)`; an empty prompt idles."""
        logits: torch.Tensor | None = None
        prefixes = self.prefixes(cache)
        rest = prefixes.restore(prompts)
        for start in range(0, max(map(len, rest)), self.prefill_chunk):
            chunks = [list(prompt[start : start + self.prefill_chunk]) for prompt in rest]
            out = self._forward(self._padded(chunks), cache, cache.plan([len(chunk) for chunk in chunks]))[:, -1]
            if logits is None or all(chunks):
                logits = out
            else:  # rows that ended in an earlier chunk keep their logits
                fed = torch.tensor([bool(chunk) for chunk in chunks], device=self.device)
                logits = torch.where(fed[:, None], out, logits)
            prefixes.keep_chunks(prompts, [len(chunk) for chunk in chunks])
        assert logits is not None
        return logits

    def decode(self, tokens: torch.Tensor, cache: KVCache, active: Sequence[bool]) -> torch.Tensor:
        """Feed one token a row, `(B,)`, where the row is active, and return the logits, `(B, V)`."""
        return self._decode_step(tokens[:, None], cache, cache.plan([int(a) for a in active]))[:, -1]

    def score(self, chunks: Sequence[Sequence[int]], cache: KVCache) -> torch.Tensor:
        """Feed a few tokens a row and return the logits after each, `(B, T, V)`; an empty chunk idles."""
        step = cache.plan([len(chunk) for chunk in chunks])
        idx = self._padded(chunks)
        return self._decode_step(idx, cache, step) if step.size == 1 else self.model(idx, cache=cache, step=step)

    def prefixes(self, cache: KVCache) -> Prefixes:
        """What the cache's rows have in common with earlier ones."""
        scope: tuple[object, ...] = ()
        if self.prefix_store is not None:
            scope = (self.kv_cache, cache.dtype, self.model.rope.is_long(cache.rope_length))
        return Prefixes(self.prefix_store, cache, scope, self.prefill_chunk)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The state of torch that the model runs in: no gradients, and mixed precision if asked for."""
        mixed: AbstractContextManager[Any] = (
            nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
        )
        with torch.inference_mode(), mixed:
            yield

    def _forward(self, idx: torch.Tensor, cache: KVCache, step: Step) -> torch.Tensor:
        return self.model(idx, cache=cache, step=step, last_only=True)

    def _padded(self, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(map(len, chunks))
        return torch.tensor([[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks], device=self.device)

    def _check_ids(self, prompt: Prompt) -> list[int]:
        ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
        rows = self.model.config.padded_vocab_size
        if ids and (min(ids) < 0 or max(ids) >= rows):
            bad = next(i for i in ids if not 0 <= i < rows)
            raise UserError(
                f"token id {bad} is outside the model's {rows} embeddings",
                "use the tokenizer that belongs to the model",
            )
        return ids


class Stream(Iterator[Event]):
    """A running request: an iterator of events, then `results`.

    Ending early (`close`, leaving a `with` block, or dropping the last reference) frees the cache.
    """

    def __init__(self, engine: Engine, rows: list[Row]) -> None:
        self._rows = rows
        self._prefill_seconds = self._decode_seconds = 0.0
        self._steps = self._run(engine)
        self._events: deque[Event] = deque()  # of the last step, not yet handed out

    def __next__(self) -> Event:
        while not self._events:
            self._events.extend(next(self._steps))
        return self._events.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and free what the request holds."""
        self._steps.close()
        self._events.clear()

    def ended(self, row: int) -> bool:
        """Whether everything of a row has been handed out."""
        return not self._rows[row].active and all(event.row != row for event in self._events)

    @property
    def results(self) -> list[Result]:
        """One result a row, once the stream has been read to its end."""
        return [
            row.result(
                Timing(
                    prefill_seconds=self._prefill_seconds,
                    decode_seconds=self._decode_seconds,
                    prompt_tokens=len(row.prompt),
                    new_tokens=row.n_sampled,
                    steps=row.steps,
                    drafted=row.drafted,
                    accepted=row.accepted,
                )
            )
            for row in self._rows
        ]

    def _run(self, engine: Engine) -> Generator[list[Event], None, None]:
        rows = self._rows
        if not any(row.active for row in rows):
            return
        with _evaluating(engine.model):
            start = perf_counter()
            with engine.computing():
                cache = engine.new_cache(rows)
                logits = engine.prefill([row.prompt if row.active else [] for row in rows], cache)
                samplers = [
                    Sampler(row.params, row.prompt, logits.shape[-1], logits.device) if row.active else None
                    for row in rows
                ]
                tokens, ids = pick_all(logits, samplers)
                speculator = (
                    Speculator(engine.speculation, engine, cache, rows, samplers) if engine.speculation else None
                )
                events = self._accept(logits[:, None], [[i] for i in ids], samplers)
            self._prefill_seconds = perf_counter() - start
            yield events
            while any(row.active for row in rows):
                start = perf_counter()
                with engine.computing():
                    if speculator is None:
                        logits = engine.decode(tokens, cache, [row.active for row in rows])[:, None]
                        tokens, ids = pick_all(logits[:, 0], samplers)
                        chosen = [[i] for i in ids]
                    else:
                        logits, chosen = speculator.step(samplers)
                    for row in rows:
                        row.steps += row.active
                    events = self._accept(logits, chosen, samplers)
                self._decode_seconds += perf_counter() - start
                yield events
            with engine.computing():
                engine.prefixes(cache).keep_sequences([row.sequence for row in rows])

    def _accept(
        self, logits: torch.Tensor, chosen: Sequence[Sequence[int]], samplers: list[Sampler | None]
    ) -> list[Event]:
        """Hand the chosen tokens to the active rows; a row that ends takes no more and loses its sampler.

        Args:
            logits: `(B, T, V)`, from which the tokens were chosen.
            chosen: at most T tokens a row.
            samplers: one a row, None for those that have ended.
        """
        events: list[Event] = []
        for i, row in enumerate(self._rows):
            top = row.params.logprobs
            for t, token in enumerate(chosen[i]):
                if row.active:
                    events += row.accept(token, None if top is None else logprobs_of(logits[i, t], token, top))
            if not row.active:
                samplers[i] = None
        return events


def _one_a_row(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise UserError(f"{len(prompts)} prompts came with {len(params)} settings", "give one for all, or one a prompt")
    return list(params)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) inside, and afterwards exactly the modes of before."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def with_seeds(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Settings for `n` different samples of one prompt: the seed, where there is one, counts up."""
    return [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(n)]
