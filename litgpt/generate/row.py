# Licensed under the Apache License 2.0, see the LICENSE file.

"""One sequence of a batch: its budget, its stop state, and the text that has become certain so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from litgpt.detokenizer import StreamDecoder
from litgpt.errors import UserError
from litgpt.generate.stopping import HoldBack
from litgpt.generate.types import Event, FinishReason, Result, SamplingParams, Timing, TokenLogprob
from litgpt.tokenizer import Tokenizer


class Row:
    """Takes the sampled tokens of one sequence and says what of them may be shown.

    Tokens pass three stages: stop ids and sequences are held back, the rest is decoded to text, stop strings are held
    back from that.

    Args:
        index: the row's number in the batch.
        prompt: token ids of the prompt, at least one.
        params: settings of the row.
        context: the longest sequence the model takes, prompt included.
        tokenizer: turns tokens into text; None gives token ids only.

    Raises:
        UserError: an empty prompt, one longer than the context, or stop strings without a tokenizer.
    """

    def __init__(
        self, index: int, prompt: list[int], params: SamplingParams, context: int, tokenizer: Tokenizer | None
    ) -> None:
        if not prompt:
            raise UserError(
                "the prompt has no tokens", "give some text; this tokenizer adds no BOS token to an empty one"
            )
        if len(prompt) > context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the model's context is {context}", "shorten the prompt"
            )
        if params.stop and tokenizer is None:
            raise UserError(f"stop strings {list(params.stop)} need a tokenizer", "use stop_sequences of token ids")
        self.index = index
        self.prompt = prompt
        self.params = params
        room = context - len(prompt)
        self.budget = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        self._reason_when_spent: FinishReason = "length" if self.budget == params.max_new_tokens else "context"
        self.finish_reason: FinishReason | None = None if self.budget else self._reason_when_spent
        self.steps = self.drafted = self.accepted = 0  # see Timing

        stop_ids = params.stop_ids
        if stop_ids is None:
            stop_ids = tokenizer.stop_ids if tokenizer is not None else frozenset()
        self._token_hold: HoldBack[int] = HoldBack([*((i,) for i in stop_ids), *params.stop_sequences])
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._text_hold: HoldBack[str] | None = HoldBack(params.stop) if params.stop else None

        self._tokens: list[int] = []  # sampled
        self._logprobs: list[TokenLogprob] = []
        self._starts: list[int] = []  # of each decoded token: characters decoded before it
        self._n_decoded = 0  # characters decoded
        self._n_shown = 0  # tokens shown
        self._n_text = 0  # characters shown
        self._text: list[str] = []  # shown

    @property
    def active(self) -> bool:
        """Whether more tokens are wanted."""
        return self.finish_reason is None

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> Iterator[Event]:
        """Take the next sampled token and give what has become certain."""
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        yield from self._decode(self._token_hold.push(token))
        if self._token_hold.matched is not None:
            if self.params.include_stop:
                yield from self._decode(self._token_hold.matched)
            yield from self._finish("stop")
        elif self._text_stop:
            yield from self._finish("stop")
        elif len(self._tokens) == self.budget:
            yield from self._decode(self._token_hold.flush())
            yield from self._finish(self._reason_when_spent)

    def result(self, timing: Timing) -> Result:
        """Everything shown, once the row is finished."""
        assert self.finish_reason is not None
        return Result(
            text="".join(self._text),
            token_ids=self._tokens[: self._n_shown],
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            logprobs=None if self.params.logprobs is None else self._logprobs[: self._n_shown],
            timing=timing,
        )

    @property
    def n_sampled(self) -> int:
        """Tokens sampled, hidden ones included."""
        return len(self._tokens)

    @property
    def sequence(self) -> list[int]:
        """The prompt and all tokens sampled."""
        return self.prompt + self._tokens

    @property
    def _text_stop(self) -> bool:
        return self._text_hold is not None and self._text_hold.matched is not None

    def _decode(self, tokens: Iterable[int]) -> Iterator[Event]:
        for token in tokens:
            if self._text_stop:
                return
            self._starts.append(self._n_decoded)
            text = self._decoder.push([token]) if self._decoder is not None else ""
            self._n_decoded += len(text)
            yield from self._show(self._certain(text))

    def _finish(self, reason: FinishReason) -> Iterator[Event]:
        rest = self._decoder.finish() if self._decoder is not None else ""
        if not self._text_stop:
            tail = self._certain(rest)
            if self._text_hold is not None and not self._text_stop:
                tail += "".join(self._text_hold.flush())
            yield from self._show(tail, last=not self._text_stop)
        self.finish_reason = "stop" if self._text_stop else reason

    def _certain(self, text: str) -> str:
        """Pass decoded text through the search for stop strings."""
        hold = self._text_hold
        if hold is None:
            return text
        shown: list[str] = []
        for char in text:
            shown.extend(hold.push(char))
            if hold.matched is not None:
                if self.params.include_stop:
                    shown.extend(hold.matched)
                break
        return "".join(shown)

    def _show(self, text: str, last: bool = False) -> Iterator[Event]:
        """Give `text`, and the tokens it belongs to: those that begin before its end."""
        if text:
            self._text.append(text)
            self._n_text += len(text)
        n = len(self._starts)
        if self._text_hold is not None and not last:
            n = self._n_shown
            while n < len(self._starts) and self._starts[n] < self._n_text:
                n += 1
        tokens = self._tokens[self._n_shown : n]
        self._n_shown = n
        for token in tokens[:-1]:
            yield Event(self.index, "", token)
        if text or tokens:
            yield Event(self.index, text, tokens[-1] if tokens else None)
