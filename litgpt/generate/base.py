# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt generate`, and generation from tensors of token ids.

Importing this module does not import torch, so that `litgpt generate --help` answers at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt.errors import UserError
from litgpt.generate.types import SamplingParams
from litgpt.quantize import Quantization

if TYPE_CHECKING:
    import torch

    from litgpt.generate.engine import Stream
    from litgpt.model import GPT


def main(
    checkpoint_dir: Path,
    prompt: str = "What food do llamas eat?",
    *,
    sys_prompt: str | None = None,
    num_samples: int = 1,
    max_new_tokens: int = 50,
    top_k: int | None = 50,
    top_p: float = 1.0,
    temperature: float = 0.8,
    quantize: Quantization | None = None,
    precision: str | None = None,
    compile: bool = False,
    prompt_style: str | None = None,
    device: str | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] | str | None = None,
    seed: int | None = 1234,
    kv_cache: str = "dense",
    speculate: str | None = None,
    adapter: Path | None = None,
) -> None:
    """Continue a prompt with a model. The continuation goes to standard output, rates to standard error.

    Args:
        checkpoint_dir: A folder (Hugging Face, LitGPT or finetuned), a .gguf file, or the id of a repository.
        prompt: The text to continue, or the question to answer.
        sys_prompt: The system prompt, for models that take one.
        num_samples: How many continuations to generate.
        max_new_tokens: The longest continuation, in tokens.
        top_k: Choose among this many of the likeliest tokens only; 0 or null: among all.
        top_p: Choose among the smallest set of likeliest tokens that has at least this probability. 0 always takes
            the likeliest token, 1 chooses among all. Applied after top_k and temperature.
        temperature: How random the choice is; 0 always takes the likeliest token.
        quantize: Hold the weights in 4 or 8 bits: bnb.nf4, bnb.fp4 (-dq: their scales in 8 bits) or bnb.int8, which the
            package bitsandbytes brings, or torchao.int8. Less memory; the answers differ a little.
        precision: bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true. Default: bf16-true where the hardware computes
            in it, else 32-true.
        compile: Compile the decode step: slower to start, faster afterwards.
        prompt_style: The prompt format, by name; raw turns formatting off. Default: what the checkpoint says.
        device: cpu, cuda, cuda:N or mps. Default: the fastest there is.
        min_p: Choose only among tokens with at least this fraction of the likeliest one's probability.
        repetition_penalty: Above 1, tokens that have already appeared become less likely.
        stop: A text, or a list of texts, that ends the continuation; it is not shown.
        seed: The seed of the random choices, counting up over the samples; null: another one each time.
        kv_cache: The kind of the KV cache: dense, which is exact for every model; window:N, h2o:N, snap:N or tova:N,
            which keep N tokens in layers with global attention; sinks:S+N, which keeps the first S and the last N and
            goes on past the model's context; int8, int4 or offload, which keep all in 8 or 4 bits or in the memory of
            the CPU. Both with a comma: h2o:1024,int8.
        speculate: lookup, or lookup:N: draft up to N tokens by looking for the last ones earlier in the text, and check
            them in one step. Faster where the answer repeats the prompt; the choice of tokens is as without.
        adapter: What finetuning learnt from this checkpoint, to put on top: a folder that finetuning wrote, the .lora,
            .adapter or .adapter_v2 file in it, or a folder of Hugging Face PEFT.
    """
    from litgpt.generate.command import run
    from litgpt.generate.types import as_stop_strings

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=as_stop_strings(stop),
    )
    run(
        checkpoint_dir,
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
        speculate=speculate,
        adapter=adapter,
    )


def generate(
    model: GPT,
    prompt: torch.Tensor,
    max_returned_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    eos_id: int | None = None,
    include_prompt: bool = True,
) -> torch.Tensor:
    """Continue one prompt.

    Args:
        model: the model to use.
        prompt: token ids, `(T,)`.
        max_returned_tokens: the longest result, prompt included.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: choose among this many of the likeliest tokens; None: all.
        top_p: choose among the smallest set of likeliest tokens with at least this probability.
        eos_id: token that ends the result; it is kept.
        include_prompt: begin the result with the prompt.

    Returns:
        Token ids, `(T',)`.

    Raises:
        UserError: no room for a new token, a prompt longer than the context, or a setting outside its range.
    """
    import torch

    pieces = generate_fn(
        model,
        prompt,
        max_returned_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=() if eos_id is None else ([eos_id],),
        include_prompt=include_prompt,
        include_eos=True,
    )
    return torch.cat([prompt.new_empty(0), *pieces])


def generate_fn(
    model: GPT,
    prompt: torch.Tensor,
    max_returned_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_tokens: tuple[list[int], ...] = (),
    include_prompt: bool,
    include_eos: bool,
) -> Iterator[torch.Tensor]:
    """Continue one prompt and yield the tokens, each as `(1,)`, as soon as they cannot be part of a stop sequence.

    Args:
        model: the model to use.
        prompt: token ids, `(T,)`.
        max_returned_tokens: the longest sequence, prompt included; the model's context ends it too.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: choose among this many of the likeliest tokens; None: all.
        top_p: choose among the smallest set of likeliest tokens with at least this probability.
        stop_tokens: sequences of token ids that end the generation.
        include_prompt: yield the prompt first, as one tensor.
        include_eos: yield the stop sequence too.

    Raises:
        UserError: no room for a new token, a prompt longer than the context, or a setting outside its range.
    """
    import torch

    sample_args = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    stream = _token_stream(model, prompt[None], max_returned_tokens, [sample_args], stop_tokens, include_eos)
    if include_prompt:
        yield prompt
    with stream:
        for event in stream:
            yield torch.tensor([event.token_id], device=prompt.device)


def batched_generate_fn(
    model: GPT,
    prompts: torch.Tensor,
    max_returned_tokens: int,
    *,
    sample_args: list[dict[str, Any]] | dict[str, Any],
    stop_tokens: tuple[list[int], ...] = (),
    include_prompt: bool,
    include_eos: bool,
) -> Iterator[list[torch.Tensor | None]]:
    """Continue prompts of one length together and yield one token a prompt, each as `(1,)`.

    A prompt that has ended gives None; the generation is over when all have.

    Args:
        model: the model to use.
        prompts: token ids, `(B, T)`.
        max_returned_tokens: the longest sequence, prompt included; the model's context ends it too.
        sample_args: `temperature`, `top_k` and `top_p`, for all prompts or for each.
        stop_tokens: sequences of token ids that end a prompt's generation.
        include_prompt: yield the tokens of the prompts first.
        include_eos: yield the stop sequences too.

    Raises:
        UserError: no room for a new token, a prompt longer than the context, or a setting outside its range.
    """
    import torch

    prompts = prompts[None] if prompts.ndim == 1 else prompts
    args = [sample_args] * len(prompts) if isinstance(sample_args, dict) else sample_args
    stream = _token_stream(model, prompts, max_returned_tokens, args, stop_tokens, include_eos)
    if include_prompt:
        for column in prompts.unbind(1):
            yield list(column[:, None])
    waiting: list[deque[torch.Tensor]] = [deque() for _ in prompts]
    with stream:
        for event in stream:
            waiting[event.row].append(torch.tensor([event.token_id], device=prompts.device))
            # The tokens of a step come together once every row that goes on has one
            while any(waiting) and all(queue or stream.ended(row) for row, queue in enumerate(waiting)):
                yield [queue.popleft() if queue else None for queue in waiting]


def _token_stream(
    model: GPT,
    prompts: torch.Tensor,
    max_returned_tokens: int,
    sample_args: list[dict[str, Any]],
    stop_tokens: tuple[list[int], ...],
    include_eos: bool,
) -> Stream:
    from litgpt.generate.engine import Engine

    room = max_returned_tokens - prompts.shape[1]
    if room <= 0:
        raise UserError(
            f"max_returned_tokens {max_returned_tokens} leaves no room after {prompts.shape[1]} prompt tokens"
        )
    params = [
        SamplingParams(
            max_new_tokens=room,
            stop_ids=frozenset(),
            stop_sequences=tuple(map(tuple, stop_tokens)),
            include_stop=include_eos,
            **args,
        )
        for args in sample_args
    ]
    return Engine(model).stream(list(prompts), params)


def sample(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> torch.Tensor:
    """Choose the next token, `(1,)`, from the last logits of the first row of `(B, T, V)`.

    Draws from torch's global generator. See `generate` for the settings.

    Raises:
        UserError: a setting outside its range.
        ValueError: the logits contain NaN.
    """
    from litgpt.generate.sampling import draw

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    token, number = draw(logits[0, -1], temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    if bool(number.isnan()):
        raise ValueError("logits contain NaN")
    return token.view(1)


def next_token(
    model: GPT,
    input_pos: torch.Tensor,
    x: torch.Tensor,
    input_pos_maxp1: int | None = None,
    **sample_kwargs: Any,
) -> torch.Tensor:
    """Feed `x`, `(B, T)`, at the positions `input_pos` through a model with a cache set, and choose the next token.

    Args:
        model: a model after `set_kv_cache`.
        input_pos: positions of `x`, `(T,)`.
        x: token ids.
        input_pos_maxp1: the largest position plus one, if known.
        sample_kwargs: settings of `sample`.

    Returns:
        A token id, `(1,)`, int64.
    """
    return sample(model(x, input_pos, input_pos_maxp1=input_pos_maxp1), **sample_kwargs)
