# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt generate_speculatively`; the method itself is in `litgpt.generate.speculative`.

Importing this module does not import torch, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path

from litgpt.quantize import Quantization


def main(
    draft_model_checkpoint_dir: Path,
    target_model_checkpoint_dir: Path,
    prompt: str = "What food do llamas eat?",
    *,
    sys_prompt: str | None = None,
    num_samples: int = 1,
    max_new_tokens: int = 50,
    speculative_k: int = 3,
    top_k: int | None = 50,
    top_p: float = 1.0,
    temperature: float = 0.8,
    quantize: Quantization | None = None,
    precision: str | None = None,
    compile: bool = False,
    prompt_style: str | None = None,
    device: str | None = None,
    stop: list[str] | str | None = None,
    seed: int | None = 1234,
    kv_cache: str = "dense",
) -> None:
    """Continue a prompt with a large model, with the help of a small one that drafts tokens for it to check.

    The continuation is the large model's: the same with temperature 0, and otherwise as likely. It goes to standard
    output, rates and the share of accepted drafts to standard error.

    Args:
        draft_model_checkpoint_dir: The small model: a folder, a .gguf file or the id of a repository.
        target_model_checkpoint_dir: The large model, with the same vocabulary.
        prompt: The text to continue, or the question to answer.
        sys_prompt: The system prompt, for models that take one.
        num_samples: How many continuations to generate.
        max_new_tokens: The longest continuation, in tokens.
        speculative_k: How many tokens the small model drafts at a time.
        top_k: Choose among this many of the likeliest tokens only; 0 or null: among all.
        top_p: Choose among the smallest set of likeliest tokens that has at least this probability. 0 always takes
            the likeliest token, 1 chooses among all. Applied after top_k and temperature.
        temperature: How random the choice is; 0 always takes the likeliest token.
        quantize: Hold the weights in 4 or 8 bits: bnb.nf4, bnb.fp4 (-dq: their scales in 8 bits) or bnb.int8, which the
            package bitsandbytes brings, or torchao.int8. Less memory; the answers differ a little.
        precision: bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true. Default: bf16-true where the hardware computes
            in it, else 32-true.
        compile: Compile the decode step of the small model: slower to start, faster afterwards.
        prompt_style: The prompt format, by name; raw turns formatting off. Default: what the large model's files say.
        device: cpu, cuda, cuda:N or mps. Default: the fastest there is.
        stop: A text, or a list of texts, that ends the continuation; it is not shown.
        seed: The seed of the random choices, counting up over the samples; null: another one each time.
        kv_cache: The kind of the large model's KV cache; one that evicts tokens does not go with drafts.
    """
    from litgpt.generate.command import run
    from litgpt.generate.types import SamplingParams, as_stop_strings

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=as_stop_strings(stop),
    )
    run(
        target_model_checkpoint_dir,
        prompt,
        params,
        sys_prompt=sys_prompt,
        prompt_style=prompt_style,
        num_samples=num_samples,
        quantize=quantize,
        precision=precision,
        device=device,
        kv_cache=kv_cache,
        compile=compile,
        draft_dir=draft_model_checkpoint_dir,
        draft_k=speculative_k,
    )
