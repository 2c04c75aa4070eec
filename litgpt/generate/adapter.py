# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt generate_adapter`.

Importing this module does not import torch, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path

from litgpt.generate.types import SamplingParams
from litgpt.quantize import Quantization


def main(
    checkpoint_dir: Path,
    prompt: str = "What food do llamas eat?",
    input: str = "",
    sys_prompt: str | None = None,
    adapter_path: Path = Path("out/finetune/adapter/final/lit_model.pth.adapter"),
    quantize: Quantization | None = None,
    max_new_tokens: int = 100,
    top_k: int | None = 50,
    top_p: float = 1.0,
    temperature: float = 0.8,
    precision: str | None = None,
    *,
    prompt_style: str | None = None,
    device: str | None = None,
    seed: int | None = 1234,
) -> None:
    """Answer a request with a model and what `litgpt finetune_adapter` has learnt.

    Args:
        checkpoint_dir: The checkpoint that was finetuned: a folder, a .gguf file or the id of a repository.
        prompt: The request.
        input: Further text that belongs to the request.
        sys_prompt: The system prompt, for models that take one.
        adapter_path: What was learnt: a file `lit_model.pth.adapter`, or the folder with it.
        quantize: Hold the weights in 4 or 8 bits: bnb.nf4, bnb.fp4 (-dq: their scales in 8 bits) or bnb.int8, which the
            package bitsandbytes brings, or torchao.int8. Less memory; the answers differ a little.
        max_new_tokens: The longest answer, in tokens.
        top_k: Choose among this many of the likeliest tokens only; 0 or null: among all.
        top_p: Choose among the smallest set of likeliest tokens that has at least this probability. 0 always takes
            the likeliest token, 1 chooses among all. Applied after top_k and temperature.
        temperature: How random the choice is; 0 always takes the likeliest token.
        precision: bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true. Default: bf16-true where the hardware computes
            in it, else 32-true.
        prompt_style: The prompt format, by name; raw turns formatting off. Default: the one of the training.
        device: cpu, cuda, cuda:N or mps. Default: the fastest there is.
        seed: The seed of the random choices; null: another one each time.
    """
    from litgpt.generate.command import run

    run(
        checkpoint_dir,
        prompt,
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        input=input,
        sys_prompt=sys_prompt,
        adapter=adapter_path,
        quantize=quantize,
        precision=precision,
        prompt_style=prompt_style,
        device=device,
    )
