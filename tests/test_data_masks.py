# Licensed under the Apache License 2.0, see the LICENSE file.

"""What is learnt of a sample: exactly what the assistant writes, up to the token that ends its turn.

The references are `transformers` (text and ids of whole conversations and of prompts) and the texts that went in.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from litgpt.data.encoding import Encoder, encode_pieces
from litgpt.data.records import parse_record
from litgpt.errors import UserError
from litgpt.prompts import ChatTemplate, PromptStyle, encode_prompt, prompt_styles
from litgpt.tokenizer import Tokenizer
from tests.assets import REAL_TOKENIZERS, our_tokenizer, reference_tokenizer
from tests.tiny_text import write_tokenizer
from tests.toy_tokenizers import CHATML, byte_level, sentencepiece_like, write_folder

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <nice>."},
    {"role": "user", "content": "Hi né😀\n\n  there"},
    {"role": "assistant", "content": "Hello! Yes.\n\nA list:\n- one\n- two"},
    {"role": "user", "content": "Yes."},
    {"role": "assistant", "content": "Yes."},
]


@lru_cache
def chat_encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer, ChatTemplate().bind(tokenizer))


def runs(encoder: Encoder, sample: dict[str, Any]) -> list[tuple[bool, str]]:
    """The encoded sample as texts, cut where the mask changes."""
    tokenizer = encoder.tokenizer
    ids, mask = encoder(parse_record(sample))
    assert len(ids) == len(mask)
    starts = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    pairs = itertools.pairwise(starts)
    return [(mask[a], tokenizer.decode(ids[a:b], skip_special_tokens=False)) for a, b in pairs]


def answers(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    return [text for learnt, text in runs(chat_encoder(tokenizer), {"messages": messages}) if learnt]


END = {
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
# What may follow the last answer: nothing; that template of Llama 3 always opens one more
REST = ("", "<|start_header_id|>assistant<|end_header_id|>")


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_templates(name: str) -> None:
    tokenizer, reference = our_tokenizer(name), reference_tokenizer(name)
    found = answers(tokenizer, CHAT)
    first, last = f"{CHAT[2]['content']}{END[name]}", f"{CHAT[4]['content']}{END[name]}"
    # Qwen3's template writes an empty thought before the last answer, and so must the model.
    assert found == [first, f"<think>\n\n</think>\n\n{last}" if name == "qwen3" else last]

    ids, mask = chat_encoder(tokenizer)(parse_record({"messages": CHAT}))
    whole = reference.apply_chat_template(CHAT, return_dict=False)
    assert ids == whole[: len(ids)]
    assert reference.decode(whole[len(ids) :]).strip() in REST
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    for start, end in zip(starts, (2, 4), strict=True):
        prompt = reference.apply_chat_template(CHAT[:end], add_generation_prompt=True, return_dict=False)
        assert ids[:start] == prompt


texts = st.text(st.sampled_from("ab .,:\n\t<>|né😀1"), max_size=12)


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
@settings(max_examples=40, deadline=None)
@example([("", "<")], False)  # as the empty thought of Qwen3 begins
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), st.booleans())
def test_any_conversation_under_real_templates(name: str, turns: list[tuple[str, str]], system: bool) -> None:
    tokenizer, reference = our_tokenizer(name), reference_tokenizer(name)
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Be nice."}] if system else []
    for request, answer in turns:
        chat += [{"role": "user", "content": f"Q{request}"}, {"role": "assistant", "content": answer}]
    ids, mask = chat_encoder(tokenizer)(parse_record({"messages": chat}))

    text = reference.apply_chat_template(chat, tokenize=False)
    decoded = reference.decode(ids, clean_up_tokenization_spaces=False)
    assert text.startswith(decoded)
    assert text[len(decoded) :].strip() in REST

    found = answers(tokenizer, chat)
    assert len(found) == len(turns)
    for run, (_, answer) in zip(found, turns, strict=True):
        assert run.endswith(END[name])
        written = run.removesuffix(END[name]).removeprefix("<think>\n\n</think>\n\n")
        assert written in (answer, answer.strip(), answer.lstrip("\n"))

    first = mask.index(True)
    place = 1 + system
    assert ids[:first] == reference.apply_chat_template(chat[:place], add_generation_prompt=True, return_dict=False)


def test_reasoning_and_calls_of_tools_are_learnt() -> None:
    tokenizer = our_tokenizer("qwen3")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42.", "reasoning_content": "The tool says so."},
    ]
    found = answers(tokenizer, chat)
    assert found[0].startswith("<tool_call>")
    assert '"name": "f"' in found[0]
    assert found[0].endswith("</tool_call><|im_end|>")
    assert found[1] == "<think>\nThe tool says so.\n</think>\n\nIt is 42.<|im_end|>"


TRICKY = {
    # the prompt of an earlier turn is not a prefix of the whole
    "system with the last request": (
        "{% for m in messages %}{% if m.role == 'user' %}[Q]"
        "{% if loop.index0 >= messages | length - 2 %}SYS {% endif %}{{ m.content }}[A]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "changes answers": (
        "{% for m in messages %}{% if m.role == 'user' %}[Q]{{ m.content }}{% else %}"
        "[A]{{ m.content | upper | trim }}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    ),
    "no token ends a turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("system with the last request", ["hello</s>", "again</s>"]),
        ("changes answers", ["HELLO</s>", "AGAIN</s>"]),
        ("no token ends a turn", ["hello", "again</s>"]),
    ],
)
def test_tricky_templates(tmp_path: Path, name: str, expected: list[str]) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, TRICKY[name]))
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "again"},
    ]
    assert answers(tokenizer, chat) == expected


def test_a_template_that_hides_an_answer_is_refused(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if messages | length > 1 %}, {{ messages | length }}{% endif %}"
    tokenizer = Tokenizer(write_tokenizer(tmp_path, "{{ messages | length }}" + template))
    with pytest.raises(UserError, match=r"cannot see where .* message 2"):
        answers(tokenizer, CHAT[1:3])


@pytest.mark.parametrize("name", sorted(set(prompt_styles) - {"chat-template"}))
def test_named_styles(tmp_path: Path, name: str) -> None:
    """An instruction: the prompt is what `generate` sends, the rest is the answer and one token that stops it."""
    specials = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(specials), config=config))
    style = PromptStyle.from_name(name)
    record = {"instruction": "What?", "input": "x", "output": "That.", "prompt": "ignored", "self": 1}
    encoder = Encoder(tokenizer, style)
    ids, mask = encoder(parse_record(record))
    prompt = encode_prompt(tokenizer, style, "What?", input="x")
    assert ids[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) : -1]) == "That."
    assert [ids[-1]] in style.stop_tokens(tokenizer)
    # the same as a conversation, whose answers are found in the text instead
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    plain = {"instruction": "What?", "output": "That."}
    spaced = ("llama2", "llama2-function-calling")  # a space before the token that ends a turn
    if name not in ("raw", *spaced):
        assert runs(encoder, {"messages": chat}) == runs(encoder, plain)
    elif name in spaced:
        assert runs(encoder, {"messages": chat})[-1] == (True, "That. </s>")


def test_named_style_in_turns(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config={"eos_token": "</s>"}))
    found = runs(Encoder(tokenizer, PromptStyle.from_name("chatml")), {"messages": CHAT[1:]})
    assert [text for learnt, text in found if learnt] == [f"{CHAT[2]['content']}<|im_end|>", "Yes.<|im_end|>"]
    found = runs(Encoder(tokenizer, PromptStyle.from_name("alpaca")), {"messages": CHAT[1:]})
    assert [text for learnt, text in found if learnt] == [CHAT[2]["content"], "Yes.</s>"]
    with_tool = {"messages": [{"role": "tool", "content": "x"}, *CHAT[1:]]}
    with pytest.raises(UserError, match="unknown role 'tool'"):
        runs(Encoder(tokenizer, PromptStyle.from_name("chatml")), with_tool)


def test_eos_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config={"eos_token": "</s>"}))
    found = runs(Encoder(tokenizer, PromptStyle.from_name("alpaca")), {"instruction": "a", "output": "b</s>"})
    assert found[-1] == (True, "b</s>")


def test_an_instruction_under_the_checkpoint_s_template(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "chat_template": CHATML}
    tokenizer = Tokenizer(write_folder(tmp_path, byte_level(), config=config))
    record = {"instruction": "Sum", "input": "1 2", "output": "3", "sys_prompt": "S"}
    found = runs(chat_encoder(tokenizer), record)
    prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nSum\n\n1 2<|im_end|>\n<|im_start|>assistant\n"
    assert found == [(False, prompt), (True, "3<|im_end|>")]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.text(st.sampled_from("hello tw.\né"), max_size=8), min_size=2, max_size=4))
def test_borders_are_between_tokens(kind: str, parts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    make = byte_level if kind == "byte level" else sentencepiece_like
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "_")
    if not folder.exists():
        write_folder(folder, make(), config={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    tokenizer = Tokenizer(folder)
    found = encode_pieces(tokenizer, parts, None)
    assert found[0] == tokenizer.encode(parts[0]).tolist()
    joined = [index for part in found for index in part]
    whole = tokenizer.encode("".join(parts)).tolist()
    assert tokenizer.decode(joined) == tokenizer.decode(whole)
    borders = [tokenizer.encode("".join(parts[: i + 1])).tolist() for i in range(len(parts))]
    if all(whole[: len(border)] == border for border in borders):
        assert joined == whole
        assert [len(part) for part in found[1:]] == [len(b) - len(a) for a, b in itertools.pairwise(borders)]
