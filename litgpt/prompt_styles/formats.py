# Licensed under the Apache License 2.0, see the LICENSE file.

"""Named prompt styles: the formats that published models were trained with, as data.

Import the classes from `litgpt.prompts`.
"""

from __future__ import annotations

from json import dumps
from typing import Any

from litgpt.prompt_styles.base import Prompt, Turns

__all__ = [
    "FLAN",
    "Alpaca",
    "ChatML",
    "CodeLlama",
    "Falcon",
    "Falcon3",
    "FreeWilly2",
    "Gemma",
    "Llama2",
    "Llama2FunctionCalling",
    "Llama3",
    "Longform",
    "OLMo",
    "Phi1",
    "Phi2",
    "Phi3",
    "Phi4",
    "Phi4Mini",
    "Phi4MiniReasoning",
    "Phi4Reasoning",
    "Platypus",
    "QwQ",
    "Qwen2_5",
    "Qwen2_5_Math",
    "Qwen3",
    "R1Base",
    "Salamandra",
    "SmolLM2",
    "StableCode",
    "StableLMAlpha",
    "StableLMZephyr",
    "TinyLlama",
]

_INSTRUCTION = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
_INSTRUCTION_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


class Alpaca(Turns, name="alpaca"):
    """Stanford Alpaca; a field `input` of the sample is written below the instruction."""

    system = _INSTRUCTION
    system_turn = "{system}"
    user_turn = "### Instruction:\n{prompt}\n\n"
    reply = "### Response:\n"
    end = "\n\n"

    def apply(self, prompt: Prompt, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        """Write the prompt; `input` is the further context of the instruction."""
        if kwargs.get("input") and isinstance(prompt, str):
            sys_prompt = sys_prompt or _INSTRUCTION_WITH_INPUT
            prompt = f"{prompt}\n\n### Input:\n{kwargs['input']}"
        return super().apply(prompt, sys_prompt=sys_prompt)


class FLAN(Turns, name="flan"):
    """Alpaca's format without an input."""

    system = _INSTRUCTION
    system_turn = "{system}"
    user_turn, reply, end = Alpaca.user_turn, Alpaca.reply, Alpaca.end


class Longform(FLAN, name="longform"):
    """LongForm: an instruction that carries its own context."""

    system = _INSTRUCTION_WITH_INPUT


class StableLMAlpha(Turns, name="stablelm-alpha", models="stablelm-tuned-alpha"):
    """StableLM-Tuned-Alpha."""

    system = (
        "# StableLM Tuned (Alpha version)\n"
        "- StableLM is a helpful and harmless open-source AI language model developed by StabilityAI.\n"
        "- StableLM is excited to be able to help the user, but will refuse to do anything that could be "
        "considered harmful to the user.\n"
        "- StableLM is more than just an information source, StableLM is also able to write poetry, short "
        "stories, and make jokes.\n"
        "- StableLM will refuse to participate in anything that could harm a human."
    )
    system_turn = "<|SYSTEM|>{system}"
    user_turn = "<|USER|>{prompt}"
    reply = "<|ASSISTANT|>"
    end = ""
    stop = (("<|SYSTEM|>",), ("<|ASSISTANT|>",), ("<|USER|>",))


class StableLMZephyr(Turns, name="stablelm-zephyr", models="stablelm-zephyr-3b"):
    """StableLM-Zephyr."""

    user_turn = "<|user|>\n{prompt}<|endoftext|>\n"
    reply = "<|assistant|>\n"
    end = "<|endoftext|>\n"


class Falcon(Turns, name="falcon", models="falcon.*-instruct"):
    """Falcon-Instruct, which seldom writes its eos: a new line of the user ends an answer."""

    user_turn = "{prompt}\n"
    reply = "Answer:"
    stop = (("User", ":"), (193, "User"))  # 193 is a line break


class Falcon3(StableLMZephyr, name="falcon3", models="Falcon3.*-Instruct"):
    """Falcon3-Instruct."""

    stop = (("<|endoftext|>",),)


class Llama2(Turns, name="llama2", models="Llama-2.*-chat"):
    """Llama-2-Chat."""

    system = (
        "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while "
        "being safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, "
        "or illegal content. Please ensure that your responses are socially unbiased and positive in nature.\n"
        "\n"
        "If a question does not make any sense, or is not factually coherent, explain why instead of answering "
        "something not correct. If you don't know the answer to a question, please don't share false "
        "information."
    )
    system_turn = "<<SYS>>\n{system}\n<</SYS>>\n\n "
    user_turn = "[INST] {system}{prompt} [/INST] "
    end = " </s><s>"


_SEARCH_BING = {
    "function": "search_bing",
    "description": (
        "Search the web for content on Bing. This allows users to search online/the internet/the web for content."
    ),
    "arguments": [{"name": "query", "type": "string", "description": "The search query string"}],
}


class Llama2FunctionCalling(Turns, name="llama2-function-calling", models="Llama-2-7b-chat-hf-function-calling-v2"):
    """Llama-2-Chat with function calling; the listed function is an example, its braces are doubled."""

    start = "<FUNCTIONS>" + dumps(_SEARCH_BING).replace("{", "{{").replace("}", "}}") + "</FUNCTIONS>\n\n"
    system = (
        "You are a helpful, respectful and honest assistant. Always answer as helpfully aspossible. Your only "
        "response should be JSON formatted functions"
    )
    system_turn = "<<SYS>>\n{system}\n<</SYS>>\n\n"
    user_turn = "[INST]{system}{prompt}[/INST]\n\n"
    end = " </s><s>"


class Llama3(Turns, name="llama3", models="Llama-3.*-Instruct|OLMo-2.*-(Instruct|SFT|DPO)"):
    """Llama-3-Instruct."""

    start = "<|begin_of_text|>"
    system = "You are a helpful assistant."
    system_turn = "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
    user_turn = "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
    reply = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    end = "<|eot_id|>"
    strip = True
    stop = (("<|eot_id|>",),)


class R1Base(Turns, name="r1", models="R1"):
    """DeepSeek-R1 and its distillations."""

    system_turn = "{system}"
    user_turn = "<｜User｜>{prompt}"
    reply = "<｜Assistant｜>"
    end = ""
    strip = True
    stop = (("<｜end▁of▁sentence｜>",),)


class FreeWilly2(Turns, name="freewilly2", models="FreeWilly2"):
    """FreeWilly2 (StableBeluga2)."""

    system = "This is a system prompt, please behave and help the user."
    system_turn = "### System:\n{system}\n\n"
    user_turn = "### User:\n{prompt}\n\n"
    reply = "### Assistant:\n"
    end = "\n\n"


class Platypus(Turns, name="platypus", models="Platypus"):
    """Platypus."""

    user_turn = "### Instruction:\n\n{prompt}\n\n"
    reply = "### Response:\n"
    end = "\n\n"


class StableCode(Turns, name="stablecode", models="stablecode-instruct"):
    """StableCode-Instruct."""

    user_turn = "###Instruction\n{prompt}"
    reply = "###Response\n"


class CodeLlama(Turns, name="codellama", models="CodeLlama|Mi[sx]tral.*Instruct"):
    """CodeLlama-Instruct, and Mistral and Mixtral Instruct without a system prompt."""

    system_turn = "<<SYS>>\n{system}\n<</SYS>>\n\n"
    user_turn = "[INST] {system}{prompt} [/INST]"
    end = "</s>"


class Phi1(Turns, name="phi-1", models="phi-1"):
    """phi-1 and phi-1.5, which seldom write their eos."""

    user_turn = "{prompt}\n\n"
    reply = "Answer:"
    end = "\n\n"
    stop = (("Answer", ":"), (198, "Answer", ":"))  # 198 is a line break


class Phi2(Turns, name="phi-2", models="phi-2"):
    """phi-2."""

    user_turn = "Instruct: {prompt}\n"
    reply = "Output:"


class Phi3(Turns, name="phi-3", models="Phi-3"):
    """Phi-3-Instruct."""

    system = "You are a helpful assistant."
    system_turn = "<|system|>\n{system}<|end|>\n"
    user_turn = "<|user|>\n{prompt}<|end|>\n"
    reply = "<|assistant|>\n"
    end = "<|end|>\n"
    stop = (("<|end|>",),)


class Phi4(Turns, name="phi-4", models="phi-4"):
    """phi-4."""

    system_turn = "<|im_start|>system<|im_sep|>{system}<|im_end|>"
    user_turn = "<|im_start|>user<|im_sep|>{prompt}<|im_end|>"
    reply = "<|im_start|>assistant<|im_sep|>"
    end = "<|im_end|>"
    stop = (("<|im_end|>",),)


class Phi4Reasoning(Phi4, name="phi-4-reasoning", models="Phi-4-reasoning"):
    """Phi-4-reasoning."""

    system = (
        "You are Phi, a language model trained by Microsoft to help users. Your role as an assistant involves "
        "thoroughly exploring questions through a systematic thinking process before providing the final "
        "precise and accurate solutions. This requires engaging in a comprehensive cycle of analysis, "
        "summarizing, exploration, reassessment, reflection, backtracing, and iteration to develop "
        "well-considered thinking process. Please structure your response into two main sections: Thought and "
        "Solution using the specified format: <think> {Thought section} </think> {Solution section}. In the "
        "Thought section, detail your reasoning process in steps. Each step should include detailed "
        "considerations such as analysing questions, summarizing relevant findings, brainstorming new ideas, "
        "verifying the accuracy of the current steps, refining any errors, and revisiting previous steps. In "
        "the Solution section, based on various attempts, explorations, and reflections from the Thought "
        "section, systematically present the final solution that you deem correct. The Solution section should "
        "be logical, accurate, and concise and detail necessary steps needed to reach the conclusion. Now, try "
        "to solve the following question through the above guidelines:"
    )


class Phi4Mini(Turns, name="phi-4-mini", models="Phi-4-mini"):
    """Phi-4-mini-instruct."""

    system_turn = "<|system|>{system}<|end|>"
    user_turn = "<|user|>{prompt}<|end|>"
    reply = "<|assistant|>"
    end = "<|end|>"
    stop = (("<|end|>",),)


class Phi4MiniReasoning(Phi4Mini, name="phi-4-mini-reasoning", models="Phi-4-mini-reasoning"):
    """Phi-4-mini-reasoning."""

    system = "Your name is Phi, an AI math expert developed by Microsoft."


class TinyLlama(Turns, name="tinyllama", models="tiny-llama.*chat"):
    """TinyLlama-Chat."""

    system = "You are a friendly chatbot who always gives helpful, detailed, and polite answers."
    system_turn = "<|system|>\n{system}</s>\n"
    user_turn = "<|user|>\n{prompt}</s>\n"
    reply = "<|assistant|>\n"
    end = "</s>\n"


class Gemma(Turns, name="gemma", models="(Code)?Gemma.*-it"):
    """Gemma-it; its user turn takes a system prompt only through the chat template."""

    user_turn = "<start_of_turn>user\n{prompt}<end_of_turn>\n"
    reply = "<start_of_turn>model\n"
    end = "<end_of_turn>\n"
    stop = (("<end_of_turn>",),)


class OLMo(Turns, name="olmo", models="OLMo.*-hf"):
    """OLMo-Instruct."""

    start = "<|endoftext|>"
    user_turn = "<|user|>\n{prompt}\n"
    reply = "<|assistant|>\n"
    end = "<|endoftext|>\n"


class ChatML(Turns, name="chatml"):
    """ChatML.

    Args:
        system_message: default system prompt.
    """

    system_turn = "<|im_start|>system\n{system}<|im_end|>\n"
    user_turn = "<|im_start|>user\n{prompt}<|im_end|>\n"
    reply = "<|im_start|>assistant\n"
    end = "<|im_end|>\n"
    stop = (("<|im_end|>",),)

    def __init__(self, system_message: str | None = None) -> None:
        if system_message is not None:
            self.system = system_message

    @property
    def system_message(self) -> str | None:
        """The default system prompt."""
        return self.system

    def init_args(self) -> dict[str, Any]:
        """The system prompt, when it is not the class's own."""
        return {} if self.system == type(self).system else {"system_message": self.system}


class Qwen2_5(ChatML, name="qwen2.5", models=r"Qwen2\.5-"):
    """Qwen2.5-Instruct."""

    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Qwen2_5_Math(ChatML, name="qwen2.5-math", models=r"Qwen2\.5-Math-"):
    """Qwen2.5-Math-Instruct."""

    system = "Please reason step by step, and put your final answer within \\boxed{}."


class QwQ(ChatML, name="qwq", models="QwQ-"):
    """QwQ."""

    system = (
        "You are a helpful and harmless assistant. You are Qwen developed by Alibaba. You should think step-by-step."
    )


class Qwen3(ChatML, name="qwen3", models="Qwen3-"):
    """Qwen3, without a system prompt of its own."""


class SmolLM2(ChatML, name="smollm2", models="SmolLM2.*-Instruct"):
    """SmolLM2-Instruct."""

    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Salamandra(ChatML, name="salamandra", models="salamandra-.*-instruct"):
    """Salamandra-Instruct."""

    system = (
        "I am Salamandra, an AI language model developed at the Barcelona Supercomputing Centre (BSC) by the "
        "Language Technologies Unit. My knowledge base was last updated on August 2023. Today Date: 2024-09-30\n"
        "Soy Salamandra, un modelo lingüístico de IA desarrollado en el Barcelona Supercomputing Centre (BSC) "
        "por la Language Technologies Unit. Mi base de conocimientos se actualizó por última vez en agosto de "
        "2023.\n"
        "Soc Salamandra, un model de llenguatge d'IA desenvolupat al Barcelona Supercomputing Centre (BSC) per "
        "la Language Technologies Unit."
    )
