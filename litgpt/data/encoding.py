# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a record to token ids, and which of them the assistant writes.

What is learnt is what a model has to write by itself: an answer from where the prompt ends to the token that ends the
turn. Both borders are borders between tokens, and the tokens before an answer are those that the prompt has when a
model is asked to answer it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from litgpt.data.records import Conversation, Instruction
from litgpt.errors import UserError
from litgpt.prompts import ChatTemplate, PromptStyle, Turns

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer

Piece = tuple[str, bool]  # a part of a text, and whether the assistant writes it
_PROBE = "Xanadu7"  # stands for an answer, to see where a template puts it


class Encoder:
    """Encodes samples in the format of a prompt style.

    Args:
        tokenizer: the checkpoint's tokenizer.
        style: the format, bound to the tokenizer if it is the checkpoint's own.
    """

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle) -> None:
        self.tokenizer, self.style = tokenizer, style

    def __call__(self, sample: Instruction | Conversation) -> tuple[list[int], list[bool]]:
        """Encode a sample.

        Returns:
            Token ids, and for each whether the assistant writes it. The last one ends the last answer.

        Raises:
            UserError: the format cannot express the sample.
        """
        if isinstance(sample, Instruction) and not isinstance(self.style, ChatTemplate):
            pieces = [(self.style.apply(prompt=sample.prompt, **sample.fields), False), (sample.answer, True)]
            ends = {self.end_id}
        else:
            pieces = self._split(sample if isinstance(sample, Conversation) else _as_conversation(sample))
            ends = set(self._ends.values())
        parts = encode_pieces(self.tokenizer, [text for text, _ in pieces], self.style.bos)
        ids = [index for part in parts for index in part]
        supervised = [answer for part, (_, answer) in zip(parts, pieces, strict=True) for _ in part]
        if not parts[-1] or parts[-1][-1] not in ends:
            ids, supervised = [*ids, self.end_id], [*supervised, True]
        return ids, supervised

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer: that of the format where it has one, else EOS."""
        after = self.style.end.lstrip() if isinstance(self.style, Turns) else ""
        if found := [token for token in (self._ends if after else ()) if after.startswith(token)]:
            return self._ends[max(found, key=len)]
        if self.tokenizer.eos_id is None:
            raise UserError("the tokenizer has no EOS token to end an answer with", "use another checkpoint")
        return self.tokenizer.eos_id

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Tokens that end a turn, as they stand in a text."""
        ids = {sequence[0] for sequence in self.style.stop_tokens(self.tokenizer) if len(sequence) == 1}
        return {text: index for text, index in self.tokenizer.vocabulary.items() if index in ids}

    @cached_property
    def _finished_style(self) -> PromptStyle:
        """The style that ends where the conversation does, without the header of an answer to come."""
        if isinstance(self.style, ChatTemplate):
            variables = {**self.style.init_args(), "add_generation_prompt": False}
            return type(self.style)(self.tokenizer, **variables)
        return self.style

    def _finished(self, sample: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        text = self._finished_style.apply(messages, tools=sample.tools)
        return text.removesuffix(self.style.reply) if isinstance(self.style, Turns) else text

    def _split(self, sample: Conversation) -> list[Piece]:
        """The text of a conversation up to the end of its last answer, cut at the borders of the answers."""
        text, done = self._finished(sample, sample.messages), 0
        pieces: list[Piece] = []
        for index, message in enumerate(sample.messages):
            if message["role"] != "assistant":
                continue
            start, stop = self._find_answer(sample, index, text)
            if start < done:
                raise UserError(f"the prompt style writes message {index + 1} before an earlier one")
            pieces += [(text[done:start], False), (text[start:stop], True)]
            done = stop
        return pieces

    def _find_answer(self, sample: Conversation, index: int, text: str) -> tuple[int, int]:
        """Where the answer that is message `index` begins and where its turn ends."""
        messages, message = sample.messages, sample.messages[index]
        content = message["content"] if isinstance(message.get("content"), str) else ""
        prompt = self.style.apply(messages[:index], tools=sample.tools) if index else ""
        begin = len(prompt) if index and text.startswith(prompt) else None
        if begin is not None and content.strip():
            shift = len(text) - begin - len(text[begin:].lstrip())
            for skip, written in ((0, content), (shift, content.strip())):
                stop = begin + skip + len(written)
                # Otherwise it may be something the format writes that only begins like the answer: "<" and "<think>".
                if text.startswith(written, begin + skip) and (end := self._end_of_turn(text, stop, message)) > stop:
                    return begin, end
        # The format changes the answer, or what it writes before depends on what comes later.
        probe = self._finished(sample, [*messages[:index], {**message, "content": _PROBE}, *messages[index + 1 :]])
        before, _, after = probe.partition(_PROBE)
        if probe.count(_PROBE) == 1 and text.startswith(before) and text.endswith(after):
            if begin is None or begin > len(before):
                begin = len(before)
            return begin, self._end_of_turn(text, max(len(text) - len(after), begin), message)
        if begin is not None:  # an answer without a text of its own, such as calls of tools
            return begin, self._end_of_turn(text, begin, {**message, "tool_calls": True})
        raise UserError(f"cannot see where the prompt style writes message {index + 1}", "use another prompt style")

    def _end_of_turn(self, text: str, position: int, message: Mapping[str, Any]) -> int:
        """The position after the token that ends a turn, or the end of the answer if there is none.

        Only space may stand before that token, and the calls of a message that has some.
        """
        rest = text[position:]
        space = len(rest) - len(rest.lstrip())
        found = [(rest.find(end), -len(end)) for end in self._ends if end in rest]
        first, negative = min(found, default=(len(rest), 0))
        return position + first - negative if found and (first <= space or message.get("tool_calls")) else position


def _as_conversation(sample: Instruction) -> Conversation:
    """An instruction as two messages; its `input` is part of the request, as `ChatTemplate.apply` has it."""
    request = f"{sample.prompt}\n\n{sample.fields['input']}" if sample.fields.get("input") else sample.prompt
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": sample.answer}]
    if sample.fields.get("sys_prompt"):
        messages.insert(0, {"role": "system", "content": sample.fields["sys_prompt"]})
    return Conversation(messages)


def encode_pieces(tokenizer: Tokenizer, texts: Sequence[str], bos: bool | None) -> list[list[int]]:
    """Encode the parts of a text so that each border between them is a border between tokens.

    Together the ids are those of the whole text, unless it has a token that reaches over a border; the text is then
    cut there. At every border, what is before it is encoded as if nothing followed.

    Args:
        tokenizer: the tokenizer.
        texts: the parts.
        bos: whether the text starts with BOS, as in `Tokenizer.encode`.
    """
    whole = tokenizer.encode("".join(texts), bos=bos).tolist()
    first = tokenizer.encode(texts[0], bos=bos).tolist()
    parts = [first, *(tokenizer.encode(text, bos=False).tolist() for text in texts[1:])]
    if [index for part in parts for index in part] == whole:
        return parts
    parts, group, ids = [first], texts[0], first  # the text since the last cut, and its ids
    is_cut = False
    for text in texts[1:]:
        longer = _encode_middle(tokenizer, group + text) if is_cut else tokenizer.encode(group + text, bos=bos).tolist()
        if longer[: len(ids)] == ids:
            parts.append(longer[len(ids) :])
            group, ids = group + text, longer
        else:
            group, ids, is_cut = text, _encode_middle(tokenizer, text), True
            parts.append(ids)
    return parts


def _encode_middle(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that is not the beginning of one: some tokenizers put a space before the first word."""
    for context in ("\n", "a"):
        before = tokenizer.encode(context, bos=False).tolist()
        ids = tokenizer.encode(context + text, bos=False).tolist()
        if ids[: len(before)] == before and len(ids) > len(before):
            return ids[len(before) :]
    return tokenizer.encode(text, bos=False).tolist()
