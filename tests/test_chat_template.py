# Licensed under the Apache License 2.0, see the LICENSE file.

"""Chat templates: rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from litgpt import chat_template
from litgpt.errors import UserError
from litgpt.tokenizer import Tokenizer
from tests.assets import REAL_TOKENIZERS, our_tokenizer, reference_tokenizer
from tests.toy_tokenizers import byte_level, write_folder

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi <b>né😀</b> & {x} 'y' \"z\""},
    {"role": "assistant", "content": " Yes. \n", "reasoning_content": None},
    {"role": "user", "content": "  again \n"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}
]

# Each uses something that a plain jinja2 environment lacks or does otherwise
TEMPLATES = {
    "blocks": "{% for m in messages %}\n    {% if true %}\n[{{ m.role }}]\n    {% endif %}\n{% endfor %}\n",
    "continue": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "break": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}-{% endfor %}",
    "generation trimmed": "{% for m in messages %}{%- generation -%} {{ m.role }} {%- endgeneration -%}\n-{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}",
    "tools": "{% if tools %}{{ tools | tojson(separators=(',', ':')) }}{% else %}none{% endif %}",
    "documents": "{{ documents }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1, b=2) | tojson }}{{ dict([('a', 3)]) | tojson }}",
    "date": "{{ strftime_now('%Y') }}",
    "none is absent": "{% for m in messages %}{{ 'x' if 'reasoning_content' in m else 'y' }}{% endfor %}",
    "prompt": "{{ messages[-1].content | trim }}{% if add_generation_prompt %}>{% endif %}",
    "variable": "{{ enable_thinking is defined and enable_thinking }}",
    "strings": "{{ messages[0]['content'].split(' ')[0].upper() ~ messages[0].content[::-1] }}",
    "macro": "{% macro f(m) %}{{ m.role }}:{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
}


def make(folder: Path, template: Any, **files: Any) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": template}
    return Tokenizer(write_folder(folder, byte_level(), config=config, **files))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make(tmp_path, TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for extras in ({}, {"tools": TOOLS, "documents": [{"title": "T", "text": "<d>"}], "enable_thinking": True}):
        arguments: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **extras}
        expected = theirs.apply_chat_template(CHAT, tokenize=False, **arguments)
        assert ours.apply_chat_template(CHAT, **arguments) == expected


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
@pytest.mark.parametrize("system", [True, False])
def test_real_templates_equal_transformers(name: str, system: bool) -> None:
    ours, theirs = our_tokenizer(name), reference_tokenizer(name)
    chat = ([{"role": "system", "content": "Be <nice>."}] if system else []) + CHAT
    for add_generation_prompt in (True, False):
        for extras in ({}, {"tools": TOOLS}):
            arguments: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **extras}
            text = ours.apply_chat_template(chat, **arguments)
            assert text == theirs.apply_chat_template(chat, tokenize=False, **arguments)
            expected = theirs.apply_chat_template(chat, return_dict=False, **arguments)
            assert ours.encode(text, bos=False).tolist() == expected


UNSAFE = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (''|attr('__class__'))() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(1000000000) %}{% endfor %}",
]


@pytest.mark.parametrize("template", UNSAFE)
def test_unsafe_templates_are_refused(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template)
    with pytest.raises(UserError, match="chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_objects_lose_their_methods() -> None:
    class Loud(str):
        def shout(self) -> str:
            return "leaked"

    chat = [{"role": "user", "content": Loud("quiet"), "image": object()}]
    assert chat_template.render("{{ messages[0].content }} {{ messages[0].image }}", chat) == "quiet <object>"
    with pytest.raises(UserError, match="shout"):
        chat_template.render("{{ messages[0].content.shout() }}", chat)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "chat template failed"),
        ("{{ 1 + 'a' }}", "chat template failed"),
    ],
)
def test_failing_templates_say_why(tmp_path: Path, template: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        make(tmp_path, template).apply_chat_template(CHAT)


@pytest.mark.parametrize("messages", [[], ["text"], [{"content": "no role"}]])
def test_bad_messages(messages: list[Any]) -> None:
    with pytest.raises(UserError):
        chat_template.render("{{ messages }}", messages)


def test_messages_are_not_changed() -> None:
    chat = [{"role": "assistant", "content": "a", "thinking": "t", "tool_calls": None}]
    before = json.dumps(chat)
    text = chat_template.render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", chat)
    assert text == "tt"
    assert json.dumps(chat) == before


# Where a template comes from


def test_template_sources_in_order(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, None, chat_template={"chat_template": "json"})
    assert tokenizer.chat_template == "json"
    assert make(tmp_path, "config").chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("jinjá", encoding="utf-8")
    assert make(tmp_path, "config").chat_template == "jinjá"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([{"template": "a"}], "a"),
        ([{"name": "default"}], None),
        (["a", {"name": "default", "template": "b"}], "b"),
        ({"default": "a"}, None),
        (5, None),
    ],
)
def test_odd_entries_do_no_harm(tmp_path: Path, value: Any, found: str | None) -> None:
    assert make(tmp_path, value).chat_template == found


def test_no_template(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, None)
    assert tokenizer.chat_template is None
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d{{ 1 }}"}, {"name": "tool_use", "template": "t{{ 1 }}"}]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r{{ 1 }}", encoding="utf-8")
    tokenizer = make(tmp_path, named)
    assert tokenizer.apply_chat_template(CHAT) == "d1"
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS) == "t1"
    assert tokenizer.apply_chat_template(CHAT, chat_template="rag") == "r1"
    assert tokenizer.apply_chat_template(CHAT, chat_template="own {{ 2 }}") == "own 2"
    with pytest.raises(UserError, match="'nope'"):
        tokenizer.apply_chat_template(CHAT, chat_template="nope")
