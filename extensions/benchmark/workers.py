# Licensed under the Apache License 2.0, see the LICENSE file.

"""One engine under test, in a process of its own: loads a model once, then measures each time a line arrives on stdin.

Run by `speed.py` with the interpreter of the engine's own environment; imports nothing but torch and that engine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

Measure = Callable[[torch.Tensor, int], "tuple[float, float, list[int]]"]


def timed_greedy(
    prompt: torch.Tensor,
    n_new: int,
    prefill: Callable[[torch.Tensor], torch.Tensor],
    decode: Callable[[torch.Tensor, int], torch.Tensor],
) -> tuple[float, float, list[int]]:
    """Prefill `prompt (1, T)`, then decode greedily; both callables return logits `(1, n, V)`.

    Returns:
        Seconds of the prefill, seconds of `n_new - 1` decode steps, and the tokens.
    """
    begin = time.perf_counter()
    token = prefill(prompt)[:, -1].argmax(-1, keepdim=True)
    middle = time.perf_counter()
    tokens = [int(token)]
    for i in range(n_new - 1):
        token = decode(token, prompt.size(1) + i)[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
    return middle - begin, time.perf_counter() - middle, tokens


def ours(path: str, compile: bool = False) -> Measure:
    """This package: a cache a request, logits of the last token only."""
    from litgpt.generate.compiled import CompiledDecode
    from litgpt.kvcache import KVCache
    from litgpt.model import GPT

    model = GPT.from_checkpoint(path, dtype=torch.float32)
    compiled = CompiledDecode(model) if compile else None

    def measure(prompt: torch.Tensor, n_new: int) -> tuple[float, float, list[int]]:
        length = prompt.size(1) + n_new
        if compile:  # as `litgpt generate` does: few sizes, few compilations
            length = 1 << (length - 1).bit_length()
        cache = KVCache.from_config(model.config, max_length=length, dtype=torch.float32)

        def forward(idx: torch.Tensor) -> torch.Tensor:
            return model(idx, cache=cache, last_only=True)

        def decode(token: torch.Tensor, position: int) -> torch.Tensor:
            return forward(token) if compiled is None else compiled(token, cache, cache.plan(1))

        return timed_greedy(prompt, n_new, forward, decode)

    return measure


def litgpt_0_5_13(path: str) -> Measure:
    """LitGPT as released, from a folder with `lit_model.pth`, called as its own generation code calls it."""
    from litgpt import GPT, Config

    config = Config.from_file(f"{path}/model_config.yaml")
    model = GPT(config)
    model.load_state_dict(torch.load(f"{path}/lit_model.pth", mmap=True, weights_only=True))
    model = model.to(torch.float32).eval()

    def measure(prompt: torch.Tensor, n_new: int) -> tuple[float, float, list[int]]:
        model.max_seq_length = prompt.size(1) + n_new
        model.clear_kv_cache()
        model.set_kv_cache(batch_size=1, device=torch.device("cpu"))
        length = prompt.size(1)

        def prefill(idx: torch.Tensor) -> torch.Tensor:
            return model(idx, torch.arange(length), input_pos_maxp1=length)

        def decode(token: torch.Tensor, position: int) -> torch.Tensor:
            return model(token, torch.tensor([position]), input_pos_maxp1=position + 1)

        return timed_greedy(prompt, n_new, prefill, decode)

    return measure


def transformers(path: str) -> Measure:
    """Transformers, its default attention and cache, without the overhead of its `generate`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def measure(prompt: torch.Tensor, n_new: int) -> tuple[float, float, list[int]]:
        cache = DynamicCache(config=model.config)

        def forward(idx: torch.Tensor) -> torch.Tensor:
            return model(idx, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

        return timed_greedy(prompt, n_new, forward, lambda token, position: forward(token))

    return measure


ENGINES: dict[str, Callable[[str], Measure]] = {
    "ours": ours,
    "ours-compiled": partial(ours, compile=True),
    "litgpt-0.5.13": litgpt_0_5_13,
    "transformers": transformers,
}


def main() -> None:
    """`workers.py ENGINE PATH`: answer each `PROMPT_LENGTH NEW_TOKENS` line with a line of JSON."""
    engine, path = sys.argv[1:3]
    torch.set_grad_enabled(False)
    begin = time.perf_counter()
    measure = ENGINES[engine](path)
    answer = {"engine": engine, "load_s": time.perf_counter() - begin, "torch": torch.__version__}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        length, n_new = (int(word) for word in line.split())
        prompt = torch.randint(0, 40_000, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            prefill_s, decode_s, tokens = measure(prompt, n_new)
        result = {"prefill_s": prefill_s, "decode_s": decode_s, "tokens": tokens}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
