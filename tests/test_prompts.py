# Licensed under the Apache License 2.0, see the LICENSE file.

"""Prompt styles: the published formats, which one applies, and the token ids that come out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from litgpt import prompts
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.prompts import (
    ChatML,
    ChatTemplate,
    Default,
    Prompt,
    PromptStyle,
    choose_prompt_style,
    encode_prompt,
    has_prompt_style,
    load_prompt_style,
    model_name_to_prompt_style,
    prompt_styles,
    save_prompt_style,
)
from litgpt.tokenizer import Tokenizer
from tests.assets import our_tokenizer, reference_tokenizer, tokenizer_dir
from tests.toy_tokenizers import CHATML, add_bos_template, byte_level, write_folder

# name -> (text of the request "Q", text of "Q" with the system prompt "S"); `...` stands for a long text
GOLDEN = {
    "raw": ("Q", "Q"),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ\n\n### Response:\n",
        "S### Instruction:\nQ\n\n### Response:\n",
    ),
    "flan": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ\n\n### Response:\n",
        "S### Instruction:\nQ\n\n### Response:\n",
    ),
    "longform": (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nQ\n\n### Response:\n",
        "S### Instruction:\nQ\n\n### Response:\n",
    ),
    "stablelm-alpha": (
        "<|SYSTEM|># StableLM Tuned (Alpha version)\n- StableLM is a ...<|USER|>Q<|ASSISTANT|>",
        "<|SYSTEM|>S<|USER|>Q<|ASSISTANT|>",
    ),
    "stablelm-zephyr": ("<|user|>\nQ<|endoftext|>\n<|assistant|>\n",) * 2,
    "falcon": ("Q\nAnswer:",) * 2,
    "falcon3": ("<|user|>\nQ<|endoftext|>\n<|assistant|>\n",) * 2,
    "llama2-function-calling": (
        '<FUNCTIONS>{{"function": "search_bing", "description": "Search the web ...</FUNCTIONS>\n\n[INST]<<SYS>>\n'
        "You are a helpful, ...\n<</SYS>>\n\nQ[/INST]\n\n",
        '<FUNCTIONS>{{..."arguments": [{{"name": "query", "type": "string", "description": "The search ...string"}}]}}'
        "</FUNCTIONS>\n\n[INST]<<SYS>>\nS\n<</SYS>>\n\nQ[/INST]\n\n",
    ),
    "llama2": (
        "[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant. ...\n<</SYS>>\n\n Q [/INST] ",
        "[INST] <<SYS>>\nS\n<</SYS>>\n\n Q [/INST] ",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "r1": ("<｜User｜>Q<｜Assistant｜>", "S<｜User｜>Q<｜Assistant｜>"),
    "freewilly2": (
        "### System:\nThis is a system prompt, please behave and help the user.\n\n### User:\nQ\n\n### Assistant:\n",
        "### System:\nS\n\n### User:\nQ\n\n### Assistant:\n",
    ),
    "platypus": ("### Instruction:\n\nQ\n\n### Response:\n",) * 2,
    "stablecode": ("###Instruction\nQ###Response\n",) * 2,
    "codellama": ("[INST] Q [/INST]", "[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST]"),
    "phi-1": ("Q\n\nAnswer:",) * 2,
    "phi-2": ("Instruct: Q\nOutput:",) * 2,
    "phi-3": (
        "<|system|>\nYou are a helpful assistant.<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n",
        "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n",
    ),
    "phi-4": (
        "<|im_start|>user<|im_sep|>Q<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "phi-4-reasoning": (
        "<|im_start|>system<|im_sep|>You are Phi, a ...<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "phi-4-mini": ("<|user|>Q<|end|><|assistant|>", "<|system|>S<|end|><|user|>Q<|end|><|assistant|>"),
    "phi-4-mini-reasoning": (
        "<|system|>Your name is Phi, an AI math expert developed by Microsoft.<|end|><|user|>Q<|end|><|assistant|>",
        "<|system|>S<|end|><|user|>Q<|end|><|assistant|>",
    ),
    "tinyllama": (
        "<|system|>\nYou are a friendly chatbot who always gives helpful, detailed, and polite answers.</s>\n"
        "<|user|>\nQ</s>\n<|assistant|>\n",
        "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\n",
    ),
    "gemma": ("<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n",) * 2,
    "olmo": ("<|endoftext|><|user|>\nQ\n<|assistant|>\n",) * 2,
    "chatml": (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
    ),
}
CHATML_SYSTEM = {
    "qwen2.5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen2.5-math": "Please reason step by step, and put your final answer within \\boxed{}.",
    "qwq": "You are a helpful and harmless assistant. You are Qwen developed by ... think step-by-step.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "salamandra": "I am Salamandra, ... Unit.",
    "qwen3": None,
}
for _name, _system in CHATML_SYSTEM.items():
    _plain, _with_system = GOLDEN["chatml"]
    GOLDEN[_name] = (_with_system.replace("S", _system, 1) if _system else _plain, _with_system)

CONVERSATION = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": " Q2 "},
]


def matches(text: str, golden: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, golden.split("..."))), text, flags=re.DOTALL) is not None


@pytest.mark.parametrize("name", [name for name in prompt_styles if name != "chat-template"])
def test_named_styles_write_the_published_format(name: str) -> None:
    plain, with_system = GOLDEN[name]
    style = PromptStyle.from_name(name)
    assert matches(style.apply("Q"), plain)
    assert matches(style.apply("Q", sys_prompt="S"), with_system)
    assert "{braces} {prompt}" in style.apply("{braces} {prompt}")


def test_alpaca_input() -> None:
    text = PromptStyle.from_name("alpaca").apply("Q", input="I", instruction="Q", output="O")
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\n Q2 <|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("r1", "<｜User｜>Q1<｜Assistant｜>A1<｜User｜>Q2<｜Assistant｜>"),
        ("codellama", "[INST] Q1 [/INST]A1</s>[INST]  Q2  [/INST]"),
        (
            "gemma",
            "<start_of_turn>user\nQ1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
            "<start_of_turn>user\n Q2 <end_of_turn>\n<start_of_turn>model\n",
        ),
        ("raw", "Q1\nA1\n Q2 "),
    ],
)
def test_conversations(name: str, expected: str) -> None:
    style = PromptStyle.from_name(name)
    assert style.apply(CONVERSATION) == expected
    if name not in ("gemma", "raw"):
        with_system = style.apply([{"role": "system", "content": "S"}, *CONVERSATION])
        assert "S" in with_system
        assert with_system == style.apply(CONVERSATION, sys_prompt="S")


@pytest.mark.parametrize(
    ("conversation", "match"),
    [
        ([{"role": "tool", "content": "x"}], "unknown role 'tool'"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "message 1 has the role system"),
        ([{"role": "user"}], "content of message 0"),
        ([{"content": "x"}], "unknown role None"),
    ],
)
def test_conversations_that_a_format_cannot_express(conversation: list[dict[str, str]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PromptStyle.from_name("llama3").apply(conversation)


def test_a_system_prompt_without_a_place_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Placeless(prompts.Platypus):
        """A class that has not warned yet."""

    for _ in range(2):
        assert Placeless().apply("Q", sys_prompt="S") == GOLDEN["platypus"][0]
    assert caplog.text.count("Placeless has no place for a system prompt") == 1


def test_unknown_name() -> None:
    with pytest.raises(UserError, match=r"unknown prompt style 'nope'.*alpaca"):
        PromptStyle.from_name("nope")


@pytest.mark.parametrize(
    ("model", "style"),
    [
        ("stablelm-tuned-alpha-3b", "StableLMAlpha"),
        ("stablelm-zephyr-3b", "StableLMZephyr"),
        ("stablecode-instruct-alpha-3b", "StableCode"),
        ("falcon-7b-instruct", "Falcon"),
        ("falcon-7b", "Default"),
        ("Falcon3-7B-Instruct", "Falcon3"),
        ("Llama-2-7b-chat-hf-function-calling-v2", "Llama2FunctionCalling"),
        ("Llama-2-7b-chat-hf", "Llama2"),
        ("Llama-2-7b-hf", "Default"),
        ("Llama-3.2-1B-Instruct", "Llama3"),
        ("Llama-3.2-1B", "Default"),
        ("CodeLlama-34b-Instruct-hf", "CodeLlama"),
        ("Mixtral-8x7B-Instruct-v0.1", "CodeLlama"),
        ("OLMo-2-1124-7B-Instruct", "Llama3"),
        ("OLMo-7B-Instruct-hf", "OLMo"),
        ("R1-Distill-Llama-8B", "R1Base"),
        ("phi-1_5", "Phi1"),
        ("phi-2", "Phi2"),
        ("Phi-3-mini-4k-instruct", "Phi3"),
        ("phi-4", "Phi4"),
        ("Phi-4-reasoning-plus", "Phi4Reasoning"),
        ("Phi-4-mini-instruct", "Phi4Mini"),
        ("Phi-4-mini-reasoning", "Phi4MiniReasoning"),
        ("tiny-llama-1.1b-chat", "TinyLlama"),
        ("CodeGemma-7b-it", "Gemma"),
        ("Gemma-2-2b", "Default"),
        ("Qwen2.5-Math-1.5B-Instruct", "Qwen2_5_Math"),
        ("Qwen2.5-Coder-0.5B", "Qwen2_5"),
        ("QwQ-32B", "QwQ"),
        ("Qwen3-0.6B", "Qwen3"),
        ("SmolLM2-135M-Instruct", "SmolLM2"),
        ("salamandra-2b-instruct", "Salamandra"),
        ("anything", "Default"),
    ],
)
def test_style_of_published_models(model: str, style: str) -> None:
    assert type(model_name_to_prompt_style(model)).__name__ == style


def test_every_class_of_litgpt_prompts_can_be_named_in_prompt_style_yaml(tmp_path: Path) -> None:
    for name in [*prompts.formats.__all__, "Default"]:
        (tmp_path / "prompt_style.yaml").write_text(f"class_path: litgpt.prompts.{name}\n", encoding="utf-8")
        style = load_prompt_style(tmp_path)
        assert type(style) is getattr(prompts, name)
        save_prompt_style(style, tmp_path)
        content = yaml.safe_load((tmp_path / "prompt_style.yaml").read_text(encoding="utf-8"))
        assert content == {"class_path": f"litgpt.prompts.{name}"}


# prompt_style.yaml


class OwnStyle(PromptStyle):
    """A style defined by a person's program."""

    def apply(self, prompt: Prompt, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        return f"own {prompt}"


def test_save_and_load(tmp_path: Path) -> None:
    assert not has_prompt_style(tmp_path)
    save_prompt_style("alpaca", tmp_path)
    assert has_prompt_style(tmp_path)
    assert isinstance(load_prompt_style(tmp_path), prompts.Alpaca)
    save_prompt_style(ChatML("be kind"), tmp_path)
    assert "be kind" in load_prompt_style(tmp_path).apply("Q")
    save_prompt_style(OwnStyle(), tmp_path)
    assert load_prompt_style(tmp_path).apply("Q") == "own Q"


@pytest.mark.parametrize(
    "text",
    [
        "class_path: os.system",
        "class_path: litgpt.prompts.Path",
        "class_path: litgpt.prompts.load_prompt_style",
        "class_path: subprocess.Popen\ninit_args: {args: id}",
        "class_path: litgpt.prompts.Alpaca\ninit_args: {x: 1}",
        "!!python/object/apply:os.system ['id']",
        "class_path:",
        "[]",
        "",
        "{",
        "\x00",
    ],
)
def test_prompt_style_yaml_cannot_run_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompt_style.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"prompt_style\.yaml"):
        load_prompt_style(tmp_path)


# The checkpoint's own template


def checkpoint(folder: Path, template: str | None = CHATML, bos: bool = False, **config: Any) -> Tokenizer:
    raw = add_bos_template(byte_level()) if bos else byte_level()
    content = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **config}
    return Tokenizer(write_folder(folder, raw, config=content))


def test_chat_template_style(tmp_path: Path) -> None:
    style = ChatTemplate(checkpoint(tmp_path))
    turn = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert style.apply("Q") == turn
    assert style.apply("Q", sys_prompt="S") == "<|im_start|>system\nS<|im_end|>\n" + turn
    assert style.apply("Q", input="I", output="O", messages="x") == turn.replace("Q", "Q\n\nI")
    assert style.apply(CONVERSATION).endswith("<|im_end|>\n<|im_start|>assistant\n")
    own_system = [{"role": "system", "content": "T"}, {"role": "user", "content": "Q"}]
    assert style.apply(own_system, sys_prompt="S") == "<|im_start|>system\nT<|im_end|>\n" + turn


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}",
    ],
)
def test_a_system_prompt_is_not_lost_by_templates_without_a_place_for_it(tmp_path: Path, template: str) -> None:
    style = ChatTemplate(checkpoint(tmp_path, template))
    assert style.apply("Q", sys_prompt="S") == "[S\n\nQ]"


def test_chat_template_without_a_tokenizer() -> None:
    with pytest.raises(UserError, match="bind"):
        PromptStyle.from_name("chat-template").apply("Q")


def test_chat_template_variables_are_saved(tmp_path: Path) -> None:
    tokenizer = checkpoint(tmp_path, "{{ messages[0].content }}{{ '!' if loud else '.' }}")
    save_prompt_style(ChatTemplate(tokenizer, loud=True), tmp_path)
    assert load_prompt_style(tmp_path).apply("Q") == "Q!"
    assert load_prompt_style(tmp_path, tokenizer).apply("Q") == "Q!"


def test_stop_tokens_hold_the_end_of_the_turn(tmp_path: Path) -> None:
    tokenizer = checkpoint(tmp_path)
    eos, turn = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")
    assert ChatTemplate(tokenizer).stop_tokens(tokenizer) == ([eos], [turn])
    assert Default().stop_tokens(checkpoint(tmp_path, None)) == ([eos], [turn])
    assert prompts.Phi3().stop_tokens(tokenizer) == ([eos], [turn])  # the vocabulary has no `<|end|>`
    assert prompts.Falcon().stop_tokens(tokenizer) == ([eos], [turn])


# Which style applies


def test_order_of_choice(tmp_path: Path) -> None:
    config = Config(n_layer=1, n_embd=8, n_head=2, prompt_style="llama3")
    with_template = checkpoint(tmp_path / "a")
    assert isinstance(choose_prompt_style(tmp_path / "a", with_template, config), ChatTemplate)
    assert isinstance(choose_prompt_style(tmp_path / "a", with_template, config, "alpaca"), prompts.Alpaca)
    assert isinstance(choose_prompt_style(tmp_path / "a", with_template, config, prompts.Gemma), prompts.Gemma)
    own = OwnStyle()
    assert choose_prompt_style(tmp_path / "a", with_template, config, own) is own
    assert type(choose_prompt_style(tmp_path / "a", with_template, config, "raw")) is Default
    save_prompt_style("phi-2", tmp_path / "a")
    assert isinstance(choose_prompt_style(tmp_path / "a", with_template, config), prompts.Phi2)
    assert isinstance(choose_prompt_style(tmp_path / "a", with_template, config, "chat-template"), ChatTemplate)

    without = checkpoint(tmp_path / "b", None)
    assert isinstance(choose_prompt_style(tmp_path / "b", without, config), prompts.Llama3)
    plain = Config(n_layer=1, n_embd=8, n_head=2)
    assert type(choose_prompt_style(tmp_path / "b", without, plain)) is Default
    assert type(choose_prompt_style(tmp_path / "b", without, None)) is Default
    plain.name = "Llama-2-7b-chat-hf"
    assert isinstance(choose_prompt_style(tmp_path / "b", without, plain), prompts.Llama2)
    with pytest.raises(UserError, match="has no chat template"):
        choose_prompt_style(tmp_path / "b", without, plain, "chat-template")


# Token ids


@pytest.mark.parametrize("template_writes_bos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_a_template_decides_about_bos(tmp_path: Path, template_writes_bos: bool, bos: bool) -> None:
    tokenizer = checkpoint(tmp_path, ("{{ bos_token }}" if template_writes_bos else "") + CHATML, bos=bos)
    style = choose_prompt_style(tmp_path, tokenizer, None)
    ids = encode_prompt(tokenizer, style, "Q")
    assert ids.count(tokenizer.token_to_id("<s>")) == template_writes_bos
    special = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>")]
    assert [index for index in ids if index in special] == special


@pytest.mark.parametrize("prompt", ["Q", "<s>Q"])
def test_named_styles_get_one_bos(tmp_path: Path, prompt: str) -> None:
    tokenizer = checkpoint(tmp_path, None, bos=True)
    for name in ("raw", "alpaca", "chatml"):
        ids = encode_prompt(tokenizer, PromptStyle.from_name(name), prompt)
        assert ids[0] == tokenizer.bos_id
    assert encode_prompt(tokenizer, Default(), prompt).count(tokenizer.token_to_id("<s>")) == 1


def test_empty_prompt(tmp_path: Path) -> None:
    tokenizer = checkpoint(tmp_path, None)
    assert encode_prompt(tokenizer, Default(), "") == [tokenizer.bos_id]
    bare = Tokenizer(write_folder(tmp_path / "bare", byte_level()))
    with pytest.raises(UserError, match="the prompt is empty"):
        encode_prompt(bare, Default(), "")


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "qwen3", "deepseek_v3"])
def test_real_templates_give_the_ids_of_transformers(name: str) -> None:
    tokenizer, theirs = our_tokenizer(name), reference_tokenizer(name)
    style = choose_prompt_style(tokenizer_dir(name), tokenizer, None)
    for messages in (CONVERSATION, [{"role": "system", "content": "Be nice."}, *CONVERSATION]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(tokenizer, style, messages) == expected
    request = [{"role": "system", "content": "S"}, {"role": "user", "content": "né😀"}]
    expected = theirs.apply_chat_template(request, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(tokenizer, style, "né😀", sys_prompt="S") == expected


def test_package_does_not_import_transformers() -> None:
    code = "import sys, litgpt.prompts, litgpt.tokenizer; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
